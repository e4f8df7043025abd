"""`calque map`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from calque.cli import run
from calque.errors import InputError
from calque.vectors.mapping import name_languages
from calque.vectors.static import WordVectors

N_WORDS, HIDDEN = 300, 12


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Vectors of three languages, and dictionaries with English in one order or the other."""
    common = draw(N_WORDS, HIDDEN, seed=0) * torch.linspace(2, 0.5, HIDDEN)
    words = {}
    for number, language in enumerate(("en", "de", "fr")):
        turn, _ = torch.linalg.qr(draw(HIDDEN, HIDDEN, seed=number + 1))
        words[language] = [f"{language}{i}" for i in range(N_WORDS)]
        matrix = (common @ turn + 0.1 * draw(N_WORDS, HIDDEN, seed=number + 9)).numpy()
        vectors = WordVectors(words[language], matrix.astype(np.float32))
        vectors.save(tmp_path / f"{language}.vec")
    for language in ("de", "fr"):
        pairs = list(zip(words["en"], words[language], strict=True))
        (tmp_path / f"en-{language}.train.txt").write_text(lines(pairs[:150]))
        turned = [(b, a) for a, b in pairs[150:]]
        (tmp_path / f"{language}-en.dev.txt").write_text(lines(turned))
    return tmp_path


def lines(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{a} {b}\n" for a, b in pairs)


def call(folder: Path, *more: str) -> int:
    files = [str(folder / f"{language}.vec") for language in ("en", "de", "fr")]
    return run(["map", *files, "-o", str(folder / "mapped"), "--device", "cpu", *more])


def precision(src: Path, tgt: Path) -> float:
    rows = [torch.from_numpy(WordVectors.load(path, cache=False).matrix) for path in (src, tgt)]
    rows = [torch.nn.functional.normalize(each) for each in rows]
    found = (rows[0] @ rows[1].T).argmax(dim=1)
    return float((found == torch.arange(N_WORDS)).float().mean())


def test_three_languages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, dev = (
        str(folder / "{pivot}-{language}.train.txt"),
        str(folder / "{language}-{pivot}.dev.txt"),
    )
    assert call(folder, "--pivot", "en", "--dictionary", train, "--dev", dev) == 0
    mapped = folder / "mapped"
    names = {path.name for path in mapped.iterdir()}
    assert names == {"en.vec", "de.vec", "fr.vec", "maps.safetensors", "report.json"}
    assert precision(mapped / "de.vec", mapped / "fr.vec") > 0.95
    report = json.loads((mapped / "report.json").read_text())
    assert (report["pivot"], report["space"]) == ("en", "joint")
    chosen = {each["language"]: each["chosen"] for each in report["languages"]}
    assert chosen == {"en": "pivot", "de": "supervised", "fr": "supervised"}
    assert report["languages"][1]["n_dev"] == 150
    said = capsys.readouterr()
    assert "supervised" in said.out and "unaligned" in said.out
    assert "mapped: 3 languages, joint space" in said.err


def test_without_a_dictionary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(folder / "en.vec"), f"deutsch={folder / 'de.vec'}"]
    options = [
        "--cutoff",
        "100",
        "--space",
        "pivot",
        "--seed",
        "3",
        "--binary",
        "--max-words",
        "200",
    ]
    out = folder / "two"
    assert run(["map", *files, "-o", str(out), *options]) == 0
    assert len(WordVectors.load(out / "deutsch.bin", cache=False)) == 200
    assert "no development dictionary to compare" in capsys.readouterr().out


