"""Loading for inference: the precision of weights, on CPUs with and without bf16 instructions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from calque import embed_file, load
from calque.errors import InputError
from calque.models import inference
from calque.models.inference import choose_dtype, load_encoder


@pytest.fixture
def fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this CPU pass for one with bf16 instructions; small models work without them, too."""
    monkeypatch.setattr(inference, "has_fast_bf16", lambda: True)


@pytest.mark.parametrize(
    ("precision", "device", "dtype"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("fp32", "cpu", torch.float32),
        ("fp32", "cuda", torch.float32),
        ("bf16", "cpu", torch.bfloat16),
        ("bf16", "cuda", torch.bfloat16),
    ],
)
@pytest.mark.usefixtures("fast_bf16")
def test_dtype_of_a_precision(precision: str, device: str, dtype: torch.dtype) -> None:
    assert choose_dtype(precision, torch.device(device)) == dtype


def test_bf16_is_refused_where_it_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "has_fast_bf16", lambda: False)
    with pytest.raises(InputError, match=r"no instructions for bf16.*--precision fp32"):
        choose_dtype("bf16", torch.device("cpu"))
    assert choose_dtype("bf16", torch.device("cuda")) == torch.bfloat16


def test_unknown_precision_lists_the_choices() -> None:
    with pytest.raises(InputError, match=r"--precision fp16 does not exist.*auto, fp32, bf16"):
        choose_dtype("fp16", torch.device("cpu"))


@pytest.mark.usefixtures("fast_bf16")
def test_bf16_gives_nearly_the_same_vectors(
    tiny_folder: Path, tmp_path: Path, demo_rows: list[tuple[str, str, str]]
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{row[1]}\n" for row in demo_rows[:40]), encoding="utf-8")
    vectors = {}
    for precision in ("fp32", "bf16"):
        output = tmp_path / f"{precision}.npy"
        embed_file(text, output=output, model=tiny_folder, device="cpu", precision=precision)
        vectors[precision] = np.load(output)
    cosines = [
        float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
        for one, other in zip(vectors["fp32"], vectors["bf16"], strict=True)
    ]
    assert min(cosines) > 0.999
    assert not np.array_equal(vectors["fp32"], vectors["bf16"])


@pytest.mark.usefixtures("fast_bf16")
def test_models_and_links_in_bf16(tiny_folder: Path, demo_rows: list[tuple[str, str, str]]) -> None:
    model = load(tiny_folder, "cpu", precision="bf16")
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert load_encoder(model, precision="fp32") is model  # a loaded model is returned as it is
    pairs = [(row[1].split(), row[2].split()) for row in demo_rows[:40]]
    links = model.align(pairs)
    exact = load(tiny_folder, "cpu").align(pairs)
    common = sum(len(set(one) & set(other)) for one, other in zip(links, exact, strict=True))
    assert common > 0.9 * sum(map(len, exact))
