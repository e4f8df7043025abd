"""Treebanks in CoNLL-U: syntactic words with their heads and relations.

Read with plain string work: it takes a fraction of a general parser's time, and needs nothing
installed where models are trained.

Spans of words in B-, I- and O tags, and how many of them two taggings share.

Sentences whose words carry tags: treebanks in CoNLL-U, and two columns as in XTREME.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from calque.errors import InputError
from calque.io.files import MAGIC_BYTES, PathLike, display_name, read_lines

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]

N_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """The syntactic words of a sentence; head 0 is the root, head n the n-th word.

    `heads` and `deprels` are empty where the file gives no head at all. Without a `# text`
    comment, `text` is the words with spaces between them. `line` is that of the first word.
    """

    words: tuple[str, ...]
    upos: tuple[str, ...]
    heads: tuple[int, ...]
    deprels: tuple[str, ...]
    text: str
    n_ranges: int = 0
    n_empty_nodes: int = 0
    line: int = 0


class _Word(NamedTuple):
    """A line of a word: where it stands, its number, and the columns in use."""

    line: int
    number: int
    form: str
    upos: str
    head: int | None
    deprel: str


def read_conllu(path: PathLike) -> Iterator[ParsedSentence]:
    """Read a treebank; ranges of multi-word tokens and empty nodes are only counted."""
    words: list[_Word] = []
    others: list[str] = []
    text = ""
    for line_number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            text = _find_text(line) or text
        elif line.strip():
            columns = line.split("\t")
            if len(columns) != N_COLUMNS:
                fix = f"CoNLL-U has {N_COLUMNS}, separated by tabs"
                raise _error(f"{len(columns)} columns", path, line_number, fix)
            if columns[0].isdecimal():
                words.append(_parse_word(columns, path, line_number))
            else:
                others.append(_kind_of(columns[0], path, line_number))
        elif words:
            yield _assemble(words, others, text, path)
            words, others, text = [], [], ""
    if words:
        yield _assemble(words, others, text, path)


def read_trees(path: PathLike) -> list[ParsedSentence]:
    """Read a treebank whose sentences must all be trees with exactly one root."""
    sentences = list(read_conllu(path))
    if not sentences:
        raise InputError(
            "holds no sentence", file=display_name(path), fix="give a treebank in CoNLL-U"
        )
    for sentence in sentences:
        if problem := find_tree_error(sentence.heads):
            fix = "correct the heads, or leave the sentence out"
            raise _error(f"the sentence {problem}", path, sentence.line, fix)
    return sentences


def find_tree_error(heads: Sequence[int]) -> str | None:
    """Say why heads make no tree, or nothing if they do.

    >>> find_fault((2, 0)), find_fault((0, 0)), find_fault((2, 1, 0))
    (None, 'has 2 roots', 'has a cycle at word 1')
    """
    if not heads:
        return "has no heads"
    if (n_roots := heads.count(0)) != 1:
        return f"has {n_roots} roots"
    reaches_root = {0}
    for word in range(1, len(heads) + 1):
        path: list[int] = []
        while word not in reaches_root:
            if word in path:
                return f"has a cycle at word {min(path[path.index(word) :])}"
            path.append(word)
            word = heads[word - 1]
        reaches_root.update(path)
    return None


def _find_text(comment: str) -> str | None:
    key, _, value = comment[1:].partition("=")
    return value.strip() if key.strip() == "text" else None


def _parse_word(columns: Sequence[str], path: PathLike, line: int) -> _Word:
    head = columns[6]
    if head != "_" and not (head.isascii() and head.isdecimal()):
        raise _error(f"head {head!r} is no number", path, line, "mend the line by the format")
    number = None if head == "_" else int(head)
    return _Word(line, int(columns[0]), columns[1], columns[3], number, columns[7])


def _kind_of(name: str, path: PathLike, line: int) -> str:
    """Tell a range of words, 3-4, from an empty node, 3.1."""
    for sign in "-.":
        first, found, last = name.partition(sign)
        if found and first.isdecimal() and last.isdecimal():
            return sign
    raise _error(f"{name!r} is not a valid ID", path, line, "mend the line by the format")


def _assemble(
    words: Sequence[_Word], others: Sequence[str], text: str, path: PathLike
) -> ParsedSentence:
    _check_numbering(words, path)
    has_heads = any(word.head is not None for word in words)
    heads = _check_heads(words, path) if has_heads else ()
    forms = tuple(word.form for word in words)
    return ParsedSentence(
        words=forms,
        upos=tuple(word.upos for word in words),
        heads=heads,
        deprels=tuple(word.deprel for word in words) if has_heads else (),
        text=text or " ".join(forms),
        n_ranges=others.count("-"),
        n_empty_nodes=others.count("."),
        line=words[0].line,
    )


def _check_numbering(words: Sequence[_Word], path: PathLike) -> None:
    for expected, word in enumerate(words, start=1):
        if word.number != expected:
            problem = f"word {word.number} where word {expected} is due"
            fix = "number the words from 1, and put an empty line between sentences"
            raise _error(problem, path, word.line, fix)


def _check_heads(words: Sequence[_Word], path: PathLike) -> tuple[int, ...]:
    heads = []
    for word in words:
        head = word.head
        if head is None or not 0 <= head <= len(words) or head == word.number:
            problem = f"head {'_' if head is None else head} of word {word.number}"
            fix = f"the head is 0 or another of the {len(words)} words"
            raise _error(problem, path, word.line, fix)
        heads.append(head)
    return tuple(heads)


def _error(problem: str, path: PathLike, line: int, fix: str) -> InputError:
    return InputError(problem, file=display_name(path), line=line, fix=fix)


OUTSIDE = "O"


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Spans that are there, that were found, and that are both, with bounds and kind."""

    n_gold: int
    n_found: int
    n_right: int

    @property
    def f1(self) -> float:
        """Give the harmonic mean of precision and recall; 0 where nothing is right.

        >>> SpanCounts(n_gold=4, n_found=2, n_right=2).f1
        0.6666666666666666
        """
        total = self.n_gold + self.n_found
        return 2 * self.n_right / total if total else 0.0


