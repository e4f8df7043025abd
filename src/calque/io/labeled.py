"""Texts with a class: one text or a pair of them a line, tabs between.

Product reviews of Prettenhofer and Stein (2010): XML with a rating, good against bad.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from calque.errors import InputError
from calque.io.files import PathLike, display_name, read_chunks, read_lines
from calque.io.xtreme import TaskFiles, check_data_folder

# XNLI's machine-translated training files spell one class their own way.
RENAMED = {"contradictory": "contradiction"}


@dataclass(frozen=True, slots=True)
class LabeledText:
    """One example as a file has it: a text or two, and the name of its class.

    `original` is what was translated, where the file has it, too.
    """

    texts: tuple[str, ...]
    label: str
    original: tuple[str, ...] | None = None


def read_labeled_pairs(path: PathLike) -> list[LabeledText]:
    """Read `first ⇥ second ⇥ class`, XTREME's layout of XNLI and PAWS-X.

    Of five columns, as in its translations of training sets, the first two are the original;
    PAWS-X's own files, which have a header and number their lines, are understood too.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if number == 1 and columns[0] == "id":
            continue
        if len(columns) not in (3, 4, 5):
            raise _refuse("two texts and a class", line, path, number)
        first, second, label = (column.strip() for column in columns[-3:])
        if not (first and second and label):
            raise _refuse("two texts and a class", line, path, number)
        original = (columns[0].strip(), columns[1].strip()) if len(columns) == 5 else None
        found.append(LabeledText((first, second), RENAMED.get(label, label), original))
    return _check(found, path)


def read_labeled_texts(path: PathLike) -> list[LabeledText]:
    """Read `text ⇥ class`."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        text, _, label = line.rpartition("\t")
        if not (text.strip() and label.strip()):
            raise _refuse("a text and a class", line, path, number)
        found.append(LabeledText((text.strip(),), label.strip()))
    return _check(found, path)


def _check(found: list[LabeledText], path: PathLike) -> list[LabeledText]:
    if not found:
        raise InputError("holds no example", file=display_name(path), fix="give another file")
    return found


def _refuse(wanted: str, line: str, path: PathLike, number: int) -> InputError:
    return InputError(
        f"not {wanted}: {line[:40]!r}",
        file=display_name(path),
        line=number,
        fix="separate them by tabs",
    )


GOOD, BAD = "good", "bad"
MIDDLE = 3.0
# Characters that XML forbids but reviewers typed.
FORBIDDEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
REVIEW_FOLDERS = ("cls-acl10-unprocessed", "cls", "amazon_reviews", "reviews")
# The corpus names Japanese by its country.
LANGUAGES = {"jp": "ja"}


def read_reviews(path: PathLike, dropped: Counter[str] | None = None) -> list[LabeledText]:
    """Read a `.review` file: more than three stars is good, fewer bad; three are dropped, counted.

    The text of a review is its summary, where it has one, and its text.
    """
    found, counts = [], Counter[str]() if dropped is None else dropped
    for item in _read_items(path):
        rating, text = item.findtext("rating"), item.findtext("text")
        try:
            stars = float(rating or "")
        except ValueError:
            fix = "give every <item> a <rating> in stars"
            raise InputError(f"a rating {rating!r}", file=display_name(path), fix=fix) from None
        summary = (item.findtext("summary") or "").strip()
        whole = " ".join(f"{summary} {text or ''}".split())
        if stars == MIDDLE or not whole:
            counts["reviews_of_three_stars" if whole else "reviews_without_text"] += 1
            continue
        found.append(LabeledText((whole,), GOOD if stars > MIDDLE else BAD))
    if not found:
        raise InputError("holds no review", file=display_name(path), fix="give another file")
    return found


def find_reviews(data: Path) -> TaskFiles | None:
    """Find `LANGUAGE/CATEGORY/train.review` and `test.review`; all categories count as one."""
    check_data_folder(data)
    for folder in [*(data / name for name in REVIEW_FOLDERS), data]:
        splits: dict[str, dict[str, tuple[Path, ...]]] = {"train": {}, "test": {}}
        for split, files in splits.items():
            for path in sorted(folder.glob(f"*/*/{split}.review*")):
                language = path.parent.parent.name
                language = LANGUAGES.get(language, language)
                files[language] = (*files.get(language, ()), path)
        if any(splits.values()):
            return TaskFiles(folder, splits["train"], {}, splits["test"])
    return None


def _read_items(path: PathLike) -> Iterator[ElementTree.Element]:
    parser: Any = ElementTree.XMLPullParser(events=("end",))
    try:
        for chunk in read_chunks(path):
            parser.feed(FORBIDDEN.sub(b" ", chunk))
            yield from _take_items(parser)
        parser.close()
        yield from _take_items(parser)
    except ElementTree.ParseError as error:
        line = error.position[0]
        fix = "give well-formed XML"
        raise InputError(
            f"not XML: {error}", file=display_name(path), line=line, fix=fix
        ) from error


def _take_items(parser: Any) -> Iterator[ElementTree.Element]:
    for _, element in parser.read_events():
        if element.tag == "item":
            yield element
            element.clear()
