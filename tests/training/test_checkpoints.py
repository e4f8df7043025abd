"""Checkpoints: whole or absent, readable or clearly refused, and bit-identical to go on from."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from calque.errors import InputError
from calque.io import outputs
from calque.training import checkpoints
from calque.training.checkpoints import (
    average_weights,
    find_latest,
    flatten_optimizer,
    folder_of,
    list_checkpoints,
    mark_best,
    read_best,
    read_training_state,
    restore_optimizer,
    write_checkpoint,
)

Trained = tuple[nn.Module, torch.optim.Optimizer]


class TiedModel(nn.Module):
    """An embedding tied to its output layer, a frozen layer, and a head not used at first."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.body = nn.Linear(8, 8)
        self.late = nn.Linear(8, 8)
        self.decoder = nn.Linear(8, 11)
        self.decoder.weight = self.embedding.weight

    def forward(self, ids: Tensor, late: bool) -> Tensor:
        states = self.body(self.frozen(self.embedding(ids)))
        logits: Tensor = self.decoder(self.late(states) if late else states)
        return logits


def build(fused: bool = False, seed: int = 0) -> tuple[TiedModel, torch.optim.AdamW]:
    """Make a model and an AdamW with two groups, as for weight decay."""
    model = TiedModel(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=1e-2, fused=fused)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take steps that depend on nothing but their number; the late head joins at step 3."""
    for step in steps:
        ids = torch.arange(6).add(step).remainder(11)
        optimizer.zero_grad()
        logits = model(ids, late=step >= 3)
        torch.autograd.backward(nn.functional.cross_entropy(logits, ids.flip(0)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()


def write_small(run: Path, step: int, keep: int = 3, pinned: tuple[int, ...] = ()) -> Path:
    """Write a checkpoint in which every number is its step."""

    def save_model(folder: Path) -> None:
        save_file({"weight": torch.full((64,), float(step))}, folder / "model.safetensors")

    tensors = {"ema.weight": torch.full((64,), float(step))}
    return write_checkpoint(run, step, save_model, tensors, {"position": step}, keep, pinned)


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


def test_tensors_that_share_memory_are_stored_apart(tmp_path: Path) -> None:
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


def test_pruning_spares_the_newest_the_best_and_the_pinned(tmp_path: Path) -> None:
    write_small(tmp_path, 1)
    mark_best(tmp_path, 1, 0.9)
    for step in range(2, 8):
        write_small(tmp_path, step, keep=2, pinned=(3,))
    assert steps_of(tmp_path) == [1, 3, 6, 7]
    assert not list(tmp_path.glob(".*"))


def test_pruning_spares_a_step_written_after_going_back(tmp_path: Path) -> None:
    write_small(tmp_path, 10)
    write_small(tmp_path, 5, keep=1)
    assert steps_of(tmp_path) == [5, 10]


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="keep=0"):
        write_small(tmp_path, 1, keep=0)


def test_leftovers_of_a_kill_are_never_read_and_soon_removed(tmp_path: Path) -> None:
    write_small(tmp_path, 1)
    for name in (".step-00000002.partial", ".step-00000003.deleted"):
        (tmp_path / name / "inner").mkdir(parents=True)
    assert steps_of(tmp_path) == [1]
    write_small(tmp_path, 2)
    assert steps_of(tmp_path) == [1, 2]
    assert not list(tmp_path.glob(".*"))


def test_a_kill_in_the_middle_of_a_rewrite_loses_nothing(tmp_path: Path) -> None:
    write_small(tmp_path, 4).rename(tmp_path / ".step-00000004.replaced")
    latest = find_latest(tmp_path)
    assert latest is not None
    assert assert_whole(latest) == 4
    write_small(tmp_path, 5)
    assert steps_of(tmp_path) == [4, 5]
    assert not list(tmp_path.glob(".*"))


def test_rewriting_a_step_replaces_it_whole(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        tensors = {"value": torch.tensor(value)}
        folder = write_checkpoint(tmp_path, 3, lambda _: None, tensors, {}, keep=1)
    assert read_training_state(folder)[0]["value"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


WRITER = """
import os, sys
from pathlib import Path
from test_checkpoints import find_latest, mark_best, read_training_state, write_small
run = Path(sys.argv[1])
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        latest = find_latest(run)
        step = read_training_state(latest)[1]["step"] if latest else 1
        while True:
            write_small(run, step, keep=2)  # rewrites the step it resumed from
            mark_best(run, step, 1.0 / step)
            step += 1
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
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
            found = [assert_whole(folder) for folder in list_checkpoints(tmp_path)]
            assert max(found, default=0) >= reached, "a kill lost the newest checkpoint"
            reached = max(found, default=0)
            best = read_best(tmp_path)
            assert best is None or best[0] in found
        writer.stdin.close()
    assert reached > 1


