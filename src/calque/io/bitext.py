"""Read and write bitext and text of one language.

Bitext is a file of tab-separated lines (tsv), a file of `source ||| target` lines (pipes), or two
files with one sentence per line (moses). The format is inferred: two paths are Moses files;
otherwise the first line with a tab (tsv) or with `|||` (pipes) decides. Empty sides are kept,
because aligners need the order of lines (`cleaning` drops them), but a line without a separator is
an error, even an empty line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Literal, TypeAlias, cast

from calque.errors import InputError
from calque.io.files import (
    MAGIC_BYTES,
    BadLine,
    PathLike,
    SkipBad,
    display_name,
    read_lines,
    report_bad_line,
    scan_lines,
    write_atomically,
)
from calque.io.locks import lock_output
from calque.types import SentencePair

BitextFormat: TypeAlias = Literal["auto", "tsv", "pipes", "moses"]
BitextPaths: TypeAlias = PathLike | Sequence[PathLike]

N_LINES_SNIFFED = 1000
LANGUAGE = r"[a-z]{2,3}(?:_[A-Z][A-Za-z]+)?"
LANGUAGE_PAIR = re.compile(f"({LANGUAGE})-({LANGUAGE})")
BUCC_LINE = re.compile(r"[a-z]{2,3}-[0-9]{9}\t")
BREAKING = {  # characters that a side must not contain, because they would split it
    "tsv": re.compile(r"[\t\n\r\0]"),
    "pipes": re.compile(r"[\t\n\r\0]|\|\|\|"),
    "moses": re.compile(r"[\n\r\0]"),
}


def read_bitext(
    paths: BitextPaths,
    format: BitextFormat = "auto",
    *,
    skip_bad: SkipBad | None = None,
    keep_tags: Collection[str] | None = None,
    exclude_tags: Collection[str] = (),
    on_extra_columns: Callable[[int], None] | None = None,
) -> Iterator[SentencePair]:
    """Yield sentence pairs; a bad line is an InputError or is passed to `skip_bad`.

    The tag is the third column of a TSV line. Further columns are ignored; `on_extra_columns` is
    called with the number of each line that has any.
    """
    files = _split_paths(paths)
    if _resolve_format(files, format) == "moses":
        pairs = _read_moses(files[0], files[1], skip_bad)
    else:
        pairs = _read_one_file(files[0], format, skip_bad, on_extra_columns)
    return _select_tags(pairs, keep_tags, exclude_tags)


def write_bitext(
    paths: BitextPaths, pairs: Iterable[SentencePair], format: BitextFormat = "auto"
) -> int:
    """Write pairs as TSV, or as Moses files if there are two paths, and return their number.

    Only TSV keeps the tags.
    """
    files = _split_paths(paths)
    resolved = _resolve_format(files, format)
    breaking, number = BREAKING[resolved], 0
    with ExitStack() as stack:
        for file in files:
            stack.enter_context(lock_output(Path(file)))
        streams = [stack.enter_context(write_atomically(file)) for file in files]
        for number, pair in enumerate(pairs, start=1):
            if any(map(breaking.search, (pair.src, pair.tgt, pair.tag or ""))):
                problem = f"pair {number} contains a separator or a line break"
                raise InputError(problem, fix="clean the pairs first")
            for stream, line in zip(streams, _format_pair(pair, resolved), strict=True):
                stream.write(line + "\n")
    return number


def infer_languages(paths: BitextPaths) -> tuple[str, str] | None:
    """Infer the two languages from names such as `en-de.tsv.xz`, or `news.en` and `news.de`.

    >>> infer_languages("europarl.en-pt_BR.tsv.gz")
    ('en', 'pt_BR')
    """
    names = [_name_parts(path) for path in _split_paths(paths)]
    if len(names) == 2:
        src, tgt = names[0][-1], names[1][-1]
        is_pair = src != tgt and all(re.fullmatch(LANGUAGE, code) for code in (src, tgt))
        return (src, tgt) if is_pair else None
    for part in names[0]:
        if match := LANGUAGE_PAIR.fullmatch(part):
            return match[1], match[2]
    return None


def parse_language_pair(text: str) -> tuple[str, str]:
    """Return the languages of a bitext, such as de-en.

    >>> parse_language_pair("pt_BR-zho")
    ('pt_BR', 'zho')
    """
    match = LANGUAGE_PAIR.fullmatch(text)
    if match is None:
        raise InputError(f"{text!r} does not name two languages", fix="write de-en")
    return match[1], match[2]


def read_sentences(path: PathLike, skip_bad: SkipBad | None = None) -> Iterator[str]:
    """Yield the lines of a file that are not blank."""
    return (line for line in read_lines(path, skip_bad) if line.strip())


def has_sentence_ids(path: PathLike) -> bool:
    """Return whether the sentences of a file have ids as in BUCC, `en-000000001 ⇥ sentence`."""
    first = next(scan_lines(path), "")
    return isinstance(first, str) and BUCC_LINE.match(first) is not None


def split_sentence_id(line: str, path: PathLike, number: int) -> tuple[str, str]:
    """Return the id and the sentence of a line."""
    name, tab, sentence = line.partition("\t")
    if not tab or not name.strip():
        problem, fix = "the line has no id followed by a tab", "write id TAB sentence"
        raise InputError(problem, file=display_name(path), line=number, fix=fix)
    return name.strip(), sentence.strip()


def read_sentences_with_ids(path: PathLike) -> Iterator[tuple[str, str]]:
    """Yield ids and sentences."""
    for number, line in enumerate(read_lines(path), start=1):
        yield split_sentence_id(line, path, number)


def read_id_pairs(path: PathLike) -> Iterator[tuple[str, str]]:
    """Yield pairs of columns, `source ⇥ target`, such as the ids of sentences."""
    for number, line in enumerate(read_lines(path), start=1):
        columns = [column.strip() for column in line.split("\t")]
        if len(columns) != 2 or not all(columns):
            problem, fix = "the line does not have two columns", "write source TAB target"
            raise InputError(problem, file=display_name(path), line=number, fix=fix)
        yield columns[0], columns[1]


def _split_paths(paths: BitextPaths) -> tuple[PathLike, ...]:
    files = (paths,) if isinstance(paths, str | os.PathLike) else tuple(paths)
    if len(files) not in (1, 2):
        problem = f"{len(files)} files were given as bitext"
        raise InputError(problem, fix="pass one file, or two files side by side")
    if len(files) == 2 and os.fspath(files[0]) == os.fspath(files[1]):
        raise InputError(
            "both sides are the same file",
            file=display_name(files[0]),
            fix="pass two different files",
        )
    return files


def _resolve_format(files: Sequence[PathLike], format: BitextFormat) -> BitextFormat:
    if format not in ("auto", "tsv", "pipes", "moses"):
        raise InputError(f"unknown format {format!r}", fix="choose auto, tsv, pipes or moses")
    if format != "auto" and (format == "moses") != (len(files) == 2):
        problem = f"{len(files)} files were given with the format {format}"
        raise InputError(problem, fix="pass two files for moses and one for the others")
    return "moses" if len(files) == 2 else "tsv" if format == "auto" else format


def _read_one_file(
    path: PathLike,
    format: BitextFormat,
    skip_bad: SkipBad | None,
    on_extra_columns: Callable[[int], None] | None,
) -> Iterator[SentencePair]:
    parse, lines = _choose_parser(scan_lines(path), format)
    for number, line in enumerate(lines, start=1):
        pair = parse(line) if isinstance(line, str) else line
        if isinstance(pair, SentencePair):
            has_more = parse is _parse_tsv and cast(str, line).count("\t") > 2
            if on_extra_columns is not None and has_more:
                on_extra_columns(number)
            yield pair
        else:
            report_bad_line(pair, path, number, skip_bad)


def _choose_parser(
    lines: Iterator[str | BadLine], format: BitextFormat
) -> tuple[Callable[[str], SentencePair | BadLine], Iterator[str | BadLine]]:
    """Return the parser of a format, inferred from the first lines if it is auto, and all lines."""
    if format != "auto":
        return (_parse_pipes if format == "pipes" else _parse_tsv), lines
    sniffed: list[str | BadLine] = []
    for line in islice(lines, N_LINES_SNIFFED):
        sniffed.append(line)
        text = line if isinstance(line, str) else ""
        if "\t" in text or "|||" in text:
            return (_parse_tsv if "\t" in text else _parse_pipes), chain(sniffed, lines)
    return _parse_tsv, chain(sniffed, lines)


def _parse_tsv(line: str) -> SentencePair | BadLine:
    columns = line.split("\t", 3)
    if len(columns) < 2:
        return BadLine("the line has no tab", "write source TAB target, or source ||| target", line)
    return SentencePair(columns[0], columns[1], (columns[2] or None) if columns[2:] else None)


def _parse_pipes(line: str) -> SentencePair | BadLine:
    n_separators = line.count("|||")
    if n_separators != 1:
        reason = f"the line has {n_separators} separators '|||' instead of 1"
        return BadLine(reason, "write source ||| target", line)
    src, _, tgt = line.partition("|||")
    return SentencePair(src.strip(" "), tgt.strip(" "))


def _read_moses(src: PathLike, tgt: PathLike, skip_bad: SkipBad | None) -> Iterator[SentencePair]:
    src_lines, tgt_lines = scan_lines(src), scan_lines(tgt)
    for number, (a, b) in enumerate(zip_longest(src_lines, tgt_lines), start=1):
        if isinstance(a, str) and isinstance(b, str):
            yield SentencePair(a, b)
        elif a is None or b is None:
            n_longer = number + sum(1 for _ in (tgt_lines if a is None else src_lines))
            n_src, n_tgt = (number - 1, n_longer) if a is None else (n_longer, number - 1)
            problem = f"the file has {n_src} lines, but {display_name(tgt)} has {n_tgt}"
            fix = f"line {number} has no counterpart: make the files equally long"
            raise InputError(problem, file=display_name(src), fix=fix)
        elif isinstance(a, BadLine):
            report_bad_line(a, src, number, skip_bad)
        elif isinstance(b, BadLine):
            report_bad_line(b, tgt, number, skip_bad)


def _select_tags(
    pairs: Iterator[SentencePair], keep: Collection[str] | None, exclude: Collection[str]
) -> Iterator[SentencePair]:
    if isinstance(keep, str) or isinstance(exclude, str):
        problem = f"tags must be a list, not the string {keep or exclude!r}"
        raise InputError(problem, fix="pass a list")
    if keep is not None:
        pairs = (pair for pair in pairs if pair.tag in keep)
    return (pair for pair in pairs if pair.tag not in exclude) if exclude else pairs


def _format_pair(pair: SentencePair, format: BitextFormat) -> tuple[str, ...]:
    """Return the lines of a pair: one, or two for Moses files."""
    if format == "moses":
        return pair.src, pair.tgt
    if format == "pipes":
        return (f"{pair.src} ||| {pair.tgt}",)
    return (f"{pair.src}\t{pair.tgt}" + (f"\t{pair.tag}" if pair.tag else ""),)


def _name_parts(path: PathLike) -> list[str]:
    """Return the parts of a file name between dots, without the suffix of a compression."""
    name = Path(path).name
    suffix = Path(name).suffix
    return (name.removesuffix(suffix) if suffix in MAGIC_BYTES else name).split(".")
