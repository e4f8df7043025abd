"""Word alignment as a task: rates against plain sets, items that add up to the score, files."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import alignment_error
from calque.evaluation.tasks.alignment_error import list_languages, measure, read_test
from calque.models.encoder import Encoder
from calque.word_alignment.neural import WordAligner
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
    return 100 * (1 - n_right / n_all)


def test_rates_agree_with_plain_sets(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_toy(encoder: Encoder, **options: Any) -> Any:
        return ToyAligner(2)

    monkeypatch.setattr(alignment_error, "WordAligner", make_toy)
    settings = TaskSettings(layers=(1, 2, -1))
    scores = measure(tiny_encoder, DATA / "gold", settings=settings)
    assert [each.language for each in scores] == ["de-en", "en-fr", "ja-en"]
    for each in scores:
        assert list(each.layers) == [1, 2, 4]
        for layer, metrics in each.layers.items():
            assert metrics["aer"] == pytest.approx(error_rate(each.language, layer))
        assert each.metrics == each.layers[2]
        assert each.items is not None
        assert each.items.score == pytest.approx(each.metrics["aer"], abs=1e-6)
        assert len(each.items.numerators) == each.n_items
    assert scores[1].n_items == 20


def test_links_are_those_of_the_word_aligner(tiny_encoder: Encoder) -> None:
    """Without the similarity of spelling: the encoder is tested."""
    (scores,) = measure(tiny_encoder, DATA / "gold", languages=["en-fr"], settings=TaskSettings())
    aligner = WordAligner(tiny_encoder, spelling=0.0)
    counts = count_layers(aligner, *read_test(DATA / "gold", "en-fr"), [3, 4])
    assert scores.counts == {"layer": 3}  # two thirds of the layers, as the aligner itself
    for layer, count in counts.items():
        expected = {"aer": count.aer, "precision": count.precision, "f1": count.f1}
        found = {name: scores.layers[layer][name] / 100 for name in expected}
        assert found == pytest.approx(expected)


def test_tests_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "gold_alignments").symlink_to(DATA / "gold")
    assert list_languages(tmp_path) == list_languages(DATA / "gold") == ["de-en", "en-fr", "ja-en"]
    assert len(read_test(tmp_path, "ja-en")[0]) == 5
    with pytest.raises(InputError, match=r"no files PAIR\.gold"):
        list_languages(DATA)
    with pytest.raises(InputError, match="the folder does not exist"):
        list_languages(tmp_path / "nowhere")


def test_invalid_tests(tmp_path: Path) -> None:
    (tmp_path / "a-b.gold").write_text("0-0\n0-0\n")
    with pytest.raises(InputError, match=r"a-b\.text"):
        read_test(tmp_path, "a-b")
    (tmp_path / "a-b.text").write_text("a ||| b\n")
    with pytest.raises(InputError, match=r"a-b\.gold: .*2 lines, but .*a-b\.text has 1 pairs"):
        read_test(tmp_path, "a-b")
    (tmp_path / "a-b.gold").write_text("0-1\n")
    with pytest.raises(InputError, match=r"a-b\.gold, line 1: .*1 and 1 words"):
        read_test(tmp_path, "a-b")
