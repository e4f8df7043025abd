"""Model folders: complete or absent; foreign and damaged folders are errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.outputs import (
    MANIFEST,
    read_array,
    read_model_folder,
    read_word_list,
    write_model_folder,
    write_word_list,
)

FORMAT = "a test 1"


def fill(draft: Path) -> None:
    np.save(draft / "numbers.npy", np.arange(5))
    (draft / "text").write_bytes(b"abc")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "some" / "model"
    write_model_folder(folder, FORMAT, {"kind": "é"}, fill)
    return folder


def test_round_trip(model: Path) -> None:
    manifest = read_model_folder(model, FORMAT)
    assert manifest["kind"] == "é"
    assert manifest["files"]["text"] == {
        "bytes": 3,
        # printf abc | sha256sum
        "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    }
    assert read_array(model / "numbers.npy").tolist() == [0, 1, 2, 3, 4]
    mapped = read_array(model / "numbers.npy", mapped=True)
    assert isinstance(mapped, np.memmap) and mapped.tolist() == [0, 1, 2, 3, 4]


def test_pickles_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        read_array(tmp_path / "bad.npy")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda m: (m / "text").unlink(), "text: the file is missing"),
        (
            lambda m: (m / "text").write_bytes(b"ab"),
            "text: the file is damaged: it has 2 bytes instead of 3",
        ),
        (
            lambda m: (m / "text").write_bytes(b"abd"),
            "text: the file is damaged: its checksum is wrong",
        ),
        (lambda m: (m / MANIFEST).unlink(), "has no manifest.json .*saved model"),
        (lambda m: (m / MANIFEST).write_text("{"), "not the manifest of a model"),
        (lambda m: (m / MANIFEST).write_text("[]"), "not the manifest of a model"),
        (lambda m: (m / MANIFEST).write_text('{"files": {"../x": {}}}'), "outside its folder"),
        (
            lambda m: (m / MANIFEST).write_text('{"files": {}}'),
            "holds another kind of model instead of a test",
        ),
    ],
)
def test_damaged_folders(model: Path, damage: object, problem: str) -> None:
    damage(model)  # type: ignore[operator]
    with pytest.raises(InputError, match=problem):
        read_model_folder(model, FORMAT)


def test_foreign_folders(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds a test 1 instead of a test 2"):
        read_model_folder(model, "a test 2")
    with pytest.raises(InputError, match="no such folder"):
        read_model_folder(tmp_path / "none", FORMAT)


def test_only_models_are_replaced(model: Path, tmp_path: Path) -> None:
    write_model_folder(model, FORMAT, {}, lambda draft: (draft / "new").write_bytes(b"1"))
    assert sorted(path.name for path in model.iterdir()) == [MANIFEST, "new"]
    empty = tmp_path / "empty"
    empty.mkdir()
    write_model_folder(empty, FORMAT, {}, fill)
    assert (empty / "text").exists()
    (model / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("mine")
    for place in (model, home, tmp_path / "file"):
        with pytest.raises(InputError, match="choose a new folder"):
            write_model_folder(place, FORMAT, {}, fill)
    with pytest.raises(InputError, match="choose a new folder"):
        write_model_folder(empty, "another format", {}, fill)
    assert (model / "notes.txt").read_text() == (home / "letter").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_old_model_survives_a_failure(model: Path, error: type[BaseException]) -> None:
    before = read_model_folder(model, FORMAT)

    def fail(draft: Path) -> None:
        fill(draft)
        raise error

    with pytest.raises(error):
        write_model_folder(model, FORMAT, {}, fail)
    assert read_model_folder(model, FORMAT) == before
    assert [path.name for path in model.parent.iterdir()] == ["model"]


def test_word_lists_hold_any_characters(tmp_path: Path) -> None:
    words = ["ja", "", "a b", "\n", "\r\n", '"', "\\n", "\u2028", "\ud800", "नमस्ते"]
    write_word_list(tmp_path / "words.json", words)
    assert read_word_list(tmp_path / "words.json") == words
    assert json.loads((tmp_path / "words.json").read_bytes().decode("utf-8", "replace"))[0] == "ja"
