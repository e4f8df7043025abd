"""DeBERTa: folders, words, compilation, half precision and unsupported features."""

from __future__ import annotations

import json
import shutil
import warnings
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.toy_tokenizers import encode_words
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, DebertaV2Config

from calque.errors import InputError
from calque.models.deberta import RowTable, find_relative_positions
from calque.models.encoder import Encoder
from calque.models.loading import MissingHeadWarning, build_model
from calque.models.seq2seq import DecoderPlan, build_seq2seq, random_weights
from calque.models.veco import Veco
from calque.tokens.layout import add_pair_special_tokens, join_sides
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.tokens.tokenizer import SpecialTokens, encode_sentences, load_tokenizer
from calque.types import TokenBatch

WEIGHTS = "model.safetensors"
TEXT = ["Our guests will arrive in a few minutes.", "Unsere Gäste kommen an.", "Ja."]


@pytest.fixture
def folder(deberta_folder: Path, tmp_path: Path) -> Path:
    """A copy of the model that tests may damage."""
    return Path(shutil.copytree(deberta_folder, tmp_path / "model"))


def read_pairs(encoder: Encoder, *, reset: bool, rows: bool, n_pairs: int = 3) -> TokenBatch:
    """Pack pairs, in three rows of 64 that sequences share or one after the other."""
    sides = encode_sentences(encoder.tokenizer, [*TEXT, *reversed(TEXT)])
    left, right = (
        Ragged.of([s.tolist() for s in part[:n_pairs]]) for part in (sides[:3], sides[3:])
    )
    marks = SpecialTokens.of(encoder.tokenizer)
    pairs, positions = join_sides(*add_pair_special_tokens(left, right, marks), reset=reset)
    shape = BatchShape(192, 64, 6, 192) if rows else None
    return pack(pairs, positions=positions, shape=shape, pad_id=marks.pad_id)


def sharpen(encoder: Encoder) -> Encoder:
    """Copy an encoder and make its weights large, so that attention is not uniform."""
    encoder = deepcopy(encoder)
    with torch.no_grad():
        for name, weight in encoder.model.named_parameters():
            if "proj.weight" in name:
                weight *= 8
    return encoder


@torch.no_grad()
def test_a_saved_folder_is_a_plain_hugging_face_folder(
    deberta_encoder: Encoder, deberta_folder: Path
) -> None:
    ids = deberta_encoder.tokenizer(TEXT, padding=True, return_tensors="pt")
    expected = deberta_encoder.model(**ids).logits
    model, report = AutoModelForMaskedLM.from_pretrained(deberta_folder, output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(model.eval()(**ids).logits, expected)
    assert model.cls.predictions.decoder.weight is model.get_input_embeddings().weight
    _, report = AutoModel.from_pretrained(deberta_folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert all(key.startswith("cls.") for key in report["unexpected_keys"])
    assert "calque" not in (deberta_folder / "config.json").read_text("utf-8")
    tokenizer = AutoTokenizer.from_pretrained(deberta_folder)
    assert tokenizer(TEXT)["input_ids"] == deberta_encoder.tokenizer(TEXT)["input_ids"]


@torch.no_grad()
def test_the_head_of_published_models_is_found(folder: Path, tmp_path: Path) -> None:
    """It is called `lm_predictions`, as transformers does with `legacy: false`."""
    config = DebertaV2Config.from_pretrained(folder)
    config.legacy = False
    published = AutoModelForMaskedLM.from_config(config).eval()
    for weight in published.parameters():
        weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(weight.numel()))
    state = {key: value.clone() for key, value in published.state_dict().items()}
    assert "lm_predictions.lm_head.dense.weight" in state
    state["mask_predictions.dense.weight"] = torch.ones(64, 64)  # tells replaced words
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    ids = torch.tensor([[1, 20, 30, 40, 2]])
    for legacy in (True, False):
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {"legacy": legacy}))
        encoder = Encoder.load(folder)  # a warning would be an error
        torch.testing.assert_close(encoder.model(ids).logits, published(ids).logits)
        encoder.save(tmp_path / "saved")
        stored = load_file(tmp_path / "saved" / WEIGHTS)
        assert not any(key.startswith("lm_predictions") for key in stored)
        loaded, report = AutoModelForMaskedLM.from_pretrained(
            tmp_path / "saved", output_loading_info=True
        )
        assert not any(report.values())
        torch.testing.assert_close(loaded.eval()(ids).logits, published(ids).logits)


