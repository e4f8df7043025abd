"""Checksums: every changed byte of a file, and of the file that lists it, is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.checksums import check_files, describe_files, format_record, read_record

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(content=st.dictionaries(st.text(max_size=5), values), data=st.data())
def test_a_record_is_read_back_unless_a_byte_was_changed(
    content: dict[str, object], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content.pop("sha256", None)
    path = tmp_path_factory.getbasetemp() / "record.json"
    written = format_record(content).encode()
    path.write_bytes(written)
    assert read_record(path) == content
    position = data.draw(st.integers(0, len(written) - 1))
    changed = bytearray(written)
    changed[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(changed)
    with pytest.raises(InputError, match=r"record\.json: .*\(write it again\)$"):
        read_record(path, fix="write it again")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (Path.unlink, "the file is missing"),
        (lambda path: path.write_bytes(b"abcde"), "it has 5 bytes instead of 3"),
        (lambda path: path.write_bytes(b"abd"), "its checksum is wrong"),
    ],
)
def test_damaged_files_are_named(
    damage: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(b"abc")
    files = describe_files(tmp_path)
    check_files(tmp_path, files)
    damage(tmp_path / "second")
    with pytest.raises(InputError, match=rf"second: .*{problem} \(copy it\)"):
        check_files(tmp_path, files, fix="copy it")


@pytest.mark.parametrize("files", [{"../x": {}}, {"a": None}, {"a": {"bytes": "3"}}])
def test_wrong_lists_are_errors(files: dict[str, object], tmp_path: Path) -> None:
    for path in (tmp_path / "folder" / "a", tmp_path / "x"):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"abc")
    with pytest.raises(InputError, match=r"is missing|is damaged"):
        check_files(tmp_path / "folder", files)
