"""Self-learning: a map and a dictionary that improve each other, from few or no known pairs.

VecMap (Artetxe et al., 2018b): map orthogonally, induce every word's translation by CSLS in both
directions, map again; at first most scores are dropped at random, so that the search can leave poor
local optima. MUSE's refinement (Conneau et al., 2018): a few rounds with mutual translations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from calque.algorithms.nearest import csls_scores, fast_dtype, topk_in_columns, topk_in_rows
from calque.algorithms.procrustes import IndexPairs, normalize_space, solve_rotation
from calque.errors import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor


TABLE_BYTES = 2 << 30
CPU_BLOCK, GPU_BLOCK, BLOCK = 64, 4096, 1024


@dataclass(frozen=True, slots=True)
class SelfLearningSettings:
    """Settings of self-learning; the defaults are those of VecMap."""

    n_words: int = 20_000
    n_start_words: int = 4_000
    n_neighbors: int = 10
    first_keep: float = 0.1
    keep_growth: float = 2.0
    threshold: float = 1e-6
    patience: int = 50
    max_rounds: int = 5_000


@dataclass(frozen=True, slots=True)
class LearningRound:
    """One round: the share of scores that was kept, and the mean best similarity of all words."""

    number: int
    keep: float
    objective: float


@dataclass(frozen=True, slots=True)
class LearnedMap:
    """The last dictionary, its orthogonal map, and all rounds."""

    pairs: IndexPairs
    map: Float[Tensor, "hidden hidden"]
    rounds: list[LearningRound]


@dataclass(frozen=True, slots=True)
class Matches:
    """The translation of each word in the other language, −1 if it has none.

    `objective` is the mean over all words, in both directions, of the highest similarity.
    """

    forward: Int[Tensor, "src"]
    backward: Int[Tensor, "tgt"]
    objective: float

    def union(self) -> IndexPairs:
        """Return the pairs of both directions; pairs found by both are counted twice."""
        src_rows, tgt_rows = (
            torch.arange(len(found), device=found.device) for found in (self.forward, self.backward)
        )
        src, tgt = torch.cat([src_rows, self.backward]), torch.cat([self.forward, tgt_rows])
        found = (src >= 0) & (tgt >= 0)
        return IndexPairs(src[found], tgt[found])

    def mutual(self) -> IndexPairs:
        """Return the pairs found in both directions."""
        src = torch.arange(len(self.forward), device=self.forward.device)
        known = self.forward.clamp(min=0)
        both = (self.forward >= 0) & (self.backward[known] == src)
        return IndexPairs(src[both], self.forward[both])


def self_learn(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    start: IndexPairs,
    settings: SelfLearningSettings,
    generator: torch.Generator,
    on_round: Callable[[LearningRound], None] = lambda _: None,
) -> LearnedMap:
    """Return the map after alternating mapping and matching until the objective stops improving.

    The share of scores that is kept grows whenever the objective has not improved for `patience`
    rounds; learning ends when that happens with all scores kept. If the device multiplies low
    precision faster, the rounds use it, and the last ones repeat in full precision until nothing
    improves. The spaces must be normalized. `on_round` is called after every round.
    """
    matcher = Matcher(src, tgt, settings)
    pairs, rounds = start, list[LearningRound]()
    keep, best, improved = settings.first_keep, float("-inf"), 0
    low_precision, patience = matcher.prefers_low_precision, settings.patience
    while True:
        number = len(rounds) + 1
        is_stuck, is_last = number - improved > patience, number > settings.max_rounds
        W = solve_rotation(src, tgt, pairs)
        if is_last or (is_stuck and keep >= 1 and not low_precision):
            return LearnedMap(pairs, W, rounds)
        if is_stuck and keep >= 1:
            low_precision, patience, best, improved = False, 1, float("-inf"), number
        elif is_stuck:
            keep, improved = min(1.0, settings.keep_growth * keep), number
        found = matcher.match(W, keep, generator, low_precision=low_precision)
        pairs = found.union()
        rounds.append(LearningRound(number, keep, found.objective))
        on_round(rounds[-1])
        if found.objective - best >= settings.threshold:
            best, improved = found.objective, number


def refine_map(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    start: IndexPairs,
    settings: SelfLearningSettings,
    n_rounds: int = 5,
    on_round: Callable[[LearningRound], None] = lambda _: None,
) -> LearnedMap:
    """Return the best of `n_rounds` maps, each fitted to the mutual translations of the last.

    Paper: MUSE uses mutual translations of the most frequent words and chooses the round by the
    mean similarity of the dictionary it would build; here the objective of `Matches` decides.
    """
    matcher = Matcher(src, tgt, settings)
    pairs, rounds = start, list[LearningRound]()
    best = LearnedMap(start, solve_rotation(src, tgt, start), rounds)
    W, highest = best.map, float("-inf")
    for number in range(1, n_rounds + 2):
        found = matcher.match(W, 1.0)
        rounds.append(LearningRound(number, 1.0, found.objective))
        on_round(rounds[-1])
        if found.objective > highest:
            best, highest = LearnedMap(pairs, W, rounds), found.objective
        pairs = found.mutual()
        W = solve_rotation(src, tgt, pairs)
    return best


def unsupervised_seed(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    settings: SelfLearningSettings,
) -> IndexPairs:
    """Return pairs of words with similar sorted similarities to all words of their own language.

    Artetxe et al., 2018b, §3.2: translations have similar sorted rows of √(X Xᵀ). The spaces must
    be normalized and their words ordered by frequency.
    """
    size = min(len(src), len(tgt), settings.n_start_words)
    rows = [
        normalize_space(_similarity_root(side[:size]).sort(dim=1).values)[0] for side in (src, tgt)
    ]
    k = min(settings.n_neighbors, size)
    scores = csls_scores(rows[0] @ rows[1].mT, k)
    return Matches(scores.argmax(dim=1), scores.argmax(dim=0), 0.0).union()


class Matcher:
    """Find translations of the most frequent words under any map, reusing memory."""

    def __init__(
        self,
        src: Float[Tensor, "src hidden"],
        tgt: Float[Tensor, "tgt hidden"],
        settings: SelfLearningSettings,
    ) -> None:
        self.src, self.tgt = src[: settings.n_words], tgt[: settings.n_words]
        if len(self.src) == 0 or len(self.tgt) == 0:
            raise InputError("one of the files has no vectors", fix="use non-empty vector files")
        self.k = min(settings.n_neighbors, len(self.src), len(self.tgt))
        self.table = SimilarityTable(len(self.src), len(self.tgt), self.src)
        self.prefers_low_precision = fast_dtype(self.src) != self.src.dtype

    def match(
        self,
        W: Float[Tensor, "hidden hidden"],
        keep: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        low_precision: bool = False,
    ) -> Matches:
        """Return translations by CSLS in both directions; scores are kept with probability `keep`.

        The best kept score is the n-th best of all scores, where n is geometrically distributed, so
        one n per word is drawn instead of one number per score.
        Paper: VecMap sets dropped scores to 0, so that one can win if all kept scores are negative.
        """
        src_ranks, src_order = self._draw(len(self.src), keep, generator)
        tgt_ranks, tgt_order = self._draw(len(self.tgt), keep, generator)
        mapped = self.src[src_order] @ W.to(self.src)
        self.table.fill(mapped, self.tgt[tgt_order], low_precision=low_precision)
        by_src, by_tgt = self.table.topk(self.k)
        forward = self.table.ranked_targets(src_ranks, by_tgt.mean(dim=1) / 2)
        backward = self.table.ranked_sources(tgt_ranks, by_src.mean(dim=1) / 2)
        objective = float(by_src[:, 0].mean() + by_tgt[:, 0].mean()) / 2
        return Matches(
            _restore(forward, src_order, tgt_order),
            _restore(backward, tgt_order, src_order),
            objective,
        )

    def _draw(
        self, n_words: int, keep: float, generator: torch.Generator | None
    ) -> tuple[Int[Tensor, "words"], Int[Tensor, "words"]]:
        """Return sampled ranks and the words they belong to.

        Ranks ascend, so that most blocks need only few of the best scores.
        """
        if keep >= 1:
            ranks, order = torch.ones(n_words, dtype=torch.int64), torch.arange(n_words)
        else:
            ranks = torch.empty(n_words).geometric_(keep, generator=generator)
            ranks, order = ranks.clamp(max=1 << 40).long().sort(stable=True)
        return ranks, order.to(self.src.device)


def _restore(
    found: Int[Tensor, "words"], own: Int[Tensor, "words"], others: Int[Tensor, "others"]
) -> Int[Tensor, "words"]:
    """Return translations for words in their original order, numbered in the original order."""
    words = torch.where(found >= 0, others[found.clamp(min=0)], -1)
    return torch.empty_like(words).index_copy_(0, own, words)


def _similarity_root(matrix: Float[Tensor, "words hidden"]) -> Float[Tensor, "words words"]:
    """Return √(X Xᵀ) = U S Uᵀ for X = U S Vᵀ, computed from the small matrix XᵀX."""
    values, vectors = torch.linalg.eigh((matrix.mT @ matrix).double())
    tiny = values[-1] * len(values) * torch.finfo(values.dtype).eps
    scales = torch.where(values > tiny, values.clamp(min=tiny) ** -0.25, 0.0)
    half: Tensor = matrix @ (vectors * scales).to(matrix.dtype)
    return half @ half.mT


class SimilarityTable:
    """Dot products of all source words with all target words, recomputed in every round.

    20,000 × 20,000 of them take 1.6 GB; storing them is faster than four multiplications per round.
    Larger tables are not stored: blocks of rows or columns are computed when they are used.
    """

    def __init__(self, n_src: int, n_tgt: int, like: Tensor, max_bytes: int = TABLE_BYTES) -> None:
        fits = n_src * n_tgt * like.element_size() <= max_bytes
        self.scores = like.new_empty(n_src, n_tgt) if fits else None
        self.shape = (n_src, n_tgt)
        # A small block stays in the cache of a CPU; a GPU needs large ones.
        stored_block = CPU_BLOCK if like.device.type == "cpu" else GPU_BLOCK
        self.block = stored_block if fits else BLOCK
        self.buffer = like.new_empty(min(self.block, max(self.shape)) * max(self.shape))
        self.src, self.tgt = like[:0], like[:0]

    def fill(
        self,
        src: Float[Tensor, "src hidden"],
        tgt: Float[Tensor, "tgt hidden"],
        *,
        low_precision: bool = False,
    ) -> None:
        """Compute all products, with `low_precision` in the fastest type of the device."""
        self.src, self.tgt = src, tgt
        if self.scores is not None:
            dtype = fast_dtype(src) if low_precision else src.dtype
            fast_src, fast_tgt = src.to(dtype), tgt.to(dtype).mT
            block = fast_src.new_empty(min(BLOCK, len(src)), len(tgt))
            for own in _blocks(len(src), BLOCK):
                out = self.scores[own]
                if dtype == src.dtype:
                    torch.mm(fast_src[own], fast_tgt, out=out)
                else:
                    out.copy_(torch.mm(fast_src[own], fast_tgt, out=block[: len(out)]))

    def topk(self, k: int) -> tuple[Float[Tensor, "src k"], Float[Tensor, "tgt k"]]:
        """Return the k highest scores of every source word and of every target word."""
        n_src, n_tgt = self.shape
        rows = [topk_in_rows(self._rows(own), k)[0] for own in _blocks(n_src, self.block)]
        columns = [topk_in_columns(self._columns(own), k)[0] for own in _blocks(n_tgt, BLOCK)]
        return torch.cat(rows), torch.cat(columns)

    def ranked_targets(
        self, ranks: Int[Tensor, "src"], penalties: Float[Tensor, "tgt"]
    ) -> Int[Tensor, "src"]:
        """Return for source word i the `ranks[i]`-th best target by score − penalty.

        Ranks must ascend and count from 1; a rank beyond the last word gives −1.
        """
        found = []
        for own, k in self._ranked_blocks(ranks, self.shape[1]):
            scores = self._subtract(self._rows(own), penalties)
            found.append(_pick(topk_in_rows(scores, k)[1], ranks[own]))
        return torch.cat(found)

    def ranked_sources(
        self, ranks: Int[Tensor, "tgt"], penalties: Float[Tensor, "src"]
    ) -> Int[Tensor, "tgt"]:
        """Return for target word j the `ranks[j]`-th best source by score − penalty."""
        found = []
        for own, k in self._ranked_blocks(ranks, self.shape[0]):
            scores = self._subtract(self._columns(own), penalties[:, None])
            found.append(_pick(topk_in_columns(scores, k)[1], ranks[own]))
        return torch.cat(found)

    def _ranked_blocks(
        self, ranks: Int[Tensor, "words"], n_others: int
    ) -> Iterator[tuple[slice, int]]:
        for own in _blocks(len(ranks), self.block):
            yield own, min(int(ranks[own][-1]), n_others)

    def _subtract(self, block: Tensor, penalties: Tensor) -> Tensor:
        """Return block − penalties in a reused buffer: allocating memory would take longer."""
        out = self.buffer[: block.numel()].view(block.shape)
        return torch.sub(block, penalties, out=out)

    def _rows(self, own: slice) -> Float[Tensor, "rows tgt"]:
        return self.src[own] @ self.tgt.mT if self.scores is None else self.scores[own]

    def _columns(self, own: slice) -> Float[Tensor, "src columns"]:
        return self.src @ self.tgt[own].mT if self.scores is None else self.scores[:, own]


def _pick(best: Int[Tensor, "words k"], ranks: Int[Tensor, "words"]) -> Int[Tensor, "words"]:
    columns = ranks.to(best.device) - 1
    k = best.shape[1]
    chosen = best.gather(1, columns.clamp(max=k - 1)[:, None])[:, 0]
    return torch.where(columns < k, chosen, -1)


def _blocks(n_words: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n_words)) for start in range(0, n_words, size))
