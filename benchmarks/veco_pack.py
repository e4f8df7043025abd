"""What benchmarks/veco_study.py reads, out of public data, in one folder that is easy to carry.

    python benchmarks/veco_pack.py DATA -o PACK [--pairs 36000] [--german 90000]

DATA holds bitext/en-XX.tsv.xz (English, XX, a tag for the source), tatoeba/, gold_alignments/,
xtreme/udpos, xtreme/panx and translation/multi30k.

PACK/text is the text to pre-train on, so many pairs a language, sentences before the strings of
programs; PACK/pairs is Multi30k's training text, English and German, both prepared with
--tokenizer; PACK/multi30k are its validation and test sentences. The other tests are cut to what
the study takes of them, spread over the files.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from metaxlm_pack import SEED, choose_pairs, find_bitexts, pack_tests

# Those with gold word alignments, and Chinese. With English they are eight, and so the tokens of
# languages leave the size of the vocabulary a multiple of eight, as fast matrix products need it.
LANGUAGES = "de,fr,ro,cs,hi,ja,zh"
SRC, TGT = "en", "de"
TESTS = ("val", "test_2016_flickr", "test_2017_flickr")


def main() -> None:
    """Read the options and fill the folder part by part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="the folder of public data")
    parser.add_argument("-o", "--out", type=Path, default=Path("veco-pack"))
    parser.add_argument("--tokenizer", default="calque-mini", help="of all text")
    parser.add_argument("--languages", default=LANGUAGES, help="to pre-train on, besides English")
    parser.add_argument("--pairs", type=int, default=36_000, help="of each language")
    parser.add_argument("--german", type=int, default=90_000, help="pairs, of the language tested")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.data is None:
        return print("needs a folder DATA: skipped")
    options.out.mkdir(parents=True, exist_ok=True)
    about: dict[str, object] = {"languages": options.languages.split(",")}
    with tempfile.TemporaryDirectory(dir=options.out) as place:
        about |= pack_text(options, Path(place))
    about |= pack_multi30k(options) | pack_tests(options, options.languages.split(","))
    (options.out / "pack.json").write_text(json.dumps(about, indent=1) + "\n")
    print(json.dumps(about, indent=1))
    return None


def pack_text(options: argparse.Namespace, place: Path) -> dict[str, object]:
    """Choose pairs of every language, and prepare them."""
    from calque.growth.grow import open_tokenizer
    from calque.io.bitext import read_bitext, write_bitext
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    generator, sources = np.random.default_rng(SEED), []
    for language, path in find_bitexts(options).items():
        n_most = options.german if language == TGT else options.pairs
        file = place / f"{SRC}-{language}.tsv"
        write_bitext(file, choose_pairs(list(read_bitext(path)), n_most, generator))
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
    """Prepare the captions to learn translation from, and copy those to test it by."""
    from calque.evaluation.tasks.machine_translation import find_test_sets, read_test_set
    from calque.growth.grow import open_tokenizer
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    sets = find_test_sets(options.data / "translation" / "multi30k", SRC, TGT)
    source = TextSource(sets["train"], (SRC, TGT))
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
        for language, lines in zip((SRC, TGT), read_test_set(*sets[name]), strict=True):
            text = "".join(f"{line}\n" for line in lines)
            (out / f"{name}.{language}").write_text(text, encoding="utf-8")
            counts[name] = len(lines)
    return {"multi30k": {"train": corpus.n_examples, "tokens": list(corpus.n_tokens), **counts}}


if __name__ == "__main__":
    main()
