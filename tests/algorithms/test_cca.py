"""Deep CCA against scikit-learn, SciPy and closed forms, on degenerate input, and transforms."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.cca import (
    RIDGE,
    SimilarityTransform,
    canonical_correlations,
    deep_cca_loss,
    sum_singular_values,
    whitened_cross_covariance,
)
from calque.errors import InputError

seeds = st.integers(0, 1000)
widths = st.integers(1, 6)
NO_RIDGE = (0.0, 0.0)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def draw_views(n_rows: int, src_width: int, tgt_width: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two correlated views, far from the origin."""
    src = draw(n_rows, src_width, seed=seed)
    shared = src @ draw(src_width, tgt_width, seed=seed + 1)
    return src + 7, shared + draw(n_rows, tgt_width, seed=seed + 2) - 3


def correlate_as_printed(src: Tensor, tgt: Tensor, ridges: tuple[float, float]) -> Tensor:
    """T = Σ11^{-1/2} Σ12 Σ22^{-1/2} with NumPy's covariances and SciPy's roots of matrices."""
    both = np.cov(np.concatenate([src.numpy(), tgt.numpy()], axis=1), rowvar=False, ddof=1)
    width = src.shape[1]
    src_part = both[:width, :width] + ridges[0] * np.eye(width)
    tgt_part = both[width:, width:] + ridges[1] * np.eye(tgt.shape[1])
    roots = [scipy.linalg.inv(scipy.linalg.sqrtm(part)).real for part in (src_part, tgt_part)]
    return torch.from_numpy(roots[0] @ both[:width, width:] @ roots[1])


# Against others


def test_scikit_learn_finds_the_same_correlations() -> None:
    from sklearn.cross_decomposition import CCA

    src, tgt = draw_views(60, 5, 3)
    model = CCA(n_components=3, tol=1e-12, max_iter=10_000).fit(src.numpy(), tgt.numpy())
    scores = model.transform(src.numpy(), tgt.numpy())
    expected = [np.corrcoef(a, b)[0, 1] for a, b in zip(scores[0].T, scores[1].T, strict=True)]
    found = canonical_correlations(src, tgt, ridges=NO_RIDGE)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert deep_cca_loss(src, tgt, ridges=NO_RIDGE).item() == pytest.approx(-sum(expected))
    assert deep_cca_loss(src, tgt, ridges=NO_RIDGE, k=1).item() == pytest.approx(-expected[0])


def test_scipy_finds_the_same_angles() -> None:
    """Without a ridge, correlations are the cosines of the angles between centered columns."""
    src, tgt = draw_views(40, 4, 6, seed=5)
    angles = scipy.linalg.subspace_angles((src - src.mean(0)).numpy(), (tgt - tgt.mean(0)).numpy())
    found = canonical_correlations(src, tgt, ridges=NO_RIDGE)
    assert found.tolist() == pytest.approx(np.cos(angles)[::-1].tolist(), abs=1e-9)


@pytest.mark.parametrize("ridges", [(1e-3, 1e-3), (0.5, 2.0)])
@pytest.mark.parametrize("k", [None, 1, 3])
def test_the_printed_formula_gives_the_same(ridges: tuple[float, float], k: int | None) -> None:
    src, tgt = draw_views(30, 4, 5, seed=3)
    values = torch.linalg.svdvals(correlate_as_printed(src, tgt, ridges))
    torch.testing.assert_close(canonical_correlations(src, tgt, ridges=ridges), values)
    loss = deep_cca_loss(src, tgt, ridges=ridges, k=k)
    assert loss.item() == pytest.approx(-values[:k].sum().item(), rel=1e-10)


