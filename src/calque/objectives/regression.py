"""The weights an encoder had before training: how far it has moved, and what it said then.

L2 alignment: linked words of two languages get the same states, and the encoder stays near.

Cao et al., 2020, and the regulariser that Wu and Dredze, 2020, put in the place of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from calque.errors import InputError
from calque.objectives.base import (
    Marks,
    Objective,
    ObjectiveSettings,
    n_processes,
    total_over_processes,
)
from calque.objectives.denoising_alignment import no_dropout
from calque.objectives.linked_words import WordPairBatch, WordPairCollator
from calque.objectives.self_labels import LEFT
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape
    from calque.types import TokenBatch


class PretrainedWeights:
    """A copy of every weight that is trained, on the device or in the host's memory.

    Frozen weights stay what they were, so there is no copy of them; shared ones are held once.
    This is no module: checkpoints do without it, since a run that goes on has the same start.
    """

    def __init__(self, weights: dict[str, Tensor], *, is_far: bool) -> None:
        self._weights, self._is_far = weights, is_far
        self._run: Callable[..., list[Tensor]] = run_with

    @classmethod
    def of(cls, encoder: Encoder, where: Literal["device", "host"]) -> Self:
        """Copy the weights an encoder has now."""
        trained = {name: p.detach() for name, p in encoder.named_parameters() if p.requires_grad}
        copy = _copy_to_host if where == "host" else torch.clone
        return cls({name: copy(p) for name, p in trained.items()}, is_far=where == "host")

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile `encode`; `distance` is compiled with the objective that asks for it."""
        self._run = torch.compile(run_with, *arguments, **options)

    def distance(self, encoder: Encoder) -> Float[Tensor, ""]:
        """Give Σ (θ − θ₀)² over the weights that are trained, in single precision at least.

        Paper: the release takes the root of the sum, whose gradient at θ₀ is NaN; this one's is 0.
        """
        trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        _refuse_shards(trained.values())
        pairs = [(weight, self._weights[name]) for name, weight in trained.items()]
        parts = square_from_afar(pairs) if self._is_far else [square(*pair) for pair in pairs]
        none = torch.zeros((), device=next(encoder.parameters()).device)
        return torch.stack([none, *parts]).sum()

    def encode(
        self, encoder: Encoder, batch: TokenBatch, layers: Sequence[int]
    ) -> list[Float[Tensor, "tokens hidden"]]:
        """Give the states that the encoder had before training: no gradient, no dropout.

        Weights held by the host are on the device while this runs, all of them.
        """
        _refuse_shards(encoder.parameters())
        device = batch.ids.device
        weights = {k: v.to(device, non_blocking=True) for k, v in self._weights.items()}
        with torch.no_grad(), no_dropout(encoder):
            return self._run(encoder, weights, batch, list(layers))


def run_with(
    encoder: Encoder, weights: dict[str, Tensor], batch: TokenBatch, layers: list[int]
) -> list[Float[Tensor, "tokens hidden"]]:
    """Run an encoder with other weights in the place of its own."""
    states: list[Tensor] = functional_call(encoder, weights, (batch, layers))
    return states


def square(weight: Tensor, held: Tensor) -> Float[Tensor, ""]:
    """Give Σ (w − h)², in single precision at least.

    >>> square(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])).item()
    5.0
    """
    return _subtract(weight, held).square().sum()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def square_from_afar(pairs: list[tuple[Tensor, Tensor]]) -> list[Float[Tensor, ""]]:
    """Give Σ (w − h)² of weights that lie apart, fetching one h at a time.

    This is not compiled: a graph might fetch them all first, and keep them for the gradient.
    """
    return [_SquaredDifference.apply(*pair) for pair in pairs]  # type: ignore[no-untyped-call]


class _SquaredDifference(torch.autograd.Function):
    """Σ (w − h)² that fetches h again for its gradient, instead of keeping the difference."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, held: Tensor) -> Tensor:
        ctx.save_for_backward(weight, held)
        return square(weight, held)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight, held = ctx.saved_tensors
        return (2 * gradient * _subtract(weight, held)).to(weight.dtype), None


def _subtract(weight: Tensor, held: Tensor) -> Tensor:
    """Subtract a held weight where the other one is."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype) - held.to(weight.device, non_blocking=True).to(dtype)


def _copy_to_host(weight: Tensor) -> Tensor:
    """Copy to page-locked memory where there is a GPU, which reads that without waiting."""
    copy = weight.to("cpu", copy=True)
    return copy.pin_memory() if weight.is_cuda else copy


def _refuse_shards(parameters: Iterable[Tensor]) -> None:
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise InputError(
            "weights that are spread over processes cannot be compared with pre-trained ones",
            fix="set engine.distributed=ddp",
        )


