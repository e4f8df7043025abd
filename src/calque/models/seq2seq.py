"""An encoder–decoder out of Hugging Face's own parts, trained on packed text, used by `generate()`.

It *is* an `Encoder`, whose `model` happens to be Hugging Face's EncoderDecoderModel. So the one
training loop saves, averages and resumes it as it does any encoder, under Hugging Face's names, and
a finished run is a folder that `EncoderDecoderModel.from_pretrained` loads in anyone's code. A
decoder owned by an objective would be none of that: no average, no folder, and weights tied across
two owners. What compares states of the encoder (probes, other objectives) works on it, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from calque.models.encoder import Encoder, working_dtype
from calque.models.families import family_of, run_fused_cross_layer
from calque.models.language_tokens import choose_language, find_first_token, language_token_id
from calque.models.loading import (
    build_model,
    count_positions,
    find_folder,
    quiet,
    refuse_pickle,
    save_checkpoint,
)
from calque.models.pair_attention import plan_causal, plan_cross
from calque.text.tokenization import load_tokenizer
from calque.types import InputError, first_line

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.families import Family
    from calque.types import TokenBatch

KIND = "encoder-decoder"
# The folder of the encoder half inside that of a finished model.
ENCODER = "encoder"


class Seq2Seq(Encoder):
    """An encoder and a decoder that reads its states, with one tokenizer.

    As an encoder it gives the states of the encoder half.
    """

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load a folder or hub name of an EncoderDecoderModel and its tokenizer."""
        if name is None:
            raise InputError("no model given", fix="name the folder of an encoder–decoder")
        folder = find_folder(name)
        model = load_halves(folder, dtype)
        return cls(model, load_tokenizer(folder), folder).to(device).eval()

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write a plain Hugging Face folder; weights that both halves share are written twice.

        So whoever loads it needs to know nothing of sharing.
        """
        state = _separate(self.model.state_dict() if state is None else state)
        save_checkpoint(self.model, self.tokenizer, folder, dtype, state)

    def publish(self, folder: Path, *, dtype: torch.dtype, state: dict[str, Tensor]) -> None:
        """Write the model, and in a folder inside the encoder half for those who need no more."""
        self.save(folder, dtype=dtype, state=state)
        self.save_encoder(folder / ENCODER, dtype=dtype, state=state)

    def save_encoder(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write the encoder half as a masked language model; its head is the decoder's."""
        whole = self.model.state_dict() if state is None else state
        with torch.device("meta"):
            alone: Any = build_model(self.config)
        prefix = f"{alone.base_model_prefix}."
        body = {prefix + name: value for name, value in _cut(whole, "encoder.").items()}
        head = {
            name: value
            for name, value in _cut(whole, "decoder.").items()
            if not name.startswith(prefix)
        }
        names = alone.state_dict().keys()
        found = {name: value for name, value in {**body, **head}.items() if name in names}
        assert names - found.keys() <= alone.all_tied_weights_keys.keys()
        save_checkpoint(alone, self.tokenizer, folder, dtype, _separate(found))

    @property
    def config(self) -> Any:
        """Give Hugging Face's description of the encoder half."""
        return self.model.config.encoder

    @property
    def configs(self) -> list[Any]:
        """Give the descriptions of both halves."""
        return [self.model.config.encoder, self.model.config.decoder]

    @property
    def max_tokens(self) -> int:
        """Give the longest sequence that both halves allow, special tokens included."""
        return min(map(count_positions, self.configs))

    @property
    def targets(self) -> dict[str, int]:
        """Give the first token of the decoder by target language; none for a model of one."""
        names: list[str] = (getattr(self.model.config, "calque", None) or {}).get("targets", [])
        return {name: language_token_id(self.tokenizer, name) for name in names}

    @property
    def directions(self) -> list[tuple[str, str]]:
        """Give the languages that it was taught to translate from and to."""
        known: list[list[str]] = (getattr(self.model.config, "calque", None) or {}).get(
            "directions", []
        )
        return [(src, tgt) for src, tgt in known]

    @property
    def taught(self) -> list[str]:
        """Name the languages that it was taught to translate into."""
        return sorted({tgt for _, tgt in self.directions})

    def learn_directions(self, directions: Iterable[tuple[str, str]]) -> None:
        """Take note of languages that it is being taught to translate from and to."""
        every = {*self.directions, *directions}
        self.model.config.calque["directions"] = sorted(map(list, every))

    @property
    def default_start(self) -> int:
        """Give the token the decoder begins with where no target language is told."""
        return find_first_token(self.model, self._folder)

    def start_token(self, language: str | None) -> int:
        """Give the token the decoder begins with to write a language.

        None stands for the one that it was taught, where that is only one.
        """
        targets = self.targets
        chosen = choose_language(language, list(targets), self.taught)
        return self.default_start if chosen is None else targets[chosen]

    def decode(
        self, tgt: TokenBatch, src: TokenBatch, memory: Float[Tensor, "src_tokens hidden"]
    ) -> Float[Tensor, "tgt_tokens hidden"]:
        """Run the decoder on what was written so far; sequence k reads the source's sequence k.

        `memory` is what the encoder says of the source.
        """
        decoder: Any = self.model.decoder
        base = family_of(decoder.config.model_type, None)
        hidden = base.embed(base.body_of(decoder), tgt)
        dtype = working_dtype(hidden)
        plans = {
            "attend": plan_causal(tgt, dtype),
            "attend_cross": plan_cross(tgt, src, dtype),
        }
        if self.fuses:
            hidden, memory = hidden.to(dtype), memory.to(dtype)
        for layer in base.layers_of(decoder):
            if self.fuses:
                hidden = run_fused_cross_layer(
                    layer, hidden, plans["attend"], memory[None], plans["attend_cross"]
                )
            else:
                result = layer(hidden, None, memory[None], **plans)
                hidden = result[0] if isinstance(result, tuple) else result
        return hidden[0]

    def _find_family(self) -> Family:
        """Find the encoder's parts in the encoder half, and the head in the decoder."""
        base = family_of(self.config.model_type, self._folder)
        return replace(base, body="encoder", head=lambda model: base.head(model.decoder))


