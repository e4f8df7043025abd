"""Dictionaries between a pivot and other languages: which file, which column, which rows.

Word vectors of many languages, mapped into one space around a pivot.

A folder of word vectors in one space: a file a language, the maps, and why each was chosen.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from calque.algorithms.nearest import normalize_rows
from calque.algorithms.procrustes import Pairs, Step, apply_map, solve_joint
from calque.algorithms.self_learning import Round
from calque.errors import InputError, first_line
from calque.io.dictionaries import Entry, read_dictionary
from calque.io.files import SkippedLines, check_place, write_atomically
from calque.vectors.static import WordVectors, write_vectors
from calque.vectors.trials import (
    UNALIGNED,
    Attempt,
    MapSettings,
    NormalSpace,
    Task,
    Trial,
    choose,
    measure,
    try_method,
    try_unaligned,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


PIVOT, LANGUAGE = "{pivot}", "{language}"


@dataclass(frozen=True, slots=True)
class SeedDictionary:
    """Entries (word of the pivot, word of the language), in the order of the file."""

    entries: Sequence[Entry]
    path: str

    def find_pairs(self, pivot: WordVectors, other: WordVectors) -> Pairs:
        """Find the rows of entries whose words both have vectors: `src` the language's.

        A dictionary that has none is a mistake: of its languages, its case, or its columns.
        """
        pairs = _look_up(self.entries, pivot, other)
        turned = _look_up([entry[::-1] for entry in self.entries], pivot, other)
        if len(turned) > len(pairs):
            raise InputError(
                f"the columns look swapped: {len(turned):,} entries are there if they are turned, "
                f"{len(pairs):,} as they stand",
                file=self.path,
                fix="name it after its columns, as en-de.txt, or swap them",
            )
        if len(pairs) == 0:
            raise InputError(
                f"none of its {len(self.entries):,} entries has two words with vectors",
                file=self.path,
                fix="check its languages and its case, or leave it out",
            )
        return pairs


def name_dictionary(pattern: str, pivot: str, language: str) -> Path:
    """Fill a pattern like `{pivot}-{language}.txt` in."""
    return Path(pattern.replace(PIVOT, pivot).replace(LANGUAGE, language))


def load_dictionary(
    pattern: str, pivot: str, language: str, skipped: SkippedLines | None = None
) -> SeedDictionary | None:
    """Read the dictionary of a language that a pattern like `{pivot}-{language}.txt` names, if any.

    A name that begins with de-en tells that its first column is German. Without such a name the
    first column is the pivot's.
    """
    path = name_dictionary(pattern, pivot, language)
    if LANGUAGE in pattern and not path.exists():
        return None
    entries = list(read_dictionary(path, None if skipped is None else skipped.of(path)))
    if path.name.split(".")[0] == f"{language}-{pivot}":
        entries = [(word, other) for other, word in entries]
    return SeedDictionary(entries, str(path))


def _look_up(entries: Sequence[Entry], pivot: WordVectors, other: WordVectors) -> Pairs:
    rows, known = pivot.look_up(word for word, _ in entries)
    other_rows, other_known = other.look_up(word for _, word in entries)
    both = known & other_known
    return Pairs(torch.from_numpy(other_rows[both]), torch.from_numpy(rows[both]))


OnRound = Callable[[str, str, Round | None], None]
PIVOT_SPACE_MAPPER = "pivot"


@dataclass(frozen=True, slots=True)
class LanguageReport:
    """What was chosen for a language and why, and P@1 in the space that all share.

    Of the `n_train_entries` and `n_dev_entries` of its dictionaries, `n_train` and `n_dev` have
    vectors on both sides. `n_zero` words have a vector of zeros, which stays; `n_duplicates`
    repeated ones were left out when the vectors were read.
    """

    language: str
    n_words: int
    n_zero: int
    n_duplicates: int
    chosen: str
    reason: str
    trials: list[Trial]
    n_train: int = 0
    n_train_entries: int = 0
    n_dev: int = 0
    n_dev_entries: int = 0
    precision: float | None = None


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The way of one language's vectors: scaled, less their mean, scaled, times a matrix."""

    mean: Float[Tensor, "hidden"]
    weight: Float[Tensor, "hidden hidden"]
    steps: tuple[Step, ...]

    def apply(self, rows: Float[Tensor, "words hidden"]) -> Float[Tensor, "words hidden"]:
        """Map rows, which may be of words that had no part in finding the map."""
        known = rows.any(dim=1, keepdim=True)
        for step in self.steps:
            rows = normalize_rows(rows) if step == "unit" else (rows - self.mean) * known
        return apply_map(rows, self.weight)


@dataclass(frozen=True, slots=True)
class MappedSpaces:
    """The maps of all languages into one space, and what was chosen for each."""

    pivot: str
    maps: dict[str, SpaceMap]
    reports: list[LanguageReport]

    def apply(self, language: str, vectors: WordVectors) -> WordVectors:
        """Map the vectors of a language."""
        space_map = self.maps[language]
        matrix = torch.from_numpy(np.asarray(vectors.matrix)).to(space_map.mean.device)
        return replace(vectors, matrix=space_map.apply(matrix).cpu().numpy())


