"""JSON and NumPy files from outside: as json and numpy read them, or an InputError."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib import format

from calque.errors import InputError
from calque.io import structured
from calque.io.structured import parse_json, read_archive, read_array, read_document, read_json

ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(6, dtype="<f4").reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=">i8").reshape(2, 3)),
    np.zeros((0, 3), dtype=np.float32),
    np.array(2.5),
    np.array(["a", "été"]),
    np.array([True, False]),
]

values = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text() | st.integers(-9, 10**19),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(values)
def test_json_is_parsed_as_by_json(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False).encode()):
        assert parse_json(text, file="a") == json.loads(text) == value
    assert parse_json(b"\xef\xbb\xbf[1]", file="a") == [1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not valid JSON: Expecting value"),
        ('{"a": 1', "not valid JSON: Expecting ',' delimiter"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ("1" * 10_000, "a number of 10000 digits"),
        (b'"\xff"', "not valid UTF-8"),
        ('"\\ud800"', "not valid UTF-8"),
        ('{"\\uDc00": 1}', "not valid UTF-8"),
    ],
)
def test_invalid_json(text: str | bytes, problem: str) -> None:
    with pytest.raises(
        InputError, match=rf"a\.jsonl, line 7: .*{problem}.* \(use JSON\)"
    ) as caught:
        parse_json(text, file="a.jsonl", line=7, fix="use JSON")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_escaped_pairs_are_characters() -> None:
    assert parse_json('"\\ud83d\\ude00"', file="a") == "😀"


def test_json_files(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null]}')
    assert read_json(path, dict) == {"a": [1, 2.5, None]}
    with pytest.raises(InputError, match=r"a\.json: the file does not hold a JSON list \(fix\)"):
        read_json(path, list, fix="fix")
    for missing in (tmp_path, tmp_path / "absent", path / "below"):
        with pytest.raises(InputError, match=rf"{missing}: .* \(fix\)"):
            read_json(missing, dict, fix="fix")


def test_documents_have_a_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "MAX_DOCUMENT_BYTES", 1000)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b" " * 998 + b"[]"))
    assert len(read_document(tmp_path / "a.gz")) == 1000
    (tmp_path / "b.gz").write_bytes(gzip.compress(b" " * (64 << 20)))
    with pytest.raises(InputError, match=r"b\.gz: the file is larger than 1,000 bytes"):
        read_json(tmp_path / "b.gz", list)
    with pytest.raises(InputError, match="/dev/zero: the file is larger"):
        read_document("/dev/zero")


@pytest.mark.parametrize("array", ARRAYS, ids=str)
@pytest.mark.parametrize("mapped", [False, True])
def test_arrays_are_read_as_by_numpy(
    tmp_path: Path, array: np.ndarray[Any, Any], mapped: bool
) -> None:
    np.save(tmp_path / "a.npy", array)
    found, expected = read_array(tmp_path / "a.npy", mapped=mapped), np.load(tmp_path / "a.npy")
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.flags.f_contiguous == expected.flags.f_contiguous
    assert found.tolist() == expected.tolist()
    assert found.flags.writeable is not mapped


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_are_read_as_by_numpy(tmp_path: Path, save: Any) -> None:
    save(tmp_path / "a.npz", *ARRAYS, **{"named/é": ARRAYS[0]})
    found = read_archive(tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz") as expected:
        assert list(found) == list(expected)
        for name, array in expected.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tolist() == array.tolist()
            assert found[name].flags.writeable


def npy(shape: tuple[int, ...], data: bytes = b"", descr: str = "<f4") -> bytes:
    """Return a .npy file with any shape in its header."""
    stream = io.BytesIO()
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    format.write_array_header_1_0(stream, header)
    return stream.getvalue() + data


def npz(content: bytes, **options: Any) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", **options) as archive:
        archive.writestr("a.npy", content)
    return stream.getvalue()


DAMAGED = [
    b"",
    b"\x93NUMPY",
    b"text",
    npy((2, 3), bytes(20)),
    npy((10**9, 10**9)),
    npy((2**62, 2**62)),
    npy((-1, 4), bytes(16)),
    npy((1,), bytes(8), "|O"),
    npy((10**8,), bytes(8), "|V0"),
    npy((2,), bytes(8)).replace(b"shape", b"shapd"),
    npy((2,), bytes(8)).replace(b"'<f4'", b"('<f4"),
    npy((2,), bytes(8)).replace(b"(2,)", b"2+++"),
    npy((2,), bytes(8)).replace(b"'descr'", b"[[[[[[["),
]


@pytest.mark.parametrize("content", [*DAMAGED, npz(npy((1,), bytes(4)))], ids=range(14))
def test_damaged_arrays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    for mapped in (False, True):
        with pytest.raises(InputError, match=r"a\.npy: this is not a valid .npy file: .* \(fix\)"):
            read_array(path, mapped=mapped, fix="fix")


@pytest.mark.parametrize("content", [b"", b"PK", *map(npz, DAMAGED)], ids=range(15))
def test_damaged_archives(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.npz: this is not a valid .npz file: .* \(fix\)"):
        read_archive(path, fix="fix")


def test_an_archive_is_not_decompressed_if_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(npz(npy((1000,), bytes(4000)), compression=zipfile.ZIP_DEFLATED))
    monkeypatch.setattr(structured, "MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    with pytest.raises(InputError, match=r"a\.npz: .* it decompresses to 4,128 bytes"):
        read_archive(path)


def test_missing_files(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        for read in (read_array, read_archive):
            with pytest.raises(InputError, match=rf"{path}: .* \(fix\)"):
                read(path, fix="fix")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_random_damage_never_raises_anything_else(tmp_path: Path, compression: int) -> None:
    generator = np.random.default_rng(compression)
    array = npy((3, 4), generator.bytes(48))
    for content, read in ((array, read_array), (npz(array, compression=compression), read_archive)):
        for number in range(400):
            damaged = bytearray(content)
            for _ in range(1 + number % 3):
                damaged[generator.integers(len(damaged))] = generator.integers(256)
            path = tmp_path / "damaged"
            path.write_bytes(
                damaged[: generator.integers(len(damaged)) if number % 5 == 0 else None]
            )
            try:
                read(path)
            except InputError:
                continue
