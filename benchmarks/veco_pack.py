"""Pack the data of benchmarks/veco_study.py into one folder.

    python benchmarks/veco_pack.py DATA -o PACK [--pairs 36000] [--german 90000]
    python benchmarks/veco_pack.py --tiny

DATA has bitext/en-XX.tsv.xz (English, XX, a tag for the source), tatoeba/, gold_alignments/,
xtreme/udpos, xtreme/panx and translation/multi30k.

PACK/text is the text for pre-training, with the same number of pairs per language, sentences before
strings of software; PACK/pairs is the training text of Multi30k, English and German, both prepared
with --tokenizer; PACK/multi30k has its validation and test sentences. Other tests are shortened to
the sentences that the study uses. `--tiny` packs a few sentences of the demo.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from metaxlm_pack import (
    SEED,
    choose_pairs,
    find_bitexts,
    pack_tests,
)
from tiny_data import LANGUAGES as TINY_LANGUAGES
from tiny_data import write_data

# The languages with gold alignments, and Chinese. With English there are eight language tokens,
# so that the size of the vocabulary stays a multiple of eight, as fast matrix products require.
LANGUAGES = "de,fr,ro,cs,hi,ja,zh"
SRC, TGT = "en", "de"
TESTS = ("val", "test_2016_flickr", "test_2017_flickr")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of public data")
    parser.add_argument("-o", "--out", type=Path, default=Path("veco-pack"))
    parser.add_argument("--tokenizer", default="calque-mini", help="tokenizer of all texts")
    parser.add_argument(
        "--languages", default=LANGUAGES, help="languages of pre-training besides English"
    )
    parser.add_argument("--pairs", type=int, default=36_000, help="per language")
    parser.add_argument("--german", type=int, default=90_000, help="German pairs")
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
    about: dict[str, object] = {"languages": options.languages.split(",")}
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        about |= pack_text(options, Path(scratch))
    about |= pack_multi30k(options) | pack_tests(options, options.languages.split(","))
    (options.out / "pack.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    return None


def pack_tiny(folder: Path) -> Path:
    """Pack the tiny data, and return the folder of the pack."""
    data, out = folder / "data", folder / "pack"
    options = ["--tokenizer", str(write_data(data)), "--languages", ",".join(TINY_LANGUAGES)]
    main([str(data), "-o", str(out), *options, "--workers", "1"])
    return out


def pack_text(options: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Choose and prepare the pairs of every language."""
    from calque.growth.grow import open_tokenizer
    from calque.io.bitext import read_bitext, write_bitext
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    generator, sources = np.random.default_rng(SEED), []
    for language, path in find_bitexts(options).items():
        max_pairs = options.german if language == TGT else options.pairs
        file = scratch / f"{SRC}-{language}.tsv"
        write_bitext(file, choose_pairs(list(read_bitext(path)), max_pairs, generator))
        sources.append(TextSource((file,), (SRC, language)))
    prepared = prepare_corpora(
        sources,
        open_tokenizer(options.tokenizer),
        options.out / "text",
        rules=CleaningRules(max_chars=600),
        n_workers=options.workers,
    )
    return {
        "pairs": sum(corpus.n_examples for corpus in prepared),
        "tokens": [sum(corpus.n_tokens[side] for corpus in prepared) for side in (0, 1)],
    }


def pack_multi30k(options: argparse.Namespace) -> dict[str, object]:
    """Prepare the training captions, and copy those for validation and testing."""
    from calque.evaluation.tasks.machine_translation import find_language_files, read_test_set
    from calque.growth.grow import open_tokenizer
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    folder = options.data / "translation" / "multi30k"
    files = {name: find_language_files(folder, name) for name in ("train", *TESTS)}
    source = TextSource((files["train"][SRC], files["train"][TGT]), (SRC, TGT))
    (corpus,) = prepare_corpora(
        [source],
        open_tokenizer(options.tokenizer),
        options.out / "pairs",
        rules=CleaningRules(),
        n_workers=options.workers,
    )
    out = options.out / "multi30k"
    out.mkdir(exist_ok=True)
    counts = {}
    for name in TESTS:
        sides = read_test_set(files[name][SRC], files[name][TGT])
        for language, lines in zip((SRC, TGT), sides, strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (out / f"{name}.{language}").write_text(text, encoding="utf-8")
            counts[name] = len(lines)
    return {"multi30k": {"train": corpus.n_examples, "tokens": list(corpus.n_tokens), **counts}}


if __name__ == "__main__":
    main()
