"""Attention between sentences compared with the weights that Hugging Face returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
)

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.veco import VECO_FOLDER, Veco
from calque.translation.pair_attention import pair_attention

SRC, TGT = "The rumor may be true.", "Das Gerücht könnte wahr sein."


def set_large_weights(encoder: Encoder) -> Encoder:
    """Draw large weights, so that attention is not uniform."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in encoder.model.named_parameters():
            if "norm" not in name.lower():
                parameter.normal_(0, 0.3, generator=generator)
    return encoder


@pytest.fixture(scope="module")
def folder(tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published VECO model: the encoder, and the full model in a folder inside."""
    start = Veco.plug(tiny_encoder, "random", torch.Generator().manual_seed(1))
    veco = set_large_weights(start)
    found = tmp_path_factory.mktemp("veco")
    veco.publish(found, dtype=torch.float32, state=veco.model.state_dict())
    return found


def average_heads(attentions: Any) -> np.ndarray:
    found: np.ndarray = torch.stack([layer[0].mean(0) for layer in attentions]).detach().numpy()
    return found


def test_self_attention_of_hugging_face(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    model: Any = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = tiny_tokenizer(SRC, TGT, return_tensors="pt")
    weights = average_heads(model(encoded["input_ids"], output_attentions=True).attentions)
    n_src, n_tgt = (
        len(tiny_tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (SRC, TGT)
    )
    src, tgt = slice(1, 1 + n_src), slice(n_src + 3, n_src + 3 + n_tgt)
    found, across = pair_attention(SRC, TGT, model=folder)
    assert (found.kind, across.kind) == ("self-attention", "cross-attention")
    np.testing.assert_allclose(found.src_to_tgt, weights[:, src, tgt], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.tgt_to_src, weights[:, tgt, src], rtol=1e-4, atol=1e-7)
    given = weights[:, src, tgt].sum((1, 2)) + weights[:, tgt, src].sum((1, 2))
    assert found.shares == pytest.approx((given / (n_src + n_tgt)).tolist(), rel=1e-4)
    n_all = n_src + n_tgt + 4
    assert found.uniform == pytest.approx((n_src * n_tgt * 2 / n_all) / (n_src + n_tgt))
    assert "".join(found.src).replace("·", "") == SRC.replace(" ", "")


def test_cross_attention_of_hugging_face(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    """A Hugging Face decoder with a mask that hides nothing gives the same weights."""
    encoder: Any = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    decoder: Any = AutoModelForCausalLM.from_pretrained(
        folder / VECO_FOLDER, attn_implementation="eager"
    )
    src, tgt = (tiny_tokenizer(text, return_tensors="pt")["input_ids"] for text in (SRC, TGT))
    (_, found) = pair_attention(SRC, TGT, model=folder / VECO_FOLDER)
    for ids, other, measured in ((src, tgt, found.src_to_tgt), (tgt, src, found.tgt_to_src)):
        n_tokens = ids.shape[1]
        output = decoder.eval()(
            ids,
            attention_mask=torch.zeros(1, 1, n_tokens, n_tokens),
            encoder_hidden_states=encoder(other).last_hidden_state,
            output_attentions=True,
        )
        weights = average_heads(output.cross_attentions)
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-5)
        np.testing.assert_allclose(measured, weights[:, 1:-1, 1:-1], rtol=1e-4, atol=1e-6)
    assert 0 < min(found.shares) < max(found.shares) < 1


def test_heads(folder: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    """One head has the weights of Hugging Face; the mean of all heads is the default."""
    model: Any = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    encoded = tiny_tokenizer(SRC, TGT, return_tensors="pt")
    attentions = model(encoded["input_ids"], output_attentions=True).attentions
    heads = [pair_attention(SRC, TGT, model=folder, head=head) for head in (1, 2, 3, 4)]
    n_src, n_tgt = len(heads[0][0].src), len(heads[0][0].tgt)
    for number, (found, _) in enumerate(heads):
        expected = torch.stack([layer[0, number] for layer in attentions]).detach().numpy()
        tgt = slice(n_src + 3, n_src + 3 + n_tgt)
        np.testing.assert_allclose(
            found.src_to_tgt, expected[:, 1 : 1 + n_src, tgt], rtol=1e-4, atol=1e-7
        )
    for kind, mean in enumerate(pair_attention(SRC, TGT, model=folder)):
        average = np.mean([found[kind].tgt_to_src for found in heads], axis=0)
        np.testing.assert_allclose(mean.tgt_to_src, average, rtol=1e-4, atol=1e-7)
    for head in (0, 5):
        with pytest.raises(InputError, match=f"no attention head {head} .*choose 1 to 4"):
            pair_attention(SRC, TGT, model=folder, head=head)


def test_positions_option(folder: Path) -> None:
    onward, reset = (
        pair_attention(SRC, TGT, model=folder, positions=positions)[0].shares
        for positions in ("continue", "reset")
    )
    assert onward == pair_attention(SRC, TGT, model=folder)[0].shares
    assert not np.allclose(onward, reset, rtol=1e-3)


def test_positions_of_calque_mini_are_those_of_its_training() -> None:
    (found,) = pair_attention("Take a seat", "请坐")
    (reset,) = pair_attention("Take a seat", "请坐", model="calque-mini", positions="reset")
    assert (found.model, reset.model) == ("calque-mini", "calque-mini")
    assert found.shares == reset.shares
    assert len(found.shares) == 8
    assert "".join(found.tgt).replace("·", "") == "请坐"


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert", "deberta"])
def test_other_model_families(
    kind: str, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": len(tiny_tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "pad_token_id": 1,
    }
    marks = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    configs = {
        "bert": lambda: BertConfig(**sizes),
        "distilbert": lambda: DistilBertConfig(**sizes),
        "modernbert": lambda: ModernBertConfig(**sizes, **marks),
        "deberta": lambda: DebertaV2Config(
            **sizes, relative_attention=True, pos_att_type="p2c|c2p", position_biased_input=False
        ),
    }
    config = configs[kind]()
    set_large_weights(Encoder(build_model(config), tiny_tokenizer)).save(tmp_path)
    (found,) = pair_attention(SRC, TGT, model=tmp_path)
    model: Any = AutoModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = tiny_tokenizer(SRC, TGT, return_tensors="pt")["input_ids"]
    weights = average_heads(model(ids, output_attentions=True).attentions)
    n_src, n_tgt = len(found.src), len(found.tgt)
    expected = weights[:, 1 : 1 + n_src, n_src + 3 : n_src + 3 + n_tgt]
    np.testing.assert_allclose(found.src_to_tgt, expected, rtol=1e-4, atol=1e-7)


def test_positions_option_of_deberta(deberta_encoder: Encoder, deberta_folder: Path) -> None:
    """Relative positions are computed from the positions, which start again at the target."""
    (onward,), (reset,) = (
        pair_attention(SRC, TGT, model=deberta_folder, positions=positions)
        for positions in ("continue", "reset")
    )
    tokenizer, model = deberta_encoder.tokenizer, deberta_encoder.model
    ids = tokenizer(SRC, TGT, return_tensors="pt")["input_ids"]
    n_src, n_tgt = len(onward.src), len(onward.tgt)
    tgt = slice(n_src + 2, n_src + 2 + n_tgt)
    body = model.deberta
    expected = average_heads(body(ids, output_attentions=True).attentions)
    np.testing.assert_allclose(onward.src_to_tgt, expected[:, 1 : 1 + n_src, tgt], rtol=1e-4)
    places = torch.tensor([*range(n_src + 2), *range(n_tgt + 1)])
    embedded, encoder = body.embeddings(ids), body.encoder
    square = encoder.get_rel_pos(embedded.new_zeros(1, 64, 1))[0]
    read = encoder(
        embedded,
        torch.ones_like(ids),
        relative_pos=square[places][:, places][None],
        output_attentions=True,
    )
    expected = average_heads(read.attentions)
    np.testing.assert_allclose(reset.src_to_tgt, expected[:, 1 : 1 + n_src, tgt], rtol=1e-4)
    assert not np.allclose(onward.src_to_tgt, reset.src_to_tgt, rtol=1e-3)


def test_invalid_sentences() -> None:
    with pytest.raises(InputError, match="there are no words in '  '"):
        pair_attention("Take a seat", "  ")
    with pytest.raises(InputError, match="tokens, but the model reads 128"):
        pair_attention("Take a seat " * 60, "请坐")


def test_a_library_without_attention_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers 5.4 returns none for ModernBERT."""
    from transformers import XLMRobertaModel

    forward = XLMRobertaModel.forward

    def without_attention(self: Any, *args: Any, **options: Any) -> Any:
        output: Any = forward(self, *args, **options)
        output.attentions = ()
        return output

    monkeypatch.setattr(XLMRobertaModel, "forward", without_attention)
    with pytest.raises(InputError, match=r"returns no attention of xlm-roberta .*upgrade"):
        pair_attention(SRC, TGT, model=folder)
