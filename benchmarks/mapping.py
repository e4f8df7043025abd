"""Time mapping, CSLS retrieval and self-learning against straightforward NumPy programs.

    OMP_NUM_THREADS=1 python benchmarks/mapping.py [--words 20000] [--hidden 300] [--rounds 2]
        [--keys 200000] [--learn-words 3000] [--parts supervised,csls,topk,round,learn] [--tiny]

Seconds are CPU seconds over all threads, the minimum of the rounds, in which both programs take
turns. The spaces are random: topics of many sizes and directions of decreasing strength; the second
space is rotated and noisy. The parts:

    supervised  normalization, whitening, rotation, re-weighting, de-whitening, from 5,000 pairs
    csls        P@1 of 1,500 words among `--keys` words, and the time of the bare product
    topk        the k highest scores per row and per column, against `torch.topk`
    round       one round of self-learning, with a tenth of the scores kept and with all of them
    learn       a complete unsupervised run with fewer words
    polar       the orthogonal factor of a matrix on a GPU, against the SVD; needs `--device cuda`

With `--device cuda`, `learn` runs on the GPU, in seconds of wall time. The NumPy program does what
VecMap does: blocks of rows, scores computed four times per round, a random number for each score.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table

from calque.algorithms.nearest import (
    csls_nearest_neighbors,
    normalize_rows,
    topk_in_columns,
    topk_in_rows,
)
from calque.algorithms.procrustes import (
    IndexPairs,
    apply_map,
    collect_moments,
    normalize_space,
    polar_factor,
    solve_joint_maps,
    solve_procrustes,
    solve_rotation,
)
from calque.algorithms.self_learning import (
    Matcher,
    SelfLearningSettings,
    self_learn,
    unsupervised_seed,
)

Array = npt.NDArray[np.float32]
N_PAIRS, N_QUERIES, K, ROWS = 5_000, 1_500, 10, 1_000


# NumPy.


def numpy_normalize(matrix: Array) -> Array:
    matrix = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix = matrix - matrix.mean(axis=0)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def numpy_supervised(src: Array, tgt: Array, n_pairs: int) -> tuple[Array, Array]:
    """Whiten, rotate, re-weight and de-whiten."""

    def whitening(matrix: Array) -> Array:
        _, s, vt = np.linalg.svd(matrix, full_matrices=False)
        return vt.T @ np.diag(1 / s) @ vt

    x, z = numpy_normalize(src), numpy_normalize(tgt)
    wx1, wz1 = whitening(x[:n_pairs]), whitening(z[:n_pairs])
    x, z = x @ wx1, z @ wz1
    wx2, s, wz2t = np.linalg.svd(x[:n_pairs].T @ z[:n_pairs])
    wz2 = wz2t.T
    x, z = x @ wx2 * s**0.5, z @ wz2 * s**0.5
    x = x @ (wx2.T @ np.linalg.inv(wx1) @ wx2)
    return x, z @ (wz2.T @ np.linalg.inv(wz1) @ wz2)


def numpy_hubness(queries: Array, keys: Array, k: int) -> Array:
    """Return each query's mean of its k highest products."""
    means = np.empty(len(queries), dtype=np.float32)
    for i in range(0, len(queries), ROWS):
        scores = queries[i : i + ROWS] @ keys.T
        means[i : i + ROWS] = np.partition(scores, -k, axis=1)[:, -k:].mean(axis=1)
    return means


def numpy_csls(queries: Array, keys: Array) -> npt.NDArray[np.int64]:
    hubness = numpy_hubness(keys, queries, K)
    blocks = range(0, len(queries), ROWS)
    found = [(2 * (queries[i : i + ROWS] @ keys.T) - hubness).argmax(axis=1) for i in blocks]
    return np.concatenate(found)


def numpy_matches(
    src: Array, tgt: Array, hubness: Array, keep: float, generator: np.random.Generator
) -> tuple[npt.NDArray[np.int64], float]:
    """Return translations in one direction with dropped scores, and the mean best similarity."""
    found, highest = np.empty(len(src), dtype=np.int64), 0.0
    for i in range(0, len(src), ROWS):
        scores = src[i : i + ROWS] @ tgt.T
        highest += float(scores.max(axis=1).sum())
        scores -= hubness / 2
        if keep < 1:
            scores[generator.random(scores.shape) >= keep] = -np.inf
        found[i : i + ROWS] = scores.argmax(axis=1)
    return found, highest / len(src)


