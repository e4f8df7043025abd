"""Model folders: complete or absent; foreign and damaged folders are errors."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.outputs import (
    MANIFEST,
    open_draft,
    read_model_folder,
    read_word_list,
    write_folder,
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
        (lambda m: (m / MANIFEST).write_text("{"), "this is not valid JSON"),
        (lambda m: (m / MANIFEST).write_text("[]"), "does not hold a JSON object"),
        (lambda m: (m / MANIFEST).write_text("{}"), "not the manifest of a model"),
        (lambda m: (m / MANIFEST).write_text('{"files": ["text"]}'), "not the manifest"),
        (
            lambda m: (m / MANIFEST).write_text(
                f'{{"format": "{FORMAT}", "files": {{"text": 3}}}}'
            ),
            "text: the file is damaged: its checksum is wrong",
        ),
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


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"7", b"[" * 100_000])
def test_damaged_word_lists(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "words.json").write_bytes(content)
    with pytest.raises(InputError, match=r"words\.json: the file is not a list of words"):
        read_word_list(tmp_path / "words.json")


# Folders in general.


def test_a_folder_is_replaced_at_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "v1.5"
    for name in ("old", "new"):

        def write(draft: Path, name: str = name) -> None:
            assert not folder.exists() or (folder / "old").exists()
            (draft / name).touch()

        write_folder(folder, write)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["v1.5"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        (draft / "inner").mkdir(mode=0o700)
        for path in (draft / "file", draft / "inner" / "file"):
            path.touch(mode=0o600)  # as safetensors and tempfile do

    write_folder(tmp_path / "written", write)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").touch()
    for name in ("", "inner"):
        assert (tmp_path / "written" / name).stat().st_mode == plain.stat().st_mode
        file = tmp_path / "written" / name / "file"
        assert file.stat().st_mode == (plain / "file").stat().st_mode


def test_two_writers_of_a_folder(tmp_path: Path) -> None:
    def write_again(draft: Path) -> None:
        with pytest.raises(InputError, match=r"folder: process \d+ on .* is writing here"):
            write_folder(tmp_path / "folder", fill)
        write_folder(tmp_path / "folder.2", fill)  # another name is free, and leaves this one
        fill(draft)

    write_folder(tmp_path / "folder", write_again)
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "folder.2"}


def test_a_full_disk_names_the_folder(tmp_path: Path) -> None:
    def fail(draft: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match=r"model: .*No space left on device \(free some space or"):
        write_folder(tmp_path / "model", fail)
    with pytest.raises(InputError, match=r"\(try again\)"):
        write_folder(tmp_path / "model", fail, fix="try again")
    assert not list(tmp_path.iterdir())


def test_a_folder_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"file/model: .*\(choose another path\)"):
        write_folder(tmp_path / "file" / "model", fill)


def test_files_of_a_draft_are_moved_by_the_caller(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with open_draft(folder) as draft:
        (draft / "a").write_text("1")
        (draft / "b").write_text("2")
        (draft / "a").rename(folder / "a")
        with pytest.raises(InputError, match=f"process {os.getpid()} on .* is writing here"):
            open_draft(folder).__enter__()
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_a_draft_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    with open_draft(tmp_path) as draft:
        name = draft.name
    (tmp_path / name).mkdir()
    (tmp_path / name / "half").touch()
    with open_draft(tmp_path) as draft:
        assert list(draft.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_new_folder_without_files_is_removed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the input is empty"), open_draft(tmp_path / "new"):
        raise InputError("the input is empty")
    assert list(tmp_path.iterdir()) == []
