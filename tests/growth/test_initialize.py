"""Grown models compared with transformers; embedding rows compared with SciPy and NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.toy_tokenizers import sentence_piece, word_piece
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
from calque.growth.initialize import (
    MonolingualModel,
    combine_rows,
    draw_like,
    grow_model,
    load_monolingual,
)
from calque.growth.match import RULES, RowSources, match_rows
from calque.tokens.vocabularies import PieceIndex, Vocabulary

WORDS = ["▁cat", "▁dog", "▁house", "s", "▁the", "▁sleeps", "▁big", "▁Tom", "er", ".", "▁a", "▁of"]
TEXT = "the big cat sleeps ."
KINDS = ("bert", "distilbert", "roberta", "xlm-roberta", "modernbert", "deberta-v2")
SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "initializer_range": 0.3,  # large, so that differences are visible
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


def make_mono(kind: str, tokenizer: Any, **more: Any) -> MonolingualModel:
    config = make_config(kind, len(tokenizer), tokenizer.pad_token_id, **more)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = AutoModelForMaskedLM.from_config(config).eval()
        for weight in model.parameters():  # biases and norms, too
            weight.add_(0.1 * torch.randn(weight.shape))
    return MonolingualModel(model, tokenizer, Path("mono"), has_head=True)


def grow(mono: MonolingualModel, new: Any, **options: Any) -> Any:
    vocabulary = Vocabulary.of(new)
    match = match_rows(vocabulary, PieceIndex(mono.tokenizer))
    chosen = {"copy_body": True, "unmatched": "moments", "seed": 0} | options
    return grow_model(mono, len(vocabulary), vocabulary.roles, chosen.pop("match", match), **chosen)


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
    mono = make_mono(kind, sentence_piece(WORDS), tie_word_embeddings=tied)
    new = sentence_piece(WORDS[::-1], ORDERS[order])
    grown = grow(mono, new)
    assert type(grown) is type(mono.model)
    old_ids = [mono.tokenizer.convert_tokens_to_ids(t) for t in Vocabulary.of(new).tokens]
    assert old_ids != sorted(old_ids)
    # Include the longest possible text, which uses the last position.
    for text in (TEXT, " ".join(["cat"] * 18)):
        expected, found = read(mono.model, mono.tokenizer, text), read(grown, new, text)
        torch.testing.assert_close(found.hidden_states[-1], expected.hidden_states[-1])
        torch.testing.assert_close(found.logits, expected.logits[..., old_ids])
    is_same = grown.get_input_embeddings().weight is grown.get_output_embeddings().weight
    assert is_same == tied


@pytest.mark.parametrize("kind", KINDS)
def test_the_configuration_follows_the_tokenizer(kind: str) -> None:
    mono = make_mono(kind, sentence_piece(WORDS))
    mono.model.config.calque = {"retrieval_layer": 1}
    new = word_piece(["cat", "katze", "haus"])
    config = grow(mono, new, unmatched="normal").config
    assert (config.vocab_size, config.pad_token_id) == (8, 0)
    assert (config.bos_token_id, config.eos_token_id) == (2, 3)  # [CLS] and [SEP]
    assert not hasattr(config, "calque")
    shifted = kind in ("roberta", "xlm-roberta")
    change = config.max_position_embeddings - mono.model.config.max_position_embeddings
    assert change == (-1 if shifted else 0)
    for name in ("hidden_size", "num_hidden_layers", "intermediate_size", "model_type"):
        assert getattr(config, name) == getattr(mono.model.config, name)


def test_bert_with_a_sentence_piece_vocabulary() -> None:
    mono = make_mono("bert", word_piece(["cat", "the", "house", "##s", "."]))
    new = sentence_piece(["▁the", "▁Cat", "s", "▁Katze", "▁Haus"])
    grown = grow(mono, new)
    rows, old = grown.get_input_embeddings().weight, mono.model.get_input_embeddings().weight
    for token, source in {"▁the": "the", "▁Cat": "cat", "s": "##s", "<mask>": "[MASK]"}.items():
        row, place = new.convert_tokens_to_ids(token), mono.tokenizer.convert_tokens_to_ids(source)
        assert torch.equal(rows[row], old[place])
    body = dict(mono.model.named_parameters())
    same = [torch.equal(weight, body[name]) for name, weight in grown.named_parameters()]
    assert sum(same) == len(body) - 2  # all but the embedding, tied to the head, and the bias


def test_rows_of_translations_are_means(tmp_path: Path) -> None:
    path = tmp_path / "en-de.txt"
    path.write_text("cat Kater\ndog Kater\nbig groß\n", encoding="utf-8")
    mono = make_mono("xlm-roberta", sentence_piece(WORDS), tie_word_embeddings=False)
    new = sentence_piece(["▁Kater", "▁the", "▁of", "▁neu"])
    match = match_rows(Vocabulary.of(new), PieceIndex(mono.tokenizer), [path])
    grown = grow(mono, new, match=match)
    number = new.convert_tokens_to_ids
    cat, dog = mono.tokenizer.convert_tokens_to_ids(["▁cat", "▁dog"])
    for of in ("get_input_embeddings", "get_output_embeddings"):
        old, rows = getattr(mono.model, of)().weight, getattr(grown, of)().weight
        torch.testing.assert_close(rows[number("▁Kater")], (old[cat] + old[dog]) / 2)
    old, bias = mono.model.get_output_embeddings().bias, grown.get_output_embeddings().bias
    torch.testing.assert_close(bias[number("▁Kater")], (old[cat] + old[dog]) / 2)


def test_unmatched_rows_are_drawn_like_matched_ones() -> None:
    """Embedding and bias are drawn together, so that their covariance is kept."""
    letters = [f"▁{a}{b}" for a in "abcdefgh" for b in "abcdefgh"]
    mono = make_mono("roberta", sentence_piece(letters))
    with torch.no_grad():
        embedding, head = mono.model.get_input_embeddings(), mono.model.get_output_embeddings()
        head.bias.copy_(3 * embedding.weight[:, 0])  # the bias follows from the row
    new = sentence_piece([*letters, *(f"▁new{k}" for k in range(3000))])
    grown = grow(mono, new)
    free = torch.tensor([token.startswith("▁new") for token in Vocabulary.of(new).tokens])
    rows, bias = grown.get_input_embeddings().weight[free], grown.get_output_embeddings().bias[free]
    known = mono.model.get_input_embeddings().weight[4:-1]  # without special tokens
    torch.testing.assert_close(rows.mean(0), known.mean(0), atol=0.03, rtol=0)
    expected = np.cov(known.detach().numpy(), rowvar=False)
    found = np.cov(rows.detach().numpy(), rowvar=False)
    np.testing.assert_allclose(found, expected, atol=0.02)
    assert np.corrcoef(rows[:, 0].detach(), bias.detach())[0, 1] > 0.99


def test_unmatched_rows_can_be_normal() -> None:
    mono = make_mono("roberta", sentence_piece(WORDS))
    new = sentence_piece([*WORDS, *(f"▁new{k}" for k in range(500))])
    grown = grow(mono, new, unmatched="normal")
    free = [k for k, token in enumerate(Vocabulary.of(new).tokens) if token.startswith("▁new")]
    rows = grown.get_input_embeddings().weight[free]
    assert rows.std().item() == pytest.approx(0.02, rel=0.05)
    assert not grown.get_output_embeddings().bias[free].any()


def test_no_matched_rows_have_no_moments() -> None:
    mono = make_mono("bert", word_piece(["cat"]))
    with pytest.raises(
        InputError, match=r"0 matched rows have no covariance \(set unmatched to normal\)"
    ):
        grow(mono, sentence_piece(["▁Hund"]))


@pytest.mark.parametrize("kind", KINDS)
def test_body_and_embeddings_can_be_new(kind: str) -> None:
    mono = make_mono(kind, sentence_piece(WORDS))
    new = sentence_piece(WORDS[::-1])
    body = dict(mono.model.named_parameters())

    def compare(**options: Any) -> tuple[bool, bool, bool]:
        """Return whether all of the body is copied, none of it, and whether rows are copied."""
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
    assert compare(copy_body=False) == (False, True, True)
    assert compare(copy_body=False, match=None) == (False, True, False)


def test_the_seed_determines_the_model() -> None:
    mono = make_mono("bert", word_piece(["cat", "the", "house"]))
    new = sentence_piece(["▁the", "▁cat", "▁Katze"])
    state = torch.get_rng_state()
    options: list[dict[str, Any]] = [{}, {"copy_body": False, "match": None}]
    for chosen in options:
        first, second, third = (grow(mono, new, seed=seed, **chosen) for seed in (5, 5, 6))
        assert states_equal(first, second)
        assert not states_equal(first, third)
    assert torch.equal(state, torch.get_rng_state())


def states_equal(first: Any, second: Any) -> bool:
    state = second.state_dict()
    return all(torch.equal(value, state[name]) for name, value in first.state_dict().items())


def test_a_padding_id_beyond_the_positions_raises() -> None:
    mono = make_mono("roberta", sentence_piece(WORDS))
    late = ["<s>", "</s>", "<unk>", *(f"▁{k}" for k in range(30)), "<pad>"]
    with pytest.raises(
        InputError, match=r"the id of the padding token, 33, exceeds the number of pos"
    ):
        grow(mono, sentence_piece(WORDS, late))
    bert = make_mono("bert", sentence_piece(WORDS))
    assert grow(bert, sentence_piece(WORDS, late)).config.pad_token_id == 33


def save(
    mono: MonolingualModel, folder: Path, keep: Callable[[Any], Any] = lambda model: model
) -> None:
    keep(mono.model).save_pretrained(folder)
    mono.tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_a_model_without_a_head(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = make_mono(kind, sentence_piece(WORDS))
    body = "bert" if kind == "bert" else "roberta"
    save(whole, tmp_path, lambda model: getattr(model, body))
    capfd.readouterr()
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mono = load_monolingual(tmp_path)
    assert capfd.readouterr().err == ""
    assert torch.equal(state, torch.get_rng_state())
    assert not mono.has_head
    new = sentence_piece(WORDS[::-1])
    grown = grow(mono, new)
    expected = read(whole.model, whole.tokenizer).hidden_states[-1]
    torch.testing.assert_close(read(grown, new).hidden_states[-1], expected)
    assert not grown.get_output_embeddings().bias.any()  # new
    assert states_equal(
        grown, grow(load_monolingual(tmp_path), new)
    )  # the seed determines the head, too


def test_a_model_with_a_head(tmp_path: Path) -> None:
    save(make_mono("bert", sentence_piece(WORDS)), tmp_path)
    assert load_monolingual(tmp_path).has_head


def test_an_unmatched_padding_token_is_zero() -> None:
    """As in new models."""
    mono = make_mono("bert", sentence_piece(WORDS))
    mono.tokenizer.pad_token = None
    new = word_piece(["cat", "dog", "house"])
    found = match_rows(Vocabulary.of(new), PieceIndex(mono.tokenizer))
    assert RULES[found.rules[0]] == "unmatched"
    assert not grow(mono, new, match=found).get_input_embeddings().weight[0].any()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(1, 9), st.integers(0, 30))
def test_combined_rows_are_a_sparse_product(
    seed: int, n_new: int, n_old: int, n_parts: int
) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    draw = np.random.default_rng(seed)
    rows = np.sort(draw.integers(0, n_new, n_parts))
    sources = draw.integers(0, n_old, n_parts)
    weights = draw.random(n_parts).astype(np.float32)
    matrix = draw.standard_normal((n_old, 4)).astype(np.float32)
    product = sparse.coo_matrix((weights, (rows, sources)), shape=(n_new, n_old)) @ matrix
    found = combine_rows(torch.from_numpy(matrix), RowSources(n_new, rows, sources, weights))
    np.testing.assert_allclose(found.numpy(), product, rtol=1e-5, atol=1e-5)


def test_a_single_source_is_copied_exactly() -> None:
    matrix = torch.randn(5, 7, generator=generator())
    sources = RowSources(3, np.array([0, 2]), np.array([4, 4]), np.ones(2, dtype=np.float32))
    found = combine_rows(matrix, sources)
    assert torch.equal(found, torch.stack([matrix[4], torch.zeros(7), matrix[4]]))


def test_drawn_rows_have_the_moments_of_known_rows() -> None:
    mixing = torch.randn(6, 6, generator=generator(1))
    known = torch.randn(400, 6, generator=generator(2)) @ mixing + torch.arange(6)
    drawn = draw_like(known, 200_000, generator(3))
    assert drawn.dtype == torch.float32
    expected = np.cov(known.numpy(), rowvar=False)
    np.testing.assert_allclose(drawn.mean(0), known.mean(0), atol=0.05)
    np.testing.assert_allclose(np.cov(drawn.numpy(), rowvar=False), expected, atol=0.15)
    assert np.abs(expected - np.diag(np.diag(expected))).max() > 1  # not a diagonal covariance


def test_fewer_rows_than_dimensions() -> None:
    """The drawn rows are in the span of the known rows, except for the jitter."""
    known = torch.randn(4, 50, generator=generator())
    drawn = draw_like(known, 30, generator(1)).double()
    centered = (known - known.mean(0)).double()
    basis = torch.linalg.qr(centered.T)[0][:, :3]
    offset = drawn - known.double().mean(0)
    outside = offset - offset @ basis @ basis.T
    assert offset.norm() > 10
    assert outside.norm() < 1e-2 * offset.norm()


def test_equal_rows_give_equal_rows() -> None:
    drawn = draw_like(torch.full((5, 3), 2.5), 4, generator())
    assert torch.equal(drawn, torch.full((4, 3), 2.5))


def test_draws_depend_only_on_the_generator() -> None:
    known = torch.randn(20, 5, generator=generator())
    assert torch.equal(draw_like(known, 9, generator(4)), draw_like(known, 9, generator(4)))
    assert not torch.equal(draw_like(known, 9, generator(4)), draw_like(known, 9, generator(5)))
    assert draw_like(known, 0, generator()).shape == (0, 5)


@pytest.mark.parametrize("known", [torch.zeros(0, 3), torch.zeros(1, 3)])
def test_too_few_rows(known: torch.Tensor) -> None:
    with pytest.raises(InputError, match=f"{len(known)} matched rows have no covariance"):
        draw_like(known, 2, generator())


def test_rows_that_are_not_finite() -> None:
    with pytest.raises(InputError, match="cannot be factored"):
        draw_like(torch.full((3, 2), float("nan")), 2, generator())
