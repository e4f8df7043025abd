"""The weights an encoder had before training: how far it has moved, and what it said then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from calque.objectives.denoising_alignment import no_dropout
from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
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
