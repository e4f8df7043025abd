"""The nearest orthogonal matrix by products of matrices alone, which is what a GPU does fast.

The singular vectors of 300 × 300 numbers take a GPU or a CPU some ten milliseconds, and learning by
rounds wants them hundreds of times; sixty products take a GPU about three.

Linear maps between two spaces from sums over pairs: orthogonal, least squares, or step by step.

A map W takes rows t of one space to rows s of another, min Σ‖s − t W‖². All it needs of the rows
are sums of constant size (`PairSums`), however many pairs there are. Schönemann, 1966 (orthogonal
Procrustes); Lample et al., 2018 (the orthogonal step); Wu and Dredze, 2020, for states of encoders.

Linear maps of word spaces into one: normalize, whiten, turn, re-weight, de-whiten, apply.

The steps are VecMap's (Artetxe et al., 2018). It changes both languages of a pair, so that pairs
with English give it another basis each time. Here all languages are solved around a pivot, whose
map is one: for two languages the similarities are VecMap's, for more they share one space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self, TypeAlias

import torch

from calque.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float, Int
    from torch import Tensor


# x(a + bx² + cx⁴) takes singular values of 0 to 1 to 0.7 to 1.2, the small ones 3.4 times as large
# (Jordan et al., 2024); then x(3 − x²)/2 takes them to 1, faster and faster (Newton and Schulz).
GROWTH = (3.4445, -4.7750, 2.0315)
N_GROWING, N_CONVERGING = 16, 7
TOLERANCE = 1e-9


def polar_factor(
    matrix: Float[Tensor, "hidden hidden"],
) -> Float[Tensor, "hidden hidden"] | None:
    """Give U Vᵀ for U S Vᵀ, or None where it is not found: some S are 0 or 10⁸ times another.

    >>> find_polar(torch.tensor([[0.0, 3.0], [2.0, 0.0]], dtype=torch.float64)).round().tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    >>> find_polar(torch.zeros(2, 2, dtype=torch.float64)) is None
    True
    """
    X = matrix / torch.linalg.matrix_norm(matrix)
    a, b, c = GROWTH
    for _ in range(N_GROWING):
        G = X.mT @ X
        X = a * X + X @ (b * G + c * (G @ G))
    for _ in range(N_CONVERGING):
        X = 1.5 * X - 0.5 * X @ (X.mT @ X)
    unit = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
    wrong = (X.mT @ X - unit).abs().amax()
    return X if bool(wrong < TOLERANCE) else None


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over weighted pairs (s, t), one set of them for every place of a stack of maps.

    `cross` is Σ w tᵀs and `gram` Σ w tᵀt, if it is kept; `weights` are Σ w, and `src_squares` and
    `tgt_squares` Σ w‖s‖² and Σ w‖t‖². In double precision a product of two single-precision
    numbers is exact, and sums of a billion of them are good to ten digits: what is solved from
    them is the solution for the whole text at once. States of encoders need that: some directions
    are 10⁴ times as strong as others, and single precision would leave the weak ones to rounding.
    """

    weights: Float[Tensor, "*stack"]
    src_squares: Float[Tensor, "*stack"]
    tgt_squares: Float[Tensor, "*stack"]
    cross: Float[Tensor, "*stack hidden hidden"]
    gram: Float[Tensor, "*stack hidden hidden"] | None

    @classmethod
    def zeros(
        cls,
        stack: tuple[int, ...],
        hidden: int,
        *,
        gram: bool = True,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Begin with no pairs; without `gram`, half the memory and half the work.

        An orthogonal map does not need it, neither to be found nor to be judged.
        """

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, device=device)

        square = (*stack, hidden, hidden)
        return cls(
            weights=zeros(*stack),
            src_squares=zeros(*stack),
            tgt_squares=zeros(*stack),
            cross=zeros(*square),
            gram=zeros(*square) if gram else None,
        )

    def add(
        self,
        place: tuple[int, ...],
        src: Float[Tensor, "rows hidden"],
        tgt: Float[Tensor, "rows hidden"],
        weights: Float[Tensor, "rows"] | None = None,
    ) -> None:
        """Count pairs of rows in, in place; a row of weight 2 is as good as two rows."""
        s, t = src.to(self.cross), tgt.to(self.cross)
        w = s.new_ones(len(s)) if weights is None else weights.to(s)
        weighted = t * w[:, None]
        self.cross[place].addmm_(weighted.mT, s)
        if self.gram is not None:
            self.gram[place].addmm_(weighted.mT, t)
        self.weights[place] += w.sum()
        self.src_squares[place] += w @ s.square().sum(dim=1)
        self.tgt_squares[place] += w @ t.square().sum(dim=1)

    def tensors(self) -> Iterator[Tensor]:
        """Give all sums: added to those of another process, they are of the pairs of both."""
        yield from (self.weights, self.src_squares, self.tgt_squares, self.cross)
        if self.gram is not None:
            yield self.gram

    def merge(self, other: PairSums) -> None:
        """Count in what another has counted."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine += theirs.to(mine.device)

    def select(self, place: int) -> PairSums:
        """Give the sums at one place of the stack's first dimension, not copied."""
        return PairSums(
            self.weights[place],
            self.src_squares[place],
            self.tgt_squares[place],
            self.cross[place],
            None if self.gram is None else self.gram[place],
        )

    def residuals(
        self, maps: Float[Tensor, "*stack hidden hidden"] | None = None
    ) -> Float[Tensor, "*stack"]:
        """Give Σ w‖s − t W‖² / Σ w from the sums alone; without maps, W is the identity.

        ‖S − T W‖² = ‖S‖² − 2 tr(Wᵀ TᵀS) + tr(Wᵀ TᵀT W); an orthogonal W, the only kind there is
        without `gram`, leaves ‖T‖² of the last term. Where there are no pairs it is NaN.
        """
        if maps is None:
            inner, images = self.cross.diagonal(dim1=-2, dim2=-1).sum(dim=-1), self.tgt_squares
        else:
            wide = maps.to(self.cross)
            inner, images = (wide * self.cross).sum(dim=(-2, -1)), self.tgt_squares
            if self.gram is not None:
                images = (wide * (self.gram @ wide)).sum(dim=(-2, -1))
        total = self.src_squares - 2 * inner + images
        return total.clamp(min=0) / torch.where(self.weights > 0, self.weights, math.nan)


def solve_procrustes(
    cross: Float[Tensor, "*stack hidden hidden"],
) -> Float[Tensor, "*stack hidden hidden"]:
    """Find the orthogonal W of min ‖S − T W‖² by TᵀS = U Σ Vᵀ: W = U Vᵀ.

    Directions that no pair speaks of are free, and what a decomposition gives there is chance:
    of all solutions this is the one nearest to the identity.

    >>> quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> t = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    >>> torch.allclose(solve_procrustes(t.mT @ (t @ quarter)), quarter)
    True
    """
    u, strengths, v = torch.linalg.svd(cross)
    maps: Tensor = u @ v
    tiny = strengths[..., :1] * cross.shape[-1] * torch.finfo(cross.dtype).eps
    ranks = (strengths > tiny).sum(dim=-1)
    for place in (ranks < cross.shape[-1]).nonzero().tolist():
        index = tuple(place)
        maps[index] = _complete(u[index], v[index], int(ranks[index]))
    return maps


def solve_least_squares(
    gram: Float[Tensor, "*stack hidden hidden"],
    cross: Float[Tensor, "*stack hidden hidden"],
    cutoff: float | None = None,
) -> Float[Tensor, "*stack hidden hidden"]:
    """Find the W of min ‖S − T W‖² among all matrices: (TᵀT)⁺ TᵀS, the smallest if several fit.

    What varies less than `cutoff` times the strongest direction is taken for rounding and mapped
    to nothing. TᵀT has the squares of that, so that the least there can be is about 10⁻⁷.

    >>> t = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)  # nothing of the second
    >>> solve_least_squares(t.mT @ t, t.mT @ (3 * t)).tolist()
    [[3.0, 0.0], [0.0, 0.0]]
    """
    values, vectors = torch.linalg.eigh(gram)
    least = gram.shape[-1] * torch.finfo(gram.dtype).eps
    tiny = values[..., -1:] * (least if cutoff is None else max(least, cutoff**2))
    inverse = torch.where(values > tiny, 1 / values, 0.0)
    maps: Tensor = vectors @ (inverse[..., None] * (vectors.mT @ cross))
    return maps


def orthogonalize_step(
    maps: Float[Tensor, "*stack hidden hidden"], beta: float
) -> Float[Tensor, "*stack hidden hidden"]:
    """Go a step towards the nearest orthogonal matrix: W ← (1 + β) W − β (W Wᵀ) W.

    A singular value σ becomes σ (1 + β − β σ²), which tends to 1. Past √((1 + β)/β) it changes its
    sign, past √((2 + β)/β) it grows without end: 10.0 and 14.2 for β = 0.01. So a matrix that may
    have one past `step_limit`, by the row sums or the norm of W Wᵀ, is first scaled down to it.
    Below, the step is the paper's to the last bit.

    >>> orthogonalize_step(torch.tensor([[0.5]]), 0.25).tolist()  # 0.5 · (1 + 0.25 − 0.25 · 0.25)
    [[0.59375]]
    """
    squares = maps @ maps.mT
    bound = torch.minimum(
        torch.linalg.matrix_norm(squares, torch.inf), torch.linalg.matrix_norm(squares)
    )
    # Both norms of W Wᵀ are at least the square of the largest singular value.
    scale = (step_limit(beta) / bound.sqrt()).clamp(max=1.0)[..., None, None]
    return scale * ((1 + beta) * maps - beta * scale.square() * (squares @ maps))


def step_limit(beta: float) -> float:
    """Give the singular value up to which a larger one stays larger after a step: √((1 + β)/3β).

    >>> round(step_limit(0.01), 2)
    5.8
    """
    return math.sqrt((1 + beta) / (3 * beta))


def _complete(
    u: Float[Tensor, "hidden hidden"], v: Float[Tensor, "hidden hidden"], rank: int
) -> Float[Tensor, "hidden hidden"]:
    """Keep what the first `rank` directions say; turn the others as little as possible."""
    a, _, b = torch.linalg.svd(u[:, rank:].mT @ v[rank:].mT)
    maps: Tensor = u[:, :rank] @ v[:rank] + u[:, rank:] @ (a @ b) @ v[rank:]
    return maps


NormalizationStep: TypeAlias = Literal["unit", "center"]
NORMALIZATION_STEPS: tuple[NormalizationStep, ...] = ("unit", "center", "unit")
BLOCK = 16_384
N_CHECKED = 1000
TOLERANCE_MAPPING = 1e-4


@dataclass(frozen=True, slots=True)
class IndexPairs:
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
    matrix: Float[Tensor, "words hidden"], steps: Sequence[NormalizationStep] = NORMALIZATION_STEPS
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
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], pairs: IndexPairs
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


def solve_rotation(
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], pairs: IndexPairs
) -> Float[Tensor, "hidden hidden"]:
    """Find the same from the pairs themselves, summed in their precision: for round after round."""
    cross = (src[pairs.src].mT @ tgt[pairs.tgt]).double()
    polar = None if cross.device.type == "cpu" else polar_factor(cross)
    return solve_procrustes(cross.cpu()).to(src.device) if polar is None else polar


def solve_joint_maps(moments: Sequence[PairMoments], reweight: float = 0.5) -> JointMaps:
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
    dtype = matrix.dtype if bool((wrong <= TOLERANCE_MAPPING * lengths).all()) else torch.float64
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
