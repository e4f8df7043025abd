"""Distance to the pretrained weights, and the states that the encoder had before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import torch
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from calque.errors import InputError
from calque.objectives.base import evaluation_mode

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.types import TokenBatch


# λ · ‖θ − θ₀‖² as in the paper, or λ · ‖θ − θ₀‖ as in the authors' code.
ParameterNorm: TypeAlias = Literal["squared", "plain"]


class PretrainedWeights:
    """A copy of all weights that are trained, on the device or in host memory.

    Frozen weights do not change and are not copied; shared weights are copied once. This is not a
    module, so that checkpoints do not contain the copy: a resumed run starts from the same model.
    """

    def __init__(self, weights: dict[str, Tensor], *, on_host: bool) -> None:
        self._weights, self._on_host = weights, on_host
        self._run: Callable[..., list[Tensor]] = run_with

    @classmethod
    def of(cls, encoder: Encoder, where: Literal["device", "host"]) -> Self:
        """Copy the current weights of an encoder."""
        trained = {name: p.detach() for name, p in encoder.named_parameters() if p.requires_grad}
        copy = _copy_to_host if where == "host" else torch.clone
        return cls({name: copy(p) for name, p in trained.items()}, on_host=where == "host")

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile `encode`; `distance` is compiled with the objective that calls it."""
        self._run = torch.compile(run_with, *arguments, **options)

    def distance(self, encoder: Encoder, norm: ParameterNorm = "squared") -> Float[Tensor, ""]:
        """Return Σ (θ − θ₀)² over all trained weights, or its root, in single precision at least.

        Wu and Dredze, Eq. 5, is squared; the authors' code takes the root ("plain"). The gradient
        of the root has length 1 wherever θ is. Paper: at θ₀ that of the authors' code is NaN; here
        it is 0.
        """
        trained = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
        _check_not_sharded(trained.values())
        pairs = [(weight, self._weights[name]) for name, weight in trained.items()]
        if self._on_host:
            parts = squared_distances_on_host(pairs)
        else:
            parts = [squared_distance(*pair) for pair in pairs]
        zero = torch.zeros((), device=next(encoder.parameters()).device)
        squared = torch.stack([zero, *parts]).sum()
        if norm == "squared":
            return squared
        is_away = squared > 0
        return torch.where(is_away, torch.where(is_away, squared, 1.0).sqrt(), 0.0)

    def encode(
        self, encoder: Encoder, batch: TokenBatch, layers: Sequence[int]
    ) -> list[Float[Tensor, "tokens hidden"]]:
        """Return the states that the encoder had before training, without gradient and dropout.

        Weights in host memory are all copied to the device during this call.
        """
        _check_not_sharded(encoder.parameters())
        device = batch.ids.device
        weights = {k: v.to(device, non_blocking=True) for k, v in self._weights.items()}
        with torch.no_grad(), evaluation_mode(encoder):
            return self._run(encoder, weights, batch, list(layers))


def run_with(
    encoder: Encoder, weights: dict[str, Tensor], batch: TokenBatch, layers: list[int]
) -> list[Float[Tensor, "tokens hidden"]]:
    """Run an encoder with other weights instead of its own."""
    states: list[Tensor] = functional_call(encoder, weights, (batch, layers))
    return states


def squared_distance(weight: Tensor, reference: Tensor) -> Float[Tensor, ""]:
    """Return Σ (w − r)², in single precision at least.

    >>> squared_distance(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])).item()
    5.0
    """
    return _subtract(weight, reference).square().sum()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def squared_distances_on_host(pairs: list[tuple[Tensor, Tensor]]) -> list[Float[Tensor, ""]]:
    """Return Σ (w − r)² of pairs whose reference r is in host memory, copying one r at a time.

    This is not compiled: a graph might copy all references first and keep them for the gradient.
    """
    return [_SquaredDistance.apply(*pair) for pair in pairs]  # type: ignore[no-untyped-call]


class _SquaredDistance(torch.autograd.Function):
    """Σ (w − r)² that copies r again for the gradient instead of keeping the difference."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, reference: Tensor) -> Tensor:
        ctx.save_for_backward(weight, reference)
        return squared_distance(weight, reference)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weight, reference = ctx.saved_tensors
        return (2 * gradient * _subtract(weight, reference)).to(weight.dtype), None


def _subtract(weight: Tensor, reference: Tensor) -> Tensor:
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype) - reference.to(weight.device, non_blocking=True).to(dtype)


def _copy_to_host(weight: Tensor) -> Tensor:
    """Copy to host memory, page-locked if the weight is on a GPU, for asynchronous copies."""
    copy = weight.to("cpu", copy=True)
    return copy.pin_memory() if weight.is_cuda else copy


def _check_not_sharded(parameters: Iterable[Tensor]) -> None:
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise InputError(
            "weights that are sharded over processes cannot be compared with pretrained ones",
            fix="set engine.distributed=ddp",
        )
