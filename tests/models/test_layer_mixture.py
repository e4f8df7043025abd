from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn

from calque.models.attention import plan_attention
from calque.models.encoder import Encoder
from calque.models.heads import LayerMixture, PackedLayer, mix_layers
from calque.tokens.ragged import Ragged, pack


def test_a_packed_layer_is_a_transformer_layer() -> None:
    layer = PackedLayer(128, 0.0, torch.Generator().manual_seed(0)).eval()
    reference = nn.TransformerEncoderLayer(
        128, layer.n_heads, 512, 0.0, activation="gelu", batch_first=True
    ).eval()
    pairs = {
        "self_attn.in_proj_weight": layer.project.weight,
        "self_attn.in_proj_bias": layer.project.bias,
        "self_attn.out_proj.weight": layer.output.weight,
        "self_attn.out_proj.bias": layer.output.bias,
        "linear1.weight": layer.widen.weight,
        "linear1.bias": layer.widen.bias,
        "linear2.weight": layer.narrow.weight,
        "linear2.bias": layer.narrow.bias,
    }
    reference.load_state_dict(pairs, strict=False)
    states = torch.randn(7, 128, generator=torch.Generator().manual_seed(1))
    batch = pack(Ragged.of([[1, 2, 3], [4, 5, 6, 7]]), pad_id=0)
    found = layer(states, plan_attention(batch, torch.float32))
    with torch.no_grad():
        expected = [reference(part[None])[0] for part in states.split([3, 4])]
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-4)


def test_only_the_mixture_learns(tiny_encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(0)
    mixture = LayerMixture(
        tiny_encoder.n_layers, 64, extra_layers=1, dropout=0.0, generator=generator
    )
    tokens = pack(Ragged.of([[0, 5, 6, 2], [0, 7, 2]]), pad_id=1)
    encoder = deepcopy(tiny_encoder)
    encoder.zero_grad(set_to_none=True)
    mixture(encoder, tokens).square().sum().backward()
    assert all(weight.grad is not None for weight in mixture.parameters())
    assert all(weight.grad is None for weight in encoder.parameters())


def test_without_extra_layers_it_is_the_mean_of_the_layers(tiny_encoder: Encoder) -> None:
    generator = torch.Generator().manual_seed(0)
    mixture = LayerMixture(4, 64, extra_layers=0, dropout=0.0, generator=generator)
    tokens = pack(Ragged.of([[0, 5, 6, 2]]), pad_id=1)
    with torch.no_grad():
        layers = tiny_encoder.model(tokens.ids[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(
        mixture(tiny_encoder, tokens), torch.stack(layers).mean(0)[0], atol=1e-5, rtol=1e-4
    )


def test_weights_choose_a_layer() -> None:
    layers = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    chosen = mix_layers(layers, torch.tensor([-50.0, 50.0, -50.0]))
    torch.testing.assert_close(chosen, layers[1])