def test_a_body_alone_loads_with_a_warning(
    deberta_encoder: Encoder, folder: Path, tmp_path: Path
) -> None:
    AutoModel.from_pretrained(folder).save_pretrained(tmp_path / "body")
    deberta_encoder.tokenizer.save_pretrained(tmp_path / "body")
    with pytest.warns(MissingHeadWarning, match="no language-modeling head"):
        encoder = Encoder.load(tmp_path / "body")
    ids = torch.tensor([[1, 20, 30, 40, 2]])
    expected = deberta_encoder.model.deberta(ids).last_hidden_state
    assert torch.equal(encoder.model.deberta(ids).last_hidden_state, expected)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"relative_attention": False}, "deberta.encoder.rel_embeddings.weight"),
        ({"norm_rel_ebd": "none"}, "deberta.encoder.LayerNorm"),
        ({"share_att_key": False}, "deberta.encoder.layer.0.attention.self.pos_key_proj"),
        ({"conv_kernel_size": 3}, "deberta.encoder.conv"),
        ({"position_biased_input": True}, "deberta.embeddings.position_embeddings"),
        ({"position_buckets": 64}, "deberta.encoder.rel_embeddings.weight"),
    ],
)
def test_weights_that_do_not_fit_the_configuration_are_errors(
    changes: dict[str, object], first: str, folder: Path
) -> None:
    """transformers would ignore some of them, or initialize others at random."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    problem = f"tensors are missing, superfluous or of a wrong shape, first {first}"
    with pytest.raises(InputError, match=problem) as caught:
        Encoder.load(folder)
    assert "\n" not in str(caught.value)


def test_a_convolution_that_is_not_configured_is_an_error(
    deberta_encoder: Encoder, tmp_path: Path
) -> None:
    config = deepcopy(deberta_encoder.config)
    config.conv_kernel_size = 3
    Encoder(build_model(config), deberta_encoder.tokenizer).save(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    del content["conv_kernel_size"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"first deberta.encoder.conv"):
        Encoder.load(tmp_path)


def test_words_and_special_tokens(deberta_encoder: Encoder) -> None:
    """Words are tokenized as in text, and pairs have the tokenizer's special tokens."""
    tokenizer, words = deberta_encoder.tokenizer, ["Our", "guests", "will", "arrive", "."]
    (pieces,) = encode_words(tokenizer, [words])
    (ids,) = encode_sentences(tokenizer, [" ".join(words)])
    assert pieces.ids.tolist() == ids.tolist()
    starts = [k for k, piece in enumerate(tokenizer.convert_ids_to_tokens(ids)) if piece[0] == "▁"]
    assert pieces.first_pieces().tolist() == starts
    batch = read_pairs(deberta_encoder, reset=True, rows=False)
    pair = batch.ids[: batch.offsets[1]].tolist()
    assert pair == tokenizer(TEXT[0], TEXT[2])["input_ids"]


