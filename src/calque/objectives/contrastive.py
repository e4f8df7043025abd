"""Contrastive alignment: translations are closer to each other than to anything else in the batch.

Wu and Dredze, 2020, weak and strong, on linked words; and the same loss on whole sentences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from calque.errors import InputError
from calque.models.heads import FeatureExtractor
from calque.objectives.base import (
    Objective,
    ObjectiveSettings,
    TensorBatch,
    choose_layer,
    gather_rows,
    n_processes,
    process_number,
)
from calque.objectives.distillation import Teacher
from calque.objectives.linked_words import WordPairBatch, WordPairCollator
from calque.objectives.regularization import ParameterNorm, PretrainedWeights
from calque.tokens.layout import pack_separately
from calque.tokens.ragged import hash_sequences
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape, Ragged
    from calque.types import TokenBatch


# A key that equals no other key: keys of words by place count from 0.
NO_KEY = -1
# Keys of words by place differ by this number between processes.
PROCESS_OFFSET = 1 << 40
# Cosines that differ by less are equal: rounding must not decide which of two equal words is
# better.
MAX_ROUNDING = 1e-6


class ContrastiveSettings(ObjectiveSettings):
    """Settings that words and sentences have in common."""

    # The layer whose states are compared. Default: the last.
    layer: int | None = None
    temperature: float = Field(0.1, gt=0)
    # "weak": negatives from the other language; "strong": from both languages.
    negatives: Literal["weak", "strong"] = "weak"
    # Output size of the feature extractor; None compares the states themselves.
    features: int | None = Field(None, gt=0)
    # Number of earlier pairs that are negatives too.
    queue: int = Field(0, ge=0)
    # λ in λ · ‖θ − θ_pretrained‖² (plain: λ · ‖θ − θ_pretrained‖, as in the authors' code), and
    # where the copy of the pretrained weights is stored.
    parameter_weight: float = Field(0.0, ge=0)
    parameter_norm: ParameterNorm = "squared"
    reference: Literal["device", "host"] = "device"

    newer_keys: ClassVar[tuple[str, ...]] = (*ObjectiveSettings.newer_keys, "parameter_norm")


class WordContrastiveSettings(ContrastiveSettings):
    """Settings of contrastive alignment of linked words in a recipe."""

    kind: Literal["word_contrastive"] = "word_contrastive"
    words: Literal["first", "mean"] = "first"
    features: int | None = Field(128, gt=0)
    parameter_weight: float = Field(1.0, ge=0)
    # Never negatives: the same word of the same sentence ("place"), or words with the same text.
    spare: Literal["place", "text"] = "place"


class SentenceContrastiveSettings(ContrastiveSettings):
    """Settings of contrastive alignment of sentences in a recipe."""

    kind: Literal["sentence_contrastive"] = "sentence_contrastive"
    temperature: float = Field(0.05, gt=0)
    # A model with the same vocabulary whose vectors of the first sentences are what both sentences
    # of a pair are compared with. They do not change, so that a long queue remains valid.
    teacher: str | None = None

    newer_keys: ClassVar[tuple[str, ...]] = (*ContrastiveSettings.newer_keys, "teacher")


class PairFeatures(NamedTuple):
    """Features of unit length of pairs, keys that identify words or sentences, and validity."""

    src: Float[Tensor, "pairs features"]
    tgt: Float[Tensor, "pairs features"]
    src_keys: Int[Tensor, "pairs"]
    tgt_keys: Int[Tensor, "pairs"]
    real: Bool[Tensor, "pairs"]

    def without_keys(self) -> PairFeatures:
        """Return the pairs with keys that equal no others."""
        no_keys = torch.full_like(self.src_keys, NO_KEY)
        return self._replace(src_keys=no_keys, tgt_keys=no_keys)


def contrastive_loss(
    similarity: Float[Tensor, "anchors candidates"],
    positives: Int[Tensor, "anchors"],
    allowed: Bool[Tensor, "anchors candidates"],
) -> Float[Tensor, "anchors"]:
    """Return −log(exp sim⁺ / (exp sim⁺ + Σ exp sim⁻)), the sum over the allowed candidates.

    Wu and Dredze, Eq. 7 and 8. Paper: the printed equations lack the minus sign.

    >>> similarity, allowed = torch.zeros(1, 3), torch.tensor([[True, True, False]])
    >>> round(contrastive_loss(similarity, torch.tensor([0]), allowed).item(), 4)  # ln 2
    0.6931
    """
    positives = positives[:, None]
    counted = allowed.scatter(1, positives, True)
    totals = similarity.masked_fill(~counted, -torch.inf).logsumexp(dim=1)
    return totals - similarity.gather(1, positives)[:, 0]


def info_nce(
    own: PairFeatures,
    candidates: PairFeatures,
    first: int,
    weights: Float[Tensor, "pairs"],
    temperature: float,
    negatives: Literal["weak", "strong"],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the weighted sum of the losses of both directions, halved, and of the accuracies.

    `candidates` are the pairs of all processes and of the queue; the pairs of this process, `own`,
    start at `first`. Pairs that share a source or a target are not negatives of each other.
    """
    positives = first + torch.arange(len(own.src), device=own.src.device)
    is_same = (own.src_keys[:, None] == candidates.src_keys) | (
        own.tgt_keys[:, None] == candidates.tgt_keys
    )
    allowed = candidates.real & ~is_same
    total, n_right = weights.new_zeros(()), weights.new_zeros(())
    for anchors, other_side, same_side in (
        (own.src, candidates.tgt, candidates.src),
        (own.tgt, candidates.src, candidates.tgt),
    ):
        others, may_be_negative = other_side, allowed
        if negatives == "strong":  # the other side first, so that positives keep their indices
            others = torch.cat([other_side, same_side])
            may_be_negative = torch.cat([allowed, allowed], dim=1)
        similarity = anchors @ others.T / temperature
        losses = contrastive_loss(similarity, positives, may_be_negative)
        total = total + (losses * weights).sum() / 2
        with torch.no_grad():
            least = similarity.gather(1, positives[:, None]) - MAX_ROUNDING / temperature
            is_better = similarity >= least
            is_right = ~(is_better & may_be_negative).any(dim=1)
            n_right = n_right + (is_right * weights).sum() / 2
    return total, n_right


