"""What a run did: the counts of the table, and the outputs to compare."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.campaign.children import Child

COLUMNS = (
    "ok", "clear error", "traceback", "hang", "wrong exit", "difference", "litter", "orphan",
    "> 2 GB",
)  # fmt: skip
GOOD = ("ok", "clear error")
MAX_BYTES = 2 << 30
# Names of unfinished work that stays only if a process is killed.
LITTER = re.compile(r"\.calque-.*|\.tmp.*|\..*\.(partial|replaced|deleted|lock)|.*\.draft|core")
# Differ from run to run.
TIMES = {"checksum", "seconds", "tokens_per_second", "time", "memory_mb", "free_mb"}


@dataclass
class Outcome:
    """The counts of one attempt, the number of kills and, if something is bad, what happened."""

    counts: set[str] = field(default_factory=set)
    details: list[str] = field(default_factory=list)
    n_kills: int = 0

    def add(self, count: str, detail: str = "") -> None:
        """Count something; `detail` describes what is wrong."""
        self.counts.add(count)
        if detail:
            self.details.append(f"{count}: {detail}")

    @property
    def is_good(self) -> bool:
        """Whether nothing was wrong."""
        return self.counts <= set(GOOD)


@dataclass(frozen=True)
class Attempt:
    """One try of one part: `act` works in an empty folder, with its own random numbers."""

    part: str
    row: str
    number: int
    act: Callable[[Path, Random], Outcome]


def judge_end(child: Child, outcome: Outcome, codes: Sequence[int] = (0, 2)) -> None:
    """Count how a process ended that was not interrupted: which exit code, what it printed."""
    shown = child.stderr
    if child.code is None or child.max_bytes > MAX_BYTES:
        outcome.add("> 2 GB", f"{child.max_bytes / 2**30:.1f} GB")
    if "Traceback" in shown or child.code not in (0, 1, 2, *codes):
        outcome.add("traceback", describe_traceback(shown, child.code))
    elif child.code not in codes:
        outcome.add("wrong exit", f"exit code {child.code}: {last_line(shown)}")
    elif child.code == 0:
        outcome.add("ok")
    elif child.code == 2:
        outcome.add("clear error")
        if problem := find_unclear(shown):
            outcome.add("wrong exit", problem)


def find_unclear(shown: str) -> str:
    """Return what is wrong with an error message, or an empty string."""
    lines = shown.splitlines()
    errors = [line for line in lines if line.startswith(("calque: error:", "invalid: "))]
    if errors != lines[-1:]:
        return f"not one clear line: {shown[-300:]!r}"
    if not errors[0].isprintable() or len(errors[0]) > 2000:
        return f"not printable, or too long: {errors[0][:300]!r}"
    return ""


def describe_traceback(shown: str, code: int | None) -> str:
    """Return the last line of Calque's code in a traceback, and the error."""
    frames = re.findall(r'File ".*?/src/(calque/[^"]+)", line (\d+), in (\S+)', shown)
    place = ":".join(frames[-1][:2]) + f" {frames[-1][2]}" if frames else "no frame of Calque"
    errors = re.findall(r"^(?:[\w.]+(?:Error|Exception|Interrupt|Warning|Exit)\b.*)", shown, re.M)
    return f"{place}: {(errors or [last_line(shown)])[-1][:160]} (exit code {code})"


def last_line(shown: str) -> str:
    """Return the last line of a text."""
    return (shown.strip().splitlines() or [""])[-1][:300]


def judge_litter(folders: Iterable[Path], outcome: Outcome, allowed: str = "") -> None:
    """Count files and folders that only unfinished work may have."""
    for folder in folders:
        for path in folder.rglob("*"):
            name = str(path.relative_to(folder))
            is_left = LITTER.fullmatch(path.name) or folder.name == "tmp"
            if is_left and not (allowed and re.search(allowed, name)):
                outcome.add("litter", f"{folder.name}/{name}")


def judge_orphans(child: Child, outcome: Outcome, seconds: float = 3.0) -> None:
    """Count processes that outlive the main one."""
    if left := child.find_orphans(seconds):
        outcome.add("orphan", ", ".join(left))


def read_outputs(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a folder, without times and amounts of memory.

    Of checkpoints, only the last one counts: an interrupted run has another one before it.
    """
    found = {}
    steps = sorted(folder.glob("*/step-*"))[:-1]
    for path in sorted(folder.rglob("*")):
        if any(path.is_relative_to(step) for step in steps):
            continue
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file():
            found[name] = "folder" if path.is_dir() else "special"
        else:
            found[name] = hashlib.sha256(_without_times(path)).hexdigest()[:16]
    return found


def compare_outputs(expected: dict[str, str], found: dict[str, str], outcome: Outcome) -> None:
    """Count outputs that differ from those of an undisturbed run, and files that it has not."""
    different = [name for name in expected if found.get(name) != expected[name]]
    if different:
        outcome.add("difference", ", ".join(different[:5]))
    if more := [name for name in found if name not in expected]:
        outcome.add("litter", ", ".join(more[:5]))


def tabulate(rows: dict[tuple[str, str], Counter[str]]) -> str:
    """Return the table of counts in Markdown."""
    lines = ["| part | what | tries | " + " | ".join(COLUMNS) + " |"]
    lines.append("|---|---|" + "---:|" * (len(COLUMNS) + 1))
    for (part, row), counts in [*rows.items(), (("all", ""), sum(rows.values(), Counter()))]:
        cells = " | ".join(f"{counts[name]:,}" for name in ("tries", *COLUMNS))
        lines.append(f"| {part} | {row} | {cells} |")
    return "\n".join(lines)


def _without_times(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix not in (".json", ".jsonl"):
        return content
    try:
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        values = [json.dumps(_drop_times(json.loads(line))) for line in lines]
        # Parallel runs finish in any order.
        return "\n".join(sorted(values) if path.name == "results.jsonl" else values).encode()
    except (ValueError, RecursionError):
        return content


def _drop_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _drop_times(value) for key, value in tree.items() if key not in TIMES}
    return [_drop_times(value) for value in tree] if isinstance(tree, list) else tree
