"""Sharing work: alone here, with others under torchrun in tests/cli/test_align.py."""

from __future__ import annotations

import pytest

from calque.errors import InputError
from calque.io.outputs import Shard, StoppedByMain, join_shards


class PretendShard(Shard):
    """One of several processes; another may be in trouble."""

    def agree(self, is_fine: bool = True) -> bool:
        return is_fine and self.group != "trouble"


def refuse() -> None:
    raise InputError("bad line")


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with join_shards() as shard:
        assert (shard.rank, shard.n_ranks, shard.is_main) == (0, 1, True)
        assert shard.owns(0) and shard.owns(7)
        assert shard.agree() and not shard.agree(False)
        assert shard.run_on_main(lambda: 5) == 5
        with pytest.raises(InputError, match="bad line"):
            shard.run_on_main(refuse)


def test_blocks_belong_to_one_process_each() -> None:
    shards = [Shard(rank, 3) for rank in range(3)]
    for block in range(10):
        assert [shard.owns(block) for shard in shards].count(True) == 1


def test_the_main_process_works_and_speaks_for_all() -> None:
    assert PretendShard(1, 2).run_on_main(refuse) is None
    with pytest.raises(InputError, match="bad line"):
        PretendShard(0, 2).run_on_main(refuse)
    with pytest.raises(StoppedByMain):
        PretendShard(1, 2, "trouble").run_on_main(lambda: 5)
