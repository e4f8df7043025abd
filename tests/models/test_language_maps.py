"""Language maps: saving and loading, application to sentences and words, errors."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import calque
from calque.api import Model
from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import alignment_error, tatoeba
from calque.models.encoder import Encoder
from calque.models.language_maps import ABOUT_FILE, TENSORS_FILE, LanguageMaps, load_maps
from calque.word_alignment.neural import WordAligner

SENTENCES = ["Guten Morgen!", "Das Gerücht könnte wahr sein.", ""]


def make_maps(hidden: int = 64, layers: tuple[int, ...] = (0, 1, 2, 3, 4)) -> LanguageMaps:
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(2, len(layers), hidden, hidden, generator=generator)
    return LanguageMaps(maps, ("de", "ja"), layers, "en", {"solver": "procrustes"})


@pytest.fixture
def mapped_folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with maps of German and Japanese in its folder."""
    folder = copytree(tiny_folder, tmp_path / "mapped")
    make_maps().save(folder)
    return folder


def test_save_and_load(tmp_path: Path) -> None:
    maps = make_maps()
    maps.save(tmp_path)
    found = load_maps(tmp_path, 64, 4)
    assert torch.equal(found.maps, maps.maps)
    assert (found.languages, found.layers, found.pivot) == (maps.languages, maps.layers, "en")
    assert found.about == {"solver": "procrustes"}
    assert torch.equal(load_maps(tmp_path / TENSORS_FILE, 64, 4).maps, maps.maps)
    # The file has one tensor per language and layer.
    with safe_open(tmp_path / TENSORS_FILE, framework="np") as file:
        assert set(file.keys()) == {f"{code}.{n}" for code in ("de", "ja") for n in range(5)}
        np.testing.assert_array_equal(file.get_tensor("ja.3"), maps.maps[1, 3].numpy())


def test_states_are_mapped_and_the_pivot_is_not() -> None:
    maps, states = make_maps(), torch.randn(3, 7, 64)
    expected = np.einsum("abi,ij->abj", states.numpy(), maps.maps[0, 2].numpy())
    np.testing.assert_allclose(maps.apply(states, "de", 2).numpy(), expected, atol=1e-4)
    np.testing.assert_allclose(maps.apply(states.numpy(), "de", 2), expected, atol=1e-4)
    assert maps.apply(states, "en", 2) is states
    half = maps.apply(states.bfloat16(), "de", 2)
    assert half.dtype == torch.bfloat16
    assert maps.apply(states.numpy(), "ja", 0).dtype == np.float32
    assert maps.find("en", 0) is None


@pytest.mark.parametrize("language", ["fr", "deu", ""])
def test_a_language_without_a_map_is_an_error(language: str) -> None:
    with pytest.raises(
        InputError, match=r"no map of .* \(use one of de ja, or en, which needs no map"
    ):
        make_maps().apply(np.zeros((1, 64), dtype=np.float32), language, 0)


def test_a_layer_without_a_map_is_an_error() -> None:
    with pytest.raises(InputError, match=r"no map of layer 3 \(use one of layers 0 2"):
        make_maps(layers=(0, 2)).find("en", 3)


def test_errors_of_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no maps in this folder"):
        load_maps(tmp_path, 64, 4)
    make_maps().save(tmp_path)
    with pytest.raises(InputError, match="the maps have size 64, but the model has 32"):
        load_maps(tmp_path, 32, 4)
    with pytest.raises(InputError, match="there is a map of layer 4, but the last layer is 3"):
        load_maps(tmp_path, 64, 3)
    # Copies: older safetensors write into the file from which these are mapped.
    tensors = {name: map_.clone() for name, map_ in load_file(tmp_path / TENSORS_FILE).items()}
    about = (tmp_path / ABOUT_FILE).read_text()
    save_file(tensors | {"de.1": torch.zeros(64, 63)}, tmp_path / TENSORS_FILE)
    with pytest.raises(InputError, match=r"maps\.safetensors: the map de\.1 has the shape"):
        load_maps(tmp_path, 64, 4)
    save_file(tensors | {"de.1": torch.full((64, 64), torch.nan)}, tmp_path / TENSORS_FILE)
    with pytest.raises(InputError, match="not finite"):
        load_maps(tmp_path, 64, 4)
    tensors.pop("ja.2")
    save_file(tensors, tmp_path / TENSORS_FILE)
    with pytest.raises(InputError, match=r"there is no map ja\.2"):
        load_maps(tmp_path, 64, 4)
    (tmp_path / TENSORS_FILE).write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"maps\.safetensors: this is not a valid"):
        load_maps(tmp_path, 64, 4)
    for text in (
        "{",
        "[]",
        json.dumps(json.loads(about) | {"format": 9}),
        json.dumps(json.loads(about) | {"layers": ["0"]}),
        json.dumps({"format": 1}),
    ):
        (tmp_path / ABOUT_FILE).write_text(text)
        with pytest.raises(InputError, match=r"maps\.json: (the file|this) (is|does) not"):
            load_maps(tmp_path, 64, 4)


