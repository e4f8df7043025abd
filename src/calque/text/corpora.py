"""Text of one language: a sentence a line."""

from __future__ import annotations

from collections.abc import Iterator

from calque.text.files import PathLike, SkipBad, read_lines


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
