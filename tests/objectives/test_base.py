"""Gathering rows of several processes: one process and two agree on losses and gradients."""

from __future__ import annotations

import copy
import signal
import warnings
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import distributed, nn

from calque.objectives.base import gather_rows, n_processes, process_number, total_over_processes
from calque.objectives.contrastive import (
    Contrastive,
    SentenceContrastive,
    SentenceContrastiveSettings,
    WordContrastive,
    WordContrastiveSettings,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens
from calque.training.step import TrainStep

if TYPE_CHECKING:
    from torch import Tensor

    from calque.models.encoder import Encoder

Pair = tuple[list[list[int]], list[list[int]], list[tuple[int, int, int]]]

# Words as lists of subwords, and links. The first and the fifth pair, which different processes
# get, have the same source; the second and the sixth the same target.
PAIRS: list[Pair] = [
    ([[10, 11], [12]], [[20], [21, 22]], [(0, 1, 255), (1, 0, 128), (1, 1, 64)]),
    ([[13], [14]], [[23], [24]], [(0, 0, 255), (1, 1, 51)]),
    ([[15]], [[25, 26]], [(0, 0, 255)]),
    ([[16], [17]], [[27], [28]], [(1, 0, 255), (0, 1, 255)]),
    ([[10, 11], [12]], [[29], [30]], [(0, 0, 255), (1, 1, 255)]),
    ([[18], [19]], [[23], [24]], [(0, 1, 255)]),
]
N_FIRST = 4  # pairs of the first process; the second has the rest
UNLINKED: Pair = ([[31]], [[32]], [])
SHAPE = BatchShape(tokens=96, row=16, sequences=16, budget=96)
CASES: dict[str, tuple[str, BatchShape | None, dict[str, Any]]] = {
    "word-weak": ("word", None, {}),
    "word-strong": ("word", SHAPE, {"negatives": "strong", "words": "mean"}),
    "word-text": ("word", None, {"spare": "text", "negatives": "strong", "queue": 9}),
    "word-place": ("word", SHAPE, {"queue": 9}),
    "sentence-weak": ("sentence", SHAPE, {}),
    "sentence-strong": ("sentence", None, {"negatives": "strong", "features": 8, "queue": 5}),
    "compiled": ("sentence", SHAPE, {"negatives": "strong", "features": 8, "queue": 5}),
    "near": ("sentence", None, {"parameter_weight": 1.0, "layer": 2}),
}


def make_objective(kind: str, **changes: Any) -> Contrastive:
    objective: Contrastive = (
        WordContrastive(WordContrastiveSettings(**{"features": 8, "parameter_weight": 0} | changes))
        if kind == "word"
        else SentenceContrastive(SentenceContrastiveSettings(**changes))
    )
    objective.add_weights(64, torch.Generator().manual_seed(5))
    return objective


def collate(objective: Contrastive, encoder: Encoder, pairs: list[Pair], shape: Any) -> Any:
    sides = [Ragged.of([list(chain(*pair[side])) for pair in pairs]) for side in (0, 1)]
    words = [Ragged.of([[len(word) for word in pair[side]] for pair in pairs]) for side in (0, 1)]
    links = [[i << 20 | j << 8 | level for i, j, level in pair[2]] for pair in pairs]
    build = objective.build_collator(SpecialTokens.of(encoder.tokenizer), shape)
    return build((*sides, *words, Ragged.of(links)), torch.Generator())


def train_step(encoder: Encoder, name: str, share: slice, *, spread: bool) -> dict[str, Tensor]:
    """Return losses and gradients of some pairs in the second of two steps."""
    kind, shape, changes = CASES[name]
    objective = make_objective(kind, **changes).double()
    step = TrainStep(copy.deepcopy(encoder), [objective]).train()
    step.encoder.eval()  # no dropout, which two processes would draw differently
    objective.start(step.encoder, ["en-de"])
    with torch.no_grad():
        for parameter in step.encoder.parameters():
            parameter.mul_(1.01)
    earlier, pairs = [shift(pair) for pair in PAIRS[share]], PAIRS[share]
    module: nn.Module = step
    if name == "compiled" and spread:
        step.encoder.use_fused_layers = True
        objective.compile(dynamic=False, backend="aot_eager")
    if spread:
        module = nn.parallel.DistributedDataParallel(step, find_unused_parameters=True)
    for now in (earlier, pairs):
        step.zero_grad()
        loss, metrics = module([collate(objective, encoder, now, shape)])
        loss.backward()
    result = {f"figure {key}": average(value) for key, value in metrics.items()}
    result["loss"] = average(loss.detach())
    result |= {key: p.grad for key, p in step.named_parameters() if p.grad is not None}
    result |= {f"buffer {key}": buffer for key, buffer in objective.named_buffers()}
    step.eval()
    with torch.no_grad():  # of the same batch in all processes
        loss, _ = module([collate(objective, encoder, PAIRS, shape)])
    return result | {"validation": loss}


def shift(pair: Pair) -> Pair:
    """Return different sentences of the same form."""
    src, tgt = ([[token + 40 for token in word] for word in side] for side in pair[:2])
    return src, tgt, pair[2]


def average(value: Tensor) -> Tensor:
    return total_over_processes(value) / n_processes()


def gather_by_hand(rank: int) -> None:
    """Gather three columns of 2 or 1 rows; each process weights rows by its number plus one."""
    n_rows = 2 - rank
    states = torch.full((n_rows, 3), rank + 1.0, requires_grad=True)
    numbers = torch.arange(n_rows) + 10 * (rank + 1)
    cube = torch.full((n_rows, 2, 2), float(rank))
    found, counted, cubes = gather_rows(states, numbers, cube)
    assert found.tolist() == [[1.0] * 3, [1.0] * 3, [2.0] * 3, [0.0] * 3]
    assert counted.tolist() == [10, 11, 20, 0]
    assert cubes.shape == (4, 2, 2)
    assert cubes[:, 0, 0].tolist() == [0, 0, 1, 0]
    assert found.requires_grad
    assert not cubes.requires_grad
    ((rank + 1) * found.square()).sum().backward()
    # d/dx of (1 + 2) · x²
    assert states.grad is not None
    assert states.grad.tolist() == [[6.0 * (rank + 1)] * 3] * n_rows
    with torch.no_grad():
        assert gather_rows(states)[0].tolist() == found.tolist()
    assert total_over_processes(torch.tensor(rank + 1.0, requires_grad=True)).item() == 3
    nothing = torch.zeros(0, 3, requires_grad=True)
    (empty,) = gather_rows(nothing)
    assert empty.shape == (0, 3)


def train_without_links(rank: int, encoder: Encoder) -> None:
    """One process has no links, so no rows; then neither process has links."""
    for pairs in ([PAIRS[:2], [UNLINKED]][rank], [UNLINKED]):
        objective = make_objective("word").double()
        step = TrainStep(copy.deepcopy(encoder), [objective]).train()
        module = nn.parallel.DistributedDataParallel(step, find_unused_parameters=True)
        loss, _ = module([collate(objective, encoder, pairs, None)])
        loss.backward()
        assert (loss.item() > 0) == (len(pairs) == 2)
        assert objective.extractor is not None
        gradient = objective.extractor.output.weight.grad
        assert gradient is not None
        assert gradient.isfinite().all()


def work(folder: str, model: str) -> None:
    """Run on each of two processes."""
    from calque.models.encoder import Encoder

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # from torch.compile
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    assert (n_processes(), process_number()) == (2, rank)
    gather_by_hand(rank)
    encoder = Encoder.load(model).double()
    train_without_links(rank, encoder)
    share = (slice(N_FIRST), slice(N_FIRST, None))[rank]
    for name in CASES:
        found = train_step(encoder, name, share, spread=True)
        save_file({k: v.contiguous() for k, v in found.items()}, f"{folder}/{name}.{rank}")
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(
    fork_server: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("two")
    script = folder / "two.py"
    script.write_text("import sys; from test_base import work; work(*sys.argv[1:])")
    for _ in range(2):
        done = fork_server.run(script, folder, tiny_folder, beside=Path(__file__), seconds=240)
        if done.returncode != -signal.SIGALRM:  # gloo has hung once
            break
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(name: str, two_processes: Path, tiny_folder: Path) -> None:
    from calque.models.encoder import Encoder

    encoder = Encoder.load(tiny_folder).double()
    expected = train_step(encoder, name, slice(None), spread=False)
    for rank in (0, 1):
        found = load_file(two_processes / f"{name}.{rank}")
        # Those without a gradient in one process have zeros in two.
        extra = found.keys() - expected.keys()
        assert expected.keys() <= found.keys()
        assert all(found[key].eq(0).all() for key in extra)
        assert all("lm_head" in key or ".layer." in key for key in extra)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, atol=1e-6, rtol=1e-6, msg=key)
    assert expected["loss"].item() > 0.1


def test_one_process_returns_its_own_rows() -> None:
    columns = (torch.randn(3, 2), torch.arange(3))
    assert all(one is other for one, other in zip(gather_rows(*columns), columns, strict=True))
    assert (n_processes(), process_number()) == (1, 0)
    value = torch.tensor(2.0, requires_grad=True)
    total = total_over_processes(value)
    assert total.item() == 2
    assert not total.requires_grad
