"""The packed encoder against transformers' own forward, for every family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ModernBertConfig,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
)

from calque.errors import InputError
from calque.models import attention
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.types import TokenBatch

PAD, N_LAYERS = 1, 4
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 34,
    "pad_token_id": PAD,
}
MODERN: dict[str, Any] = {
    "bos_token_id": 0,
    "cls_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "global_attn_every_n_layers": 2,
}


def modernbert(window: int) -> Callable[[], Any]:
    """Every second layer attends to `window` tokens in total, the others to all."""
    return lambda: ModernBertConfig(**SIZES, **MODERN, local_attention=window)


# As mDeBERTa-v3's, but with buckets that short sentences fill.
RELATIVE: dict[str, Any] = {
    "relative_attention": True,
    "max_relative_positions": -1,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}


def deberta(**changes: Any) -> Callable[[], Any]:
    """Return a configuration like that of mDeBERTa-v3, with changes."""
    return lambda: DebertaV2Config(**SIZES, **(RELATIVE | changes))


CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertConfig(**SIZES),
    "roberta": lambda: RobertaConfig(**SIZES),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, type_vocab_size=1),
    "camembert": lambda: CamembertConfig(**SIZES),
    "distilbert": lambda: DistilBertConfig(
        vocab_size=90,
        dim=32,
        n_layers=N_LAYERS,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=34,
        pad_token_id=PAD,
    ),
    "modernbert, window shorter than sentences": modernbert(6),
    "modernbert, window longer than sentences": modernbert(64),
    "deberta, as mdeberta-v3": deberta(),
    "deberta, 256 buckets": deberta(position_buckets=256),
    "deberta, as v2-xlarge": deberta(
        conv_kernel_size=3, conv_act="gelu", position_biased_input=True, type_vocab_size=2
    ),
    "deberta, own projections": deberta(
        share_att_key=False, position_buckets=-1, max_relative_positions=6, norm_rel_ebd="none"
    ),
    "deberta, narrow embeddings": deberta(embedding_size=24, pos_att_type="p2c"),
    "deberta, no distances": deberta(relative_attention=False, position_biased_input=True),
}
SHIFTED = ["roberta", "xlm-roberta", "camembert"]
ABSOLUTE = ["bert", *SHIFTED, "distilbert", "deberta, as v2-xlarge", "deberta, no distances"]
FUSED = ["bert", "roberta", "xlm-roberta", "camembert"]
each_config = pytest.mark.parametrize("name", CONFIGS)


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Encoder, Any]]:
    """Every family as our encoder and as transformers' eager model, with the same weights."""
    result = {}
    for name, make_config in CONFIGS.items():
        reference = AutoModelForMaskedLM.from_config(make_config(), attn_implementation="eager")
        generator = torch.Generator().manual_seed(len(name))
        with torch.no_grad():
            for key, parameter in reference.named_parameters():
                parameter.normal_(0, 0.3, generator=generator)  # large: attention is not even
                if "deberta" in name and key.endswith("LayerNorm.weight"):
                    parameter += 1  # or distances would hardly matter
        model = build_model(make_config())
        model.load_state_dict(reference.state_dict())
        result[name] = Encoder(model, None).eval(), reference.eval()  # type: ignore[arg-type]
    return result


def draw_sentences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(4, 90, length).tolist() for length in lengths]


SENTENCES = draw_sentences([21, 4, 9, 1, 32, 13])
SHAPE = BatchShape.fit(192, np.array([21, 4, 9, 1, 32, 13]), longest=32)
BATCHES = {
    "one": pack(Ragged.of(SENTENCES[:1]), pad_id=PAD),
    "packed": pack(Ragged.of(SENTENCES), pad_id=PAD),
    "even": pack(Ragged.of(draw_sentences([12, 12, 12])), pad_id=PAD),
    "fixed shape": pack(Ragged.of(SENTENCES), shape=SHAPE, pad_id=PAD),
}
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)


