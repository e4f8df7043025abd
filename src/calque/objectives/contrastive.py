"""A queue of earlier features: more negatives than one batch has.

Batches of sentence pairs whose sentences are encoded apart and averaged.

Contrastive alignment: translations closer to each other than to anything else in the batch.

Wu and Dredze, 2020, on linked words, weak and strong; and the same on whole sentences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from calque.models.heads import FeatureExtractor
from calque.objectives.base import (
    BatchOfArrays,
    Marks,
    Objective,
    ObjectiveSettings,
    gather_rows,
    hash_sequences,
    lay_apart,
    n_processes,
    process_number,
)
from calque.objectives.linked_words import WordPairBatch, WordPairCollator
from calque.objectives.regression import PretrainedWeights
from calque.types import LossTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape, Ragged
    from calque.types import TokenBatch


# The key of what equals nothing: places, the keys that do not last, count from 0.
NO_KEY = -1


class Rows(NamedTuple):
    """Pairs of features of unit length, the keys of what they stand for, and which are real."""

    src: Float[Tensor, "pairs features"]
    tgt: Float[Tensor, "pairs features"]
    src_keys: Int[Tensor, "pairs"]
    tgt_keys: Int[Tensor, "pairs"]
    real: Bool[Tensor, "pairs"]

    def without_keys(self) -> Rows:
        """Forget what the pairs stand for: they equal no others."""
        nothing = torch.full_like(self.src_keys, NO_KEY)
        return self._replace(src_keys=nothing, tgt_keys=nothing)


class NegativeQueue(nn.Module):
    """The features of the last pairs, the newest first, without gradients.

    Paper: a memory bank is what Wu and Dredze (2020, section 4) leave to others; this is the
    queue of He et al. (2019) without a second encoder, so its rows are a few steps old.
    """

    src: Tensor
    tgt: Tensor
    src_keys: Tensor
    tgt_keys: Tensor
    real: Tensor

    def __init__(self, n_pairs: int, n_features: int) -> None:
        super().__init__()
        for name in ("src", "tgt"):
            self.register_buffer(name, torch.zeros(n_pairs, n_features))
            self.register_buffer(f"{name}_keys", torch.zeros(n_pairs, dtype=torch.int64))
        self.register_buffer("real", torch.zeros(n_pairs, dtype=torch.bool))

    def rows(self) -> Rows:
        """Give what is in the queue."""
        # Copies: the buffers change before the gradients are computed.
        return Rows(*(getattr(self, name).clone() for name in Rows._fields))

    @torch.no_grad()
    def push(self, new: Rows) -> None:
        """Put pairs in, those that are not real excepted; the oldest fall out."""
        real = torch.cat([new.real, self.real])
        kept = torch.argsort(~real, stable=True)[: len(self.real)]
        for name in Rows._fields:
            both = torch.cat([getattr(new, name), getattr(self, name)])
            getattr(self, name).copy_(both[kept])


@dataclass(frozen=True, slots=True)
class SentencePairBatch(BatchOfArrays):
    """Sentence pairs, each sentence a sequence of its own.

    `owners` tell the sentence of every token: a source by the number of its pair, a target by
    that plus the number of pairs; marks and padding are of none, twice the number of pairs. A
    pair of weight 0 only fills the shape. Pairs with equal `src_keys` have equal sources.
    """

    tokens: TokenBatch
    owners: Int[Tensor, "tokens"]
    weights: Float[Tensor, "pairs"]
    src_keys: Int[Tensor, "pairs"]
    tgt_keys: Int[Tensor, "pairs"]

    def pool(
        self, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs hidden"]]:
        """Average the tokens of every sentence, marks excepted; one without tokens is zero."""
        n_pairs = len(self.weights)
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        sums = wide.new_zeros(2 * n_pairs + 1, wide.shape[1]).index_add(0, self.owners, wide)
        ones = torch.ones_like(self.owners, dtype=wide.dtype)
        counts = wide.new_zeros(2 * n_pairs + 1).index_add(0, self.owners, ones)
        means = sums / counts.clamp(min=1)[:, None]
        return means[:n_pairs], means[n_pairs : 2 * n_pairs]


@dataclass(frozen=True, slots=True)
class SentencePairCollator:
    """Builds batches; with a shape, of always the same number of pairs, some of weight 0."""

    marks: Marks
    shape: BatchShape | None

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> SentencePairBatch:
        """Build one batch of sources and targets."""
        src, tgt = arrays[:2]
        tokens, owners = lay_apart((src, tgt), self.marks, self.shape, own_marks=False)
        n_pairs = len(src.lengths)
        room = n_pairs if self.shape is None else max(n_pairs, self.shape.sequences // 2)
        shifted = owners + (room - n_pairs) * (owners >= n_pairs)  # targets begin after the room
        owners = np.where(owners == 2 * n_pairs, 2 * room, shifted)
        fill = (0, room - n_pairs)
        weights = np.pad(np.ones(n_pairs, dtype=np.float32), fill)
        keys = (np.pad(hash_sequences(side.ids, side.lengths), fill) for side in (src, tgt))
        arrays_of_pairs = (torch.from_numpy(column) for column in (weights, *keys))
        return SentencePairBatch(tokens, torch.from_numpy(owners), *arrays_of_pairs)


# Keys that are places differ from process to process by this.
PLACES = 1 << 40


class ContrastiveSettings(ObjectiveSettings):
    """What words and sentences have in common."""

    # The layer whose states are compared; by default the last.
    layer: int | None = None
    temperature: float = Field(0.1, gt=0)
    # "weak": the others of the other side; "strong": those of both sides.
    negatives: Literal["weak", "strong"] = "weak"
    # The width of the feature extractor's output; without one the states themselves are compared.
    features: int | None = Field(None, gt=0)
    # How many earlier pairs are negatives too.
    queue: int = Field(0, ge=0)
    # λ of λ · ‖θ − θ_pretrained‖², and where the pre-trained weights are held.
    parameter_weight: float = Field(0.0, ge=0)
    reference: Literal["device", "host"] = "device"


class WordContrastiveSettings(ContrastiveSettings):
    """Contrastive alignment of linked words as the recipe describes it."""

    kind: Literal["word_contrastive"] = "word_contrastive"
    words: Literal["first", "mean"] = "first"
    features: int | None = Field(128, gt=0)
    parameter_weight: float = Field(1.0, ge=0)
    # What is no negative: the same word of the same sentence, or any word of the same text.
    spare: Literal["place", "text"] = "place"


class SentenceContrastiveSettings(ContrastiveSettings):
    """Contrastive alignment of sentences as the recipe describes it."""

    kind: Literal["sentence_contrastive"] = "sentence_contrastive"
    temperature: float = Field(0.05, gt=0)


def contrast(
    similarity: Float[Tensor, "anchors candidates"],
    positives: Int[Tensor, "anchors"],
    allowed: Bool[Tensor, "anchors candidates"],
) -> Float[Tensor, "anchors"]:
    """Give −log(exp sim⁺ / (exp sim⁺ + Σ exp sim⁻)), the sum over the allowed candidates.

    The positive always counts, allowed or not. Paper: the printed equations lack the minus.

    >>> similarity, allowed = torch.zeros(1, 3), torch.tensor([[True, True, False]])
    >>> round(contrast(similarity, torch.tensor([0]), allowed).item(), 4)  # ln 2
    0.6931
    """
    places = positives[:, None]
    counted = allowed.scatter(1, places, True)
    totals = similarity.masked_fill(~counted, -torch.inf).logsumexp(dim=1)
    return totals - similarity.gather(1, places)[:, 0]


def info_nce(
    mine: Rows,
    everyone: Rows,
    first: int,
    weights: Float[Tensor, "pairs"],
    temperature: float,
    negatives: Literal["weak", "strong"],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Sum both directions' weighted losses, halved, of this process's pairs; and how many win.

    `everyone` are the pairs of all processes and of the queue, of which `mine` begin at `first`.
    Pairs that share a source or a target are no negatives of each other.
    """
    places = first + torch.arange(len(mine.src), device=mine.src.device)
    same = (mine.src_keys[:, None] == everyone.src_keys) | (
        mine.tgt_keys[:, None] == everyone.tgt_keys
    )
    allowed = everyone.real & ~same
    total, n_won = weights.new_zeros(()), weights.new_zeros(())
    for anchors, near, far in (
        (mine.src, everyone.tgt, everyone.src),
        (mine.tgt, everyone.src, everyone.tgt),
    ):
        rivals, may = near, allowed
        if negatives == "strong":  # the other side first: positives stay at their places
            rivals, may = torch.cat([near, far]), torch.cat([allowed, allowed], dim=1)
        similarity = anchors @ rivals.T / temperature
        total = total + (contrast(similarity, places, may) * weights).sum() / 2
        with torch.no_grad():
            beaten = (similarity >= similarity.gather(1, places[:, None])) & may
            n_won = n_won + (~beaten.any(dim=1) * weights).sum() / 2
    return total, n_won


