"""VECO: H equals the encoder bit for bit, S equals Hugging Face's layers; saving and loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    EncoderDecoderModel,
    ModernBertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from calque.errors import InputError
from calque.models import loading
from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.models.veco import VECO_FOLDER, Veco, find_veco_folder
from calque.tokens.layout import PairedTokens, pack_pairs
from calque.tokens.ragged import BatchShape, Ragged, pack
from calque.translation.pair_attention import pair_attention
from calque.types import TokenBatch

PAD = 1
SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 34,
    "pad_token_id": PAD,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: BertConfig(**SIZES),
    "roberta": lambda: RobertaConfig(**SIZES),
    "xlm-roberta": lambda: XLMRobertaConfig(**SIZES, type_vocab_size=1),
    "camembert": lambda: CamembertConfig(**SIZES),
}
each_kind = pytest.mark.parametrize("kind", CONFIGS)


def draw_weights(module: torch.nn.Module, seed: int) -> None:
    """Draw weights so large that tokens have different states and attend unevenly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            is_attention = ".query." in name or ".key." in name
            parameter.normal_(0, 0.5 if is_attention else 0.1, generator=generator)
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1)


def make_encoder(kind: str) -> Encoder:
    encoder = Encoder(build_model(CONFIGS[kind]()), None).eval()  # type: ignore[arg-type]
    draw_weights(encoder, seed=len(kind))
    return encoder


def make_veco(kind: str) -> Veco:
    veco = Veco.plug(make_encoder(kind), "random", torch.Generator().manual_seed(3))
    for layer in get_layers(veco):
        draw_weights(layer.crossattention, seed=3)
    return veco


def draw(lengths: list[int], seed: int) -> Ragged:
    generator = np.random.default_rng(seed)
    return Ragged.of([generator.integers(4, 90, length).tolist() for length in lengths])


def get_layers(encoder: Encoder) -> Any:
    return encoder.family.get_layers(encoder.model)


def sequences(batch: TokenBatch) -> list[Tensor]:
    return [batch.ids[a:b] for a, b in pairwise(batch.offsets.tolist())]


def cross_by_layers(veco: Veco, ids: Tensor, other: Tensor) -> list[Tensor]:
    """Run one pair through Hugging Face's own layers; return the states after each of them."""
    veco.model.set_attn_implementation("eager")
    body = veco.family.get_body(veco.model)
    read, hidden = body.embeddings(other[None]), body.embeddings(ids[None])
    for layer in veco.family.get_layers(veco.model):
        read = layer(read)
    states = [hidden[0]]
    for layer in veco.family.get_layers(veco.model):
        hidden = layer(hidden, encoder_hidden_states=read)
        states.append(hidden[0])
    veco.model.set_attn_implementation("calque")
    return states


@each_kind
@pytest.mark.parametrize("start", ["self", "random"])
def test_unplugged_equals_the_encoder_bit_for_bit(kind: str, start: Any) -> None:
    encoder = make_encoder(kind)
    veco = Veco.plug(encoder, start, torch.Generator().manual_seed(0))
    batch = pack(draw([7, 3, 12], 0), pad_id=PAD)
    layers = list(range(4))
    plain = veco.unplug()
    for expected, found, again in zip(
        encoder(batch, layers), veco(batch, layers), plain(batch, layers), strict=True
    ):
        assert torch.equal(found, expected)
        assert torch.equal(again, expected)
    states = encoder(batch)[0]
    assert torch.equal(veco.lm_features(states), encoder.lm_features(states))
    ids = batch.ids[None, :7]
    assert torch.equal(plain.model(ids).logits, encoder.model(ids).logits)


@each_kind
@pytest.mark.parametrize("even", [True, False])
def test_plugged_in_equals_hugging_faces_layers(kind: str, even: bool) -> None:
    veco = make_veco(kind)
    mine, theirs = ([5, 5], [9, 9]) if even else ([7, 3, 12], [4, 11, 1])
    batch, read = pack(draw(mine, 0), pad_id=PAD), pack(draw(theirs, 1), pad_id=PAD)
    keys = veco(read)[0]
    found = veco.cross(batch, keys, read)
    pairs = zip(sequences(batch), sequences(read), strict=True)
    by_pair = [cross_by_layers(veco, ids, other) for ids, other in pairs]
    by_layer = [torch.cat(states) for states in zip(*by_pair, strict=True)]
    torch.testing.assert_close(found, by_layer[-1], rtol=1e-5, atol=1e-5)
    layers = [2, 0, 1]
    several = veco.cross_layers(batch, keys, read, layers)
    for number, states in zip(layers, several, strict=True):
        torch.testing.assert_close(states, by_layer[number], rtol=1e-5, atol=1e-5)
    assert torch.equal(veco.cross_layers(batch, keys, read, [0])[0], veco(batch, [0])[0])


