"""Linear maps between two vector spaces: orthogonal, least squares, or whitened and re-weighted.

A map W takes rows t of one space to rows s of another: min Σ‖s − t W‖². It depends on the rows only
through sums of constant size (`PairSums`), however many pairs there are. Schönemann, 1966
(orthogonal Procrustes); Lample et al., 2018 (the orthogonalization step); Wu & Dredze, 2020 (maps
of encoder states).

Maps of word vectors follow VecMap (Artetxe et al., 2018a): normalize, whiten, rotate, re-weight,
de-whiten. VecMap changes both languages of a pair, so that English gets another basis in each pair.
Here all languages are solved around one pivot: for two languages the similarities are those of
VecMap, for more languages all share one space.
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


# x(a + bx² + cx⁴) moves singular values in (0, 1] to 0.7 … 1.2; small ones grow 3.4-fold per step
# (Jordan et al., 2024). Then x(3 − x²)/2 converges to 1 quadratically (Newton–Schulz).
GROWTH = (3.4445, -4.7750, 2.0315)
N_GROWTH_STEPS, N_NEWTON_STEPS = 16, 7
POLAR_TOLERANCE = 1e-9

NormalizationStep: TypeAlias = Literal["unit", "center"]
NORMALIZATION_STEPS: tuple[NormalizationStep, ...] = ("unit", "center", "unit")
BLOCK = 16_384
N_CHECKED_ROWS = 1000
PRECISION_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over weighted pairs (s, t), one set for each map of a stack.

    `cross` is Σ w tᵀs and `gram` Σ w tᵀt, if it is needed; `weights` is Σ w, `src_squares` is
    Σ w‖s‖² and `tgt_squares` is Σ w‖t‖². The sums are in double precision, because encoder states
    have directions 10⁴ times as strong as others: in single precision the weak ones would be lost
    in rounding. The product of two single-precision numbers is exact in double precision, so the
    solution is that of all pairs at once.
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
        """Return sums of no pairs; orthogonal maps need no `gram`, half of the memory and work."""

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
        index: tuple[int, ...],
        src: Float[Tensor, "rows hidden"],
        tgt: Float[Tensor, "rows hidden"],
        weights: Float[Tensor, "rows"] | None = None,
    ) -> None:
        """Add pairs of rows in place; a row of weight 2 counts as two rows."""
        s, t = src.to(self.cross), tgt.to(self.cross)
        w = s.new_ones(len(s)) if weights is None else weights.to(s)
        weighted = t * w[:, None]
        self.cross[index].addmm_(weighted.mT, s)
        if self.gram is not None:
            self.gram[index].addmm_(weighted.mT, t)
        self.weights[index] += w.sum()
        self.src_squares[index] += w @ s.square().sum(dim=1)
        self.tgt_squares[index] += w @ t.square().sum(dim=1)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all sums; added to those of another process they cover the pairs of both."""
        yield from (self.weights, self.src_squares, self.tgt_squares, self.cross)
        if self.gram is not None:
            yield self.gram

    def merge(self, other: PairSums) -> None:
        """Add the sums of other pairs in place."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine += theirs.to(mine.device)

    def select(self, index: int) -> PairSums:
        """Return a view of the sums at one index of the stack's first dimension."""
        return PairSums(
            self.weights[index],
            self.src_squares[index],
            self.tgt_squares[index],
            self.cross[index],
            None if self.gram is None else self.gram[index],
        )

    def residuals(
        self, maps: Float[Tensor, "*stack hidden hidden"] | None = None
    ) -> Float[Tensor, "*stack"]:
        """Return Σ w‖s − t W‖² / Σ w; without maps, W is the identity; without pairs, NaN.

        ‖S − T W‖² = ‖S‖² − 2 tr(Wᵀ TᵀS) + tr(Wᵀ TᵀT W). Without `gram` W must be orthogonal, and
        the last term is ‖T‖².
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
    """Return the orthogonal W that minimizes ‖S − T W‖²: with TᵀS = U Σ Vᵀ, W = U Vᵀ.

    Schönemann, 1966; Wu & Dredze, 2020, Eq. 1. If TᵀS is singular there are several solutions,
    and an SVD picks one at random; this returns the one nearest to the identity.

    >>> quarter = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> t = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    >>> torch.allclose(solve_procrustes(t.mT @ (t @ quarter)), quarter)
    True
    """
    u, strengths, v = torch.linalg.svd(cross)
    maps: Tensor = u @ v
    tiny = strengths[..., :1] * cross.shape[-1] * torch.finfo(cross.dtype).eps
    ranks = (strengths > tiny).sum(dim=-1)
    for index in map(tuple, (ranks < cross.shape[-1]).nonzero().tolist()):
        maps[index] = _complete(u[index], v[index], int(ranks[index]))
    return maps


def polar_factor(
    matrix: Float[Tensor, "hidden hidden"],
) -> Float[Tensor, "hidden hidden"] | None:
    """Return U Vᵀ of a matrix U S Vᵀ, or None if S has zeros or spans more than about 8 decades.

    It takes about sixty matrix products, which a GPU computes many times faster than an SVD
    (`benchmarks/mapping.py`); self-learning needs one per round.

    >>> polar_factor(torch.tensor([[0.0, 3.0], [2.0, 0.0]], dtype=torch.float64)).round().tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    >>> polar_factor(torch.zeros(2, 2, dtype=torch.float64)) is None
    True
    """
    X = matrix / torch.linalg.matrix_norm(matrix)
    a, b, c = GROWTH
    for _ in range(N_GROWTH_STEPS):
        G = X.mT @ X
        X = a * X + X @ (b * G + c * (G @ G))
    for _ in range(N_NEWTON_STEPS):
        X = 1.5 * X - 0.5 * X @ (X.mT @ X)
    unit = torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
    error = (X.mT @ X - unit).abs().amax()
    return X if bool(error < POLAR_TOLERANCE) else None


def solve_least_squares(
    gram: Float[Tensor, "*stack hidden hidden"],
    cross: Float[Tensor, "*stack hidden hidden"],
    cutoff: float | None = None,
) -> Float[Tensor, "*stack hidden hidden"]:
    """Return the W that minimizes ‖S − T W‖² among all matrices, (TᵀT)⁺ TᵀS (minimum norm).

    Directions weaker than `cutoff` times the strongest one are treated as rounding errors and
    mapped to zero. TᵀT holds their squares, so the smallest possible cutoff is about 10⁻⁷.

    >>> t = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64)  # second direction empty
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
    """Return W moved toward the nearest orthogonal matrix: (1 + β) W − β (W Wᵀ) W.

    Lample et al., 2018; Wu & Dredze, 2020, Eq. 2. A singular value σ becomes
    σ (1 + β − β σ²), which tends to 1, but above √((1 + β)/β) it changes its sign, and above
    √((2 + β)/β) it diverges: 10.0 and 14.2 for β = 0.01.
    Paper: has no guard. Here a matrix whose norm may exceed `step_limit` is first scaled down to
    it; below, the step is that of the paper to the last bit.

    >>> orthogonalize_step(torch.tensor([[0.5]]), 0.25).tolist()  # 0.5 · (1 + 0.25 − 0.25 · 0.25)
    [[0.59375]]
    """
    squares = maps @ maps.mT
    bound = torch.minimum(
        torch.linalg.matrix_norm(squares, torch.inf), torch.linalg.matrix_norm(squares)
    )
    # Both norms of W Wᵀ bound the square of the largest singular value from above.
    scale = (step_limit(beta) / bound.sqrt()).clamp(max=1.0)[..., None, None]
    return scale * ((1 + beta) * maps - beta * scale.square() * (squares @ maps))


