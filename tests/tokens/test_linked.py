"""Bitext with links: reading, cleaning, errors and storage."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.toy_tokenizers import encode_words

from calque.errors import InputError
from calque.io.cleaning import CleaningReport, CleaningRules
from calque.io.links import read_links
from calque.tokens.linked import MAX_WORDS, encode_linked, pack_links, read_linked, unpack_links
from calque.tokens.words import WordEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LOOSE = CleaningRules(
    max_ratio=None, check_scripts=False, max_nonletters=None, drop_identical=False
)


def read(
    tmp_path: Path, text: str, links: str, rules: CleaningRules = LOOSE, **options: list[str]
) -> tuple[list[tuple[str, str, str]], CleaningReport]:
    (tmp_path / "en-de.text").write_text(text, encoding="utf-8")
    (tmp_path / "en-de.links").write_text(links, encoding="utf-8")
    report = CleaningReport()
    paths, beside = [tmp_path / "en-de.text"], tmp_path / "en-de.links"
    return list(read_linked(paths, beside, rules, report, ("en", "de"), **options)), report


def pack_one(line: str, n_src: int = 9, n_tgt: int = 9) -> list[tuple[int, int, int]]:
    packed = pack_links([line], np.array([n_src]), np.array([n_tgt]), "x.links", [7])
    return list(zip(*(part.tolist() for part in unpack_links(packed.ids)), strict=True))


def test_links_stay_with_their_pairs_when_some_are_dropped(tmp_path: Path) -> None:
    text = "a b ||| c d\n\u200e x ||| y\ne ||| f\na b ||| c d\ng  h ||| i\n"
    found, report = read(tmp_path, text, "0-1\n1-0\n0-0\n1-1\n1-0:0.5\n")
    assert found == [("a b", "c d", "1\t0-1"), ("e", "f", "3\t0-0"), ("g h", "i", "5\t1-0:0.5")]
    assert dict(report.dropped) == {"words changed by tidying": 1, "duplicate": 1}
    assert (report.n_read, report.n_kept) == (5, 3)


def test_words_are_kept_without_normalization(tmp_path: Path) -> None:
    rules = CleaningRules(**{**{s: getattr(LOOSE, s) for s in LOOSE.__slots__}, "normalize": False})
    found, report = read(tmp_path, "\u200e x ||| y\n", "1-0\n", rules)
    assert found == [("\u200e x", "y", "1\t1-0")]
    assert not report.dropped


def test_sentences_of_too_many_words_are_dropped_and_counted(tmp_path: Path) -> None:
    rules = CleaningRules(**{**{s: getattr(LOOSE, s) for s in LOOSE.__slots__}, "max_chars": None})
    long, longest = "a " * (MAX_WORDS + 1), "a " * MAX_WORDS
    found, report = read(
        tmp_path,
        f"{long}||| b\nb ||| {long}\n{longest}||| b\n",
        f"0-0\n0-0\n{MAX_WORDS - 1}-0\n",
        rules,
    )
    assert dict(report.dropped) == {"too many words": 2}
    assert [cell for *_, cell in found] == [f"3\t{MAX_WORDS - 1}-0"]
    assert pack_one(f"{MAX_WORDS - 1}-0", MAX_WORDS, 1) == [(MAX_WORDS - 1, 0, 255)]


def test_tags_choose_pairs_with_their_links(tmp_path: Path) -> None:
    text = "a\tb\tnews\nc\td\tbible\ne\tf\n"
    found, _ = read(
        tmp_path,
        text,
        "0-0:0.1\n0-0:0.2\n0-0:0.3\n",
        keep_tags=["bible", "news"],
        exclude_tags=["news"],
    )
    assert found == [("c", "d", "2\t0-0:0.2")]
    found, _ = read(tmp_path, text, "0-0:0.1\n0-0:0.2\n0-0:0.3\n", exclude_tags=["bible"])
    assert [cell for *_, cell in found] == ["1\t0-0:0.1", "3\t0-0:0.3"]


@pytest.mark.parametrize(
    ("text", "links", "message"),
    [
        (
            "a ||| b\n",
            "0-0\n0-0\n\n",
            r"links, line 2: the file has 3 lines of links, but .*text has 1 pairs",
        ),
        (
            "a ||| b\nc ||| d\n",
            "0-0\n",
            r"links, line 2: the file has 1 lines of links, but .*text has 2 pairs",
        ),
    ],
)
def test_files_of_different_length_raise(
    tmp_path: Path, text: str, links: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, text, links)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("0-0 1", "'1' is not a link"),
        ("0-0 1-", "'1-' is not a link"),
        ("0-0 0p0", "'0p0' is not a link"),
        ("0-0:0.5x", "'0-0:0.5x' is not a link"),
        ("0-0:", "'0-0:' is not a link"),
        ("0-0:-1", "the weight -1 of a link"),
        ("-1-0", "'-1-0' is not a link"),
        ("٣-0", "'٣-0' is not a link"),
        ("0-0 9-0", "the link 9-0 (counted from 0) is outside the pair, which has 9 and 9 words"),
        ("0-9", "the link 0-9 (counted from 0) is outside the pair, which has 9 and 9 words"),
        ("0-0:1.5", "the weight 1.5 of a link"),
    ],
)
def test_invalid_links_are_reported_with_their_line(line: str, problem: str) -> None:
    with pytest.raises(InputError) as error:
        pack_one(line)
    assert str(error.value).startswith(f"x.links, line 7: {problem}")


def test_the_reported_line_is_the_invalid_one() -> None:
    n_words = np.array([2, 1, 2])
    with pytest.raises(InputError, match=r"x\.links, line 30: the link 1-0"):
        pack_links(["1-1", "1-0", "0-0"], n_words, n_words, "x.links", [10, 30, 50])


def test_weights_are_stored_in_255_steps() -> None:
    line = "0-0 0-1:1 0-2:0.5 0-3:0.001 0-4:0 0-5:1.0000 0-6:0.2"
    assert [level for *_, level in pack_one(line)] == [255, 255, 128, 1, 1, 255, 51]
    assert pack_one("") == pack_one("  ") == []
    assert pack_one("2-1 0-1:0.2 2-1:0.5 0-1:0.4") == [(0, 1, 102), (2, 1, 255)]


links_of_a_pair = st.dictionaries(
    st.tuples(st.integers(0, 30), st.integers(0, 30)), st.integers(1, 255), max_size=12
)


@given(st.lists(links_of_a_pair, min_size=1, max_size=6), st.booleans())
def test_links_agree_with_the_reader_of_links(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[dict[tuple[int, int], int]],
    weighted: bool,
) -> None:
    lines = [
        " ".join(
            f"{i}-{j}" + (f":{level / 255:.4f}" if weighted else "")
            for (i, j), level in pair.items()
        )
        for pair in pairs
    ]
    file = tmp_path_factory.mktemp("links") / "x.links"
    file.write_text("".join(f"{line}\n" for line in lines))
    expected = read_links(file)
    n_words = np.full(len(lines), 31)
    packed = pack_links(lines, n_words, n_words, file, list(range(1, len(lines) + 1)))
    src, tgt, levels = unpack_links(packed.ids.astype(np.int64))
    assert np.repeat(np.arange(len(lines)), packed.lengths).tolist() == expected.pairs.tolist()
    assert src.tolist() == expected.src.tolist()
    assert tgt.tolist() == expected.tgt.tolist()
    assert levels / 255 == pytest.approx(expected.scores, abs=1e-4)


def test_subwords_agree_with_the_tokenizer(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    block = [("Das Gerücht könnte", "The rumour", "1\t0-0 1-1"), ("wahr \u200d sein", "x", "2\t")]
    src, tgt, src_words, tgt_words, links = encode_linked(WordEncoder(tiny_tokenizer), block, "x")
    for side, (ids, words) in enumerate([(src, src_words), (tgt, tgt_words)]):
        expected = encode_words(tiny_tokenizer, [example[side].split() for example in block])
        assert ids.ids.tolist() == [token for one in expected for token in one.ids.tolist()]
        assert ids.lengths.tolist() == [len(one.ids) for one in expected]
        counts = [np.bincount(one.words, minlength=one.n_words).tolist() for one in expected]
        assert words.ids.tolist() == [count for one in counts for count in one]
        assert words.lengths.tolist() == [one.n_words for one in expected]
    assert src_words.ids.tolist()[-2] == 0  # a word the tokenizer takes for nothing
    assert links.lengths.tolist() == [2, 0]