def numpy_round(
    src: Array, tgt: Array, W: Array, keep: float, generator: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], float]:
    mapped = src @ W
    src_hubness, tgt_hubness = numpy_hubness(mapped, tgt, K), numpy_hubness(tgt, mapped, K)
    forward, there = numpy_matches(mapped, tgt, tgt_hubness, keep, generator)
    backward, back = numpy_matches(tgt, mapped, src_hubness, keep, generator)
    own = np.arange(len(src)), np.arange(len(tgt))
    rows = np.concatenate([own[0], backward]), np.concatenate([forward, own[1]])
    return *rows, (there + back) / 2


def numpy_turn(src: Array, tgt: Array, pairs: tuple[npt.NDArray[np.int64], ...]) -> Array:
    u, _, vt = np.linalg.svd(src[pairs[0]].T @ tgt[pairs[1]])
    return u @ vt


def numpy_start(src: Array, tgt: Array, n_words: int) -> tuple[npt.NDArray[np.int64], ...]:
    size = min(len(src), len(tgt), n_words)
    rows = []
    for side in (src, tgt):
        u, s, _ = np.linalg.svd(side[:size], full_matrices=False)
        rows.append(numpy_normalize(np.sort((u * s) @ u.T, axis=1)))
    scores = rows[0] @ rows[1].T
    by_row = np.partition(scores, -K, axis=1)[:, -K:].mean(axis=1)
    by_column = np.partition(scores, -K, axis=0)[-K:].mean(axis=0)
    scores -= by_row[:, None] / 2 + by_column / 2
    own = np.arange(size)
    return (
        np.concatenate([own, scores.argmax(axis=0)]),
        np.concatenate([scores.argmax(axis=1), own]),
    )


def numpy_learn(src: Array, tgt: Array, settings: SelfLearningSettings) -> tuple[Array, int]:
    generator = np.random.default_rng(0)
    pairs = numpy_start(src, tgt, settings.n_start_words)
    src, tgt = src[: settings.n_words], tgt[: settings.n_words]
    keep, best, improved, number = settings.first_keep, -np.inf, 0, 0
    while True:
        number += 1
        W = numpy_turn(src, tgt, pairs)
        if number - improved > settings.patience:
            if keep >= 1:
                return W, number - 1
            keep, improved = min(1.0, settings.keep_growth * keep), number
        *pairs, objective = numpy_round(src, tgt, W, keep, generator)
        if objective - best >= settings.threshold:
            best, improved = objective, number


# Both.


def draw_spaces(n_words: int, hidden: int, noise: float = 0.6) -> tuple[Array, Array]:
    """Return two languages; word i of one is the translation of word i of the other."""
    generator = np.random.default_rng(0)
    strengths = np.arange(1, hidden + 1) ** -0.4
    sizes = np.arange(1, 1001) ** -0.7
    topics = generator.choice(1000, n_words, p=sizes / sizes.sum())
    centers, own = generator.standard_normal((1000, hidden)), (n_words, hidden)
    tgt = (centers[topics] + 0.8 * generator.standard_normal(own)) * strengths
    turn, _ = np.linalg.qr(generator.standard_normal((hidden, hidden)))
    noisy = noise * strengths * generator.standard_normal(own)
    return ((tgt + noisy) @ turn).astype(np.float32), tgt.astype(np.float32)


