"""Product reviews of Prettenhofer and Stein (2010): XML with a rating, good against bad."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from calque.text.files import PathLike, read_chunks, shown
from calque.text.labelled import LabelledText
from calque.text.xtreme import TaskFiles, require_folder
from calque.types import InputError

GOOD, BAD = "good", "bad"
MIDDLE = 3.0
# Characters that XML forbids but reviewers typed.
FORBIDDEN = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
FOLDERS = ("cls-acl10-unprocessed", "cls", "amazon_reviews", "reviews")
# The corpus names Japanese by its country.
LANGUAGES = {"jp": "ja"}


def read_reviews(path: PathLike, dropped: Counter[str] | None = None) -> list[LabelledText]:
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
            raise InputError(f"a rating {rating!r}", file=shown(path), fix=fix) from None
        summary = (item.findtext("summary") or "").strip()
        whole = " ".join(f"{summary} {text or ''}".split())
        if stars == MIDDLE or not whole:
            counts["reviews_of_three_stars" if whole else "reviews_without_text"] += 1
            continue
        found.append(LabelledText((whole,), GOOD if stars > MIDDLE else BAD))
    if not found:
        raise InputError("holds no review", file=shown(path), fix="give another file")
    return found


def find_reviews(data: Path) -> TaskFiles | None:
    """Find `LANGUAGE/CATEGORY/train.review` and `test.review`; all categories count as one."""
    require_folder(data)
    for folder in [*(data / name for name in FOLDERS), data]:
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
        raise InputError(f"not XML: {error}", file=shown(path), line=line, fix=fix) from error


def _take_items(parser: Any) -> Iterator[ElementTree.Element]:
    for _, element in parser.read_events():
        if element.tag == "item":
            yield element
            element.clear()
