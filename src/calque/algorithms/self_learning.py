"""All similarities of two vocabularies, and the best or n-th best of each word.

Maps and dictionaries that improve each other, from a small dictionary, the same words or none.

VecMap's loop (Artetxe et al., 2018b): map orthogonally, find every word's translation by CSLS in
both directions, map again; at first most scores are dropped at random, so that a poor start can be
left behind. And MUSE's refinement (Conneau et al., 2018): some rounds with mutual translations.
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


KEPT_BYTES = 2 << 30
CPU_BLOCK, GPU_BLOCK, BLOCK = 64, 4096, 1024


class SimilarityTable:
    """Products of all source words with all target words, one table after the other.

    20,000 × 20,000 of them are 1.6 GB: less work than to multiply anew for each of four uses, and
    memory that serves every round. Larger tables are computed where they are used, a block of rows
    or columns at a time.
    """

    def __init__(self, n_src: int, n_tgt: int, like: Tensor, kept_bytes: int = KEPT_BYTES) -> None:
        fits = n_src * n_tgt * like.element_size() <= kept_bytes
        self.scores = like.new_empty(n_src, n_tgt) if fits else None
        self.shape = (n_src, n_tgt)
        # What is done with a block stays in a CPU's cache; a GPU wants much work at a time.
        kept_block = CPU_BLOCK if like.device.type == "cpu" else GPU_BLOCK
        self.block = kept_block if fits else BLOCK
        self.spare = like.new_empty(min(self.block, max(self.shape)) * max(self.shape))
        self.src, self.tgt = like[:0], like[:0]

    def fill(
        self,
        src: Float[Tensor, "src hidden"],
        tgt: Float[Tensor, "tgt hidden"],
        *,
        coarse: bool = False,
    ) -> None:
        """Compute all products; `coarse` ones in what the device multiplies fastest."""
        self.src, self.tgt = src, tgt
        if self.scores is not None:
            dtype = fast_dtype(src) if coarse else src.dtype
            fast_src, fast_tgt = src.to(dtype), tgt.to(dtype).mT
            block = fast_src.new_empty(min(BLOCK, len(src)), len(tgt))
            for own in _blocks(len(src), BLOCK):
                out = self.scores[own]
                if dtype == src.dtype:
                    torch.mm(fast_src[own], fast_tgt, out=out)
                else:
                    out.copy_(torch.mm(fast_src[own], fast_tgt, out=block[: len(out)]))

    def best(self, k: int) -> tuple[Float[Tensor, "src k"], Float[Tensor, "tgt k"]]:
        """Give the k highest scores of every source word and of every target word."""
        n_src, n_tgt = self.shape
        rows = [topk_in_rows(self._rows(own), k)[0] for own in _blocks(n_src, self.block)]
        columns = [topk_in_columns(self._columns(own), k)[0] for own in _blocks(n_tgt, BLOCK)]
        return torch.cat(rows), torch.cat(columns)

    def ranked_targets(
        self, ranks: Int[Tensor, "src"], penalties: Float[Tensor, "tgt"]
    ) -> Int[Tensor, "src"]:
        """Find for source word i the `ranks[i]`-th best target by score − penalty; ranks ascend.

        1 is the best; past the last word there is none: −1.
        """
        found = []
        for own, k in self._ranked_blocks(ranks, self.shape[1]):
            scores = self._subtract(self._rows(own), penalties)
            found.append(_pick(topk_in_rows(scores, k)[1], ranks[own]))
        return torch.cat(found)

    def ranked_sources(
        self, ranks: Int[Tensor, "tgt"], penalties: Float[Tensor, "src"]
    ) -> Int[Tensor, "tgt"]:
        """Find for target word j the `ranks[j]`-th best source, likewise."""
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
        """Subtract in memory that is there already: new memory takes longer than the difference."""
        out = self.spare[: block.numel()].view(block.shape)
        return torch.sub(block, penalties, out=out)

    def _rows(self, own: slice) -> Float[Tensor, "rows tgt"]:
        return self.src[own] @ self.tgt.mT if self.scores is None else self.scores[own]

    def _columns(self, own: slice) -> Float[Tensor, "src columns"]:
        return self.src @ self.tgt[own].mT if self.scores is None else self.scores[:, own]


def _pick(best: Int[Tensor, "words k"], ranks: Int[Tensor, "words"]) -> Int[Tensor, "words"]:
    places = ranks.to(best.device) - 1
    k = best.shape[1]
    chosen = best.gather(1, places.clamp(max=k - 1)[:, None])[:, 0]
    return torch.where(places < k, chosen, -1)


def _blocks(n_words: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, n_words)) for start in range(0, n_words, size))


@dataclass(frozen=True, slots=True)
class SelfLearningSettings:
    """How words are matched again and again; the defaults are VecMap's."""

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
    """One round of learning: how many scores were kept, and how near words are to each other."""

    number: int
    keep: float
    objective: float