class NegativeQueue(nn.Module):
    """The features of the last pairs, newest first, without gradients.

    Paper: Wu and Dredze (2020, section 4) leave a memory bank to future work. This is the queue of
    He et al. (2019) without a second encoder, so that its rows are a few steps old.
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

    def pairs(self) -> PairFeatures:
        """Return copies of the pairs: the buffers change before gradients are computed."""
        return PairFeatures(*(getattr(self, name).clone() for name in PairFeatures._fields))

    @torch.no_grad()
    def push(self, new: PairFeatures) -> None:
        """Add the real pairs; the oldest ones are dropped."""
        real = torch.cat([new.real, self.real])
        kept = torch.argsort(~real, stable=True)[: len(self.real)]
        for name in PairFeatures._fields:
            both = torch.cat([getattr(new, name), getattr(self, name)])
            getattr(self, name).copy_(both[kept])


class Contrastive(Objective):
    """Base class of contrastive objectives: features, negatives and the loss."""

    n_sides: ClassVar[int] = 2
    n_special_tokens: ClassVar[int] = 4  # <s> and </s> of both sentences
    encodes_separately: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False
    # Whether keys keep their meaning in later batches, so that the queue can store them.
    keys_last: bool = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.extractor: FeatureExtractor | None = None
        self.queue: NegativeQueue | None = None
        self.pretrained: PretrainedWeights | None = None

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Create the feature extractor and the queue, if they are used."""
        n_features = self.settings.features
        if n_features is not None:
            self.extractor = FeatureExtractor(hidden_size, n_features, generator)
        if self.settings.queue:
            self.queue = NegativeQueue(self.settings.queue, n_features or hidden_size)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Copy the initial weights if the regularizer is used."""
        self._layer(encoder)  # raises an error before anything is compiled
        if self.settings.parameter_weight > 0:
            self.pretrained = PretrainedWeights.of(encoder, self.settings.reference)

    def _layer(self, encoder: Encoder) -> int:
        return choose_layer(encoder, self.settings.layer)

    def _compare(
        self,
        encoder: Encoder,
        states: tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs hidden"]],
        keys: tuple[Int[Tensor, "pairs"], Int[Tensor, "pairs"]],
        weights: Float[Tensor, "pairs"],
        targets: Float[Tensor, "pairs features"] | None = None,
    ) -> LossTerms:
        """Return the loss of pairs of states among those of all processes and the queue.

        With targets, both sides are compared with these instead of with each other.
        """
        src, tgt = (self._extract(side) for side in states)
        own = PairFeatures(src, tgt, keys[0], keys[1], weights > 0)
        compared = own if targets is None else own._replace(src=targets, tgt=targets)
        gathered, all_weights, n_parts, first = compared, weights, 1, 0
        if self.training:  # validation reads the same batches in every process
            *columns, all_weights = gather_rows(*compared[:4], weights)
            gathered, n_parts = PairFeatures._make([*columns, all_weights > 0]), n_processes()
            first = process_number() * (len(all_weights) // n_parts)
        candidates = gathered
        if self.queue is not None:
            both = zip(gathered, self.queue.pairs(), strict=True)
            candidates = PairFeatures._make(map(torch.cat, both))
        settings = self.settings
        loss, n_right = info_nce(
            own, candidates, first, weights, settings.temperature, settings.negatives
        )
        if self.queue is not None and self.training:
            self.queue.push(gathered if self.keys_last else gathered.without_keys())
        # DDP averages over the processes; the loss is the mean over the pairs of all of them.
        total_weight = all_weights.sum()
        scale = n_parts / torch.where(total_weight > 0, total_weight, 1.0)
        metrics = {"contrast": loss * scale, "accuracy": n_right * scale}
        loss = metrics["contrast"]
        if self.pretrained is not None:
            metrics["parameters"] = self.pretrained.distance(encoder, settings.parameter_norm)
            loss = loss + settings.parameter_weight * metrics["parameters"]
        return LossTerms(loss, metrics)

    def _extract(self, states: Float[Tensor, "pairs hidden"]) -> Float[Tensor, "pairs features"]:
        """Return features of unit length."""
        features = states if self.extractor is None else self.extractor(states)
        return F.normalize(features, dim=-1)


class WordContrastive(Contrastive):
    """Distinguish the word that a word is linked with from all other linked words of the batch."""

    needs_links: ClassVar[bool] = True

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.keys_last = settings.spare == "text"

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of linked words."""
        return WordPairCollator(special_tokens, shape, self.settings.spare)

    def forward(self, encoder: Encoder, batch: WordPairBatch) -> LossTerms:
        """Return the loss of linked words in separately encoded sentences."""
        (states,) = encoder(batch.tokens, [self._layer(encoder)])
        linked = batch.linked_states(states, self.settings.words)
        offset = PROCESS_OFFSET * process_number() if self.settings.spare == "place" else 0
        keys = (batch.src_keys + offset, batch.tgt_keys + offset)
        with torch.autocast(states.device.type, enabled=False):
            return self._compare(encoder, linked, keys, batch.weights)


