"""Processes that wait for each other, and the lock of a run's folder."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from calque.errors import InputError
from calque.io.shards import StoppedByMainProcess
from calque.training import distributed
from calque.training.distributed import lock_folder, main_process_first
from calque.training.loop import train
from calque.training.recipe import Recipe

OWNER = f"process {os.getpid()} on {socket.gethostname()} is writing here"


def test_single_process_is_the_main_one() -> None:
    with main_process_first() as is_main:
        assert is_main


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pretend to be the second of two processes; what it reports to the others is in the list."""
    state = SimpleNamespace(num_processes=2, process_index=1)
    monkeypatch.setattr(distributed, "process_state", lambda: state)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    found = list[bool]()
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda worst, *_, **__: found.append(bool(worst))
    )
    return found


def test_failed_main_process_stops_the_others(
    reported: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    with main_process_first() as is_main:
        assert not is_main
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda worst, *_, **__: worst.fill_(0))
    with pytest.raises(StoppedByMainProcess), main_process_first():
        pass
    assert reported == [True]


def test_failure_is_reported_to_the_others(reported: list[bool]) -> None:
    with pytest.raises(KeyboardInterrupt), main_process_first():
        raise KeyboardInterrupt
    assert reported == [False]


@pytest.mark.usefixtures("reported")
def test_killed_main_process_is_one_line_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "all_reduce", end)
    with pytest.raises(InputError, match="another process has stopped"), main_process_first():
        pass


def test_locked_folder_is_created_and_removed_if_it_stays_empty(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    with lock_folder(folder):
        assert folder.is_dir()
        with pytest.raises(InputError, match=OWNER), lock_folder(folder):
            pass
    assert not (tmp_path / "runs").exists()
    with lock_folder(folder):
        (folder / "file").touch()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_run_of_another_process_is_not_disturbed(
    tiny_recipe: Callable[..., Recipe], tiny_text: Path, tmp_path: Path
) -> None:
    with lock_folder(tmp_path / "run"), pytest.raises(InputError, match=OWNER):
        train(tiny_recipe(), output=tmp_path / "run", prepared=tiny_text)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_of_one_run_end_together_if_the_folder_is_locked(
    tiny_recipe: Callable[..., Recipe],
    tiny_text: Path,
    tmp_path: Path,
    train_in_two: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    with lock_folder(tmp_path / "run"):
        done = train_in_two(tmp_path, tiny_recipe(), tiny_text)
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("calque: ")] == [
        f"calque: error: {tmp_path}/run: {OWNER} (wait until it ends, stop it, or choose another "
        "output)"
    ]