@dataclass(frozen=True, slots=True)
class _Known:
    """The rows of a dictionary's entries, None without a dictionary, and the number of all."""

    pairs: Pairs | None = None
    n_entries: int = 0

    @property
    def n_pairs(self) -> int:
        return 0 if self.pairs is None else len(self.pairs)


@dataclass(frozen=True, slots=True)
class _Decision:
    report: LanguageReport
    attempt: Attempt
    mean: Float[Tensor, "hidden"]
    dev: Pairs | None

    @property
    def is_aligned(self) -> bool:
        return self.attempt.trial.method != UNALIGNED


def map_spaces(
    spaces: Mapping[str, WordVectors],
    pivot: str,
    settings: MapSettings,
    *,
    train: Mapping[str, SeedDictionary] | None = None,
    dev: Mapping[str, SeedDictionary] | None = None,
    on_round: OnRound = lambda language, method, number: None,
) -> MappedSpaces:
    """Map all languages into one space, each by what serves it best.

    Two languages at a time are in memory. Where a development dictionary shows that no method
    helps, a language keeps its vectors, which go the pivot's way (Hämmerl et al., 2022).
    """
    _check(spaces, pivot)
    learned, judged = (_look_up_space_mapper(each or {}, spaces, pivot) for each in (train, dev))
    center = NormalSpace.of(pivot, spaces[pivot], settings)
    decisions = {
        language: _decide(
            center,
            NormalSpace.of(language, vectors, settings),
            settings,
            learned.get(language, _Known()),
            judged.get(language, _Known()),
            on_round,
        )
        for language, vectors in spaces.items()
        if language != pivot
    }
    weights = _solve(decisions, center, settings)
    maps = {
        language: SpaceMap(
            center.mean if language == pivot else decisions[language].mean,
            weights[language],
            settings.steps,
        )
        for language in spaces
    }
    reports = [_report_pivot(center)]
    for language, decision in decisions.items():
        precision = decision.attempt.trial.precision
        if settings.space == "joint" and decision.dev is not None:
            other = NormalSpace.of(language, spaces[language], settings)
            task = Task(center, other, None, decision.dev)
            precision = measure(task, weights[language], weights[pivot])
        reports.append(replace(decision.report, precision=precision))
    return MappedSpaces(pivot, maps, reports)


def _check(spaces: Mapping[str, WordVectors], pivot: str) -> None:
    if pivot not in spaces:
        raise InputError(
            f"no vectors of the pivot {pivot!r}", fix=f"choose from: {' '.join(spaces)}"
        )
    if len(spaces) < 2:
        raise InputError("one language alone", fix="give the vectors of two or more")
    width = spaces[pivot].matrix.shape[1]
    for language, vectors in spaces.items():
        if vectors.matrix.shape[1] != width:
            raise InputError(
                f"vectors of {language} have {vectors.matrix.shape[1]} dimensions, "
                f"those of {pivot} {width}",
                fix="give vectors of one width",
            )


def _look_up_space_mapper(
    dictionaries: Mapping[str, SeedDictionary], spaces: Mapping[str, WordVectors], pivot: str
) -> dict[str, _Known]:
    """Find what dictionaries have, of all languages before the first is learnt."""
    return {
        language: _Known(
            dictionary.find_pairs(spaces[pivot], spaces[language]), len(dictionary.entries)
        )
        for language, dictionary in dictionaries.items()
        if language in spaces
    }


def _decide(
    center: NormalSpace,
    other: NormalSpace,
    settings: MapSettings,
    train: _Known,
    dev: _Known,
    on_round: OnRound,
) -> _Decision:
    """Try all methods on a language and choose."""
    task = Task(center, other, train.pairs, dev.pairs)
    attempts = [] if task.dev is None else [try_unaligned(task)]
    for method in settings.methods:
        on_round(other.language, method, None)

        def tell(number: Round, method: str = method) -> None:
            on_round(other.language, method, number)

        attempts.append(try_method(task, method, settings, tell))
    best, reason = choose(attempts)
    report = LanguageReport(
        language=other.language,
        n_words=len(other.vectors),
        n_zero=_count_zeros(other),
        n_duplicates=other.vectors.n_duplicates,
        chosen=best.trial.method,
        reason=reason,
        trials=[attempt.trial for attempt in attempts],
        n_train=train.n_pairs,
        n_train_entries=train.n_entries,
        n_dev=dev.n_pairs,
        n_dev_entries=dev.n_entries,
    )
    return _Decision(report, best, other.mean, task.dev)


def _solve(
    decisions: Mapping[str, _Decision], center: NormalSpace, settings: MapSettings
) -> dict[str, Float[Tensor, "hidden hidden"]]:
    """Find the matrices of all languages; those unaligned share the pivot's."""
    identity = torch.eye(center.rows.shape[1], dtype=torch.float64)
    aligned = {name: decision for name, decision in decisions.items() if decision.is_aligned}
    if settings.space == "pivot" or not aligned:
        found = {name: decision.attempt.weight for name, decision in aligned.items()}
        pivot_weight = identity
    else:
        moments = [decision.attempt.moments for decision in aligned.values()]
        joint = solve_joint([each for each in moments if each is not None], settings.reweight)
        found, pivot_weight = dict(zip(aligned, joint.others, strict=True)), joint.pivot
    weights = {center.language: pivot_weight}
    for name in decisions:
        weight = found.get(name)
        weights[name] = pivot_weight if weight is None else weight
    return weights


