"""Text of one language: a sentence a line, or treebanks in CoNLL-U."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from calque.text.files import PathLike, SkipBad, read_lines, shown
from calque.types import InputError, MissingExtra

if TYPE_CHECKING:
    from conllu.models import Token

Numbered: TypeAlias = "list[tuple[int, Token]]"  # tokens with the numbers of their lines

COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


@dataclass(frozen=True, slots=True)
class ParsedSentence:
    """The syntactic words of a sentence; head 0 is the root, head n the n-th word.

    `heads` and `deprels` are empty where the file gives no head at all. Without a `# text`
    comment, `text` is the words with spaces between them.
    """

    words: tuple[str, ...]
    upos: tuple[str, ...]
    heads: tuple[int, ...]
    deprels: tuple[str, ...]
    text: str
    n_ranges: int = 0
    n_empty_nodes: int = 0


def read_sentences(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[str]:
    """Read the lines of a file that are not blank."""
    return (line for line in read_lines(path, skip_bad) if line.strip())


def read_paragraphs(
    path: PathLike, skip_bad: SkipBad | None = None, max_sentences: int = 1000
) -> Iterator[list[str]]:
    """Read the groups of lines between blank lines, cut at `max_sentences` to bound memory."""
    paragraph: list[str] = []
    for line in read_lines(path, skip_bad):
        if line.strip():
            paragraph.append(line)
        if paragraph and (not line.strip() or len(paragraph) >= max_sentences):
            yield paragraph
            paragraph = []
    if paragraph:
        yield paragraph


def read_conllu(path: PathLike) -> Iterator[ParsedSentence]:
    """Read a treebank; ranges of multi-word tokens and empty nodes are only counted."""
    tokens: Numbered = []
    text = ""
    for number, line in enumerate(read_lines(path), start=1):
        if line.startswith("#"):
            text = _find_text(line) or text
        elif line.strip():
            tokens.append((number, _parse_token(line, path, number)))
        elif tokens:
            yield _assemble(tokens, text, path)
            tokens, text = [], ""
    if tokens:
        yield _assemble(tokens, text, path)


def _find_text(comment: str) -> str | None:
    key, _, value = comment[1:].partition("=")
    return value.strip() if key.strip() == "text" else None


def _parse_token(line: str, path: PathLike, number: int) -> Token:
    try:
        from conllu import parser
        from conllu.exceptions import ParseException
    except ImportError as error:
        raise MissingExtra("conllu", "eval") from error
    n_columns = line.count("\t") + 1
    if n_columns != len(COLUMNS):
        fix = f"CoNLL-U has {len(COLUMNS)}, separated by tabs"
        raise InputError(f"{n_columns} columns", file=shown(path), line=number, fix=fix)
    fields = {name: parser.DEFAULT_FIELD_PARSERS[name] for name in ("id", "head")}
    try:
        return parser.parse_line(line, COLUMNS, fields)
    except ParseException as error:
        fix = "mend the line by the CoNLL-U format"
        raise InputError(str(error), file=shown(path), line=number, fix=fix) from error


def _assemble(tokens: Numbered, text: str, path: PathLike) -> ParsedSentence:
    words = [(number, token) for number, token in tokens if isinstance(token["id"], int)]
    _check_numbering(words, path)
    has_heads = any(token["head"] is not None for _, token in words)
    if has_heads:
        _check_heads(words, path)
    forms = _column(words, "form")
    kinds = [token["id"][1] for _, token in tokens if isinstance(token["id"], tuple)]
    return ParsedSentence(
        words=forms,
        upos=_column(words, "upos"),
        heads=tuple(token["head"] for _, token in words) if has_heads else (),
        deprels=_column(words, "deprel") if has_heads else (),
        text=text or " ".join(forms),
        n_ranges=kinds.count("-"),
        n_empty_nodes=kinds.count("."),
    )


def _column(words: Sequence[tuple[int, Token]], name: str) -> tuple[str, ...]:
    return tuple(token[name] for _, token in words)


def _check_numbering(words: Numbered, path: PathLike) -> None:
    for expected, (number, token) in enumerate(words, start=1):
        if token["id"] != expected:
            problem = f"word {token['id']} where word {expected} is due"
            fix = "number the words from 1, and put an empty line between sentences"
            raise InputError(problem, file=shown(path), line=number, fix=fix)


def _check_heads(words: Numbered, path: PathLike) -> None:
    for number, token in words:
        head = token["head"]
        if head is None or not 0 <= head <= len(words) or head == token["id"]:
            problem = f"head {'_' if head is None else head} of word {token['id']}"
            fix = f"the head is 0 or another of the {len(words)} words"
            raise InputError(problem, file=shown(path), line=number, fix=fix)
