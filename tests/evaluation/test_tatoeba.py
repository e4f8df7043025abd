"""Tatoeba: files in LASER's layout, and scores that agree with a plain computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.tatoeba import list_languages, measure, read_test
from calque.io.xtreme import THREE_LETTERS, TWO_LETTERS
from calque.models.encoder import Encoder
from calque.sentences.embed import embed_sentences

Row = tuple[str, str, str]


@pytest.fixture(scope="module")
def data(demo_rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """German and Japanese sentences of the demo in LASER's layout."""
    folder = tmp_path_factory.mktemp("data") / "tatoeba"
    folder.mkdir()
    for short, code in (("de", "deu"), ("ja", "jpn")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    return folder.parent


def find_hits_plainly(src: np.ndarray, eng: np.ndarray) -> np.ndarray:
    """Whether the largest cosine of a row is its own."""
    src, eng = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (src, eng))
    return (src @ eng.T).argmax(1) == np.arange(len(src))


def embed(encoder: Encoder, rows: list[Row], language: str, layer: int) -> list[np.ndarray]:
    mine = [row for row in rows if row[0] == language]
    return [embed_sentences(encoder, [row[i] for row in mine], layer=layer) for i in (2, 1)]


def test_scores_agree_with_a_plain_computation(
    tiny_encoder: Encoder, data: Path, demo_rows: list[Row]
) -> None:
    german, japanese = measure(tiny_encoder, data, languages=["de", "jpn"], settings=TaskSettings())
    assert (german.language, japanese.language, german.n_items) == ("de", "ja", 25)
    for layer in (0, 2, 3):
        src, eng = embed(tiny_encoder, demo_rows, "de", layer)
        forward, backward = find_hits_plainly(src, eng), find_hits_plainly(eng, src)
        found = german.layers[layer]
        assert found["accuracy_to_english"] == 100 * forward.mean()
        assert found["accuracy_from_english"] == 100 * backward.mean()
        assert found["accuracy"] == pytest.approx(50 * (forward.mean() + backward.mean()))
        if layer == 2:  # the middle layer, since no best layer is stored with the model
            assert german.metrics == found
            assert german.counts == {"layer": 2}
            assert german.items is not None
            assert german.items.numerators.tolist() == ((forward + 0.0 + backward) / 2).tolist()
            assert german.items.score == pytest.approx(found["accuracy"])
    assert list(german.layers) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "layer", "layers"),
    [
        (TaskSettings(layer=-1), 4, [0, 1, 2, 3, 4]),
        (TaskSettings(layers=(-1, 0)), 4, [4, 0]),  # both are two layers away from layer 2
        (TaskSettings(layers=(1, 4)), 1, [1, 4]),
        (TaskSettings(layers=(1,), layer=3), 3, [1, 3]),
    ],
)
def test_the_layer_of_the_score(
    tiny_encoder: Encoder, data: Path, settings: TaskSettings, layer: int, layers: list[int]
) -> None:
    (scores,) = measure(tiny_encoder, data, languages=["de"], settings=settings)
    assert scores.counts == {"layer": layer}
    assert list(scores.layers) == layers
    assert scores.metrics == scores.layers[layer]


def test_equal_sides_score_100(tiny_encoder: Encoder, tmp_path: Path) -> None:
    for side in ("deu", "eng"):
        (tmp_path / f"tatoeba.deu-eng.{side}").write_text("Eins.\nZwei Wörter.\nDrei!\n", "utf-8")
    for center in (False, True):
        settings = TaskSettings(layers=(-1,), center=center)
        (scores,) = measure(tiny_encoder, tmp_path, settings=settings)
        assert set(scores.metrics.values()) == {100.0}


def test_centering_subtracts_the_mean_of_each_side(
    tiny_encoder: Encoder, data: Path, demo_rows: list[Row]
) -> None:
    src, eng = embed(tiny_encoder, demo_rows, "ja", 1)
    settings = TaskSettings(layer=1, center=True)
    (scores,) = measure(tiny_encoder, data, languages=["ja"], settings=settings)
    expected = find_hits_plainly(src - src.mean(0), eng - eng.mean(0)).mean()
    assert scores.metrics["accuracy_to_english"] == 100 * expected


def test_a_neutral_space_must_exist(tiny_encoder: Encoder, data: Path) -> None:
    with pytest.raises(InputError, match="no language-neutral space"):
        measure(tiny_encoder, data, settings=TaskSettings(neutral=True))


def test_languages_of_a_folder(data: Path) -> None:
    assert list_languages(data) == list_languages(data / "tatoeba") == ["de", "ja"]
    assert read_test(data, "de") == read_test(data, "deu")


def test_progress_is_reported_by_language(tiny_encoder: Encoder, data: Path) -> None:
    steps: list[tuple[int, int]] = []
    settings = TaskSettings(layers=(0,))
    measure(tiny_encoder, data, settings=settings, on_progress=lambda *step: steps.append(step))
    assert steps == [(1, 2), (2, 2)]


def test_invalid_folders(tiny_encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder does not exist"):
        list_languages(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"no files tatoeba\.xxx-eng\.xxx"):
        measure(tiny_encoder, tmp_path, settings=TaskSettings())
    (tmp_path / "tatoeba.deu-eng.deu").write_text("Eins.\nZwei.\n")
    with pytest.raises(InputError, match=r"tatoeba\.deu-eng\.eng"):
        read_test(tmp_path, "de")
    (tmp_path / "tatoeba.deu-eng.eng").write_text("One.\n")
    with pytest.raises(InputError, match=r"has 2 lines, but tatoeba\.deu-eng\.eng has 1"):
        read_test(tmp_path, "de")
    with pytest.raises(InputError, match=r"no test for 'fr'.*choose from: de"):
        read_test(tmp_path, "fr")


def test_language_table() -> None:
    assert len(THREE_LETTERS) == len(TWO_LETTERS) > 80
    assert all(len(short) == 2 and len(long) == 3 for short, long in THREE_LETTERS.items())


def test_margin_is_that_of_mining(tiny_encoder: Encoder, data: Path, demo_rows: list[Row]) -> None:
    """A sentence finds the one with the best margin of `calque.algorithms.margin`."""
    cosine, margin = (
        measure(tiny_encoder, data, languages=["ja"], settings=TaskSettings(similarity=name))[0]
        for name in ("cosine", "margin")
    )
    src, eng = (torch.tensor(side) for side in embed(tiny_encoder, demo_rows, "ja", 2))
    similarity = torch.nn.functional.cosine_similarity(src[:, None], eng[None], dim=2)
    means = [similarity.topk(4, dim=dim).values.mean(dim=dim) for dim in (1, 0)]
    scores = similarity / (means[0][:, None] + means[1])
    hits = [scores.argmax(dim=dim) == torch.arange(len(src)) for dim in (1, 0)]
    accuracies = [100 * side.float().mean().item() for side in hits]
    found = margin.layers[2]
    assert found["accuracy_to_english"] == pytest.approx(accuracies[0])
    assert found["accuracy_from_english"] == pytest.approx(accuracies[1])
    assert margin.layers != cosine.layers
