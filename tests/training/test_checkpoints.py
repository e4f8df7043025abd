"""Checkpoints: complete or absent, readable or a clear error, and averages of several."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from calque.errors import InputError
from calque.io import outputs
from calque.training import checkpoints
from calque.training.checkpoints import (
    WeightAverage,
    average_weights,
    find_latest,
    list_checkpoints,
    read_best,
    read_training_state,
    write_checkpoint,
)
from calque.training.distributed import lock_folder
from calque.training.recipe import Recipe

MakeRecipe = Callable[..., Recipe]


def write_small(
    run: Path,
    step: int,
    keep: int = 3,
    pinned: tuple[int, ...] = (),
    score: float | None = None,
) -> Path:
    """Write a checkpoint in which every number is its step."""

    def save_model(folder: Path) -> None:
        save_file({"weight": torch.full((64,), float(step))}, folder / "model.safetensors")

    tensors = {"ema.weight": torch.full((64,), float(step))}
    return write_checkpoint(run, step, save_model, tensors, {"position": step}, keep, pinned, score)


def steps_of(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in list_checkpoints(run)]


def assert_whole(folder: Path) -> int:
    """Check that every file of a checkpoint of `write_small` is of one step; return the step."""
    tensors, scalars = read_training_state(folder)
    step = scalars["step"]
    assert scalars == {"step": step, "position": step}
    weight = load_file(folder / "model.safetensors")["weight"]
    assert weight.eq(step).all()
    assert tensors["ema.weight"].eq(step).all()
    return int(step)


def test_written_state_reads_back_exactly(tmp_path: Path) -> None:
    tensors = {
        "moment": torch.randn(3, 4).t(),
        "half": torch.randn(5).bfloat16(),
        "generator": torch.Generator().get_state(),
        "scalar": torch.tensor(7.5),
        "empty": torch.empty(0, 3),
    }
    scalars = {"position": {"epoch": 1, "batch": 17}, "best": 0.1 + 0.2, "recipe": "ab12"}
    folder = write_checkpoint(tmp_path / "run", 500, lambda _: None, tensors, scalars, keep=1)
    assert folder.name == "step-00000500"
    read, read_scalars = read_training_state(folder)
    assert read_scalars == scalars | {"step": 500}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_tensors_that_share_memory_are_stored(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    tied = {"embedding": weight, "decoder": weight, "first": weight[0]}
    read, _ = read_training_state(write_checkpoint(tmp_path, 1, lambda _: None, tied, {}, keep=1))
    assert torch.equal(read["embedding"], weight)
    assert torch.equal(read["decoder"], weight)
    assert torch.equal(read["first"], weight[0])


def test_latest_is_the_highest_step_and_not_the_last_name(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "absent") is None
    for step in (9, 100_000_000, 10):
        write_small(tmp_path, step, keep=9)
    (tmp_path / "step-final").mkdir()
    (tmp_path / "step-99999999999").touch()
    assert steps_of(tmp_path) == [9, 10, 100_000_000]
    assert find_latest(tmp_path) == tmp_path / "step-100000000"


def test_newest_best_and_pinned_checkpoints_are_kept(tmp_path: Path) -> None:
    scores = {1: 0.9, 2: 0.5, 4: 0.5, 6: 0.7}  # of equal scores, the first is the best
    for step in range(1, 8):
        write_small(tmp_path, step, keep=2, pinned=(3,), score=scores.get(step))
    assert steps_of(tmp_path) == [2, 3, 6, 7]
    assert read_best(tmp_path) == (2, 0.5)
    assert not list(tmp_path.glob(".*"))


def test_extra_checkpoint_does_not_count_and_is_deleted_after_the_next(tmp_path: Path) -> None:
    for step in (2, 4):
        write_small(tmp_path, step, keep=2)
    write_checkpoint(tmp_path, 5, lambda _: None, {}, {}, 2, is_extra=True)
    assert steps_of(tmp_path) == [2, 4, 5]
    write_small(tmp_path, 6, keep=2)
    assert steps_of(tmp_path) == [4, 6]


def test_step_written_after_going_back_is_kept(tmp_path: Path) -> None:
    write_small(tmp_path, 10)
    write_small(tmp_path, 5, keep=1)
    assert steps_of(tmp_path) == [5, 10]


def test_keeping_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep=0"):
        write_small(tmp_path, 1, keep=0)


def test_leftovers_of_a_kill_are_not_read_and_removed(tmp_path: Path) -> None:
    write_small(tmp_path, 1)
    for name in (".calque-step-00000002.partial", ".calque-step-00000003.deleted"):
        (tmp_path / name / "inner").mkdir(parents=True)
    assert steps_of(tmp_path) == [1]
    write_small(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".*"))


def test_kill_while_a_checkpoint_is_replaced_loses_nothing(tmp_path: Path) -> None:
    write_small(tmp_path, 4).rename(tmp_path / ".calque-step-00000004.replaced")
    with lock_folder(tmp_path):  # as every run does before it reads its folder
        assert [assert_whole(folder) for folder in list_checkpoints(tmp_path)] == [4]
    assert not list(tmp_path.glob(".*"))


def test_rewritten_step_is_replaced_completely(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        tensors = {"value": torch.tensor(value)}
        folder = write_checkpoint(tmp_path, 3, lambda _: None, tensors, {}, keep=1)
    assert read_training_state(folder)[0]["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


WRITER = """
import os, sys
from pathlib import Path
from test_checkpoints import find_latest, lock_folder, read_training_state, write_small
run = Path(sys.argv[1])
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        with lock_folder(run):
            latest = find_latest(run)
            step = read_training_state(latest)[1]["step"] if latest else 1
            while True:
                # rewrites the step it resumed from
                write_small(run, step, keep=2, score=abs(step % 7 - 3.0))
                step += 1
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.slow
def test_sigkill_leaves_complete_checkpoints_only(tmp_path: Path) -> None:
    here, source = Path(__file__).parent, Path(checkpoints.__file__).parents[2]
    env = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{source}"}
    command = [sys.executable, "-W", "ignore", "-c", WRITER, str(tmp_path)]
    moments = random.Random(5)
    reached = 0
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        for _ in range(25):
            print(file=writer.stdin, flush=True)
            child = int(writer.stdout.readline())
            time.sleep(moments.uniform(0.01, 0.2))
            os.kill(child, signal.SIGKILL)
            assert writer.stdout.readline() == "dead\n"
            with lock_folder(tmp_path):
                found = [assert_whole(folder) for folder in list_checkpoints(tmp_path)]
            assert max(found, default=0) >= reached, "a kill lost the newest checkpoint"
            reached = max(found, default=0)
            best = read_best(tmp_path)
            assert best is None or best == (3, 0.0) or reached < 3
        writer.stdin.close()
    assert reached > 1


