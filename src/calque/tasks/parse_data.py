"""Treebanks found in a folder, read and encoded for a parser."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.tasks.attachments import IGNORED, name_relation
from calque.tasks.head_task import longest_sequence
from calque.tasks.parse_examples import ParseExamples, encode_trees
from calque.tasks.prepared import remember
from calque.text.tagged import spread
from calque.text.treebanks import ParsedSentence, read_trees
from calque.types import InputError

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.tasks.task_settings import TaskSettings
    from calque.tasks.transfer import Run

ROOT = "root"
NAME = re.compile(
    r"(?P<language>[a-z]{2,3})(_[a-z0-9]+)?-ud-(?P<part>train|dev|test)[^/]*\.conllu(\.\w+)?"
)


@dataclass(frozen=True, slots=True)
class Treebanks:
    """The files of a folder by language: to learn from, to choose by, to test on."""

    train: Mapping[str, Path]
    dev: Mapping[str, Path]
    test: Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class ParsedText:
    """Sentences with their gold trees, and what a parser reads of them."""

    sentences: Sequence[ParsedSentence]
    encoded: ParseExamples


@dataclass(frozen=True, slots=True)
class ParseData:
    """All that one run learns from, chooses by and is tested on; `relations` by number."""

    relations: list[str]
    train: ParseExamples
    dev: Mapping[str, ParsedText]
    tests: Mapping[str, ParsedText]


def find_treebanks(data: Path) -> Treebanks:
    """Find the treebanks of a folder, or of `ud` in it, under their own names.

    They lie side by side or in folders of their own. Two treebanks of one language are an error:
    one would be passed over in silence.
    """
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    places = (data / "ud", data / "xtreme" / "ud")
    folder = next((place for place in places if place.is_dir()), data)
    found: dict[str, dict[str, Path]] = {"train": {}, "dev": {}, "test": {}}
    for path in sorted([*folder.glob("*.conllu*"), *folder.glob("UD_*/*.conllu*")]):
        matched = NAME.fullmatch(path.name)
        if matched is None:
            continue
        part, language = found[matched["part"]], matched["language"]
        if language in part:
            fix = "keep one treebank of a language and part in the folder"
            raise InputError(f"{part[language].name} is of {language!r} too", file=path, fix=fix)
        part[language] = path
    if not found["train"] or not found["test"]:
        fix = "give a folder with files like en_ewt-ud-train.conllu and de_gsd-ud-test.conllu"
        raise InputError("no treebanks to learn from and test on here", file=data, fix=fix)
    return Treebanks(**found)


def prepare(encoder: Encoder, files: Treebanks, run: Run, settings: TaskSettings) -> ParseData:
    """Read and encode what a run needs, once for all seeds of a process."""
    dev = run.sources if settings.select == "best" else ()
    for name in dev:
        if name not in files.dev:
            fix = f"add {name}_*-ud-dev.conllu, or set select to last"
            raise InputError(f"no treebank of {name!r} to choose the best epoch by", fix=fix)
    paths = [files.train[name] for name in run.sources]
    paths += [files.dev[name] for name in dev] + [files.test[name] for name in run.tests]
    choices = (settings.max_words, settings.overlap, settings.subtypes)
    sizes = (settings.train_examples, settings.test_examples, longest_sequence(encoder, settings))
    stamps = tuple((str(path), path.stat().st_mtime_ns) for path in paths)
    key = ("parsing", run, stamps, choices, sizes, bool(dev))
    return remember(encoder.tokenizer, key, lambda: _read_all(encoder, files, run, dev, settings))


def count_words(text: ParsedText, relations: Sequence[str]) -> dict[str, int]:
    """Say what of a text was not read, is not scored, or cannot be right."""
    sentences, encoded = text.sentences, text.encoded
    tags = Counter(tag for sentence in sentences for tag in sentence.upos)
    kinds = Counter(name for sentence in sentences for name in sentence.deprels)
    n_words = np.array([len(sentence.words) for sentence in sentences])
    return {
        "words": int(n_words.sum()),
        "words_ignored": sum(tags[tag] for tag in IGNORED),
        "words_of_unknown_relations": sum(n for name, n in kinds.items() if name not in relations),
        "words_without_subword": encoded.n_bare,
        "words_cut": encoded.n_cut,
        "sentences_cut": int((n_words > encoded.n_words).sum()),
        "sentences_in_windows": int((encoded.n_windows > 1).sum()),
        "multiword_tokens": sum(sentence.n_ranges for sentence in sentences),
        "empty_nodes": sum(sentence.n_empty_nodes for sentence in sentences),
    }


def _read_all(
    encoder: Encoder, files: Treebanks, run: Run, dev: Sequence[str], settings: TaskSettings
) -> ParseData:
    train: list[ParsedSentence] = []
    for name in run.sources:
        train += _read(files.train[name], settings.train_examples, settings)
    names = sorted({name for sentence in train for name in sentence.deprels} | {ROOT})
    numbers = {name: number for number, name in enumerate(names)}

    def encode(sentences: Sequence[ParsedSentence], one_window: bool = False) -> ParseExamples:
        return encode_trees(
            encoder.tokenizer,
            sentences,
            numbers,
            longest_sequence(encoder, settings),
            max_words=settings.max_words,
            overlap=settings.overlap,
            one_window=one_window,
        )

    def read(path: Path) -> ParsedText:
        sentences = _read(path, settings.test_examples, settings)
        return ParsedText(sentences, encode(sentences))

    return ParseData(
        names,
        encode(train, one_window=True),
        {name: read(files.dev[name]) for name in dev},
        {name: read(files.test[name]) for name in run.tests},
    )


def _read(path: Path, most: int | None, settings: TaskSettings) -> list[ParsedSentence]:
    """Read a treebank, or so many of its sentences, its relations as they are compared."""
    return [
        replace(
            sentence,
            deprels=tuple(name_relation(name, settings.subtypes) for name in sentence.deprels),
        )
        for sentence in spread(read_trees(path), most)
    ]
