"""Translation and denoising: the loss against torch, batches and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from calque.errors import InputError
from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, random_weights
from calque.objectives.generation import (
    DenoisingSeq2Seq,
    DenoisingSeq2SeqSettings,
    Seq2SeqBatch,
    Translation,
    TranslationSettings,
    smoothed_cross_entropy,
)
from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder

SRC = Ragged.of([[10, 11, 12], [13], [14, 15]])
TGT = Ragged.of([[20], [21, 22], [23, 24, 25, 26]])
PAIRS = Ragged(np.array([0, 0, 1]), np.ones(3, dtype=np.int64))
LANGUAGES = ["en-de", "en-ja"]


def split(ids: Tensor, offsets: Tensor) -> list[list[int]]:
    return [part.tolist() for part in torch.tensor_split(ids, offsets[1:-1].tolist())]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def special_tokens(tiny_tokenizer: PreTrainedTokenizerFast) -> SpecialTokens:
    return SpecialTokens.of(tiny_tokenizer)


@pytest.fixture(scope="module")
def model(tiny_tokenizer: PreTrainedTokenizerFast, tiny_encoder: Encoder) -> Seq2Seq:
    plan = DecoderPlan(tie="all", languages=("de", "en", "ja"))
    return build_seq2seq(plan, random_weights(tiny_encoder.config), tiny_tokenizer).eval()


def collate(
    model: Seq2Seq, special_tokens: SpecialTokens, direction: Any, shape: BatchShape | None = None
) -> Any:
    objective = Translation(TranslationSettings(direction=direction))
    made = objective.build_collator(special_tokens, shape)
    objective.start(model, LANGUAGES)
    return made


# The loss


@given(st.floats(0, 0.9), st.integers(0, 99))
def test_the_loss_equals_that_of_torch(smoothing: float, seed: int) -> None:
    draw = generator(seed)
    features = torch.randn(7, 5, generator=draw, dtype=torch.float64)
    weight = torch.randn(11, 5, generator=draw, dtype=torch.float64)
    bias = torch.randn(11, generator=draw, dtype=torch.float64)
    labels = torch.tensor([0, 3, -100, 10, 4, 4, -100])
    loss, plain = smoothed_cross_entropy(features, weight, bias, labels, smoothing)
    logits = F.linear(features, weight, bias)
    wanted = F.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(plain, F.cross_entropy(logits, labels))


def test_the_gradient_of_the_loss_is_correct() -> None:
    draw = generator(1)
    inputs = [
        torch.randn(*size, generator=draw, dtype=torch.float64, requires_grad=True)
        for size in ((4, 3), (6, 3), (6,))
    ]
    labels = torch.tensor([5, -100, 0, 2])
    assert torch.autograd.gradcheck(lambda *x: smoothed_cross_entropy(*x, labels, 0.1)[0], inputs)


def test_without_labels_the_loss_is_zero() -> None:
    weight = torch.ones(4, 2)
    loss, _ = smoothed_cross_entropy(
        torch.ones(2, 2), weight, torch.zeros(4), torch.tensor([-100, -100]), 0.1
    )
    assert loss == 0


# What is read and written


def test_a_batch_has_sources_with_special_tokens_and_shifted_targets(
    model: Seq2Seq, special_tokens: SpecialTokens
) -> None:
    batch = collate(model, special_tokens, "forward")((SRC, TGT, PAIRS), generator())
    de, ja = model.start_tokens["de"], model.start_tokens["ja"]
    assert split(batch.src.ids, batch.src.offsets) == [
        [0, 10, 11, 12, 2],
        [0, 13, 2],
        [0, 14, 15, 2],
    ]
    assert split(batch.tgt.ids, batch.tgt.offsets) == [[de, 20], [de, 21, 22], [ja, 23, 24, 25, 26]]
    assert split(batch.labels, batch.tgt.offsets) == [[20, 2], [21, 22, 2], [23, 24, 25, 26, 2]]
    assert batch.tokens.n_real == 12 + 10


def test_directions(model: Seq2Seq, special_tokens: SpecialTokens) -> None:
    start_tokens = model.start_tokens
    batch = collate(model, special_tokens, "backward")((SRC, TGT, PAIRS), generator())
    assert split(batch.src.ids, batch.src.offsets)[0] == [0, 20, 2]
    assert split(batch.tgt.ids, batch.tgt.offsets)[0] == [start_tokens["en"], 10, 11, 12]
    both = collate(model, special_tokens, "both")
    met = set()
    for seed in range(20):
        batch = both((SRC, TGT, PAIRS), generator(seed))
        for src, tgt in zip(
            split(batch.src.ids, batch.src.offsets),
            split(batch.tgt.ids, batch.tgt.offsets),
            strict=True,
        ):
            met.add((src[1], tgt[0]))
    de, en, ja = (start_tokens[name] for name in ("de", "en", "ja"))
    assert met == {(10, de), (13, de), (14, ja), (20, en), (21, en), (23, en)}


def test_the_model_stores_its_directions(
    tiny_tokenizer: PreTrainedTokenizerFast, tiny_encoder: Encoder, special_tokens: SpecialTokens
) -> None:
    plan = DecoderPlan(languages=("de", "en"))
    model = build_seq2seq(plan, random_weights(tiny_encoder.config), tiny_tokenizer)
    for direction, known in (
        ("backward", [("de", "en")]),
        ("forward", [("de", "en"), ("en", "de")]),
    ):
        objective = Translation(TranslationSettings(direction=direction))  # type: ignore[arg-type]
        objective.build_collator(special_tokens, None)
        objective.start(model, ["en-de"])
        assert model.directions == known


def compute(objective: Any, model: Seq2Seq, batch: Seq2SeqBatch) -> dict[str, float]:
    with torch.no_grad():
        terms = objective(model, batch)
    return {"loss": float(terms.loss), "nll": float(terms.metrics["nll"])}


def test_a_fixed_shape_changes_only_the_shape(
    model: Seq2Seq, special_tokens: SpecialTokens
) -> None:
    shape = BatchShape(tokens=64, row=16, sequences=10, budget=64)
    objective = Translation(TranslationSettings())
    free = collate(model, special_tokens, "forward")((SRC, TGT, PAIRS), generator())
    filled = collate(model, special_tokens, "forward", shape)((SRC, TGT, PAIRS), generator())
    one, other = compute(objective, model, free), compute(objective, model, filled)
    assert one == pytest.approx(other, rel=1e-5)
    assert len(filled.src.ids) == len(filled.tgt.ids) == 36
    assert filled.tokens.n_real == free.tokens.n_real
    few = collate(model, special_tokens, "forward", shape)(
        (Ragged.of([[10]]), Ragged.of([[20]]), Ragged.of([[0]])), generator()
    )
    for side in ("src", "tgt"):
        first, second = getattr(filled, side), getattr(few, side)
        assert first.ids.shape == second.ids.shape
        assert first.offsets.shape == second.offsets.shape
        assert first.longest == second.longest
        assert int(first.offsets.diff().max()) <= first.longest
    assert compute(objective, model, few)["loss"] > 0


def test_more_tokens_than_the_shape_give_another_shape(
    model: Seq2Seq, special_tokens: SpecialTokens
) -> None:
    shape = BatchShape(tokens=64, row=32, sequences=4, budget=64)
    long = Ragged.of([list(range(10, 38)), list(range(10, 38))])
    arrays = (long, Ragged.of([[20], [21]]), Ragged.of([[0], [0]]))
    batch = collate(model, special_tokens, "forward", shape)(arrays, generator())
    assert batch.src.n_real == 60
    assert len(batch.src.ids) > 60
    assert batch.src.offsets.shape == batch.tgt.offsets.shape


def test_the_loss_equals_that_of_hugging_face(
    model: Seq2Seq, special_tokens: SpecialTokens
) -> None:
    batch = collate(model, special_tokens, "forward")((SRC, TGT, PAIRS), generator())
    total, n_tokens = 0.0, 0
    rows = zip(
        split(batch.src.ids, batch.src.offsets),
        split(batch.tgt.ids, batch.tgt.offsets),
        split(batch.labels, batch.tgt.offsets),
        strict=True,
    )
    for src, tgt, labels in rows:
        with torch.no_grad():
            logits = model.model(
                input_ids=torch.tensor([src]), decoder_input_ids=torch.tensor([tgt])
            ).logits[0]
        total += float(
            F.cross_entropy(logits, torch.tensor(labels), label_smoothing=0.1, reduction="sum")
        )
        n_tokens += len(labels)
    found = compute(Translation(TranslationSettings()), model, batch)
    assert found["loss"] == pytest.approx(total / n_tokens, rel=1e-5)


# Denoising


def make_denoising(
    model: Seq2Seq, special_tokens: SpecialTokens, **settings: Any
) -> tuple[Any, Any]:
    objective = DenoisingSeq2Seq(DenoisingSeq2SeqSettings(**settings))
    made = objective.build_collator(special_tokens, None)
    objective.start(model, ["de", "ja"])
    return objective, made


def test_masked_text_is_restored(model: Seq2Seq, special_tokens: SpecialTokens) -> None:
    objective, made = make_denoising(model, special_tokens)
    text = Ragged.of([list(range(10, 30)), list(range(40, 44))])
    languages = Ragged.of([[0], [1]])
    batch = made((text, languages), generator())
    de, ja = model.start_tokens["de"], model.start_tokens["ja"]
    assert split(batch.labels, batch.tgt.offsets) == [[*range(10, 30), 2], [*range(40, 44), 2]]
    assert [row[0] for row in split(batch.tgt.ids, batch.tgt.offsets)] == [de, ja]
    for row, n_kept in zip(split(batch.src.ids, batch.src.offsets), (13, 3), strict=True):
        assert (row[0], row[-1]) == (special_tokens.cls_id, special_tokens.sep_id)
        assert special_tokens.mask_id in row
        assert sum(token != special_tokens.mask_id for token in row[1:-1]) == n_kept
    again, other = made((text, languages), generator()), made((text, languages), generator(1))
    assert torch.equal(batch.src.ids, again.src.ids)
    assert batch.src.ids.tolist() != other.src.ids.tolist()
    assert compute(objective, model, batch)["loss"] > 0


@pytest.mark.parametrize("rate", [0.15, 0.4, 0.9])
def test_only_masked_tokens_are_written(
    model: Seq2Seq, special_tokens: SpecialTokens, rate: float
) -> None:
    """Against a loop: a mask in the source for each token of the target, nothing else changed."""
    objective, made = make_denoising(model, special_tokens, target="masked", rate=rate)
    texts = [list(range(10, 50)), [60], list(range(70, 77))]
    batch = made((Ragged.of(texts), Ragged.of([[0], [1], [1]])), generator(3))
    de, ja = model.start_tokens["de"], model.start_tokens["ja"]
    rows = zip(
        texts,
        split(batch.src.ids, batch.src.offsets),
        split(batch.tgt.ids, batch.tgt.offsets),
        split(batch.labels, batch.tgt.offsets),
        (de, ja, ja),
        strict=True,
    )
    for text, src, tgt, labels, first in rows:
        n_masked = max(1, round(rate * len(text)))
        expected = [
            token
            for token, read in zip(text, src[1:-1], strict=True)
            if read == special_tokens.mask_id
        ]
        assert all(
            read in (token, special_tokens.mask_id)
            for token, read in zip(text, src[1:-1], strict=True)
        )
        assert len(expected) == n_masked
        assert (tgt, labels) == ([first, *expected], [*expected, special_tokens.sep_id])
    other = made((Ragged.of(texts), Ragged.of([[0], [1], [1]])), generator(4))
    assert other.src.ids.tolist() != batch.src.ids.tolist()
    assert compute(objective, model, batch)["loss"] > 0


def test_masked_tokens_in_a_fixed_shape(model: Seq2Seq, special_tokens: SpecialTokens) -> None:
    """Batches of sentences of any usual length have one shape, with a short target."""
    objective = DenoisingSeq2Seq(DenoisingSeq2SeqSettings(target="masked", rate=0.15))
    shape = BatchShape(tokens=1024, row=64, sequences=200, budget=1024)
    fixed = objective.build_collator(special_tokens, shape)
    free = objective.build_collator(special_tokens, None)
    objective.start(model, ["de", "ja"])
    sizes = set()
    for length in (4, 10, 30, 60):
        text = Ragged.of([list(range(10, 10 + length))] * (1000 // (length + 2)))
        languages = Ragged.of([[0]] * len(text.lengths))
        batches = [made((text, languages), generator()) for made in (fixed, free)]
        sizes.add((len(batches[0].src.ids), len(batches[0].tgt.ids)))
        first, second = (compute(objective, model, batch) for batch in batches)
        assert first == pytest.approx(second, rel=1e-5)
    assert len(sizes) == 1
    n_src, n_tgt = sizes.pop()
    assert n_tgt < n_src / 2


def test_source_of_a_translation_is_masked(model: Seq2Seq, special_tokens: SpecialTokens) -> None:
    objective = Translation(TranslationSettings(direction="both", mask_rate=0.25))
    made = objective.build_collator(special_tokens, None)
    objective.start(model, LANGUAGES)
    arrays = (Ragged.of([[*range(10, 22)]]), Ragged.of([[*range(30, 38)]]), Ragged.of([[0]]))
    plain = collate(model, special_tokens, "both")
    n_masked = set()
    for seed in range(8):
        batch, unmasked = made(arrays, generator(seed)), plain(arrays, generator(seed))
        assert torch.equal(batch.labels, unmasked.labels)
        assert torch.equal(batch.tgt.ids, unmasked.tgt.ids)
        is_masked = batch.src.ids == special_tokens.mask_id
        assert torch.equal(batch.src.ids[~is_masked], unmasked.src.ids[~is_masked])
        n_masked.add((len(batch.src.ids) - 2, int(is_masked.sum())))
    assert n_masked == {(12, 3), (8, 2)}


def test_masked_tokens_cannot_be_permuted() -> None:
    with pytest.raises(ValueError, match="permute=true needs target=text"):
        DenoisingSeq2SeqSettings(target="masked", permute=True)


def test_sentences_end_at_their_last_punctuation(
    model: Seq2Seq, special_tokens: SpecialTokens, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    _, made = make_denoising(model, special_tokens, permute=True)
    flags = made.sentence_ends.flags
    pieces = {piece for piece, number in model.tokenizer.get_vocab().items() if flags[number]}
    assert {".", "?"} <= pieces
    assert "," not in pieces and "<2de>" not in pieces
    ids = tiny_tokenizer("He looked around. Who is it?", add_special_tokens=False)["input_ids"]
    text, languages = Ragged.of([ids]), Ragged.of([[0]])
    batches = [made((text, languages), generator(seed)) for seed in range(8)]
    begins = {int(batch.src.ids[1]) for batch in batches} - {special_tokens.mask_id}
    assert len(begins) > 1
    assert all(batch.labels.tolist() == [*ids, 2] for batch in batches)


# Mistakes


def test_errors_are_reported(
    model: Seq2Seq,
    special_tokens: SpecialTokens,
    tiny_encoder: Encoder,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    objective = Translation(TranslationSettings())
    objective.build_collator(special_tokens, None)
    with pytest.raises(InputError, match=r"the model has no decoder \(add `decoder: {}`"):
        objective.start(tiny_encoder, LANGUAGES)
    with pytest.raises(InputError, match="does not translate into fr"):
        objective.start(model, ["en-fr"])
    alone = build_seq2seq(DecoderPlan(), random_weights(tiny_encoder.config), tiny_tokenizer)
    with pytest.raises(InputError, match=r"\(set model.decoder.languages=\[de, ja\]"):
        objective.start(alone, LANGUAGES)
    objective.start(alone, ["en-de"])
    assert objective.decoder_starts is not None
    assert objective.decoder_starts.find(np.array([0, 0])).tolist() == [0, 0]
    back = Translation(TranslationSettings(direction="backward"))
    back.build_collator(special_tokens, None)
    with pytest.raises(InputError, match=r"\(set model.decoder.languages=\[de, en\]"):
        back.start(alone, ["en-de"])  # after the other objective, which writes German
