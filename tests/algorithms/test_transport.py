"""Sinkhorn: parity with POT at every iteration, plans by hand, properties and gradients."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from calque.algorithms.matching import itermax, mutual_argmax
from calque.algorithms.transport import (
    exponential_log_kernel,
    log_sinkhorn,
    product_log_kernel,
)

SHAPES = [(4, 6), (7, 3), (1, 5), (6, 1), (1, 1), (9, 9)]
LENGTHS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=1, max_size=4)


def draw_masses(lengths: list[int], longest: int, generator: np.random.Generator) -> Tensor:
    """Random masses that sum to 1 per sentence, 0 at padding."""
    masses = torch.zeros(len(lengths), longest, dtype=torch.float64)
    for row, length in zip(masses, lengths, strict=True):
        row[:length] = torch.from_numpy(generator.dirichlet(np.full(length, 3.0)))
    return masses


def draw_problem(
    shapes: list[tuple[int, int]], seed: int, longest: tuple[int, int] = (0, 0)
) -> tuple[Tensor, Tensor, Tensor]:
    """A padded batch: costs (inf at padding), source masses, target masses."""
    generator = np.random.default_rng(seed)
    src, tgt = [n for n, _ in shapes], [n for _, n in shapes]
    n_src, n_tgt = max(*src, longest[0]), max(*tgt, longest[1])
    costs = torch.full((len(shapes), n_src, n_tgt), torch.inf, dtype=torch.float64)
    for cost, (rows, columns) in zip(costs, shapes, strict=True):
        cost[:rows, :columns] = torch.from_numpy(generator.random((rows, columns)))
    src_mass = draw_masses(src, n_src, generator)
    return costs, src_mass, draw_masses(tgt, n_tgt, generator)


def plain_sinkhorn(kernel: Tensor, src_mass: Tensor, tgt_mass: Tensor, n_iterations: int) -> Tensor:
    """The textbook iteration, outside log space, with 0 / 0 = 0."""
    plan = kernel
    for _ in range(n_iterations):
        plan = plan * (tgt_mass / plan.sum(dim=1)).nan_to_num(0.0, posinf=0.0)[:, None, :]
        plan = plan * (src_mass / plan.sum(dim=2)).nan_to_num(0.0, posinf=0.0)[:, :, None]
    return plan


@pytest.mark.parametrize("n_iterations", [1, 2, 5, 40])
@pytest.mark.parametrize("method", ["sinkhorn", "sinkhorn_log"])
@pytest.mark.parametrize("regularization", [1.0, 0.05])
def test_same_plans_as_pot(n_iterations: int, method: str, regularization: float) -> None:
    costs, src_mass, tgt_mass = draw_problem(SHAPES, seed=0)
    log_plans = log_sinkhorn(-costs / regularization, src_mass, tgt_mass, n_iterations)
    for pair, (n_src, n_tgt) in enumerate(SHAPES):
        # POT checks every tenth iteration whether to stop: never, with a threshold of 0.
        expected = ot.sinkhorn(
            src_mass[pair, :n_src].numpy(),
            tgt_mass[pair, :n_tgt].numpy(),
            costs[pair, :n_src, :n_tgt].numpy(),
            regularization,
            method,
            numItermax=n_iterations,
            stopThr=0,
            warn=False,
        )
        expected = torch.nn.functional.pad(torch.from_numpy(expected), (0, 9 - n_tgt, 0, 9 - n_src))
        torch.testing.assert_close(log_plans[pair].exp(), expected, rtol=1e-10, atol=1e-14)


def test_huge_ranges_as_pot_in_log_space() -> None:
    costs, src_mass, tgt_mass = draw_problem([(5, 8)], seed=1)
    sharp = 5000 * (costs + 0.2)
    assert (-sharp).exp().amax() == 0  # outside log space everything vanishes
    found = log_sinkhorn(-sharp, src_mass, tgt_mass, 30)
    problem = (src_mass[0].numpy(), tgt_mass[0].numpy(), sharp[0].numpy(), 1.0)
    expected = ot.sinkhorn(*problem, "sinkhorn_log", numItermax=30, stopThr=0, warn=False)
    np.testing.assert_allclose(found[0].exp().numpy(), expected, atol=1e-12)


def test_columns_come_before_rows() -> None:
    # Columns to (1/2, 1/2): [[3/8, 1/8], [1/8, 3/8]]; rows to (1/4, 3/4): halved, and 3/2 of it.
    kernel = torch.tensor([[[6.0, 1.0], [2.0, 3.0]]])
    masses = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    expected = torch.tensor([[[3 / 16, 1 / 16], [3 / 16, 9 / 16]]])
    torch.testing.assert_close(log_sinkhorn(kernel.log(), *masses, n_iterations=1).exp(), expected)


@given(LENGTHS, st.integers(0, 1000))
def test_rows_are_exact_and_columns_in_the_limit(shapes: list[tuple[int, int]], seed: int) -> None:
    costs, src_mass, tgt_mass = draw_problem(shapes, seed, longest=(1, 1))
    both = torch.tensor([src > 0 and tgt > 0 for src, tgt in shapes])[:, None]
    for n_iterations in (1, 200):
        plan = log_sinkhorn(-costs, src_mass, tgt_mass, n_iterations).exp()
        torch.testing.assert_close(plan.sum(dim=2), src_mass * both)
    torch.testing.assert_close(plan.sum(dim=1), tgt_mass * both)


@given(LENGTHS, st.integers(0, 1000), st.integers(0, 4))
def test_log_space_agrees_with_the_textbook(
    shapes: list[tuple[int, int]], seed: int, n_iterations: int
) -> None:
    costs, src_mass, tgt_mass = draw_problem(shapes, seed, longest=(1, 1))
    plan = plain_sinkhorn((-costs).exp(), src_mass, tgt_mass, n_iterations)
    log_plan = log_sinkhorn(-costs, src_mass, tgt_mass, n_iterations)
    torch.testing.assert_close(log_plan, plan.log())


@given(LENGTHS, st.integers(0, 1000))
def test_padding_changes_nothing(shapes: list[tuple[int, int]], seed: int) -> None:
    costs, *masses = draw_problem(shapes, seed, longest=(8, 9))
    plans = log_sinkhorn(-costs, *masses).exp()
    for pair, (n_src, n_tgt) in enumerate(shapes):
        real = slice(pair, pair + 1), slice(n_src), slice(n_tgt)
        src_mass, tgt_mass = masses[0][real[:2]], masses[1][real[0], real[2]]
        if n_src and n_tgt:
            alone = log_sinkhorn(-costs[real], src_mass, tgt_mass).exp()
            torch.testing.assert_close(plans[real], alone)
        assert plans[pair].count_nonzero() == n_src * n_tgt


@given(st.integers(0, 1000))
def test_the_order_of_words_does_not_matter(seed: int) -> None:
    costs, src_mass, tgt_mass = draw_problem([(5, 7)], seed)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.randperm(5, generator=generator), torch.randperm(7, generator=generator)
    moved = log_sinkhorn(-costs[:, rows][:, :, columns], src_mass[:, rows], tgt_mass[:, columns])
    plan = log_sinkhorn(-costs, src_mass, tgt_mass)
    torch.testing.assert_close(moved, plan[:, rows][:, :, columns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_similarity_stay_empty(dtype: torch.dtype) -> None:
    kernel = torch.ones(1, 4, 4, dtype=dtype)
    kernel[0, 1] = 0
    kernel[0, 2] = 1e-3 * torch.finfo(dtype).tiny  # outside log space, mass / total overflows
    src_mass = torch.tensor([[0.25, 0.25, 0.25, 0.25]], dtype=dtype, requires_grad=True)
    tgt_mass = torch.tensor([[0.5, 0.0, 0.25, 0.25]], dtype=dtype, requires_grad=True)
    plan = log_sinkhorn(kernel.log(), src_mass, tgt_mass, 3).exp()
    assert not plan[0, 1].any()
    for row in (0, 2, 3):
        torch.testing.assert_close(plan[0, row], 0.25 * tgt_mass[0])
    plan.square().sum().backward()
    for tensor in (src_mass, tgt_mass):
        assert tensor.grad is not None and tensor.grad.isfinite().all()


@pytest.mark.parametrize("n_iterations", [1, 3])
def test_gradients(n_iterations: int) -> None:
    costs, src_mass, tgt_mass = draw_problem([(3, 2), (2, 4)], seed=3)
    real = costs < torch.inf

    def plans(cells: Tensor, scales: Tensor) -> Tensor:
        log_kernel = torch.full_like(costs, -torch.inf).masked_scatter(real, cells)
        masses = src_mass * scales[0], tgt_mass * scales[1]
        return log_sinkhorn(log_kernel, *masses, n_iterations)[real]

    cells = costs[real].requires_grad_()
    # The masses are scaled together: separate steps would put mass on padding.
    scales = torch.tensor([0.5, 1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(plans, (cells, scales))


def test_kernel_by_hand() -> None:
    similarity = torch.tensor([[[0.25, -3.0, torch.nan]]], requires_grad=True)
    valid = torch.tensor([[[True, True, False]]])
    log_kernel = exponential_log_kernel(similarity, valid, sharpness=8.0)
    assert log_kernel.tolist() == [[[2.0, -24.0, -torch.inf]]]
    gradient = torch.autograd.grad(log_kernel[valid].sum(), similarity)[0]
    assert gradient.flatten().tolist() == [8.0, 8.0, 0.0]


@pytest.mark.parametrize("mu", [1.0, 0.2])
@pytest.mark.parametrize("n_iterations", [1, 2, 5])
def test_xlm_align_as_written(mu: float, n_iterations: int) -> None:
    """Eq. 1 (without its minus sign) and 4 to 6 in loops: u = 1 / Kv, then v = 1 / Kᵀu."""
    products = np.random.default_rng(4).normal(1.0, 2.0, size=(4, 6))
    K = np.array([[np.exp(np.log(max(1e-6, p)) / mu) for p in row] for row in products])
    u, v = np.zeros(4), np.ones(6)
    for _ in range(n_iterations):
        for i in range(4):
            u[i] = 1 / sum(K[i, j] * v[j] for j in range(6))
        for j in range(6):
            v[j] = 1 / sum(K[i, j] * u[i] for i in range(4))
    expected = np.array([[u[i] * K[i, j] * v[j] for j in range(6)] for i in range(4)])
    similarity = torch.from_numpy(products)[None]
    log_kernel = product_log_kernel(similarity, torch.ones_like(similarity).bool(), 1 / mu)
    ones = torch.ones(1, 4, dtype=torch.float64), torch.ones(1, 6, dtype=torch.float64)
    plan = log_sinkhorn(log_kernel, *ones, n_iterations, scale_first="rows").exp()[0]
    np.testing.assert_allclose(plan.numpy(), expected, rtol=1e-9)
    np.testing.assert_allclose(plan.sum(dim=0), np.ones(6), rtol=1e-9)  # columns are exact
    other = log_sinkhorn(log_kernel, *ones, n_iterations).exp()[0]
    np.testing.assert_allclose(other.sum(dim=1), np.ones(4), rtol=1e-9)  # rows are exact


@pytest.mark.parametrize("sharpness", [1.0, 20.0])
def test_sharper_kernels_give_harder_plans(sharpness: float) -> None:
    similarity = torch.tensor([[[0.9, 0.5], [0.6, 0.8]]])
    valid, half = torch.ones(1, 2, 2, dtype=torch.bool), torch.full((1, 2), 0.5)
    kernel = exponential_log_kernel(similarity, valid, sharpness)
    log_plan = log_sinkhorn(kernel, half, half, 200)
    # In the limit, the log-odds of two words are half those of the kernel: (log K00 K11/K01 K10)/2.
    odds = log_plan[0, 0, 0] - log_plan[0, 0, 1]
    torch.testing.assert_close(odds, torch.tensor(sharpness * 0.6 / 2))


def test_links_by_transport_need_sinkhorn_and_itermax() -> None:
    """XLM-Align's links (Eq. 4–9) differ if any of its steps is left out."""
    cosines = torch.tensor(
        [[[0.75, 0.7, 0.25, 0.6], [0.85, 0.15, 0.55, 0.3], [0.35, 0.65, 0.05, 0.5]]]
    )
    valid = torch.ones_like(cosines, dtype=torch.bool)
    log_kernel = exponential_log_kernel(cosines, valid, sharpness=10.0)
    masses = torch.full((1, 3), 1 / 3), torch.full((1, 4), 1 / 4)
    plan = log_sinkhorn(log_kernel, *masses, 2).exp()
    links = {
        "two iterations and itermax": itermax(plan),
        "without Sinkhorn": itermax(log_kernel.exp()),
        "without itermax": mutual_argmax(plan),
        "one iteration": itermax(log_sinkhorn(log_kernel, *masses, 1).exp()),
        "neither": mutual_argmax(log_kernel),
    }
    assert {name: found[0].nonzero().tolist() for name, found in links.items()} == {
        "two iterations and itermax": [[0, 3], [1, 0], [1, 2], [2, 1]],
        "without Sinkhorn": [[0, 0], [1, 0], [1, 2]],
        "without itermax": [[1, 2], [2, 1]],
        "one iteration": [[0, 3], [1, 2], [2, 1]],
        "neither": [[1, 0]],
    }
    expected = ot.sinkhorn(
        *(mass[0].numpy() for mass in masses),
        1 - cosines[0].numpy(),
        0.1,
        numItermax=2,
        stopThr=0,
        warn=False,
    )
    np.testing.assert_allclose(plan[0].numpy(), expected, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_same_plans_on_the_gpu() -> None:
    problem = [tensor.float() for tensor in draw_problem(SHAPES, seed=5)]
    costs, src_mass, tgt_mass = problem
    on_gpu = [tensor.cuda() for tensor in problem]
    expected = log_sinkhorn(-costs, src_mass, tgt_mass, 4)
    found = log_sinkhorn(-on_gpu[0], *on_gpu[1:], 4)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-6)
