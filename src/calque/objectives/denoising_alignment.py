"""Denoising word alignment: masked tokens point to their self-labeled partners; plus TLM.

Chi et al., 2021 (XLM-Align). One forward pass of the masked pair serves both losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from calque.models.heads import NO_LABEL, PointerNetwork
from calque.objectives.base import (
    Objective,
    ObjectiveSettings,
    TensorBatch,
    choose_layer,
    evaluation_mode,
)
from calque.objectives.masked_lm import mask_batch, masked_lm_loss, masking_rules, store_positions
from calque.objectives.self_label_check import MIN_ACCURACY, self_label_accuracy
from calque.objectives.self_labels import (
    LEFT,
    NEITHER,
    LabelRules,
    PairBlocks,
    compare_states,
    find_links,
    token_sides,
)
from calque.tokens.layout import add_pair_special_tokens, join_sides, swap_sides
from calque.tokens.ragged import BatchShape, Ragged, pack, ranges
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms, MaskedBatch, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.masking import MaskingRules

# Paper: labels come from layer 10 of 12.
LABEL_DEPTH = 10 / 12
DEFAULT_SHARPNESS = {"dot": 1.0, "cosine": 10.0}
N_SIDES = 3  # left, right and neither


class DenoisingAlignmentSettings(ObjectiveSettings):
    """Settings of XLM-Align's TLM and pointer losses in a recipe."""

    kind: Literal["denoising_alignment"] = "denoising_alignment"
    probability: float = Field(0.15, gt=0, lt=1)
    # "continue": the pair is one long sequence, as in the paper; "reset": each side counts from 0.
    positions: Literal["reset", "continue"] = "continue"
    tlm_weight: float = Field(1.0, ge=0)
    pointer_weight: float = Field(1.0, ge=0)
    # "mean": the mean over masked tokens plus the mean over queries; "token": the mean over all of
    # them together; "sum": their sum over a pair (Eq. 15), averaged over the pairs of a batch.
    reduction: Literal["mean", "sum", "token"] = "mean"
    # The layer whose states give the labels. Default: 10/12 of the layers.
    label_layer: int | None = None
    # The fraction of pairs that are labeled: labels cost a forward pass without gradients.
    label_share: float = Field(1.0, gt=0, le=1)
    # Paper: dot, transport and itermax. The defaults are the most precise labels of calque-mini.
    similarity: Literal["dot", "cosine"] = "cosine"
    # The exponent of the transport kernel, 1/μ for dot products. Default: 1 for dot, 10 for cosine.
    sharpness: float | None = Field(None, gt=0)
    labels: Literal["transport", "argmax"] = "argmax"
    # "argmax": links that are best from both sides; "union": from either side, without a filter.
    filter: Literal["itermax", "argmax", "union"] = "argmax"
    iterations: int = Field(2, gt=0)
    # Sinkhorn scales "rows" first in the paper's Eq. 6, "columns" first in the authors' code.
    scale_first: Literal["columns", "rows"] = "columns"
    rounds: int = Field(2, gt=0)
    alpha: float = Field(0.9, gt=0, le=1)
    # The layer whose states the pointer network reads. Default: the last.
    pointer_layer: int | None = None
    # Query positions: masked tokens, unmasked ones (with `probability`), or one end of every link.
    queries: Literal["masked", "unmasked", "all"] = "masked"

    def label_rules(self) -> LabelRules:
        """Return the rules of self-labeling."""
        return LabelRules(
            self.similarity,
            self.sharpness or DEFAULT_SHARPNESS[self.similarity],
            self.labels,
            self.filter,
            self.iterations,
            self.rounds,
            self.alpha,
            self.scale_first,
        )