def test_a_full_disk_is_reported_and_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    failures: list[tuple[str, Exception]] = [
        ("save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("_sync_path", full),
        ("_publish", full),
    ]
    for function, failure in failures:

        def fail(*_: object, failure: Exception = failure, **__: object) -> None:
            raise failure

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints if function == "save_file" else outputs, function, fail)
            with pytest.raises(InputError, match=r"step-00000002.*No space left.*free some space"):
                write_small(tmp_path, 2)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
        assert_whole(tmp_path / "step-00000001")
    write_small(tmp_path, 2)


def test_an_interrupt_in_save_model_leaves_nothing(tmp_path: Path) -> None:
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
    sync, rename = outputs._sync_path, Path.rename

    def watched_sync(path: Path) -> None:
        synced.append(path.name)
        sync(path)

    def watched_rename(path: Path, target: Path) -> Path:
        synced.append("rename")
        return rename(path, target)

    monkeypatch.setattr(outputs, "_sync_path", watched_sync)
    monkeypatch.setattr(Path, "rename", watched_rename)
    write_small(tmp_path, 1)
    at = synced.index("rename")
    files = {"model.safetensors", "training_state.json", "training_state.safetensors"}
    assert set(synced[:at]) == files | {".step-00000001.partial"}
    assert synced[at + 1 :] == [tmp_path.name]


def damage_truncate(folder: Path) -> None:
    file = folder / "training_state.safetensors"
    file.write_bytes(file.read_bytes()[:-7])


def damage_empty(folder: Path) -> None:
    (folder / "training_state.safetensors").write_bytes(b"")


def damage_pickle(folder: Path) -> None:
    (folder / "training_state.safetensors").write_bytes(pickle.dumps({"a": 1}))


def damage_torch_save(folder: Path) -> None:
    torch.save({"a": 1}, folder / "training_state.safetensors")


def damage_no_tensors(folder: Path) -> None:
    (folder / "training_state.safetensors").unlink()


def damage_no_json(folder: Path) -> None:
    (folder / "training_state.json").unlink()


def damage_json(folder: Path) -> None:
    file = folder / "training_state.json"
    file.write_text(file.read_text()[:20])


def damage_list(folder: Path) -> None:
    (folder / "training_state.json").write_text("[]")


def damage_other_step(folder: Path) -> None:
    other = write_small(folder.parent / "other", 2)
    (other / "training_state.json").replace(folder / "training_state.json")


def damage_other_tensors(folder: Path) -> None:
    file = folder / "training_state.safetensors"
    save_file({"a": torch.zeros(1), "b": torch.zeros(1)}, file, metadata={"step": "1"})


