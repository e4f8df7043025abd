"""Map word vectors of several languages into one space around a pivot language."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from safetensors.torch import save

from calque.algorithms.nearest import normalize_rows
from calque.algorithms.procrustes import (
    NORMALIZATION_STEPS,
    IndexPairs,
    NormalizationStep,
    apply_map,
    solve_joint_maps,
)
from calque.algorithms.rcsls import RcslsSettings
from calque.algorithms.self_learning import LearningRound, SelfLearningSettings
from calque.errors import InputError
from calque.io.dictionaries import Entry, read_dictionary
from calque.io.files import (
    PathLike,
    SkippedLines,
    check_skip_list,
    check_writable_folder,
    open_skip_list,
    write_atomically,
)
from calque.io.outputs import open_draft
from calque.io.structured import read_json
from calque.io.tensor_files import read_tensors
from calque.models.inference import choose_device
from calque.vectors.method_selection import (
    TO_PIVOT,
    UNALIGNED,
    WITH_DICTIONARY,
    FittedTrial,
    MappingTask,
    MapSettings,
    NormalizedSpace,
    Trial,
    choose_trial,
    measure_precision,
    try_method,
    try_unaligned,
)
from calque.vectors.static import MAX_WORDS, WordVectors

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.types import Progress

    OnRound = Callable[[str, str, LearningRound | None], None]

LANGUAGE_FIELD, PIVOT_FIELD = "{language}", "{pivot}"
MAPS, REPORT = "maps.safetensors", "report.json"
SUFFIXES = ("vec", "bin")
MAP_AGAIN = "map the vectors again"


@dataclass(frozen=True, slots=True)
class LanguageReport:
    """Which method was chosen for a language and why, and P@1 in the common space.

    Of the `n_train_entries` and `n_dev_entries` of its dictionaries, `n_train` and `n_dev` have
    vectors in both languages. `n_zero` words have zero vectors, which are kept; `n_duplicates`
    repeated words were left out when the vectors were read.
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
class MapResult:
    """Where the mapped vectors were written, and a report for every language.

    `n_spaced` words had spaces that were replaced; `n_skipped` lines were invalid.
    """

    output: Path
    pivot: str
    space: str
    languages: list[LanguageReport]
    n_spaced: int
    n_skipped: int