def take_turns(works: dict[str, Callable[[], Any]], n_rounds: int) -> dict[str, Any]:
    """Run all functions in turns; return the minimum CPU seconds and the last result of each."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    results = {}
    for _ in range(n_rounds):
        for name, work in works.items():
            start = time.process_time()
            results[name] = work()
            seconds[name].append(time.process_time() - start)
    return {"seconds": {name: min(each) for name, each in seconds.items()}, "results": results}


def measure_supervised(options: argparse.Namespace) -> dict[str, Any]:
    src, tgt = draw_spaces(options.words, options.hidden)
    held_out = slice(N_PAIRS, N_PAIRS + 500)

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        x, z = (normalize_space(torch.from_numpy(side))[0] for side in (src, tgt))
        rows = torch.arange(min(N_PAIRS, options.words // 2))
        maps = solve_joint_maps([collect_moments(x, z, IndexPairs(rows, rows))])
        return apply_map(x, maps.others[0]), apply_map(z, maps.pivot)

    n_pairs = min(N_PAIRS, options.words // 2)
    found = take_turns(
        {"calque": ours, "numpy": lambda: numpy_supervised(src, tgt, n_pairs)}, options.rounds
    )
    x, z = found["results"]["calque"]
    a, b = found["results"]["numpy"]
    held_out = slice(n_pairs, n_pairs + 500)
    gap = np.abs((x[held_out] @ z[held_out].T).numpy() - a[held_out] @ b[held_out].T).max()
    return {**found["seconds"], "note": f"similarities differ by {gap:.0e} at most"}


def measure_csls(options: argparse.Namespace) -> dict[str, Any]:
    src, tgt = draw_spaces(options.keys, options.hidden)
    n_pairs, n_queries = min(5000, options.keys // 4), min(N_QUERIES, options.keys // 4)
    known = np.arange(n_pairs)
    turn = torch.from_numpy(numpy_turn(src[:n_pairs], tgt[:n_pairs], (known, known)))
    queries = normalize_rows(torch.from_numpy(src[n_pairs : n_pairs + n_queries]) @ turn)
    keys = normalize_rows(torch.from_numpy(tgt))
    found = take_turns(
        {
            "calque": lambda: csls_nearest_neighbors(queries, keys, K, 1, order_only=True)[1][
                :, 0
            ].numpy(),
            "numpy": lambda: numpy_csls(queries.numpy(), keys.numpy()),
        },
        options.rounds,
    )
    right = np.arange(n_pairs, n_pairs + n_queries)
    shares = {name: (each == right).mean() for name, each in found["results"].items()}
    note = ", ".join(f"{name} P@1 {100 * share:.1f}" for name, share in shares.items())
    bare = take_turns({"bare": lambda: multiply_only(queries, keys)}, options.rounds)
    note += f"; the product alone {bare['seconds']['bare']:.2f}"
    return {**found["seconds"], "note": note}


def multiply_only(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """Compute the products alone, in reused memory: a lower bound."""
    block = queries.new_empty(len(queries), 1024)
    for part in torch.split(keys, 1024):
        torch.mm(queries, part.mT, out=block[:, : len(part)])


def measure_topk(options: argparse.Namespace, by_row: bool) -> dict[str, Any]:
    """Compare top-k through the maxima of groups with `torch.topk`; "numpy" is torch here."""
    shape = (64, options.words) if by_row else (options.words, 1024)
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ours = topk_in_rows if by_row else topk_in_columns
    transposed = scores if by_row else scores.mT
    works = {
        "calque": lambda: [ours(scores, K) for _ in range(20)],
        "numpy": lambda: [transposed.contiguous().topk(K, dim=1) for _ in range(20)],
    }
    found = take_turns(works, options.rounds)
    same = torch.equal(found["results"]["calque"][0][0], found["results"]["numpy"][0].values)
    return {**found["seconds"], "note": f"against torch.topk; same values: {same}"}


def measure_polar(options: argparse.Namespace) -> dict[str, Any]:
    """Compare products of matrices with the SVD, on a GPU, in wall time."""
    generator = torch.Generator().manual_seed(0)
    cross = torch.randn(options.hidden, options.hidden, generator=generator, dtype=torch.float64)
    there = cross.to(options.device)
    seconds = {}
    for name, work in {
        "calque": lambda: polar_factor(there),
        "numpy": lambda: solve_procrustes(there.cpu()).to(there.device),
    }.items():
        times = []
        for _ in range(1 + options.rounds):
            started = time.perf_counter()
            result = work()
            assert result is not None
            result.cpu()  # waits for the device
            times.append(time.perf_counter() - started)
        seconds[name] = min(times)
    return {**seconds, "note": f"against the SVD; {options.device}, wall time"}


def measure_round(options: argparse.Namespace, keep: float) -> dict[str, Any]:
    src, tgt = (numpy_normalize(side) for side in draw_spaces(options.words, options.hidden))
    x, z = torch.from_numpy(src), torch.from_numpy(tgt)
    rows = torch.arange(min(500, options.words))
    W = solve_rotation(x, z, IndexPairs(rows, rows))
    matcher = Matcher(x, z, SelfLearningSettings(n_words=options.words))
    low_precision = matcher.prefers_low_precision
    source, numpy_source = torch.Generator().manual_seed(0), np.random.default_rng(0)
    found = take_turns(
        {
            "calque": lambda: matcher.match(W, keep, source, low_precision=low_precision),
            "numpy": lambda: numpy_round(src, tgt, W.float().numpy(), keep, numpy_source),
        },
        options.rounds,
    )
    ours, theirs = found["results"]["calque"], found["results"]["numpy"]
    note = f"objective {ours.objective:.4f}, {theirs[2]:.4f}"
    return {**found["seconds"], "note": note}


def measure_learn(options: argparse.Namespace) -> dict[str, Any]:
    spaces = draw_spaces(options.learn_words, options.hidden)
    src, tgt = (numpy_normalize(side) for side in spaces)
    x, z = torch.from_numpy(src), torch.from_numpy(tgt)
    settings = SelfLearningSettings(n_words=options.learn_words)

    def ours() -> tuple[Array, int]:
        start = unsupervised_seed(x, z, settings)
        learned = self_learn(x, z, start, settings, torch.Generator().manual_seed(0))
        return learned.map.float().numpy(), len(learned.rounds)

    if options.device != "cpu":
        return measure_learn_there(x, z, settings, options.device)
    found = take_turns({"calque": ours, "numpy": lambda: numpy_learn(src, tgt, settings)}, 1)
    notes = []
    for name, (W, n_rounds) in found["results"].items():
        right = numpy_csls(src @ W, tgt) == np.arange(len(src))
        notes.append(f"{name} {n_rounds} rounds, P@1 {100 * right.mean():.1f}")
    return {**found["seconds"], "note": "; ".join(notes)}


def measure_learn_there(
    src: torch.Tensor, tgt: torch.Tensor, settings: SelfLearningSettings, device: str
) -> dict[str, Any]:
    """Return the wall time of a complete unsupervised run on a GPU, the second of two."""
    src, tgt, seconds = src.to(device), tgt.to(device), 0.0
    for _ in range(2):
        started = time.perf_counter()
        start = unsupervised_seed(src, tgt, settings)
        learned = self_learn(src, tgt, start, settings, torch.Generator().manual_seed(0))
        W = learned.map.float().cpu().numpy()  # waits for the device
        seconds = time.perf_counter() - started
    right = numpy_csls(src.cpu().numpy() @ W, tgt.cpu().numpy()) == np.arange(len(src))
    note = f"{device}, {len(learned.rounds)} rounds, P@1 {100 * right.mean():.1f}"
    return {"calque": seconds, "numpy": float("nan"), "note": note}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, default=300)
    parser.add_argument("--keys", type=int, default=200_000)
    parser.add_argument("--learn-words", type=int, default=3_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="Device of learn and polar.")
    parser.add_argument("--parts", default="supervised,csls,topk,round,learn")
    parser.add_argument("--tiny", action="store_true", help="Use tiny sizes, to test the script.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.words, options.keys, options.learn_words = 400, 800, 200
        options.hidden, options.rounds = 20, 1
    words, hidden = f"{options.words:,}", options.hidden
    parts: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
        "supervised": {f"supervised, 2 × {words} × {hidden}": lambda: measure_supervised(options)},
        "csls": {f"csls, {options.keys:,} words": lambda: measure_csls(options)},
        "topk": {
            f"top {K} of 64 rows of {words}": lambda: measure_topk(options, by_row=True),
            f"top {K} of 1,024 columns of {words}": lambda: measure_topk(options, by_row=False),
        },
        "polar": {f"polar factor, {hidden} × {hidden}": lambda: measure_polar(options)},
        "round": {
            f"round, {words}, a tenth kept": lambda: measure_round(options, 0.1),
            f"round, {words}, all kept": lambda: measure_round(options, 1.0),
        },
        "learn": {f"unsupervised, {options.learn_words:,}": lambda: measure_learn(options)},
    }
    table = Table(title=f"CPU seconds, {torch.get_num_threads()} threads")
    for name in ("", "Calque", "NumPy", "ratio", ""):
        table.add_column(name, justify="right" if name else "left")
    rows = []
    for part in options.parts.split(","):
        for name, work in parts[part].items():
            found = work()
            rows.append({"name": name, **found})
            ours, theirs = found["calque"], found["numpy"]
            cells = (f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}", found["note"])
            table.add_row(name, *cells)
    Console().print(table)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"peak memory {peak:.1f} GB")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