def test_full_disk_is_reported_and_keeps_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    failures: list[tuple[str, Exception]] = [
        ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("sync_path", full),
        ("_publish", full),
    ]
    for function, failure in failures:

        def fail(*_: object, failure: Exception = failure, **__: object) -> None:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints if function == "save_file" else outputs, function, fail)
            with pytest.raises(InputError, match=r"step-00000002.*No space left.*free some"):
                write_small(tmp_path, 2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert_whole(tmp_path / "step-00000001")
    write_small(tmp_path, 2)


def test_interrupt_while_saving_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path, 1, interrupt, {}, {}, keep=1)
    assert not list(tmp_path.iterdir())


def test_every_file_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync, rename = outputs.sync_path, Path.rename

    def watched_sync(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    def watched_rename(path: Path, target: Path) -> Path:
        synced.append("rename")
        return rename(path, target)

    monkeypatch.setattr(outputs, "sync_path", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write_small(tmp_path, 1)
    at = synced.index("rename")
    files = {"model.safetensors", "training_state.json", "training_state.safetensors"}
    assert set(synced[:at]) == files | {".calque-step-00000001.partial"}
    assert synced[at + 1 :] == [tmp_path.name]


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)


def take_that_of_step_two(file: Path) -> None:
    shutil.copyfile(file.parents[1] / "step-00000002" / file.name, file)


@pytest.mark.parametrize(
    "damage", [shorten, flip, take_that_of_step_two, Path.unlink, lambda file: file.write_text("")]
)
@pytest.mark.parametrize(
    "name", ["model.safetensors", "training_state.json", "training_state.safetensors"]
)
def test_damaged_checkpoint_is_an_error_that_names_an_intact_one(
    tmp_path: Path, name: str, damage: Callable[[Path], object]
) -> None:
    for step in (3, 2, 4, 5):
        write_small(tmp_path, step, keep=9, score=0.5)
    flip(tmp_path / "step-00000004" / "model.safetensors")
    damage(tmp_path / "step-00000005" / name)
    fix = r"\(delete the folder step-00000005; --resume then uses step-00000003\)"
    with pytest.raises(InputError, match=rf"step-00000005/{name}: .*{fix}"):
        read_training_state(tmp_path / "step-00000005")
    if name.endswith(".json"):
        with pytest.raises(InputError, match=fix):
            read_best(tmp_path)


def test_only_checkpoint_that_is_damaged_cannot_be_resumed(tmp_path: Path) -> None:
    flip(write_small(tmp_path, 1) / "model.safetensors")
    with pytest.raises(InputError, match="no other checkpoint is intact, so train again"):
        read_training_state(tmp_path / "step-00000001")


def test_checkpoint_of_an_older_version_is_an_error(tmp_path: Path) -> None:
    state = write_small(tmp_path, 1) / "training_state.json"
    state.write_text('{"format": 1, "step": 1, "n_tensors": 1, "scalars": {}}')
    with pytest.raises(InputError, match="no checksum; another version of Calque wrote it"):
        read_best(tmp_path)


def test_pickle_is_named(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="the file is a pickle, which can run code"):
        average_weights([tmp_path])
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(InputError, match="the file is a pickle, which can run code"):
        average_weights([tmp_path])


# Averages


def save_weights(folder: Path, **tensors: Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_average_computed_by_hand(tmp_path: Path) -> None:
    folders = [
        save_weights(tmp_path / str(k), w=torch.tensor([k, 2.0 * k]), ids=torch.tensor([k]))
        for k in (1, 2, 6)
    ]
    average = average_weights(folders)
    assert average["w"].tolist() == [3.0, 6.0]
    assert average["ids"].tolist() == [6]
    assert average["ids"].dtype == torch.int64


def test_half_precision_is_averaged_in_float32(tmp_path: Path) -> None:
    # In bfloat16 256 + 1 + 1 + 2 stays 256 + 2; in float32 the sum is 260 and the mean 65.
    values = (256.0, 1.0, 1.0, 2.0)
    folders = [
        save_weights(tmp_path / str(k), w=torch.tensor([v]).bfloat16())
        for k, v in enumerate(values)
    ]
    average = average_weights(folders)["w"]
    assert average.dtype == torch.bfloat16
    assert average.item() == 65.0


def test_average_of_different_models_is_an_error(tmp_path: Path) -> None:
    small = save_weights(tmp_path / "small", w=torch.zeros(2))
    large = save_weights(tmp_path / "large", w=torch.zeros(3))
    other = save_weights(tmp_path / "other", v=torch.zeros(2))
    for folder in (large, other):
        with pytest.raises(InputError, match="the tensors differ"):
            average_weights([folder, small])
    with pytest.raises(InputError, match=r"absent/model.safetensors: the file is missing"):
        average_weights([tmp_path / "absent", small])
    with pytest.raises(InputError, match="no checkpoint to average"):
        average_weights([])


class Wrapper(nn.Module):
    """A module with its model inside, as an Encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def move(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))


def test_ema_equals_that_of_torch(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    module = Wrapper()
    reference: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    average = WeightAverage(tiny_recipe("average.kind=ema", "average.decay=0.9"))
    for step in range(6):
        move(module, step)
        average.update(module)
        reference.update_parameters(module)
    result = average.result(tmp_path)
    expected = reference.module.model.state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert not torch.equal(result["0.weight"], module.model[0].weight)


def test_ema_continues_after_a_restore(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    module = Wrapper()
    average, restored = (WeightAverage(tiny_recipe("average.kind=ema")) for _ in range(2))
    for step in range(3):
        move(module, step)
        average.update(module)
    kept = {name: value.clone() for name, value in average.tensors().items()}
    assert all(name.startswith("average.model.") for name in kept)
    restored.restore(kept, deepcopy(module))
    move(module, 3)
    for one in (average, restored):
        one.update(module)
    left, right = average.result(tmp_path), restored.result(tmp_path)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_without_an_average_nothing_is_kept(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    average = WeightAverage(tiny_recipe())
    average.update(Wrapper())
    assert average.tensors() == {}
    assert average.pinned(tmp_path) == set()
    average.restore({}, Wrapper())


def write_step(run: Path, step: int, pinned: set[int]) -> None:
    def save_model(folder: Path) -> None:
        save_file({"w": torch.full((2,), float(step))}, folder / "model.safetensors")

    write_checkpoint(run, step, save_model, {}, {}, 1, pinned)


def test_last_regular_checkpoints_are_kept_and_averaged(
    tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe(
        "average.kind=last", "average.last=3", "checkpoints.every=10", "schedule.steps=45"
    )
    average = WeightAverage(recipe)
    kept = []
    for step in (10, 20, 25, 30, 40, 45):  # 25: an interruption
        write_step(tmp_path, step, average.pinned(tmp_path))
        kept.append(
            sorted(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
        )
    assert kept == [[10], [10, 20], [10, 20, 25], [10, 20, 30], [20, 30, 40], [30, 40, 45]]
    assert average.result(tmp_path)["w"].tolist() == pytest.approx([(30 + 40 + 45) / 3] * 2)
    flip(tmp_path / "step-00000030" / "model.safetensors")
    with pytest.raises(InputError, match=r"step-00000030/model\.safetensors: the file is damaged"):
        average.result(tmp_path)