def assert_positions_differ(veco: Veco, pairs: PairedTokens, states: Tensor) -> None:
    """Check that tokens of one sentence have different states and different cross-attention.

    Otherwise a wrong query of the cross-attention would not change the result.
    """
    start, stop = pairs.tokens.offsets[:2].tolist()
    one, other = states[start:stop], states[pairs.order][start : start + 4]
    cosines = torch.nn.functional.normalize(one, dim=-1)
    assert (cosines @ cosines.T).fill_diagonal_(0).max() < 0.9
    core = get_layers(veco)[0].crossattention.self
    weights = (core.query(one)[:, :8] @ core.key(other)[:, :8].T * core.scaling).softmax(-1)
    assert weights.std(dim=0).max() > 0.2


@pytest.mark.parametrize("use_fused_layers", [False, True])
@pytest.mark.parametrize("row", [0, 32, 272])
def test_each_of_a_pair_reads_the_other(use_fused_layers: bool, row: int) -> None:
    """Without rows, in rows that several pairs share, and in rows too long for dense attention."""
    veco = make_veco("roberta")
    veco.use_fused_layers = use_fused_layers
    sides = draw([7, 3, 12, 9, 1], 0), draw([4, 11, 1, 9, 2], 1)
    shape = BatchShape(tokens=4 * row, row=row, sequences=10, budget=4 * row) if row else None
    pairs = pack_pairs(*sides, shape=shape, pad_id=PAD)
    (alone,) = veco(pairs.tokens)
    assert_positions_differ(veco, pairs, alone)
    found = veco.cross(pairs.tokens, alone[pairs.order], pairs.read)
    assert found.isfinite().all()
    every = sequences(pairs.tokens)
    n_compared = 0
    for number, ids in enumerate(every):
        other = every[number ^ 1]
        if len(ids) and len(other):
            expected = cross_by_layers(veco, ids, other)[-1]
            start = int(pairs.tokens.offsets[number])
            part = found[start : start + len(ids)]
            torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-5)
            n_compared += 1
    assert n_compared == 10


def test_other_pairs_have_no_effect() -> None:
    veco = make_veco("bert")
    batch, read = pack(draw([7, 3], 0), pad_id=PAD), pack(draw([4, 11], 1), pad_id=PAD)
    keys = veco(read)[0].detach().clone()
    before = veco.cross(batch, keys, read)
    keys[4:] += 1
    after = veco.cross(batch, keys, read)
    assert torch.equal(after[:7], before[:7])
    assert not torch.allclose(after[7:], before[7:], atol=1e-3)


def test_keys_get_no_gradient() -> None:
    veco = make_veco("roberta")
    batch, read = pack(draw([7, 3], 0), pad_id=PAD), pack(draw([4, 11], 1), pad_id=PAD)
    keys = veco(read)[0]
    keys.retain_grad()
    states = veco.cross(batch, keys, read)
    (states.square().sum() + 0 * keys.sum()).backward()
    assert keys.grad is not None
    assert torch.equal(keys.grad, torch.zeros_like(keys))
    for layer in veco.family.get_layers(veco.model):
        assert layer.crossattention.self.key.weight.grad.abs().max() > 0  # type: ignore[union-attr, operator]


@each_kind
def test_initial_cross_attention_returns_its_input(kind: str) -> None:
    """It attends as the self-attention does, and S is near H for all norms."""
    encoder = make_encoder(kind)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "LayerNorm" in name:
                parameter.normal_(0, 0.3, generator=generator)
    veco = Veco.plug(encoder)
    for layer, start in zip(get_layers(veco), get_layers(encoder), strict=True):
        expected, found = start.attention.self.state_dict(), layer.crossattention.self.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert not layer.crossattention.output.dense.weight.any()
        norm, output = start.attention.output.LayerNorm, layer.crossattention.output
        states = norm(torch.randn(50, 32, generator=generator))
        far = (output(torch.randn(50, 32, generator=generator), states) - states).norm()
        assert far < 0.3 * states.norm()
        assert far < 0.3 * (norm(states) - states).norm()  # a copy of the norm would be far off


def test_with_new_norms_s_starts_equal_to_h(tiny_encoder: Encoder) -> None:
    veco = Veco.plug(tiny_encoder)
    batch, read = pack(draw([7, 3], 0), pad_id=PAD), pack(draw([4, 11], 1), pad_id=PAD)
    found = veco.cross(batch, veco(read)[0], read)
    torch.testing.assert_close(found, tiny_encoder(batch)[0], rtol=1e-3, atol=1e-3)


