"""Denoising word alignment: hidden tokens point at their self-labelled partners, beside TLM.

Chi et al., 2021 (XLM-Align). One forward pass of the masked pair serves both losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from pydantic import Field

from calque.models.pointer import PointerNetwork
from calque.objectives.alignment_batches import AlignmentBatch, AlignmentCollator
from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.masked_lm import IGNORED, masked_lm_loss, masking_rules, note_positions
from calque.objectives.self_labels import (
    NEITHER,
    LabelRules,
    PairBlocks,
    compare_states,
    find_links,
)
from calque.objectives.warm_start import LEAST_TOLD, tell_translations
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.text.batching import BatchShape, Ragged

# Paper: layer 10 of 12 labels.
LABEL_DEPTH = 10 / 12
DEFAULT_SHARPNESS = {"dot": 1.0, "cosine": 10.0}


class DenoisingAlignmentSettings(ObjectiveSettings):
    """XLM-Align's TLM and pointer losses as the recipe describes them."""

    kind: Literal["denoising_alignment"] = "denoising_alignment"
    probability: float = Field(0.15, gt=0, lt=1)
    # "continue": the pair is one long sequence, as in the paper; "reset": each side counts from 0.
    positions: Literal["reset", "continue"] = "continue"
    tlm_weight: float = Field(1.0, ge=0)
    pointer_weight: float = Field(1.0, ge=0)
    # "sum": of the two mean losses; "token": the mean over all hidden tokens and queries together.
    reduction: Literal["sum", "token"] = "sum"
    # The layer whose states label; by default ten twelfths of the way up.
    label_layer: int | None = None
    # The share of the pairs that is labelled: labels cost a forward pass without gradients.
    label_share: float = Field(1.0, gt=0, le=1)
    similarity: Literal["dot", "cosine"] = "dot"
    # The exponent of the transport's kernel, for products 1/μ; by default 1 for dot, 10 for cosine.
    sharpness: float | None = Field(None, gt=0)
    labels: Literal["transport", "argmax"] = "transport"
    # "argmax": links that are best from both sides; "union": from either, without any filter.
    filter: Literal["itermax", "argmax", "union"] = "itermax"
    iterations: int = Field(2, gt=0)
    rounds: int = Field(2, gt=0)
    alpha: float = Field(0.9, gt=0, le=1)
    # The layer whose states the pointer reads; by default the last.
    pointer_layer: int | None = None
    # Who points: hidden tokens, as many others (by `probability`), or one end of every link.
    queries: Literal["masked", "unmasked", "all"] = "masked"

    def label_rules(self) -> LabelRules:
        """Give what the mathematics of labelling needs."""
        return LabelRules(
            self.similarity,
            self.sharpness or DEFAULT_SHARPNESS[self.similarity],
            self.labels,
            self.filter,
            self.iterations,
            self.rounds,
            self.alpha,
        )


