"""The unfinished work of an extraction, kept beside its output until that is written."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from calque.text.files import write_atomically
from calque.tools.resumable_file import working_folder
from calque.tools.static_vocabulary import CONTENTS, PIECES, SENTENCES
from calque.types import InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS, STATE, DRAFT = "settings.json", "state.safetensors", "state.draft"
OURS = re.compile(
    rf"({SENTENCES}|{PIECES})\.(ids|offsets)\.npy|\.calque-\w+\.partial"
    rf"|{re.escape(CONTENTS)}|{re.escape(SETTINGS)}|{re.escape(STATE)}|{re.escape(DRAFT)}"
)
ANEW = "or remove this folder to begin anew"
# A state of 200,000 words of 768 dimensions takes 1.8 GB.
SECONDS_BETWEEN = 300.0


class ExtractionFolder:
    """`FILE.partial/`: the corpus in numbers, and now and then what was learnt so far.

    It goes when the work is done, or has hardly begun.
    """

    def __init__(
        self,
        target: Path,
        settings: Mapping[str, Any],
        *,
        resume: bool = False,
        seconds_between: float = SECONDS_BETWEEN,
    ) -> None:
        self.path, self.settings = working_folder(target), dict(settings)
        self.seconds_between, self._saved_at = seconds_between, time.monotonic()
        self.is_resumed = self._claim(resume)

    def __enter__(self) -> ExtractionFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        is_begun = self.is_resumed or (self.path / STATE).exists()
        is_halted = (self.path / CONTENTS).exists() and not isinstance(error, InputError)
        if error is None or not (is_begun or is_halted):
            # Without its contents the rest is of no use, should this be killed.
            (self.path / CONTENTS).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)

    def save_if_due(self, state: Callable[[], Mapping[str, Tensor]], n_blocks: int) -> None:
        """Keep what was learnt from so many blocks, unless that was done a short time ago."""
        if time.monotonic() - self._saved_at < self.seconds_between:
            return
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state().items()}
        try:
            save_file(tensors, self.path / DRAFT, metadata={"blocks": str(n_blocks)})
            with open(self.path / DRAFT, "rb") as stream:
                os.fsync(stream.fileno())
            os.replace(self.path / DRAFT, self.path / STATE)
        except (OSError, SafetensorError) as error:
            fix = "make room, then go on with --resume"
            raise InputError(first_line(error), file=self.path / STATE, fix=fix) from error
        self._saved_at = time.monotonic()

    def read_state(self) -> tuple[dict[str, Tensor], int] | None:
        """Read what was learnt, and from how many blocks, if that was kept."""
        path = self.path / STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return tensors, int(file.metadata()["blocks"])
        except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
            problem = f"damaged: {first_line(error)}"
            raise InputError(problem, file=path, fix="remove its folder to begin anew") from error

    def _claim(self, resume: bool) -> bool:
        """Take the folder: new, or with the work of an earlier run."""
        found = self._read_settings()
        if found is not None:
            if not resume:
                problem = "an unfinished run is here"
                raise InputError(problem, file=self.path, fix=f"go on with --resume, {ANEW}")
            self._compare(found)
            return True
        try:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir()
        except OSError as error:
            problem = (error.strerror or str(error)).lower()
            raise InputError(problem, file=self.path, fix="write elsewhere") from error
        with write_atomically(self.path / SETTINGS) as stream:
            json.dump(self.settings, stream)
        return False

    def _read_settings(self) -> dict[str, Any] | None:
        """Read the settings of a run that can be gone on with; refuse what is not ours."""
        if not self.path.exists():
            return None
        if not (self.path.is_dir() and all(map(OURS.fullmatch, os.listdir(self.path)))):
            problem = "something else is where unfinished work would be kept"
            raise InputError(problem, file=self.path, fix="move it, or write elsewhere")
        if not (self.path / CONTENTS).exists():
            return None
        try:
            found: dict[str, Any] = json.loads((self.path / SETTINGS).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return found

    def _compare(self, found: Mapping[str, Any]) -> None:
        for name in {**found, **self.settings}:
            before, now = found.get(name), self.settings.get(name)
            if before != now:
                problem = f"this run began with {name} {before}, not {now}"
                fix = f"give the same input and options, {ANEW}"
                raise InputError(problem, file=self.path, fix=fix)
