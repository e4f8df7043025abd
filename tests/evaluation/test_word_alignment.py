"""The word alignment task: files, scores that plain sets confirm, tables and a plot."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path

import pytest

from calque.cli import run
from calque.cli.console_tables import find_best_layer
from calque.errors import InputError
from calque.evaluation.registry import find_tasks
from calque.evaluation.tasks import alignment_error as word_alignment
from calque.evaluation.tasks.alignment_error import find_pairs, read_test, score_word_alignment
from calque.models.encoder import Encoder
from calque.types import Score
from calque.word_alignment import scoring
from calque.word_alignment.protocol import AlignedBlock, WordPair
from calque.word_alignment.scoring import count_layers

DATA = Path(__file__).parents[1] / "data"
ToyAligner = runpy.run_path(str(DATA.parent / "toy_align.py"))["ToyAligner"]


def error_rate(name: str, layer: int) -> float:
    """Score the toy's links by plain sets: word i with word i − (layer − 1)."""
    text = (DATA / "gold" / f"{name}.text").read_text("utf-8-sig").splitlines()
    gold = (DATA / "gold" / f"{name}.gold").read_text().splitlines()
    n_right = n_all = 0
    for pair, line in zip(text, gold, strict=True):
        n_words = min(len(side.strip(" ").split(" ")) for side in pair.split("|||"))
        found = {f"{i}-{max(0, i - layer + 1)}" for i in range(n_words)}
        sure = {link for link in line.split() if "-" in link}
        possible = {link.replace("p", "-") for link in line.split()}
        n_right += len(found & sure) + len(found & possible)
        n_all += len(found) + len(sure)
    return 1 - n_right / n_all


def test_scores_match_plain_sets(tiny_encoder: Encoder) -> None:
    told: list[str] = []
    scores = score_word_alignment(
        tiny_encoder,
        DATA / "gold",
        model="toy",
        layers=[1, 2, -1],
        make_aligner=lambda _: ToyAligner(),
        on_language=told.append,
    )
    assert told == ["de-en", "en-fr", "ja-en"]
    found = {(s.language, s.layer, s.metric): s for s in scores}
    assert len(found) == len(scores) == 4 * 3 * 4
    for layer in (1, 2, 4):
        rates = [error_rate(name, layer) for name in told]
        for name, rate in zip(told, rates, strict=True):
            assert found[name, layer, "aer"].value == pytest.approx(rate)
        assert found["mean", layer, "aer"].value == pytest.approx(sum(rates) / 3)
    score = found["en-fr", 1, "precision"]
    assert (score.task, score.n_items, score.variant) == ("word_alignment", 20, "toy")


def test_all_layers_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLOCK_PAIRS", 7)
    pairs, gold = read_test(DATA / "gold", "en-fr")
    apart = count_layers(ToyAligner(), pairs, gold, [1, 3])
    calls: list[int] = []

    class AtOnce(ToyAligner):  # type: ignore[misc, valid-type]
        def align_layers(
            self, pairs: Sequence[WordPair], layers: Sequence[int]
        ) -> dict[int, AlignedBlock]:
            calls.append(len(pairs))
            return {layer: self.with_layer(layer).align_block(pairs) for layer in layers}

    assert count_layers(AtOnce(), pairs, gold, [1, 3]) == apart
    assert calls == [7, 7, 6]
    assert apart[1].aer == pytest.approx(error_rate("en-fr", 1))


def test_tests_of_a_folder(tmp_path: Path) -> None:
    every = ["de-en", "en-fr", "ja-en"]
    assert find_pairs(DATA / "gold") == every
    assert find_pairs(DATA / "gold", ["fr", "de-en", "en"]) == ["en-fr", "de-en", "ja-en"]
    (tmp_path / "gold_alignments").symlink_to(DATA / "gold")
    assert find_pairs(tmp_path) == every
    assert len(read_test(tmp_path, "ja-en")[0]) == 5
    with pytest.raises(InputError, match=r"no test for 'ro' \(choose from: de-en en-fr ja-en\)"):
        find_pairs(tmp_path, ["de", "ro"])
    with pytest.raises(InputError, match=r"no NAME\.gold here"):
        find_pairs(DATA)
    with pytest.raises(InputError, match="no such folder"):
        find_pairs(tmp_path / "nowhere")


