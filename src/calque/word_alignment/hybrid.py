"""Word links from an encoder and a statistical aligner together: what to use with a bitext.

A word pair's score is the encoder's cosine, the lexicon's translation probabilities and the
statistical aligner's own links, added up as logarithms; words link that choose each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.tokens.ragged import ranges
from calque.types import Links
from calque.word_alignment.counts import Lexicon, pad_rows, starts_of
from calque.word_alignment.neural import Encoding, Method, WordAligner
from calque.word_alignment.protocol import AlignedBlock, WordPair

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.word_alignment.pair_windows import PairWindows, Side
    from calque.word_alignment.statistical import StatisticalAligner

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float32]

# What the weights below were found for: cosines times this.
SHARPNESS = 20.0


def make_words(
    encoder: Encoder,
    *,
    method: Method | None = None,
    layer: int | None = None,
    encode: Encoding | None = None,
    batch_tokens: int | None = None,
) -> WordAligner:
    """Make the encoder's part: mutual argmax unless asked otherwise, whatever suits it alone."""
    return WordAligner(
        encoder,
        method=method or "argmax",
        layer=layer,
        encode=encode,
        sharpness=SHARPNESS,
        batch_tokens=batch_tokens,
    )


@dataclass(frozen=True, slots=True)
class HybridWeights:
    """What the statistical aligner's evidence counts beside the encoder's cosine times 20.

    One set for all languages; LOG.md has what else was tried. `places` weighs the distance from
    the diagonal: it did harm wherever it was tried, and is 0.
    """

    lexicon: float = 1.0
    links: float = 4.0  # where both directions agree; half of it for one
    places: float = 0.0
    # What every count begins with, and every total: a word met once must not be sure.
    count: float = 0.001
    total: float = 0.1


# fast_align's links are less to be trusted.
WEIGHTS = {"eflomal": HybridWeights(), "fast-align": HybridWeights(links=1.0)}


class HybridAligner:
    """Aligns with an encoder and what a statistical aligner learned from a bitext.

    With `own_text`, what is aligned is that bitext itself, block after block: its links are those
    of the training, and a pair's own links do not count in the lexicon that judges them.
    """

    def __init__(
        self,
        words: WordAligner,
        statistical: StatisticalAligner,
        *,
        own_text: bool = False,
        weights: HybridWeights | None = None,
    ) -> None:
        self.words, self.statistical, self.own_text = words, statistical, own_text
        self.weights = weights or WEIGHTS[statistical.kind]

    @property
    def method(self) -> str:
        """How links are read off the scores."""
        return self.words.method

    @property
    def layer(self) -> int:
        """The layer whose states are compared."""
        return self.words.layer

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Align some pairs, in their order; with `own_text` they begin with pair `first` of it."""
        votes = self._vote(pairs, first)
        evidence = StatisticalEvidence(
            pairs, self.statistical.lexicon, votes, own_text=self.own_text, weights=self.weights
        )
        return self.words.align_block(pairs, evidence=evidence)

    def _vote(self, pairs: Sequence[WordPair], first: int) -> list[Links]:
        """Give the statistical aligner's links, by direction where it knows both."""
        model = self.statistical
        if self.own_text:
            stop = first + len(pairs)
            found = model.training_directions(first, stop)
            return list(found) if found else [model.training_block(first, stop).links]
        found = model.directions(pairs)
        return list(found) if found else [model.align_block(pairs).links]


