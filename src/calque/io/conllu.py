"""Treebanks in CoNLL-U, tagged sentences, and spans in BIO tags.

CoNLL-U is parsed with plain string operations, which take a fraction of the time of a general
parser and need no extra package. Tagged sentences come from treebanks or from files of `word ⇥ tag`
lines, as in XTREME.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
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
NUMBER = re.compile("[0-9]{1,9}")
OTHER_ID = re.compile("([0-9]{1,9})([-.])([0-9]{1,9})")
OUTSIDE = "O"
NO_TAG = "_"
RENAMED_TAGS = {"CONJ": "CCONJ"}  # version 1 of Universal Dependencies
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """The syntactic words of a sentence; head 0 is the root, head n the n-th word.

    `heads` and `deprels` are empty if the sentence has no heads at all. Without a `# text` comment,
    `text` is the words with spaces between them. `line` is the line number of the first word.
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
    """The line of a word: its line number, its number in the sentence, and the columns in use."""

    line: int
    number: int
    form: str
    upos: str
    head: int | None
    deprel: str


def read_conllu(path: PathLike) -> Iterator[ParsedSentence]:
    """Yield the sentences of a treebank; multi-word tokens and empty nodes are only counted."""
    words: list[_Word] = []
    others: list[str] = []
    text = ""
    for line_number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            text = _find_text(line) or text
        elif line.strip():
            columns = line.split("\t")
            if len(columns) != N_COLUMNS:
                problem = f"the line has {len(columns)} columns instead of {N_COLUMNS}"
                fix = "separate the columns of CoNLL-U by tabs"
                raise InputError(problem, file=display_name(path), line=line_number, fix=fix)
            if NUMBER.fullmatch(columns[0]):
                words.append(_parse_word(columns, path, line_number))
            else:
                others.append(_parse_other_id(columns[0], path, line_number))
        elif words:
            yield _assemble(words, others, text, path)
            words, others, text = [], [], ""
    if words:
        yield _assemble(words, others, text, path)


def read_trees(path: PathLike) -> list[ParsedSentence]:
    """Read a treebank; raise InputError unless all sentences are trees with one root."""
    sentences = list(read_conllu(path))
    if not sentences:
        raise InputError(
            "the file has no sentences", file=display_name(path), fix="use a treebank in CoNLL-U"
        )
    for sentence in sentences:
        if problem := find_tree_error(sentence.heads):
            fix = "correct the heads, or remove the sentence"
            raise InputError(
                f"the sentence {problem}", file=display_name(path), line=sentence.line, fix=fix
            )
    return sentences


def find_tree_error(heads: Sequence[int]) -> str | None:
    """Return why heads do not form a tree, or None if they do.

    >>> find_tree_error((2, 0)), find_tree_error((0, 0)), find_tree_error((2, 1, 0))
    (None, 'has 2 roots', 'has a cycle at word 1')
    """
    if not heads:
        return "has no heads"
    if (n_roots := heads.count(0)) != 1:
        return f"has {n_roots} roots"
    reaches_root = {0}
    for word in range(1, len(heads) + 1):
        path: dict[int, int] = {}  # words on the way to the root, and their positions in it
        while word not in reaches_root:
            if word in path:
                return f"has a cycle at word {min(list(path)[path[word] :])}"
            path[word] = len(path)
            word = heads[word - 1]
        reaches_root.update(path)
    return None


def _find_text(comment: str) -> str | None:
    key, _, value = comment[1:].partition("=")
    return value.strip() if key.strip() == "text" else None


def _parse_word(columns: Sequence[str], path: PathLike, line: int) -> _Word:
    head = columns[6]
    if head != "_" and not NUMBER.fullmatch(head):
        raise InputError(
            f"the head {head!r} is not a number",
            file=display_name(path),
            line=line,
            fix="correct the line",
        )
    number = None if head == "_" else int(head)
    return _Word(line, int(columns[0]), columns[1], columns[3], number, columns[7])


