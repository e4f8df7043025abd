"""All similarities of two vocabularies, and the best or n-th best of each word."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from calque.align.precision import fast_dtype
from calque.align.top_scores import best_in_columns, best_in_rows

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

KEPT_BYTES = 2 << 30
CPU_BLOCK, GPU_BLOCK, BLOCK = 64, 4096, 1024


class ScoreTable:
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
        rows = [best_in_rows(self._rows(own), k)[0] for own in _blocks(n_src, self.block)]
        columns = [best_in_columns(self._columns(own), k)[0] for own in _blocks(n_tgt, BLOCK)]
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
            found.append(_pick(best_in_rows(scores, k)[1], ranks[own]))
        return torch.cat(found)

    def ranked_sources(
        self, ranks: Int[Tensor, "tgt"], penalties: Float[Tensor, "src"]
    ) -> Int[Tensor, "tgt"]:
        """Find for target word j the `ranks[j]`-th best source, likewise."""
        found = []
        for own, k in self._ranked_blocks(ranks, self.shape[0]):
            scores = self._subtract(self._columns(own), penalties[:, None])
            found.append(_pick(best_in_columns(scores, k)[1], ranks[own]))
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