@dataclass(frozen=True, slots=True)
class Learned:
    """The last dictionary, the orthogonal map it gives, and the rounds it took."""

    pairs: IndexPairs
    map: Float[Tensor, "hidden hidden"]
    rounds: list[LearningRound]


@dataclass(frozen=True, slots=True)
class Matches:
    """Each word's translation in the other language, −1 if there is none, and how near they are.

    `objective` is the mean of all words' highest similarity, both ways.
    """

    forward: Int[Tensor, "src"]
    backward: Int[Tensor, "tgt"]
    objective: float

    def union(self) -> IndexPairs:
        """Put both directions together; what both found counts twice."""
        n_src, n_tgt = (torch.arange(len(way), device=way.device) for way in self._ways())
        src, tgt = torch.cat([n_src, self.backward]), torch.cat([self.forward, n_tgt])
        found = (src >= 0) & (tgt >= 0)
        return IndexPairs(src[found], tgt[found])

    def mutual(self) -> IndexPairs:
        """Keep what both directions found."""
        src = torch.arange(len(self.forward), device=self.forward.device)
        known = self.forward.clamp(min=0)
        both = (self.forward >= 0) & (self.backward[known] == src)
        return IndexPairs(src[both], self.forward[both])

    def _ways(self) -> tuple[Tensor, Tensor]:
        return self.forward, self.backward


def self_learn(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    start: IndexPairs,
    settings: SelfLearningSettings,
    generator: torch.Generator,
    on_round: Callable[[LearningRound], None] = lambda _: None,
) -> Learned:
    """Map and match in turns until nothing improves, dropping fewer and fewer scores.

    The share of scores that is kept grows when the objective has not improved for `patience`
    rounds; the end is when that happens with all of them kept. Where the device multiplies low
    precision faster, rounds are in that, and some in the vectors' own follow until nothing
    improves. Spaces must be normalized.
    """
    matcher = Matcher(src, tgt, settings)
    pairs, rounds = start, list[LearningRound]()
    keep, best, improved = settings.first_keep, float("-inf"), 0
    coarse, patience = matcher.is_faster_coarse, settings.patience
    while True:
        number = len(rounds) + 1
        is_stuck, is_last = number - improved > patience, number > settings.max_rounds
        W = solve_rotation(src, tgt, pairs)
        if is_last or (is_stuck and keep >= 1 and not coarse):
            return Learned(pairs, W, rounds)
        if is_stuck and keep >= 1:
            coarse, patience, best, improved = False, 1, float("-inf"), number
        elif is_stuck:
            keep, improved = min(1.0, settings.keep_growth * keep), number
        found = matcher.match(W, keep, generator, coarse=coarse)
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
) -> Learned:
    """Map by mutual translations instead, for some rounds; the best by the objective is kept.

    Paper: MUSE takes those of the most frequent words, the best by CSLS, and chooses the round by
    the mean similarity of the pairs it would build.
    """
    matcher = Matcher(src, tgt, settings)
    pairs, rounds = start, list[LearningRound]()
    best = Learned(start, solve_rotation(src, tgt, start), rounds)
    W, highest = best.map, float("-inf")
    for number in range(1, n_rounds + 2):
        found = matcher.match(W, 1.0)
        rounds.append(LearningRound(number, 1.0, found.objective))
        on_round(rounds[-1])
        if found.objective > highest:
            best, highest = Learned(pairs, W, rounds), found.objective
        pairs = found.mutual()
        W = solve_rotation(src, tgt, pairs)
    return best