@pytest.mark.parametrize("k", [None, 2])
def test_the_gradient_is_that_of_the_paper(k: int | None) -> None:
    """∂corr/∂H1 = (2 ∇11 H̄1 + ∇12 H̄2) / (n − 1), ∇12 = Σ11^{-1/2} U Vᵀ Σ22^{-1/2} and so on."""
    src, tgt = draw_views(30, 4, 5, seed=8)
    ridges = (0.1, 0.2)
    u, d, v = torch.linalg.svd(correlate_as_printed(src, tgt, ridges), full_matrices=False)
    u, d, v = u[:, :k], d[:k], v[:k]
    covariances = [
        np.cov(view.numpy(), rowvar=False) + r * np.eye(view.shape[1])
        for view, r in zip((src, tgt), ridges, strict=True)
    ]
    a, b = (torch.from_numpy(scipy.linalg.inv(scipy.linalg.sqrtm(c)).real) for c in covariances)
    own, cross = -0.5 * a @ u @ d.diag() @ u.T @ a, a @ u @ v @ b
    x, y = src - src.mean(0), tgt - tgt.mean(0)
    expected = -(2 * x @ own + y @ cross.T) / (len(x) - 1)
    src.requires_grad_()
    (found,) = torch.autograd.grad(deep_cca_loss(src, tgt, ridges=ridges, k=k), src)
    torch.testing.assert_close(found, expected)


def test_one_feature_each_is_pearson_s_correlation() -> None:
    src, tgt = torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([2.0, 1.0, 0.0, -4.0])
    expected = abs(np.corrcoef(src.numpy(), tgt.numpy())[0, 1])
    loss = deep_cca_loss(src[:, None], tgt[:, None], ridges=NO_RIDGE)
    assert loss.item() == pytest.approx(-expected, rel=1e-6)
    # Var 35/12 and 83/12 of the two, with a ridge of 1 and 2 on them.
    ridged = deep_cca_loss(src[:, None], tgt[:, None], ridges=(1.0, 2.0))
    cov = np.cov(src.numpy(), tgt.numpy())
    assert cov[0, 0] == pytest.approx(35 / 12)
    expected = abs(cov[0, 1]) / math.sqrt((cov[0, 0] + 1) * (cov[1, 1] + 2))
    assert ridged.item() == pytest.approx(-expected, rel=1e-6)


@pytest.mark.parametrize("k", [None, 1, 2, 3])
def test_singular_values_are_torch_s(k: int | None) -> None:
    for shape in ((5, 3), (3, 5)):
        matrix = draw(*shape)
        expected = torch.linalg.svdvals(matrix)[:k].sum()
        torch.testing.assert_close(sum_singular_values(matrix, k), expected)


# Gradients


@settings(max_examples=20)
@given(seeds, widths, widths, st.booleans(), st.booleans())
def test_gradients_are_right(seed: int, a: int, b: int, relative: bool, few: bool) -> None:
    """Also where a batch has fewer rows than dimensions, and so correlations of zero."""
    n_rows = 3 if few else 14
    views = tuple(view.requires_grad_() for view in draw_views(n_rows, a, b, seed))
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0] * 5)[:n_rows].double()
    ridges = (0.3, 0.2)

    def loss(src: Tensor, tgt: Tensor) -> Tensor:
        return deep_cca_loss(src, tgt, weights, ridges=ridges, relative=relative)

    assert torch.autograd.gradcheck(loss, views)


@settings(max_examples=15)
@given(seeds, st.integers(1, 3))
def test_gradients_of_the_largest_are_right(seed: int, k: int) -> None:
    views = tuple(view.requires_grad_() for view in draw_views(12, 4, 3, seed))
    assert torch.autograd.gradcheck(lambda a, b: deep_cca_loss(a, b, k=k), views)


@settings(max_examples=30)
@given(seeds, st.integers(1, 5), st.integers(1, 5), st.integers(0, 4))
def test_the_gradient_is_a_subgradient_even_where_there_is_no_other(
    seed: int, rows: int, columns: int, rank: int
) -> None:
    """f(B) ≥ f(A) + ⟨G, B − A⟩ for any B, where A has zeros or equal ones among its values."""
    kept = min(rank, rows, columns)
    left, right = (torch.linalg.qr(draw(n, n, seed=seed + n))[0] for n in (rows, columns))
    matrix = (left[:, :kept] @ right[:kept]).requires_grad_()  # all values are 1, or 0
    for k in (None, 1):
        value = sum_singular_values(matrix, k)
        (gradient,) = torch.autograd.grad(value, matrix)
        assert value.item() == pytest.approx(min(kept, k or kept))
        for other in range(5):
            elsewhere = draw(rows, columns, seed=seed + 100 + other)
            reached = torch.linalg.svdvals(elsewhere)[:k].sum()
            assert reached >= value + (gradient * (elsewhere - matrix)).sum() - 1e-9


