"""Run any supported Hugging Face encoder on packed tokens; return hidden states by layer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from calque.errors import InputError, first_line
from calque.io.tensor_files import is_finite
from calque.models.attention import plan_attention, register_attention
from calque.models.configuration import CONFIG, max_sequence_length
from calque.models.families import find_family, run_fused_layer, run_layer
from calque.models.language_maps import LanguageMaps
from calque.models.loading import load_checkpoint, save_checkpoint
from calque.models.neutral_space import NeutralSpace, load_neutral_space
from calque.tokens.ragged import Ragged, pack

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from calque.models.families import Family
    from calque.types import TokenBatch


class Encoder(nn.Module):
    """A masked language model and its tokenizer, run on sequences without padding.

    Layer 0 is the embedding output, layer `n_layers` the last one. The wrapped `model` stays a
    plain Hugging Face model, with its own `forward`, saving and fine-tuning. `maps` and `neutral`
    are not applied to the returned states: functions that compare languages apply them.
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
            # Any other attention would mix the packed sequences.
            model.set_attn_implementation(register_attention())
        self.use_fused_layers = False
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
        """Load a folder, a hub name or `calque-mini`, which is also the default."""
        model, tokenizer, folder = load_checkpoint(name, dtype)
        encoder = cls(model, tokenizer, folder).to(device).eval()
        encoder.neutral = load_neutral_space(folder, encoder.hidden_size, encoder.n_layers)
        return encoder.check_runs()

    @torch.inference_mode()
    def check_runs(self) -> Self:
        """Return the encoder if it can encode two tokens; else its settings are the reason."""
        batch = pack(Ragged.of([[0, 0]]), pad_id=0).to(next(self.parameters()).device)
        try:
            states = self.run_all_parts(batch)
        except Exception as error:
            problem = f"a model with these settings cannot run: {first_line(error)}"
            fix = "use the config.json that the model was trained with"
            raise InputError(problem, file=self.folder / CONFIG, fix=fix) from error
        self.check_finite(states, self.n_layers)
        return self

    def run_all_parts(self, batch: TokenBatch) -> Tensor:
        """Return the last states of a batch, after all parts of the model have run."""
        states: Tensor = self(batch)[0]
        return states

    def check_finite(self, states: Tensor, layer: int) -> None:
        """Raise an error if states of a layer, or means of them, are NaN or infinite.

        All uses of an encoder for inference call it. On a GPU it waits for the states.
        """
        if not is_finite(states):
            problem = f"the states of layer {layer} are not finite"
            fix = "the weights are damaged or overflow in half precision; try --device cpu"
            raise InputError(problem, file=self._folder, fix=fix)

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write a plain Hugging Face folder: safetensors, configuration and tokenizer.

        `state` replaces the model's own weights, for example if they are sharded over processes.
        """
        save_checkpoint(self.model, self.tokenizer, folder, dtype, state)

    def publish(self, folder: Path, *, dtype: torch.dtype, state: dict[str, Tensor]) -> None:
        """Write the final model of a training run."""
        self.save(folder, dtype=dtype, state=state)

    @property
    def folder(self) -> Path:
        """The folder of the model's plain Hugging Face files."""
        if self._folder is None:
            raise InputError("this encoder was not loaded from a folder", fix="save it first")
        return self._folder

    @property
    def config(self) -> Any:
        """The Hugging Face configuration of the encoder."""
        return self.model.config

    @property
    def configs(self) -> list[Any]:
        """The configurations of all parts."""
        return [self.config]

    @property
    def n_layers(self) -> int:
        """The number of Transformer layers."""
        return int(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        """The size of a hidden state."""
        return int(self.config.hidden_size)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the positions allow, special tokens included."""
        return max_sequence_length(self.config)

    @property
    def settings(self) -> dict[str, Any]:
        """Calque's settings stored with the model, such as its best layer for retrieval."""
        return dict(getattr(self.config, "calque", None) or {})

    @property
    def retrieval_layer(self) -> int:
        """The best layer for mean-pooled retrieval: as stored, by default the middle one."""
        return int(self.settings.get("retrieval_layer", round(self.n_layers / 2)))

    @property
    def can_fuse(self) -> bool:
        """Whether the layers are BERT's, which run faster with `use_fused_layers`."""
        return self.family.is_bert_like

    def choose_layer(self, use: Literal["sentences", "words"], layer: int | None = None) -> int:
        """Return the layer asked for or, by default, the model's best layer for a use.

        The best layer for sentence retrieval is stored with the model (`retrieval_layer`),
        otherwise it is the middle one. Words compare best two thirds of the way up: layer 8 of 12,
        as in SimAlign.
        """
        if layer is None:
            layer = self.retrieval_layer if use == "sentences" else round(2 / 3 * self.n_layers)
        return self.check_layer(layer)

    def check_layer(self, layer: int) -> int:
        """Return the number of a layer; negative numbers count from the end."""
        number = layer if layer >= 0 else self.n_layers + 1 + layer
        if not 0 <= number <= self.n_layers:
            raise InputError(f"layer {layer} does not exist", fix=f"choose 0 to {self.n_layers}")
        return number

    def forward(
        self, batch: TokenBatch, layers: Sequence[int] | None = None
    ) -> list[Float[Tensor, "tokens hidden"]]:
        """Return the hidden states of the given layers, by default the last.

        Layers above the highest one that is needed are not computed.
        """
        numbers = [self.n_layers] if layers is None else [self.check_layer(n) for n in layers]
        body = self.family.get_body(self.model)
        hidden = self.family.embed(body, batch)
        run = self.family.run or partial(_run_packed, self)
        states = run(body, hidden, batch, numbers)
        if self.n_layers in states and self.family.final_norm is not None:
            states[self.n_layers] = getattr(body, self.family.final_norm)(states[self.n_layers])
        return [states[number][0] for number in numbers]

    def lm_features(self, states: Float[Tensor, "masked hidden"]) -> Float[Tensor, "masked hidden"]:
        """Return what the language-modeling head multiplies with the vocabulary matrix."""
        return self.family.head(self.model)(states)

    def output_layer(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the vocabulary projection of the language-modeling head."""
        decoder: Any = self.model.get_output_embeddings()
        return decoder.weight, decoder.bias

    def _find_family(self) -> Family:
        """Return the description of the encoder's parts."""
        return find_family(self.config.model_type, self._folder)


def _run_packed(
    encoder: Encoder, body: Any, hidden: Tensor, batch: TokenBatch, numbers: Collection[int]
) -> dict[int, Tensor]:
    """Return the states of the given layers, for families with Calque's packed attention."""
    dtype = compute_dtype(hidden)
    attend = plan_attention(batch, dtype)
    arguments = encoder.family.prepare(body, hidden, batch)
    states = {0: hidden}
    if encoder.use_fused_layers:
        hidden = hidden.to(dtype)
    layers = encoder.family.get_layers(encoder.model)[: max(numbers)]
    for number, layer in enumerate(layers, start=1):
        if encoder.use_fused_layers:
            hidden = run_fused_layer(layer, hidden, attend)
        else:
            hidden = run_layer(layer, hidden, attend, arguments(layer))
        if number in numbers:
            states[number] = hidden
    return states


def compute_dtype(hidden: Tensor) -> torch.dtype:
    """Return the type of matrix products: the autocast type if autocast is on."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return hidden.dtype
