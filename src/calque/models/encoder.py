"""Any Hugging Face encoder of the BERT kind as a function from packed tokens to states by layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from calque.errors import InputError
from calque.models.attention import plan_attention, register
from calque.models.families import family_of, run_fused_layer, run_layer
from calque.models.language_maps import LanguageMaps
from calque.models.loading import count_positions, load_checkpoint, save_checkpoint
from calque.models.neutral_space import NeutralSpace, load_neutral_space

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from calque.models.families import Family
    from calque.types import TokenBatch


class Encoder(nn.Module):
    """A masked language model and its tokenizer, run on sequences without padding.

    Layer 0 is the embedding output, layer `n_layers` the last. The wrapped `model` stays a
    plain Hugging Face model: its own `forward`, saving and fine-tuning work as ever. Where there
    are `maps`, those who compare languages apply them; states are given as they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path | None = None,
    ) -> None:
        super().__init__()
        self.model, self.tokenizer, self._folder = model, tokenizer, folder
        self.family = self._find_family()
        if self.family.run is None:
            model.set_attn_implementation(register())  # any other would mix the packed sequences
        self.fuses = False
        self.neutral: NeutralSpace | None = None
        self.maps: LanguageMaps | None = None

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a folder, a hub name or, without a name, the embedded calque-mini."""
        model, tokenizer, folder = load_checkpoint(name, dtype)
        encoder = cls(model, tokenizer, folder).to(device).eval()
        encoder.neutral = load_neutral_space(folder, encoder.hidden_size)
        return encoder

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write a plain Hugging Face folder: safetensors, configuration and tokenizer.

        `state` stands in for the model's own weights where those are spread over processes.
        """
        save_checkpoint(self.model, self.tokenizer, folder, dtype, state)

    def publish(self, folder: Path, *, dtype: torch.dtype, state: dict[str, Tensor]) -> None:
        """Write a finished model for others to load."""
        self.save(folder, dtype=dtype, state=state)

    @property
    def folder(self) -> Path:
        """Where the model's plain Hugging Face files lie."""
        if self._folder is None:
            raise InputError("this encoder was not loaded from a folder", fix="save it first")
        return self._folder

    @property
    def config(self) -> Any:
        """Give Hugging Face's description of the encoder."""
        return self.model.config

    @property
    def configs(self) -> list[Any]:
        """Give the descriptions of all parts."""
        return [self.config]

    @property
    def n_layers(self) -> int:
        """Count the Transformer layers."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """Give the width of a state."""
        return int(self.config.hidden_size)

    @property
    def max_tokens(self) -> int:
        """Give the longest sequence the positions allow, special tokens included."""
        return count_positions(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """Choices stored with the model, such as its best layer for retrieval."""
        return dict(getattr(self.config, "calque", None) or {})

    @property
    def retrieval_layer(self) -> int:
        """Give the layer whose mean-pooled states compare best: measured, or else the middle."""
        return int(self.settings.get("retrieval_layer", round(self.n_layers / 2)))

    @property
    def can_fuse(self) -> bool:
        """Whether layers are of the BERT kind, which `fuses` may speed up."""
        return self.family.like_bert

    def check_layer(self, layer: int) -> int:
        """Turn a negative layer into a positive one; an impossible one is an error."""
        found = layer if layer >= 0 else self.n_layers + 1 + layer
        if not 0 <= found <= self.n_layers:
            raise InputError(f"layer {layer} does not exist", fix=f"choose 0 to {self.n_layers}")
        return found

    def forward(
        self, batch: TokenBatch, layers: Sequence[int] | None = None
    ) -> list[Float[Tensor, "tokens hidden"]]:
        """Return the states of the layers asked for (default: the last); compute none beyond."""
        asked = [self.n_layers] if layers is None else [self.check_layer(n) for n in layers]
        body = self.family.body_of(self.model)
        hidden = self.family.embed(body, batch)
        run = self.family.run or partial(_run_packed, self)
        states = run(body, hidden, batch, asked)
        if self.n_layers in states and self.family.final_norm is not None:
            states[self.n_layers] = getattr(body, self.family.final_norm)(states[self.n_layers])
        return [states[number][0] for number in asked]

    def predict_features(
        self, states: Float[Tensor, "masked hidden"]
    ) -> Float[Tensor, "masked hidden"]:
        """Transform last-layer states as the language-modelling head does before its big matrix."""
        return self.family.head(self.model)(states)

    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the vocabulary projection."""
        decoder: Any = self.model.get_output_embeddings()
        return decoder.weight, decoder.bias

    def _find_family(self) -> Family:
        """Look up where the parts of the encoder are."""
        return family_of(self.config.model_type, self._folder)


def _run_packed(
    encoder: Encoder, body: Any, hidden: Tensor, batch: TokenBatch, asked: Collection[int]
) -> dict[int, Tensor]:
    """Run layers that take their attention from here; the embedding output is layer 0."""
    dtype = working_dtype(hidden)
    attend = plan_attention(batch, dtype)
    arguments = encoder.family.prepare(body, hidden, batch)
    states = {0: hidden}
    if encoder.fuses:
        hidden = hidden.to(dtype)
    layers = encoder.family.layers_of(encoder.model)[: max(asked)]
    for number, layer in enumerate(layers, start=1):
        if encoder.fuses:
            hidden = run_fused_layer(layer, hidden, attend)
        else:
            hidden = run_layer(layer, hidden, attend, arguments(layer))
        if number in asked:
            states[number] = hidden
    return states


def working_dtype(hidden: Tensor) -> torch.dtype:
    """Matrix products run in the autocast type where autocast is on."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
