"""Encoder–decoders: parity with Hugging Face on packed text, saved folders, initial weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.seq2seq import (
    DecoderPlan,
    Seq2Seq,
    build_seq2seq,
    drop_language_tokens,
    random_weights,
    read_initial_weights,
)
from calque.models.veco import Veco
from calque.tokens.ragged import Ragged, pack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SRC = [[0, 5, 6, 7, 2], [0, 9, 2], [0, 30, 31, 32, 33, 34, 2]]
TGT = [[0, 11, 12], [0, 13, 14, 15], [0, 16]]
KINDS = ("xlm-roberta", "roberta", "bert", "camembert")


def make_config(kind: str, n_tokens: int, n_layers: int = 3) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(
        kind,
        vocab_size=n_tokens,
        hidden_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=66,
        type_vocab_size=2 if kind == "bert" else 1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )


def pad(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [1] * (longest - len(row)) for row in rows])


def predict(model: Any) -> Tensor:
    """Logits of Hugging Face's own forward on padded text, those of real tokens."""
    src, tgt = pad(SRC), pad(TGT)
    with torch.no_grad():
        logits = model(
            input_ids=src,
            attention_mask=(src != 1).long(),
            decoder_input_ids=tgt,
            decoder_attention_mask=(tgt != 1).long(),
        ).logits
    return torch.cat([rows[: len(row)] for rows, row in zip(logits, TGT, strict=True)])


def predict_packed(model: Seq2Seq) -> Tensor:
    src, tgt = (pack(Ragged.of(rows), pad_id=1) for rows in (SRC, TGT))
    with torch.no_grad():
        (memory,) = model(src)
        states = model.decode(tgt, src, memory)
        return F.linear(model.lm_features(states), *model.output_layer())


@pytest.fixture
def made(tiny_tokenizer: PreTrainedTokenizerFast) -> Seq2Seq:
    config = make_config("xlm-roberta", len(tiny_tokenizer))
    return build_seq2seq(DecoderPlan(tie="nothing"), random_weights(config), tiny_tokenizer).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tie", ["nothing", "embeddings", "all"])
