"""Linear maps of word spaces into one: normalize, whiten, turn, re-weight, de-whiten, apply.

The steps are VecMap's (Artetxe et al., 2018). It changes both languages of a pair, so that pairs
with English give it another basis each time. Here all languages are solved around a pivot, whose
map is one: for two languages the similarities are VecMap's, for more they share one space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from calque.align.polar import find_polar
from calque.align.procrustes import solve_procrustes
from calque.types import InputError

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

Step: TypeAlias = Literal["unit", "center"]
STEPS: tuple[Step, ...] = ("unit", "center", "unit")
BLOCK = 16_384
N_CHECKED = 1000
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Pairs:
    """Rows of two spaces that mean the same; `tgt` are rows of the pivot where there is one."""

    src: Int[Tensor, "pairs"]
    tgt: Int[Tensor, "pairs"]

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class PairMoments:
    """Means over pairs of xᵀx, zᵀz and xᵀz, all that the maps depend on.

    `n_words` are the distinct words of the side that has fewer: as many directions can be known.
    Moments are in double precision and in the memory of the CPU, which decomposes matrices of this
    size faster than a GPU.
    """

    src: Float[Tensor, "hidden hidden"]
    tgt: Float[Tensor, "hidden hidden"]
    cross: Float[Tensor, "hidden hidden"]
    n_words: int


@dataclass(frozen=True, slots=True)
class JointMaps:
    """The maps of a pivot and of other languages, in the order they were given, into one space."""

    pivot: Float[Tensor, "hidden hidden"]
    others: list[Float[Tensor, "hidden hidden"]]


def normalize_space(
    matrix: Float[Tensor, "words hidden"], steps: Sequence[Step] = STEPS
) -> tuple[Float[Tensor, "words hidden"], Float[Tensor, "hidden"]]:
    """Scale rows to length one and subtract their mean, step by step; give the mean as well.

    Rows of zeros, which say nothing, stay and do not count. The result is a copy, made in place.

    >>> normalize_space(torch.tensor([[0.0, 2.0], [3.0, 0.0]]))[1].tolist()
    [0.5, 0.5]
    """
    matrix = matrix.clone()
    known = matrix.any(dim=1)
    total = torch.zeros(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for step in steps:
        if step == "unit":
            lengths = torch.linalg.vector_norm(matrix, dim=1)
            matrix /= torch.where(lengths > 0, lengths, 1.0)[:, None]
        else:
            sums = [rows.double().sum(dim=0) for rows in torch.split(matrix, BLOCK)]
            mean = torch.stack(sums).sum(dim=0) / known.sum().clamp(min=1)
            total += mean
            matrix -= mean.to(matrix.dtype)
            matrix *= known[:, None]
    return matrix, total.to(matrix.dtype)


def collect_moments(
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], pairs: Pairs
) -> PairMoments:
    """Sum up a language's pairs with the pivot, block by block."""
    hidden = src.shape[1]
    sums = torch.zeros(3, hidden, hidden, dtype=torch.float64, device=src.device)
    for i, j in zip(torch.split(pairs.src, BLOCK), torch.split(pairs.tgt, BLOCK), strict=True):
        x, z = src[i].double(), tgt[j].double()
        for total, a, b in zip(sums, (x, z, x), (x, z, z), strict=True):
            total.addmm_(a.mT, b)
    sums /= max(1, len(pairs))
    own, others, cross = sums.cpu()
    n_words = min(len(torch.unique(rows)) for rows in (pairs.src, pairs.tgt))
    return PairMoments(own, others, cross, n_words)


def solve_orthogonal(moments: PairMoments) -> Float[Tensor, "hidden hidden"]:
    """Find the orthogonal map of a language to the pivot, which stays as it is (Procrustes)."""
    return solve_procrustes(moments.cross)


def solve_turn(
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], pairs: Pairs
) -> Float[Tensor, "hidden hidden"]:
    """Find the same from the pairs themselves, summed in their precision: for round after round."""
    cross = (src[pairs.src].mT @ tgt[pairs.tgt]).double()
    polar = None if cross.device.type == "cpu" else find_polar(cross)
    return solve_procrustes(cross.cpu()).to(src.device) if polar is None else polar