def spans(batch: TokenBatch) -> list[slice]:
    """Find the sequences that are not padding."""
    bounds = pairwise(batch.offsets.tolist())
    return [slice(a, b) for a, b in bounds if a < b and PAD not in batch.ids[a:b]]


def run_reference(reference: Any, batch: TokenBatch) -> tuple[list[Tensor], Tensor]:
    """Run transformers on the padded batch; return states by layer and logits, packed again."""
    sentences = [batch.ids[span] for span in spans(batch)]
    ids = torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
    real = ids != PAD
    output = reference(ids, attention_mask=real.long(), output_hidden_states=True)
    return [states[real] for states in output.hidden_states], output.logits[real]


def keep_real(states: Tensor, batch: TokenBatch) -> Tensor:
    return torch.cat([states[span] for span in spans(batch)])


def assert_like(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * scale)


@each_config
@each_batch
def test_states_of_every_layer_and_logits(
    name: str, batch: TokenBatch, models: dict[str, tuple[Encoder, Any]]
) -> None:
    encoder, reference = models[name]
    expected, logits = run_reference(reference, batch)
    found = encoder(batch, range(N_LAYERS + 1))
    assert len(found) == len(expected) == N_LAYERS + 1
    for mine, theirs in zip(found, expected, strict=True):
        assert_like(keep_real(mine, batch), theirs)
    features = encoder.lm_features(keep_real(found[-1], batch))
    assert_like(F.linear(features, *encoder.output_layer()), logits)


