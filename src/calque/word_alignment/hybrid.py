"""Word links from an encoder and a statistical aligner together: the best choice with a bitext.

The score of a word pair is the sum of three logarithms: the encoder's similarity (the cosine and
the similarity of spelling), the translation probability in the statistical aligner's lexicon, and
the statistical aligner's own links. Words that choose each other are linked, or those with a
sufficient probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.algorithms.calibration import Calibration
from calque.tokens.ragged import ranges
from calque.types import Links
from calque.word_alignment.counts import LinkLexicon, pad_rows
from calque.word_alignment.neural import Encoding, Method, WordAligner
from calque.word_alignment.numbered_text import to_offsets
from calque.word_alignment.protocol import AlignedBlock, WordPair, check_pairs

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.word_alignment.pair_windows import PairWindows
    from calque.word_alignment.statistical import StatisticalAligner, StatisticalKind

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float32]

# Factor of the cosines for which the weights below were tuned.
SHARPNESS = 20.0


@dataclass(frozen=True, slots=True)
class HybridWeights:
    """Weights of the statistical evidence relative to the encoder's cosine times 20.

    One set for all languages. A weight of the distance from the diagonal made links worse.
    """

    lexicon: float = 1.0
    links: float = 4.0  # where both directions agree; half of it for one direction
    # Added to every count and to every total, so that a word seen once does not get probability 1.
    count: float = 0.001
    total: float = 0.1


# fast_align's links are less reliable.
WEIGHTS = {"eflomal": HybridWeights(), "fast-align": HybridWeights(links=1.0)}
# Fitted with calque-mini on development pairs of six language pairs, by
# benchmarks/hybrid_calibration.py.
CALIBRATIONS = {
    "eflomal": Calibration(slope=0.308, intercept=-0.9233, threshold=0.33),
    "fast-align": Calibration(slope=0.3313, intercept=-0.8159, threshold=0.33),
}


class HybridAligner:
    """Links words with an encoder and with what a statistical aligner learned from a bitext.

    Examples:
        >>> statistical = calque.StatisticalAligner.train(pairs)  # doctest: +SKIP
        >>> hybrid = calque.HybridAligner(calque.load(), statistical)  # doctest: +SKIP
        >>> hybrid.align([(["das", "Haus"], ["the", "house"])])  # doctest: +SKIP
        [[(0, 0), (1, 1)]]

    Args:
        words: A loaded model, or an aligner made from it by `build_hybrid_words`.
        statistical: A trained statistical aligner.
        is_training_text: The text to be aligned is the one that the statistical aligner was
            trained on, in the same order. Its links are then those of the training, and a pair's
            own links are not counted in the lexicon that scores them.
        weights: Weights of the evidence. Default: those tuned for the statistical aligner.
    """

    def __init__(
        self,
        words: WordAligner | Encoder,
        statistical: StatisticalAligner,
        *,
        is_training_text: bool = False,
        weights: HybridWeights | None = None,
    ) -> None:
        self.words = (
            words if isinstance(words, WordAligner) else build_hybrid_words(words, statistical.kind)
        )
        self.statistical, self.is_training_text = statistical, is_training_text
        self.weights = weights or WEIGHTS[statistical.kind]

    @property
    def method(self) -> str:
        """How links are read from the scores."""
        return self.words.method

    @property
    def layer(self) -> int:
        """Layer whose states are compared."""
        return self.words.layer

    def align(self, pairs: Iterable[WordPair]) -> list[list[tuple[int, int]]]:
        """Return the links of every pair as a list of (source word, target word)."""
        return self.align_block(check_pairs(pairs)).links.to_lists()

    def align_block(self, pairs: Sequence[WordPair], first: int = 0) -> AlignedBlock:
        """Align some pairs; of a training text, they start with its pair `first`."""
        model, stop = self.statistical, first + len(pairs)
        if self.is_training_text:
            found = model.training_directions(first, stop)
            links = list(found) if found else [model.training_block(first, stop).links]
        else:
            found = model.directions(pairs)
            links = list(found) if found else [model.align_block(pairs).links]
        evidence = StatisticalEvidence(
            pairs, model.lexicon, links, leave_out=self.is_training_text, weights=self.weights
        )
        return self.words.align_block(pairs, evidence=evidence)


def build_hybrid_words(
    encoder: Encoder,
    kind: StatisticalKind,
    *,
    method: Method | None = None,
    layer: int | None = None,
    encode: Encoding | None = None,
    threshold: float | None = None,
    batch_tokens: int | None = None,
) -> WordAligner:
    """Build the encoder's part of a hybrid aligner.

    Its default method is "probability" for a calibrated model, whose similarities are like those
    that the calibrations here were fitted to, and mutual argmax for others.
    """
    is_calibrated = (encoder.settings.get("alignment") or {}).get("calibration") is not None
    return WordAligner(
        encoder,
        method=method or ("probability" if is_calibrated else "argmax"),
        layer=layer,
        encode=encode,
        sharpness=SHARPNESS,
        calibration=CALIBRATIONS[kind],
        threshold=threshold,
        similarity="cosine",
        unit="words",
        batch_tokens=batch_tokens,
    )


class StatisticalEvidence:
    """Log scores of all word pairs of a block from a lexicon and the links of an aligner.

    With `leave_out`, the links of a pair are subtracted from the counts that score it.
    """

    def __init__(
        self,
        pairs: Sequence[WordPair],
        lexicon: LinkLexicon,
        directions: Sequence[Links],
        *,
        leave_out: bool,
        weights: HybridWeights,
    ) -> None:
        self.lexicon, self.leave_out, self.weights = lexicon, leave_out, weights
        self.src = lexicon.src.find(pair[0] for pair in pairs)
        self.tgt = lexicon.tgt.find(pair[1] for pair in pairs)
        self.link_weight = np.float32(1 / len(directions))
        owners = np.concatenate([links.pairs for links in directions])
        order = np.argsort(owners, kind="stable")
        self.link_src = np.concatenate([links.src for links in directions])[order]
        self.link_tgt = np.concatenate([links.tgt for links in directions])[order]
        self.offsets = to_offsets(np.bincount(owners, minlength=len(pairs)))

    def score(self, windows: PairWindows, rows: IntArray) -> Float[Tensor, "windows src tgt"]:
        """Return the log scores of some windows."""
        owners = windows.owners[rows]
        src_first, src_stop = windows.src.word_range(rows, owners)
        tgt_first, tgt_stop = windows.tgt.word_range(rows, owners)
        src = pad_rows(self.src.select(owners, src_first, src_stop))
        tgt = pad_rows(self.tgt.select(owners, tgt_first, tgt_stop))
        shape = (len(rows), src.shape[1], tgt.shape[1])
        links = self._to_matrices(owners, src_first, tgt_first, shape)
        scores = self.weights.lexicon * self._score_words(src, tgt, links)
        scores += self.weights.links * links
        return torch.from_numpy(scores.astype(np.float32))

    def _score_words(
        self, src: npt.NDArray[np.int32], tgt: npt.NDArray[np.int32], links: FloatArray
    ) -> FloatArray:
        """Return the mean of log p(target | source) and log p(source | target)."""
        count, total = self.weights.count, self.weights.total
        # The last entry of the totals is for unknown words, whose number is −1.
        src_totals = np.append(self.lexicon.src_totals, np.float32(0))[src][:, :, None]
        tgt_totals = np.append(self.lexicon.tgt_totals, np.float32(0))[tgt][:, None, :]
        counts = self.lexicon.look_up(src[:, :, None], tgt[:, None, :])
        if self.leave_out:
            counts = np.maximum(counts - links, 0)
            src_totals = np.maximum(src_totals - links.sum(axis=2, keepdims=True), 0)
            tgt_totals = np.maximum(tgt_totals - links.sum(axis=1, keepdims=True), 0)
        joint = np.log(counts + np.float32(count))
        scores: FloatArray = joint - (np.log(src_totals + total) + np.log(tgt_totals + total)) / 2
        return scores

    def _to_matrices(
        self, owners: IntArray, src_first: IntArray, tgt_first: IntArray, shape: tuple[int, ...]
    ) -> FloatArray:
        """Return the links of some windows as matrices, 1 where all directions agree."""
        n_links = np.diff(self.offsets)[owners]
        flat = ranges(self.offsets[owners], n_links)
        window = np.repeat(np.arange(len(owners)), n_links)
        i, j = self.link_src[flat] - src_first[window], self.link_tgt[flat] - tgt_first[window]
        inside = (i >= 0) & (i < shape[1]) & (j >= 0) & (j < shape[2])
        matrices = np.zeros(shape, dtype=np.float32)
        np.add.at(matrices, (window[inside], i[inside], j[inside]), self.link_weight)
        return matrices