def solve_joint(moments: Sequence[PairMoments], reweight: float = 0.5) -> JointMaps:
    """Find maps of all languages into one space: whiten, turn, re-weight, de-whiten.

    With x whitened by A, the pivot by B, and Q the best turn of x to the pivot, Qᵀ Aᵀ(xᵀz)B is
    symmetric: it says how well each direction agrees. Its mean over the languages, to the power
    `reweight`, is R. A language's map is A Q R · Qᵀ A⁻¹ Q, the pivot's B R B⁻¹: the last factors
    give a language its own variance back. Artetxe et al., 2018a, up to a turn of all of it.
    """
    for each in moments:
        _check_rank(each)
    whiten, color = _whitening(_mean([each.tgt for each in moments]))
    own = [_whitening(each.src) for each in moments]
    crosses = [A.mT @ each.cross @ whiten for (A, _), each in zip(own, moments, strict=True)]
    turns = [solve_procrustes(cross) for cross in crosses]
    agreement = _mean([Q.mT @ cross for Q, cross in zip(turns, crosses, strict=True)])
    R = _power((agreement + agreement.mT) / 2, reweight)
    return JointMaps(
        whiten @ R @ color,
        [A @ Q @ R @ Q.mT @ undo @ Q for (A, undo), Q in zip(own, turns, strict=True)],
    )


def apply_map(
    matrix: Float[Tensor, "words hidden"], W: Float[Tensor, "hidden hidden"]
) -> Float[Tensor, "words hidden"]:
    """Map rows in single precision, or in double where a sample shows that single is not enough."""
    sample = matrix[:: max(1, len(matrix) // N_CHECKED)]
    W = W.to(matrix.device)
    exact = sample.double() @ W.double()
    wrong = torch.linalg.vector_norm(sample @ W.to(matrix.dtype) - exact, dim=1)
    if not exact.isfinite().all():
        raise InputError("the map has no finite result", fix="look for infinite vectors")
    lengths = torch.linalg.vector_norm(exact, dim=1)
    dtype = matrix.dtype if bool((wrong <= TOLERANCE * lengths).all()) else torch.float64
    mapped = torch.empty_like(matrix)
    for rows, out in zip(torch.split(matrix, BLOCK), torch.split(mapped, BLOCK), strict=True):
        out.copy_(rows.to(dtype) @ W.to(dtype))
    return mapped


def _whitening(
    moments: Float[Tensor, "hidden hidden"],
) -> tuple[Float[Tensor, "hidden hidden"], Float[Tensor, "hidden hidden"]]:
    """Give the symmetric matrix that makes second moments the identity, and its inverse."""
    values, vectors = torch.linalg.eigh(moments)
    # A direction without variance says nothing: leave it small rather than blow it up, as words
    # that are in no pair may have much of it.
    floor = values[-1] * len(values) * torch.finfo(values.dtype).eps
    strongest = torch.where(values[-1] > 0, values[-1], 1.0)
    scales = torch.where(values > floor, values, strongest).sqrt()
    return (vectors / scales) @ vectors.mT, (vectors * scales) @ vectors.mT


def _power(matrix: Float[Tensor, "hidden hidden"], power: float) -> Float[Tensor, "hidden hidden"]:
    values, vectors = torch.linalg.eigh(matrix)
    powered: Tensor = (vectors * values.clamp(min=0) ** power) @ vectors.mT
    return powered


def _mean(matrices: Sequence[Float[Tensor, "hidden hidden"]]) -> Float[Tensor, "hidden hidden"]:
    return torch.stack(list(matrices)).mean(dim=0)


def _check_rank(moments: PairMoments) -> None:
    hidden = len(moments.src)
    if moments.n_words < hidden:
        raise InputError(
            f"pairs of {moments.n_words:,} words cannot whiten {hidden} dimensions",
            fix=f"give {hidden} or more, learn more from these few, or map orthogonally",
        )