def map_vectors(
    files: Sequence[PathLike] | Mapping[str, PathLike],
    *,
    output: PathLike,
    pivot: str | None = None,
    method: str | None = None,
    dictionary: str | None = None,
    dev: str | None = None,
    space: str | None = None,
    max_words: int = MAX_WORDS,
    cutoff: int = 20_000,
    seed: int = 0,
    binary: bool = False,
    overwrite: bool = False,
    skip_bad: PathLike | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> MapResult:
    """Map word vectors of several languages into one space.

    With development dictionaries, a language for which no method helps keeps its vectors exactly
    as they are. The output folder has the vectors as `de.vec`, ..., the maps, and a report of all
    choices.

    Args:
        files: Vectors in word2vec format, one file per language: paths whose names start with the
            language ("en.vec", "de.vec.gz"), strings like "en=FILE", or a mapping.
        output: Output folder.
        pivot: Language that the others are mapped to. Default: the first.
        method: One or several methods, separated by commas: supervised, semi-supervised, identical,
            unsupervised, procrustes, refine, rcsls. Default: supervised with a dictionary,
            otherwise unsupervised.
        dictionary: Training dictionaries, such as "{pivot}-{language}.0-5000.txt" (MUSE's format).
        dev: Development dictionaries, used to choose the method for each language.
        space: `joint` (all languages change) or `pivot` (it stays). Default: what the method needs.
        max_words: Use the first words of each file; 0 means all.
        cutoff: Number of frequent words that self-learning matches.
        seed: Random seed.
        binary: Write the binary word2vec format instead of text.
        overwrite: Replace the output of an earlier run.
        skip_bad: Skip invalid lines and list them in this file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        progress: Called with the stage, the number of files or rounds done, and the total.

    Examples:
        >>> result = calque.map_vectors(["en.vec", "de.vec"], output="mapped")  # doctest: +SKIP
        >>> result.languages[1].chosen  # doctest: +SKIP
        'unsupervised'
    """
    output, paths = Path(output), name_languages(files)
    center = pivot or next(iter(paths))
    if center not in paths:
        raise InputError(
            f"there are no vectors of the pivot {center!r}", fix=f"choose from: {' '.join(paths)}"
        )
    settings = _choose_settings(method, space, dictionary is not None, cutoff, seed, device)
    check_folder(output, overwrite, paths.values())
    skip_list = None if skip_bad is None else Path(skip_bad)
    if skip_list is not None:
        if skip_list.resolve().parent == output.resolve():
            raise InputError(
                "the list of invalid lines is in the output folder",
                file=skip_list,
                fix="choose another place",
            )
        patterns = [pattern for pattern in (dictionary, dev) if pattern]
        read = [dictionary_path(each, center, other) for each in patterns for other in paths]
        check_skip_list(skip_list, [*paths.values(), *read])
    with ExitStack() as stack:
        skipped = open_skip_list(skip_list, stack)
        train, dev_dictionaries = (
            load_dictionaries(pattern, center, list(paths), option, skipped)
            for pattern, option in ((dictionary, "--dictionary"), (dev, "--dev"))
        )
        spaces: dict[str, WordVectors] = {}
        for language, path in paths.items():
            skip = None if skipped is None else skipped.of(path)
            spaces[language] = WordVectors.load(path, max_words=max_words or None, skip_bad=skip)
            if progress is not None:
                progress("reading", len(spaces), len(paths))

        def on_round(language: str, method: str, state: LearningRound | None) -> None:
            if progress is not None:
                progress(f"mapping {language}: {method}", state.number if state else 0, None)

        mapped = map_spaces(
            spaces, center, settings, train=train, dev=dev_dictionaries, on_round=on_round
        )
        n_spaced = write_mapped(mapped, spaces, output, settings, binary=binary, progress=progress)
    n_skipped = 0 if skipped is None else skipped.n_lines
    return MapResult(output, center, settings.space, mapped.reports, n_spaced, n_skipped)


def name_languages(files: Sequence[PathLike] | Mapping[str, PathLike]) -> dict[str, str]:
    """Return the file of each language, which "en=FILE" or the first part of its name states."""
    if isinstance(files, Mapping):
        paths = {language: os.fspath(path) for language, path in files.items()}
    else:
        paths = {}
        for path_or_name in files:
            file = os.fspath(path_or_name)
            language, equals, path = file.partition("=")
            if not equals or "/" in language or Path(file).exists():
                language, path = Path(file).name.split(".")[0], file
            if not language or not path:
                raise InputError(f"the language of {file!r} is not known", fix="write en=FILE")
            if language in paths:
                raise InputError(
                    f"{paths[language]} and {path} would both be {language!r}",
                    fix="name the languages: en=FILE de=FILE",
                )
            paths[language] = path
    if len(paths) < 2:
        raise InputError("there is only one language", fix="pass the vectors of two or more")
    for language in paths:  # the names of the output files
        if language in ("", "..") or Path(language).name != language or not language.isprintable():
            raise InputError(f"{language!r} is not the name of a language", fix="write en=FILE")
    return paths


def _choose_settings(
    method: str | None, space: str | None, has_dictionary: bool, cutoff: int, seed: int, device: str
) -> MapSettings:
    default = "supervised" if has_dictionary else "unsupervised"
    methods: Any = tuple(name.strip() for name in (method or default).split(","))
    chosen: Any = space or ("pivot" if TO_PIVOT.intersection(methods) else "joint")
    settings = MapSettings(
        methods=methods,
        space=chosen,
        learning=SelfLearningSettings(n_words=cutoff),
        rcsls=RcslsSettings(n_words=cutoff),
        seed=seed,
        device=choose_device(device),
    )
    with_dictionary = [name for name in methods if name in WITH_DICTIONARY]
    if with_dictionary and not has_dictionary:
        raise InputError(f"{with_dictionary[0]} needs a dictionary", fix="add --dictionary")
    if has_dictionary and not with_dictionary:
        raise InputError(
            f"{', '.join(methods)} does not use the dictionary",
            fix="drop --dictionary, pass it as --dev, or choose another method",
        )
    return settings


@dataclass(frozen=True, slots=True)
class SeedDictionary:
    """Entries (word of the pivot, word of the language), in the order of the file."""

    entries: Sequence[Entry]
    path: str

    def find_pairs(self, pivot: WordVectors, other: WordVectors) -> IndexPairs:
        """Return the rows of entries whose words both have vectors; `src` is the language.

        If there are none, the languages, the case or the columns must be wrong.
        """
        pairs = _find_rows(self.entries, pivot, other)
        swapped = _find_rows([entry[::-1] for entry in self.entries], pivot, other)
        if len(swapped) > len(pairs):
            raise InputError(
                f"the columns seem to be swapped: {len(pairs):,} entries have vectors, "
                f"{len(swapped):,} if the columns are swapped",
                file=self.path,
                fix="name the file after its columns, as en-de.txt, or swap them",
            )
        if len(pairs) == 0:
            raise InputError(
                f"none of the {len(self.entries):,} entries has two words with vectors",
                file=self.path,
                fix="check the languages and the case, or drop the dictionary",
            )
        return pairs


def _find_rows(entries: Sequence[Entry], pivot: WordVectors, other: WordVectors) -> IndexPairs:
    rows = pivot.look_up(word for word, _ in entries)
    other_rows = other.look_up(word for _, word in entries)
    known = (rows >= 0) & (other_rows >= 0)
    return IndexPairs(torch.from_numpy(other_rows[known]), torch.from_numpy(rows[known]))


def dictionary_path(pattern: str, pivot: str, language: str) -> Path:
    """Return the path of the dictionary of a language, given `{pivot}-{language}.txt`."""
    return Path(pattern.replace(PIVOT_FIELD, pivot).replace(LANGUAGE_FIELD, language))


def load_dictionary(
    pattern: str, pivot: str, language: str, skipped: SkippedLines | None = None
) -> SeedDictionary | None:
    """Read the dictionary of a language; None if it does not exist and the pattern has a field.

    If the file name starts with de-en, the first column is German. Otherwise, the first column is
    the language of the pivot.
    """
    path = dictionary_path(pattern, pivot, language)
    if LANGUAGE_FIELD in pattern and not path.exists():
        return None
    entries = list(read_dictionary(path, None if skipped is None else skipped.of(path)))
    if path.name.split(".")[0] == f"{language}-{pivot}":
        entries = [(word, other) for other, word in entries]
    return SeedDictionary(entries, str(path))


def load_dictionaries(
    pattern: str | None,
    pivot: str,
    languages: Sequence[str],
    option: str,
    skipped: SkippedLines | None = None,
) -> dict[str, SeedDictionary]:
    """Read the dictionaries of the languages that have one; `option` is used in messages."""
    if pattern is None:
        return {}
    others = [language for language in languages if language != pivot]
    if LANGUAGE_FIELD not in pattern and len(others) > 1:
        raise InputError(
            f"{option} names one file for {len(others)} languages",
            fix=f"write {LANGUAGE_FIELD} where the file names differ",
        )
    found = {language: load_dictionary(pattern, pivot, language, skipped) for language in others}
    dictionaries = {language: each for language, each in found.items() if each is not None}
    if not dictionaries:
        raise InputError(
            f"{option}: there is no such file for any language",
            file=pattern,
            fix="check the pattern",
        )
    return dictionaries


@dataclass(frozen=True, slots=True)
class SpaceMap:
    """The map of a language: normalization steps, then a product with a matrix."""

    mean: Float[Tensor, "hidden"]
    weight: Float[Tensor, "hidden hidden"]
    steps: tuple[NormalizationStep, ...]

    def apply(self, rows: Float[Tensor, "words hidden"]) -> Float[Tensor, "words hidden"]:
        """Map vectors, also of words that were not used to find the map."""
        is_filled = rows.any(dim=1, keepdim=True)
        for step in self.steps:
            rows = normalize_rows(rows) if step == "unit" else (rows - self.mean) * is_filled
        return apply_map(rows, self.weight)


@dataclass(frozen=True, slots=True)
class MappedSpaces:
    """The maps of languages into one space, and a report for each language.

    Languages that keep their vectors have no map.
    """

    pivot: str
    maps: dict[str, SpaceMap]
    reports: list[LanguageReport]

    def apply(self, language: str, vectors: WordVectors) -> WordVectors:
        """Map the vectors of a language; without a map, return the same vectors."""
        space_map = self.maps.get(language)
        if space_map is None:
            return vectors
        matrix = torch.from_numpy(np.asarray(vectors.matrix)).to(space_map.mean.device)
        return replace(vectors, matrix=space_map.apply(matrix).cpu().numpy())


@dataclass(frozen=True, slots=True)
class _Choice:
    """The chosen trial of a language, and what is needed for its map and its report."""

    report: LanguageReport
    fitted: FittedTrial
    mean: Float[Tensor, "hidden"]
    dev: IndexPairs | None


def map_spaces(
    spaces: Mapping[str, WordVectors],
    pivot: str,
    settings: MapSettings,
    *,
    train: Mapping[str, SeedDictionary] | None = None,
    dev: Mapping[str, SeedDictionary] | None = None,
    on_round: OnRound = lambda language, method, state: None,
) -> MappedSpaces:
    """Map all languages into one space, each by its best method.

    Two languages at a time are on the device. If no method improves the precision on its
    development dictionary, a language keeps its vectors exactly as they are (Hämmerl et al., 2022,
    Section 3.2); if that holds for all languages, so does the pivot.
    """
    _check_spaces(spaces, pivot)
    train_pairs, dev_pairs = (  # of all languages, before the first is mapped
        {
            language: (
                dictionary.find_pairs(spaces[pivot], spaces[language]),
                len(dictionary.entries),
            )
            for language, dictionary in (dictionaries or {}).items()
            if language in spaces
        }
        for dictionaries in (train, dev)
    )
    center = NormalizedSpace.from_vectors(pivot, spaces[pivot], settings)
    choices = {
        language: _choose_method(
            center,
            NormalizedSpace.from_vectors(language, vectors, settings),
            settings,
            train_pairs.get(language, (None, 0)),
            dev_pairs.get(language, (None, 0)),
            on_round,
        )
        for language, vectors in spaces.items()
        if language != pivot
    }
    weights = _solve(choices, center, settings)
    maps = {
        language: SpaceMap(
            center.mean if language == pivot else choices[language].mean, weight, settings.steps
        )
        for language, weight in weights.items()
    }
    reports = [_report(center, "pivot", "all others map to it", [])]
    for language, choice in choices.items():
        precision = choice.fitted.trial.precision
        if choice.dev is not None and (settings.space == "joint" or language not in weights):
            other = NormalizedSpace.from_vectors(language, spaces[language], settings)
            rows = other.map(weights.get(language)), center.map(weights.get(pivot))
            precision = measure_precision(choice.dev, *rows)
        reports.append(replace(choice.report, precision=precision))
    return MappedSpaces(pivot, maps, reports)


def _check_spaces(spaces: Mapping[str, WordVectors], pivot: str) -> None:
    if pivot not in spaces:
        raise InputError(
            f"there are no vectors of the pivot {pivot!r}", fix=f"choose from: {' '.join(spaces)}"
        )
    if len(spaces) < 2:
        raise InputError("there is only one language", fix="pass the vectors of two or more")
    width = spaces[pivot].matrix.shape[1]
    for language, vectors in spaces.items():
        if vectors.matrix.shape[1] != width:
            raise InputError(
                f"the vectors of {language} have {vectors.matrix.shape[1]} dimensions, "
                f"those of {pivot} have {width}",
                fix="pass vectors with the same number of dimensions",
            )


def _choose_method(
    center: NormalizedSpace,
    other: NormalizedSpace,
    settings: MapSettings,
    train_pairs: tuple[IndexPairs | None, int],
    dev_pairs: tuple[IndexPairs | None, int],
    on_round: OnRound,
) -> _Choice:
    """Try all methods on a language, and choose one; dictionaries come with their sizes."""
    (train, n_train_entries), (dev, n_dev_entries) = train_pairs, dev_pairs
    task = MappingTask(center, other, train, dev)
    trials = [] if dev is None else [try_unaligned(task)]
    for method in settings.methods:
        on_round(other.language, method, None)

        def on_method_round(state: LearningRound, method: str = method) -> None:
            on_round(other.language, method, state)

        trials.append(try_method(task, method, settings, on_method_round))
    best, reason = choose_trial(trials)
    report = replace(
        _report(other, best.trial.method, reason, [fitted.trial for fitted in trials]),
        n_train=0 if train is None else len(train),
        n_train_entries=n_train_entries,
        n_dev=0 if dev is None else len(dev),
        n_dev_entries=n_dev_entries,
    )
    return _Choice(report, best, other.mean, dev)


def _report(
    space: NormalizedSpace, chosen: str, reason: str, trials: list[Trial]
) -> LanguageReport:
    n_zero = len(space.rows) - int(space.rows.any(dim=1).sum())
    n_words, n_duplicates = len(space.vectors), space.vectors.n_duplicates
    return LanguageReport(space.language, n_words, n_zero, n_duplicates, chosen, reason, trials)


def _solve(
    choices: Mapping[str, _Choice], center: NormalizedSpace, settings: MapSettings
) -> dict[str, Float[Tensor, "hidden hidden"]]:
    """Return the matrices of the pivot and of the aligned languages; none if none is aligned."""
    aligned = {
        language: choice.fitted
        for language, choice in choices.items()
        if choice.fitted.trial.method != UNALIGNED
    }
    if not aligned:
        return {}
    if settings.space == "joint":
        moments = [fitted.moments for fitted in aligned.values() if fitted.moments is not None]
        joint = solve_joint_maps(moments, settings.reweight)
        return {center.language: joint.pivot, **dict(zip(aligned, joint.others, strict=True))}
    weights = {center.language: torch.eye(center.rows.shape[1], dtype=torch.float64)}
    for language, fitted in aligned.items():
        assert fitted.weight is not None
        weights[language] = fitted.weight
    return weights


def check_folder(folder: Path, overwrite: bool, files: Iterable[str] = ()) -> None:
    """Raise InputError for an output folder that is not empty, or has the input files."""
    check_writable_folder(folder)
    for file in files if folder.exists() else ():
        if os.path.exists(file) and os.path.samefile(Path(file).parent, folder):
            raise InputError(
                "the file to read is in the output folder", file=file, fix="choose a new folder"
            )
    if not overwrite and folder.exists() and any(folder.iterdir()):
        raise InputError(
            "this folder is not empty", file=folder, fix="choose a new one, or add --overwrite"
        )


def write_mapped(
    mapped: MappedSpaces,
    spaces: Mapping[str, WordVectors],
    folder: Path,
    settings: MapSettings,
    *,
    binary: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write `de.vec` and so on (`de.bin` if binary), the maps and the report, or nothing.

    Vectors of an earlier run with other languages are removed, since they are of another space.
    Return the number of words in which spaces had to be replaced by no-break spaces.
    """
    with open_draft(folder) as draft:
        n_spaced = 0
        for number, (language, vectors) in enumerate(spaces.items(), start=1):
            path = draft / f"{language}.{SUFFIXES[binary]}"
            n_spaced += mapped.apply(language, vectors).save(path, binary=binary)
            if progress is not None:
                progress("writing", number, len(spaces))
        tensors = {
            f"{language}.{name}": tensor.cpu().contiguous().clone()
            for language, space_map in mapped.maps.items()
            for name, tensor in (("mean", space_map.mean), ("weight", space_map.weight))
        }
        with write_atomically(draft / MAPS, binary=True) as stream:
            stream.write(save(tensors, {"steps": " ".join(settings.steps)}))
        report = {
            "pivot": mapped.pivot,
            "space": settings.space,
            "seed": settings.seed,
            "languages": [asdict(report) for report in mapped.reports],
        }
        with write_atomically(draft / REPORT) as text:
            text.write(json.dumps(report, ensure_ascii=False, indent=1) + "\n")
        _publish(draft, folder)
    return n_spaced


def _publish(draft: Path, folder: Path) -> None:
    """Move complete files into their folder; a folder with a report is complete."""
    older = _list_older(folder)
    (folder / REPORT).unlink(missing_ok=True)
    names = sorted((path.name for path in draft.iterdir()), key=REPORT.__eq__)
    for name in {*older} - {*names}:
        (folder / name).unlink(missing_ok=True)
    for name in names:
        os.replace(draft / name, folder / name)


def _list_older(folder: Path) -> list[str]:
    """Return the names of the vector files that the report of an earlier run lists."""
    try:
        report = read_json(folder / REPORT, dict)
        languages = [str(each["language"]) for each in report["languages"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []
    stems = [f"{language}.{suffix}" for language in languages for suffix in SUFFIXES]
    names = [stem + end for stem in stems for end in ("", ".counts")]
    return [name for name in names if Path(name).name == name]


def read_maps(folder: Path) -> dict[str, SpaceMap]:
    """Read the maps of an output folder, to apply them to other vectors."""
    path = folder / MAPS
    if not path.is_file():
        raise InputError(
            "there are no maps in this folder",
            file=folder,
            fix="use a folder that `calque map` wrote",
        )
    tensors, metadata = read_tensors(path, fix=MAP_AGAIN)
    steps = tuple(metadata.get("steps", "").split())
    languages = [name.removesuffix(".mean") for name in tensors if name.endswith(".mean")]
    maps = {}
    for language in languages:
        mean, weight = tensors[f"{language}.mean"], tensors.get(f"{language}.weight")
        size = mean.shape[-1:]
        if weight is None or weight.shape != (*size, *size) or {*steps} - {*NORMALIZATION_STEPS}:
            raise InputError(f"the map of {language!r} is damaged", file=path, fix=MAP_AGAIN)
        maps[language] = SpaceMap(mean, weight, cast(tuple[NormalizationStep, ...], steps))
    return maps