def test_maps_are_applied_only_on_request(mapped_folder: Path, tiny_folder: Path) -> None:
    plain = calque.load(tiny_folder, "cpu").embed(SENTENCES, layer=2)
    assert calque.load(mapped_folder, "cpu").maps is None
    np.testing.assert_array_equal(
        calque.load(mapped_folder, "cpu").embed(SENTENCES, layer=2), plain
    )
    W = make_maps().maps[0, 2].numpy()
    for model in (
        calque.load(mapped_folder, "cpu", maps=True),
        calque.load(mapped_folder, "cpu", maps="beside"),
        calque.load(tiny_folder, "cpu", maps=mapped_folder),
    ):
        mapped = model.embed(SENTENCES, layer=2, map_from="de")
        np.testing.assert_allclose(mapped, plain @ W, atol=1e-4)
        assert not mapped[2].any()
        np.testing.assert_array_equal(model.embed(SENTENCES, layer=2, map_from="en"), plain)
        mixed = model.embed(SENTENCES, layer=2, map_from=["en", "de", "ja"])
        np.testing.assert_allclose(mixed[:2], [plain[0], mapped[1]], atol=1e-4)


def test_a_mean_of_mapped_states_is_the_mapped_mean(mapped_folder: Path) -> None:
    model = calque.load(mapped_folder, "cpu", maps=True)
    assert model.maps is not None
    ids = model.tokenizer(SENTENCES[1], return_tensors="pt")
    states = model.model(**ids, output_hidden_states=True).hidden_states[3][0, 1:-1]
    expected = model.maps.apply(states, "ja", 3).mean(dim=0).detach().numpy()
    (found,) = model.embed([SENTENCES[1]], layer=3, map_from="ja")
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_language_must_be_given_and_known(mapped_folder: Path, tiny_folder: Path) -> None:
    model = calque.load(mapped_folder, "cpu", maps=True)
    with pytest.raises(InputError, match="the language is not given"):
        model.embed(SENTENCES)
    with pytest.raises(InputError, match="no map of 'fr'"):
        model.embed(SENTENCES, map_from="fr")
    with pytest.raises(InputError, match="2 languages for 3 sentences"):
        model.embed(SENTENCES, map_from=["de", "en"])
    with pytest.raises(InputError, match="loaded without maps"):
        calque.load(tiny_folder, "cpu").embed(SENTENCES, map_from="de")
    with pytest.raises(InputError, match="there are no maps in this folder"):
        calque.load(tiny_folder, "cpu", maps=True)


def test_maps_replace_the_neutral_space(mapped_folder: Path, tiny_folder: Path) -> None:
    from calque.models.neutral_space import NeutralSpace

    mean, directions = np.ones(64, dtype=np.float32), np.eye(64, dtype=np.float32)[:1]
    NeutralSpace(mean, directions, 2, ("de", "en")).save(mapped_folder)
    model = calque.load(mapped_folder, "cpu", maps=True)
    plain = calque.load(tiny_folder, "cpu").embed(SENTENCES, layer=2)
    np.testing.assert_array_equal(model.embed(SENTENCES, map_from="en"), plain)


PAIRS = [(["das", "Gerücht", "ist", "wahr"], ["the", "rumor", "is", "true"])]


def save_rotation(folder: Path) -> None:
    """Write one orthogonal map of German, the same for all layers."""
    q, _ = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(3)))
    stack = q.expand(1, 5, 64, 64).contiguous()
    LanguageMaps(stack, ("de",), (0, 1, 2, 3, 4), "en").save(folder)


