"""Files of tasks in the layout of XTREME, and treebanks."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.io.xtreme import find_treebanks, find_xtreme_files

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("place", [".", "xtreme", "xtreme/panx"])
def test_the_folder_or_one_above_it(place: str) -> None:
    files = find_xtreme_files(DATA / place, "panx", 2)
    assert files is not None
    assert sorted(files.train) == ["de", "en"]
    assert files.test_languages == ["de", "en", "zh"]
    assert files.test_files("zh") == (DATA / "xtreme" / "panx" / "dev-zh.tsv",)


def test_folders_of_other_sets_are_not_searched() -> None:
    assert find_xtreme_files(DATA / "xtreme" / "panx", "udpos", 2) is None


def test_tests_without_labels_are_counted_not_used(tmp_path: Path) -> None:
    (tmp_path / "dev-en.tsv").write_text("a\tO\n", encoding="utf-8")
    (tmp_path / "dev-de.tsv").write_text("a\tO\n", encoding="utf-8")
    (tmp_path / "test-en.tsv").write_text("a\n", encoding="utf-8")
    (tmp_path / "test-de.tsv.xz").write_bytes(lzma.compress(b"a\tO\n"))
    files = find_xtreme_files(tmp_path, "panx", 2)
    assert files is not None and files.n_unlabeled == 1
    assert files.test_files("en") == (tmp_path / "dev-en.tsv",)
    assert files.test_files("de") == (tmp_path / "test-de.tsv.xz",)


def test_translated_training_files(tmp_path: Path) -> None:
    (tmp_path / "translate-train").mkdir()
    (tmp_path / "train-en.tsv").touch()
    (tmp_path / "translate-train" / "en-de-translated.tsv").touch()
    (tmp_path / "translate-train" / "train-fr.tsv.gz").touch()
    files = find_xtreme_files(tmp_path, "xnli", 3)
    assert files is not None and sorted(files.train) == ["de", "en", "fr"]


@pytest.mark.parametrize("test", ["a\nb\n", "a\t\nb\t\n", "\n" * 6 + "a\n"])
def test_a_test_without_labels(tmp_path: Path, test: str) -> None:
    """With or without the tab before the missing label, the dev file is the test."""
    (tmp_path / "dev-de.tsv").write_text("a\tDET\n")
    (tmp_path / "test-de.tsv").write_text(test)
    files = find_xtreme_files(tmp_path, "udpos", 2)
    assert files is not None
    assert files.n_unlabeled == 1
    assert files.test_files("de") == (tmp_path / "dev-de.tsv",)


def test_two_files_for_one_language(tmp_path: Path) -> None:
    (tmp_path / "dev-en.tsv").touch()
    (tmp_path / "dev-en.tsv.xz").touch()
    with pytest.raises(InputError, match="is a second file for the same language"):
        find_xtreme_files(tmp_path, "xnli", 3)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        find_xtreme_files(tmp_path / "none", "xnli", 3)


def test_treebanks(tmp_path: Path) -> None:
    for name in ("en_ewt-ud-train", "en_gum-ud-train", "vi_vtb-ud-dev", "vi_vtb-ud-test"):
        (tmp_path / f"{name}.conllu.xz").touch()
    files = find_treebanks(tmp_path)
    assert files is not None
    assert len(files.train["en"]) == 2 and files.test_languages == ["vi"]
    assert files.test_files("vi") == (tmp_path / "vi_vtb-ud-test.conllu.xz",)


def test_treebanks_in_separate_folders(tmp_path: Path) -> None:
    for folder, name in (
        ("UD_English-EWT", "en_ewt-ud-train"),
        ("UD_German-GSD", "de_gsd-ud-test"),
    ):
        (tmp_path / "ud" / folder).mkdir(parents=True)
        (tmp_path / "ud" / folder / f"{name}.conllu").touch()
        (tmp_path / "ud" / folder / "LICENSE.txt").touch()
    for data in (tmp_path, tmp_path / "ud"):
        files = find_treebanks(data)
        assert files is not None
        assert (list(files.train), files.test_languages) == (["en"], ["de"])


def test_translations_of_a_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "udpos"
    for place in ("translate-train", "translate-test"):
        (folder / place).mkdir(parents=True)
    (folder / "train-en.tsv").write_text("a\tDET\n")
    for name in ("de.txt", "train-fr.txt.xz", "train-es.tsv", "README.md"):
        (folder / "translate-train" / name).write_text("x\tX\n")
    for name in ("de.txt", "test-fr.tsv.gz", "test-es-en-translated.tsv", "notes.md"):
        (folder / "translate-test" / name).write_text("x\tX\n")
    files = find_xtreme_files(tmp_path, "udpos", 2)
    assert files is not None
    assert sorted(files.untagged) == ["de", "fr"] and sorted(files.train) == ["en", "es"]
    names = {language: path.name for language, path in files.translated_tests.items()}
    assert names == {
        "de": "de.txt",
        "es": "test-es-en-translated.tsv",
        "fr": "test-fr.tsv.gz",
    }
    (folder / "translate-test" / "test-de.tsv").write_text("x\tX\n")
    with pytest.raises(InputError, match=r"test-de\.tsv is a second file"):
        find_xtreme_files(tmp_path, "udpos", 2)


def test_links_to_nowhere_and_folders_are_no_treebanks(tmp_path: Path) -> None:
    (tmp_path / "de_gsd-ud-dev.conllu").symlink_to(tmp_path / "nowhere")
    (tmp_path / "fr_gsd-ud-dev.conllu").mkdir()
    assert find_treebanks(tmp_path) is None