def test_several_methods(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, dev = str(folder / "en-{language}.train.txt"), str(folder / "{language}-en.dev.txt")
    methods = "procrustes,refine,rcsls"
    assert call(folder, "--method", methods, "--dictionary", train, "--dev", dev) == 0
    report = json.loads((folder / "mapped" / "report.json").read_text())
    assert report["space"] == "pivot"
    tried = [trial["method"] for trial in report["languages"][2]["trials"]]
    assert tried == ["unaligned", "procrustes", "refine", "rcsls"]


def test_a_language_without_a_development_dictionary(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "fr-en.dev.txt").unlink()
    train, dev = str(folder / "en-{language}.train.txt"), str(folder / "{language}-en.dev.txt")
    assert call(folder, "--dictionary", train, "--dev", dev) == 0
    report = json.loads((folder / "mapped" / "report.json").read_text())
    reasons = [each["reason"] for each in report["languages"]]
    assert reasons[1].startswith("P@1 ")
    assert reasons[2] == "no development dictionary to compare by"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--pivot", "es"], "no vectors of the pivot 'es' (choose from: en de fr)"),
        (["--method", "supervised"], "supervised needs a dictionary (add --dictionary)"),
        (["--method", "magic"], "no method 'magic' (choose from: supervised,"),
        (["--space", "outer"], "no space 'outer'"),
        (["--device", "toaster"], "device 'toaster'"),
        (["--dictionary", "HERE/en-de.train.txt"], "--dictionary names one file for 2 languages"),
        (["--dev", "HERE/{language}.nothing"], "--dev: there is no such file for any language"),
        (["--seed", "-1"], "the seed is -1 (choose 0 or more"),
        (
            ["--method", "identical", "--dictionary", "HERE/en-{language}.train.txt"],
            "identical does not use the dictionary (drop --dictionary, pass it as --dev",
        ),
        (
            [
                "--method",
                "rcsls",
                "--space",
                "joint",
                "--dictionary",
                "HERE/en-{language}.train.txt",
            ],
            "rcsls leaves the pivot unchanged",
        ),
    ],
)
def test_invalid_options(
    folder: Path, options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [option.replace("HERE", str(folder)) for option in options]
    assert call(folder, *options) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert len(said.splitlines()) == 1
    assert not (folder / "mapped").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "xx.vec: no such file or directory (check the path)"),
        (b"", "xx.vec: the file is empty (use vectors in word2vec format)"),
        (b"2 3\na 1 2 3\nb 3 2 1\n", "the vectors of xx have 3 dimensions, those of en have 12"),
        (b"Only text.\nNo numbers.\n", "xx.vec, line 1: the line is neither a header"),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR", "xx.vec, line 1: the line is neither a header"),
        (b"5 2\na 1 2\n", "xx.vec: the header announces 5 words, but the file has 1"),
        (b"2 2\na 1 2\nb 1\n", "xx.vec, line 3: "),
        (b"a" + 12 * b" 0" + b"\nb" + 12 * b" 0" + b"\n", "all vectors of xx are zero"),
    ],
)
def test_invalid_files(
    folder: Path, content: bytes | None, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (folder / "xx.vec").write_bytes(content)
    before = sorted(folder.iterdir())
    arguments = [str(folder / "en.vec"), str(folder / "xx.vec"), "-o", str(folder / "mapped")]
    assert run(["map", *arguments, "--device", "cpu", "--cutoff", "50"]) == 2
    captured = capsys.readouterr()
    assert problem in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("option", ["--dictionary", "--dev"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("Katze cat\nHund dog\n", "none of the 2 entries has two words with vectors (check the"),
        ("", "none of the 0 entries has two words with vectors"),
        ("en1 de1\nen2\n", "xx.txt, line 2: the line has 1 words instead of 2"),
        ("de1 en1\nde2 en2\n", "xx.txt: the columns seem to be swapped: 0 entries"),
        (None, "xx.txt: no such file"),
    ],
)
def test_invalid_dictionaries(
    folder: Path,
    option: str,
    content: str | None,
    problem: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both kinds of dictionaries are checked before the first language is mapped."""
    if content is not None:
        (folder / "xx.txt").write_text(content)
    options = {"--dictionary": str(folder / "en-de.train.txt"), option: str(folder / "xx.txt")}
    files = [str(folder / "en.vec"), str(folder / "de.vec"), "-o", str(folder / "mapped")]
    assert run(["map", *files, *(part for pair in options.items() for part in pair)]) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1
    assert not (folder / "mapped").exists()


def test_invalid_lines_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What remains is mapped as files without the bad lines are."""
    train = folder / "en-{language}.train.txt"
    options = ["--dictionary", str(train), "--dev", str(folder / "{language}-en.dev.txt")]
    assert call(folder, *options) == 0
    expected = {
        language: (folder / f"mapped/{language}.vec").read_bytes()
        for language in ("en", "de", "fr")
    }
    assert "bad lines skipped" not in capsys.readouterr().err

    good = (folder / "de.vec").read_bytes().splitlines()
    bad = b"nan" + b" nan" * HIDDEN
    (folder / "de.vec").write_bytes(b"\n".join([b"301 12", good[1], bad, *good[2:]]) + b"\n")
    for name in ("en-fr.train.txt", "fr-en.dev.txt"):
        (folder / name).write_bytes(b"caf\xe9 cafe\n" + (folder / name).read_bytes() + b"alone\n")
    listed = folder / "bad lines"
    assert call(folder, *options, "--overwrite") == 2
    assert "en-fr.train.txt, line 1: invalid UTF-8" in capsys.readouterr().err
    assert call(folder, *options, "--overwrite", "--skip-bad", str(listed)) == 0
    assert capsys.readouterr().err.count(", 5 invalid lines skipped; ")
    for language, content in expected.items():
        assert (folder / f"mapped/{language}.vec").read_bytes() == content
    rows = [line.split("\t")[:2] for line in listed.read_text().splitlines()]
    assert rows == [
        ["1", f"{folder / 'en-fr.train.txt'}: invalid UTF-8 at byte 4"],
        ["152", f"{folder / 'en-fr.train.txt'}: the line has 1 words instead of 2"],
        ["1", f"{folder / 'fr-en.dev.txt'}: invalid UTF-8 at byte 4"],
        ["152", f"{folder / 'fr-en.dev.txt'}: the line has 1 words instead of 2"],
        ["3", f"{folder / 'de.vec'}: 'nan' is not a finite number"],
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("en-de.train.txt", "both input and output"),
        ("de.vec", "both input and output"),
        ("mapped/de.vec", "the list of invalid lines is in the output folder"),
        ("no/bad.txt", "its folder does not exist"),
    ],
)
def test_the_list_of_invalid_lines_overwrites_nothing(
    folder: Path, name: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    train = str(folder / "en-{language}.train.txt")
    assert call(folder, "--dictionary", train, "--skip-bad", str(folder / name)) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_an_invalid_dictionary_is_reported_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("calque.vectors.mapping.try_method", pytest.fail)
    (folder / "fr-en.dev.txt").write_text("chat cat\n")
    train, dev = str(folder / "en-{language}.train.txt"), str(folder / "{language}-en.dev.txt")
    assert call(folder, "--dictionary", train, "--dev", dev) == 2
    assert "fr-en.dev.txt: none of the 1 entries" in capsys.readouterr().err


def test_repeated_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, rows = (folder / "de.vec").read_text().split("\n", 1)
    assert header == "300 12"
    again = "de7" + 12 * " 1" + "\nde7" + 12 * " 2" + "\nnull" + 12 * " 0" + "\n"
    (folder / "de.vec").write_text(f"303 12\n{rows}{again}")
    train = str(folder / "en-{language}.train.txt")
    assert call(folder, "--dictionary", train) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if row.startswith("de: ")]
    assert line.endswith("1 zero vectors kept; 2 repeated words left out")
    report = json.loads((folder / "mapped" / "report.json").read_text())
    counts = [
        (each["n_words"], each["n_zero"], each["n_duplicates"]) for each in report["languages"]
    ]
    assert counts == [(300, 0, 0), (301, 1, 2), (300, 0, 0)]


def test_impossible_outputs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def check(output: Path, problem: str, *more: str) -> None:
        before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        files = [str(folder / "en.vec"), str(folder / "de.vec")]
        assert run(["map", *files, "-o", str(output), *more]) == 2
        said = capsys.readouterr().err
        assert problem in said and said.count("\n") == 1
        assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before

    check(folder / "en.vec", "en.vec: this is not a folder")
    check(folder / "en.vec" / "deep" / "mapped", "en.vec: this is not a folder")
    check(folder, "en.vec: the file to read is in the output folder")
    check(folder, "en.vec: the file to read is in the output folder", "--overwrite")


def test_overwriting_an_earlier_output(folder: Path) -> None:
    """Vectors of a language that is no longer there would not be of the new space."""
    train, mapped = str(folder / "en-{language}.train.txt"), folder / "mapped"
    (folder / "fr.vec.counts").write_text("".join(f"fr{i}\t{400 - i}\n" for i in range(N_WORDS)))
    assert call(folder, "--dictionary", train) == 0
    (mapped / "notes.txt").write_text("mine")
    (mapped / "it.vec").write_text("mine too")
    assert (mapped / "fr.vec.counts").exists()
    files = [str(folder / "en.vec"), str(folder / "de.vec"), "-o", str(mapped)]
    assert run(["map", *files, "--dictionary", train, "--overwrite", "--binary"]) == 0
    assert {path.name for path in mapped.iterdir()} == {
        *("en.bin", "de.bin", "maps.safetensors", "report.json", "notes.txt", "it.vec")
    }


def test_a_folder_that_is_not_empty(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mapped").mkdir()
    (folder / "mapped" / "notes").touch()
    assert call(folder, "--cutoff", "50") == 2
    assert "this folder is not empty" in capsys.readouterr().err
    train = str(folder / "en-{language}.train.txt")
    assert call(folder, "--dictionary", train, "--overwrite") == 0
    assert (folder / "mapped" / "de.vec").exists()


def test_languages_by_name(tmp_path: Path) -> None:
    (tmp_path / "x=y.vec").touch()
    files = [
        "en.vec",
        "wiki/de.vec.gz",
        "fr=cc.fr.300.vec",
        str(tmp_path / "x=y.vec"),
        "/a=b/it.vec",
    ]
    assert name_languages(files) == {
        "en": "en.vec",
        "de": "wiki/de.vec.gz",
        "fr": "cc.fr.300.vec",
        "x=y": str(tmp_path / "x=y.vec"),
        "it": "/a=b/it.vec",
    }
    with pytest.raises(InputError, match=r"cc\.en\.vec and cc\.de\.vec would both be 'cc'"):
        name_languages(["cc.en.vec", "cc.de.vec"])
    with pytest.raises(InputError, match="there is only one language"):
        name_languages(["en.vec"])
    with pytest.raises(InputError, match="is not known"):
        name_languages(["=de.vec", "en.vec"])
