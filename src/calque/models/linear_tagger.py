"""A linear classifier of states: multinomial logistic regression, solved, not trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

PENALTY = 0.01
MAX_ITERATIONS = 50
# Curvature pairs that L-BFGS keeps.
HISTORY = 10


@dataclass(frozen=True, slots=True)
class LinearTagger:
    """Predicts the class of the highest wᵀ(h − mean)/deviation + b."""

    weight: Float[Tensor, "hidden classes"]
    bias: Float[Tensor, "classes"]

    def predict(self, states: Float[Tensor, "words hidden"]) -> Int[Tensor, "words"]:
        """Give every state its most probable class."""
        with torch.autocast(states.device.type, enabled=False):
            return (states.float() @ self.weight + self.bias).argmax(dim=1)


@torch.no_grad()
def fit_tagger(
    states: Float[Tensor, "words hidden"],
    labels: Int[Tensor, "words"],
    n_classes: int,
    *,
    penalty: float = PENALTY,
    max_iterations: int = MAX_ITERATIONS,
) -> LinearTagger:
    """Minimize the mean cross-entropy + penalty/2 · ‖W‖² over standardized states, from zero.

    The problem is convex and nothing is drawn: the same states give the same tagger. With n words,
    scikit-learn's C is 1/(n · penalty). Features that hardly vary are left as they are.
    """
    with torch.autocast(states.device.type, enabled=False):
        states = states.float()
        mean, deviation = states.mean(dim=0), states.std(dim=0, correction=0)
        deviation = torch.where(deviation > 1e-6, deviation, 1.0)
        weight, bias = _solve(
            (states - mean) / deviation, labels, n_classes, penalty, max_iterations
        )
        scaled = weight / deviation[:, None]
        return LinearTagger(scaled, bias - mean @ scaled)


def _solve(
    inputs: Float[Tensor, "words hidden"],
    labels: Int[Tensor, "words"],
    n_classes: int,
    penalty: float,
    max_iterations: int,
) -> tuple[Float[Tensor, "hidden classes"], Float[Tensor, "classes"]]:
    weight = inputs.new_zeros(inputs.shape[1], n_classes).requires_grad_()
    bias = inputs.new_zeros(n_classes).requires_grad_()
    solver = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iterations,
        history_size=HISTORY,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def measure() -> Tensor:
        with torch.enable_grad():
            solver.zero_grad()
            loss = F.cross_entropy(inputs @ weight + bias, labels)
            loss = loss + penalty / 2 * weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(measure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()