def test_equal_singular_values_have_the_gradient_u_v() -> None:
    matrix = torch.linalg.qr(draw(4, 4))[0].requires_grad_()
    (gradient,) = torch.autograd.grad(sum_singular_values(matrix), matrix)
    torch.testing.assert_close(gradient, matrix.detach())
    zero = torch.zeros(3, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(sum_singular_values(zero), zero)
    assert gradient.eq(0).all()


# What breaks others


def repeated_words(n_rows: int, width: int) -> Tensor:
    return draw(2, width)[torch.arange(n_rows) % 2]


def constant_features(n_rows: int, width: int) -> Tensor:
    rows = draw(n_rows, width)
    rows[:, : width // 2 + 1] = 0.1
    return rows


def some_zeros(n_rows: int, width: int) -> Tensor:
    return draw(n_rows, width) * (torch.arange(n_rows) > 2)[:, None]


def equal_features(n_rows: int, width: int) -> Tensor:
    return draw(n_rows, 1).expand(n_rows, width).clone()


def outlier_dimension(n_rows: int, width: int) -> Tensor:
    rows = draw(n_rows, width) * 1e-3
    rows[:, 0] = 1e4 + draw(n_rows)
    return rows


def orthogonal_views(n_rows: int, width: int) -> Tensor:
    """All features uncorrelated and of variance 1: equal singular values."""
    rows = torch.linalg.qr(draw(n_rows, width) - draw(n_rows, width).mean(0))[0]
    return math.sqrt(n_rows) * rows


DEGENERATE: dict[str, Callable[[int, int], Tensor]] = {
    "repeated words": repeated_words,
    "constant features": constant_features,
    "all constant": lambda n_rows, width: torch.full((n_rows, width), 0.1).double(),
    "zero vectors": lambda n_rows, width: torch.zeros(n_rows, width).double(),
    "some zero vectors": some_zeros,
    "one word": lambda n_rows, width: draw(1, width).expand(n_rows, width).clone(),
    "equal features": equal_features,
    "an outlier": outlier_dimension,
    "equal values": orthogonal_views,
    "huge": lambda n_rows, width: 1e12 * draw(n_rows, width),
    "tiny": lambda n_rows, width: 1e-12 * draw(n_rows, width),
    "ordinary": draw,
}
RIDGES = (((RIDGE, RIDGE), False), ((RIDGE, RIDGE), True), (NO_RIDGE, False))


@pytest.mark.parametrize("src_kind", DEGENERATE)
@pytest.mark.parametrize("tgt_kind", DEGENERATE)
def test_no_input_gives_nan(src_kind: str, tgt_kind: str) -> None:
    for n_rows, src_width, tgt_width in ((9, 4, 3), (5, 8, 6), (2, 3, 3)):
        views = DEGENERATE[src_kind](n_rows, src_width), DEGENERATE[tgt_kind](n_rows, tgt_width)
        for dtype in (torch.float32, torch.float64):
            for (ridges, relative), k in product(RIDGES, (None, 2)):
                check_finite(views, dtype, ridges, relative, k)


def check_finite(
    views: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    ridges: tuple[float, float],
    relative: bool,
    k: int | None,
) -> None:
    src, tgt = (view.to(dtype).requires_grad_() for view in views)
    loss = deep_cca_loss(src, tgt, ridges=ridges, relative=relative, k=k)
    most = k or min(src.shape[1], tgt.shape[1])
    assert loss.dtype == dtype
    assert -most - 1e-3 <= loss.item() <= 1e-6
    for gradient in torch.autograd.grad(loss, (src, tgt)):
        assert gradient.isfinite().all()


def test_a_view_is_fully_correlated_with_itself() -> None:
    src = draw(20, 4)
    assert deep_cca_loss(src, src, ridges=NO_RIDGE).item() == pytest.approx(-4)
    src[:, 3] = src[:, 0] - src[:, 1]
    assert deep_cca_loss(src, src, ridges=NO_RIDGE).item() == pytest.approx(-3, abs=1e-2)
    # Fewer rows than dimensions: whatever the rows, all that is left after centring fits.
    for few in (draw_views(4, 9, 8), (draw(4, 9), draw(4, 8, seed=9))):
        assert deep_cca_loss(*few, ridges=NO_RIDGE).item() == pytest.approx(-3, abs=1e-2)


def test_rows_of_weight_zero_do_not_count() -> None:
    src, tgt = draw_views(10, 3, 3)
    padded = [torch.cat([view, torch.zeros(4, 3, dtype=view.dtype)]) for view in (src, tgt)]
    weights = torch.tensor([1.0] * 10 + [0.0] * 4)
    torch.testing.assert_close(deep_cca_loss(*padded, weights), deep_cca_loss(src, tgt))
    twice = torch.cat([src, src[:4]]), torch.cat([tgt, tgt[:4]])
    weights = torch.tensor([2.0] * 4 + [1.0] * 6)
    torch.testing.assert_close(deep_cca_loss(src, tgt, weights), deep_cca_loss(*twice))


@pytest.mark.parametrize("n_real", [0, 1])
def test_too_few_rows_give_no_correlation(n_real: int) -> None:
    src = draw(3, 4).requires_grad_()
    weights = (torch.arange(3) < n_real).double()
    for ridges in (NO_RIDGE, (RIDGE, RIDGE)):
        loss = deep_cca_loss(src, draw(3, 2, seed=4), weights, ridges=ridges)
        (gradient,) = torch.autograd.grad(loss, src)
        assert loss.item() == 0
        assert gradient.eq(0).all()
    none = torch.zeros(0, 4, requires_grad=True)
    assert deep_cca_loss(none, torch.zeros(0, 2)).item() == 0


def test_a_nan_state_makes_the_loss_nan_without_an_error() -> None:
    src, tgt = draw_views(6, 3, 2)
    src[1, 1] = torch.nan
    assert deep_cca_loss(src, tgt).isnan()


@pytest.mark.parametrize("k", [0, 4])
def test_more_correlations_than_there_are(k: int) -> None:
    with pytest.raises(
        InputError, match=rf"k is {k}, but there are 3 correlations \(choose k from 1 to 3\)"
    ):
        deep_cca_loss(*draw_views(9, 3, 5), k=k)


# Properties


@settings(max_examples=40)
@given(seeds, widths, widths, st.integers(8, 20))
def test_correlations_lie_between_0_and_1_and_are_symmetric(
    seed: int, a: int, b: int, n_rows: int
) -> None:
    src, tgt = draw_views(n_rows, a, b, seed)
    found = canonical_correlations(src, tgt)
    assert len(found) == min(a, b)
    assert found.min() >= 0 and found.max() <= 1
    torch.testing.assert_close(found, canonical_correlations(tgt, src))
    order = torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(found, canonical_correlations(src[order], tgt[order]))


@settings(max_examples=40)
@given(seeds, widths, widths)
def test_rotation_and_translation_change_nothing(seed: int, a: int, b: int) -> None:
    src, tgt = draw_views(20, a, b, seed)
    rotation = torch.linalg.qr(draw(a, a, seed=seed + 3))[0]
    moved = src @ rotation + draw(a, seed=seed + 4)
    torch.testing.assert_close(deep_cca_loss(moved, tgt), deep_cca_loss(src, tgt))
    # Without a ridge any invertible map will do.
    mixed = src @ (draw(a, a, seed=seed + 5) + 4 * torch.eye(a))
    plain, mapped = (deep_cca_loss(view, tgt, ridges=NO_RIDGE) for view in (src, mixed))
    torch.testing.assert_close(mapped, plain, rtol=1e-6, atol=1e-6)


@settings(max_examples=40)
@given(seeds, st.floats(1e-6, 1e6))
def test_scale_counts_only_against_an_absolute_ridge(seed: int, scale: float) -> None:
    src, tgt = draw_views(20, 4, 3, seed)
    before = deep_cca_loss(src, tgt, relative=True)
    after = deep_cca_loss(scale * src, tgt, relative=True)
    torch.testing.assert_close(after, before, rtol=1e-7, atol=1e-7)
    grown, shrunk = (deep_cca_loss(view, tgt) for view in (2 * src, src))
    assert grown < shrunk


@settings(max_examples=30)
@given(seeds, st.floats(1e-4, 1.0), st.floats(1.5, 10.0))
def test_a_larger_ridge_leaves_less_correlation(seed: int, ridge: float, factor: float) -> None:
    src, tgt = draw_views(15, 4, 3, seed)
    less = deep_cca_loss(src, tgt, ridges=(factor * ridge, ridge))
    assert less > deep_cca_loss(src, tgt, ridges=(ridge, ridge))


def test_single_precision_is_computed_in_double() -> None:
    """Directions of very different strength: single precision alone would lose the weak ones."""
    src, tgt = draw_views(200, 6, 4, seed=2)
    strong = src * torch.logspace(4, -2, 6)
    expected = deep_cca_loss(strong, tgt, ridges=(1e-7, 1e-7))
    found = deep_cca_loss(strong.float(), tgt.float(), ridges=(1e-7, 1e-7))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), abs=1e-3)
    assert whitened_cross_covariance(strong.float(), tgt.float()).dtype == torch.float64
    assert deep_cca_loss(strong.bfloat16(), tgt.bfloat16()).dtype == torch.float32