def test_words_are_mapped_before_they_are_compared(mapped_folder: Path) -> None:
    """One map on both sides, an orthogonal one, changes no cosine; on one side it does."""
    save_rotation(mapped_folder)
    plain = WordAligner(calque.load(mapped_folder, "cpu"), encode="separate", layer=2)
    mapping = calque.load(mapped_folder, "cpu", maps=True)
    both = WordAligner(mapping, layer=2, languages=("de", "de"))
    neither = WordAligner(mapping, layer=2, languages=("en", "en"))
    one = WordAligner(mapping, layer=2, languages=("de", "en"))
    scores = [aligner.align_block(PAIRS).links.scores for aligner in (plain, both, neither, one)]
    links = [aligner.align(PAIRS) for aligner in (plain, both, neither)]
    assert links[0] == links[1] == links[2]
    np.testing.assert_array_equal(scores[0], scores[2])
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-5)
    assert len(scores[3]) != len(scores[0]) or not np.allclose(scores[0], scores[3], atol=1e-3)
    assert one.with_layer(3).languages == ("de", "en")
    assert one.with_layer(3).layer == 3


def test_errors_of_aligners_with_maps(mapped_folder: Path) -> None:
    model = calque.load(mapped_folder, "cpu", maps=True)
    with pytest.raises(InputError, match="encoded separately"):
        WordAligner(model, encode="joint", languages=("de", "en"))
    with pytest.raises(InputError, match="no map of 'fr'"):
        WordAligner(model, languages=("fr", "en"))
    with pytest.raises(InputError, match="the language is not given"):
        WordAligner(model)
    with pytest.raises(InputError, match="loaded without maps"):
        WordAligner(calque.load(mapped_folder, "cpu"), languages=("de", "en"))


def test_encoders_load_without_maps(mapped_folder: Path) -> None:
    assert Encoder.load(mapped_folder).maps is None
    assert Model.load(mapped_folder).maps is None


@pytest.fixture
def task_data(demo_rows: list[tuple[str, str, str]], tmp_path: Path) -> Path:
    """Retrieval tests of three languages from the demo, and two tests of word alignment."""
    folder = tmp_path / "data"
    (folder / "tatoeba").mkdir(parents=True)
    (folder / "gold_alignments").mkdir()
    for short, code in (("de", "deu"), ("ja", "jpn"), ("fr", "fra")):
        rows = [row for row in demo_rows if row[0] == short]
        for side, column in (("eng", 1), (code, 2)):
            text = "".join(row[column] + "\n" for row in rows)
            (folder / "tatoeba" / f"tatoeba.{code}-eng.{side}").write_text(text, "utf-8")
    for name in ("de-en", "fr-en"):
        (folder / "gold_alignments" / f"{name}.text").write_text("das Haus ||| the house\n")
        (folder / "gold_alignments" / f"{name}.gold").write_text("0-0 1-1\n")
    return folder


def test_retrieval_maps_each_side_by_its_language(
    mapped_folder: Path, tiny_folder: Path, task_data: Path, demo_rows: list[tuple[str, str, str]]
) -> None:
    model = calque.load(mapped_folder, "cpu", maps=True)
    scores = tatoeba.measure(model, task_data, languages=["deu", "ja"], settings=TaskSettings())
    plain = calque.load(tiny_folder, "cpu")
    for score, language, number in zip(scores, ("de", "ja"), (0, 1), strict=True):
        rows = [row for row in demo_rows if row[0] == language]
        src, eng = (plain.embed([row[i] for row in rows], layer=3) for i in (2, 1))
        src = src @ make_maps().maps[number, 3].numpy()
        src, eng = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (src, eng))
        expected = np.mean((src @ eng.T).argmax(axis=1) == np.arange(len(src)))
        assert score.layers[3]["accuracy_to_english"] == 100 * expected


def test_tasks_need_maps_of_all_languages_and_layers(mapped_folder: Path, task_data: Path) -> None:
    settings = TaskSettings()
    model = calque.load(mapped_folder, "cpu", maps=True)
    with pytest.raises(InputError, match=r"there are no maps for fr \(use --languages de,ja\)"):
        tatoeba.measure(model, task_data, settings=settings)
    with pytest.raises(InputError, match=r"there are no maps for fr-en \(use --languages de-en\)"):
        alignment_error.measure(model, task_data, settings=settings)
    make_maps(layers=(1, 3)).save(mapped_folder)
    few = calque.load(mapped_folder, "cpu", maps=True)
    with pytest.raises(InputError, match="no map of layer 2"):
        tatoeba.measure(few, task_data, languages=["de"], settings=TaskSettings(layers=(2,)))
    (score,) = alignment_error.measure(few, task_data, languages=["de-en"], settings=settings)
    assert set(score.layers) == {1, 3}  # only layers with maps are measured