def load_description(folder: Path) -> Any:
    """Read the description of an EncoderDecoderModel; a bad folder is a one-line error."""
    from transformers import AutoConfig

    fix = "give a folder that `calque train` made with a recipe that has a decoder"
    if not (folder / "config.json").exists():
        raise InputError("no config.json here", file=folder, fix=fix)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"not a model: {first_line(error)}", file=folder, fix=fix) from error
    if config.model_type != KIND:
        raise InputError(f"{config.model_type} is no encoder–decoder", file=folder, fix=fix)
    return config


def load_halves(folder: Path, dtype: torch.dtype) -> Any:
    """Load an EncoderDecoderModel; a bad folder is a one-line error."""
    from safetensors import SafetensorError
    from transformers import EncoderDecoderModel

    load_description(folder)
    refuse_pickle(folder)
    try:
        with quiet():
            kind: Any = EncoderDecoderModel
            model, info = kind.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, output_loading_info=True
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        problem = f"the weights cannot be read: {first_line(error)}"
        raise InputError(problem, file=folder, fix="copy the model again") from error
    lost = [key for key in info["missing_keys"] if ".pooler." not in key]
    if lost or info["unexpected_keys"]:
        n_wrong = len(lost) + len(info["unexpected_keys"])
        raise InputError(
            f"{n_wrong} tensors are missing or too many",
            file=folder,
            fix="config.json and the weights do not belong together",
        )
    return model


def join_halves(encoder: Any, decoder: Any, tokenizer: Any, targets: list[str]) -> Any:
    """Make an EncoderDecoderModel of two models; it is told how to begin, end and search."""
    from transformers import EncoderDecoderConfig, EncoderDecoderModel, GenerationConfig

    marks = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
    }
    first = language_token_id(tokenizer, targets[0]) if targets else tokenizer.cls_token_id
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder.config, decoder.config, decoder_start_token_id=first, **marks
    )
    config.vocab_size = decoder.config.vocab_size
    config.calque = {"targets": targets}
    with quiet():
        model = EncoderDecoderModel(config=config, encoder=encoder, decoder=decoder)
    model.generation_config = GenerationConfig(num_beams=5, decoder_start_token_id=first, **marks)
    return model


def share_weights(source: nn.Module, target: nn.Module) -> None:
    """Make a module use another one's parameters; flags such as causality stay its own."""
    modules = dict(source.named_modules())
    for name, module in target.named_modules():
        for key in module._parameters:
            module._parameters[key] = modules[name]._parameters[key]


def _cut(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Take the weights under a name."""
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


def _separate(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that lie in the same memory as an earlier one: safetensors stores no sharing."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in state.items():
        address = tensor.data_ptr()
        apart[name] = tensor.clone() if address in seen and tensor.numel() else tensor
        seen.add(address)
    return apart