def test_a_random_start_depends_on_the_generator() -> None:
    encoder = make_encoder("xlm-roberta")
    one, same, other = (
        Veco.plug(encoder, "random", torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    weight = "roberta.encoder.layer.1.crossattention.self.value.weight"
    states = [veco.model.state_dict()[weight] for veco in (one, same, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.allclose(states[0], states[2])
    assert states[0].std() == pytest.approx(0.02, rel=0.1)


def test_plugging_does_not_use_the_global_generator() -> None:
    encoder = make_encoder("bert")
    before = torch.random.get_rng_state()
    Veco.plug(encoder).unplug()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_both_folders_load_with_transformers(tiny_encoder: Encoder, tmp_path: Path) -> None:
    veco = Veco.plug(tiny_encoder, "random", torch.Generator().manual_seed(5))
    state = veco.model.state_dict()
    veco.publish(tmp_path, dtype=torch.float32, state=state)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert not any(name.endswith((".bin", ".pt")) for name in names)
    for folder, kind in (
        (tmp_path, AutoModelForMaskedLM),
        (tmp_path / VECO_FOLDER, AutoModelForCausalLM),
    ):
        model, info = kind.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        assert model.config.add_cross_attention == (folder.name == VECO_FOLDER)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        AutoModel.from_pretrained(folder)
    batch = pack(draw([7, 3], 0), pad_id=PAD)
    again = Veco.load(tmp_path)
    expected, keys = tiny_encoder(batch)[0], veco(batch)[0]
    assert torch.equal(again.cross(batch, keys, batch), veco.cross(batch, keys, batch))
    for found in (again, Encoder.load(tmp_path), Encoder.load(tmp_path / VECO_FOLDER)):
        assert torch.equal(found(batch)[0], expected)
    assert not json.loads((tmp_path / "config.json").read_text())["is_decoder"]
    assert (
        find_veco_folder(tmp_path)
        == find_veco_folder(tmp_path / VECO_FOLDER)
        == tmp_path / VECO_FOLDER
    )


def test_the_full_model_is_found_by_a_hub_name(
    tiny_encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    veco = Veco.plug(tiny_encoder)
    veco.publish(tmp_path, dtype=torch.float32, state=veco.model.state_dict())
    monkeypatch.setattr(loading, "_download", lambda name, files: tmp_path)
    assert Veco.load("someone/veco").folder == tmp_path / VECO_FOLDER
    kinds = [
        found.kind for found in pair_attention("Who is it?", "Wer ist es?", model="someone/veco")
    ]
    assert kinds == ["self-attention", "cross-attention"]


def test_it_is_a_causal_decoder(tiny_encoder: Encoder, tmp_path: Path) -> None:
    veco = Veco.plug(tiny_encoder)
    veco.publish(tmp_path, dtype=torch.float32, state=veco.model.state_dict())
    decoder: Any = AutoModelForCausalLM.from_pretrained(tmp_path / VECO_FOLDER).eval()
    batch, read = pack(draw([9], 0), pad_id=PAD), pack(draw([6], 1), pad_id=PAD)
    keys = veco(read)[0][None]
    for model in (veco.model, decoder):
        whole: Any = model(batch.ids[None], encoder_hidden_states=keys).logits
        start: Any = model(batch.ids[None, :4], encoder_hidden_states=keys).logits
        torch.testing.assert_close(whole[:, :4], start)  # later words do not matter
    translator = EncoderDecoderModel.from_encoder_decoder_pretrained(
        tmp_path, tmp_path / VECO_FOLDER
    )
    encoded: Any = translator.eval().encoder(read.ids[None]).last_hidden_state
    torch.testing.assert_close(encoded, keys)
    written = translator.generate(
        read.ids[None], decoder_start_token_id=0, pad_token_id=PAD, max_new_tokens=5, num_beams=2
    )
    assert written.shape[1] > 1


def test_error_of_a_folder_without_cross_attention(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="this model has no cross-attention"):
        Veco.load(tiny_folder)
    assert find_veco_folder(tiny_folder) is None
    (tmp_path / "config.json").write_text("no JSON")
    with pytest.raises(InputError, match=r"config\.json: this is not valid JSON"):
        Veco.load(tmp_path)


def test_error_of_a_damaged_folder(tiny_encoder: Encoder, tmp_path: Path) -> None:
    veco = Veco.plug(tiny_encoder)
    state = veco.model.state_dict()
    missing = "roberta.encoder.layer.2.crossattention.self.key.weight"
    veco.save(tmp_path, state={name: value for name, value in state.items() if name != missing})
    with pytest.raises(InputError, match=f"1 tensors are missing.*{missing}"):
        Veco.load(tmp_path)


def test_modernbert_has_no_cross_attention() -> None:
    sizes = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    encoder = Encoder(build_model(ModernBertConfig(**SIZES, **sizes)), None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'modernbert' have no cross-attention"):
        Veco.plug(encoder)
