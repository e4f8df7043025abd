"""What `calque translate` reads, and where it goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError
from calque.evaluation.tasks.machine_translation import load_metrics
from calque.io.files import SkippedLines, check_list, open_list, read_lines, refuse, scan_lines
from calque.io.outputs import check_output, open_sink, read_settings, working_folder

if TYPE_CHECKING:
    from calque.translation.translate import TranslateReport, Translator


@dataclass(frozen=True, slots=True)
class TranslateJob:
    """What is read and where it goes."""

    file: str
    output: Path | None
    resume: bool
    skip_bad: Path | None
    score: Path | None

    @property
    def target(self) -> Path | None:
        """The file to write, if it is one."""
        return None if self.output is None or str(self.output) == "-" else self.output

    @property
    def place(self) -> str:
        """Where the translations go, in words."""
        return str(self.target or "standard output")

    @property
    def unfinished(self) -> Path | None:
        """The folder of an unfinished run, if there is one."""
        folder = None if self.target is None else working_folder(self.target)
        return None if folder is None or read_settings(folder) is None else folder

    @property
    def can_reread(self) -> bool:
        """Whether the input is a file, rather than a pipe that gives its text once."""
        path = Path(self.file)
        return self.file != "-" and (path.is_file() or not path.exists())

    @property
    def can_read_back(self) -> bool:
        """Whether what is written can be read again: a file, and no device or pipe."""
        target = self.target
        return target is not None and (target.is_file() or not target.exists())

    def check(self, *, n_best: int) -> None:
        """Refuse what does not go together, before any work."""
        if self.resume and (self.target is None or not self.can_reread):
            raise InputError("--resume needs files", fix="name the input, and the output with -o")
        if self.score is not None and n_best > 1:
            raise InputError("--score is of the best translation", fix="drop --nbest or --score")
        if self.score is not None:
            load_metrics()
        read = [str(path) for path in (self.file, self.score) if path is not None]
        if self.target is not None:
            check_output(self.target, read, resume=self.resume)
        check_list(self.skip_bad, read, self.target)

    def count_lines(self) -> int | None:
        """Read a file once before the work, so that a bad line is known at once; not a pipe."""
        if not self.can_reread:
            return None
        return sum(1 for _ in self.read(None if self.skip_bad is None else SkippedLines()))

    def read(self, skipped: SkippedLines | None) -> Iterator[str]:
        """Read lines; one that is skipped is empty, so that lines keep in step."""
        for number, line in enumerate(scan_lines(self.file), start=1):
            if not isinstance(line, str):
                refuse(line, self.file, number, skipped)
            yield line if isinstance(line, str) else ""

    def read_references(self, n_lines: int | None) -> list[str] | None:
        """Read the references, if any; there must be as many as lines, if that is known."""
        if self.score is None:
            return None
        found = list(read_lines(self.score))
        if n_lines is not None and len(found) != n_lines:
            problem = f"{len(found):,} references for {n_lines:,} lines"
            raise InputError(problem, file=self.score, fix="give a reference for every line")
        return found

    def run(
        self, translator: Translator, n_lines: int | None
    ) -> tuple[TranslateReport, int, int, list[str]]:
        """Translate; also give the lines there were before, those skipped, and what is scored."""
        from calque.cli.console import show_progress
        from calque.translation.translate import write_translations

        kept: list[str] = []
        with ExitStack() as stack:
            skipped = open_list(self.skip_bad, stack)
            sink: Any = stack.enter_context(
                open_sink(self.target, self._settings(translator, n_lines), resume=self.resume)
            )
            if self.score is not None and not self.can_read_back:
                sink = KeepingSink(sink, kept)
            report, n_before = write_translations(
                translator,
                self.read(skipped),
                sink,
                suffix="" if self.target is None else self.target.suffix,
                on_block=stack.enter_context(show_progress("translating", n_lines)),
            )
        if self.score is not None and self.can_read_back:
            kept = list(read_lines(str(self.target)))
        return report, n_before, 0 if skipped is None else skipped.n_lines, kept

    def _settings(self, translator: Translator, n_lines: int | None) -> dict[str, Any]:
        """Give what the bytes of the output depend on."""
        from calque import __version__
        from calque.cli.align_job import fingerprint

        if self.target is None:
            return {"pairs": None}
        search = translator.search
        return {
            "pairs": n_lines if self.can_reread else None,
            "calque": __version__,
            "model": fingerprint(translator.model.folder),
            "device": translator.device.type,
            "to": translator.target,
            "from": translator.source,
            "beams": search.beams,
            "length_penalty": search.length_penalty,
            "nbest": search.n_best,
            "batch_tokens": translator.batch_tokens,
            "skip_bad": self.skip_bad is not None,
        }


class KeepingSink:
    """A sink that also keeps the lines it is given, to be scored."""

    def __init__(self, sink: Any, lines: list[str]) -> None:
        self.sink, self.lines = sink, lines
        self.figures_before: tuple[int, ...] = sink.figures_before

    def wants(self, content: bytes) -> bool:
        """Want what the other one wants."""
        return bool(self.sink.wants(content))

    def append(self, content: bytes, figures: tuple[int, ...]) -> None:
        """Hand a block on, and keep it."""
        self.sink.append(content, figures)
        self.lines += content.decode().split("\n")[:-1]

    def finish(self, empty: bytes = b"") -> tuple[int, ...]:
        """Give the sum of all figures."""
        found: tuple[int, ...] = self.sink.finish(empty)
        return found
