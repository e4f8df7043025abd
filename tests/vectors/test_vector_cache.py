import os
import time

import numpy as np
import pytest
import torch

from calque.errors import InputError
from calque.io.files import SkippedLines
from calque.vectors import static as vector_cache
from calque.vectors.static import read_vectors

TEXT = "3 2\na 1 2\nb 3 4\na 5 6\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.vec"
    path.write_text(TEXT)
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "vectors"


def names(folder) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def is_mapped(vectors) -> bool:
    return isinstance(vectors.matrix, np.memmap)


def test_the_second_reading_is_mapped(file, folder):
    first = read_vectors(file, cache=folder)
    assert not is_mapped(first)
    assert names(folder) == [".npy", ".words"]
    second = read_vectors(file, cache=folder)
    assert is_mapped(second)
    assert second.words == first.words == ["a", "b"]
    assert second.matrix.tolist() == first.matrix.tolist() == [[1, 2], [3, 4]]
    assert second.n_duplicates == first.n_duplicates == 1
    assert second.matrix.dtype == np.float32


def test_writing_to_a_mapped_matrix_leaves_the_file(file, folder):
    read_vectors(file, cache=folder)
    matrix = torch.from_numpy(read_vectors(file, cache=folder).matrix)  # no warning: writable
    matrix += 100
    assert read_vectors(file, cache=folder).matrix.tolist() == [[1, 2], [3, 4]]


def test_counts_are_read_anew(file, folder):
    for counts in ([5, 4], [7, 6]):
        file.with_name("a.vec.counts").write_text(f"a\t{counts[0]}\nb\t{counts[1]}\n")
        assert read_vectors(file, cache=folder).counts.tolist() == counts


@pytest.mark.parametrize("in_place", [True, False])
def test_a_changed_file_is_read_again_even_with_its_old_time_and_size(file, folder, in_place):
    read_vectors(file, cache=folder)
    status = file.stat()
    if not in_place:
        file.unlink()
    time.sleep(0.02)  # a file system's clock may tick so slowly
    file.write_text(TEXT.replace("3 4", "3 9"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    vectors = read_vectors(file, cache=folder)
    assert vectors.matrix.tolist() == [[1, 2], [3, 9]]
    assert names(folder) == [".npy", ".words"]  # and the old entry is gone
    assert is_mapped(read_vectors(file, cache=folder))


def test_a_file_that_changes_while_it_is_read_is_not_kept(file, folder, monkeypatch):
    original = vector_cache.CacheEntry.save

    def save(*arguments):
        time.sleep(0.02)
        file.write_text(TEXT + "c 7 8\n")
        original(*arguments)

    monkeypatch.setattr(vector_cache.CacheEntry, "save", save)
    read_vectors(file, cache=folder)
    assert not folder.exists()


def test_every_number_of_words_has_its_entry(file, folder):
    for max_words in (1, None, 1, None):
        vectors = read_vectors(file, cache=folder, max_words=max_words)
        assert vectors.words == ["a", "b"][:max_words]
        assert vectors.n_duplicates == (0 if max_words else 1)
    assert is_mapped(vectors)
    assert names(folder) == [".npy", ".npy", ".words", ".words"]


def test_links_lead_to_the_same_entry(file, folder):
    read_vectors(file, cache=folder)
    file.with_name("link.vec").symlink_to(file)
    assert is_mapped(read_vectors(file.with_name("link.vec"), cache=folder))


@pytest.mark.parametrize("suffix", [".npy", ".words"])
@pytest.mark.parametrize("damage", ["missing", "empty", "short", "other"])
def test_a_damaged_entry_is_made_again(file, folder, suffix, damage):
    read_vectors(file, cache=folder)
    (part,) = folder.glob(f"*{suffix}")
    data = part.read_bytes()
    changed = {"empty": b"", "short": data[:-4], "other": b"{}\nx\ny\nz"}
    if damage == "missing":
        part.unlink()
    else:
        part.write_bytes(changed[damage])
    vectors = read_vectors(file, cache=folder)
    assert (vectors.words, vectors.matrix.tolist()) == (["a", "b"], [[1, 2], [3, 4]])
    assert not is_mapped(vectors)
    assert is_mapped(read_vectors(file, cache=folder))


def test_a_pickle_is_not_executed(file, folder, tmp_path):
    read_vectors(file, cache=folder)
    (part,) = folder.glob("*.npy")

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    np.save(part, np.array([Trap()], dtype=object), allow_pickle=True)
    assert read_vectors(file, cache=folder).words == ["a", "b"]
    assert not (tmp_path / "trapped").exists()


def test_what_was_skipped_does_not_hide(file, folder):
    file.write_text("2 2\na 1 2\nbad\n")
    for _ in range(2):
        skipped = SkippedLines()
        assert read_vectors(file, cache=folder, skip_bad=skipped).words == ["a"]
        assert skipped.n_lines == 1
    with pytest.raises(InputError, match="line 3"):
        read_vectors(file, cache=folder)


def test_entries_of_files_that_are_gone_go_too(file, folder):
    other = file.with_name("b.vec")
    other.write_text(TEXT)
    read_vectors(file, cache=folder)
    file.unlink()
    left = folder / ".calque-12345678.partial"
    left.touch()
    os.utime(left, (0, 0))
    (folder / "mine.words").write_text("not an entry")
    read_vectors(other, cache=folder)
    assert names(folder) == [".npy", ".words", ".words"]
    assert (folder / "mine.words").exists()
    assert is_mapped(read_vectors(other, cache=folder))


def test_a_folder_that_cannot_be_written_is_no_trouble(file, tmp_path):
    (tmp_path / "cache").touch()
    for _ in range(2):
        assert read_vectors(file, cache=tmp_path / "cache" / "vectors").words == ["a", "b"]


def test_only_large_files_go_to_the_user_s_folder(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    read_vectors(file)
    assert not (tmp_path / "home").exists()
    monkeypatch.setattr(vector_cache, "MIN_BYTES", len(TEXT))
    read_vectors(file, cache=False)
    assert not (tmp_path / "home").exists()
    read_vectors(file)
    folder = tmp_path / "home" / "calque" / "vectors"
    assert names(folder) == [".npy", ".words"]
    assert folder.stat().st_mode & 0o077 == 0
    assert is_mapped(read_vectors(file))


def test_without_a_home_there_is_no_cache(file, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(vector_cache, "MIN_BYTES", 0)
    assert vector_cache.user_folder() is None
    assert read_vectors(file).words == ["a", "b"]
