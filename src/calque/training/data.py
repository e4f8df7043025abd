"""From prepared text to batches: a training and a validation stream per objective."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calque.errors import InputError
from calque.tokens.linked import STORES
from calque.tokens.prepare import PreparedCorpus
from calque.tokens.ragged import BatchShape, assign_rows
from calque.tokens.sampling import compact_arange, language_probabilities
from calque.tokens.store import (
    VECTORS,
    JoinedSentences,
    PreviousSentences,
    TokenStore,
    VectorStore,
)
from calque.tokens.streams import BatchLimits, BatchStream, Corpus

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.objectives.base import Objective
    from calque.tokens.tokenizer import SpecialTokens
    from calque.training.recipe import DataSection


# Maximum share of a corpus that is kept for validation.
VALIDATION_SHARE = 0.05
# Minimum number of examples in a block of the validation stream.
MIN_BLOCK = 4096
# Number of sequence lengths that are sampled to choose the shape of batches.
N_SAMPLED = 20_000
# Number of trial batches made of them, to see how many rows a batch needs.
N_TRIALS = 32


@dataclass(frozen=True, slots=True)
class StreamPair:
    """The training and the validation stream of an objective, and what they leave out."""

    training: BatchStream[Any]
    validation: BatchStream[Any] | None
    n_too_long: int
    n_examples: int
    languages: tuple[str, ...]

    def describe(self) -> str:
        """Return how many examples are used, and how many are too long."""
        used = f"{self.n_examples:,} examples"
        return used + (f", {self.n_too_long:,} too long" if self.n_too_long else "")


def open_stream(
    objective: Objective,
    prepared: Sequence[PreparedCorpus],
    folder: Path,
    data: DataSection,
    special_tokens: SpecialTokens,
    *,
    seed: int,
    fixed_shape: bool,
) -> StreamPair:
    """Return the streams of one objective: sentences or pairs, sampled by language.

    With `fixed_shape` every batch has the same size, as a compiled step needs it: several sentences
    share a row, and the last rows are padding.
    """
    units = _open_suitable(objective, prepared, folder, data)
    n_special = objective.count_special_tokens(special_tokens)
    key, max_length = data.find_max_length(objective.settings)
    if data.join_sentences and objective.n_sides == 1 and not objective.needs_vectors:
        units = [_join(unit, max_length - n_special) for unit in units]
    separate = objective.encodes_separately
    parts = [_split(unit, n_special, max_length, separate=separate) for unit in units]
    kept = [(unit, part) for unit, part in zip(units, parts, strict=True) if len(part.training)]
    if not kept:
        kind = describe_text(objective)
        raise InputError(
            f"{objective.settings.kind}: there is no {kind} with examples of at most "
            f"{max_length} tokens",
            fix=f"add a source of {kind}, or raise {key}",
        )
    shares = _compute_shares([unit for unit, _ in kept], data.alpha)
    lengths = _sample_lengths([part for _, part in kept], shares, seed)
    shape, plan = choose_shape(objective, lengths, n_special, max_length)
    names = sorted({unit.key for unit, _ in kept})
    collate = objective.build_collator(special_tokens, shape if fixed_shape else None)

    def choose(name: str) -> list[Corpus]:
        return [
            Corpus(unit.key, unit.sides, getattr(part, name), share, unit.extras)
            for (unit, part), share in zip(kept, shares, strict=True)
            if len(getattr(part, name))
        ]

    validation = choose("validation")
    # A block of the size used in training would repeat a small corpus thousands of times.
    block_size = max(MIN_BLOCK, sum(map(len, validation)))
    known = names if objective.needs_languages else None
    return StreamPair(
        BatchStream(choose("training"), plan, collate, seed, None, known),
        BatchStream(validation, plan, collate, seed + 1, block_size, known) if validation else None,
        sum(part.n_too_long for part in parts),
        sum(len(part.training) for part in parts),
        tuple(names),
    )


def is_suitable(
    objective: Objective, languages: Sequence[str], is_linked: bool, has_vectors: bool
) -> bool:
    """Return whether an objective can be trained on a corpus of this kind."""
    if has_vectors != objective.needs_vectors or (objective.needs_links and not is_linked):
        return False
    if objective.settings.text == "raw" and is_linked:
        return False
    if objective.pairs_neighbors:  # plain text only: adjacent lines of bitext are often unrelated
        return len(languages) == 1
    return objective.n_sides in (1, len(languages))


def describe_text(objective: Objective) -> str:
    """Return the kind of text that an objective needs, for error messages."""
    if objective.needs_vectors:
        return "vectors"
    if objective.needs_links:
        return "linked bitext"
    if objective.pairs_neighbors:
        return "plain text"
    kind = "text" if objective.n_sides == 1 else "bitext"
    return f"raw {kind}" if objective.settings.text == "raw" else kind


def choose_shape(
    objective: Objective, lengths: npt.NDArray[np.int64], n_special: int, max_length: int
) -> tuple[BatchShape, BatchLimits]:
    """Choose the shape of batches and the limits at which a batch is full.

    `lengths` are sampled examples × sequences: one sequence, or two that are encoded separately.
    """
    n_tokens, max_examples = objective.settings.batch_tokens, objective.settings.batch_examples
    shape = BatchShape.fit(n_tokens, lengths.ravel(), max_length)
    n_examples = shape.sequences // lengths.shape[1]
    if max_examples is None:
        return shape, BatchLimits(shape.budget, n_examples, n_special)
    n_examples = min(n_examples, max_examples)
    return _shrink(shape, lengths, n_examples), BatchLimits(shape.budget, n_examples, n_special)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Stores that are sampled together under one language or language pair.

    The last `n_validation` examples are kept for validation. The extras are what the objective
    needs besides the text: the subwords of linked words and the links, or the vectors of words.
    """

    key: str
    sides: tuple[TokenStore | PreviousSentences | JoinedSentences, ...]
    weight: float
    n_validation: int
    extras: tuple[TokenStore | VectorStore, ...] = ()

    @property
    def size(self) -> float:
        """Return the number of examples, multiplied by the weight of the source."""
        return self.weight * len(self.sides[0])