class L2Settings(ObjectiveSettings):
    """L2 alignment and its two regularisers as the recipe describes them."""

    kind: Literal["l2"] = "l2"
    # The layer whose states are brought together; by default the last.
    layer: int | None = None
    # A word is its first subword, or the mean of all.
    words: Literal["first", "mean"] = "first"
    # λ of λ · ‖θ − θ_pretrained‖² (the paper's Eq. 5).
    parameter_weight: float = Field(1.0, ge=0)
    # The weight of keeping the states of the source sentences (Eq. 4): a forward pass more.
    hidden_weight: float = Field(0.0, ge=0)
    # Where the pre-trained weights are held.
    reference: Literal["device", "host"] = "device"


@dataclass(frozen=True, slots=True)
class RegressionBatch:
    """Linked words, and the states that all tokens had before training, if they are wanted."""

    pairs: WordPairBatch
    before: Float[Tensor, "tokens hidden"] | None


def l2_loss(
    src: Float[Tensor, "rows hidden"],
    tgt: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
    total: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Give Σ w‖s − t‖² / Σ w, squares summed over the dimensions (Eq. 3); 0 if no row counts.

    `total` stands in for Σ w where the rows are but a part of those that the mean is over.

    >>> src, tgt = torch.tensor([[1.0, 2.0], [5.0, 5.0]]), torch.tensor([[0.0, 0.0], [5.0, 6.0]])
    >>> l2_loss(src, tgt, torch.tensor([1.0, 1.0])).item()  # the mean of 5 and 1
    3.0
    """
    total = weights.sum() if total is None else total
    summed = (weights * (src - tgt).square().sum(dim=-1)).sum()
    return summed / torch.where(total > 0, total, 1.0)


class Regression(Objective):
    """Bring linked words together without leaving what the encoder was."""

    n_sides: ClassVar[int] = 2
    reads_apart: ClassVar[bool] = True
    needs_links: ClassVar[bool] = True
    uses_all_weights: ClassVar[bool] = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.pretrained: PretrainedWeights | None = None

    def n_marks(self, marks: Marks) -> int:
        """Count `<s>` and `</s>` of both sentences."""
        return 4

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Batches of linked words."""
        return WordPairCollator(marks, shape)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Keep the weights to stay near to, one copy for both regularisers."""
        self._layer(encoder)  # an impossible one is told before anything is compiled
        if self.settings.parameter_weight > 0 or self.settings.hidden_weight > 0:
            self.pretrained = PretrainedWeights.of(encoder, self.settings.reference)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the losses, and apart from them the pass that has no dropout."""
        super().compile(*arguments, **options)
        if self.pretrained is not None:
            self.pretrained.compile(*arguments, **options)

    def prepare(self, encoder: Encoder, batch: WordPairBatch) -> RegressionBatch:
        """Find the states to stay near to, if that is asked for."""
        if self.settings.hidden_weight == 0:
            return RegressionBatch(batch, None)
        assert self.pretrained is not None, "start comes first"
        (before,) = self.pretrained.encode(encoder, batch.tokens, [self._layer(encoder)])
        return RegressionBatch(batch, before)

    def forward(self, encoder: Encoder, batch: RegressionBatch) -> LossTerms:
        """Encode the sentences apart and measure how far apart their linked words are."""
        settings, pairs = self.settings, batch.pairs
        (states,) = encoder(pairs.tokens, [self._layer(encoder)])
        linked = pairs.linked_states(states, settings.words)
        figures = {"l2": mean_over_processes(*linked, pairs.weights)}
        loss = figures["l2"]
        if batch.before is not None:
            # Paper: Eq. 4 prints the norm of the whole matrix, which grows with the batch; like the
            # release, this is the mean over the tokens of the sources, marks included.
            is_source = (pairs.sides == LEFT).to(pairs.weights.dtype)
            wide = states.to(pairs.weights.dtype), batch.before.to(pairs.weights.dtype)
            figures["hidden"] = mean_over_processes(*wide, is_source)
            loss = loss + settings.hidden_weight * figures["hidden"]
        if settings.parameter_weight > 0:
            assert self.pretrained is not None, "start comes first"
            figures["parameters"] = self.pretrained.distance(encoder)
            loss = loss + settings.parameter_weight * figures["parameters"]
        return LossTerms(loss, figures)

    def _layer(self, encoder: Encoder) -> int:
        asked = self.settings.layer
        return encoder.n_layers if asked is None else encoder.check_layer(asked)


def mean_over_processes(
    src: Float[Tensor, "rows hidden"],
    tgt: Float[Tensor, "rows hidden"],
    weights: Float[Tensor, "rows"],
) -> Float[Tensor, ""]:
    """Give this process's share of the mean over the rows of all, times their number.

    DDP takes the mean of these over the processes: that of all rows, however they are spread.
    """
    total = total_over_processes(weights.sum()) / n_processes()
    return l2_loss(src, tgt, weights, total)
