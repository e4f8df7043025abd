"""The recipe's `probe`: which tagged sentences measure transfer along training, and how often."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from calque.models.tag_probe import Metric
from calque.types import InputError

LANGUAGE = "{language}"


class ProbeSection(BaseModel):
    """A small tagging task learnt from frozen states in one language and scored in others.

    Files are treebanks in CoNLL-U or `word ⇥ tag` lines. In `test`, `{language}` stands for the
    name of a language and `*` for anything: ud/{language}_*-dev.conllu.xz.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    train: str
    test: str | dict[str, str]
    source: str = "en"
    # By default all that `test` finds.
    languages: list[str] | None = Field(None, min_length=1)
    # At step 0, every so many steps, and at the last.
    every: int = Field(1000, gt=0)
    # By default two thirds of the way up, where words align best.
    layer: int | None = None
    metric: Metric = "accuracy"
    # At most so many sentences, spread over the file.
    train_sentences: int = Field(500, gt=0)
    test_sentences: int = Field(100, gt=0)

    def is_due(self, step: int, last: bool) -> bool:
        """Tell whether the probe is taken after a step."""
        return last or step % self.every == 0

    def find_tests(self) -> dict[str, Path]:
        """Find the files to score, by language: the source first, then the others by name."""
        found = _match(self.test) if isinstance(self.test, str) else _take(self.test)
        wanted = list(found) if self.languages is None else [self.source, *self.languages]
        for name in wanted:
            if name not in found:
                fix = f"choose from: {' '.join(sorted(found))}"
                raise InputError(f"the probe has no test of {name!r}", file=self.test, fix=fix)
        if self.source not in found:
            raise InputError(f"the probe has no test of its source {self.source!r}", file=self.test)
        if not Path(self.train).is_file():
            raise InputError("no such file", file=self.train, fix="correct the path in probe.train")
        if found[self.source].resolve() == Path(self.train).resolve():
            raise InputError(
                "the probe would learn from its test", file=self.train, fix="give another file"
            )
        names = sorted(set(wanted) - {self.source})
        return {name: found[name] for name in (self.source, *names)}


def anchor_probe(probe: ProbeSection | None, base: Path) -> ProbeSection | None:
    """Make files beside the recipe findable from anywhere."""
    if probe is None:
        return None
    test: str | dict[str, str]
    if isinstance(probe.test, str):
        test = _beside(probe.test, base)
    else:
        test = {name: _beside(path, base) for name, path in probe.test.items()}
    return probe.model_copy(update={"train": _beside(probe.train, base), "test": test})


def _beside(path: str, base: Path) -> str:
    """Find a path or pattern beside the recipe, or leave it to the working directory."""
    expanded = os.path.expanduser(path)
    beside = str(base.resolve() / expanded)
    return beside if _glob(beside) else expanded


def _match(pattern: str) -> dict[str, Path]:
    """Find the files of a pattern and read their languages off the names.

    A language that several files have is an error, since one would be passed over in silence.
    """
    if pattern.count(LANGUAGE) != 1:
        fix = "write it once, as in ud/{language}_*-dev.conllu.xz, or list the files by language"
        raise InputError(f"no {LANGUAGE} in the probe's test", file=pattern, fix=fix)
    head, tail = (re.escape(part).replace(r"\*", ".*") for part in pattern.split(LANGUAGE))
    shape = re.compile(rf"{head}(?P<language>[a-z]{{2,3}})(?![a-z]){tail}", re.DOTALL)
    found: dict[str, Path] = {}
    for path in _glob(pattern):
        matched = shape.fullmatch(path)
        if matched is None:
            continue
        name = matched["language"]
        if name in found:
            raise InputError(
                f"{path} is of {name!r} too", file=found[name], fix="narrow probe.test down"
            )
        found[name] = Path(path)
    if not found:
        raise InputError("the probe's test finds no file", file=pattern, fix="correct the path")
    return found


def _glob(pattern: str) -> list[str]:
    """List the files of a pattern, in which nothing but `*` and `{language}` is special."""
    return sorted(glob.glob(glob.escape(pattern.replace(LANGUAGE, "*")).replace("[*]", "*")))


def _take(files: dict[str, str]) -> dict[str, Path]:
    for path in files.values():
        if not Path(path).is_file():
            raise InputError("no such file", file=path, fix="correct the path in probe.test")
    return {name: Path(path) for name, path in files.items()}