@dataclass(frozen=True, slots=True)
class _Part:
    """The examples of a unit that are used, and the lengths of those for training."""

    training: npt.NDArray[np.integer[Any]]
    validation: npt.NDArray[np.integer[Any]]
    n_too_long: int
    lengths: npt.NDArray[np.int32]


def _open_suitable(
    objective: Objective, prepared: Sequence[PreparedCorpus], folder: Path, data: DataSection
) -> list[_Unit]:
    """Open the corpora that an objective can be trained on."""
    left_out = set(data.leave_out_languages)
    chosen = [
        corpus
        for corpus in prepared
        if not left_out & set(corpus.languages)
        and is_suitable(objective, corpus.languages, corpus.linked, corpus.dimensions > 0)
    ]
    widths = sorted({corpus.dimensions for corpus in chosen})
    if len(widths) > 1:
        raise InputError(
            f"the vectors have different dimensions, from {widths[0]} to {widths[-1]}",
            fix="use vectors of one dimension",
        )
    units = [unit for corpus in chosen for unit in _open_units(corpus, folder, objective, data)]
    return [unit for unit in units if unit.size > 0]


def _open_units(
    corpus: PreparedCorpus, folder: Path, objective: Objective, data: DataSection
) -> list[_Unit]:
    """Open bitext as pairs for objectives on pairs, and as two languages for the others."""
    here, languages = folder / corpus.name, corpus.languages
    stores = tuple(TokenStore.open(here / f"side{side}") for side in range(len(languages)))
    n_validation = min(data.validation_examples, int(VALIDATION_SHARE * len(stores[0])))
    build = partial(_Unit, weight=corpus.weight, n_validation=n_validation)
    if objective.n_sides == 1:
        extras = (VectorStore.open(here / VECTORS),) if objective.needs_vectors else ()
        return [
            build(language, (store,), extras=extras)
            for language, store in zip(languages, stores, strict=True)
        ]
    if objective.pairs_neighbors:
        return [build(languages[0], (PreviousSentences(stores[0]), stores[0]))]
    names = STORES if objective.needs_links else ()
    links = tuple(TokenStore.open(here / name) for name in names)
    return [build("-".join(languages), stores, extras=links)]


def _join(unit: _Unit, max_tokens: int) -> _Unit:
    """Join the sentences of a unit to blocks; those for validation stay the same."""
    (store,) = unit.sides
    assert isinstance(store, TokenStore)
    joined = JoinedSentences.of(store, max_tokens, len(store) - unit.n_validation)
    return replace(unit, sides=(joined,), n_validation=len(joined) - joined.n_training)


def _split(unit: _Unit, n_special: int, max_length: int, *, separate: bool) -> _Part:
    """Leave out examples that are too long or empty, and keep the last ones for validation.

    The validation examples are chosen before any is left out, so that no objective is trained on
    the validation examples of another one. Where the sides are encoded separately, the maximum
    length applies to each of them.
    """
    everything = compact_arange(len(unit.sides[0]))
    by_side = np.stack([store.lengths(everything) for store in unit.sides], axis=1)
    lengths = by_side if separate else by_side.sum(axis=1, keepdims=True)
    lengths = lengths + n_special // lengths.shape[1]
    too_long, is_empty = lengths.max(axis=1) > max_length, by_side.min(axis=1) == 0
    usable = everything[~too_long & ~is_empty]
    in_training = usable < len(everything) - unit.n_validation
    training, validation = usable[in_training], usable[~in_training]
    return _Part(training, validation, int(too_long.sum()), lengths[training].astype(np.int32))


def _compute_shares(units: Sequence[_Unit], alpha: float) -> list[float]:
    """Return each unit's share: p ∝ N^α of its language, divided among its corpora by size."""
    totals: dict[str, float] = defaultdict(float)
    for unit in units:
        totals[unit.key] += unit.size
    probabilities = language_probabilities(totals, alpha)
    return [probabilities[unit.key] * unit.size / totals[unit.key] for unit in units]


def _sample_lengths(
    parts: Sequence[_Part], shares: Sequence[float], seed: int
) -> npt.NDArray[np.int64]:
    """Sample the lengths of examples as the stream will sample the examples."""
    generator = np.random.default_rng(seed)
    counts = generator.multinomial(N_SAMPLED, np.asarray(shares) / np.sum(shares))
    drawn = [generator.choice(part.lengths, n) for part, n in zip(parts, counts, strict=True) if n]
    return generator.permutation(np.concatenate(drawn))


def _shrink(shape: BatchShape, lengths: npt.NDArray[np.int64], n_examples: int) -> BatchShape:
    """Reduce a shape to the rows that batches of this many examples hardly ever exceed.

    In the worst case every sequence has a row of its own. If the rows are not enough for a batch,
    `pack` adds some.
    """
    n_sequences = n_examples * lengths.shape[1]
    n_trials = min(N_TRIALS, max(1, lengths.size // n_sequences))
    trials = np.resize(lengths, (n_trials, n_sequences))
    n_rows = np.array([assign_rows(trial, shape.row).max() + 1 for trial in trials])
    likely = math.ceil(n_rows.mean() + 4 * n_rows.std()) + 1
    n_tokens = min(shape.tokens, min(likely, n_sequences) * shape.row)
    return BatchShape(n_tokens, shape.row, n_sequences, min(shape.budget, n_tokens))