def unsupervised_seed(
    src: Float[Tensor, "src hidden"],
    tgt: Float[Tensor, "tgt hidden"],
    settings: SelfLearningSettings,
) -> IndexPairs:
    """Match words by how similar they are to all others of their language, sorted.

    Translations have the same neighbors by number and nearness, whichever they are: the sorted
    rows of √(X Xᵀ) are alike. Spaces must be normalized; words are in the order of frequency.
    """
    size = min(len(src), len(tgt), settings.n_start_words)
    rows = [normalize_space(_root(side[:size]).sort(dim=1).values)[0] for side in (src, tgt)]
    k = min(settings.n_neighbors, size)
    scores = csls_scores(rows[0] @ rows[1].mT, k)
    return Matches(scores.argmax(dim=1), scores.argmax(dim=0), 0.0).union()


class Matcher:
    """Translations of the most frequent words under any map, in memory that is used again."""

    def __init__(
        self,
        src: Float[Tensor, "src hidden"],
        tgt: Float[Tensor, "tgt hidden"],
        settings: SelfLearningSettings,
    ) -> None:
        self.src, self.tgt = src[: settings.n_words], tgt[: settings.n_words]
        if len(self.src) == 0 or len(self.tgt) == 0:
            raise InputError("a space without words", fix="give vectors of some words")
        self.k = min(settings.n_neighbors, len(self.src), len(self.tgt))
        self.table = SimilarityTable(len(self.src), len(self.tgt), self.src)
        self.is_faster_coarse = fast_dtype(self.src) != self.src.dtype

    def match(
        self,
        W: Float[Tensor, "hidden hidden"],
        keep: float = 1.0,
        generator: torch.Generator | None = None,
        *,
        coarse: bool = False,
    ) -> Matches:
        """Find translations both ways by CSLS, with each score kept by the probability `keep`.

        The best of the kept scores is the n-th best of all, and n has a geometric distribution:
        drawing n is all there is to do, in place of a number for every score. A dropped score
        cannot win, which VecMap allows where all kept ones are negative: it sets it to 0.
        """
        src_ranks, src_order = self._draw(len(self.src), keep, generator)
        tgt_ranks, tgt_order = self._draw(len(self.tgt), keep, generator)
        mapped = self.src[src_order] @ W.to(self.src)
        self.table.fill(mapped, self.tgt[tgt_order], coarse=coarse)
        by_src, by_tgt = self.table.best(self.k)
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
        """Draw ranks, ascending so that a block needs few of the best, and whose they are."""
        if keep >= 1:
            ranks, order = torch.ones(n_words, dtype=torch.int64), torch.arange(n_words)
        else:
            ranks = torch.empty(n_words).geometric_(keep, generator=generator)
            ranks, order = ranks.clamp(max=1 << 40).long().sort(stable=True)
        return ranks, order.to(self.src.device)


def _restore(
    found: Int[Tensor, "words"], own: Int[Tensor, "words"], others: Int[Tensor, "others"]
) -> Int[Tensor, "words"]:
    """Undo both orders of a table: whose translation it is, and which word it is."""
    words = torch.where(found >= 0, others[found.clamp(min=0)], -1)
    return torch.empty_like(words).index_copy_(0, own, words)


def _root(matrix: Float[Tensor, "words hidden"]) -> Float[Tensor, "words words"]:
    """Give √(X Xᵀ) = U S Uᵀ for X = U S Vᵀ, through the small XᵀX."""
    values, vectors = torch.linalg.eigh((matrix.mT @ matrix).double())
    tiny = values[-1] * len(values) * torch.finfo(values.dtype).eps
    scales = torch.where(values > tiny, values.clamp(min=tiny) ** -0.25, 0.0)
    half: Tensor = matrix @ (vectors * scales).to(matrix.dtype)
    return half @ half.mT
