"""DeBERTa through the command line: vectors, links, scores, a tagger, vectors of words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import calque
from calque.cli import run
from calque.vectors.static import WordVectors

DATA = Path(__file__).parents[1] / "data"
LINES = ["Guten Morgen!", "Our guests will arrive in a few minutes.", "请坐", "Ja."]


@torch.no_grad()
def test_vectors_are_those_of_transformers(
    deberta_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The mean of a sentence's own pieces in the middle layer, from one padded batch."""
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in LINES), "utf-8")
    out = tmp_path / "v.npy"
    command = ["embed", str(tmp_path / "lines"), "-o", str(out), "--model", str(deberta_folder)]
    assert run([*command, "--device", "cpu"]) == 0
    assert capfd.readouterr().err.startswith(f"{out}: 4 vectors; ")
    tokenizer = AutoTokenizer.from_pretrained(deberta_folder)
    model = AutoModel.from_pretrained(deberta_folder).eval()
    batch = tokenizer(LINES, padding=True, return_tensors="pt", return_special_tokens_mask=True)
    inside = (1 - batch.pop("special_tokens_mask"))[..., None]
    states = model(**batch, output_hidden_states=True).hidden_states[2]
    expected = (states * inside).sum(1) / inside.sum(1)
    np.testing.assert_allclose(np.load(out), expected.numpy(), atol=1e-5)


def test_long_lines_are_read_in_windows(deberta_folder: Path) -> None:
    """Longer input is possible, but was not trained."""
    encoder = calque.load(deberta_folder)
    (vector,) = encoder.embed(["Our guests will arrive. " * 60])
    assert np.isfinite(vector).all()


def test_links_do_not_depend_on_the_batch(
    deberta_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pairs = (DATA / "gold" / "de-en.text").read_text("utf-8").splitlines()[:6]
    found = []
    for number, lines in enumerate([pairs, *([pair] for pair in pairs)]):
        file = tmp_path / f"{number}.text"
        file.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        command = ["align", str(file), "--model", str(deberta_folder), "--device", "cpu"]
        assert run(command) == 0
        found.append(capfd.readouterr().out)
    assert "".join(found[1:]) == found[0]
    assert found[0].count("-") > 12


def test_scores_of_a_grid(
    deberta_folder: Path, demo_rows: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    """Retrieval, word alignment, and a tagger that is trained."""
    data, out = tmp_path / "data", tmp_path / "out"
    shutil.copytree(DATA / "xtreme", data)
    shutil.copytree(DATA / "gold", data / "gold_alignments")
    for side, column in (("eng", 1), ("deu", 2)):
        lines = [row[column] + "\n" for row in demo_rows if row[0] == "de"]
        (data / f"tatoeba.deu-eng.{side}").write_text("".join(lines), "utf-8")
    command = ["evaluate", f"mini={deberta_folder}", "--data", str(data), "--jobs", "0"]
    tasks = ["--tasks", "tatoeba,word_alignment,pos", "--seeds", "1", "--device", "cpu"]
    settings = [f"--set={key}" for key in ("epochs=2", "batch_tokens=512", "learning_rate=1e-3")]
    assert run([*command, *tasks, *settings, "-o", str(out)]) == 0
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"tatoeba", "word_alignment", "pos"}
    assert all(row["error"] is None and np.isfinite(row["value"]) for row in rows)
    english = [row["value"] for row in rows if (row["task"], row["language"]) == ("pos", "en")]
    assert english[0] > 0.1


def test_static_vectors(deberta_folder: Path, tmp_path: Path) -> None:
    sentences = [
        "The quick brown fox jumps over the lazy dog.",
        "A quick fox runs over the bridge.",
    ]
    (tmp_path / "en.txt").write_text(f"{' '.join(sentences)}\n" * 6, "utf-8")
    output = ["-o", str(tmp_path / "en.vec"), "--language", "en", "--model", str(deberta_folder)]
    options = ["--min-count", "6", "--epochs", "1", "--subsample", "0.1", "--device", "cpu"]
    assert run(["extract", str(tmp_path / "en.txt"), *output, *options]) == 0
    vectors = WordVectors.load(tmp_path / "en.vec", cache=False)
    assert "fox" in vectors.words
    assert np.isfinite(vectors.matrix).all()
