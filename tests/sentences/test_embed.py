"""Sentence vectors compared with plain transformers (padding, attention mask, masked mean)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.sentences import embed
from calque.sentences.embed import (
    EmbedCounts,
    center_by_language,
    embed_blocks,
    embed_file,
    embed_layers,
    embed_sentences,
    normalize_vectors,
)

Row = tuple[str, str, str]


@pytest.fixture(scope="module")
def sentences(demo_rows: list[Row]) -> list[str]:
    return [sentence for row in demo_rows[::5] for sentence in row[1:]]


def embed_with_transformers(folder: Path, sentences: list[str], layer: int) -> np.ndarray:
    """Average the text tokens of a padded `AutoModel` batch, without any code of Calque."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(
        sentences, padding=True, return_tensors="pt", return_special_tokens_mask=True
    )
    text = 1 - inputs.pop("special_tokens_mask")
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[layer]
    return ((states * text[..., None]).sum(1) / text.sum(1, keepdim=True)).numpy()


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_matches_plain_transformers(tiny_folder: Path, sentences: list[str], layer: int) -> None:
    vectors = embed_sentences(Encoder.load(tiny_folder), sentences, layer=layer)
    assert vectors.dtype == np.float32
    plain = embed_with_transformers(tiny_folder, sentences, layer)
    np.testing.assert_allclose(vectors, plain, atol=1e-5)


def test_default_is_the_retrieval_layer(tiny_encoder: Encoder, sentences: list[str]) -> None:
    best = embed_sentences(tiny_encoder, sentences)
    np.testing.assert_array_equal(
        best, embed_sentences(tiny_encoder, sentences, layer=tiny_encoder.retrieval_layer)
    )
    assert not np.allclose(best, embed_sentences(tiny_encoder, sentences, layer=-1), atol=1e-3)


@pytest.mark.parametrize("batch_tokens", [1, 100, 100_000])
def test_order_and_batches_do_not_matter(
    tiny_encoder: Encoder, sentences: list[str], batch_tokens: int
) -> None:
    order = np.random.default_rng(0).permutation(len(sentences))
    shuffled = embed_sentences(
        tiny_encoder, (sentences[i] for i in order), batch_tokens=batch_tokens
    )
    straight = embed_sentences(tiny_encoder, sentences)
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-5)


def test_several_layers_in_one_pass(tiny_encoder: Encoder, sentences: list[str]) -> None:
    by_layer = embed_layers(tiny_encoder, sentences, [3, 0, -1])
    assert list(by_layer) == [3, 0, 4]
    for layer, vectors in by_layer.items():
        alone = embed_sentences(tiny_encoder, sentences, layer=layer)
        np.testing.assert_allclose(vectors, alone, atol=1e-6)


def test_layers_above_the_requested_one_do_not_run(tiny_encoder: Encoder) -> None:
    ran: list[int] = []
    layers = tiny_encoder.family.get_layers(tiny_encoder.model)
    hooks = [
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
        for number, layer in enumerate(layers, start=1)
    ]
    embed_sentences(tiny_encoder, ["Hello."], layer=2)
    for hook in hooks:
        hook.remove()
    assert ran == [1, 2]