def step_limit(beta: float) -> float:
    """Return √((1 + β)/3β), the largest singular value up to which a step preserves the order.

    >>> round(step_limit(0.01), 2)
    5.8
    """
    return math.sqrt((1 + beta) / (3 * beta))


def _complete(
    u: Float[Tensor, "hidden hidden"], v: Float[Tensor, "hidden hidden"], rank: int
) -> Float[Tensor, "hidden hidden"]:
    """Return the map given by the first `rank` directions that rotates the others the least."""
    a, _, b = torch.linalg.svd(u[:, rank:].mT @ v[rank:].mT)
    maps: Tensor = u[:, :rank] @ v[:rank] + u[:, rank:] @ (a @ b) @ v[rank:]
    return maps


@dataclass(frozen=True, slots=True)
class IndexPairs:
    """Row numbers of translations in two spaces; `tgt` is the pivot if there is one."""

    src: Int[Tensor, "pairs"]
    tgt: Int[Tensor, "pairs"]

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, slots=True)
class PairMoments:
    """Means over pairs of xᵀx, zᵀz and xᵀz, which determine the maps.

    `n_words` is the number of distinct words on the side that has fewer: the rank is at most that.
    Moments are in double precision and on the CPU, which decomposes matrices of this size faster
    than a GPU.
    """

    src: Float[Tensor, "hidden hidden"]
    tgt: Float[Tensor, "hidden hidden"]
    cross: Float[Tensor, "hidden hidden"]
    n_words: int


