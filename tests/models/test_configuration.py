"""config.json, tokenizer.json and generation_config.json: whatever is wrong is one clear line."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import calque
from calque.cli import run
from calque.errors import InputError
from calque.models.configuration import load_config
from calque.models.encoder import Encoder
from calque.models.pooling import batch_words, encode_first_subwords
from calque.models.seq2seq import Seq2Seq

TOO_DEEP = "stands for a list in a list in a list ..."
CONFIG, TOKENIZER, WEIGHTS = "config.json", "tokenizer.json", "model.safetensors"


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that tests may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def change(path: Path, *keys: str | int, value: Any) -> None:
    """Set one value of a JSON file."""
    content = json.loads(path.read_text("utf-8"))
    part = content
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    text = json.dumps(content).replace(json.dumps(TOO_DEEP), "[" * 5000 + "]" * 5000)
    path.write_text(text, "utf-8")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("quantization_config", {"quant_method": "gptq"}, "the weights are quantized"),
        ("quantization_config", 5, "the weights are quantized"),
        ("hidden_act", "gelux", "gelux"),
        ("hidden_act", 7, "hidden_act"),
        ("model_type", ["bert"], r"encoders of type \['bert'\] are not supported"),
        ("vocab_size", 10**30, "a number of 31 digits"),
        ("vocab_size", 10**9, "vocab_size is 1000000000, not a whole number from 1"),
        ("vocab_size", 10**6, r"describes 64,\d{3},\d{3} numbers, but the weights have"),
        ("vocab_size", -1, "vocab_size is -1, not a whole number from 1"),
        ("vocab_size", 0, "vocab_size is 0, not a whole number from 1"),
        ("vocab_size", True, "vocab_size"),
        ("vocab_size", 1500.0, "vocab_size"),
        ("vocab_size", None, "vocab_size"),
        ("num_hidden_layers", 10**7, "num_hidden_layers is 10000000, not a whole number"),
        ("num_hidden_layers", 1000, "num_hidden_layers is larger than the number of tensors"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0, not a whole number"),
        ("hidden_size", 1 << 14, "numbers, but the weights have"),
        ("hidden_size", "wide", "hidden_size"),
        ("intermediate_size", 1 << 19, "numbers, but the weights have"),
        ("num_attention_heads", 0, "num_attention_heads is 0, not a whole number"),
        ("num_attention_heads", 7, "not a multiple"),
        ("max_position_embeddings", 3, "leaves no room for text"),
        ("max_position_embeddings", 131, "of a wrong shape, first .*position_embeddings"),
        ("max_position_embeddings", 1 << 20, "numbers, but the weights have"),
        ("pad_token_id", 10**9, "Padding_idx must be within num_embeddings|no room for text"),
        ("pad_token_id", None, "this is not the configuration of a model"),
        ("type_vocab_size", -1, "type_vocab_size is -1"),
        ("num_labels", 10**9, "the value of num_labels is not valid"),
        ("layer_norm_eps", float("nan"), "the states of layer 4 are not finite"),
        ("layer_norm_eps", -1.0, "the states of layer 4 are not finite"),
        ("chunk_size_feed_forward", 5, "a model with these settings cannot run"),
        ("dtype", "float99", "float99"),
        ("architectures", [5], "architectures"),
        ("unknown", TOO_DEEP, "the JSON is nested too deeply"),
        ("calque", "text", "the value of calque is not valid: 'text'"),
        ("calque", {"retrieval_layer": "2"}, "the value of calque.retrieval_layer is not valid"),
        ("calque", {"retrieval_layer": 9}, "the value of calque.retrieval_layer is not valid: 9"),
        ("calque", {"retrieval_layer": True}, "calque.retrieval_layer is not valid: True"),
        ("calque", {"alignment": []}, None),
        ("calque", {"alignment": "argmax"}, "the value of calque.alignment is not valid"),
        ("calque", {"alignment": {"layer": 99}}, "the value of calque.layer is not valid: 99"),
        ("calque", {"alignment": {"method": 1}}, "the value of calque.method is not valid: 1"),
        ("calque", {"alignment": {"sharpness": "x"}}, "calque.sharpness is not valid"),
        ("calque", {"alignment": {"threshold": float("nan")}}, "calque.threshold is not valid"),
        ("calque", {"alignment": {"calibration": {"slope": 1}}}, "calque.calibration is not valid"),
        ("calque", {"alignment": {"n_iterations": 0}}, "calque.n_iterations is not valid: 0"),
        ("calque", {"targets": "de"}, "the value of calque.targets is not valid"),
        ("calque", {"directions": [["de"]]}, "the value of calque.directions is not valid"),
        ("calque", {"decoder_layers": [9]}, "the value of calque.decoder_layers is not valid"),
    ],
)
def test_values_of_a_config(key: str, value: object, problem: str | None, folder: Path) -> None:
    Encoder.load(folder)  # imports what is needed, before the time is taken
    change(folder / CONFIG, key, value=value)
    began = time.monotonic()
    if problem is None:
        Encoder.load(folder)
        return
    with pytest.raises(InputError, match=problem) as caught:
        Encoder.load(folder)
    assert time.monotonic() - began < 5
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_a_config_without_weights_is_read(folder: Path) -> None:
    expected = load_config(folder).to_dict()
    (folder / WEIGHTS).unlink()
    assert load_config(folder).to_dict() == expected
    change(folder / CONFIG, "num_hidden_layers", value=10**7)
    with pytest.raises(InputError, match="num_hidden_layers"):
        load_config(folder)


@pytest.mark.parametrize(
    ("file", "keys", "value", "problem"),
    [
        (CONFIG, ["encoder"], 5, "the encoder is not one of bert"),
        (CONFIG, ["decoder", "model_type"], "t5", "the decoder is not one of bert"),
        (CONFIG, ["decoder", "model_type"], [], "the decoder is not one of bert"),
        (CONFIG, ["decoder", "num_hidden_layers"], 10**6, "num_hidden_layers is 1000000"),
        (CONFIG, ["encoder", "vocab_size"], 10**7, "numbers, but the weights have"),
        (CONFIG, ["decoder", "quantization_config"], {}, "the weights are quantized"),
        (CONFIG, ["calque"], {"targets": 5}, "the value of calque.targets is not valid"),
        ("generation_config.json", ["early_stopping"], "x", "these are not settings of generation"),
    ],
)
def test_errors_of_an_encoder_decoder(
    file: str, keys: list[str], value: object, problem: str, translator_folder: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(translator_folder, tmp_path / "model"))
    change(folder / file, *keys, value=value)
    with pytest.raises(InputError, match=problem):
        Seq2Seq.load(folder)


@pytest.mark.parametrize(
    ("file", "keys", "value"),
    [
        (TOKENIZER, ["model"], 5),
        (TOKENIZER, ["model", "vocab"], {"a": 1}),
        (TOKENIZER, ["model", "vocab"], []),
        (TOKENIZER, ["model", "unk_id"], 10**6),
        (TOKENIZER, ["model", "unk_id"], None),  # an error of the first unknown character
        (TOKENIZER, ["pre_tokenizer"], {"type": "Split", "pattern": {"Regex": "(["}}),
        (TOKENIZER, ["pre_tokenizer"], {"type": "FixedLength", "length": 0}),  # a panic
        (TOKENIZER, ["normalizer"], {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        (TOKENIZER, ["added_tokens"], TOO_DEEP),
        ("tokenizer_config.json", ["cls_token"], 7),
        ("tokenizer_config.json", ["auto_map"], "evil"),
        ("tokenizer_config.json", ["tokenizer_class"], 5),
    ],
)
def test_errors_of_a_tokenizer(file: str, keys: list[str], value: object, folder: Path) -> None:
    change(folder / file, *keys, value=value)
    with pytest.raises(InputError, match="the tokenizer could not be loaded") as caught:
        Encoder.load(folder)
    assert "\n" not in str(caught.value)


def test_ids_beyond_the_embeddings_are_an_error(folder: Path) -> None:
    vocabulary = {"[UNK]": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "<mask>": 4, "a": 5, "b": 10**6}
    words = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    change(folder / TOKENIZER, "model", value=words)
    change(folder / TOKENIZER, "post_processor", value=None)
    with pytest.raises(
        InputError, match="the tokenizer has 1000001 entries but the model has 1500"
    ):
        Encoder.load(folder)


@pytest.fixture
def overflowing(tiny_encoder: Encoder, tmp_path: Path) -> Path:
    """A model with finite weights whose layer 3 is infinite for tokens other than the first."""
    tiny_encoder.save(tmp_path / "model")
    state = load_file(tmp_path / "model" / WEIGHTS)
    state["roberta.encoder.layer.2.intermediate.dense.bias"].fill_(3e38)
    state["roberta.encoder.layer.2.output.dense.weight"].fill_(3e38)
    state["roberta.embeddings.word_embeddings.weight"][0] = 0
    save_file(state, tmp_path / "model" / WEIGHTS, {"format": "pt"})
    return tmp_path / "model"


def test_states_that_overflow_are_an_error(
    overflowing: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    problem = r"the states of layer \d are not finite \(the weights are damaged or overflow"
    with pytest.raises(InputError, match=problem):
        calque.load(overflowing, "cpu")  # the trial with two tokens
    monkeypatch.setattr(Encoder, "check_runs", lambda self: self)
    model = calque.load(overflowing, "cpu")
    pairs: list[Any] = [(["das", "Haus"], ["the", "house"])]
    uses: list[Callable[[], object]] = [
        lambda: model.embed(["Guten Morgen!"], layer=4),
        lambda: model.align(pairs, layer=3),
        lambda: encode_first_subwords(model, batch_words(model, [["a", "b"]]), [4]),
    ]
    for use in uses:
        with pytest.raises(InputError, match=problem) as caught:
            use()
    assert np.isfinite(model.embed(["Guten Morgen!"], layer=2)).all()  # below, nothing overflows
    assert "layer 4" in str(caught.value)
    with torch.no_grad():  # as in training, which has its own guard
        assert not model(batch_words(model, [["a", "b"]]).batches[0].tokens)[0].isfinite().all()
    text, out = tmp_path / "text", tmp_path / "out"
    text.write_text("a b c\n" * 3)
    for command in (
        ["mine", text, text, "-o", out, "--layer", "4", "--model", overflowing],
        ["extract", text, "-o", out, "--layer", "4", "--model", overflowing, "--min-count", "1"],
    ):
        more = (
            ["--language", "en", "--no-filter", "--method", "pooling"]
            if "extract" in command
            else []
        )
        assert run([str(word) for word in [*command, *more]]) == 2
        assert "the states of layer 4 are not finite" in capsys.readouterr().err
        assert not out.exists()
