"""A journal says which blocks are safe, whatever a kill has left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.outputs import JournaledFile, Record, journal_of, read_records

BLOCKS = [b"first\n", b"", b"third block\n"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = JournaledFile(tmp_path / "part")
    for number, content in enumerate(BLOCKS):
        file.append(3 * number, content, f"digest {number}", (number, 10))
    file.close()
    return tmp_path / "part"


def reopen(path: Path) -> Record | None:
    file = JournaledFile(path)
    file.close()
    return file.last


def test_blocks_and_records(path: Path) -> None:
    assert path.read_bytes() == b"".join(BLOCKS)
    assert list(read_records(path)) == [
        Record(0, 6, "digest 0", (0, 10)),
        Record(3, 6, "digest 1", (1, 10)),
        Record(6, 18, "digest 2", (2, 10)),
    ]
    assert reopen(path) == Record(6, 18, "digest 2", (2, 10))


def test_every_cut_of_the_journal_is_recovered(path: Path) -> None:
    journal, data = journal_of(path).read_bytes(), path.read_bytes()
    ends = [len(b"".join(journal.splitlines(True)[:n])) for n in range(4)]
    for length in range(len(journal) + 1):
        journal_of(path).write_bytes(journal[:length])
        path.write_bytes(data + b"what was being written")
        last = reopen(path)
        n_whole = sum(end <= length for end in ends) - 1
        assert (last.block if last else None) == [None, 0, 3, 6][n_whole]
        assert path.read_bytes() == b"".join(BLOCKS[:n_whole])
        assert journal_of(path).read_bytes() == journal[: ends[n_whole]]


def test_a_block_that_never_reached_the_disk_is_forgotten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:10])
    assert reopen(path) == Record(3, 6, "digest 1", (1, 10))
    assert path.read_bytes() == b"first\n"


def test_going_on_after_recovery(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"torn")
    file = JournaledFile(path)
    file.append(9, b"fourth\n", "digest 3", (3, 10))
    file.close()
    assert path.read_bytes() == b"".join(BLOCKS) + b"fourth\n"
    assert [record.end for record in read_records(path)] == [6, 6, 18, 25]


def test_strange_journals_count_for_nothing(path: Path) -> None:
    for content in (b"5\n", b"null\n", b"[]\n", b'{"a": 1}\n', b"\xff\n"):
        journal_of(path).write_bytes(content)
        assert list(read_records(path)) == []


def test_clearing(path: Path) -> None:
    file = JournaledFile(path)
    file.clear()
    file.append(0, b"new\n", "d", ())
    file.close()
    assert path.read_bytes() == b"new\n"
    assert list(read_records(path)) == [Record(0, 4, "d", ())]


def test_only_one_process_at_a_time(path: Path) -> None:
    file = JournaledFile(path)
    with pytest.raises(InputError, match="part: another process is writing it"):
        JournaledFile(path)
    file.close()
    assert reopen(path) is not None