def test_bad_tests(tmp_path: Path) -> None:
    (tmp_path / "a-b.gold").write_text("0-0\n0-0\n")
    with pytest.raises(InputError, match=r"a-b\.text: no such file"):
        read_test(tmp_path, "a-b")
    (tmp_path / "a-b.text").write_text("a ||| b\n")
    with pytest.raises(InputError, match=r"a-b\.gold: 2 lines, but .*a-b\.text has 1 pairs"):
        read_test(tmp_path, "a-b")
    (tmp_path / "a-b.gold").write_text("0-1\n")
    with pytest.raises(InputError, match=r"a-b\.gold, line 1: .*has 1 and 1 words"):
        read_test(tmp_path, "a-b")


def test_of_equal_layers_the_lowest_is_best() -> None:
    rates = {3: 0.2, 1: 0.3, 2: 0.2}
    scores = [Score("m", "t", "mean", "aer", rate, 1, layer) for layer, rate in rates.items()]
    assert find_best_layer(scores, "m") == 2


# On the command line


@pytest.fixture
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_alignment, "_make_word_aligner", lambda _: ToyAligner())


@pytest.mark.usefixtures("_toy")
def test_evaluate(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.symlink_to(tiny_folder)
    out, plot = tmp_path / "results.jsonl", tmp_path / "layers.svg"
    task = ["--tasks", "word_alignment", "--data", str(DATA / "gold"), "--languages", "de,fr"]
    arguments = [str(tiny_folder), str(other), *task, "-o", str(out), "--plot", str(plot)]
    assert run(["evaluate", *arguments]) == 0
    captured = capsys.readouterr()
    rows = [Score(**json.loads(line)) for line in out.read_text().splitlines()]
    assert len(rows) == 2 * 3 * 5 * 4
    shown = [line.replace("│", " ").split() for line in captured.out.splitlines()]
    rates = {
        layer: (error_rate("de-en", layer) + error_rate("en-fr", layer)) / 2 for layer in (1, 2)
    }
    for layer, rate in rates.items():
        assert [str(layer), *[f"{100 * rate:.2f}"] * 2] in shown
    row = next(cells for cells in shown if cells[:1] == ["de-en"])
    assert row[4] == f"{100 * error_rate('de-en', find_best_layer(rows, str(other))):.2f}"
    assert captured.err == f"{out}: 120 scores\n{plot}: AER (%) by layer\n"
    picture = plot.read_text()
    assert all(f"<!-- {text} -->" in picture for text in ("tiny", "other", "de-en", "mean"))


@pytest.mark.usefixtures("_toy")
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--languages", "ro"], "no test for 'ro'"),
        (["--center"], "word_alignment knows no --center"),
        (["--neutral"], "word_alignment knows no --neutral"),
        (["--layers", "9"], "layer 9 does not exist"),
        (["--plot", "plot.txt"], "plot.txt: no picture is written as '.txt'"),
        (["--plot", "nowhere/plot.png"], "nowhere/plot.png: its folder does not exist"),
        (["--plot", "plot.png", "--tasks", "word_alignment,tatoeba"], "--plot draws one task"),
    ],
)
def test_bad_options(
    tiny_folder: Path,
    tmp_path: Path,
    options: list[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = [str(tiny_folder), "--data", str(DATA / "gold"), "--tasks", "word_alignment"]
    assert run(["evaluate", *fixed, "-o", "r.jsonl", *options]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_task_has_a_name() -> None:
    assert find_tasks("word_alignment") == {"word_alignment": score_word_alignment}
