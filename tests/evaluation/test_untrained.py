"""Untrained tasks as outcomes: the scores of the plain tasks, and items that add up to them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from calque.evaluation.records import LanguageScores
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.alignment_error import score_word_alignment
from calque.evaluation.tasks.lexicon_induction import score_lexicon_induction
from calque.evaluation.tasks.tagging_probe import score_tagging_probe
from calque.evaluation.tasks.tatoeba import score_tatoeba
from calque.evaluation.tasks.untrained import (
    list_alignment_pairs,
    list_probe_languages,
    list_tatoeba_languages,
    measure_tagging_probe,
    measure_tatoeba,
    measure_word_alignment,
)
from calque.evaluation.tasks.untrained_vectors import (
    measure_lexicon_induction,
    measure_word_similarity,
)
from calque.evaluation.tasks.word_similarity import score_word_similarity
from calque.models.encoder import Encoder
from calque.types import Links, Score
from calque.vectors.static import VectorFolder, WordVectors, write_vectors
from calque.word_alignment.scoring import LinkCounts, count_links, count_links_by_pair

DATA = Path(__file__).parents[1] / "data"
PLAIN = TaskSettings()


def ignore(done: int, total: int) -> None:
    assert 0 < done <= total


def by_layer(
    scores: list[Score], metrics: tuple[str, ...]
) -> Iterator[tuple[str, dict[int, float]]]:
    """The mean of some metrics by language and layer, in percent."""
    for name in dict.fromkeys(score.language for score in scores if score.language != "mean"):
        mine = [score for score in scores if score.language == name and score.metric in metrics]
        layers = dict.fromkeys(score.layer or 0 for score in mine)
        yield name, {n: 100 * np.mean([s.value for s in mine if s.layer == n]) for n in layers}


def check(outcomes: list[LanguageScores], scores: list[Score], layer: int, *metrics: str) -> None:
    expected = dict(by_layer(scores, metrics))
    assert [outcome.language for outcome in outcomes] == list(expected)
    for outcome in outcomes:
        assert outcome.layers == pytest.approx(expected[outcome.language])
        value = next(iter(outcome.metrics.values()))
        assert value == pytest.approx(expected[outcome.language][layer])
        assert outcome.counts == {"layer": layer}
        if outcome.items is not None:
            assert outcome.items.score == pytest.approx(value, abs=1e-6)
            assert len(outcome.items.numerators) == outcome.n_items


def test_tatoeba(
    tiny_encoder: Encoder, demo_rows: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    for short, code in (("de", "deu"), ("ja", "jpn")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (tmp_path / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    assert list_tatoeba_languages(tmp_path, PLAIN) == ["de", "ja"]
    scores = score_tatoeba(tiny_encoder, tmp_path, model="m")
    both = ("accuracy_to_english", "accuracy_from_english")
    for settings, layer in ((PLAIN, 2), (TaskSettings(layer=-1), 4)):  # the middle, the last
        outcomes = measure_tatoeba(
            tiny_encoder, tmp_path, languages=None, settings=settings, seed=0, on_progress=ignore
        )
        check(outcomes, scores, layer, *both)
        assert all(outcome.items is not None for outcome in outcomes)
    assert outcomes[0].metrics["accuracy"] == pytest.approx(
        np.mean([outcomes[0].metrics[name] for name in both])
    )


def test_word_alignment(tiny_encoder: Encoder) -> None:
    assert list_alignment_pairs(DATA / "gold", PLAIN) == ["de-en", "en-fr", "ja-en"]
    outcomes = measure_word_alignment(
        tiny_encoder,
        DATA / "gold",
        languages=["de", "en-fr"],
        settings=PLAIN,
        seed=0,
        on_progress=ignore,
    )
    names = ["de", "en-fr"]
    scores = score_word_alignment(tiny_encoder, DATA / "gold", model="m", languages=names)
    check(outcomes, scores, 3, "aer")  # two thirds up, as the aligner itself
    assert all(outcome.items is not None for outcome in outcomes)
    precision = dict(by_layer(scores, ("precision",)))["en-fr"][3]
    assert outcomes[1].metrics["precision"] == pytest.approx(precision)


def test_links_of_pairs_add_up() -> None:
    def links(*triples: tuple[int, int, int]) -> Links:
        pairs, src, tgt = np.array(triples, dtype=np.int64).reshape(-1, 3).T
        return Links(pairs, src, tgt, np.ones(len(pairs), np.float32), 3)

    mine = links((0, 0, 0), (0, 1, 1), (2, 5, 0))
    sure, possible = links((0, 0, 0), (2, 1, 1)), links((0, 1, 1), (2, 1, 1))
    by_pair = count_links_by_pair(mine, sure, possible)
    assert by_pair.tolist() == [[2, 0, 1], [1, 0, 1], [1, 0, 0], [2, 0, 0]]
    assert count_links(mine, sure, possible) == LinkCounts(3, 2, 1, 2)
    assert count_links_by_pair(links(), links(), links()).sum() == 0


def test_probes(tiny_encoder: Encoder, tmp_path: Path) -> None:
    folder = tmp_path / "ud"
    folder.mkdir()
    for name in ("en_ewt-train.conllu", "en_ewt-dev.conllu", "fr_gsd-dev.conllu"):
        shutil.copy(DATA / "tagged" / name, folder / name.replace("-", "-ud-", 1))
    assert list_probe_languages(tmp_path, PLAIN, task="pos_probe") == ["en", "fr"]
    outcomes = measure_tagging_probe(
        tiny_encoder,
        tmp_path,
        task="pos_probe",
        languages=["fr"],
        settings=PLAIN,
        seed=0,
        on_progress=ignore,
    )
    scores = score_tagging_probe(tiny_encoder, tmp_path, task="pos_probe", model="m")
    check(outcomes, scores, 3, "accuracy")


@pytest.fixture
def vectors(tmp_path: Path) -> VectorFolder:
    generator = np.random.default_rng(3)
    folder = tmp_path / "vectors"
    folder.mkdir()
    more = " a b c d e f"
    for name, words in (("de", "eins zwei drei vier Hund"), ("en", "four three two one dog")):
        words += more  # CSLS looks at ten neighbors
        matrix = generator.normal(size=(11, 4)).astype(np.float32)
        write_vectors(WordVectors(words.split(), matrix), folder / f"{name}.vec")
    return VectorFolder(folder)


def test_lexicon_induction(vectors: VectorFolder, tmp_path: Path) -> None:
    entries = "zwei two\nsechs six\neins one\neins won\ndrei trio\nHund dog\n"
    (tmp_path / "de-en.5000-6500.txt").write_text(entries)
    (outcome,) = measure_lexicon_induction(
        vectors, tmp_path, languages=None, settings=PLAIN, seed=0, on_progress=ignore
    )
    scores = score_lexicon_induction(vectors, tmp_path, model="m")
    found = {(s.variant, s.metric): 100 * s.value for s in scores if s.language == "de-en"}
    assert next(iter(outcome.metrics)) == "precision_at_1_csls"
    for (method, metric), value in found.items():
        if metric != "coverage" and not metric.endswith("_known"):
            assert outcome.metrics[f"{metric}_{method}"] == pytest.approx(value)
    assert outcome.metrics["coverage"] == found["csls", "coverage"] == 60
    assert outcome.counts == {"unknown_src": 1, "unknown_tgt": 1}
    assert outcome.items is not None
    assert outcome.items.score == pytest.approx(outcome.metrics["precision_at_1_csls"])
    # In the dictionary's order; words that no vectors know are wrong: sechs, and drei's trio.
    assert len(outcome.items.numerators) == outcome.n_items == 5
    assert outcome.items.numerators[[1, 3]].tolist() == [0, 0]


def test_word_similarity(vectors: VectorFolder, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for name in ("a/english.txt", "b/english.txt", "b/en-de.txt"):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        words = "one two 3\nthree two 1\nfour one 2\nfour dog 0.5\n"
        if name == "b/en-de.txt":
            words = "one zwei 3\nthree eins 1\nfour Hund 2\n"
        (data / name).write_text(words.replace(" ", "\t"))
    outcomes = measure_word_similarity(
        vectors, data, languages=None, settings=PLAIN, seed=0, on_progress=ignore
    )
    assert [outcome.language for outcome in outcomes] == ["en:a", "en-de", "en:b"]
    scores = score_word_similarity(vectors, data, model="m")
    expected = {(s.language, s.variant): s for s in scores if s.metric == "harmonic_mean"}
    assert outcomes[1].metrics["harmonic_mean"] == 100 * expected["en-de", "b"].value
    assert [outcome.n_items for outcome in outcomes] == [4, 3, 4]
