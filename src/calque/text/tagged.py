"""Sentences whose words carry tags: treebanks in CoNLL-U, and two columns as in XTREME."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from calque.text.files import MAGIC, PathLike, read_lines, shown
from calque.text.spans import is_span_tag
from calque.text.treebanks import read_conllu
from calque.types import InputError

NO_TAG = "_"
# Universal Dependencies renamed it in version 2; treebanks of version 1 are still about.
RENAMED = {"CONJ": "CCONJ"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """The words of a sentence and the tag of each; a word without one has `_`."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_tagged(path: PathLike, max_sentences: int | None = None) -> list[TaggedSentence]:
    """Read a file of tagged sentences, or so many of them, spread evenly over the file.

    `.conllu` gives syntactic words and their universal parts of speech; any other name is a file
    of `word ⇥ tag` lines with empty lines between sentences. Treebanks are ordered by text and
    genre, so that the first sentences would not stand for the rest.
    """
    found = list(_read_upos(path) if is_conllu(path) else _read_columns(path))
    if not found:
        raise InputError("holds no tagged sentence", file=shown(path), fix="give another file")
    return spread(found, max_sentences)


def read_names(path: PathLike) -> list[TaggedSentence]:
    """Read `word ⇥ tag` lines of B-, I- and O tags; another tag is an error that names its line."""
    found = list(_read_columns(path, of_spans=True))
    if not found:
        raise InputError("holds no tagged sentence", file=shown(path), fix="give another file")
    return found


def read_untagged(path: PathLike) -> list[TaggedSentence]:
    """Read a sentence a line, its words apart, none of them with a tag; an empty line has none."""
    lines = (tuple(line.split()) for line in read_lines(path))
    return [TaggedSentence(words, (NO_TAG,) * len(words)) for words in lines]


def is_conllu(path: PathLike) -> bool:
    """Tell a treebank by its name, packed or not.

    >>> is_conllu("ud/de_gsd-ud-dev.conllu.xz"), is_conllu("udpos/dev-de.tsv.xz")
    (True, False)
    """
    name = Path(path)
    return (name.with_suffix("") if name.suffix in MAGIC else name).suffix == ".conllu"


def spread(items: Sequence[T], n_most: int | None) -> list[T]:
    """Choose so many items at even distances, or all if there are no more.

    >>> spread("abcdefg", 3), spread("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    if n_most is None or n_most >= len(items):
        return list(items)
    return [items[k * len(items) // n_most] for k in range(n_most)]


def _read_upos(path: PathLike) -> Iterator[TaggedSentence]:
    for sentence in read_conllu(path):
        tags = tuple(RENAMED.get(tag, tag) for tag in sentence.upos)
        yield TaggedSentence(sentence.words, tags)


def _read_columns(path: PathLike, *, of_spans: bool = False) -> Iterator[TaggedSentence]:
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            if words:
                yield TaggedSentence(tuple(words), tuple(tags))
                words, tags = [], []
            continue
        columns = line.split("\t")
        if len(columns) != 2 or not all(column.strip() for column in columns):
            fix = "write a word, a tab and its tag"
            raise InputError(
                f"not a word and its tag: {line[:40]!r}", file=shown(path), line=number, fix=fix
            )
        if of_spans and columns[1] != NO_TAG and not is_span_tag(columns[1]):
            problem = f"{columns[1]!r} is not a tag of a span"
            fix = "write B-LOC, I-LOC, O and their like"
            raise InputError(problem, file=shown(path), line=number, fix=fix)
        words.append(columns[0])
        tags.append(columns[1])
    if words:
        yield TaggedSentence(tuple(words), tuple(tags))
