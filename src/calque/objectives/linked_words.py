"""Linked words find each other: contrastive learning on given word links, beside TLM.

A word's vector is to be closer to those of the words it is linked with than to the others of the
translation, in the masked pair side by side and in the two sentences apart. The links come from a
statistical aligner, whose mistakes a model that reads sentences need not repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.linked_batches import LinkedBatch, LinkedCollator, LinkedPairs
from calque.objectives.masked_lm import masked_lm_loss, masking_rules, note_positions
from calque.objectives.self_labels import PairBlocks, compare_states
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.text.batching import BatchShape

# How far up the layer lies whose words are compared, unless a recipe says so.
DEPTH = 7 / 8


class LinkedWordsSettings(ObjectiveSettings):
    """The three losses as the recipe describes them: TLM, linked words side by side and apart."""

    kind: Literal["linked_words"] = "linked_words"
    probability: float = Field(0.15, gt=0, lt=1)
    positions: Literal["reset", "continue"] = "reset"
    # The layer whose states make the words; by default seven eighths of the way up.
    layer: int | None = None
    temperature: float = Field(0.1, gt=0)
    # Weights of the losses; without `separate` the sentences are not encoded apart.
    tlm: float = Field(1.0, ge=0)
    joint: float = Field(1.0, ge=0)
    separate: float = Field(1.0, ge=0)


def linked_words_loss(
    similarity: Float[Tensor, "blocks width width"],
    weights: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
) -> Float[Tensor, ""]:
    """Give ½ · (rows + columns), each the mean over linked words of −Σ w log softmax / Σ w.

    The softmax is over the cells of a word's row or column; weights above 0 are links and lie in
    cells. Words without links ask nothing, but are there to be told apart. Without any link the
    loss is 0.

    >>> cells = torch.ones(1, 1, 2, dtype=torch.bool)
    >>> loss = linked_words_loss(torch.zeros(1, 1, 2), torch.tensor([[[1.0, 0.0]]]), cells)
    >>> round(loss.item(), 4)  # half of ln 2: the column has no rival
    0.3466
    """
    # A finite stand-in for −∞: a word without partners would otherwise give NaN.
    scores = similarity.masked_fill(~cells, torch.finfo(similarity.dtype).min)
    products = similarity * weights
    losses = []
    for side in (2, 1):
        total = weights.sum(dim=side)
        is_linked = total > 0
        linked = products.sum(dim=side) / torch.where(is_linked, total, 1.0)
        lost = torch.where(is_linked, scores.logsumexp(dim=side) - linked, 0.0)
        losses.append(lost.sum() / is_linked.sum().clamp(min=1))
    return (losses[0] + losses[1]) / 2


def linked_words_accuracy(
    similarity: Float[Tensor, "blocks width width"],
    weights: Float[Tensor, "blocks width width"],
    cells: Bool[Tensor, "blocks width width"],
) -> Float[Tensor, ""]:
    """Give the share of the linked words whose best partner is one they are linked with."""
    scores, links = similarity.masked_fill(~cells, -torch.inf), weights > 0
    n_found = n_linked = torch.zeros((), device=links.device)
    for side in (2, 1):
        best = scores.argmax(dim=side, keepdim=True)
        n_found = n_found + links.gather(side, best).sum()
        n_linked = n_linked + links.any(dim=side).sum()
    return n_found / n_linked.clamp(min=1)


def compare_words(
    states: Float[Tensor, "blocks width hidden"], words: Int[Tensor, "blocks width"]
) -> Float[Tensor, "blocks width width"]:
    """Give the cosines of all words of a block, at every subword those of its word's mean."""
    with torch.autocast(states.device.type, enabled=False):
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        same = (words[:, :, None] == words[:, None, :]).to(wide.dtype)
        return compare_states(same @ wide, "cosine")  # of sums: the cosines of means are no others


class LinkedWords(Objective):
    """Guess hidden tokens, and tell linked words from the others of the translation."""

    n_sides: ClassVar[int] = 2
    needs_links: ClassVar[bool] = True

    def n_marks(self, marks: Marks) -> int:
        """Count the marks of a pair, or of two sentences apart, whichever are more."""
        n_joint = 2 + marks.between
        return max(n_joint, 4) if self.settings.separate > 0 else n_joint

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Let the model say how positions count in a pair."""
        note_positions(encoder, self.settings.positions)

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs with links."""
        settings = self.settings
        rules, reset = masking_rules(marks, settings.probability), settings.positions == "reset"
        return LinkedCollator(marks, rules, shape, reset, settings.separate > 0)

    def forward(self, encoder: Encoder, batch: LinkedBatch) -> LossTerms:
        """Encode the masked pairs once for two losses, and the sentences apart for the third."""
        settings, layer = self.settings, self._layer(encoder)
        last, middle = encoder(batch.joint.tokens, [encoder.n_layers, layer])
        features = encoder.predict_features(last[batch.masked])
        tlm = masked_lm_loss(features, *encoder.output_layer(), batch.labels)
        compared = self._compare(batch.joint, middle)
        joint = linked_words_loss(*compared)
        loss, figures = settings.tlm * tlm + settings.joint * joint, {"tlm": tlm, "joint": joint}
        if batch.separate is not None:
            (apart,) = encoder(batch.separate.tokens, [layer])
            separate = linked_words_loss(*self._compare(batch.separate, apart))
            loss, figures["separate"] = loss + settings.separate * separate, separate
        with torch.no_grad():
            figures["accuracy"] = linked_words_accuracy(*compared)
        return LossTerms(loss, figures)

    def _layer(self, encoder: Encoder) -> int:
        if self.settings.layer is None:
            return round(DEPTH * encoder.n_layers)
        return encoder.check_layer(self.settings.layer)

    def _compare(
        self, linked: LinkedPairs, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Give the scaled cosines of words, the weights of the links, and the cells of pairs."""
        blocks = PairBlocks.of(linked.pairs, linked.sides)
        cosines = compare_words(blocks.lay(states), blocks.lay(linked.words))
        empty = cosines.new_zeros(cosines.numel())
        weights = empty.index_put((linked.cells,), linked.weights.to(cosines.dtype))
        return cosines / self.settings.temperature, weights.view_as(cosines), blocks.cells()