# Similarity transforms.


@settings(max_examples=30)
@given(seeds, st.integers(1, 5), st.integers(0, 3), st.floats(0.01, 100.0))
def test_a_known_transform_is_found(seed: int, width: int, more: int, scale: float) -> None:
    """Also into a space of more dimensions."""
    src = draw(20, width, seed=seed)
    frame = torch.linalg.qr(draw(width + more, width + more, seed=seed + 1))[0][:width]
    tgt = scale * src @ frame + draw(width + more, seed=seed + 2)
    torch.testing.assert_close(SimilarityTransform.of(src, tgt).apply(src), tgt)


def test_the_rotation_agrees_with_scipy() -> None:
    src, tgt = draw(30, 4), draw(30, 4, seed=1) + 2
    x, y = (rows - rows.mean(0) for rows in (src, tgt))
    rotation, _ = scipy.linalg.orthogonal_procrustes(x.numpy(), y.numpy())
    found = SimilarityTransform.of(src, tgt)
    scale = y.norm() / x.norm()
    np.testing.assert_allclose(found.matrix.numpy(), scale.item() * rotation, atol=1e-10)
    moved = found.apply(src)
    torch.testing.assert_close(moved.mean(0), tgt.mean(0))
    assert moved.var(0).sum().item() == pytest.approx(tgt.var(0).sum().item())