def test_a_sentencepiece_file_alone_names_the_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mDeBERTa is published; the message of transformers names another package."""
    monkeypatch.setattr("calque.tokens.tokenizer.find_spec", lambda name: None)
    (folder / "tokenizer.json").rename(folder / "spm.model")
    with pytest.raises(InputError, match=r"spm\.model: .* sentencepiece.*pip install") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
    (folder / "spm.model").rename(folder / "tokenizer.json")
    load_tokenizer(folder)


@pytest.mark.parametrize(
    ("reset", "known", "conv"),
    [(False, True, 0), (False, False, 0), (True, False, 0), (True, False, 3)],
)
def test_all_batches_share_one_compiled_graph(
    reset: bool, known: bool, conv: int, deberta_encoder: Encoder
) -> None:
    from torch._dynamo.testing import CompileCounter

    encoder = sharpen(deberta_encoder)
    if conv:
        config = deepcopy(deberta_encoder.config)
        config.conv_kernel_size = conv
        encoder = Encoder(build_model(config), encoder.tokenizer).eval()
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(encoder.forward, fullgraph=True, dynamic=False, backend=counter)
    for n_pairs in (3, 1):
        batch = read_pairs(encoder, reset=reset, rows=True, n_pairs=n_pairs)
        batch = replace(batch, has_default_positions=known)
        real = batch.ids != 0
        found, expected = compiled(batch)[0][real], encoder(batch)[0][real]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


@pytest.mark.parametrize("rows", [False, True])
def test_one_distance_matrix_serves_all_sequences_with_default_positions(
    rows: bool, deberta_encoder: Encoder
) -> None:
    """Otherwise distances, one per pair of tokens and head, would fill the memory."""
    body = deberta_encoder.family.get_body(deberta_encoder.model)
    batches = [read_pairs(deberta_encoder, reset=reset, rows=rows) for reset in (False, True)]
    plain = pack(Ragged.of([[1, 5, 6, 2], [1, 7, 2]]), pad_id=0)
    assert [batch.has_default_positions for batch in (*batches, plain)] == [False, False, True]
    tables = [RowTable.build(batch) for batch in batches]
    found = [find_relative_positions(body, *each) for each in zip(batches, tables, strict=True)]
    longest = tables[0].shape[1]
    assert [tuple(numbers.shape) for numbers in found if numbers is not None] == [
        (1, 1, longest, longest),
        (1, 3 * 4, longest, longest),  # three rows or pairs, four heads
    ]
    assert torch.equal(found[0][0, 0], body.encoder.get_rel_pos(torch.zeros(1, longest, 1))[0])


@pytest.mark.parametrize("rows", [False, True])
def test_half_precision_is_finite_and_close(rows: bool, deberta_encoder: Encoder) -> None:
    """Padding attends to nothing or to padding; its states must not make gradients NaN."""
    encoder = deepcopy(deberta_encoder).train(False)
    batch = read_pairs(encoder, reset=True, rows=rows)
    (expected,) = encoder(batch)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = encoder(batch)
    assert found.isfinite().all()
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)
    found.float().cos().sum().backward()
    gradients = [p.grad for p in encoder.model.deberta.parameters() if p.grad is not None]
    assert len(gradients) > 30
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_unsupported_features_are_errors(deberta_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="'deberta-v2' have no cross-attention"):
        Veco.plug(deberta_encoder)
    start = random_weights(deberta_encoder.config)
    with pytest.raises(InputError, match="a deberta-v2 model has no cross-attention"):
        build_seq2seq(DecoderPlan(), start, deberta_encoder.tokenizer)


def test_nothing_is_printed_while_loading(
    deberta_encoder: Encoder, deberta_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """transformers warns if another attention implementation is requested."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Encoder.load(deberta_folder)
        Encoder(build_model(deberta_encoder.config), deberta_encoder.tokenizer)
    assert capfd.readouterr() == ("", "")


def test_every_weight_of_the_body_gets_a_gradient(deberta_encoder: Encoder) -> None:
    encoder: Any = deepcopy(deberta_encoder)
    encoder(read_pairs(encoder, reset=False, rows=True))[0].cos().sum().backward()
    weights = dict(encoder.model.deberta.named_parameters())
    assert [name for name, weight in weights.items() if weight.grad is None] == []