class Contrastive(Objective):
    """What contrasting words and contrasting sentences share: features, negatives, the loss."""

    n_sides: ClassVar[int] = 2
    reads_apart: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False
    # Whether keys mean the same in later batches, so that they may wait in the queue.
    keys_last: bool = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.extractor: FeatureExtractor | None = None
        self.queue: NegativeQueue | None = None
        self.pretrained: PretrainedWeights | None = None

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>` of both sentences."""
        return 4

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Make the feature extractor and the queue, if they are asked for."""
        width = self.settings.features
        if width is not None:
            self.extractor = FeatureExtractor(hidden_size, width, generator)
        if self.settings.queue:
            self.queue = NegativeQueue(self.settings.queue, width or hidden_size)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Keep the weights to stay near to."""
        self._layer(encoder)  # an impossible one is told before anything is compiled
        if self.settings.parameter_weight > 0:
            self.pretrained = PretrainedWeights.of(encoder, self.settings.reference)

    def _layer(self, encoder: Encoder) -> int:
        asked = self.settings.layer
        return encoder.n_layers if asked is None else encoder.check_layer(asked)

    def _compare(
        self,
        encoder: Encoder,
        states: tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs hidden"]],
        keys: tuple[Int[Tensor, "pairs"], Int[Tensor, "pairs"]],
        weights: Float[Tensor, "pairs"],
    ) -> LossTerms:
        """Compute the loss of pairs of states among those of all processes and the queue."""
        src, tgt = (self._extract(side) for side in states)
        mine = Rows(src, tgt, keys[0], keys[1], weights > 0)
        everyone, all_weights, n_shares, first = mine, weights, 1, 0
        if self.training:  # validation reads the same batches in every process
            *gathered, all_weights = gather_rows(*mine[:4], weights)
            everyone, n_shares = Rows._make([*gathered, all_weights > 0]), n_processes()
            first = process_number() * (len(all_weights) // n_shares)
        rivals = everyone
        if self.queue is not None:
            rivals = Rows._make(map(torch.cat, zip(everyone, self.queue.rows(), strict=True)))
        settings = self.settings
        loss, n_won = info_nce(
            mine, rivals, first, weights, settings.temperature, settings.negatives
        )
        if self.queue is not None and self.training:
            self.queue.push(everyone if self.keys_last else everyone.without_keys())
        # DDP takes the mean over the processes; the loss is one mean over all their pairs.
        total_weight = all_weights.sum()
        scale = n_shares / torch.where(total_weight > 0, total_weight, 1.0)
        figures = {"contrast": loss * scale, "accuracy": n_won * scale}
        return self._stay_near(encoder, figures)

    def _stay_near(self, encoder: Encoder, figures: dict[str, Float[Tensor, ""]]) -> LossTerms:
        """Add the distance to the pre-trained weights."""
        loss = figures["contrast"]
        if self.pretrained is not None:
            figures["parameters"] = self.pretrained.distance(encoder)
            loss = loss + self.settings.parameter_weight * figures["parameters"]
        return LossTerms(loss, figures)

    def _extract(self, states: Float[Tensor, "pairs hidden"]) -> Float[Tensor, "pairs features"]:
        """Give features of unit length."""
        features = states if self.extractor is None else self.extractor(states)
        return F.normalize(features, dim=-1)


class WordContrastive(Contrastive):
    """Tell the word that a word is linked with from all other linked words of the batch."""

    needs_links: ClassVar[bool] = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.keys_last = settings.spare == "text"

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of linked words."""
        return WordPairCollator(marks, shape, self.settings.spare)

    def forward(self, encoder: Encoder, batch: WordPairBatch) -> LossTerms:
        """Encode the sentences apart and compare their linked words."""
        (states,) = encoder(batch.tokens, [self._layer(encoder)])
        linked = batch.linked_states(states, self.settings.words)
        shift = PLACES * process_number() if self.settings.spare == "place" else 0
        keys = (batch.src_keys + shift, batch.tgt_keys + shift)
        with torch.autocast(states.device.type, enabled=False):
            return self._compare(encoder, linked, keys, batch.weights)


class SentenceContrastive(Contrastive):
    """Tell a sentence's translation from all other sentences of the batch.

    Beyond the paper: what retrieval and mining need. Equal sentences are no negatives of each
    other, nor are their translations: the same English sentence may come with many languages.
    """

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Keep the weights to stay near to; the finished model is to be compared at this layer."""
        super().start(encoder, languages)
        choices = {"retrieval_layer": self._layer(encoder)}
        encoder.config.calque = encoder.settings | choices

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of sentence pairs."""
        return SentencePairCollator(marks, shape)

    def forward(self, encoder: Encoder, batch: SentencePairBatch) -> LossTerms:
        """Encode the sentences apart, average their tokens and compare them."""
        (states,) = encoder(batch.tokens, [self._layer(encoder)])
        keys = (batch.src_keys, batch.tgt_keys)
        with torch.autocast(states.device.type, enabled=False):
            return self._compare(encoder, batch.pool(states), keys, batch.weights)