@each_config
def test_long_rows_attend_padded(
    name: str, models: dict[str, tuple[Encoder, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed shape whose rows are too long for dense products still gives the same states."""
    monkeypatch.setattr(attention, "MAX_ROW_LENGTH", 0)
    encoder, reference = models[name]
    batch = BATCHES["fixed shape"]
    (found,) = encoder(batch)
    assert found.isfinite().all()
    assert_like(keep_real(found, batch), run_reference(reference, batch)[0][-1])


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    pairs: list[tuple[str, Tensor | None]] = list(zip(named, found, strict=True))
    return {name: gradient for name, gradient in pairs if gradient is not None}


@pytest.mark.parametrize(
    ("name", "use_fused_layers"),
    [(name, False) for name in CONFIGS] + [(name, True) for name in FUSED],
)
def test_gradients_of_every_parameter(
    name: str, use_fused_layers: bool, models: dict[str, tuple[Encoder, Any]]
) -> None:
    encoder, reference = models[name]
    batch = BATCHES["fixed shape"]
    expected, logits = run_reference(reference, batch)
    theirs = gradients(reference, expected[-1].cos().sum() + logits.cos().sum())
    encoder = Encoder(encoder.model, encoder.tokenizer)
    encoder.use_fused_layers = use_fused_layers
    states = keep_real(encoder(batch)[0], batch)
    output = F.linear(encoder.lm_features(states), *encoder.output_layer())
    mine = gradients(encoder.model, states.cos().sum() + output.cos().sum())
    assert mine.keys() == theirs.keys()
    for key, expected_gradient in theirs.items():
        scale = float(expected_gradient.abs().max())
        torch.testing.assert_close(
            mine[key], expected_gradient, rtol=1e-3, atol=1e-4 * scale + 1e-5, msg=key
        )


@pytest.mark.parametrize("name", FUSED)
@each_batch
def test_fused_layers_give_the_same_states(
    name: str, batch: TokenBatch, models: dict[str, tuple[Encoder, Any]]
) -> None:
    plain = models[name][0]
    fused = Encoder(plain.model, plain.tokenizer)
    fused.use_fused_layers = True
    for mine, theirs in zip(fused(batch, [0, 2, 4]), plain(batch, [0, 2, 4]), strict=True):
        assert_like(mine, theirs)


@each_config
def test_padding_does_not_leak(name: str, models: dict[str, tuple[Encoder, Any]]) -> None:
    """Sentences get the same states alone, among others, and in a batch filled with padding."""
    encoder, _ = models[name]
    (alone,), (among,) = encoder(BATCHES["one"]), encoder(BATCHES["packed"])
    assert_like(among[: len(alone)], alone)
    batch = BATCHES["fixed shape"]
    (filled,) = encoder(batch)
    (here,) = [span for span in spans(batch) if batch.ids[span].tolist() == SENTENCES[0]]
    assert_like(filled[here], alone)


def read_at(reference: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the last states of transformers for given positions and their distances, if used."""
    encoder = reference.base_model.encoder if reference.config.model_type == "deberta-v2" else None
    if encoder is None or not encoder.relative_attention:
        output = reference(ids, position_ids=positions, output_hidden_states=True)
        return output.hidden_states[-1][0]
    embedded = reference.base_model.embeddings(ids, position_ids=positions)
    square = encoder.get_rel_pos(embedded.new_zeros(1, 64, 1))[0]
    relative = square[positions[0]][:, positions[0]][None]
    return encoder(embedded, torch.ones_like(ids), relative_pos=relative).last_hidden_state[0]


@each_config
def test_positions_may_be_given(name: str, models: dict[str, tuple[Encoder, Any]]) -> None:
    """TLM counts the second sentence from 0 again; transformers takes the same as position_ids."""
    encoder, reference = models[name]
    positions = np.array([*range(12), *range(9)])
    batch = pack(Ragged.of(SENTENCES[:1]), positions=positions, pad_id=PAD)
    first = PAD + 1 if name in SHIFTED else 0
    ids, where = batch.ids[None], torch.from_numpy(positions)[None] + first
    expected = read_at(reference, ids, where)
    assert_like(encoder(batch)[0], expected)
    assert (expected - encoder(BATCHES["one"])[0]).abs().max() > 1e-3


@each_config
@pytest.mark.parametrize("shape", [None, SHAPE], ids=["packed", "fixed shape"])
def test_positions_of_one_sentence_leave_others_alone(
    name: str, shape: BatchShape | None, models: dict[str, tuple[Encoder, Any]]
) -> None:
    """Positions restart at another token in each sentence of a batch, or not at all."""
    encoder, reference = models[name]
    cuts = [12, 4, 1, 1, 30, 2]
    counted = [[*range(cut), *range(len(s) - cut)] for cut, s in zip(cuts, SENTENCES, strict=True)]
    positions = np.concatenate([np.array(numbers, dtype=np.int64) for numbers in counted])
    batch = pack(Ragged.of(SENTENCES), positions=positions, shape=shape, pad_id=PAD)
    (found,), first = encoder(batch), PAD + 1 if name in SHIFTED else 0
    places = {tuple(batch.ids[span].tolist()): span for span in spans(batch)}
    for sentence, numbers in zip(SENTENCES, counted, strict=True):
        where = torch.tensor([numbers]) + first
        expected = read_at(reference, torch.tensor([sentence]), where)
        assert_like(found[places[tuple(sentence)]], expected)


@each_config
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_no_layer_is_computed_beyond_the_one_asked_for(
    name: str,
    layer: int,
    models: dict[str, tuple[Encoder, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder, _ = models[name]
    expected = encoder(BATCHES["packed"], [layer])[0]

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a layer too many")

    for later in encoder.family.get_layers(encoder.model)[layer:]:
        monkeypatch.setattr(later, "forward", refuse)
    if encoder.family.final_norm is not None:
        body = encoder.family.get_body(encoder.model)
        monkeypatch.setattr(getattr(body, encoder.family.final_norm), "forward", refuse)
    assert torch.equal(encoder(BATCHES["packed"], [layer])[0], expected)
    with pytest.raises(AssertionError, match="a layer too many"):
        encoder(BATCHES["packed"], [layer, layer + 1])


@each_config
def test_families_that_can_be_fused(name: str, models: dict[str, tuple[Encoder, Any]]) -> None:
    assert models[name][0].can_fuse == (name in FUSED)


def test_requested_layers_are_returned(models: dict[str, tuple[Encoder, Any]]) -> None:
    encoder, _ = models["bert"]
    batch = BATCHES["packed"]
    every = encoder(batch, range(N_LAYERS + 1))
    mixed = encoder(batch, [-1, 1, 1, -5, 4])
    for mine, number in zip(mixed, [4, 1, 1, 0, 4], strict=True):
        assert torch.equal(mine, every[number])
    (last,) = encoder(batch)
    assert torch.equal(last, every[-1])
    for layer in (5, -6):
        with pytest.raises(InputError, match=f"layer {layer} does not exist .choose 0 to 4"):
            encoder(batch, [layer])


@pytest.mark.parametrize("name", ABSOLUTE)
def test_the_longest_sequence_is_what_the_positions_allow(
    name: str, models: dict[str, tuple[Encoder, Any]]
) -> None:
    encoder, reference = models[name]
    assert encoder.max_tokens == (32 if name in SHIFTED else 34)
    fits = torch.tensor(draw_sentences([encoder.max_tokens]))
    batch = pack(Ragged.of(fits.tolist()), pad_id=PAD)
    expected = reference(fits, output_hidden_states=True).hidden_states[-1][0]
    assert_like(encoder(batch)[0], expected)
    with pytest.raises((IndexError, RuntimeError)):
        reference(torch.tensor(draw_sentences([encoder.max_tokens + 1])))


@each_config
def test_the_wrapped_model_is_still_a_plain_model(
    name: str, models: dict[str, tuple[Encoder, Any]]
) -> None:
    """Its own forward, on padded batches, is that of transformers."""
    encoder, reference = models[name]
    ids = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(sentence) for sentence in SENTENCES], batch_first=True, padding_value=PAD
    )
    real = ids != PAD
    found = encoder.model(ids, attention_mask=real.long()).logits[real]
    assert_like(found, reference(ids, attention_mask=real.long()).logits[real])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_models_with_another_attention_are_converted(
    implementation: str, models: dict[str, tuple[Encoder, Any]]
) -> None:
    """A model with another attention would silently mix the sentences of a batch."""
    encoder, reference = models["xlm-roberta"]
    model = AutoModelForMaskedLM.from_config(
        CONFIGS["xlm-roberta"](), attn_implementation=implementation
    )
    model.load_state_dict(reference.state_dict())
    made = Encoder(model.eval(), None)  # type: ignore[arg-type]
    assert_like(made(BATCHES["packed"])[0], encoder(BATCHES["packed"])[0])


def test_building_leaves_the_configuration_alone() -> None:
    config = CONFIGS["bert"]()
    model = build_model(config)
    AutoModelForMaskedLM.from_config(config, attn_implementation="eager")
    assert model.config._attn_implementation == attention.ATTENTION_NAME


@each_batch
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("xlm-roberta", {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0}),
        ("modernbert, window shorter than sentences", {"attention_dropout": 0.5}),
        (
            "deberta, as mdeberta-v3",
            {"attention_probs_dropout_prob": 0.5, "hidden_dropout_prob": 0.0},
        ),
    ],
)
def test_attention_dropout_applies_in_training_only(
    name: str, options: dict[str, float], batch: TokenBatch
) -> None:
    config = CONFIGS[name]()
    config.update(options)
    encoder = Encoder(build_model(config), None).eval()  # type: ignore[arg-type]
    assert torch.equal(encoder(batch)[0], encoder(batch)[0])
    encoder.train()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not torch.equal(encoder(batch)[0], encoder(batch)[0])


def test_other_architectures_are_errors() -> None:
    with pytest.raises(
        InputError, match=r"encoders of type 't5' are not supported \(use one of bert"
    ):
        build_model(T5Config())


def test_properties_of_an_encoder(models: dict[str, tuple[Encoder, Any]]) -> None:
    encoder = deepcopy(models["bert"][0])
    assert (encoder.n_layers, encoder.hidden_size) == (4, 32)
    assert (encoder.settings, encoder.retrieval_layer) == ({}, 2)
    encoder.model.config.calque = {"retrieval_layer": 3}
    assert encoder.retrieval_layer == 3
    with pytest.raises(InputError, match="was not loaded from a folder"):
        _ = encoder.folder
