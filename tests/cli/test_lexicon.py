"""`calque lexicon`."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from calque.cli import run
from calque.io.dictionaries import read_dictionary
from calque.vectors.static import WordVectors

N_WORDS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Vectors in one space, where words k of both languages correspond, and a dictionary."""
    random = np.random.default_rng(0)
    matrix = random.standard_normal((N_WORDS, 12)).astype(np.float32)
    for language in ("en", "de"):
        noise = 0.05 * random.standard_normal(matrix.shape).astype(np.float32)
        words = [f"{language}{row}" for row in range(N_WORDS)]
        WordVectors(words, matrix + noise).save(tmp_path / f"{language}.vec")
    # Of 8 English words, one has no vector, and one has no translation with a vector.
    lines = ["en0 de0", "en1 de1", "en1 de2", "en2 de3", "en2 de2", "en3 de3", "en4 de4", "en5 de6"]
    lines += ["gnu de7", "en8 Gnu"]
    (tmp_path / "en-de.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def vectors(folder: Path) -> list[str]:
    return [str(folder / "en.vec"), str(folder / "de.vec")]


def test_a_dictionary_with_scores(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["lexicon", *vectors(folder)]) == 0
    captured = capsys.readouterr()
    rows = [line.split("\t") for line in captured.out.splitlines()]
    assert [row[:2] for row in rows] == [[f"en{k}", f"de{k}"] for k in range(N_WORDS)]
    assert all(0.1 < float(row[2]) < 1.5 for row in rows)
    start = "standard output: 40 entries, 40 of 40 words translated into 40; "
    assert captured.err.startswith(start)


@pytest.mark.parametrize("method", ["nn", "csls", "inverted-softmax"])
def test_files_in_muses_format(
    folder: Path, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "out.txt.gz"
    options = ["--method", method, "--best", "3", "--max-words", "20", "--format", "muse"]
    assert run(["lexicon", *vectors(folder), *options, "-o", str(out)]) == 0
    entries = list(read_dictionary(out))
    assert len(entries) == 60
    assert entries[::3] == [(f"en{k}", f"de{k}") for k in range(20)]
    assert gzip.decompress(out.read_bytes()).startswith(b"en0 de0\n")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "out.txt.gz: 60 entries, 20 of 20 words translated into 20; " in captured.err


def test_fewer_entries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (folder / "en.vec").open("a") as stream:
        stream.write("nothing" + " 0" * 12 + "\n" + "en0" + " 1" * 12 + "\n")
    text = (folder / "en.vec").read_text().replace("40 12", "42 12", 1)
    (folder / "en.vec").write_text(text)
    (folder / "en.vec.counts").unlink(missing_ok=True)
    options = ["--mutual", "--min-score", "0.9"]
    assert run(["lexicon", *vectors(folder), *options]) == 0
    captured = capsys.readouterr()
    scores = [float(line.split("\t")[2]) for line in captured.out.splitlines()]
    assert 0 < len(scores) < N_WORDS and min(scores) >= 0.9
    assert f"{len(scores)} entries, {len(scores)} of 40 words translated into 40" in captured.err
    assert "1 words with zero vectors left out, 1 repeated words left out" in captured.err


def test_words_left_out_of_an_evaluation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (folder / "de.vec").read_text().replace("40 12", "43 12", 1)
    again = "de0" + " 1" * 12 + "\nde1" + " 1" * 12 + "\n"
    (folder / "de.vec").write_text(text + again + "nothing" + " 0" * 12 + "\n")
    assert run(["lexicon", *vectors(folder), "--evaluate", str(folder / "en-de.txt")]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "en-de.txt, 1 words with zero vectors left out, 2 repeated words left out; " in line


def test_evaluation_in_both_directions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--evaluate", str(folder / "en-de.txt"), "--method", "inverted-softmax"]
    assert run(["lexicon", *vectors(folder), *options]) == 0
    captured = capsys.readouterr()
    rows = [line.replace("│", " ").split() for line in captured.out.splitlines()]
    found = {(row[0], row[1]): row[2:] for row in rows if row and row[0] in "→←" and len(row) == 8}
    methods = ("nn", "csls", "inverted-softmax")
    assert found.keys() == {(way, method) for way in "→←" for method in methods}
    for method in methods:
        # Correct: en0 to en4, of 8 words and 6 known ones. Backward: de0 to de4
        # (de2 and de3 by en2 and en3), of 8 words and 6 known ones.
        assert [found["→", method][k] for k in (0, 3)] == ["62.50", "83.33"]
        assert [found["←", method][k] for k in (0, 3)] == ["62.50", "83.33"]
    assert "→ 6 of 8 words known (75.0 %); 1 have no vector, 1 have no translation" in captured.out
    assert "← 6 of 8 words known (75.0 %); 1 have no vector, 1 have no translation" in captured.out
    assert captured.err.count("\n") == 1


def test_evaluation_beside_a_dictionary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.tsv"
    options = ["--evaluate", str(folder / "en-de.txt"), "--mutual", "-o", str(out)]
    assert run(["lexicon", *vectors(folder), *options]) == 0
    assert len(out.read_text().splitlines()) == N_WORDS
    assert "P@10" in capsys.readouterr().out
    # The written dictionary can be read again with its scores.
    assert run(["lexicon", *vectors(folder), "--evaluate", str(out)]) == 0
    assert "→ 40 of 40 words known (100.0 %)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--method", "faiss"], "there is no method 'faiss'"),
        (["--format", "xml"], "there is no format 'xml'"),
        (["--best", "0"], "best is 0"),
        (["--best", "2", "--mutual"], "best is 2, but with mutual"),
        (["--best", "41"], "de.vec: 41 translations are requested, but there are 40 words"),
        (["--neighbors", "41"], "41 neighbors are requested, but there are 40 words (choose 40"),
        (["--hub-words", "-1"], "hub_words is -1"),
        (["--hub-words", "9"], "10 neighbors are requested, but there are 9 words"),
        (["--max-words", "5"], "10 neighbors are requested, but there are 5 words"),
        (["--device", "quantum"], "device 'quantum' cannot be used"),
        (["--min-score", "nan"], "min_score is not a number"),
    ],
)
def test_invalid_options_write_no_file(
    folder: Path, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folder.iterdir())
    assert run(["lexicon", *vectors(folder), *options, "-o", str(folder / "out")]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err and captured.err.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_invalid_lines_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result is the same as without these lines."""
    gold, listed, out = folder / "en-de.txt", folder / "bad lines", folder / "out.tsv"
    arguments = ["lexicon", *vectors(folder), "-o", str(out), "--evaluate", str(gold)]
    assert run(arguments) == 0
    expected, table = out.read_bytes(), capsys.readouterr().out

    good = (folder / "de.vec").read_bytes().splitlines()
    bad = [b"three 1 2 3", b"caf\xe9 " + good[1].split(b" ", 1)[1]]
    (folder / "de.vec").write_bytes(b"\n".join([b"42 12", *good[1:3], *bad, *good[3:]]) + b"\n")
    gold.write_text(f"\nen0 de0 de1\n{gold.read_text()}")
    assert run(arguments) == 2
    assert "de.vec, line 4: the line has 3 numbers instead of 12" in capsys.readouterr().err
    assert run([*arguments, "--skip-bad", str(listed)]) == 0
    captured = capsys.readouterr()
    assert (out.read_bytes(), captured.out) == (expected, table)
    assert ", 4 invalid lines skipped; " in captured.err
    rows = [line.split("\t") for line in listed.read_text().splitlines()]
    assert [row[:2] for row in rows] == [
        ["4", f"{folder / 'de.vec'}: the line has 3 numbers instead of 12"],
        ["5", f"{folder / 'de.vec'}: invalid UTF-8 at byte 4"],
        ["1", f"{gold}: the line has 0 words instead of 2"],
        ["2", f"{gold}: the line has 3 words instead of 2"],
    ]
    assert (rows[0][2], rows[3][2]) == ("three 1 2 3", "en0 de0 de1")

    assert run([*arguments[:3], "--evaluate", str(gold), "--skip-bad", str(listed)]) == 0
    assert ", 4 invalid lines skipped; " in capsys.readouterr().err
    for other in (str(out), str(gold), vectors(folder)[0]):
        before = Path(other).read_bytes()
        assert run([*arguments, "--skip-bad", other]) == 2
        assert Path(other).read_bytes() == before


def test_invalid_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(arguments: list[str], *problems: str) -> None:
        assert run(["lexicon", *arguments]) == 2
        captured = capsys.readouterr()
        assert all(problem in captured.err for problem in problems), captured.err
        assert captured.out == "" and captured.err.count("\n") == 1

    en, de = vectors(folder)
    narrow = folder / "narrow.vec"
    narrow.write_text("2 3\na 1 2 3\nb 3 2 1\n")
    check([en, str(narrow)], "en.vec: the vectors have 12 dimensions", "narrow.vec have 3")
    check([en, str(folder / "gone.vec")], "gone.vec: no such file")
    for content, problem in (
        (b"", "odd.vec: the file is empty (use vectors in word2vec format)"),
        (b"Only text.\nNo numbers.\n", "odd.vec, line 1: the line is neither a header"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "odd.vec, line 1: the line is neither a header"),
        (b"5 2\na 1 2\n", "odd.vec: the header announces 5 words, but the file has 1"),
        (b"a 0 0\nb 0 0\n", "odd.vec: all vectors are zero"),
    ):
        (folder / "odd.vec").write_bytes(content)
        out = folder / "out.tsv"
        check([en, str(folder / "odd.vec"), "-o", str(out)], problem)
        check([str(folder / "odd.vec"), de, "-o", str(out)], problem)
        assert not out.exists()
    check([en, de, "-o", str(folder)], "is a directory (pass the path")
    check([en, de, "-o", en], "en.vec: this file is both read and written")
    check([en, de, "-o", str(folder / "no" / "out")], "out: no such file or directory")
    gold = folder / "en-de.txt"
    check(
        [de, en, "--evaluate", str(gold)],
        "0 entries have vectors, 8 if the columns",
        "source first",
    )
    check([en, de, "--evaluate", str(gold), "--mutual"], "--mutual is for a written dictionary")
    check([en, de, "--evaluate", str(gold), "--format", "muse"], "--format is for a written")
    words = [
        *gold.read_text().splitlines()[:1],
        "de1 en1",
        "de2 en2",
    ]  # one word is right by chance
    gold.write_text("\n".join(words) + "\n")
    check([en, de, "--evaluate", str(gold)], "1 entries have vectors, 2 if the columns are swapped")
    gold.write_text("en0 de0\nen1\n")
    check([en, de, "--evaluate", str(gold)], "en-de.txt, line 2")
    gold.write_text("")
    check([en, de, "--evaluate", str(gold)], "en-de.txt: the dictionary has no entries")
    gold.write_text("cat Katze\ndog Hund\n")
    check([en, de, "--evaluate", str(gold)], "en-de.txt: none of the 2 words has a vector")
    gold.unlink()
    check([en, de, "--evaluate", str(gold)], "en-de.txt: no such file")