@dataclass(frozen=True, slots=True)
class JointMaps:
    """Maps of the pivot and of the other languages, in the order given, into one space."""

    pivot: Float[Tensor, "hidden hidden"]
    others: list[Float[Tensor, "hidden hidden"]]


def normalize_space(
    matrix: Float[Tensor, "words hidden"], steps: Sequence[NormalizationStep] = NORMALIZATION_STEPS
) -> tuple[Float[Tensor, "words hidden"], Float[Tensor, "hidden"]]:
    """Return normalized rows and the mean that was subtracted (Artetxe et al., 2018a, Step 0).

    By default rows are scaled to unit length, centered, and scaled again. Rows of zeros are
    unknown words: they stay zero and do not count.

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
    """Return the moments of a language's pairs with the pivot, computed block by block."""
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


def solve_rotation(
    src: Float[Tensor, "src hidden"], tgt: Float[Tensor, "tgt hidden"], pairs: IndexPairs
) -> Float[Tensor, "hidden hidden"]:
    """Return the orthogonal map of a dictionary's source words to its target words (Procrustes)."""
    cross = (src[pairs.src].mT @ tgt[pairs.tgt]).double()
    polar = None if cross.device.type == "cpu" else polar_factor(cross)
    return solve_procrustes(cross.cpu()).to(src.device) if polar is None else polar


def solve_joint_maps(moments: Sequence[PairMoments], reweight: float = 0.5) -> JointMaps:
    """Return maps of all languages into one space: whiten, rotate, re-weight, de-whiten.

    With x whitened by A, the pivot whitened by B, and Q the best rotation of x to the pivot,
    Qᵀ Aᵀ(xᵀz)B is symmetric and measures how well each direction agrees. R is its mean over the
    languages, to the power `reweight`. The map of a language is A Q R · Qᵀ A⁻¹ Q, that of the pivot
    B R B⁻¹; the last factors restore the variance. Artetxe et al., 2018a, Steps 1–4, up to a
    common rotation.
    """
    for each in moments:
        _check_rank(each)
    whiten, color = _whitening(_mean([each.tgt for each in moments]))
    own = [_whitening(each.src) for each in moments]
    crosses = [A.mT @ each.cross @ whiten for (A, _), each in zip(own, moments, strict=True)]
    rotations = [solve_procrustes(cross) for cross in crosses]
    agreement = _mean([Q.mT @ cross for Q, cross in zip(rotations, crosses, strict=True)])
    R = _power((agreement + agreement.mT) / 2, reweight)
    return JointMaps(
        whiten @ R @ color,
        [A @ Q @ R @ Q.mT @ undo @ Q for (A, undo), Q in zip(own, rotations, strict=True)],
    )


def apply_map(
    matrix: Float[Tensor, "words hidden"], W: Float[Tensor, "hidden hidden"]
) -> Float[Tensor, "words hidden"]:
    """Return rows @ W, computed in double precision if a sample shows that single is too coarse."""
    sample = matrix[:: max(1, len(matrix) // N_CHECKED_ROWS)]
    W = W.to(matrix.device)
    exact = sample.double() @ W.double()
    errors = torch.linalg.vector_norm(sample @ W.to(matrix.dtype) - exact, dim=1)
    if not exact.isfinite().all():
        raise InputError("the mapped vectors are not finite", fix="check the vectors for infinity")
    lengths = torch.linalg.vector_norm(exact, dim=1)
    dtype = matrix.dtype if bool((errors <= PRECISION_TOLERANCE * lengths).all()) else torch.float64
    mapped = torch.empty_like(matrix)
    for rows, out in zip(torch.split(matrix, BLOCK), torch.split(mapped, BLOCK), strict=True):
        out.copy_(rows.to(dtype) @ W.to(dtype))
    return mapped


def _whitening(
    moments: Float[Tensor, "hidden hidden"],
) -> tuple[Float[Tensor, "hidden hidden"], Float[Tensor, "hidden hidden"]]:
    """Return the symmetric matrix that turns second moments into the identity, and its inverse."""
    values, vectors = torch.linalg.eigh(moments)
    # Do not amplify directions without variance: words outside the pairs may be strong there.
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
            f"whitening {hidden} dimensions needs {hidden} or more different words, "
            f"but the dictionary has {moments.n_words:,}",
            fix="use a larger dictionary, self-learning, or an orthogonal map",
        )
