"""Batches of sentence pairs for word alignment: masked, whole, and which token is on which side.

Whether a model's self-labels are worth learning from: it must tell translations from others.

A diagonal links the words of any two sentences equally well. Labels that are better than that
follow what words mean, and then a sentence's words find clearer partners in its translation than
in another sentence of that length. Equal tokens do not count: to match them needs no knowledge.

Denoising word alignment: hidden tokens point at their self-labelled partners, beside TLM.

Chi et al., 2021 (XLM-Align). One forward pass of the masked pair serves both losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from pydantic import Field

from calque.models.heads import PointerNetwork
from calque.objectives.base import Marks, Objective, ObjectiveSettings
from calque.objectives.masked_lm import (
    IGNORED,
    join_sides,
    mark_sides,
    mask_batch,
    masked_lm_loss,
    masking_rules,
    note_positions,
    swap_sides,
)
from calque.objectives.self_labels import (
    LEFT,
    NEITHER,
    RIGHT,
    LabelRules,
    PairBlocks,
    compare_states,
    find_links,
    share_on_links,
)
from calque.tokens.ragged import BatchShape, Ragged, pack, ranges, reorder
from calque.types import LossTerms, MaskedBatch, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.masking import MaskingRules

    IntArray = npt.NDArray[np.int64]

N_SIDES = 3  # neither counts as one


@dataclass(frozen=True, slots=True)
class AlignmentBatch:
    """Masked pairs, the pairs to label without masks, and where the tokens of both sides lie.

    The arrays are those of the clean tokens. `flat` are their places among the masked tokens, or
    None where all pairs are labelled. `edges` are the ends of a token's place in its sentence,
    as shares of the sentence; `chance` is a random number.
    """

    hidden: MaskedBatch
    clean: TokenBatch
    flat: Int[Tensor, "clean"] | None
    sides: Int[Tensor, "clean"]
    edges: Float[Tensor, "clean 2"]
    is_hidden: Bool[Tensor, "clean"]
    chance: Float[Tensor, "clean"]
    links: Bool[Tensor, "blocks width width"] | None = None

    @property
    def tokens(self) -> TokenBatch:
        """Give the masked pairs."""
        return self.hidden.tokens

    def pin_memory(self) -> AlignmentBatch:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        return self._with_each(self.hidden.pin_memory(), lambda array: array.pin_memory())

    def to(self, device: torch.device | str) -> AlignmentBatch:
        """Copy the arrays to a device, without waiting for the copy."""
        return self._with_each(
            self.hidden.to(device), lambda array: array.to(device, non_blocking=True)
        )

    def _with_each(self, hidden: MaskedBatch, act: Callable[[Tensor], Tensor]) -> AlignmentBatch:
        clean = replace(self.clean, **_map_arrays(self.clean, act))
        return replace(self, hidden=hidden, clean=clean, **_map_arrays(self, act))


def _map_arrays(record: Any, act: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: act(value) for name, value in values.items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True, slots=True)
class AlignmentCollator:
    """Builds batches: TLM's pairs, what stood there before masking, and what labelling needs."""

    marks: Marks
    rules: MaskingRules
    shape: BatchShape | None
    reset: bool
    label_share: float

    def __call__(self, sides: tuple[Ragged, ...], generator: torch.Generator) -> AlignmentBatch:
        """Build one batch."""
        left, right = swap_sides(sides[0], sides[1], generator)
        tokens, token_sides = self._pack(left, right)
        hidden = mask_batch(tokens, self.rules, generator, self.shape)
        is_hidden = torch.zeros(len(tokens.ids), dtype=torch.bool)
        is_hidden[hidden.masked[hidden.labels != IGNORED]] = True
        edges = torch.from_numpy(find_edges(token_sides.numpy()))
        clean, flat = choose_pairs(tokens, self.label_share, generator)
        if flat is not None:
            token_sides, edges, is_hidden = token_sides[flat], edges[flat], is_hidden[flat]
        chance = torch.rand(len(clean.ids), generator=generator)
        return AlignmentBatch(hidden, clean, flat, token_sides, edges, is_hidden, chance)

    def _pack(self, left: Ragged, right: Ragged) -> tuple[TokenBatch, Int[Tensor, "tokens"]]:
        """Join and pack the pairs; a token's side travels along with its position."""
        marked = mark_sides(left, right, self.marks)
        pairs, positions = join_sides(*marked, reset=self.reset)
        both = positions * N_SIDES + flag_sides(left, right, self.marks)
        tokens = pack(pairs, positions=both, shape=self.shape, pad_id=self.marks.pad)
        flat_sides = (tokens.positions % N_SIDES).to(torch.int8)
        return replace(tokens, positions=tokens.positions // N_SIDES), flat_sides


def flag_sides(left: Ragged, right: Ragged, marks: Marks) -> IntArray:
    """Tell the side of every token of joined pairs, marks on neither."""
    flags = Ragged(np.full(len(left.ids), LEFT), left.lengths)
    others = Ragged(np.full(len(right.ids), RIGHT), right.lengths)
    neither = replace(marks, first=NEITHER, last=NEITHER)
    return join_sides(*mark_sides(flags, others, neither), reset=True)[0].ids


def find_edges(sides: npt.NDArray[np.int8]) -> npt.NDArray[np.float32]:
    """Give the ends of every token's place in its sentence, as shares of the sentence.

    Sentences are what lies between marks.

    >>> find_edges(np.array([0, 1, 0, 2, 2, 0], dtype=np.int8))[[1, 3, 4]].tolist()
    [[0.0, 1.0], [0.0, 0.5], [0.5, 1.0]]
    """
    steps = np.diff(sides != NEITHER, prepend=False, append=False).nonzero()[0]
    starts, stops = steps[::2], steps[1::2]
    lengths = stops - starts
    index, n_tokens = ranges(np.zeros_like(lengths), lengths), np.repeat(lengths, lengths)
    edges = np.zeros((len(sides), 2), dtype=np.float32)
    edges[ranges(starts, lengths)] = np.stack([index, index + 1], axis=1) / n_tokens[:, None]
    return edges


def choose_pairs(
    tokens: TokenBatch, share: float, generator: torch.Generator
) -> tuple[TokenBatch, Int[Tensor, "chosen"] | None]:
    """Choose a share of the pairs, or of the rows that hold them; give their flat places too."""
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
    longest = tokens.row or int(lengths.max())
    clean = replace(
        tokens,
        ids=tokens.ids[flat],
        positions=tokens.positions[flat],
        offsets=torch.from_numpy(offsets.astype(np.int32)),
        longest=longest,
        n_real=len(flat),
    )
    return clean, flat


# Pairs looked at, the fewest that allow a verdict, and the share of them to be told from
# mismatched ones. Chance gives a half.
N_CHECKED, FEWEST_CHECKED, LEAST_TOLD = 256, 16, 2 / 3


def tell_translations(
    encoder: Encoder,
    src: Ragged,
    tgt: Ragged,
    marks: Marks,
    layer: int,
    rules: LabelRules,
    *,
    reset: bool,
) -> tuple[float, int] | None:
    """Give the share of pairs whose links are clearer than with another sentence, and of how many.

    None if there are too few pairs to say. `reset` tells how positions are counted.
    """
    others = reorder(tgt, pair_with_others(tgt.lengths))
    n_tokens = src.lengths + np.maximum(tgt.lengths, others.lengths) + marks.between + 2
    kept = (n_tokens <= encoder.max_tokens).nonzero()[0][:N_CHECKED]
    if len(kept) < FEWEST_CHECKED:
        return None
    true, false = (
        measure_clarity(
            encoder, reorder(src, kept), reorder(side, kept), marks, layer, rules, reset=reset
        )
        for side in (tgt, others)
    )
    told = (true > false).float() + 0.5 * (true == false)
    return float(told.mean()), len(kept)


def pair_with_others(lengths: IntArray) -> IntArray:
    """Give every sentence another one, the next by length.

    >>> pair_with_others(np.array([5, 3, 9])).tolist()
    [2, 0, 1]
    """
    order = np.argsort(lengths, kind="stable")
    partners = np.empty_like(order)
    partners[order] = np.roll(order, -1)
    return partners


def measure_clarity(
    encoder: Encoder,
    src: Ragged,
    tgt: Ragged,
    marks: Marks,
    layer: int,
    rules: LabelRules,
    *,
    reset: bool,
) -> Float[Tensor, "pairs"]:
    """Encode pairs, and tell how clearly the tokens of each are linked."""
    pairs, positions = join_sides(*mark_sides(src, tgt, marks), reset=reset)
    device = next(encoder.parameters()).device
    tokens = pack(pairs, positions=positions, pad_id=marks.pad).to(device)
    (states,) = encoder(tokens, [layer])
    sides = torch.from_numpy(flag_sides(src, tgt, marks)).to(device)
    blocks = PairBlocks.of(tokens, sides)
    ids = blocks.lay(tokens.ids)
    cells = blocks.cells() & (ids[:, :, None] != ids[:, None, :])
    return share_on_links(compare_states(blocks.lay(states), rules.similarity), cells, rules)


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
