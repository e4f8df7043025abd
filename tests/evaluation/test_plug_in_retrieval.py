"""Retrieval with plug=in: vectors against a plain loop, files, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import calque
from calque import cli
from calque.errors import InputError
from calque.evaluation.settings import TaskSettings
from calque.evaluation.tasks import bucc, tatoeba
from calque.evaluation.tasks.plug_in_retrieval import embed_with_translations
from calque.models.encoder import Encoder
from calque.models.veco import Veco
from calque.tokens.ragged import Ragged, pack

PLUG = TaskSettings(plug="in")
WORDS = ["one", "two", "three", "four", "five", "six", "house", "tree", "water", "fire", "road"]


@pytest.fixture(scope="module")
def veco(tiny_encoder: Encoder) -> Veco:
    """A model whose cross-attention has an effect."""
    found = Veco.plug(tiny_encoder, "random", torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():
        for name, weight in found.named_parameters():
            if ".crossattention." in name and weight.ndim == 2:
                weight.mul_(10)
    return found


def embed_plainly(veco: Veco, sentence: str, translation: str, layer: int) -> np.ndarray:
    """Return the mean [H ; S] of one sentence without batches; windows are averaged by length."""

    def split(text: str) -> list[np.ndarray]:
        ids = veco.tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.array_split(ids, -(-len(ids) // (veco.max_tokens - 2))) if ids else []

    total, n_tokens = np.zeros(2 * veco.hidden_size), 0
    others = split(translation)
    for number, window in enumerate(split(sentence)):
        batch = pack(Ragged.of([[0, *window, 2]]), pad_id=1)
        (alone,) = veco(batch, [layer])
        crossed = alone
        if others:
            read = pack(Ragged.of([[0, *others[min(number, len(others) - 1)], 2]]), pad_id=1)
            (crossed,) = veco.cross_layers(batch, veco(read)[0], read, [layer])
        states = torch.cat([alone, crossed], dim=1)[1:-1].double()
        total += states.sum(0).numpy()
        n_tokens += len(window)
    return total / max(1, n_tokens)


@torch.no_grad()
def test_vectors_equal_a_plain_loop(veco: Veco) -> None:
    sentences = ["One tree .", "Water", "", "a b c " * 60, "a b c " * 60, "He walked ."]
    translations = ["Ein Baum .", "", "Nichts", "d e " * 150, "f", "Er ging und ging und ging ."]
    layers, pairs = [2, 0, 3], list(zip(sentences, translations, strict=True))
    found, n_long = embed_with_translations(veco, sentences, translations, layers)
    assert n_long == 2
    for layer in layers:
        expected = [embed_plainly(veco, *pair, layer) for pair in pairs]
        np.testing.assert_allclose(found[layer], expected, atol=2e-5)
    half = veco.hidden_size
    assert np.array_equal(found[2][1, :half], found[2][1, half:])  # it has no translation
    assert np.abs(found[2][0, :half] - found[2][0, half:]).max() > 1e-2
    assert not found[2][2].any()


@pytest.fixture
def tatoeba_data(tmp_path: Path) -> Path:
    """All sentences are equal, so that only the machine translations tell them apart."""
    folder = tmp_path / "tatoeba"
    (folder / "translate-test").mkdir(parents=True)
    for code in ("deu", "fra"):
        for side in (code, "eng"):
            name = f"tatoeba.{code}-eng.{side}"
            (folder / name).write_text("It is so\n" * len(WORDS))
            if code == "deu":
                (folder / "translate-test" / name).write_text("\n".join(WORDS))
    return tmp_path


def write_mining(data: Path) -> None:
    """Texts and translations are the same on both sides; all of them are pairs."""
    folder = data / "bucc2018"
    (folder / "translate-test").mkdir(parents=True)
    for place, texts in (("", ["a {}"] * 2), ("translate-test", ["{}"] * 2)):
        for side, text in zip(("de", "en"), texts, strict=True):
            lines = [f"{side}-{k}\t{text.format(word)}\n" for k, word in enumerate(WORDS)]
            (folder / place / f"de-en.dev.{side}").write_text("".join(lines))
    (folder / "de-en.dev.gold").write_text("".join(f"de-{k}\ten-{k}\n" for k in range(len(WORDS))))


def test_tatoeba_reads_translations(veco: Veco, tatoeba_data: Path) -> None:
    assert tatoeba.list_languages(tatoeba_data, PLUG) == ["de"]
    assert tatoeba.list_languages(tatoeba_data, TaskSettings()) == ["de", "fr"]
    (found,) = tatoeba.measure(veco, tatoeba_data, settings=PLUG)
    assert (found.language, found.counts) == ("de", {"layer": 2})
    # Equal sentences have equal vectors but for rounding, which decides which one is the nearest.
    same, _ = embed_with_translations(veco, ["It is so"] * len(WORDS), [""] * len(WORDS), [2])
    np.testing.assert_allclose(same[2], np.tile(same[2][0], (len(WORDS), 1)), atol=1e-5)
    assert found.metrics["accuracy"] == 100 and found.layers[0]["accuracy"] < 50
    plain = tatoeba.measure(veco, tatoeba_data, languages=["de"], settings=TaskSettings())[0]
    assert plain.metrics["accuracy"] < 50
    path = tatoeba_data / "tatoeba" / "translate-test" / "tatoeba.deu-eng.eng"
    path.write_text("\n".join(["", "", *WORDS[2:]]))
    (found,) = tatoeba.measure(veco, tatoeba_data, settings=PLUG)
    assert found.counts["without_translation"] == 2


def test_bucc_reads_translations(veco: Veco, tmp_path: Path) -> None:
    write_mining(tmp_path)
    (found,) = bucc.measure(veco, tmp_path, settings=replace(PLUG, layer=3))
    test = bucc.read_test(tmp_path / "bucc2018" / "de-en.dev.gold", with_translations=True)
    assert test.machine_translations == (tuple(WORDS), tuple(WORDS))
    src, tgt = (
        embed_with_translations(veco, texts, WORDS, [3])[0][3] for texts in (test.src, test.tgt)
    )
    np.testing.assert_allclose(src, tgt, atol=1e-5)  # equal texts and equal translations
    assert found.metrics["f1_best"] == 100
    assert "without_translation" not in found.counts
    path = tmp_path / "bucc2018" / "translate-test" / "de-en.dev.en"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[3:]))
    test = bucc.read_test(tmp_path / "bucc2018" / "de-en.dev.gold", with_translations=True)
    assert test.machine_translations[1] == ("", "", "", *WORDS[3:])
    path.write_text("en-99\tunknown\n")
    with pytest.raises(InputError, match=r"the id 'en-99' is not in de-en\.dev\.en"):
        bucc.read_test(tmp_path / "bucc2018" / "de-en.dev.gold", with_translations=True)


def remove_translations(data: Path, name: str) -> None:
    for path in (data / name / "translate-test").iterdir():
        path.unlink()


@pytest.mark.parametrize(
    ("task", "name", "measure"),
    [("tatoeba", "tatoeba", tatoeba.measure), ("bucc", "bucc2018", bucc.measure)],
)
def test_without_translations_plug_in_is_refused(
    veco: Veco,
    tatoeba_data: Path,
    task: str,
    name: str,
    measure: Callable[..., object],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_mining(tatoeba_data)
    veco.publish(tmp_path / "model", dtype=torch.float32, state=veco.model.state_dict())
    command = ["evaluate", str(tmp_path / "model"), "--data", str(tatoeba_data), "--tasks", task]
    command += ["--set", "plug=in", "--device", "cpu"]
    assert cli.run(command) == 0
    capfd.readouterr()
    remove_translations(tatoeba_data, name)
    assert cli.run(command) == 2
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert "plug=in needs machine translations of both sides of the test" in lines[0]
    assert f"{name}/translate-test" in lines[0]
    with pytest.raises(InputError, match="needs machine translations"):
        measure(veco, tatoeba_data, settings=PLUG)
    with pytest.raises(InputError, match="needs machine translations"):
        measure(veco, tatoeba_data, languages=["de"], settings=PLUG)


def test_errors(veco: Veco, tiny_encoder: Encoder, tatoeba_data: Path) -> None:
    with pytest.raises(InputError, match="needs a model with cross-attention"):
        tatoeba.measure(tiny_encoder, tatoeba_data, settings=PLUG)
    with pytest.raises(InputError, match="cannot be combined with a language-neutral space"):
        tatoeba.measure(veco, tatoeba_data, settings=replace(PLUG, neutral=True))
    with pytest.raises(InputError, match=r"needs machine translations .*tatoeba\.fra-eng\.fra"):
        tatoeba.measure(veco, tatoeba_data, languages=["fr"], settings=PLUG)
    path = tatoeba_data / "tatoeba" / "translate-test" / "tatoeba.deu-eng.deu"
    path.write_text("one\n")
    with pytest.raises(InputError, match="there are 1 translations of 11 sentences"):
        tatoeba.measure(veco, tatoeba_data, settings=PLUG)


def test_tasks_that_ignore_plug_in_refuse_it(tiny_folder: Path, tatoeba_data: Path) -> None:
    with pytest.raises(InputError, match="word_alignment does not support plug"):
        calque.evaluate(
            tiny_folder, data=tatoeba_data, tasks="word_alignment", settings={"plug": "in"}
        )
    found = calque.evaluate(
        tiny_folder,
        data=tatoeba_data,
        languages=["fr"],
        settings={"plug": "out"},
        device="cpu",
        dry_run=True,
    )
    assert [run.languages for run in found.planned] == [("fr",)]
