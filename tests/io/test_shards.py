"""Shards: one process here; several under torchrun are in tests/cli/test_align.py."""

from __future__ import annotations

import pytest

from calque.errors import InputError
from calque.io.shards import Shard, StoppedByMainProcess, join_shard_group


class PretendShard(Shard):
    """One of several processes, of which another may have failed."""

    def all_succeeded(self, success: bool = True) -> bool:
        return success and self.group != "failed"


def fail() -> None:
    raise InputError("bad line")


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_shard_group() as shard:
        assert (shard.rank, shard.n_ranks, shard.is_main) == (0, 1, True)
        assert shard.owns(0) and shard.owns(7)
        assert shard.all_succeeded() and not shard.all_succeeded(False)
        assert shard.run_on_main(lambda: 5) == 5
        with pytest.raises(InputError, match="bad line"):
            shard.run_on_main(fail)


def test_blocks_belong_to_one_process_each() -> None:
    shards = [Shard(rank, 3) for rank in range(3)]
    for block in range(10):
        assert [shard.owns(block) for shard in shards].count(True) == 1


def test_the_main_process_works_and_reports_errors() -> None:
    assert PretendShard(1, 2).run_on_main(fail) is None
    with pytest.raises(InputError, match="bad line"):
        PretendShard(0, 2).run_on_main(fail)
    with pytest.raises(StoppedByMainProcess):
        PretendShard(1, 2, "failed").run_on_main(lambda: 5)
