"""VECO: an encoder with cross-attention that can be plugged in or out.

Luo et al., 2021, "VECO: Variable and Flexible Cross-lingual Pre-training for Language Understanding
and Generation". One set of weights serves as encoder, as cross-encoder of a sentence pair, and as
decoder. The layers are Hugging Face's own, which have cross-attention for decoders.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from calque.errors import InputError
from calque.models.attention import plan_attention, plan_cross_attention, register_attention
from calque.models.configuration import read_config
from calque.models.encoder import Encoder, compute_dtype
from calque.models.families import find_family, run_fused_layer, run_layer
from calque.models.loading import (
    CROSS_ATTENTION,
    build_model,
    find_model,
    load_checkpoint,
    save_checkpoint,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

    from calque.types import TokenBatch

# The subfolder with the full model inside the folder of a trained one, which is the plain encoder.
VECO_FOLDER = "veco"


class Veco(Encoder):
    """An encoder whose layers have cross-attention.

    Calling it returns H, the states of the plain encoder without cross-attention. `cross` returns
    S, for which every layer also reads a paired sequence. `model` is a causal Hugging Face decoder.
    """

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a full model, or the full model inside the folder of a trained encoder."""
        folder = find_model(name)
        model, tokenizer, folder = load_checkpoint(
            find_veco_folder(folder) or folder, dtype, cross_attention=True
        )
        return cls(model, tokenizer, folder).to(device).eval().check_runs()

    def run_all_parts(self, batch: TokenBatch) -> Tensor:
        """Return S of a batch that reads itself, for which H is computed first."""
        return self.cross(batch, self(batch)[0], batch)

    @classmethod
    def plug(
        cls,
        encoder: Encoder,
        start: Literal["self", "random"] = "self",
        generator: torch.Generator | None = None,
    ) -> Self:
        """Return a copy of an encoder with cross-attention; "random" needs a generator.

        Paper: the initialization is not described. With "self" the cross-attention attends as the
        layer's self-attention does but adds nothing to its input, so that S starts close to H. A
        full copy of the self-attention starts far worse than a random one (LOG.md).
        """
        check_cross_attention(encoder.model.config.model_type)
        model = build_cross_attention_model(encoder.model.config)
        found: Any = model.load_state_dict(encoder.model.state_dict(), strict=False)
        assert not found.unexpected_keys
        assert all(f".{CROSS_ATTENTION}." in key for key in found.missing_keys)
        for layer in encoder.family.get_layers(model):
            if start == "self":
                _copy_self_attention(layer)
            else:
                assert generator is not None, "a random start needs a generator"
                part = getattr(layer, CROSS_ATTENTION)
                _initialize(part, model.config.initializer_range, generator)
        device, dtype = encoder.model.device, encoder.model.dtype
        veco = cls(model, encoder.tokenizer).to(device, dtype)
        return veco.train(encoder.training)

    def cross(
        self, batch: TokenBatch, keys: Float[Tensor, "read hidden"], read: TokenBatch
    ) -> Float[Tensor, "tokens hidden"]:
        """Return S: the last states of the batch, whose sequence k reads sequence k of `read`.

        `keys` are the last states H of the sequences that are read; they receive no gradient.
        """
        return self.cross_layers(batch, keys, read, [self.n_layers])[0]

    def cross_layers(
        self,
        batch: TokenBatch,
        keys: Float[Tensor, "read hidden"],
        read: TokenBatch,
        layers: Sequence[int],
    ) -> list[Float[Tensor, "tokens hidden"]]:
        """Return S of several layers; layer 0, the embeddings, is the same in H and S.

        Every layer reads the last states of the paired sequence. Layers above the highest one
        that is needed are not computed.
        """
        numbers = [self.check_layer(number) for number in layers]
        body = self.family.get_body(self.model)
        hidden = self.family.embed(body, batch)
        dtype = compute_dtype(hidden)
        keys = keys.detach()[None]
        attend = plan_attention(batch, dtype)
        attend_cross = plan_cross_attention(batch, read, dtype)
        if self.use_fused_layers:
            hidden, keys = hidden.to(dtype), keys.to(dtype)
        arguments = {"encoder_hidden_states": keys, "attend_cross": attend_cross}
        states = [hidden]
        for layer in self.family.get_layers(self.model)[: max(numbers)]:
            if self.use_fused_layers:
                hidden = run_fused_layer(layer, hidden, attend, keys, attend_cross)
            else:
                hidden = run_layer(layer, hidden, attend, arguments)
            states.append(hidden)
        return [states[number][0] for number in numbers]

    def unplug(self) -> Encoder:
        """Return a plain encoder with a copy of the weights, without the cross-attention."""
        with torch.random.fork_rng(devices=()):
            model = build_model(without_cross_attention(self.model.config))
        model.load_state_dict(_drop_cross_attention(self.model.state_dict()))
        encoder = Encoder(model, self.tokenizer).to(self.model.device, self.model.dtype)
        return encoder.train(self.training)

    def publish(self, folder: Path, *, dtype: torch.dtype, state: dict[str, Tensor]) -> None:
        """Write the plain encoder to a folder, and the full model to a subfolder."""
        with torch.device("meta"):
            plain = build_model(without_cross_attention(self.model.config))
        save_checkpoint(plain, self.tokenizer, folder, dtype, _drop_cross_attention(state))
        self.save(folder / VECO_FOLDER, dtype=dtype, state=state)


def find_veco_folder(name: str | Path) -> Path | None:
    """Return the folder with cross-attention weights: the given one or its subfolder; or None."""
    for folder in (Path(name), Path(name) / VECO_FOLDER):
        try:
            config = read_config(folder)
        except InputError:  # loading reports what is wrong
            continue
        if config.get("add_cross_attention"):
            return folder
    return None


def build_cross_attention_model(config: Any) -> PreTrainedModel:
    """Return an encoder of a given configuration with cross-attention and random weights."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.is_decoder = config.add_cross_attention = True
    with torch.random.fork_rng(devices=()):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=register_attention()
        )
    return model  # type: ignore[no-any-return]


def check_cross_attention(model_type: str) -> None:
    """Raise an error for a family whose layers cannot have cross-attention."""
    if not find_family(model_type, None).is_bert_like:
        fix = "use a BERT or RoBERTa encoder"
        raise InputError(f"encoders of type {model_type!r} have no cross-attention", fix=fix)


def without_cross_attention(config: Any) -> Any:
    """Return a copy of a configuration without cross-attention."""
    plain = copy.deepcopy(config)
    plain.is_decoder = plain.add_cross_attention = False
    return plain


def _drop_cross_attention(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if f".{CROSS_ATTENTION}." not in name}


@torch.no_grad()
def _copy_self_attention(layer: Any) -> None:
    """Initialize the cross-attention from the self-attention such that it returns its input.

    That input is w z + b with z of variance 1. The output matrix is 0, and the final norm restores
    the scale and mean that its normalization removes.
    """
    part, norm = getattr(layer, CROSS_ATTENTION), layer.attention.output.LayerNorm
    part.self.load_state_dict(layer.attention.self.state_dict())
    part.output.dense.weight.zero_()
    part.output.dense.bias.zero_()
    variance = norm.weight.square().mean() + norm.bias.var(correction=0)
    part.output.LayerNorm.weight.fill_(variance.sqrt())
    part.output.LayerNorm.bias.fill_(norm.bias.mean())


@torch.no_grad()
def _initialize(part: nn.Module, deviation: float, generator: torch.Generator) -> None:
    """Initialize matrices, biases and norms as Hugging Face does, with the given generator."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, deviation, generator=generator)
            module.bias.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
