"""Pack the data of benchmarks/mono_study.py into one folder.

    python benchmarks/mono_pack.py DATA -o PACK
    python benchmarks/mono_pack.py --tiny

DATA has bitext/en-XX.tsv.xz (English, XX, a tag for the source), tatoeba/, gold_alignments/, ud/,
xtreme/ and muse/. PACK/bitext is the text of the starts, PACK/pairs that of the methods: sentences
alone, and equally many in most languages. PACK/linked are sentence pairs with word links by
fast_align, PACK/noisy pairs of strings of software, whose links are worse; PACK/tests are the tests
and training sets of the tasks in the languages of the study, PACK/muse dictionaries, and
PACK/tokenizer is that of calque-mini. Japanese and Chinese links need `calque[cjk]`. `--tiny` packs
a few sentences of the demo.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from baseline_study import is_wanted
from metaxlm_pack import SEED, SOFTWARE
from tiny_data import write_data

LANGUAGES = ("de", "fr", "es", "ro", "cs", "hi", "ja", "pt", "ru", "zh", "ar", "tr", "vi", "fi")
TAGS = ("tatoeba", "bible", "joshua")  # and SOFTWARE, as in the recipe; XNLI is a test
SOFTWARE_PAIRS = 15_000  # per language; the pack must be small enough to be sent
PAIRS = 30_000  # of sentences, per language
LINKED_PAIRS = 15_000  # per language
TESTS = ("tatoeba", "gold_alignments", "ud", "udpos", "panx", "xnli", "tydiqa", "xquad")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the options and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, nargs="?", help="folder of public data")
    parser.add_argument("-o", "--out", type=Path, default=Path("mono-pack"))
    parser.add_argument("--languages", default=",".join(LANGUAGES), help="besides English")
    parser.add_argument("--linked", type=int, default=LINKED_PAIRS, help="pairs with links")
    parser.add_argument("--aligner", default="fast-align", help="that finds the links")
    parser.add_argument("--tiny", action="store_true", help="pack sentences of the demo")
    options = parser.parse_args(arguments)
    options.languages = options.languages.split(",")
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            pack_tiny(Path(folder))
    elif options.data is None:
        print("skipped: this script needs a folder DATA, or --tiny")
    else:
        pack(options)


def pack_tiny(folder: Path) -> Path:
    """Pack the tiny data, and return the folder of the pack."""
    write_data(folder / "data")
    options = ["--languages", "de,fr", "--linked", "20", "--aligner", "neural"]
    main([str(folder / "data"), "-o", str(folder / "pack"), *options])
    return folder / "pack"


def pack(options: argparse.Namespace) -> None:
    """Write what does not exist yet."""
    from calque.models.loading import find_model

    bitext, pairs = options.out / "bitext", options.out / "pairs"
    for folder in (bitext, pairs):
        folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(SEED)
    for language in options.languages:
        (path,) = (options.data / "bitext").glob(f"en-{language}.tsv*")
        sentences, software = split_lines(path)
        lines = sentences + draw(software, SOFTWARE_PAIRS, generator)
        (bitext / f"en-{language}.tsv").write_text("".join(lines), encoding="utf-8")
        kept = draw(sentences, PAIRS, np.random.default_rng(SEED))
        (pairs / f"en-{language}.tsv").write_text("".join(kept), encoding="utf-8")
    copy(find_model().glob("*token*.json"), options.out / "tokenizer")
    link(options, "linked", is_software=False)
    link(options, "noisy", is_software=True)
    copy_tests(options)


def read_lines(path: Path) -> list[str]:
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    return [f"{line}\n" for line in text.split("\n") if line]


def split_lines(path: Path) -> tuple[list[str], list[str]]:
    """Return the lines of a bitext with sentences, and those with strings of software."""
    tagged = [(line.rstrip("\n").split("\t")[2], line) for line in read_lines(path)]
    sentences = [line for tag, line in tagged if tag in TAGS]
    return sentences, [line for tag, line in tagged if tag in SOFTWARE]


def draw(lines: list[str], n_lines: int, generator: np.random.Generator) -> list[str]:
    """Draw lines at random and keep their order."""
    chosen = generator.permutation(len(lines))[:n_lines]
    return [lines[number] for number in sorted(chosen)]


def link(options: argparse.Namespace, name: str, *, is_software: bool) -> None:
    """Choose pairs of sentences or of strings of software, and find the links of their words."""
    from calque import link_bitext

    if (options.out / name).exists():
        return
    generator = np.random.default_rng(SEED)
    with tempfile.TemporaryDirectory(dir=options.out) as scratch:
        files = []
        for language in options.languages:
            parts = split_lines(options.out / "bitext" / f"en-{language}.tsv")
            if drawn := draw(parts[is_software], options.linked, generator):
                files.append(Path(scratch) / f"en-{language}.tsv")
                files[-1].write_text("".join(drawn), encoding="utf-8")
        if files:
            linked = link_bitext(files, options.out / name, aligner=options.aligner)
            print(f"{name}: {linked}", flush=True)


def copy_tests(options: argparse.Namespace) -> None:
    """Copy the tests in the languages of the study, training sets in English, and dictionaries."""
    wanted = [*options.languages, "en"]
    for source in (options.data, options.data / "xtreme"):
        for name in TESTS:
            copy(sorted((source / name).glob("*")), options.out / "tests" / name, wanted)
    muse = (options.data / "muse").glob("??-??.*.txt")
    wanted_muse = [path for path in muse if {path.name[:2], path.name[3:5]} <= {*wanted}]
    copy(wanted_muse, options.out / "muse")
    similarity = options.data / "word_similarity"
    if similarity.exists():
        shutil.copytree(similarity, options.out / "word_similarity", dirs_exist_ok=True)


def copy(files: Iterable[Path], folder: Path, languages: Sequence[str] | None = None) -> None:
    for path in files:
        if languages is None or is_wanted(path.name, languages):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.name)


if __name__ == "__main__":
    main()
