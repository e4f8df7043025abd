"""Bitext in three formats, sentences, and the errors of bad lines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from calque.errors import InputError
from calque.io.bitext import infer_languages, read_bitext, read_sentences, write_bitext
from calque.io.files import SkippedLines
from calque.types import SentencePair

SAMPLE = Path(__file__).parent.parent / "data" / "en-de.tsv"


@pytest.fixture
def place(tmp_path):
    def write(text: str | bytes, name: str = "bitext.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def read_error(*args, **options) -> InputError:
    with pytest.raises(InputError) as caught:
        list(read_bitext(*args, **options))
    return caught.value


def test_tsv_with_tags():
    pairs = list(read_bitext(SAMPLE))
    assert len(pairs) == 29
    assert pairs[0] == SentencePair(
        "Your windscreen is icy.", "Eure Windschutzscheibe ist vereist.", "tatoeba"
    )


def test_columns_of_a_tsv_line(place):
    path = place("a\tb\nc\td\t\ne\tf\ttag\tmore\tcolumns\n\tonly\nonly\t\n")
    assert list(read_bitext(path)) == [
        SentencePair("a", "b"),
        SentencePair("c", "d"),
        SentencePair("e", "f", "tag"),
        SentencePair("", "only"),
        SentencePair("only", ""),
    ]


def test_pipes(place):
    path = place("a b ||| c d\n||| e\nf |||\n |||  \ng|||h\n")
    assert list(read_bitext(path)) == [
        SentencePair("a b", "c d"),
        SentencePair("", "e"),
        SentencePair("f", ""),
        SentencePair("", ""),
        SentencePair("g", "h"),
    ]


def test_moses_files_keep_empty_lines(place):
    files = (place("a\n\nc\n", "x.en"), place("A\nB\n\n", "x.de"))
    expected = [SentencePair("a", "A"), SentencePair("", "B"), SentencePair("c", "")]
    assert list(read_bitext(files)) == list(read_bitext(files, "moses")) == expected


def test_a_tab_takes_precedence_over_pipes(place):
    path = place("the ||| sign\tdas Zeichen |||\n")
    assert list(read_bitext(path)) == [SentencePair("the ||| sign", "das Zeichen |||")]
    assert list(read_bitext(place("a\tb ||| c\n"), "pipes")) == [SentencePair("a\tb", "c")]


def test_format_is_inferred_after_bad_lines(place):
    path = place(b"bad \xff\n\nnothing here\na ||| b\n")
    skipped = SkippedLines()
    assert list(read_bitext(path, skip_bad=skipped)) == [SentencePair("a", "b")]
    assert skipped.n_lines == 3


def test_an_empty_file_holds_no_pairs(place):
    assert list(read_bitext(place(""))) == []


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("a\tb\nno separator\n", 2, "the line has no tab"),
        ("a\tb\n\nc\td\n", 2, "the line has no tab"),
        ("no separator\na\tb\n", 1, "the line has no tab"),
        ("no separator\n", 1, "the line has no tab"),
        ("a\tb\nc ||| d\n", 2, "the line has no tab"),
        ("a ||| b\nc\td\n", 2, "the line has 0 separators '|||' instead of 1"),
        ("a ||| b\nc d\n", 2, "the line has 0 separators '|||' instead of 1"),
        ("a ||| b\n\n", 2, "the line has 0 separators '|||' instead of 1"),
        ("a ||| b\nc ||| d ||| e\n", 2, "the line has 2 separators '|||' instead of 1"),
        ("a\tb\nc\0\td\n", 2, "the line contains a NUL byte"),
        ("\0\n", 1, "the line contains a NUL byte"),
        (b"a\tb\n\xff\td\n", 2, "invalid UTF-8 at byte 1"),
    ],
)
def test_bad_lines(place, text, line, problem):
    path = place(text)
    error = read_error(path)
    assert (error.file, error.line, error.problem) == (str(path), line, problem)
    assert error.fix


def test_bad_lines_can_be_skipped(place):
    path = place(b"a\tb\nbroken\n\n\xff\tx\nc\td\n")
    skipped = []
    pairs = list(read_bitext(path, skip_bad=lambda *line: skipped.append(line)))
    assert pairs == [SentencePair("a", "b"), SentencePair("c", "d")]
    assert skipped == [
        (2, "the line has no tab", "broken"),
        (3, "the line has no tab", ""),
        (4, "invalid UTF-8 at byte 1", "\\xff\tx"),
    ]


def test_a_bad_moses_line_drops_its_partner(place):
    src, tgt = place(b"a\n\xff\nc\nd\n", "x.en"), place("A\nB\nC\0\nD\n", "x.de")
    error = read_error((src, tgt))
    assert (error.file, error.line) == (str(src), 2)
    skipped = SkippedLines()
    pairs = list(read_bitext((src, tgt), skip_bad=skipped))
    assert pairs == [SentencePair("a", "A"), SentencePair("d", "D")]
    assert skipped.n_lines == 2


@pytest.mark.parametrize(("n_src", "n_tgt"), [(3, 5), (5, 3), (0, 1), (4, 3)])
@pytest.mark.parametrize("skip_bad", [None, SkippedLines()])
def test_unequal_files(place, n_src, n_tgt, skip_bad):
    src, tgt = place("s\n" * n_src, "x.en"), place("t\n" * n_tgt, "x.de")
    error = read_error((src, tgt), skip_bad=skip_bad)
    assert error.problem == f"the file has {n_src} lines, but {tgt} has {n_tgt}"
    assert error.file == str(src)
    assert f"line {min(n_src, n_tgt) + 1} has no counterpart" in error.fix


def test_missing_files(tmp_path):
    assert read_error(tmp_path / "absent.tsv").file == str(tmp_path / "absent.tsv")
    assert read_error((SAMPLE, tmp_path / "absent.de")).file == str(tmp_path / "absent.de")


@pytest.mark.parametrize(
    ("paths", "format"),
    [
        ((), "auto"),
        (("a", "b", "c"), "auto"),
        (("a", "b"), "tsv"),
        ("a", "moses"),
        ("a", "xml"),
        (("-", "-"), "auto"),
    ],
)
def test_invalid_arguments(paths, format):
    with pytest.raises(InputError):
        read_bitext(paths, format)


def test_tags_select_pairs(place):
    path = place("a\t1\tx\nb\t2\ty\nc\t3\n")
    srcs = lambda **tags: [pair.src for pair in read_bitext(path, **tags)]  # noqa: E731
    assert srcs(exclude_tags=["x"]) == ["b", "c"]
    assert srcs(keep_tags=["x"]) == ["a"]
    assert srcs(keep_tags=["x", "y"], exclude_tags={"y"}) == ["a"]
    assert srcs(keep_tags=[]) == []
    with pytest.raises(InputError, match="pass a list"):
        srcs(exclude_tags="xy")


SIDES = st.text(st.characters(exclude_characters="\n\r\0\t\ufeff|", codec="utf-8"))
PAIRS = st.lists(st.builds(SentencePair, SIDES, SIDES, st.none() | SIDES.filter(bool)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(pairs=PAIRS)
def test_round_trip_of_tsv(tmp_path, pairs):
    path = tmp_path / "en-de.tsv.gz"
    assert write_bitext(path, pairs) == len(pairs)
    assert list(read_bitext(path)) == pairs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(pairs=PAIRS)
def test_round_trip_of_moses_files(tmp_path, pairs):
    files = (tmp_path / "x.en", tmp_path / "x.de.zst")
    assert write_bitext(files, pairs) == len(pairs)
    assert list(read_bitext(files)) == [SentencePair(pair.src, pair.tgt) for pair in pairs]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(pairs=PAIRS)
def test_round_trip_of_pipes_strips_outer_spaces(tmp_path, pairs):
    path = tmp_path / "en-de.text"
    assert write_bitext(path, pairs, "pipes") == len(pairs)
    expected = [SentencePair(pair.src.strip(" "), pair.tgt.strip(" ")) for pair in pairs]
    assert list(read_bitext(path)) == expected


@pytest.mark.parametrize(
    ("format", "src"),
    [("tsv", "a\tb"), ("tsv", "a\nb"), ("tsv", "a\0"), ("tsv", "a\r"), ("pipes", "a ||| b")],
)
def test_pairs_that_cannot_be_written(tmp_path, format, src):
    pairs = [SentencePair("fine", "fein"), SentencePair(src, "x")]
    with pytest.raises(InputError, match="pair 2"):
        write_bitext(tmp_path / "out", pairs, format)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("paths", "languages"),
    [
        ("en-de.tsv.xz", ("en", "de")),
        ("some/where/hansards.en-fr.tsv.xz", ("en", "fr")),
        (Path("tatoeba.xho-eng.tsv"), ("xho", "eng")),
        ("en-zh_Hans.tsv", ("en", "zh_Hans")),
        (["corpus.en", "corpus.de"], ("en", "de")),
        (["train.en.gz", "train.pt_BR.gz"], ("en", "pt_BR")),
        ("bitext.tsv", None),
        ("en_ewt-ud-dev.conllu", None),
        (["a.txt", "b.txt"], None),
        (["news.source", "news.target"], None),
        ("-", None),
    ],
)
def test_languages_from_file_names(paths, languages):
    assert infer_languages(paths) == languages


def test_sentences_without_blank_lines(place):
    path = place(b"\na\nb\n\n \t\nc\n\xff\nd")
    with pytest.raises(InputError, match="line 7"):
        list(read_sentences(path))
    skipped = SkippedLines()
    assert list(read_sentences(path, skipped)) == ["a", "b", "c", "d"]
    assert skipped.n_lines == 1