def pointer_loss(
    logits: Float[Tensor, "blocks queries keys"],
    links: Bool[Tensor, "blocks queries keys"],
    allowed: Bool[Tensor, "blocks queries keys"],
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the mean pointer loss over linked queries and their number (XLM-Align, Eq. 15).

    The loss of a query is the mean over its links of −log softmax over the allowed keys. Paper: a
    query has one link; here it may have several.

    >>> links, allowed = torch.tensor([[[True, False]]]), torch.tensor([[[True, True]]])
    >>> loss, n_queries = pointer_loss(torch.zeros(1, 1, 2), links, allowed)
    >>> round(loss.item(), 4), n_queries.item()
    (0.6931, 1)
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # A finite value instead of −∞: a token without partners would otherwise give NaN.
    totals = wide.masked_fill(~allowed, torch.finfo(wide.dtype).min).logsumexp(dim=-1)
    n_links = links.sum(dim=-1)
    linked = (wide * links).sum(dim=-1) / n_links.clamp(min=1)
    n_queries = (n_links > 0).sum()
    losses = torch.where(n_links > 0, totals - linked, 0.0)
    return losses.sum() / n_queries.clamp(min=1), n_queries


@dataclass(frozen=True, slots=True)
class AlignmentBatch(TensorBatch):
    """Masked pairs, and the unmasked pairs that are labeled.

    All arrays below `clean` are those of its tokens. `flat` are their indices among the masked
    tokens, None if all pairs are labeled. `spans` are start and end of a token relative to the
    length of its sentence; `chance` is a random number in [0, 1); `links` are the self-labels.
    `n_pairs` is the number of masked pairs.
    """

    masked: MaskedBatch
    clean: TokenBatch
    flat: Int[Tensor, "clean"] | None
    sides: Int[Tensor, "clean"]
    spans: Float[Tensor, "clean 2"]
    is_masked: Bool[Tensor, "clean"]
    chance: Float[Tensor, "clean"]
    n_pairs: Int[Tensor, ""]
    links: Bool[Tensor, "blocks width width"] | None = None

    @property
    def tokens(self) -> TokenBatch:
        """The masked pairs."""
        return self.masked.tokens


class DenoisingAlignment(Objective):
    """Predict masked tokens, and the tokens of the translation that they are aligned to."""

    n_sides: ClassVar[int] = 2
    pointer: PointerNetwork

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._label: Callable[..., Tensor] = label_pairs

    def count_special_tokens(self, special_tokens: SpecialTokens) -> int:
        """Return the number of special tokens around and between the two sentences."""
        return 2 + special_tokens.n_between

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Create the pointer network."""
        self.pointer = PointerNetwork(hidden_size, generator)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Store with the model how positions are counted in a pair."""
        store_positions(encoder, self.settings.positions)

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of sentence pairs."""
        return AlignmentCollator(
            special_tokens,
            masking_rules(special_tokens, self.settings.probability),
            shape,
            self.settings.positions == "reset",
            self.settings.label_share,
        )

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the losses, and separately the labeling, which runs without dropout."""
        super().compile(*arguments, **options)
        self._label = torch.compile(label_pairs, *arguments, **options)

    def prepare(self, encoder: Encoder, batch: AlignmentBatch) -> AlignmentBatch:
        """Add the labels of the current model."""
        with torch.no_grad(), evaluation_mode(encoder):
            layer, rules = self._label_layer(encoder), self.settings.label_rules()
            return replace(batch, links=self._label(encoder, batch, layer, rules))

    def forward(self, encoder: Encoder, batch: AlignmentBatch) -> LossTerms:
        """Return the TLM loss and the pointer loss of one forward pass."""
        if batch.links is None:
            batch = self.prepare(encoder, batch)
        layers = [encoder.n_layers, choose_layer(encoder, self.settings.pointer_layer)]
        last, pointed = encoder(batch.tokens, layers)
        features = encoder.lm_features(last[batch.masked.masked])
        tlm = masked_lm_loss(features, *encoder.output_layer(), batch.masked.labels)
        blocks = PairBlocks.of(batch.clean, batch.sides)
        pointer, n_queries = self._pointer_loss(batch, blocks, pointed)
        n_masked = (batch.masked.labels != NO_LABEL).sum()
        weighted = self.settings.tlm_weight * tlm, self.settings.pointer_weight * pointer
        n_pairs = batch.n_pairs, count_pairs(batch.sides)
        loss = combine_losses(weighted, (n_masked, n_queries), n_pairs, self.settings.reduction)
        return LossTerms(loss, {"tlm": tlm, "pointer": pointer} | describe_links(batch, blocks))

    def find_problem(
        self,
        encoder: Encoder,
        special_tokens: SpecialTokens,
        examples: Iterator[tuple[Ragged, ...]],
    ) -> str | None:
        """Return a warning if the self-labels are no better than a diagonal alignment."""
        settings = self.settings
        choose_layer(encoder, settings.pointer_layer)  # raises an error before anything is compiled
        if settings.pointer_weight == 0:  # nothing is learned from labels
            return None
        (src, tgt), layer = next(examples), self._label_layer(encoder)
        with torch.no_grad(), evaluation_mode(encoder):
            result = self_label_accuracy(
                encoder,
                src,
                tgt,
                special_tokens,
                layer,
                settings.label_rules(),
                reset=settings.positions == "reset",
            )
        if result is None or result[0] >= MIN_ACCURACY:
            return None
        return (
            f"the self-labels are no better than a diagonal: they distinguish {result[0]:.0%} of "
            f"{result[1]} pairs from mismatched ones, and chance gives 50% "
            "(set model.start to an encoder trained on several languages)"
        )

    def _label_layer(self, encoder: Encoder) -> int:
        return choose_layer(encoder, self.settings.label_layer, LABEL_DEPTH)

    def _pointer_loss(
        self, batch: AlignmentBatch, blocks: PairBlocks, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """Return the loss of the pointer network and the number of queries."""
        assert batch.links is not None
        if self.settings.queries == "masked":
            masked = batch.masked.masked
            queries = self.pointer.project_queries(states[masked])
            # Positions that only fill the shape are token 0, a special token without links.
            queries = queries.new_zeros(states.shape).index_copy(0, masked, queries)
        else:
            queries = self.pointer.project_queries(states)
        if batch.flat is not None:
            queries, states = queries[batch.flat], states[batch.flat]
        logits = blocks.to_blocks(queries) @ blocks.to_blocks(states).mT
        cells, links = blocks.cells(), batch.links
        links = (links | links.mT) & choose_queries(batch, blocks, self.settings)
        return pointer_loss(logits, links, cells | cells.mT)


def combine_losses(
    means: Sequence[Tensor],
    counts: Sequence[Tensor],
    n_pairs: Sequence[Tensor],
    reduction: Literal["mean", "sum", "token"],
) -> Float[Tensor, ""]:
    """Return one loss from the mean TLM loss and the mean pointer loss.

    `counts` are the masked tokens and the queries, `n_pairs` the pairs that they are from. Paper:
    "sum" (Eq. 15) is the loss of one pair, here averaged over the pairs of the batch.

    >>> means, counts, n_pairs = torch.tensor([[2.0, 1.0], [9.0, 3.0], [3.0, 2.0]])
    >>> [combine_losses(means, counts, n_pairs, how).item() for how in ("mean", "token", "sum")]
    [3.0, 1.75, 7.5]
    """
    if reduction == "mean":
        return means[0] + means[1]
    sums = means[0] * counts[0], means[1] * counts[1]
    if reduction == "token":
        return (sums[0] + sums[1]) / (counts[0] + counts[1])
    return sums[0] / n_pairs[0] + sums[1] / n_pairs[1].clamp(min=1)


def count_pairs(sides: Int[Tensor, "tokens"]) -> Int[Tensor, ""]:
    """Return the number of pairs: how often a left sentence begins.

    >>> count_pairs(torch.tensor([0, 1, 1, 0, 2, 0, 0, 1, 0, 2, 0])).item()
    2
    """
    is_left = sides == LEFT
    return (is_left[1:] & ~is_left[:-1]).sum()


def label_pairs(
    encoder: Encoder, batch: AlignmentBatch, layer: int, rules: LabelRules
) -> Bool[Tensor, "blocks width width"]:
    """Return the links between the unmasked tokens of the pairs by the states of a layer."""
    (states,) = encoder(batch.clean, [layer])
    blocks = PairBlocks.of(batch.clean, batch.sides)
    similarity = compare_states(blocks.to_blocks(states), rules.similarity)
    return find_links(similarity, blocks.cells(), rules)


def choose_queries(
    batch: AlignmentBatch, blocks: PairBlocks, settings: DenoisingAlignmentSettings
) -> Bool[Tensor, "blocks width _"]:
    """Return the query positions (XLM-Align, Eq. 14 and Table 7).

    With "all", one end of every link, chosen at random, is the query.
    """
    chance = blocks.to_blocks(batch.chance)[:, :, None]
    if settings.queries == "all":
        return chance > chance.mT
    is_masked = blocks.to_blocks(batch.is_masked)[:, :, None]
    if settings.queries == "masked":
        return is_masked
    return ~is_masked & (chance < settings.probability)


def describe_links(batch: AlignmentBatch, blocks: PairBlocks) -> dict[str, Float[Tensor, ""]]:
    """Return the fraction of tokens that are labeled, and of links on the diagonal.

    A link is on the diagonal if the relative positions of its two tokens overlap.
    """
    links = batch.links
    assert links is not None
    starts, ends = blocks.to_blocks(batch.spans).unbind(dim=-1)
    overlap = (starts[:, :, None] < ends[:, None, :]) & (starts[:, None, :] < ends[:, :, None])
    is_labeled, is_token = links.any(dim=2) | links.any(dim=1), batch.sides != NEITHER
    return {
        "labelled": is_labeled.sum() / is_token.sum().clamp(min=1),
        "diagonal": (links & overlap).sum() / links.sum().clamp(min=1),
    }


@dataclass(frozen=True, slots=True)
class AlignmentCollator:
    """Builds batches: masked pairs as for TLM, the unmasked pairs, and what labeling needs."""

    special_tokens: SpecialTokens
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool
    label_share: float

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> AlignmentBatch:
        """Return one batch."""
        left, right = swap_sides(sides[0], sides[1], generator)
        tokens, flat_sides = self._pack(left, right)
        masked = mask_batch(tokens, self.rules, generator, self.shape)
        is_masked = torch.zeros(len(tokens.ids), dtype=torch.bool)
        is_masked[masked.masked[masked.labels != NO_LABEL]] = True
        spans = torch.from_numpy(find_relative_spans(flat_sides.numpy()))
        n_pairs = count_pairs(flat_sides)
        clean, flat = choose_pairs(tokens, self.label_share, generator)
        if flat is not None:
            flat_sides, spans, is_masked = flat_sides[flat], spans[flat], is_masked[flat]
        chance = torch.rand(len(clean.ids), generator=generator)
        return AlignmentBatch(masked, clean, flat, flat_sides, spans, is_masked, chance, n_pairs)

    def _pack(self, left: Ragged, right: Ragged) -> tuple[TokenBatch, Int[Tensor, "tokens"]]:
        """Join and pack the pairs; sides are packed together with positions."""
        sides = add_pair_special_tokens(left, right, self.special_tokens)
        pairs, positions = join_sides(*sides, reset=self.reset)
        both = positions * N_SIDES + token_sides(left, right, self.special_tokens)
        pad_id = self.special_tokens.pad_id
        tokens = pack(pairs, positions=both, shape=self.shape, pad_id=pad_id)
        flat_sides = (tokens.positions % N_SIDES).to(torch.int8)
        return replace(tokens, positions=tokens.positions // N_SIDES), flat_sides


def find_relative_spans(sides: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Return start and end of every token relative to the length of its sentence.

    Sentences are separated by special tokens.

    >>> find_relative_spans(np.array([0, 1, 0, 2, 2, 0], dtype=np.int8))[[1, 3, 4]].tolist()
    [[0.0, 1.0], [0.0, 0.5], [0.5, 1.0]]
    """
    steps = np.diff(sides != NEITHER, prepend=False, append=False).nonzero()[0]
    starts, stops = steps[::2], steps[1::2]
    lengths = stops - starts
    index, n_tokens = ranges(np.zeros_like(lengths), lengths), np.repeat(lengths, lengths)
    spans = np.zeros((len(sides), 2), dtype=np.float32)
    spans[ranges(starts, lengths)] = np.stack([index, index + 1], axis=1) / n_tokens[:, None]
    return spans


def choose_pairs(
    tokens: TokenBatch, share: float, generator: torch.Generator
) -> tuple[TokenBatch, Int[Tensor, "chosen"] | None]:
    """Return a random fraction of the pairs, or of their rows, and their flat token indices."""
    if share == 1:
        return tokens, None
    bounds = tokens.offsets.numpy().astype(np.int64)
    starts, lengths = bounds[:-1], np.diff(bounds)
    starts, lengths = starts[lengths > 0], lengths[lengths > 0]
    block_of = starts // tokens.row if tokens.row else np.arange(len(starts))
    n_blocks = int(block_of[-1]) + 1
    n_chosen = max(1, round(share * n_blocks))
    chosen = torch.randperm(n_blocks, generator=generator)[:n_chosen].numpy()
    kept = np.isin(block_of, chosen)
    starts, lengths = starts[kept], lengths[kept]
    offsets = np.full(len(bounds) if tokens.row else len(starts) + 1, lengths.sum())
    offsets[: len(starts)] = np.cumsum(lengths) - lengths
    flat = torch.from_numpy(ranges(starts, lengths))
    clean = replace(
        tokens,
        ids=tokens.ids[flat],
        positions=tokens.positions[flat],
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=tokens.row or int(lengths.max()),
        n_real=len(flat),
    )
    return clean, flat