def pointer_loss(
    logits: Float[Tensor, "blocks queries keys"],
    links: Bool[Tensor, "blocks queries keys"],
    allowed: Bool[Tensor, "blocks queries keys"],
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Give the mean over linked queries of −mean over its links of log softmax, and their number.

    The softmax is over the allowed keys. Paper: a query has one link; here it may have several.

    >>> links, allowed = torch.tensor([[[True, False]]]), torch.tensor([[[True, True]]])
    >>> loss, n_queries = pointer_loss(torch.zeros(1, 1, 2), links, allowed)
    >>> round(loss.item(), 4), n_queries.item()
    (0.6931, 1)
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A finite stand-in for −∞: a token without partners would otherwise give NaN.
    totals = wide.masked_fill(~allowed, torch.finfo(wide.dtype).min).logsumexp(dim=-1)
    n_links = links.sum(dim=-1)
    linked = (wide * links).sum(dim=-1) / n_links.clamp(min=1)
    n_queries = (n_links > 0).sum()
    losses = torch.where(n_links > 0, totals - linked, 0.0)
    return losses.sum() / n_queries.clamp(min=1), n_queries


class DenoisingAlignment(Objective):
    """Guess hidden tokens, and which tokens of the translation they stand for."""

    n_sides: ClassVar[int] = 2
    pointer: PointerNetwork

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._label: Callable[..., Tensor] = label_pairs

    def n_marks(self, marks: Marks) -> int:
        """Count the marks around and between the two sentences."""
        return 2 + marks.between

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Make the pointer network."""
        self.pointer = PointerNetwork(hidden_size, generator)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Let the model say how positions count in a pair."""
        note_positions(encoder, self.settings.positions)

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs."""
        return AlignmentCollator(
            marks,
            masking_rules(marks, self.settings.probability),
            shape,
            self.settings.positions == "reset",
            self.settings.label_share,
        )

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the losses, and the labelling apart from them: it runs without dropout."""
        super().compile(*arguments, **options)
        self._label = torch.compile(label_pairs, *arguments, **options)

    def prepare(self, encoder: Encoder, batch: AlignmentBatch) -> AlignmentBatch:
        """Label the pairs with the model as it is now."""
        with torch.no_grad(), no_dropout(encoder):
            layer, rules = self._label_layer(encoder), self.settings.label_rules()
            return replace(batch, links=self._label(encoder, batch, layer, rules))

    def forward(self, encoder: Encoder, batch: AlignmentBatch) -> LossTerms:
        """Encode the masked pairs once, predict hidden tokens and point from them to partners."""
        if batch.links is None:
            batch = self.prepare(encoder, batch)
        layers = [encoder.n_layers, self._pointer_layer(encoder)]
        states, pointed = encoder(batch.tokens, layers)
        features = encoder.predict_features(states[batch.hidden.masked])
        tlm = masked_lm_loss(features, *encoder.output_layer(), batch.hidden.labels)
        blocks = PairBlocks.of(batch.clean, batch.sides)
        pointer, n_queries = self._point(batch, blocks, pointed)
        n_hidden = (batch.hidden.labels != IGNORED).sum()
        loss = self._combine(tlm, n_hidden, pointer, n_queries)
        return LossTerms(loss, {"tlm": tlm, "pointer": pointer} | describe_links(batch, blocks))

    def find_fault(
        self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]
    ) -> str | None:
        """Warn where the labels to come would be no better than a diagonal."""
        self._pointer_layer(encoder)  # an impossible one is told before anything is compiled
        layer, rules = self._label_layer(encoder), self.settings.label_rules()
        (src, tgt), reset = next(examples), self.settings.positions == "reset"
        with torch.no_grad(), no_dropout(encoder):
            found = tell_translations(encoder, src, tgt, marks, layer, rules, reset=reset)
        if found is None or found[0] >= LEAST_TOLD:
            return None
        return (
            f"the self-labels are no better than a diagonal: they tell {found[0]:.0%} of "
            f"{found[1]} pairs from mismatched ones, and chance tells 50% "
            "(set model.start to an encoder trained on several languages)"
        )

    def _label_layer(self, encoder: Encoder) -> int:
        if self.settings.label_layer is None:
            return round(LABEL_DEPTH * encoder.n_layers)
        return encoder.check_layer(self.settings.label_layer)

    def _pointer_layer(self, encoder: Encoder) -> int:
        asked = self.settings.pointer_layer
        return encoder.n_layers if asked is None else encoder.check_layer(asked)

    def _point(
        self, batch: AlignmentBatch, blocks: PairBlocks, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Compute the pointer's loss, and from how many tokens."""
        assert batch.links is not None
        if self.settings.queries == "masked":
            asking = self.pointer.seek(states[batch.hidden.masked])
            # Places that only fill the shape are at token 0, a mark, which has no links.
            sought = asking.new_zeros(states.shape).index_copy(0, batch.hidden.masked, asking)
        else:
            sought = self.pointer.seek(states)
        if batch.flat is not None:
            sought, states = sought[batch.flat], states[batch.flat]
        logits = blocks.lay(sought) @ blocks.lay(states).mT
        cells, links = blocks.cells(), batch.links
        links = (links | links.mT) & choose_queries(batch, blocks, self.settings)
        return pointer_loss(logits, links, cells | cells.mT)

    def _combine(self, tlm: Tensor, n_hidden: Tensor, pointer: Tensor, n_queries: Tensor) -> Tensor:
        tlm, pointer = self.settings.tlm_weight * tlm, self.settings.pointer_weight * pointer
        if self.settings.reduction == "sum":
            return tlm + pointer
        return (tlm * n_hidden + pointer * n_queries) / (n_hidden + n_queries)


def label_pairs(
    encoder: Encoder, batch: AlignmentBatch, layer: int, rules: LabelRules
) -> Bool[Tensor, "blocks width width"]:
    """Link the tokens of the pairs by the states of a layer, nothing hidden."""
    (states,) = encoder(batch.clean, [layer])
    blocks = PairBlocks.of(batch.clean, batch.sides)
    similarity = compare_states(blocks.lay(states), rules.similarity)
    return find_links(similarity, blocks.cells(), rules)


def choose_queries(
    batch: AlignmentBatch, blocks: PairBlocks, settings: DenoisingAlignmentSettings
) -> Bool[Tensor, "blocks width _"]:
    """Mark who may point, and with "all" at whom: each link is followed from one of its ends."""
    chance = blocks.lay(batch.chance)[:, :, None]
    if settings.queries == "all":
        return chance > chance.mT
    is_hidden = blocks.lay(batch.is_hidden)[:, :, None]
    if settings.queries == "masked":
        return is_hidden
    return ~is_hidden & (chance < settings.probability)


def describe_links(batch: AlignmentBatch, blocks: PairBlocks) -> dict[str, Float[Tensor, ""]]:
    """Give the share of the tokens that are labelled, and of the links that lie on the diagonal.

    The diagonal of a pair runs through the cells of tokens whose places in their sentences meet.
    """
    links = batch.links
    assert links is not None
    starts, ends = blocks.lay(batch.edges).unbind(dim=-1)
    meet = (starts[:, :, None] < ends[:, None, :]) & (starts[:, None, :] < ends[:, :, None])
    n_labelled, n_tokens = links.any(dim=2) | links.any(dim=1), batch.sides != NEITHER
    return {
        "labelled": n_labelled.sum() / n_tokens.sum().clamp(min=1),
        "diagonal": (links & meet).sum() / links.sum().clamp(min=1),
    }


@contextmanager
def no_dropout(encoder: Encoder) -> Iterator[None]:
    """Run the encoder as it will be used, not as it is trained."""
    was_training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(was_training)