class StatisticalEvidence:
    """Log scores of all word pairs of a block: how a lexicon and an aligner see them."""

    def __init__(
        self,
        pairs: Sequence[WordPair],
        lexicon: Lexicon,
        votes: Sequence[Links],
        *,
        own_text: bool,
        weights: HybridWeights,
    ) -> None:
        self.lexicon, self.own_text, self.weights = lexicon, own_text, weights
        self.src = lexicon.src.find(pair[0] for pair in pairs)
        self.tgt = lexicon.tgt.find(pair[1] for pair in pairs)
        self.share = np.float32(1 / len(votes))
        owners = np.concatenate([links.pairs for links in votes])
        order = np.argsort(owners, kind="stable")
        self.link_src = np.concatenate([links.src for links in votes])[order]
        self.link_tgt = np.concatenate([links.tgt for links in votes])[order]
        self.offsets = starts_of(np.bincount(owners, minlength=len(pairs)))

    def score(self, windows: PairWindows, rows: IntArray) -> Float[Tensor, "windows src tgt"]:
        """Give the log scores of some windows."""
        owners = windows.owners[rows]
        src_first, src_stop = _places(windows.src, rows, owners)
        tgt_first, tgt_stop = _places(windows.tgt, rows, owners)
        src = pad_rows(self.src.cut(owners, src_first, src_stop))
        tgt = pad_rows(self.tgt.cut(owners, tgt_first, tgt_stop))
        votes = self._lay_votes(owners, src_first, tgt_first, (len(rows), *_shape(src, tgt)))
        scores = self.weights.lexicon * self._judge(src, tgt, votes) + self.weights.links * votes
        if self.weights.places:
            scores -= self.weights.places * _distances(src_stop - src_first, tgt_stop - tgt_first)
        return torch.from_numpy(scores.astype(np.float32))

    def _judge(
        self, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32], votes: FloatArray
    ) -> FloatArray:
        """Average log p(target | source) and log p(source | target)."""
        count, total = self.weights.count, self.weights.total
        # The last place of the totals is that of unknown words, whose number is −1.
        src_totals = np.append(self.lexicon.src_totals, np.float32(0))[src][:, :, None]
        tgt_totals = np.append(self.lexicon.tgt_totals, np.float32(0))[tgt][:, None, :]
        counts = self.lexicon.look_up(src[:, :, None], tgt[:, None, :])
        if self.own_text:  # leave the pair's own links out
            counts = np.maximum(counts - votes, 0)
            src_totals = np.maximum(src_totals - votes.sum(axis=2, keepdims=True), 0)
            tgt_totals = np.maximum(tgt_totals - votes.sum(axis=1, keepdims=True), 0)
        joint = np.log(counts + np.float32(count))
        judged: FloatArray = joint - (np.log(src_totals + total) + np.log(tgt_totals + total)) / 2
        return judged

    def _lay_votes(
        self, owners: IntArray, src_first: IntArray, tgt_first: IntArray, shape: tuple[int, ...]
    ) -> FloatArray:
        """Lay the links of some pairs out as matrices: 1 where all directions agree."""
        n_links = np.diff(self.offsets)[owners]
        flat = ranges(self.offsets[owners], n_links)
        window = np.repeat(np.arange(len(owners)), n_links)
        i, j = self.link_src[flat] - src_first[window], self.link_tgt[flat] - tgt_first[window]
        inside = (i >= 0) & (i < shape[1]) & (j >= 0) & (j < shape[2])
        votes = np.zeros(shape, dtype=np.float32)
        np.add.at(votes, (window[inside], i[inside], j[inside]), self.share)
        return votes


def _places(side: Side, rows: IntArray, owners: IntArray) -> tuple[IntArray, IntArray]:
    """Say which words of their pairs some windows hold."""
    begin = side.pieces.first_words[owners]
    return side.first[rows] - begin, side.stop[rows] - begin


def _shape(src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32]) -> tuple[int, int]:
    return src.shape[1], tgt.shape[1]


def _distances(n_src: IntArray, n_tgt: IntArray) -> FloatArray:
    """Give |i/n − j/m| for all words of windows of n and m words."""
    i, j = ((np.arange(n.max()) + 0.5)[None] / np.maximum(n, 1)[:, None] for n in (n_src, n_tgt))
    distances: FloatArray = np.abs(i[:, :, None] - j[:, None, :]).astype(np.float32)
    return distances