def _report_pivot(center: NormalSpace) -> LanguageReport:
    return LanguageReport(
        language=center.language,
        n_words=len(center.vectors),
        n_zero=_count_zeros(center),
        n_duplicates=center.vectors.n_duplicates,
        chosen=PIVOT_SPACE_MAPPER,
        reason="all others map to it",
        trials=[],
    )


def _count_zeros(space: NormalSpace) -> int:
    return len(space.rows) - int(space.rows.any(dim=1).sum())


MAPS, REPORT = "maps.safetensors", "report.json"
SUFFIXES = ("vec", "bin")
DRAFT = ".calque-map-"


def check_folder(folder: Path, overwrite: bool, files: Iterable[str] = ()) -> None:
    """Refuse a folder that holds something, above all the vectors to be mapped, before the work."""
    check_place(folder)
    for file in files if folder.exists() else ():
        if os.path.exists(file) and os.path.samefile(Path(file).parent, folder):
            raise InputError("is read from the folder to write to", file=file, fix="give a new one")
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise InputError("this folder is not empty", file=folder, fix="give a new one")


def write_mapped(
    mapped: MappedSpaces,
    spaces: Mapping[str, WordVectors],
    folder: Path,
    settings: MapSettings,
    *,
    binary: bool = False,
    on_language: Callable[[str], None] = lambda language: None,
) -> int:
    """Write `de.vec` and so on (`de.bin` if binary), the maps and the report, or nothing.

    Vectors of an earlier map of other languages go: they would not be of this space. Gives the
    number of words whose spaces had to become no-break spaces.
    """
    with _draft(folder) as draft:
        n_spaced = 0
        for language, vectors in spaces.items():
            on_language(language)
            path = draft / f"{language}.{SUFFIXES[binary]}"
            n_spaced += write_vectors(mapped.apply(language, vectors), path, binary=binary)
        _write_maps(mapped, draft, settings)
    return n_spaced


def _write_maps(mapped: MappedSpaces, folder: Path, settings: MapSettings) -> None:
    tensors = {
        f"{language}.{name}": tensor.cpu().contiguous().clone()
        for language, space_map in mapped.maps.items()
        for name, tensor in (("mean", space_map.mean), ("weight", space_map.weight))
    }
    steps = {"steps": " ".join(settings.steps)}
    with write_atomically(folder / MAPS, binary=True) as stream:
        stream.write(save(tensors, steps))
    with write_atomically(folder / REPORT) as text:
        report = {
            "pivot": mapped.pivot,
            "space": settings.space,
            "seed": settings.seed,
            "languages": [asdict(report) for report in mapped.reports],
        }
        text.write(json.dumps(report, ensure_ascii=False, indent=1) + "\n")


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """Give a folder whose files take their places when the block ends well, the report's last."""
    is_new, draft = not folder.exists(), None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=DRAFT, dir=folder))
        yield draft
        older = _list_older(folder)
        (folder / REPORT).unlink(missing_ok=True)
        names = sorted((path.name for path in draft.iterdir()), key=REPORT.__eq__)
        for name in {*older} - {*names}:
            (folder / name).unlink(missing_ok=True)
        for name in names:
            os.replace(draft / name, folder / name)
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise InputError(problem, file=folder, fix="write elsewhere") from error
    finally:
        if draft is not None:
            shutil.rmtree(draft, ignore_errors=True)
        if is_new and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _list_older(folder: Path) -> list[str]:
    """Name the vectors that an earlier report in this folder speaks of."""
    try:
        report = json.loads((folder / REPORT).read_text("utf-8"))
        languages = [str(each["language"]) for each in report["languages"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    stems = [f"{language}.{suffix}" for language in languages for suffix in SUFFIXES]
    names = [stem + end for stem in stems for end in ("", ".counts")]
    return [name for name in names if Path(name).name == name]


def read_maps(folder: Path) -> dict[str, SpaceMap]:
    """Read the maps of a folder, for vectors that were not there when they were found."""
    path = folder / MAPS
    if not path.is_file():
        raise InputError("no maps here", file=folder, fix="give a folder that `calque map` wrote")
    try:
        with safe_open(path, framework="pt") as stored:
            steps = tuple(cast(Step, step) for step in stored.metadata()["steps"].split())
            names: list[str] = list(stored.keys())
            languages = [name.removesuffix(".mean") for name in names if name.endswith(".mean")]
            return {
                language: SpaceMap(
                    stored.get_tensor(f"{language}.mean"),
                    stored.get_tensor(f"{language}.weight"),
                    steps,
                )
                for language in languages
            }
    except (SafetensorError, KeyError, TypeError) as error:
        raise InputError(first_line(error), file=path, fix="map the vectors again") from error