@settings(max_examples=30)
@given(seeds, st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_means_and_variances_agree(seed: int, src_width: int, tgt_width: int, n_rows: int) -> None:
    src, tgt = draw(n_rows, src_width, seed=seed), draw(n_rows, tgt_width, seed=seed + 1)
    moved = SimilarityTransform.of(src, tgt).apply(src)
    torch.testing.assert_close(moved.mean(0), tgt.mean(0))
    centered = (moved - moved.mean(0)).norm().item(), (tgt - tgt.mean(0)).norm().item()
    assert centered[0] == pytest.approx(centered[1], abs=1e-9)


@settings(max_examples=30)
@given(seeds, st.integers(1, 5), st.integers(0, 3), st.integers(2, 12))
def test_no_other_rotation_is_closer(seed: int, width: int, more: int, n_rows: int) -> None:
    """Among all that give the same mean and the same variance."""
    src, tgt = draw(n_rows, width, seed=seed), draw(n_rows, width + more, seed=seed + 1)
    found = SimilarityTransform.of(src, tgt)
    distance = (found.apply(src) - tgt).norm()
    scale = torch.linalg.matrix_norm(found.matrix, 2)
    for number in range(3):
        frame = torch.linalg.qr(draw(width + more, width + more, seed=seed + 2 + number))[0][:width]
        other = SimilarityTransform(found.center, scale * frame, found.shift)
        assert distance <= (other.apply(src) - tgt).norm() + 1e-9


def test_equal_rows_are_mapped_to_the_mean() -> None:
    src, tgt = torch.ones(5, 3), draw(5, 2).float()
    moved = SimilarityTransform.of(src, tgt).apply(src)
    assert moved.dtype == torch.float32
    torch.testing.assert_close(moved, tgt.mean(0).expand(5, 2))
