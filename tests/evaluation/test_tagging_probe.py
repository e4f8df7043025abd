"""Tagging probes as tasks: files, and scores that agree with the probe itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks.tagging_probe import NER, POS, find_files, list_languages, measure
from calque.io.conllu import read_tagged
from calque.models.encoder import Encoder
from calque.models.tag_probe import TagProbe

TAGGED = Path(__file__).parents[1] / "data" / "tagged"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """XTREME's parts of speech, a treebank folder, and a few names."""
    data = tmp_path_factory.mktemp("data")
    for name in ("xtreme/udpos", "xtreme/panx", "ud"):
        (data / name).mkdir(parents=True)
    for name in ("dev-en.tsv", "dev-zh.tsv"):
        shutil.copy(TAGGED / name, data / "xtreme" / "udpos" / name)
    shutil.copy(TAGGED / "dev-zh.tsv", data / "xtreme" / "udpos" / "train-en.tsv")
    for name in ("en_ewt-train.conllu", "en_ewt-dev.conllu", "de_gsd-dev.conllu.xz"):
        shutil.copy(TAGGED / name, data / "ud" / name.replace("-", "-ud-", 1))
    names = "to\tO\nNew\tB-LOC\nYork\tI-LOC\n\nto\tO\nParis\tB-LOC\n\n"
    for name in ("train-en", "dev-en", "dev-de"):
        (data / "xtreme" / "panx" / f"{name}.tsv").write_text(names)
    return data


def test_scores_are_those_of_the_probe(tiny_encoder: Encoder, data: Path) -> None:
    steps: list[tuple[int, int]] = []
    found = measure(
        tiny_encoder,
        data / "ud",
        task=POS,
        settings=TaskSettings(layers=(1, -1)),
        on_progress=lambda *step: steps.append(step),
    )
    assert steps == [(1, 2), (2, 2)]
    tests = {
        "en": read_tagged(TAGGED / "en_ewt-dev.conllu"),
        "de": read_tagged(TAGGED / "de_gsd-dev.conllu.xz"),
    }
    train = read_tagged(TAGGED / "en_ewt-train.conllu")
    expected = TagProbe(tiny_encoder, train, tests, source="en").measure(tiny_encoder, [1, 4])
    assert [each.language for each in found] == list_languages(data / "ud", task=POS) == list(tests)
    for each in found:
        assert each.layers == {
            layer: {"accuracy": 100 * scores.scores[each.language]}
            for layer, scores in expected.items()
        }
        # Layer 4 is the nearest to layer 3, two thirds of the layers.
        assert (each.metrics, each.counts) == (each.layers[4], {"layer": 4})
        assert (each.n_items, each.items) == (15, None)


def test_files_are_found_in_and_above_their_folder(data: Path) -> None:
    xtreme = data / "xtreme"
    for folder in (data, xtreme, xtreme / "udpos"):
        files = find_files(folder, POS)
        assert Path(files.train) == xtreme / "udpos" / "train-en.tsv"
        assert list(files.find_tests()) == ["en", "zh"]
    assert Path(find_files(data / "ud", POS).train).name == "en_ewt-ud-train.conllu"
    assert list(find_files(data, NER, ["de"]).find_tests()) == ["en", "de"]


def test_treebanks_in_folders_of_their_own(data: Path, tmp_path: Path) -> None:
    for path in (data / "ud").glob("*.conllu*"):
        nested = tmp_path / "released" / "ud" / f"UD_{path.name[:6]}"
        nested.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, nested)
    mine, theirs = (find_files(place, POS) for place in (tmp_path / "released", data / "ud"))
    assert Path(mine.train).name == Path(theirs.train).name
    assert list(mine.find_tests()) == list(theirs.find_tests())


def test_missing_files_are_named(data: Path, tmp_path: Path) -> None:
    # Names must not be taken for parts of speech.
    with pytest.raises(InputError, match=r"no files of pos_probe .*udpos/train-en.tsv\*"):
        find_files(data / "xtreme" / "panx", POS)
    with pytest.raises(InputError, match="the folder does not exist"):
        find_files(tmp_path / "none", NER)
    with pytest.raises(InputError, match=r"no test of 'fr' \(choose from: en zh\)"):
        find_files(data, POS, ["fr"]).find_tests()


def test_names_are_scored_by_spans(tiny_encoder: Encoder, data: Path) -> None:
    settings = TaskSettings(layers=(0,))
    found = measure(tiny_encoder, data, task=NER, languages=["de"], settings=settings)
    assert [each.language for each in found] == ["en", "de"]
    assert all(each.metrics == {"span_f1": 100.0} for each in found)  # the training text itself