def is_bio_tag(name: str) -> bool:
    """Tell tags that say where a span begins from others.

    >>> [is_span_tag(name) for name in ("O", "B-LOC", "I-LOC", "S-LOC", "B-", "LOC")]
    [True, True, True, False, False, False]
    """
    return name == OUTSIDE or (name[:2] in ("B-", "I-") and bool(name[2:]))


def check_bio_tags(names: Sequence[str]) -> None:
    """Refuse tags that do not say where a span begins."""
    for name in names:
        if not is_bio_tag(name):
            fix = "give tags such as B-LOC, I-LOC and O, or score accuracy"
            raise InputError(f"{name!r} is not a tag of a span", fix=fix)


def find_spans(tags: IntArray, names: Sequence[str], lengths: IntArray) -> IntArray:
    """List (first word, word after the last, kind) of every span, in the order of the text.

    `tags` number `names`, for the words of all sentences, which have these `lengths`. A span
    begins with B-, and with an I- that follows no span of its kind, as in CoNLL's own script.
    """
    kinds = sorted({name[2:] for name in names if name != OUTSIDE})
    kind_of = np.array([-1 if n == OUTSIDE else kinds.index(n[2:]) for n in names], dtype=np.int64)
    begins = np.array([name.startswith("B-") for name in names], dtype=np.bool_)
    kind = kind_of[tags]
    breaks = np.ones(len(tags) + 1, dtype=np.bool_)  # whether a word cannot go on with a span
    breaks[1:-1] = begins[tags[1:]] | (kind[1:] != kind[:-1])
    breaks[np.cumsum(lengths)] = True
    first = np.flatnonzero(breaks[:-1] & (kind >= 0))
    ends = np.flatnonzero(breaks)
    after = ends[np.searchsorted(ends, first, side="right")]
    return np.stack([first, after, kind[first]], axis=1)


def count_spans(
    gold: IntArray, found: IntArray, names: Sequence[str], lengths: IntArray
) -> SpanCounts:
    """Compare two taggings of the same sentences span by span."""
    sides = [find_spans(tags, names, lengths) for tags in (gold, found)]
    keys = [set(map(tuple, spans.tolist())) for spans in sides]
    return SpanCounts(len(keys[0]), len(keys[1]), len(keys[0] & keys[1]))


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
        raise InputError(
            "holds no tagged sentence", file=display_name(path), fix="give another file"
        )
    return sample_evenly(found, max_sentences)


def read_entity_tags(path: PathLike) -> list[TaggedSentence]:
    """Read `word ⇥ tag` lines of B-, I- and O tags; another tag is an error that names its line."""
    found = list(_read_columns(path, of_spans=True))
    if not found:
        raise InputError(
            "holds no tagged sentence", file=display_name(path), fix="give another file"
        )
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
    return (name.with_suffix("") if name.suffix in MAGIC_BYTES else name).suffix == ".conllu"


def sample_evenly(items: Sequence[T], n_most: int | None) -> list[T]:
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
                f"not a word and its tag: {line[:40]!r}",
                file=display_name(path),
                line=number,
                fix=fix,
            )
        if of_spans and columns[1] != NO_TAG and not is_bio_tag(columns[1]):
            problem = f"{columns[1]!r} is not a tag of a span"
            fix = "write B-LOC, I-LOC, O and their like"
            raise InputError(problem, file=display_name(path), line=number, fix=fix)
        words.append(columns[0])
        tags.append(columns[1])
    if words:
        yield TaggedSentence(tuple(words), tuple(tags))