class SentenceContrastive(Contrastive):
    """Distinguish the translation of a sentence from all other sentences of the batch.

    This is not in the paper; retrieval and mining need it. Equal sentences and their translations
    are not negatives of each other: one English sentence may be paired with many languages.
    """

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._teacher: Teacher | None = None

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Store the layer as the model's retrieval layer, and load the teacher if there is one."""
        super().start(encoder, languages)
        encoder.config.calque = encoder.settings | {"retrieval_layer": self._layer(encoder)}
        name = self.settings.teacher
        if name is None:
            return
        self._teacher = Teacher.load(name, needs_head=False)
        teacher = self._teacher.encoder.to(next(encoder.parameters()).device)
        if teacher.tokenizer.get_vocab() != encoder.tokenizer.get_vocab():
            raise InputError(
                "the teacher of sentence_contrastive has another vocabulary than this model",
                file=name,
                fix="use the model that the training starts from",
            )
        if teacher.hidden_size != encoder.hidden_size or self.settings.features is not None:
            raise InputError(
                "the teacher's vectors do not have the size of those that are compared",
                file=name,
                fix="use a teacher with states of the same size, without `features`",
            )

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of sentence pairs."""
        return SentencePairCollator(special_tokens, shape)

    @torch.no_grad()
    def prepare(self, encoder: Encoder, batch: SentencePairBatch) -> SentencePairBatch:
        """Add the teacher's vectors of the first sentences."""
        if self._teacher is None:
            return batch
        teacher = self._teacher.encoder
        (states,) = teacher(batch.tokens, [self._layer(teacher)])
        return replace(batch, targets=F.normalize(batch.pool(states)[0], dim=-1))

    def forward(self, encoder: Encoder, batch: SentencePairBatch) -> LossTerms:
        """Return the loss of mean-pooled sentences."""
        (states,) = encoder(batch.tokens, [self._layer(encoder)])
        keys = (batch.src_keys, batch.tgt_keys)
        with torch.autocast(states.device.type, enabled=False):
            return self._compare(encoder, batch.pool(states), keys, batch.weights, batch.targets)


