"""Labeled texts: lines of one or two texts with a label, and product reviews in XML.

The reviews are those of Prettenhofer & Stein (2010): ratings above three stars are good, below bad.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from calque.errors import InputError
from calque.io.files import PathLike, display_name, max_line_bytes, read_chunks, read_lines
from calque.io.xtreme import TaskFiles, check_data_folder

# XNLI's machine-translated training files use another name for one label.
RENAMED_LABELS = {"contradictory": "contradiction"}
GOOD, BAD = "good", "bad"
MIDDLE_RATING, MAX_RATING = 3.0, 5
MAX_ITEM_BYTES = 16 << 20  # of a review; a compressed file may hold gigabytes
# Control characters that XML forbids but some reviews contain.
FORBIDDEN_BYTES = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
REVIEW_FOLDERS = ("cls-acl10-unprocessed", "cls", "amazon_reviews", "reviews")
LANGUAGES = {"jp": "ja"}  # the corpus uses the country code


@dataclass(frozen=True, slots=True)
class LabeledText:
    """One example of a file: one or two texts and their label.

    `original` holds the texts that were translated, if the file has them.
    """

    texts: tuple[str, ...]
    label: str
    original: tuple[str, ...] | None = None


def read_labeled_pairs(path: PathLike) -> list[LabeledText]:
    """Read `first ⇥ second ⇥ label` lines, XTREME's format of XNLI and PAWS-X.

    In files of five columns, as in XTREME's translated training sets, the first two are the
    original texts. The original files of PAWS-X, with a header and line ids, are read as well.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t")
        if number == 1 and columns[0] == "id":
            continue
        if len(columns) not in (3, 4, 5):
            raise _invalid_line("two texts and a label", path, number)
        first, second, label = (column.strip() for column in columns[-3:])
        if not (first and second and label):
            raise _invalid_line("two texts and a label", path, number)
        original = (columns[0].strip(), columns[1].strip()) if len(columns) == 5 else None
        found.append(LabeledText((first, second), RENAMED_LABELS.get(label, label), original))
    return _check(found, path)


def read_labeled_texts(path: PathLike) -> list[LabeledText]:
    """Read `text ⇥ label` lines."""
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        text, _, label = line.rpartition("\t")
        if not (text.strip() and label.strip()):
            raise _invalid_line("a text and a label", path, number)
        found.append(LabeledText((text.strip(),), label.strip()))
    return _check(found, path)


def _check(found: list[LabeledText], path: PathLike) -> list[LabeledText]:
    if not found:
        raise InputError(
            "the file has no examples", file=display_name(path), fix="use another file"
        )
    return found


def _invalid_line(wanted: str, path: PathLike, number: int) -> InputError:
    problem, fix = f"the line does not have {wanted}", "separate them by tabs"
    return InputError(problem, file=display_name(path), line=number, fix=fix)


def read_reviews(path: PathLike, dropped: Counter[str] | None = None) -> list[LabeledText]:
    """Read a `.review` file; the text of a review is its summary, if any, and its text.

    Reviews with three stars or without text are left out and counted in `dropped`.
    """
    found, counts = [], Counter[str]() if dropped is None else dropped
    for item in _read_items(path):
        rating, text = item.findtext("rating"), item.findtext("text")
        try:
            stars = float(rating or "")
        except ValueError:
            stars = math.nan
        if not 0 <= stars <= MAX_RATING:
            problem = f"the rating {rating!r} is not a number of stars"
            fix = f"give every <item> a <rating> from 0 to {MAX_RATING}"
            raise InputError(problem, file=display_name(path), fix=fix)
        summary = (item.findtext("summary") or "").strip()
        whole = " ".join(f"{summary} {text or ''}".split())
        if len(whole) > max_line_bytes():
            problem = f"a review is longer than {max_line_bytes():,} characters"
            raise InputError(problem, file=display_name(path), fix="shorten it")
        if stars == MIDDLE_RATING or not whole:
            counts["reviews_of_three_stars" if whole else "reviews_without_text"] += 1
            continue
        found.append(LabeledText((whole,), GOOD if stars > MIDDLE_RATING else BAD))
    if not found:
        raise InputError("the file has no reviews", file=display_name(path), fix="use another file")
    return found


def find_reviews(data: Path, domain: str = "*") -> TaskFiles | None:
    """Return the files `LANGUAGE/DOMAIN/train.review` and `test.review`, by default of all domains.

    The domains are books, dvd and music.
    """
    check_data_folder(data)
    for folder in [*(data / name for name in REVIEW_FOLDERS), data]:
        splits: dict[str, dict[str, tuple[Path, ...]]] = {"train": {}, "test": {}}
        for split, files in splits.items():
            for path in sorted(folder.glob(f"*/{domain}/{split}.review*")):
                language = path.parent.parent.name
                language = LANGUAGES.get(language, language)
                files[language] = (*files.get(language, ()), path)
        if any(splits.values()):
            return TaskFiles(folder, splits["train"], {}, splits["test"])
    return None


def _read_items(path: PathLike) -> Iterator[ElementTree.Element]:
    builder = _ItemBuilder(path)
    parser = ElementTree.XMLParser(target=builder)
    line: int | None = None
    n_pending = 0
    try:
        for chunk in read_chunks(path):
            parser.feed(FORBIDDEN_BYTES.sub(b" ", chunk))
            n_pending = 0 if builder.items else n_pending + len(chunk)
            if n_pending > MAX_ITEM_BYTES:
                raise InputError(f"no <item> ends within {n_pending:,} bytes", file=path)
            yield from builder.take_items()
        parser.close()
        return
    except ElementTree.ParseError as error:
        problem, line = f"this is not XML: {error}", error.position[0]
    except (LookupError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        problem = f"the encoding of the XML is not supported: {error}"
    raise InputError(
        problem, file=display_name(path), line=line, fix="use well-formed XML in UTF-8"
    )


class _ItemBuilder(ElementTree.TreeBuilder):
    """Collects the elements <item>; refuses entities, which can expand to any size."""

    def __init__(self, path: PathLike) -> None:
        super().__init__()
        self._path = path
        self.items: list[ElementTree.Element] = []

    def end(self, tag: str, /) -> ElementTree.Element:
        """Receive the end of an element."""
        element = super().end(tag)
        if tag == "item":
            self.items.append(element)
        return element

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        """Receive a document type declaration, which alone can define entities."""
        problem = "the file has a document type declaration"
        raise InputError(problem, file=display_name(self._path), fix="remove <!DOCTYPE ...>")

    def take_items(self) -> Iterator[ElementTree.Element]:
        """Yield the items that are complete, and free their memory."""
        for item in self.items:
            yield item
            item.clear()
        self.items.clear()