def _parse_other_id(name: str, path: PathLike, line: int) -> str:
    """Return "-" for the range of a multi-word token, 3-4, and "." for an empty node, 3.1."""
    found = OTHER_ID.fullmatch(name)
    if found and (found[2] == "." or int(found[1]) < int(found[3])):
        return found[2]
    raise InputError(
        f"{name!r} is not a valid word ID",
        file=display_name(path),
        line=line,
        fix="correct the line",
    )


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
            problem = f"the word has number {word.number} instead of {expected}"
            fix = "number the words from 1, and put an empty line between sentences"
            raise InputError(problem, file=display_name(path), line=word.line, fix=fix)


def _check_heads(words: Sequence[_Word], path: PathLike) -> tuple[int, ...]:
    heads = []
    for word in words:
        head = word.head
        if head is None or not 0 <= head <= len(words) or head == word.number:
            problem = f"word {word.number} has the head {'_' if head is None else head}"
            fix = f"use 0 or another of the {len(words)} words"
            raise InputError(problem, file=display_name(path), line=word.line, fix=fix)
        heads.append(head)
    return tuple(heads)


@dataclass(frozen=True, slots=True)
class SpanCounts:
    """Numbers of gold spans, predicted spans, and spans in both with the same bounds and type."""

    n_gold: int
    n_predicted: int
    n_correct: int

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall.

        >>> SpanCounts(n_gold=4, n_predicted=2, n_correct=2).f1
        0.6666666666666666
        """
        total = self.n_gold + self.n_predicted
        return 2 * self.n_correct / total if total else 0.0


def is_bio_tag(name: str) -> bool:
    """Return whether a tag is O, B-TYPE or I-TYPE.

    >>> [is_bio_tag(name) for name in ("O", "B-LOC", "I-LOC", "S-LOC", "B-", "LOC")]
    [True, True, True, False, False, False]
    """
    return name == OUTSIDE or (name[:2] in ("B-", "I-") and bool(name[2:]))


def check_bio_tags(names: Sequence[str]) -> None:
    """Raise InputError if a tag is not a BIO tag."""
    for name in names:
        if not is_bio_tag(name):
            fix = "use tags such as B-LOC, I-LOC and O, or measure accuracy"
            raise InputError(f"{name!r} is not a BIO tag", fix=fix)


def find_spans(tags: IntArray, names: Sequence[str], lengths: IntArray) -> IntArray:
    """Return (first word, word after the last, type) of every span, in the order of the text.

    `tags` are indices into `names`, for the words of all sentences, whose `lengths` are given. A
    span begins with B-, or with an I- that does not continue a span of its type, as in CoNLL's
    evaluation script.
    """
    kinds = sorted({name[2:] for name in names if name != OUTSIDE})
    kind_of = np.array([-1 if n == OUTSIDE else kinds.index(n[2:]) for n in names], dtype=np.int64)
    begins = np.array([name.startswith("B-") for name in names], dtype=np.bool_)
    kind = kind_of[tags]
    breaks = np.ones(len(tags) + 1, dtype=np.bool_)  # whether a word cannot continue a span
    breaks[1:-1] = begins[tags[1:]] | (kind[1:] != kind[:-1])
    breaks[np.cumsum(lengths)] = True
    first = np.flatnonzero(breaks[:-1] & (kind >= 0))
    ends = np.flatnonzero(breaks)
    after = ends[np.searchsorted(ends, first, side="right")]
    return np.stack([first, after, kind[first]], axis=1)


def count_spans(
    gold: IntArray, predicted: IntArray, names: Sequence[str], lengths: IntArray
) -> SpanCounts:
    """Return the numbers of gold, predicted and correct spans."""
    sides = [find_spans(tags, names, lengths) for tags in (gold, predicted)]
    keys = [set(map(tuple, spans.tolist())) for spans in sides]
    return SpanCounts(len(keys[0]), len(keys[1]), len(keys[0] & keys[1]))


@dataclass(frozen=True, slots=True)
class TaggedSentence:
    """The words of a sentence and their tags; a word without a tag has `_`."""

    words: tuple[str, ...]
    tags: tuple[str, ...]


def read_tagged(path: PathLike, max_sentences: int | None = None) -> list[TaggedSentence]:
    """Read tagged sentences, at most `max_sentences` of them, sampled evenly from the file.

    A `.conllu` file gives syntactic words and universal parts of speech; any other file has
    `word ⇥ tag` lines with empty lines between sentences. Treebanks are ordered by text and genre,
    so their first sentences are not representative.
    """
    found = list(_read_upos(path) if is_conllu(path) else _read_columns(path))
    if not found:
        raise InputError(
            "the file has no tagged sentences", file=display_name(path), fix="use another file"
        )
    return sample_evenly(found, max_sentences)


def read_entity_tags(path: PathLike) -> list[TaggedSentence]:
    """Read `word ⇥ tag` lines of BIO tags; any other tag is an InputError."""
    found = list(_read_columns(path, bio_only=True))
    if not found:
        raise InputError(
            "the file has no tagged sentences", file=display_name(path), fix="use another file"
        )
    return found


def join_characters(
    sentence: TaggedSentence, split_words: Callable[[str], list[str]]
) -> tuple[TaggedSentence, int]:
    """Join tagged characters to words, and count words that a span begins or ends within.

    A word has the tag of its first character; an I- that continues no span afterwards becomes B-.
    Words end only where a character of the file ends.

    >>> sentence = TaggedSentence(tuple("我在北京大學"), ("O", "O", "B-ORG", *("I-ORG",) * 3))
    >>> join_characters(sentence, lambda text: ["我", "在北", "京", "大學"])
    (TaggedSentence(words=('我', '在北', '京', '大學'), tags=('O', 'O', 'B-ORG', 'I-ORG')), 1)
    """
    text, cuts, place = "".join(sentence.words), {0}, 0
    for word in split_words(text):  # white space between words is left out by the splitter
        start = text.index(word, place)
        place = start + len(word)
        cuts |= {start, place}
    words: list[str] = []
    tags: list[str] = []
    crossed = set[int]()
    place, last = 0, OUTSIDE
    for character, tag in zip(sentence.words, sentence.tags, strict=True):
        if place in cuts:
            words.append(character)
            previous = tags[-1] if tags else OUTSIDE
            is_lost = tag.startswith("I-") and previous[2:] != tag[2:]
            tags.append("B-" + tag[2:] if is_lost else tag)
        else:
            words[-1] += character
            if tag.startswith("B-") or tag[2:] != last[2:]:
                crossed.add(len(words))
        place, last = place + len(character), tag
    return TaggedSentence(tuple(words), tuple(tags)), len(crossed)


def read_untagged(path: PathLike) -> list[TaggedSentence]:
    """Read one sentence per line, its words separated by spaces, without tags."""
    lines = (tuple(line.split()) for line in read_lines(path))
    return [TaggedSentence(words, (NO_TAG,) * len(words)) for words in lines]


def is_conllu(path: PathLike) -> bool:
    """Return whether a file is a treebank by its name, compressed or not.

    >>> is_conllu("ud/de_gsd-ud-dev.conllu.xz"), is_conllu("udpos/dev-de.tsv.xz")
    (True, False)
    """
    name = Path(path)
    return (name.with_suffix("") if name.suffix in MAGIC_BYTES else name).suffix == ".conllu"


def sample_evenly(items: Sequence[ItemT], n_most: int | None) -> list[ItemT]:
    """Return at most `n_most` items at even distances.

    >>> sample_evenly("abcdefg", 3), sample_evenly("ab", 3)
    (['a', 'c', 'e'], ['a', 'b'])
    """
    if n_most is None or n_most >= len(items):
        return list(items)
    return [items[k * len(items) // n_most] for k in range(n_most)]


def _read_upos(path: PathLike) -> Iterator[TaggedSentence]:
    for sentence in read_conllu(path):
        tags = tuple(RENAMED_TAGS.get(tag, tag) for tag in sentence.upos)
        yield TaggedSentence(sentence.words, tags)


def _read_columns(path: PathLike, *, bio_only: bool = False) -> Iterator[TaggedSentence]:
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
            problem, fix = "the line is not a word and its tag", "write word TAB tag"
            raise InputError(problem, file=display_name(path), line=number, fix=fix)
        if bio_only and columns[1] != NO_TAG and not is_bio_tag(columns[1]):
            problem = f"{columns[1]!r} is not a BIO tag"
            fix = "use tags such as B-LOC, I-LOC and O"
            raise InputError(problem, file=display_name(path), line=number, fix=fix)
        words.append(columns[0])
        tags.append(columns[1])
    if words:
        yield TaggedSentence(tuple(words), tuple(tags))