def test_long_sentences_are_averaged_over_windows(tiny_encoder: Encoder, tiny_folder: Path) -> None:
    words = [f"word{number}" for number in range(200)]
    ids = tiny_encoder.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
    room = tiny_encoder.max_tokens - 2
    (block,) = embed_blocks(tiny_encoder, ["Short.", " ".join(words), ""], [2])
    n_windows = -(-len(ids) // room)
    assert n_windows > 3
    assert block.counts == EmbedCounts(n_sentences=3, n_empty=1, n_long=1, n_windows=n_windows)
    windows = [
        [tiny_encoder.tokenizer.cls_token_id, *part, tiny_encoder.tokenizer.sep_token_id]
        for part in np.array_split(ids, n_windows)
    ]
    with torch.no_grad():
        states = [
            tiny_encoder.model(torch.tensor([w]), output_hidden_states=True).hidden_states[2][0]
            for w in windows
        ]
    mean = torch.cat([state[1:-1] for state in states]).mean(0)
    np.testing.assert_allclose(block.vectors[2][1], mean, atol=1e-5)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_sentences_around_the_maximum_length(tiny_encoder: Encoder, extra: int) -> None:
    token = tiny_encoder.tokenizer.encode("a", add_special_tokens=False)
    room = tiny_encoder.max_tokens - 2
    text = " ".join(["a"] * ((room + extra) // len(token)))
    n_tokens = len(tiny_encoder.tokenizer.encode(text, add_special_tokens=False))
    assert n_tokens == room + extra
    (block,) = embed_blocks(tiny_encoder, [text], [1])
    assert block.counts.n_windows == (2 if extra > 0 else 0)
    assert np.isfinite(block.vectors[1]).all()


def test_truncation_settings_of_the_tokenizer_are_ignored(tiny_folder: Path) -> None:
    encoder, text = Encoder.load(tiny_folder), "Not a word of this long sentence may be lost."
    free = embed_sentences(encoder, [text, "No."])
    encoder.tokenizer([text], truncation=True, max_length=4, padding="max_length")
    np.testing.assert_array_equal(embed_sentences(encoder, [text, "No."]), free)


def test_empty_sentences_are_zero(tiny_encoder: Encoder) -> None:
    (block,) = embed_blocks(tiny_encoder, ["", " \t ", "Hello."], [1])
    assert (block.vectors[1][:2] == 0).all()
    assert (block.vectors[1][2] != 0).all()
    assert block.counts.n_empty == 2


def test_no_sentences(tiny_encoder: Encoder) -> None:
    assert embed_sentences(tiny_encoder, []).shape == (0, tiny_encoder.hidden_size)
    assert embed_sentences(tiny_encoder, ["", ""]).tolist() == [[0.0] * 64] * 2


def test_blocks_are_limited_by_sentences_and_characters(
    tiny_encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embed, "BLOCK_SENTENCES", 3)
    monkeypatch.setattr(embed, "BLOCK_CHARACTERS", 10)
    texts = ["a", "b", "c", "d" * 12, "e", "f"]
    blocks = list(embed_blocks(tiny_encoder, iter(texts), [1]))
    assert [block.counts.n_sentences for block in blocks] == [3, 1, 2]
    total = sum((block.counts for block in blocks), EmbedCounts())
    assert total.n_sentences == 6


@pytest.mark.gpu
def test_half_precision_on_a_gpu(tiny_folder: Path, sentences: list[str]) -> None:
    exact = embed_sentences(Encoder.load(tiny_folder), sentences)
    half = embed_sentences(
        Encoder.load(tiny_folder, device="cuda", dtype=torch.bfloat16), sentences
    )
    cosines = (normalize_vectors(exact) * normalize_vectors(half)).sum(axis=1)
    assert cosines.min() > 0.999


def test_a_single_string_is_an_error(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="pass a list"):
        embed_sentences(tiny_encoder, "Hello.")


def test_a_missing_layer_is_an_error(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="layer 9"):
        embed_sentences(tiny_encoder, ["Hello."], layer=9)


def test_centering_by_language(tiny_encoder: Encoder, demo_rows: list[Row]) -> None:
    languages = [row[0] for row in demo_rows]
    texts = [row[2] for row in demo_rows]
    centered = embed_sentences(tiny_encoder, texts, center_by=languages)
    for language in ("de", "hi"):
        rows = [i for i, name in enumerate(languages) if name == language]
        np.testing.assert_allclose(centered[rows].mean(0), 0, atol=1e-6)
    plain = embed_sentences(tiny_encoder, texts)
    np.testing.assert_allclose(centered[0] - centered[1], plain[0] - plain[1], atol=1e-6)
    with pytest.raises(InputError, match="1 languages for 2 sentences"):
        center_by_language(np.zeros((2, 3), dtype=np.float32), ["de"])


def test_normalized_rows_have_length_one(tiny_encoder: Encoder) -> None:
    vectors = embed_sentences(tiny_encoder, ["Hello.", ""], normalize=True)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 0], rtol=1e-6)
    assert normalize_vectors(vectors).dtype == np.float32


TEXTS = ["One.", "Two words.", "", "And three more.", "Fünf."]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
def test_file_equals_memory(
    tiny_encoder: Encoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    center: bool,
    normalize: bool,
) -> None:
    monkeypatch.setattr(embed, "BLOCK_SENTENCES", 2)
    text, path = write_lines(tmp_path / "text", TEXTS), tmp_path / "vectors.npy"
    seen: list[tuple[str, int, int | None]] = []
    result = embed_file(
        text,
        output=path,
        model=tiny_encoder,
        center=center,
        normalize=normalize,
        progress=lambda *step: seen.append(step),
    )
    expected = embed_sentences(
        tiny_encoder, TEXTS, center_by=["one"] * 5 if center else None, normalize=normalize
    )
    np.testing.assert_allclose(np.load(path), expected, atol=1e-6)
    assert (np.load(path)[2] == 0).all()
    assert (result.counts.n_sentences, result.counts.n_empty) == (5, 1)
    assert seen[1:] == [("embedding", n_done, 5) for n_done in (2, 4, 5)]
    assert sorted(tmp_path.iterdir()) == [text, path]


@pytest.mark.parametrize("center", [False, True])
def test_empty_file(tiny_encoder: Encoder, tmp_path: Path, center: bool) -> None:
    text = write_lines(tmp_path / "text", [])
    embed_file(text, output=tmp_path / "none.npy", model=tiny_encoder, center=center)
    assert np.load(tmp_path / "none.npy").shape == (0, 64)


def test_an_interrupted_run_keeps_the_old_file(
    tiny_encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        if done == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(embed, "BLOCK_SENTENCES", 2)
    text, path = write_lines(tmp_path / "text", TEXTS), tmp_path / "vectors.npy"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        embed_file(text, output=path, model=tiny_encoder, progress=interrupt)
    assert path.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [text, path]


@pytest.mark.parametrize(
    ("name", "problem"), [("v.txt", "try v.npy"), ("-", "as a .npy file"), ("no/v.npy", "mkdir -p")]
)
def test_impossible_outputs(tiny_encoder: Encoder, tmp_path: Path, name: str, problem: str) -> None:
    text = write_lines(tmp_path / "text", TEXTS)
    with pytest.raises(InputError, match=problem):
        embed_file(text, output=tmp_path / name, model=tiny_encoder)
