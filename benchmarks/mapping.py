"""What mapping costs beside a straightforward NumPy program of the same steps, in one run.

    OMP_NUM_THREADS=1 python benchmarks/mapping.py [--words 20000] [--hidden 300] [--rounds 2]
        [--keys 200000] [--learn-words 3000] [--parts supervised,csls,round,learn] [--json FILE]

Seconds are of the CPU, over all threads, the least of the rounds in which both take turns. Spaces
are drawn: topics of many sizes, directions of falling strength, the second turned and with noise,
so that mapping is possible and not trivial. `supervised` is normalization, whitening, the map,
re-weighting and de-whitening of both languages from 5,000 pairs. `csls` is P@1 of 1,500 words among
`--keys`, beside the bare product. `round` is one round of self-learning: all translations by CSLS
both ways, with a tenth of the scores kept and with all; `learn` a whole unsupervised run with fewer
words, or on a GPU with `--device cuda`, by the clock. The NumPy program does what VecMap's does,
blocks of rows, scores four times a round, a random number for each of them, and sets dropped ones
to −∞ too.
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

from calque.algorithms.nearest import csls_nearest, normalize_rows
from calque.algorithms.procrustes import (
    Pairs,
    apply_map,
    collect_moments,
    normalize_space,
    solve_joint,
    solve_turn,
)
from calque.algorithms.self_learning import LearningSettings, Matcher, learn, start_from_nothing

Array = npt.NDArray[np.float32]
N_PAIRS, N_QUERIES, K, ROWS = 5_000, 1_500, 10, 1_000


# NumPy.


def numpy_normalize(matrix: Array) -> Array:
    matrix = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    matrix = matrix - matrix.mean(axis=0)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def numpy_supervised(src: Array, tgt: Array, n_pairs: int) -> tuple[Array, Array]:
    """Whiten, turn, re-weight, de-whiten."""

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
    """Each query's mean of its k highest products."""
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
    """One direction's translations with dropped scores, and the mean of the highest similarity."""
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


def numpy_learn(src: Array, tgt: Array, settings: LearningSettings) -> tuple[Array, int]:
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
    """Two languages; word i of one means word i of the other."""
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
    """Do all works in turns; give the least CPU seconds of each and its last result."""
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
        maps = solve_joint([collect_moments(x, z, Pairs(rows, rows))])
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
    turn = torch.from_numpy(numpy_turn(src[:5000], tgt[:5000], (np.arange(5000), np.arange(5000))))
    queries = normalize_rows(torch.from_numpy(src[5000 : 5000 + N_QUERIES]) @ turn)
    keys = normalize_rows(torch.from_numpy(tgt))
    found = take_turns(
        {
            "calque": lambda: csls_nearest(queries, keys, K, 1, order_only=True)[1][:, 0].numpy(),
            "numpy": lambda: numpy_csls(queries.numpy(), keys.numpy()),
        },
        options.rounds,
    )
    right = np.arange(5000, 5000 + N_QUERIES)
    shares = {name: (each == right).mean() for name, each in found["results"].items()}
    note = ", ".join(f"{name} P@1 {100 * share:.1f}" for name, share in shares.items())
    bare = take_turns({"bare": lambda: multiply_only(queries, keys)}, options.rounds)
    note += f"; the product alone {bare['seconds']['bare']:.2f}"
    return {**found["seconds"], "note": note}


def multiply_only(queries: torch.Tensor, keys: torch.Tensor) -> None:
    """The least that looking at all words takes: their products, in memory that is used again."""
    block = queries.new_empty(len(queries), 1024)
    for part in torch.split(keys, 1024):
        torch.mm(queries, part.mT, out=block[:, : len(part)])


def measure_round(options: argparse.Namespace, keep: float) -> dict[str, Any]:
    src, tgt = (numpy_normalize(side) for side in draw_spaces(options.words, options.hidden))
    x, z = torch.from_numpy(src), torch.from_numpy(tgt)
    rows = torch.arange(500)
    W = solve_turn(x, z, Pairs(rows, rows))
    matcher = Matcher(x, z, LearningSettings(n_words=options.words))
    source, numpy_source = torch.Generator().manual_seed(0), np.random.default_rng(0)
    found = take_turns(
        {
            "calque": lambda: matcher.match(W, keep, source, coarse=matcher.is_faster_coarse),
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
    settings = LearningSettings(n_words=options.learn_words)

    def ours() -> tuple[Array, int]:
        start = start_from_nothing(x, z, settings)
        learned = learn(x, z, start, settings, torch.Generator().manual_seed(0))
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
    src: torch.Tensor, tgt: torch.Tensor, settings: LearningSettings, device: str
) -> dict[str, Any]:
    """A whole unsupervised run on a GPU: seconds of the clock, the second of two runs."""
    src, tgt, seconds = src.to(device), tgt.to(device), 0.0
    for _ in range(2):
        started = time.perf_counter()
        start = start_from_nothing(src, tgt, settings)
        learned = learn(src, tgt, start, settings, torch.Generator().manual_seed(0))
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
    parser.add_argument("--device", default="cpu", help="of `learn`: cuda")
    parser.add_argument("--parts", default="supervised,csls,round,learn")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    words, hidden = f"{options.words:,}", options.hidden
    parts: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
        "supervised": {f"supervised, 2 × {words} × {hidden}": lambda: measure_supervised(options)},
        "csls": {f"csls, {N_QUERIES:,} of {options.keys:,}": lambda: measure_csls(options)},
        "round": {
            f"round, {words}, a tenth kept": lambda: measure_round(options, 0.1),
            f"round, {words}, all kept": lambda: measure_round(options, 1.0),
        },
        "learn": {f"unsupervised, {options.learn_words:,}": lambda: measure_learn(options)},
    }
    table = Table(title=f"CPU seconds, {torch.get_num_threads()} threads")
    for name in ("", "calque", "NumPy", "ratio", ""):
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