def damage_foreign_json(folder: Path) -> None:
    (folder / "training_state.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, r"training_state.safetensors: is truncated"),
        (damage_empty, r"training_state.safetensors: is truncated"),
        (damage_pickle, r"training_state.safetensors: is a pickle, which can run code"),
        (damage_torch_save, r"training_state.safetensors: is a pickle, which can run code"),
        (damage_no_tensors, r"training_state.safetensors: is missing"),
        (damage_no_json, r"training_state.json: is missing"),
        (damage_json, r"training_state.json: cannot be read as JSON"),
        (damage_list, r"training_state.json: holds no JSON object"),
        (damage_other_step, r"training_state.json: does not belong"),
        (damage_other_tensors, r"training_state.json: does not belong"),
        (damage_foreign_json, r"training_state.json: does not belong"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = write_small(tmp_path, 1)
    damage(folder)
    with pytest.raises(InputError, match=message):
        read_training_state(folder)


def test_best_is_remembered(tmp_path: Path) -> None:
    assert read_best(tmp_path) is None
    mark_best(tmp_path, 5, 0.25)
    mark_best(tmp_path, 7, 0.5)
    assert read_best(tmp_path) == (7, 0.5)
    (tmp_path / "best.json").write_text('{"step": 7}')
    with pytest.raises(InputError, match=r"best\.json"):
        read_best(tmp_path)


def test_a_full_disk_keeps_the_best_that_was_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_best(tmp_path, 1, 0.5)

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(InputError, match=r"best\.json.*space"):
        mark_best(tmp_path, 2, 0.25)
    assert [p.name for p in tmp_path.iterdir()] == ["best.json"]
    assert read_best(tmp_path) == (1, 0.5)


def save_weights(folder: Path, **tensors: Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_averaging_by_hand(tmp_path: Path) -> None:
    folders = [
        save_weights(tmp_path / str(k), w=torch.tensor([k, 2.0 * k]), ids=torch.tensor([k]))
        for k in (1, 2, 6)
    ]
    average = average_weights(folders)
    assert average["w"].tolist() == [3.0, 6.0]
    assert average["ids"].tolist() == [6]
    assert average["ids"].dtype == torch.int64


def test_averaging_sums_half_precision_in_float32(tmp_path: Path) -> None:
    # In bfloat16 256 + 1 + 1 + 2 stays 256 + 2; in float32 the sum is 260 and the mean 65.
    values = (256.0, 1.0, 1.0, 2.0)
    folders = [
        save_weights(tmp_path / str(k), w=torch.tensor([v]).bfloat16())
        for k, v in enumerate(values)
    ]
    average = average_weights(folders)["w"]
    assert average.dtype == torch.bfloat16
    assert average.item() == 65.0


def test_averaging_refuses_what_does_not_match(tmp_path: Path) -> None:
    small = save_weights(tmp_path / "small", w=torch.zeros(2))
    large = save_weights(tmp_path / "large", w=torch.zeros(3))
    other = save_weights(tmp_path / "other", v=torch.zeros(2))
    for folder in (large, other):
        with pytest.raises(InputError, match="other tensors or shapes"):
            average_weights([folder, small])
    with pytest.raises(InputError, match=r"absent/model.safetensors: is missing"):
        average_weights([tmp_path / "absent", small])
    with pytest.raises(InputError, match="no checkpoint to average"):
        average_weights([])


def assert_same_training(left: Trained, right: Trained) -> None:
    """Compare every weight, every moment and every setting, bit for bit."""
    weights = zip(left[0].parameters(), right[0].parameters(), strict=True)
    for weight, other in weights:
        assert torch.equal(weight, other)
        moments, others = left[1].state.get(weight, {}), right[1].state.get(other, {})
        assert moments.keys() == others.keys()
        assert all(torch.equal(moments[key], others[key]) for key in moments)
    for group, twin in zip(left[1].param_groups, right[1].param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in twin.items() if k != "params"
        }


def save_and_restore(run: Path, stopped: Trained, fresh: Trained) -> None:
    """Send weights and optimizer through files into fresh objects."""
    tensors, scalars = flatten_optimizer(*stopped)
    write_checkpoint(run, 3, lambda _: None, tensors, scalars, keep=1)
    fresh[0].load_state_dict(stopped[0].state_dict())
    restore_optimizer(*fresh, *read_training_state(folder_of(run, 3)))


@pytest.mark.parametrize("fused", [False, True])
def test_a_restored_optimizer_goes_on_bit_identically(tmp_path: Path, fused: bool) -> None:
    straight, stopped, resumed = build(fused), build(fused), build(fused, seed=1)
    train(*straight, range(6))
    train(*stopped, range(3))
    save_and_restore(tmp_path, stopped, resumed)
    assert_same_training(stopped, resumed)
    train(*resumed, range(3, 6))
    assert_same_training(straight, resumed)
    assert straight[1].state[straight[0].embedding.weight]["step"] == 6
    assert straight[1].state[straight[0].late.weight]["step"] == 3


def step_masked_lm(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Take masked-LM steps without dropout."""
    for step in steps:
        ids = torch.arange(8).add(step).remainder(30)[None]
        torch.autograd.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        optimizer.zero_grad()


def test_xlm_r_goes_on_from_a_plain_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 30}
    depth = {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}
    config = transformers.XLMRobertaConfig(**sizes, **depth)
    model = transformers.XLMRobertaForMaskedLM(config).eval()
    assert model.lm_head.decoder.weight is model.get_input_embeddings().weight
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step_masked_lm(model, optimizer, range(3))
    state = flatten_optimizer(model, optimizer)
    folder = write_checkpoint(tmp_path, 3, model.save_pretrained, *state, keep=1)
    resumed = transformers.XLMRobertaForMaskedLM.from_pretrained(folder).eval()
    resumed_optimizer = torch.optim.AdamW(resumed.parameters(), fused=True)
    restore_optimizer(resumed, resumed_optimizer, *read_training_state(folder))
    for trained in ((model, optimizer), (resumed, resumed_optimizer)):
        step_masked_lm(*trained, range(3, 6))
    assert_same_training((model, optimizer), (resumed, resumed_optimizer))
    average = average_weights([folder, folder])
    assert all(
        torch.equal(average[k], v) for k, v in load_file(folder / "model.safetensors").items()
    )


def test_flattening_names_parameters_and_ties_once() -> None:
    model, optimizer = build()
    train(model, optimizer, range(3))
    tensors, scalars = flatten_optimizer(model, optimizer)
    named = {f"optimizer.{name}" for name in ("embedding.weight", "body.weight", "body.bias")}
    named.add("optimizer.decoder.bias")
    moments = ("step", "exp_avg", "exp_avg_sq")
    assert tensors.keys() == {f"{name}.{moment}" for name in named for moment in moments}
    assert json.loads(json.dumps(scalars))["optimizer_groups"][0]["weight_decay"] == 0.1


def test_flattening_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    straight, watched, resumed = build(), build(), build(seed=1)
    save_and_restore(tmp_path, watched, resumed)
    for trained in (straight, watched, resumed):
        train(*trained, range(4))
    assert_same_training(straight, watched)
    assert_same_training(straight, resumed)


def test_restoring_copies_the_tensors() -> None:
    model, optimizer = build()
    train(model, optimizer, range(3))
    tensors, scalars = flatten_optimizer(model, optimizer)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    fresh = build(seed=1)
    restore_optimizer(*fresh, tensors, scalars)
    train(*fresh, range(3, 6))
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_restoring_discards_gradients_and_keeps_the_machine_switches(tmp_path: Path) -> None:
    stopped, resumed = build(fused=True), build(fused=False, seed=1)
    train(*stopped, range(3))
    torch.autograd.backward(resumed[0](torch.arange(6), late=True).sum())
    save_and_restore(tmp_path, stopped, resumed)
    assert all(parameter.grad is None for parameter in resumed[0].parameters())
    assert resumed[1].param_groups[0]["fused"] is False
    assert stopped[1].param_groups[0]["fused"] is True


def test_a_learning_rate_tensor_stays_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    rate = torch.tensor(0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    torch.autograd.backward(model(torch.ones(2)).sum())
    optimizer.step()
    fresh = nn.Linear(2, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=torch.tensor(0.1), foreach=False)
    save_and_restore(tmp_path, (model, optimizer), (fresh, other))
    assert torch.equal(other.param_groups[0]["lr"], rate)


def test_other_parameters_are_refused() -> None:
    model, optimizer = build()
    train(model, optimizer, range(1))
    state = flatten_optimizer(model, optimizer)
    fewer = torch.optim.AdamW(model.body.parameters())
    with pytest.raises(InputError, match="other parameters"):
        restore_optimizer(model, fewer, *state)


def test_an_accelerate_optimizer_is_restored(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    straight, stopped, resumed = build(), build(), build(seed=1)
    train(*straight, range(6))
    train(*stopped, range(3))
    accelerator.gradient_state._set_sync_gradients(False)  # in the middle of an accumulation
    prepared = accelerator.prepare(*resumed)
    save_and_restore(tmp_path, stopped, prepared)
    accelerator.gradient_state._set_sync_gradients(True)
    train(*resumed, range(3, 6))
    assert_same_training(straight, resumed)


def wrap(model: TiedModel, kind: str) -> Trained:
    """Distribute a model, then build its optimizer, as a training loop does."""
    whole: nn.Module = model
    if kind == "ddp":
        whole = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    else:
        fully_shard(model.body)
        fully_shard(model)
    trained = [p for p in whole.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return whole, torch.optim.AdamW(groups, lr=1e-2)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    weights = model.state_dict()
    return {k: w.full_tensor() if hasattr(w, "full_tensor") else w for k, w in weights.items()}


def resume_in_a_group(rank: int, folder: str, kind: str) -> None:
    """Run on each of two processes: 6 steps at once, and 3 + 3 with files in between."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/{kind}", rank=rank, world_size=2
    )
    straight, stopped = wrap(TiedModel(), kind), wrap(TiedModel(), kind)
    train(*straight, range(6))
    train(*stopped, range(3))
    tensors, scalars = flatten_optimizer(*stopped)
    run = Path(folder, f"run-{kind}")
    assert bool(tensors) == (rank == 0)
    if rank == 0:
        write_checkpoint(run, 3, lambda _: None, tensors, scalars, keep=1)
    torch.distributed.barrier()
    resumed = wrap(TiedModel(1), kind)
    resumed[0].load_state_dict(stopped[0].state_dict())
    restore_optimizer(*resumed, *read_training_state(folder_of(run, 3)))
    train(*resumed, range(3, 6))
    left, right = whole_weights(straight[0]), whole_weights(resumed[0])
    assert all(torch.equal(left[name], right[name]) for name in left)
    left, right = (flatten_optimizer(*trained)[0] for trained in (straight, resumed))
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    torch.distributed.barrier()  # nobody leaves while the other still talks to it
    torch.distributed.destroy_process_group()


def run_group(folder: Path, kind: str) -> list[int | None]:
    """Run `resume_in_a_group` on two processes; None is the exit code of one that hung."""
    folder.mkdir()
    context = multiprocessing.get_context("forkserver")  # imports once for all
    context.set_forkserver_preload(["torch.distributed.fsdp", "calque.training.loop"])
    arguments = [(rank, str(folder), kind) for rank in range(2)]
    processes = [context.Process(target=resume_in_a_group, args=args) for args in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=90)
    exits = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return exits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_distributed_state_is_that_of_one_process(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "first"
    exits = run_group(folder, kind)
    if None in exits:  # gloo was seen to hang once, for no reason found; a wrong result still fails
        folder = tmp_path / "second"
        exits = run_group(folder, kind)
    assert exits == [0, 0]
    read, scalars = read_training_state(folder / f"run-{kind}" / "step-00000003")
    single = build()
    train(*single, range(3))
    expected, settings = flatten_optimizer(*single)
    assert read.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(read[name], expected[name], rtol=1e-4, atol=1e-7)
    assert scalars["optimizer_groups"] == json.loads(json.dumps(settings))["optimizer_groups"]
