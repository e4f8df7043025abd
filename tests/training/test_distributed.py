"""Cooperation of processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from calque.errors import InputError
from calque.training import distributed
from calque.training.distributed import main_process_first


def test_single_process_is_the_main_one() -> None:
    with main_process_first() as is_main:
        assert is_main


def test_stopped_main_process_is_one_line_in_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(group: object) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:30593.")

    state = SimpleNamespace(num_processes=2, is_main_process=False)
    monkeypatch.setattr(distributed, "process_state", lambda: state)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **options: None)
    monkeypatch.setattr(torch.distributed, "barrier", end)
    with pytest.raises(InputError, match="another process has stopped"), main_process_first():
        pass