@dataclass(frozen=True, slots=True)
class SentencePairBatch(TensorBatch):
    """Sentence pairs, each sentence a sequence of its own.

    `owners` is the sentence of every token: the pair number for a source, plus the number of pairs
    for a target, and twice that number for special tokens and padding. A pair of weight 0 only
    fills the shape. Pairs with equal `src_keys` (`tgt_keys`) have equal sources (targets).
    `targets` are the teacher's vectors of the sources, if there is a teacher.
    """

    tokens: TokenBatch
    owners: Int[Tensor, "tokens"]
    weights: Float[Tensor, "pairs"]
    src_keys: Int[Tensor, "pairs"]
    tgt_keys: Int[Tensor, "pairs"]
    targets: Float[Tensor, "pairs hidden"] | None = None

    def pool(
        self, states: Float[Tensor, "tokens hidden"]
    ) -> tuple[Float[Tensor, "pairs hidden"], Float[Tensor, "pairs hidden"]]:
        """Return the mean of the tokens of every sentence without special tokens."""
        n_pairs = len(self.weights)
        wide = states.to(torch.promote_types(states.dtype, torch.float32))
        sums = wide.new_zeros(2 * n_pairs + 1, wide.shape[1]).index_add(0, self.owners, wide)
        ones = torch.ones_like(self.owners, dtype=wide.dtype)
        counts = wide.new_zeros(2 * n_pairs + 1).index_add(0, self.owners, ones)
        means = sums / counts.clamp(min=1)[:, None]
        return means[:n_pairs], means[n_pairs : 2 * n_pairs]


@dataclass(frozen=True, slots=True)
class SentencePairCollator:
    """Builds batches of sentence pairs; with a shape, the number of pairs is fixed."""

    special_tokens: SpecialTokens
    shape: BatchShape | None

    def __call__(self, arrays: tuple[Ragged, ...], generator: torch.Generator) -> SentencePairBatch:
        """Return one batch of sources and targets."""
        src, tgt = arrays[:2]
        tokens, owners = pack_separately(
            (src, tgt), self.special_tokens, self.shape, own_special_tokens=False
        )
        n_pairs = len(src.lengths)
        capacity = n_pairs if self.shape is None else max(n_pairs, self.shape.sequences // 2)
        n_fill = capacity - n_pairs
        shifted = owners + n_fill * (owners >= n_pairs)  # targets start at `capacity`
        owners = np.where(owners == 2 * n_pairs, 2 * capacity, shifted)
        weights = np.pad(np.ones(n_pairs, dtype=np.float32), (0, n_fill))
        keys = (np.pad(hash_sequences(side.ids, side.lengths), (0, n_fill)) for side in (src, tgt))
        columns = (torch.from_numpy(column) for column in (weights, *keys))
        return SentencePairBatch(tokens, torch.from_numpy(owners), *columns)
