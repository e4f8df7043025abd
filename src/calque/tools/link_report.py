"""What making links removed, by filter, bitext by bitext: the figures and their file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from calque.text.files import write_atomically
from calque.types import InputError

REPORT = "report.json"
FORMAT = "calque links 1"


@dataclass(slots=True)
class LinkReport:
    """Counts of pairs and links, in the order in which they were dropped.

    Of the pairs read, `n_bad` could not be, `n_other_tags` were not asked for, `n_empty` have an
    empty side, the words of `n_unfit` cannot be written as `a ||| b` (they hold `|||` or white
    space, or are more than 4,095), and `n_unlinked` were left without links. Of the links found,
    `n_identical` join two equal words, and `n_many` a word that has others. `n_long` and `n_cut`
    are those of `AlignReport`.
    """

    n_read: int = 0
    n_bad: int = 0
    n_other_tags: int = 0
    n_empty: int = 0
    n_unfit: int = 0
    n_links: int = 0
    n_identical: int = 0
    n_many: int = 0
    n_unlinked: int = 0
    n_long: int = 0
    n_cut: int = 0

    @property
    def n_usable(self) -> int:
        """How many pairs were aligned."""
        return self.n_read - self.n_bad - self.n_other_tags - self.n_empty - self.n_unfit

    @property
    def n_kept(self) -> int:
        """How many pairs were written."""
        return self.n_usable - self.n_unlinked

    @property
    def n_kept_links(self) -> int:
        """How many links were written."""
        return self.n_links - self.n_identical - self.n_many

    @classmethod
    def total(cls, reports: Iterable[Self]) -> Self:
        """Add reports up."""
        rows = [[getattr(report, field.name) for field in fields(cls)] for report in reports]
        return cls(*map(sum, zip(*rows, strict=True)))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """Take the counts that `to_dict` gave."""
        return cls(**{field.name: int(content[field.name]) for field in fields(cls)})

    def to_dict(self) -> dict[str, Any]:
        """Give plain values, ready for JSON: counts, and shares of the pairs or links before."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        shares = {
            "share_identical": share(self.n_identical, self.n_links),
            "share_many": share(self.n_many, self.n_links),
            "share_kept_links": share(self.n_kept_links, self.n_links),
            "share_kept": share(self.n_kept, self.n_read),
        }
        kept = {"n_kept_links": self.n_kept_links, "n_kept": self.n_kept}
        return counts | kept | {name: round(value, 6) for name, value in shares.items()}


def share(part: int, whole: int) -> float:
    """Give a part of a whole; of nothing, nothing."""
    return part / whole if whole else 0.0


def read_entries(folder: Path) -> dict[str, Any]:
    """Read what is reported of the bitexts in a folder, of those that are still there."""
    path = folder / REPORT
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
        is_ours = content["format"] == FORMAT
        for entry in content["bitexts"].values() if is_ours else ():
            LinkReport.from_dict(entry)
    except (ValueError, KeyError, TypeError, AttributeError):
        is_ours = False
    if not is_ours:
        raise InputError("not a report of links", file=path, fix="write to another folder")
    return {
        name: entry
        for name, entry in content["bitexts"].items()
        if (folder / f"{name}.text").exists()
    }


def write_entries(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write what was done with every bitext in a folder, and the sum of it."""
    total = LinkReport.total(map(LinkReport.from_dict, entries.values()))
    bitexts = {name: entries[name] for name in sorted(entries)}
    content = {"format": FORMAT, "bitexts": bitexts, "total": total.to_dict()}
    with write_atomically(folder / REPORT) as stream:
        stream.write(json.dumps(content, ensure_ascii=False, indent=2) + "\n")
