"""Treebanks in CoNLL-U: syntactic words with their heads and relations.

Read with plain string work: it takes a fraction of a general parser's time, and needs nothing
installed where models are trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from calque.text.files import PathLike, read_lines, shown
from calque.types import InputError

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
        raise InputError("holds no sentence", file=shown(path), fix="give a treebank in CoNLL-U")
    for sentence in sentences:
        if problem := find_fault(sentence.heads):
            fix = "correct the heads, or leave the sentence out"
            raise _error(f"the sentence {problem}", path, sentence.line, fix)
    return sentences


def find_fault(heads: Sequence[int]) -> str | None:
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
    return InputError(problem, file=shown(path), line=line, fix=fix)
