"""From a recipe's data section to streams of batches, one per objective."""

from __future__ import annotations

import glob
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError
from calque.io.bitext import languages_of
from calque.io.cleaning import CleaningRules
from calque.tokens.linked import STORES
from calque.tokens.prepare import PreparedCorpus, TextSource
from calque.tokens.ragged import BatchShape, assign_rows
from calque.tokens.store import VECTORS, PreviousSentences, TokenStore, VectorStore
from calque.tokens.streams import (
    BatchPlan,
    BatchStream,
    Corpus,
    language_probabilities,
    number_examples,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.objectives.base import Marks, Objective
    from calque.training.recipe import DataSection, SourceSection


# At most this share of a corpus is kept for validation.
VALIDATION_SHARE = 0.05
# The fewest examples that a block of validation draws.
MIN_BLOCK = 4096
# Sequence lengths drawn to choose the shape of batches.
N_SAMPLED = 20_000
# Batches made of them to see how many rows that takes.
N_TRIALS = 32


def find_sources(data: DataSection, base: Path) -> list[TextSource]:
    """Find the files a recipe's sources name, relative to the recipe's folder or as they stand."""
    sources = [one for section in data.sources for one in _expand(section, base)]
    dropped = set(data.leave_out_languages)
    kept = [source for source in sources if not dropped & set(source.languages)]
    if not kept:
        raise InputError("the recipe names no text", fix="add data.sources, or give --prepared")
    return kept


def check_sources(objectives: Iterable[Objective], sources: Sequence[TextSource]) -> None:
    """Refuse objectives for which no source is of the right kind, before any text is prepared."""
    for objective in objectives:
        if not any(
            _serves(objective, source.languages, source.links is not None, source.vectors)
            for source in sources
        ):
            kind = _describe_text(objective)
            problem = f"{objective.settings.kind}: no source of {kind} among data.sources"
            raise InputError(problem, fix="add one, or leave the objective out")


def cleaning_rules(data: DataSection) -> CleaningRules:
    """Turn the recipe's `data.cleaning` into rules."""
    return CleaningRules(**data.cleaning)


@dataclass(frozen=True, slots=True)
class StreamPair:
    """An objective's training stream, its validation stream, and what was left out."""

    training: BatchStream[Any]
    validation: BatchStream[Any] | None
    n_too_long: int
    n_examples: int
    languages: tuple[str, ...]

    def describe(self) -> str:
        """Say how many examples are used and how many are not."""
        used = f"{self.n_examples:,} examples"
        return used + (f", {self.n_too_long:,} too long" if self.n_too_long else "")


def open_stream(
    objective: Objective,
    prepared: Sequence[PreparedCorpus],
    folder: Path,
    data: DataSection,
    marks: Marks,
    *,
    seed: int,
    fixed_shape: bool,
) -> StreamPair:
    """Make the streams of one objective: sentences or pairs, sampled by language.

    With `fixed_shape` every batch is filled up to the same size, as a compiled step needs.
    """
    units = _find_units(objective, prepared, folder, data)
    n_marks = objective.n_marks(marks)
    parts = [_split(unit, n_marks, data, apart=objective.reads_apart) for unit in units]
    kept = [(unit, part) for unit, part in zip(units, parts, strict=True) if len(part.training)]
    if not kept:
        kind = _describe_text(objective)
        raise InputError(
            f"{objective.settings.kind}: no {kind} of at most {data.max_length} tokens an example",
            fix=f"add a source of {kind}, or raise data.max_length",
        )
    shares = _shares([unit for unit, _ in kept], data.alpha)
    lengths = _sample_lengths([part for _, part in kept], shares, seed)
    shape, plan = _plan(objective, lengths, n_marks, data.max_length)
    names = sorted({unit.key for unit, _ in kept})
    collate = objective.make_collate(marks, shape if fixed_shape else None)

    def choose(name: str) -> list[Corpus]:
        return [
            Corpus(unit.key, unit.sides, getattr(part, name), share, unit.extras)
            for (unit, part), share in zip(kept, shares, strict=True)
            if len(getattr(part, name))
        ]

    validation = choose("validation")
    # A block of training would go through a small corpus many thousand times.
    block_size = max(MIN_BLOCK, sum(map(len, validation)))
    known = names if objective.needs_languages else None
    return StreamPair(
        BatchStream(choose("training"), plan, collate, seed, None, known),
        BatchStream(validation, plan, collate, seed + 1, block_size, known) if validation else None,
        sum(part.n_too_long for part in parts),
        sum(len(part.training) for part in parts),
        tuple(names),
    )


@dataclass(frozen=True, slots=True)
class _Unit:
    """Stores that are sampled together under one language or language pair.

    The extras are what the objective needs besides: the subwords of linked words and the links,
    or the vectors of words.
    """

    key: str
    sides: tuple[TokenStore | PreviousSentences, ...]
    size: float
    extras: tuple[TokenStore | VectorStore, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    training: npt.NDArray[np.integer[Any]]
    validation: npt.NDArray[np.integer[Any]]
    n_too_long: int
    lengths: npt.NDArray[np.int32]


def _expand(section: SourceSection, base: Path) -> list[TextSource]:
    patterns = [section.path] if isinstance(section.path, str) else section.path
    found = [_resolve(pattern, base) for pattern in patterns]
    if section.kind == "bitext" and len(found) == 2 and _are_sides(section, found):
        groups = list(zip(*found, strict=True))
    else:
        groups = [(path,) for paths in found for path in paths]
    keep = None if section.include_tags is None else tuple(section.include_tags)
    exclude = tuple(section.exclude_tags)
    return [
        TextSource(
            group,
            _languages(section, group),
            keep,
            exclude,
            section.weight,
            links,
            section.kind == "vectors",
            section.max_words,
        )
        for group, links in zip(groups, _find_links(section, base, len(groups)), strict=True)
    ]


def _find_links(section: SourceSection, base: Path, n_bitexts: int) -> Sequence[Path | None]:
    """Find a file of links for each bitext, if the source has links."""
    if section.links is None:
        return [None] * n_bitexts
    patterns = [section.links] if isinstance(section.links, str) else section.links
    found = [path for pattern in patterns for path in _resolve(pattern, base)]
    if len(found) != n_bitexts:
        raise InputError(
            f"{len(found)} files of links for {n_bitexts} bitexts",
            file=section.links,
            fix="correct the paths in data.sources",
        )
    return found


def _are_sides(section: SourceSection, found: Sequence[Sequence[Path]]) -> bool:
    """Tell two sides of a bitext, such as news.en and news.de, from two bitexts."""
    if section.languages is None and languages_of([paths[0] for paths in found]) is None:
        return False
    if len(found[0]) != len(found[1]):
        raise InputError(
            f"{len(found[0])} files on one side, {len(found[1])} on the other",
            file=section.path,
            fix="correct the paths in data.sources",
        )
    return True


def _resolve(pattern: str, base: Path) -> list[Path]:
    for root in (base, Path()):
        found = sorted(glob.glob(str(root / Path(pattern).expanduser())))
        if found:
            return [Path(path) for path in found]
    raise InputError("no such file", file=pattern, fix="correct the path in data.sources")


def _languages(section: SourceSection, paths: Sequence[Path]) -> tuple[str, ...]:
    if section.languages is not None:
        languages: tuple[str, ...] = tuple(section.languages.split("-"))
    elif section.kind == "bitext":
        languages = languages_of(paths) or ()
    else:
        languages = (paths[0].name.split(".")[0],)
    if len(languages) != (2 if section.kind == "bitext" else 1):
        raise InputError(
            "cannot tell the languages from the file name",
            file=paths[0],
            fix="give the source `languages: en-de` (bitext) or `languages: de` (others)",
        )
    return languages


def _find_units(
    objective: Objective, prepared: Sequence[PreparedCorpus], folder: Path, data: DataSection
) -> list[_Unit]:
    """Choose the corpora an objective is for; vectors serve those that ask for them alone."""
    left_out = set(data.leave_out_languages)
    chosen = [
        corpus
        for corpus in prepared
        if not left_out & set(corpus.languages)
        and _serves(objective, corpus.languages, corpus.linked, corpus.dimensions > 0)
    ]
    widths = sorted({corpus.dimensions for corpus in chosen})
    if len(widths) > 1:
        raise InputError(
            f"vectors of {widths[0]} and of {widths[-1]} dimensions", fix="give vectors of one kind"
        )
    units = [unit for corpus in chosen for unit in _open_units(corpus, folder, objective)]
    return [unit for unit in units if unit.size > 0]


def _serves(
    objective: Objective, languages: Sequence[str], is_linked: bool, has_vectors: bool
) -> bool:
    """Tell whether a corpus is of a kind that an objective can learn from."""
    if has_vectors != objective.needs_vectors or (objective.needs_links and not is_linked):
        return False
    if objective.settings.text == "raw" and is_linked:
        return False
    if objective.pairs_neighbors:  # plain text alone: the lines of bitext seldom follow each other
        return len(languages) == 1
    return objective.n_sides in (1, len(languages))


def _open_units(corpus: PreparedCorpus, folder: Path, objective: Objective) -> list[_Unit]:
    """Bitext serves pair objectives whole and sentence objectives side by side."""
    here, languages = folder / corpus.name, corpus.languages
    stores = tuple(TokenStore.open(here / f"side{side}") for side in range(len(languages)))
    size = corpus.weight * corpus.n_examples
    if objective.n_sides == 1:
        extras = (VectorStore.open(here / VECTORS),) if objective.needs_vectors else ()
        return [
            _Unit(language, (store,), size, extras)
            for language, store in zip(languages, stores, strict=True)
        ]
    if objective.pairs_neighbors:
        return [_Unit(languages[0], (PreviousSentences(stores[0]), stores[0]), size)]
    names = STORES if objective.needs_links else ()
    links = tuple(TokenStore.open(here / name) for name in names)
    return [_Unit("-".join(languages), stores, size, links)]


def _describe_text(objective: Objective) -> str:
    """Name what an objective needs, for those who do not have it."""
    if objective.needs_vectors:
        return "vectors"
    if objective.needs_links:
        return "linked bitext"
    if objective.pairs_neighbors:
        return "plain text"
    kind = "text" if objective.n_sides == 1 else "bitext"
    return f"raw {kind}" if objective.settings.text == "raw" else kind


def _plan(
    objective: Objective, lengths: npt.NDArray[np.int64], n_marks: int, max_length: int
) -> tuple[BatchShape, BatchPlan]:
    """Choose the shape of batches, and when one is full.

    `lengths` are those of sampled examples, by sequence: one, or two that are read apart.
    """
    n_tokens, n_most = objective.settings.batch_tokens, objective.settings.batch_examples
    shape = BatchShape.fit(n_tokens, lengths.ravel(), max_length)
    n_examples = shape.sequences // lengths.shape[1]
    if n_most is None:
        return shape, BatchPlan(shape.budget, n_examples, n_marks)
    n_examples = min(n_examples, n_most)
    return _shrink(shape, lengths, n_examples), BatchPlan(shape.budget, n_examples, n_marks)


def _shrink(shape: BatchShape, lengths: npt.NDArray[np.int64], n_examples: int) -> BatchShape:
    """Keep the rows of a shape that batches of so many examples hardly ever exceed.

    At worst every sequence has a row to itself. Should the rows not do, `pack` adds some.
    """
    n_sequences = n_examples * lengths.shape[1]
    n_trials = min(N_TRIALS, max(1, lengths.size // n_sequences))
    trials = np.resize(lengths, (n_trials, n_sequences))
    n_rows = np.array([assign_rows(trial, shape.row).max() + 1 for trial in trials])
    likely = math.ceil(n_rows.mean() + 4 * n_rows.std()) + 1
    n_tokens = min(shape.tokens, min(likely, n_sequences) * shape.row)
    return BatchShape(n_tokens, shape.row, n_sequences, min(shape.budget, n_tokens))


def _split(unit: _Unit, n_marks: int, data: DataSection, *, apart: bool = False) -> _Part:
    """Leave out what is too long, and keep the last examples for validation.

    They are chosen before any is left out: no objective trains on what another one validates.
    Where the sides are read `apart`, each of them may be as long as an example.
    """
    everything = number_examples(len(unit.sides[0]))
    by_side = np.stack([store.lengths(everything) for store in unit.sides], axis=1)
    lengths = by_side if apart else by_side.sum(axis=1, keepdims=True)
    lengths = lengths + n_marks // lengths.shape[1]
    too_long, is_empty = lengths.max(axis=1) > data.max_length, by_side.min(axis=1) == 0
    usable = everything[~too_long & ~is_empty]
    n_kept = min(data.validation_examples, int(VALIDATION_SHARE * len(everything)))
    in_training = usable < len(everything) - n_kept
    training, validation = usable[in_training], usable[~in_training]
    return _Part(training, validation, int(too_long.sum()), lengths[training].astype(np.int32))


def _sample_lengths(
    parts: Sequence[_Part], shares: Sequence[float], seed: int
) -> npt.NDArray[np.int64]:
    """Draw lengths of examples, by sequence, as the stream will: by share, then at random."""
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(N_SAMPLED, np.asarray(shares) / np.sum(shares))
    drawn = [generator.choice(part.lengths, n) for part, n in zip(parts, counts, strict=True) if n]
    return generator.permutation(np.concatenate(drawn))


def _shares(units: Sequence[_Unit], alpha: float) -> list[float]:
    """Share the languages by p ∝ N^α, and each language's part among its corpora by size."""
    totals: dict[str, float] = defaultdict(float)
    for unit in units:
        totals[unit.key] += unit.size
    probabilities = language_probabilities(totals, alpha)
    return [probabilities[unit.key] * unit.size / totals[unit.key] for unit in units]
