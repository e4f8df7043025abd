"""Grown models: the same pieces in another order must give the same model, to transformers."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ModernBertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from calque.errors import InputError
from calque.growth.initialize import Mono, grow_model, load_mono
from calque.growth.match import RULES, Glossary, match_vocabularies
from calque.tokens.vocabularies import PieceIndex, Vocabulary

TOYS = runpy.run_path(str(Path(__file__).parents[1] / "toy_tokenizers.py"))
WORDS = ["▁cat", "▁dog", "▁house", "s", "▁the", "▁sleeps", "▁big", "▁Tom", "er", ".", "▁a", "▁of"]
TEXT = "the big cat sleeps ."
KINDS = ("bert", "distilbert", "roberta", "xlm-roberta", "modernbert", "deberta-v2")
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.3,  # so that differences show
}


def make_config(kind: str, n_rows: int, pad: int, **more: Any) -> Any:
    ids = {"pad_token_id": pad, "bos_token_id": 0, "eos_token_id": 2}
    if kind in ("bert", "distilbert"):
        make = BertConfig if kind == "bert" else DistilBertConfig
        return make(vocab_size=n_rows, max_position_embeddings=20, **ids, **SHAPE, **more)
    if kind == "deberta-v2":
        return DebertaV2Config(
            vocab_size=n_rows,
            relative_attention=True,
            pos_att_type="p2c|c2p",
            **ids,
            **SHAPE,
            **more,
        )
    if kind == "modernbert":
        ids |= {"cls_token_id": 0, "sep_token_id": 2}
        return ModernBertConfig(vocab_size=n_rows, **ids, **SHAPE, **more)
    make = RobertaConfig if kind == "roberta" else XLMRobertaConfig
    return make(
        vocab_size=n_rows, max_position_embeddings=21 + pad, type_vocab_size=1, **ids, **SHAPE,
        **more,
    )  # fmt: skip


def make_mono(kind: str, tokenizer: Any, **more: Any) -> Mono:
    config = make_config(kind, len(tokenizer), tokenizer.pad_token_id, **more)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForMaskedLM.from_config(config).eval()
        for weight in model.parameters():  # biases and norms, too
            weight.add_(0.1 * torch.randn(weight.shape))
    return Mono(model, tokenizer, Path("mono"), has_head=True)


def grow(mono: Mono, new: Any, **options: Any) -> Any:
    vocabulary = Vocabulary.of(new)
    match = match_vocabularies(vocabulary, PieceIndex(mono.tokenizer))
    given = {"copies_body": True, "unmatched": "moments", "seed": 0} | options
    return grow_model(mono, len(vocabulary), vocabulary.roles, given.pop("match", match), **given)


def read(model: Any, tokenizer: Any, text: str = TEXT) -> Any:
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.no_grad():
        return model(ids, output_hidden_states=True)


ORDERS: dict[str, tuple[str, ...]] = {
    "same padding": ("<s>", "<pad>", "</s>", "<unk>"),
    "padding first": ("<pad>", "<unk>", "</s>", "<s>"),
    "padding last": ("<unk>", "</s>", "<s>", "<pad>"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("tied", [True, False])
def test_pieces_in_another_order(kind: str, order: str, tied: bool) -> None:
    """Embeddings, head and bias move with the pieces, positions with the padding id."""
    mono = make_mono(kind, TOYS["sentence_piece"](WORDS), tie_word_embeddings=tied)
    new = TOYS["sentence_piece"](WORDS[::-1], ORDERS[order])
    grown = grow(mono, new)
    assert type(grown) is type(mono.model)
    old_ids = [mono.tokenizer.convert_tokens_to_ids(t) for t in Vocabulary.of(new).tokens]
    assert old_ids != sorted(old_ids)
    # The longest text the window holds, so that the last position is read, too.
    for text in (TEXT, " ".join(["cat"] * 18)):
        expected, found = read(mono.model, mono.tokenizer, text), read(grown, new, text)
        torch.testing.assert_close(found.hidden_states[-1], expected.hidden_states[-1])
        torch.testing.assert_close(found.logits, expected.logits[..., old_ids])
    is_same = grown.get_input_embeddings().weight is grown.get_output_embeddings().weight
    assert is_same == tied


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_is_the_tokenizers(kind: str) -> None:
    mono = make_mono(kind, TOYS["sentence_piece"](WORDS))
    mono.model.config.calque = {"retrieval_layer": 1}
    new = TOYS["word_piece"](["cat", "katze", "haus"])
    config = grow(mono, new, unmatched="normal").config
    assert (config.vocab_size, config.pad_token_id) == (8, 0)
    assert (config.bos_token_id, config.eos_token_id) == (2, 3)  # [CLS] and [SEP]
    assert not hasattr(config, "calque")
    shifted = kind in ("roberta", "xlm-roberta")
    change = config.max_position_embeddings - mono.model.config.max_position_embeddings
    assert change == (-1 if shifted else 0)
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "model_type"):
        assert getattr(config, name) == getattr(mono.model.config, name)


def test_bert_becomes_multilingual_with_a_sentence_piece_vocabulary() -> None:
    mono = make_mono("bert", TOYS["word_piece"](["cat", "the", "house", "##s", "."]))
    new = TOYS["sentence_piece"](["▁the", "▁Cat", "s", "▁Katze", "▁Haus"])
    grown = grow(mono, new)
    rows, old = grown.get_input_embeddings().weight, mono.model.get_input_embeddings().weight
    for token, source in {"▁the": "the", "▁Cat": "cat", "s": "##s", "<mask>": "[MASK]"}.items():
        row, place = new.convert_tokens_to_ids(token), mono.tokenizer.convert_tokens_to_ids(source)
        assert torch.equal(rows[row], old[place])
    body = dict(mono.model.named_parameters())
    same = [torch.equal(weight, body[name]) for name, weight in grown.named_parameters()]
    assert sum(same) == len(body) - 2  # all but the embedding, tied to the head, and the bias


def test_translated_rows_are_means(tmp_path: Path) -> None:
    path = tmp_path / "en-de.txt"
    path.write_text("cat Kater\ndog Kater\nbig groß\n", encoding="utf-8")
    mono = make_mono("xlm-roberta", TOYS["sentence_piece"](WORDS), tie_word_embeddings=False)
    new = TOYS["sentence_piece"](["▁Kater", "▁the", "▁of", "▁neu"])
    match = match_vocabularies(Vocabulary.of(new), PieceIndex(mono.tokenizer), Glossary([path]))
    grown = grow(mono, new, match=match)
    number = new.convert_tokens_to_ids
    cat, dog = mono.tokenizer.convert_tokens_to_ids(["▁cat", "▁dog"])
    for of in ("get_input_embeddings", "get_output_embeddings"):
        old, rows = getattr(mono.model, of)().weight, getattr(grown, of)().weight
        torch.testing.assert_close(rows[number("▁Kater")], (old[cat] + old[dog]) / 2)
    old, bias = mono.model.get_output_embeddings().bias, grown.get_output_embeddings().bias
    torch.testing.assert_close(bias[number("▁Kater")], (old[cat] + old[dog]) / 2)


def test_unmatched_rows_are_drawn_like_matched_ones() -> None:
    """Embedding and bias together: their covariance is kept."""
    letters = [f"▁{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    mono = make_mono("roberta", TOYS["sentence_piece"](letters))
    with torch.no_grad():
        embedding, head = mono.model.get_input_embeddings(), mono.model.get_output_embeddings()
        head.bias.copy_(3 * embedding.weight[:, 0])  # the bias follows from the row
    new = TOYS["sentence_piece"]([*letters, *(f"▁new{k}" for k in range(3000))])
    grown = grow(mono, new)
    free = torch.tensor([token.startswith("▁new") for token in Vocabulary.of(new).tokens])
    rows, bias = grown.get_input_embeddings().weight[free], grown.get_output_embeddings().bias[free]
    known = mono.model.get_input_embeddings().weight[4:-1]  # special tokens aside
    torch.testing.assert_close(rows.mean(0), known.mean(0), atol=0.03, rtol=0)
    expected = np.cov(known.detach().numpy(), rowvar=False)
    found = np.cov(rows.detach().numpy(), rowvar=False)
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert np.corrcoef(rows[:, 0].detach(), bias.detach())[0, 1] > 0.99


def test_unmatched_rows_may_be_normal() -> None:
    mono = make_mono("roberta", TOYS["sentence_piece"](WORDS))
    new = TOYS["sentence_piece"]([*WORDS, *(f"▁new{k}" for k in range(500))])
    grown = grow(mono, new, unmatched="normal")
    free = [k for k, token in enumerate(Vocabulary.of(new).tokens) if token.startswith("▁new")]
    rows = grown.get_input_embeddings().weight[free]
    assert rows.std().item() == pytest.approx(0.02, rel=0.05)
    assert not grown.get_output_embeddings().bias[free].any()


def test_nothing_matched_has_no_moments() -> None:
    mono = make_mono("bert", TOYS["word_piece"](["cat"]))
    with pytest.raises(InputError, match=r"0 matched rows: no covariance \(set unmatched=normal\)"):
        grow(mono, TOYS["sentence_piece"](["▁Hund"]))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_may_start_anew(kind: str) -> None:
    mono = make_mono(kind, TOYS["sentence_piece"](WORDS))
    new = TOYS["sentence_piece"](WORDS[::-1])
    body = dict(mono.model.named_parameters())

    def compare(**options: Any) -> tuple[bool, bool, bool]:
        """Tell whether the body is the same, whether none of it is, and whether rows are."""
        model = grow(mono, new, **options)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        by_piece = {id(weight) for weight in (embedding.weight, head.weight, head.bias)}
        same = [
            torch.equal(weight, body[name])
            for name, weight in model.named_parameters()
            if id(weight) not in by_piece
        ]
        row = embedding.weight[new.convert_tokens_to_ids("▁cat")]
        source = mono.tokenizer.convert_tokens_to_ids("▁cat")
        is_copied = torch.equal(row, mono.model.get_input_embeddings().weight[source])
        return all(same), not any(same), is_copied

    assert compare() == (True, False, True)
    assert compare(match=None) == (True, False, False)
    assert compare(copies_body=False) == (False, True, True)
    assert compare(copies_body=False, match=None) == (False, True, False)


def test_the_seed_decides() -> None:
    mono = make_mono("bert", TOYS["word_piece"](["cat", "the", "house"]))
    new = TOYS["sentence_piece"](["▁the", "▁cat", "▁Katze"])
    state = torch.get_rng_state()
    options: list[dict[str, Any]] = [{}, {"copies_body": False, "match": None}]
    for given in options:
        first, second, third = (grow(mono, new, seed=seed, **given) for seed in (5, 5, 6))
        assert states_equal(first, second)
        assert not states_equal(first, third)
    assert torch.equal(state, torch.get_rng_state())


def states_equal(first: Any, second: Any) -> bool:
    state = second.state_dict()
    return all(torch.equal(value, state[name]) for name, value in first.state_dict().items())


def test_padding_beyond_the_positions_is_refused() -> None:
    mono = make_mono("roberta", TOYS["sentence_piece"](WORDS))
    late = ["<s>", "</s>", "<unk>", *(f"▁{k}" for k in range(30)), "<pad>"]
    with pytest.raises(InputError, match=r"the padding token's id, 33, is beyond the model's pos"):
        grow(mono, TOYS["sentence_piece"](WORDS, late))
    bert = make_mono("bert", TOYS["sentence_piece"](WORDS))
    assert grow(bert, TOYS["sentence_piece"](WORDS, late)).config.pad_token_id == 33


def save(mono: Mono, folder: Path, keep: Callable[[Any], Any] = lambda model: model) -> None:
    keep(mono.model).save_pretrained(folder)
    mono.tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_a_model_without_a_head(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = make_mono(kind, TOYS["sentence_piece"](WORDS))
    body = "bert" if kind == "bert" else "roberta"
    save(whole, tmp_path, lambda model: getattr(model, body))
    capfd.readouterr()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mono = load_mono(tmp_path)
    assert capfd.readouterr().err == ""
    assert torch.equal(state, torch.get_rng_state())
    assert not mono.has_head
    new = TOYS["sentence_piece"](WORDS[::-1])
    grown = grow(mono, new)
    expected = read(whole.model, whole.tokenizer).hidden_states[-1]
    torch.testing.assert_close(read(grown, new).hidden_states[-1], expected)
    assert not grown.get_output_embeddings().bias.any()  # new
    assert states_equal(grown, grow(load_mono(tmp_path), new))  # the seed decides the head, too


def test_a_model_with_a_head(tmp_path: Path) -> None:
    save(make_mono("bert", TOYS["sentence_piece"](WORDS)), tmp_path)
    assert load_mono(tmp_path).has_head


def test_no_counterpart_of_the_padding_token_is_zero() -> None:
    """As new models have it."""
    mono = make_mono("bert", TOYS["sentence_piece"](WORDS))
    mono.tokenizer.pad_token = None
    new = TOYS["word_piece"](["cat", "dog", "house"])
    found = match_vocabularies(Vocabulary.of(new), PieceIndex(mono.tokenizer))
    assert RULES[found.rules[0]] == "unmatched"
    assert not grow(mono, new, match=found).get_input_embeddings().weight[0].any()