def test_packed_text_equals_hugging_face_and_is_saved_as_a_plain_folder(
    kind: str, tie: Any, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    from transformers import EncoderDecoderModel

    start = random_weights(make_config(kind, len(tiny_tokenizer)))
    plan = DecoderPlan(tie=tie, languages=("de",), layers=2)
    model = build_seq2seq(plan, start, tiny_tokenizer).eval()
    wanted = predict(model.model)
    torch.testing.assert_close(predict_packed(model), wanted, atol=1e-5, rtol=1e-5)
    if model.can_fuse:
        model.use_fused_layers = True
        torch.testing.assert_close(predict_packed(model), wanted, atol=1e-5, rtol=1e-5)
    model.save(tmp_path)
    loaded, info = EncoderDecoderModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(predict(loaded.eval()), wanted)
    assert loaded.generation_config.decoder_start_token_id == len(tiny_tokenizer)
    assert loaded.generation_config.num_beams == 5
    again = Seq2Seq.load(tmp_path)
    assert again.start_tokens == {"de": len(tiny_tokenizer)}
    assert torch.equal(predict(again.model), wanted)


def test_tied_weights_are_one_and_stay_one(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    start = random_weights(make_config("xlm-roberta", len(tiny_tokenizer)))
    sizes = {}
    for tie in ("nothing", "embeddings", "all"):
        plan = DecoderPlan(tie=tie, layers=2)  # type: ignore[arg-type]
        model = build_seq2seq(plan, start, tiny_tokenizer).double()
        sizes[tie] = sum(p.numel() for p in model.parameters())
    assert sizes["nothing"] - sizes["embeddings"] == 32 * len(tiny_tokenizer)
    decoder, encoder = model.model.decoder.roberta, model.model.encoder
    assert decoder.embeddings.word_embeddings.weight is encoder.embeddings.word_embeddings.weight
    for part in ("attention.self.query", "attention.output.LayerNorm", "intermediate.dense"):
        for number, layer in enumerate(decoder.encoder.layer):
            theirs = encoder.encoder.layer[number + 1].get_submodule(part).weight  # the last two
            assert layer.get_submodule(part).weight is theirs
    assert decoder.encoder.layer[0].attention.self.is_causal
    assert not encoder.encoder.layer[1].attention.self.is_causal
    own = {name for name, _ in model.model.decoder.named_parameters() if "crossattention" in name}
    assert len(own) == 2 * 10
    head = model.model.decoder.get_output_embeddings().weight
    assert head is encoder.embeddings.word_embeddings.weight


@pytest.mark.parametrize(("which", "numbers"), [("first", [0, 1]), ("last", [2, 3])])
def test_layers_are_taken_from_the_requested_end(
    which: Any, numbers: list[int], tiny_folder: Path, tiny_encoder: Encoder
) -> None:
    plan = DecoderPlan(layers=2, which=which, tie="nothing")
    model = build_seq2seq(plan, read_initial_weights(tiny_folder, plan), tiny_encoder.tokenizer)
    theirs = tiny_encoder.family.get_layers(tiny_encoder.model)
    for number, layer in zip(numbers, model.model.decoder.roberta.encoder.layer, strict=True):
        ours = dict(layer.named_parameters())
        for name, weight in theirs[number].named_parameters():
            assert torch.equal(weight, ours[name]), name
    src = pack(Ragged.of(SRC), pad_id=1)
    assert torch.equal(model.eval()(src)[0], tiny_encoder(src)[0])
    mine, head = model.output_layer(), tiny_encoder.output_layer()
    assert torch.equal(mine[0], head[0])


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
@pytest.mark.parametrize("n_spare", [1, 40])
def test_embeddings_beyond_the_tokenizer_are_kept(
    kind: str, n_spare: int, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Published encoders often have more embeddings than tokens."""
    from transformers import AutoModelForMaskedLM, EncoderDecoderModel

    n_rows = len(tiny_tokenizer) + n_spare
    encoder = Encoder(build_model(make_config(kind, n_rows)), tiny_tokenizer).eval()
    encoder.save(tmp_path / "start")
    plan = DecoderPlan(tie="all", languages=("de", "en"))
    model = build_seq2seq(
        plan, read_initial_weights(tmp_path / "start", plan), tiny_tokenizer
    ).eval()
    table, head = model.output_layer()[0], encoder.output_layer()[0]
    assert len(table) == max(n_rows, len(tiny_tokenizer) + 2)
    assert torch.equal(table[:n_rows], head)
    src = pack(Ragged.of(SRC), pad_id=1)
    assert torch.equal(model(src)[0], encoder(src)[0])
    model.publish(tmp_path / "made", dtype=torch.float32, state=model.model.state_dict())
    loaded = EncoderDecoderModel.from_pretrained(tmp_path / "made").eval()
    assert torch.equal(predict(loaded), predict(model.model))
    alone = AutoModelForMaskedLM.from_pretrained(tmp_path / "made" / "encoder").eval()
    ids = torch.tensor([SRC[0]])
    before = AutoModelForMaskedLM.from_pretrained(tmp_path / "start").eval()(ids).logits
    torch.testing.assert_close(alone(ids).logits[..., :n_rows], before)


def test_missing_weights_are_drawn_from_the_seed(tiny_folder: Path, tiny_encoder: Encoder) -> None:
    plan = DecoderPlan()
    made = [
        build_seq2seq(
            plan, read_initial_weights(tiny_folder, plan), tiny_encoder.tokenizer, seed=seed
        )
        for seed in (1, 1, 2)
    ]
    names = [name for name in made[0].state_dict() if "crossattention.self.query.weight" in name]
    assert len(names) == 4
    for name in names:
        one, same, other = (each.state_dict()[name] for each in made)
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


@pytest.mark.parametrize("inside", [True, False])
def test_cross_attention_of_veco_is_used(
    inside: bool, tiny_encoder: Encoder, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(3)
    veco = Veco.plug(
        Encoder(build_model(tiny_encoder.config), tiny_encoder.tokenizer), "random", generator
    )
    veco.publish(tmp_path / "model", dtype=torch.float32, state=veco.model.state_dict())
    folder = tmp_path / "model" if inside else tmp_path / "model" / "veco"
    plan = DecoderPlan(tie="all")
    model = build_seq2seq(plan, read_initial_weights(folder, plan), tiny_encoder.tokenizer)
    theirs = veco.model.state_dict()
    for name, weight in model.model.decoder.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    bare = DecoderPlan(cross_attention="random")
    other = build_seq2seq(bare, read_initial_weights(folder, bare), tiny_encoder.tokenizer)
    for name, weight in other.model.decoder.state_dict().items():
        if name.endswith("crossattention.self.query.weight"):
            assert not torch.equal(weight, theirs[name])
        elif "crossattention" not in name:
            assert torch.equal(weight, theirs[name]), name


def test_initial_weights_from_an_encoder_decoder_and_its_encoder_folder(
    made: Seq2Seq, tmp_path: Path
) -> None:
    from transformers import AutoModelForMaskedLM

    made.publish(tmp_path, dtype=torch.float32, state=made.model.state_dict())
    plan = DecoderPlan(tie="nothing", languages=("de", "en"))
    again = build_seq2seq(plan, read_initial_weights(tmp_path, plan), made.tokenizer).eval()
    assert len(again.tokenizer) == len(made.tokenizer) + 2
    assert again.output_layer()[0].shape[0] == len(again.tokenizer)
    n_known = len(made.tokenizer)
    torch.testing.assert_close(predict(again.model)[:, :n_known], predict(made.model))
    src = pack(Ragged.of(SRC), pad_id=1)
    alone = Encoder.load(tmp_path / "encoder")
    assert torch.equal(alone(src)[0], made(src)[0])
    _, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    shallow = DecoderPlan(tie="nothing", layers=1)
    last = build_seq2seq(shallow, read_initial_weights(tmp_path, shallow), made.tokenizer)
    ours = last.model.decoder.roberta.encoder.layer[0].state_dict()
    for name, weight in made.model.decoder.roberta.encoder.layer[2].state_dict().items():
        assert torch.equal(weight, ours[name])
    with pytest.raises(InputError, match=r"this is an encoder–decoder \(give .*/encoder\)"):
        Encoder.load(tmp_path)
    tied = DecoderPlan(tie="all")
    with pytest.raises(InputError, match=r"different weights \(set model.decoder.tie"):
        build_seq2seq(tied, read_initial_weights(tmp_path, tied), made.tokenizer)


def test_languages_are_taken_from_the_initial_weights(made: Seq2Seq, tmp_path: Path) -> None:
    plan = DecoderPlan(tie="nothing", languages=("de", "en"))
    start = random_weights(made.config)
    first = build_seq2seq(plan, start, made.tokenizer)
    first.save(tmp_path)
    silent = DecoderPlan(tie="nothing")
    again = build_seq2seq(silent, read_initial_weights(tmp_path, silent), first.tokenizer)
    assert again.start_tokens == first.start_tokens
    assert again.default_start_token == first.start_tokens["de"]
    other = DecoderPlan(tie="nothing", languages=("en",))
    less = build_seq2seq(other, read_initial_weights(tmp_path, other), first.tokenizer)
    assert less.start_tokens == {"en": first.start_tokens["en"]}


def test_the_error_proposes_a_possible_tie(made: Seq2Seq, tmp_path: Path) -> None:
    """The decoder shares only the embeddings."""
    plan = DecoderPlan(tie="embeddings")
    build_seq2seq(plan, random_weights(made.config), made.tokenizer).save(tmp_path)
    tied = DecoderPlan(tie="all")
    with pytest.raises(InputError, match=r"\(set model.decoder.tie=embeddings\)"):
        build_seq2seq(tied, read_initial_weights(tmp_path, tied), made.tokenizer)
    build_seq2seq(plan, read_initial_weights(tmp_path, plan), made.tokenizer)


def test_other_encoder_decoders_can_be_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    """In these, decoder_start_token_id may be missing."""
    from transformers import AutoTokenizer, EncoderDecoderModel

    model: Any = EncoderDecoderModel.from_encoder_decoder_pretrained(tiny_folder, tiny_folder)
    AutoTokenizer.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"first token of the decoder is not .* \(set decoder_"):
        Seq2Seq.load(tmp_path).start_token(None)
    model.generation_config.decoder_start_token_id = 7
    model.save_pretrained(tmp_path)
    assert Seq2Seq.load(tmp_path).start_token(None) == 7
    model.config.decoder_start_token_id = 5
    model.save_pretrained(tmp_path)
    assert Seq2Seq.load(tmp_path).start_token("de") == 5


def test_half_precision_is_stored_and_loaded(made: Seq2Seq, tmp_path: Path) -> None:
    from transformers import EncoderDecoderModel

    made.publish(tmp_path, dtype=torch.float16, state=made.model.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float16"
    loaded = EncoderDecoderModel.from_pretrained(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float16}
    torch.testing.assert_close(
        predict(loaded.float().eval()), predict(made.model), atol=0.02, rtol=0.02
    )
    assert Seq2Seq.load(tmp_path).model.dtype == torch.float32


def test_every_trained_weight_gets_a_gradient(made: Seq2Seq) -> None:
    src, tgt = (pack(Ragged.of(rows), pad_id=1) for rows in (SRC, TGT))
    states = made.decode(tgt, src, made(src)[0])
    F.linear(made.lm_features(states), *made.output_layer()).logsumexp(-1).sum().backward()
    for name, weight in made.named_parameters():
        assert (weight.grad is not None) == weight.requires_grad, name
        assert weight.requires_grad == (".pooler." not in name)


def test_language_tokens_are_dropped_from_vocabularies() -> None:
    assert drop_language_tokens({"<s>": 0, "<2de>": 5, "<2zh_cn>": 6, "2de": 7}) == {
        "<s>": 0,
        "2de": 7,
    }


def test_errors(
    made: Seq2Seq, tiny_tokenizer: PreTrainedTokenizerFast, tiny_folder: Path, tmp_path: Path
) -> None:
    start = random_weights(make_config("xlm-roberta", len(tiny_tokenizer)))
    with pytest.raises(InputError, match=r"decoder.layers=9, but the model has 3 layers \(lower"):
        build_seq2seq(DecoderPlan(layers=9), start, tiny_tokenizer)
    config = make_config("modernbert", len(tiny_tokenizer))
    with pytest.raises(InputError, match="a modernbert model has no cross-attention"):
        build_seq2seq(DecoderPlan(), random_weights(config), tiny_tokenizer)
    with pytest.raises(InputError, match="this xlm-roberta model is not an encoder–decoder"):
        Seq2Seq.load(tiny_folder)
    with pytest.raises(InputError, match=r"no config\.json"):
        Seq2Seq.load(tmp_path)
    with pytest.raises(InputError, match="no model is given"):
        Seq2Seq.load()
    made.save(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(InputError, match="this is not a valid safetensors file"):
        Seq2Seq.load(tmp_path / "cut")
    weights.rename(tmp_path / "cut" / "pytorch_model.bin")
    with pytest.raises(InputError, match="is a pickle"):
        Seq2Seq.load(tmp_path / "cut")
    (tmp_path / "cut" / "config.json").write_text("{}")
    with pytest.raises(InputError, match="this None model is not an encoder–decoder"):
        Seq2Seq.load(tmp_path / "cut")
