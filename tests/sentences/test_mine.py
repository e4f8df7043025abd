"""The store of distinct sentences compared with plain Python lists."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calque.errors import InputError
from calque.sentences.mine import SentenceStore

# Some lines have characters that other readers treat as line ends.
LINES = st.lists(st.sampled_from(["", " ", "a", "a ", "b c", "Ü", "x\u2028y", "日本", "a\tb"]))


@given(LINES)
def test_each_sentence_once_in_order(lines: list[str]) -> None:
    with TemporaryDirectory() as name:
        file = Path(name) / "text"
        file.write_bytes("".join(f"{line}\n" for line in lines).encode())
        store = SentenceStore(file, Path(name) / "spool", ids=False)
        stripped = [line.strip() for line in lines]
        expected = list(dict.fromkeys(filter(None, stripped)))
        assert list(store) == expected
        assert [stripped[line] for line in store.lines] == expected
        assert store.n_lines == len(lines)
        assert store.n_empty == stripped.count("")
        assert len(store) + store.n_duplicates + store.n_empty == len(lines)
        assert store.find({"a", "b c", "absent"}) == {
            text: expected.index(text) for text in ("a", "b c") if text in expected
        }
        store.close()


def test_ids_of_repeated_sentences(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(
        "en-000000001\tYes.\nen-000000002\tNo.\nen-000000003\tYes.\nen-000000004\t\n"
    )
    store = SentenceStore(tmp_path / "text", tmp_path / "spool")
    assert store.ids  # inferred from the first line
    assert store[1] == ("en-000000002", "No.")
    assert store.find({"en-000000003", "en-000000002"}) == {"en-000000003": 0, "en-000000002": 1}
    assert (store.n_duplicates, store.n_empty) == (1, 1)
    store.close()


def test_the_digest_depends_on_the_text(tmp_path: Path) -> None:
    digests = []
    for text in ("a\nb\n", "a\nb\n", "a\nc\n"):
        (tmp_path / "text").write_text(text)
        digests.append(SentenceStore(tmp_path / "text", tmp_path / "spool").digest)
    assert digests[0] == digests[1] != digests[2]


def test_a_line_without_an_id(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1\tYes.\nNo.\n")
    with pytest.raises(InputError, match="line 2: the line has no id followed by a tab"):
        SentenceStore(tmp_path / "text", tmp_path / "spool", ids=True)
