"""VECO's plug-in cross-attention: one set of weights as encoder, cross-encoder or decoder.

Luo et al., 2021, "VECO: Variable and Flexible Cross-lingual Pre-training for Language Understanding
and Generation". The layers are Hugging Face's own, which carry a cross-attention for decoders.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from calque.errors import InputError
from calque.models import attention
from calque.models.attention import plan_attention, plan_cross
from calque.models.encoder import Encoder, working_dtype
from calque.models.families import family_of, run_fused_cross_layer, run_layer
from calque.models.loading import (
    EMBEDDED,
    PLUG,
    build_model,
    find_folder,
    load_checkpoint,
    save_checkpoint,
)

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel

    from calque.types import TokenBatch

    PlugStart = Literal["self", "random"]

# Where the full model lies inside the folder of a finished one, which is the encoder alone.
FULL = "veco"


class Veco(Encoder):
    """An encoder whose layers have a cross-attention that is plugged in or out by the call.

    Called as any encoder it gives H, as if there were no cross-attention; `cross` gives S, for
    which every layer also reads a paired sequence; `model` is a causal decoder of Hugging Face's.
    """

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a full model, or the one inside the folder of a finished model."""
        found = find_folder(EMBEDDED if name is None else name)
        model, tokenizer, folder = load_checkpoint(find_full(found) or found, dtype, plugged=True)
        return cls(model, tokenizer, folder).to(device).eval()

    @classmethod
    def plug(
        cls, encoder: Encoder, start: PlugStart = "self", generator: torch.Generator | None = None
    ) -> Self:
        """Give a copy of an encoder a cross-attention; a random one needs a generator.

        Paper: how it starts is not told. With "self" it looks as the layer's self-attention does,
        but passes its input on, so that S begins near H. A whole copy of the self-attention begins
        far worse than a random start (LOG.md).
        """
        check_plugs(encoder.model.config.model_type)
        model = build_plugged(encoder.model.config)
        found: Any = model.load_state_dict(encoder.model.state_dict(), strict=False)
        assert not found.unexpected_keys
        assert all(f".{PLUG}." in key for key in found.missing_keys)
        layers: Any = encoder.family.layers_of(model)
        for layer in layers:
            if start == "self":
                _copy_self_attention(layer)
            else:
                assert generator is not None, "a random start needs a generator"
                _draw(getattr(layer, PLUG), model.config.initializer_range, generator)
        device, dtype = encoder.model.device, encoder.model.dtype
        veco = cls(model, encoder.tokenizer).to(device, dtype)
        return veco.train(encoder.training)

    def cross(
        self, batch: TokenBatch, keys: Float[Tensor, "read hidden"], read: TokenBatch
    ) -> Float[Tensor, "tokens hidden"]:
        """Return S: the last states of the batch, whose sequence k reads sequence k of `read`.

        The keys are the last states H of what is read, and nothing is learnt through them.
        """
        body = self.family.body_of(self.model)
        hidden = self.family.embed(body, batch)
        dtype = working_dtype(hidden)
        keys = keys.detach()[None]
        attend, attend_cross = plan_attention(batch, dtype), plan_cross(batch, read, dtype)
        if self.fuses:
            hidden, keys = hidden.to(dtype), keys.to(dtype)
        arguments = {"encoder_hidden_states": keys, "attend_cross": attend_cross}
        for layer in self.family.layers_of(self.model):
            if self.fuses:
                hidden = run_fused_cross_layer(layer, hidden, attend, keys, attend_cross)
            else:
                hidden = run_layer(layer, hidden, attend, arguments)
        return hidden[0]

    def unplug(self) -> Encoder:
        """Give a plain encoder with a copy of the weights, without the cross-attention."""
        with torch.random.fork_rng(devices=()):
            model = build_model(plain_config(self.model.config))
        model.load_state_dict(_drop_plug(self.model.state_dict()))
        encoder = Encoder(model, self.tokenizer).to(self.model.device, self.model.dtype)
        return encoder.train(self.training)

    def publish(self, folder: Path, *, dtype: torch.dtype, state: dict[str, Tensor]) -> None:
        """Write the unplugged encoder for anyone's use, and the full model in a folder inside."""
        with torch.device("meta"):
            plain = build_model(plain_config(self.model.config))
        save_checkpoint(plain, self.tokenizer, folder, dtype, _drop_plug(state))
        self.save(folder / FULL, dtype=dtype, state=state)


def find_full(name: str | Path) -> Path | None:
    """Find the full model in a folder: itself, or the one inside; None if there is neither."""
    for folder in (Path(name), Path(name) / FULL):
        try:
            config = json.loads((folder / "config.json").read_text("utf-8"))
        except (OSError, ValueError):  # whoever loads it is told
            continue
        if isinstance(config, dict) and config.get("add_cross_attention"):
            return folder
    return None


def build_plugged(config: Any) -> PreTrainedModel:
    """Make an encoder of a given description with cross-attention and random weights."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    config.is_decoder = config.add_cross_attention = True
    with torch.random.fork_rng(devices=()):
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention.register()
        )
    return model  # type: ignore[no-any-return]


def check_plugs(model_type: str) -> None:
    """Refuse a family whose layers have no cross-attention."""
    if not family_of(model_type, None).like_bert:
        fix = "use an encoder of the BERT or the RoBERTa kind"
        raise InputError(f"encoders of type {model_type!r} have no cross-attention", fix=fix)


def plain_config(config: Any) -> Any:
    """Describe a model without its cross-attention."""
    plain = copy.deepcopy(config)
    plain.is_decoder = plain.add_cross_attention = False
    return plain


def _drop_plug(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if f".{PLUG}." not in name}


@torch.no_grad()
def _copy_self_attention(layer: Any) -> None:
    """Let the cross-attention look as the self-attention does, and add nothing to its input.

    That input is w z + b, z of variance 1: so much the norm takes away, and must give back.
    """
    part, norm = getattr(layer, PLUG), layer.attention.output.LayerNorm
    part.self.load_state_dict(layer.attention.self.state_dict())
    part.output.dense.weight.zero_()
    part.output.dense.bias.zero_()
    variance = norm.weight.square().mean() + norm.bias.var(correction=0)
    part.output.LayerNorm.weight.fill_(variance.sqrt())
    part.output.LayerNorm.bias.fill_(norm.bias.mean())


@torch.no_grad()
def _draw(part: nn.Module, spread: float, generator: torch.Generator) -> None:
    """Draw matrices as Hugging Face does; biases and norms begin as those of a new layer."""
    for module in part.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, spread, generator=generator)
            module.bias.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.fill_(1.0)
            module.bias.zero_()
