"""Encoder–decoder models: Hugging Face's EncoderDecoderModel, trained on packed sequences.

A `Seq2Seq` is an `Encoder` whose `model` is an EncoderDecoderModel. The training loop therefore
saves, averages and resumes it like any encoder, under Hugging Face's names, a finished run loads
with `EncoderDecoderModel.from_pretrained`, and everything that compares encoder states works on it.
Its initial weights come from VECO, any other encoder, another encoder–decoder, or a random
generator.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from calque.errors import InputError, first_line
from calque.io.structured import read_json
from calque.models.attention import plan_causal_attention, plan_cross_attention, register_attention
from calque.models.configuration import (
    CONFIG,
    HALVES,
    build_config,
    load_config,
    max_sequence_length,
    read_config,
    read_model_type,
)
from calque.models.encoder import Encoder, compute_dtype
from calque.models.families import FAMILIES, find_family, run_fused_layer
from calque.models.loading import (
    CROSS_ATTENTION,
    build_model,
    check_vocabulary_size,
    find_model,
    load_checkpoint,
    load_weights,
    save_checkpoint,
    silence_transformers,
)
from calque.models.veco import find_veco_folder
from calque.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.models.families import Family
    from calque.types import TokenBatch

    State = Mapping[str, Tensor]

MODEL_TYPE = "encoder-decoder"
# The subfolder of the encoder inside the folder of a finished model.
ENCODER_FOLDER = "encoder"
# With several target languages, the decoder input starts with the token of the language.
LANGUAGE_TOKEN = "<2{}>"
# Families whose layers can have cross-attention.
CAN_DECODE = tuple(name for name, family in FAMILIES.items() if family.is_bert_like)
LAYER_NUMBER = re.compile(r"(?<=\.layer\.)\d+(?=\.)")
# Weights that may be missing in the initial weights; they are then random.
OPTIONAL = (CROSS_ATTENTION, "pooler.")


class Seq2Seq(Encoder):
    """An encoder and a decoder that reads its states, with one tokenizer.

    Used as an `Encoder`, it returns the states of the encoder half.
    """

    @classmethod
    def load(
        cls,
        name: str | Path | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Self:
        """Load an EncoderDecoderModel and its tokenizer from a folder or hub name."""
        if name is None:
            raise InputError("no model is given", fix="give the folder of an encoder–decoder")
        folder = find_model(name)
        model = load_seq2seq_model(folder, dtype)
        tokenizer = load_tokenizer(folder)
        check_vocabulary_size(folder, tokenizer, model.config.encoder.vocab_size)
        settings = model.generation_config
        if settings.pad_token_id is None or settings.eos_token_id is None:  # not Calque's model
            settings.pad_token_id = tokenizer.pad_token_id
            settings.eos_token_id = tokenizer.sep_token_id
        return cls(model, tokenizer, folder).to(device).eval().check_runs()

    def run_all_parts(self, batch: TokenBatch) -> Tensor:
        """Return the decoder states of a batch that reads its own encoder states."""
        return self.decode(batch, batch, self(batch)[0])

    def save(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write a plain Hugging Face folder.

        Weights that both halves share are written twice, so that loading needs no tying.
        """
        state = _copy_shared(self.model.state_dict() if state is None else state)
        save_checkpoint(self.model, self.tokenizer, folder, dtype, state)

    def publish(self, folder: Path, *, dtype: torch.dtype, state: dict[str, Tensor]) -> None:
        """Write the model to a folder, and the encoder half alone to a subfolder."""
        self.save(folder, dtype=dtype, state=state)
        self.save_encoder(folder / ENCODER_FOLDER, dtype=dtype, state=state)

    def save_encoder(
        self,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        state: dict[str, Tensor] | None = None,
    ) -> None:
        """Write the encoder half as a masked language model with the decoder's head."""
        state = self.model.state_dict() if state is None else state
        with torch.device("meta"):
            encoder: Any = build_model(self.config)
        prefix = f"{encoder.base_model_prefix}."
        weights = {}
        for name, value in state.items():
            half, _, rest = name.partition(".")
            if half == "encoder":
                weights[prefix + rest] = value
            elif not rest.startswith(prefix):  # the head of the decoder
                weights[rest] = value
        names = encoder.state_dict().keys()
        weights = {name: value for name, value in weights.items() if name in names}
        assert names - weights.keys() <= encoder.all_tied_weights_keys.keys()
        save_checkpoint(encoder, self.tokenizer, folder, dtype, _copy_shared(weights))

    @property
    def config(self) -> Any:
        """The Hugging Face configuration of the encoder half."""
        return self.model.config.encoder

    @property
    def configs(self) -> list[Any]:
        """The configurations of both halves."""
        return [self.model.config.encoder, self.model.config.decoder]

    @property
    def max_tokens(self) -> int:
        """The longest sequence that both halves allow, special tokens included."""
        return min(map(max_sequence_length, self.configs))

    @property
    def _seq2seq_settings(self) -> dict[str, Any]:
        return getattr(self.model.config, "calque", None) or {}

    @property
    def start_tokens(self) -> dict[str, int]:
        """The first decoder token by target language; empty for a model with one language."""
        names: list[str] = self._seq2seq_settings.get("targets", [])
        return {name: language_token_id(self.tokenizer, name) for name in names}

    @property
    def directions(self) -> list[tuple[str, str]]:
        """The (source, target) languages that the model was trained to translate."""
        known: list[list[str]] = self._seq2seq_settings.get("directions", [])
        return [(src, tgt) for src, tgt in known]

    @property
    def target_languages(self) -> list[str]:
        """The languages that the model was trained to translate into."""
        return sorted({tgt for _, tgt in self.directions})

    def add_directions(self, directions: Iterable[tuple[str, str]]) -> None:
        """Store languages that the model is trained to translate from and to."""
        every = {*self.directions, *directions}
        self.model.config.calque["directions"] = sorted(map(list, every))

    @property
    def default_start_token(self) -> int:
        """The first decoder token if no target language is given."""
        for config in (self.model.config, self.model.generation_config):
            first = getattr(config, "decoder_start_token_id", None)
            if first is not None:
                return int(first)
        raise InputError(
            "the first token of the decoder is not defined for this model",
            file=self._folder,
            fix="set decoder_start_token_id in its config.json",
        )

    def start_token(self, language: str | None) -> int:
        """Return the first decoder token for a target language.

        None means the only language that the model was trained to translate into.
        """
        start_tokens = self.start_tokens
        chosen = choose_language(language, list(start_tokens), self.target_languages)
        return self.default_start_token if chosen is None else start_tokens[chosen]

    def decode(
        self, tgt: TokenBatch, src: TokenBatch, memory: Float[Tensor, "src_tokens hidden"]
    ) -> Float[Tensor, "tgt_tokens hidden"]:
        """Return the decoder states; sequence k of `tgt` reads sequence k of `src`.

        `memory` are the encoder states of `src`.
        """
        decoder: Any = self.model.decoder
        family = find_family(decoder.config.model_type, None)
        hidden = family.embed(family.get_body(decoder), tgt)
        dtype = compute_dtype(hidden)
        attend = plan_causal_attention(tgt, dtype)
        attend_cross = plan_cross_attention(tgt, src, dtype)
        if self.use_fused_layers:
            hidden, memory = hidden.to(dtype), memory.to(dtype)
        for layer in family.get_layers(decoder):
            if self.use_fused_layers:
                hidden = run_fused_layer(layer, hidden, attend, memory[None], attend_cross)
            else:
                result = layer(hidden, None, memory[None], attend=attend, attend_cross=attend_cross)
                hidden = result[0] if isinstance(result, tuple) else result
        return hidden[0]

    def _find_family(self) -> Family:
        """Return the parts: the body is the encoder half, the head is the decoder's."""
        base = find_family(self.config.model_type, self._folder)
        return replace(base, body="encoder", head=lambda model: base.head(model.decoder))


def _copy_shared(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors that share memory with an earlier one, which safetensors cannot store."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in state.items():
        address = tensor.data_ptr()
        separate[name] = tensor.clone() if address in seen and tensor.numel() else tensor
        seen.add(address)
    return separate


def choose_language(
    language: str | None, with_token: Sequence[str], trained: Sequence[str]
) -> str | None:
    """Return the language whose token the decoder starts with; None if there are no such tokens.

    `with_token` are the languages that have a token, `trained` those that the model was trained to
    translate into.

    >>> choose_language(None, ["de", "en"], ["en"]), choose_language("de", [], ["de"])
    ('en', None)
    """
    known = list(with_token) or list(trained)
    if language is None and len(trained) == 1:
        language = trained[0]
    if language is None and len(with_token) > 1:
        problem = "this model has several target languages, and none is chosen"
        raise InputError(problem, fix=f"choose one of {', '.join(with_token)}")
    if language is not None and known and language not in known:
        problem = f"this model does not translate into {language}"
        raise InputError(problem, fix=f"choose one of {', '.join(known)}")
    return (language or with_token[0]) if with_token else None


def language_token_id(tokenizer: Any, language: str) -> int:
    """Return the id of the token of a language."""
    number = tokenizer.get_vocab().get(LANGUAGE_TOKEN.format(language))
    if number is None:
        raise InputError(f"the tokenizer has no token for the language {language}")
    return int(number)


def add_language_tokens(tokenizer: Any, languages: list[str]) -> Any:
    """Return a copy of a tokenizer with a token for each language; itself if none is missing."""
    known = tokenizer.get_vocab()
    wanted = [LANGUAGE_TOKEN.format(language) for language in languages]
    missing = [token for token in wanted if token not in known]
    if not missing:
        return tokenizer
    extended = copy.deepcopy(tokenizer)
    extended.add_tokens(missing, special_tokens=True)
    return extended


def drop_language_tokens(vocabulary: dict[str, int]) -> dict[str, int]:
    """Return a vocabulary without language tokens, which never occur in text."""
    head, tail = LANGUAGE_TOKEN.split("{}")
    return {
        piece: number
        for piece, number in vocabulary.items()
        if not (piece.startswith(head) and piece.endswith(tail) and len(piece) <= 8)
    }


def load_seq2seq_config(folder: Path) -> Any:
    """Read the configuration of an EncoderDecoderModel."""
    fix = "give a folder that `calque train` made with a recipe that has a decoder"
    content = read_config(folder, fix=fix)
    if content.get("model_type") != MODEL_TYPE:
        problem = f"this {content.get('model_type')} model is not an encoder–decoder"
        raise InputError(problem, file=folder, fix=fix)
    for half in HALVES:
        own = content.get(half)
        if not isinstance(own, dict) or own.get("model_type") not in CAN_DECODE:
            problem = f"the {half} is not one of {', '.join(CAN_DECODE)}"
            raise InputError(problem, file=folder / CONFIG, fix=fix)
    return build_config(folder, content)


def load_seq2seq_model(folder: Path, dtype: torch.dtype) -> Any:
    """Load an EncoderDecoderModel."""
    from transformers import EncoderDecoderModel

    config = load_seq2seq_config(folder)
    generation = _read_generation_config(folder, config.decoder.vocab_size)
    model, info = load_weights(
        EncoderDecoderModel, folder, config, dtype, generation_config=generation
    )
    missing = [key for key in info["missing_keys"] if ".pooler." not in key]
    n_wrong = len(missing) + len(info["unexpected_keys"])
    if n_wrong:
        raise InputError(
            f"{n_wrong} tensors are missing or superfluous",
            file=folder,
            fix="config.json and the weights do not belong together",
        )
    return model


def _read_generation_config(folder: Path, vocab_size: int) -> Any:
    """Return the settings of `generate`; None if they are not stored."""
    from transformers import GenerationConfig

    path = folder / "generation_config.json"
    if not path.exists():
        return None
    content = read_json(path, dict)
    for name, value in content.items():
        ids = [] if value is None else value if isinstance(value, list) else [value]
        known = all(type(each) is int and 0 <= each < vocab_size for each in ids)
        if name.endswith("_token_id") and not known:
            problem = f"{name} is not one of the model's {vocab_size:,} tokens"
            raise InputError(problem, file=path, fix="copy the model again")
    try:
        return GenerationConfig.from_dict(content)
    except Exception as error:
        problem = f"these are not settings of generation: {first_line(error)}"
        raise InputError(problem, file=path, fix="copy the model again") from error


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """How to build the decoder.

    Args:
        layers: Number of layers to take from the initial weights; None for all.
        which: Whether to take the first or the last layers.
        cross_attention: Take it from the initial weights if they have it, or initialize it.
        tie: Weights that the decoder shares with the encoder.
        languages: Languages that get a start token. Default: those of the initial weights; none if
            the model has one target language.
    """

    layers: int | None = None
    which: Literal["first", "last"] = "last"
    cross_attention: Literal["start", "random"] = "start"
    tie: Literal["nothing", "embeddings", "all"] = "embeddings"
    languages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """Initial weights of both halves by Hugging Face's names; empty states mean random weights.

    `origins` is the encoder layer that corresponds to each decoder layer, `languages` those with a
    start token.
    """

    config: Any
    encoder: State
    decoder: State
    origins: tuple[int, ...]
    languages: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        """The number of tokens whose embeddings are given."""
        return int(self.config.vocab_size) if self.encoder else 0


def build_seq2seq(
    plan: DecoderPlan, weights: InitialWeights, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0
) -> Seq2Seq:
    """Return an encoder–decoder; weights that are not given are drawn from the seed.

    Paper: VECO's self-attention initializes both halves, its cross-attention the decoder's; with
    any other encoder the latter is random. The paper does not say whether the halves stay tied.
    """
    chosen = choose_decoder_layers(len(weights.origins), plan)
    origins = [weights.origins[number] for number in chosen]
    languages = list(plan.languages or weights.languages)
    extended = add_language_tokens(tokenizer, languages)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        # Many encoders have more embeddings than their tokenizer has entries: they are kept.
        n_rows = max(len(extended), weights.n_tokens)
        encoder, decoder = _build_halves(weights.config, n_rows, len(chosen))
    if weights.encoder:
        _copy_weights(encoder, weights.encoder)
        _copy_weights(decoder, pick_layers(weights.decoder, chosen))
    _tie(encoder, decoder, plan.tie, origins, weights.n_tokens)
    if encoder.pooler is not None:
        # Nothing reads the pooler, but `from_pretrained` expects it.
        for parameter in encoder.pooler.parameters():
            parameter.requires_grad_(False).zero_()
    model = _join_halves(encoder, decoder, extended, languages)
    model.config.calque["decoder_layers"] = origins
    return Seq2Seq(model, extended)


def _join_halves(encoder: Any, decoder: Any, tokenizer: Any, languages: list[str]) -> Any:
    """Return an EncoderDecoderModel of two models, with its settings for `generate`."""
    from transformers import EncoderDecoderConfig, EncoderDecoderModel, GenerationConfig

    first = language_token_id(tokenizer, languages[0]) if languages else tokenizer.cls_token_id
    token_ids = {
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.cls_token_id,
        "eos_token_id": tokenizer.sep_token_id,
        "decoder_start_token_id": first,
    }
    config = EncoderDecoderConfig.from_encoder_decoder_configs(
        encoder.config, decoder.config, **token_ids
    )
    config.vocab_size = decoder.config.vocab_size
    config.calque = {"targets": languages}
    with silence_transformers():
        model = EncoderDecoderModel(config=config, encoder=encoder, decoder=decoder)
    model.generation_config = GenerationConfig(num_beams=5, **token_ids)
    return model


def check_decoder_plan(start: str | Path, plan: DecoderPlan) -> int:
    """Raise an error if a model cannot provide this decoder; return its maximum length.

    Only the configuration of the model is read.
    """
    config, n_layers = _read_shape(start)
    choose_decoder_layers(n_layers, plan)
    return max_sequence_length(config)


def build_untrained_halves(start: Any, plan: DecoderPlan) -> tuple[Any, nn.Module]:
    """Return the encoder's configuration and random, untied halves, for their parameter names.

    `start` is a folder, a hub name or the configuration of a new encoder.
    """
    is_name = isinstance(start, str | Path)
    config, n_layers = _read_shape(start) if is_name else (start, start.num_hidden_layers)
    n_chosen = len(choose_decoder_layers(n_layers, plan))
    encoder, decoder = _build_halves(config, config.vocab_size, n_chosen)
    return config, nn.ModuleDict({"encoder": encoder, "decoder": decoder})


def _read_shape(start: str | Path) -> tuple[Any, int]:
    """Return the configuration of the initial encoder and the number of layers for the decoder."""
    folder = find_model(start)
    if read_model_type(folder) == MODEL_TYPE:
        config = load_seq2seq_config(folder)
        return config.encoder, config.decoder.num_hidden_layers
    config = load_config(folder)
    check_can_decode(config.model_type)
    return config, config.num_hidden_layers


def check_can_decode(model_type: str) -> None:
    """Raise an error for a family whose layers cannot have cross-attention."""
    if model_type not in CAN_DECODE:
        raise InputError(
            f"a {model_type} model has no cross-attention, which a decoder needs",
            fix=f"use one of {', '.join(CAN_DECODE)}",
        )


def read_initial_weights(start: str | Path, plan: DecoderPlan) -> InitialWeights:
    """Read the weights of an encoder, of VECO with cross-attention, or of an encoder–decoder."""
    weights = _read_folder(find_model(start))
    if plan.cross_attention == "start":
        return weights
    decoder = {name: x for name, x in weights.decoder.items() if CROSS_ATTENTION not in name}
    return replace(weights, decoder=decoder)


def _read_folder(folder: Path) -> InitialWeights:
    if read_model_type(folder) == MODEL_TYPE:
        model = load_seq2seq_model(folder, torch.float32)
        n_layers, n_encoder = (
            half.num_hidden_layers for half in (model.config.decoder, model.config.encoder)
        )
        settings = getattr(model.config, "calque", None) or {}
        origins = settings.get("decoder_layers") or range(n_encoder - n_layers, n_encoder)
        return InitialWeights(
            model.config.encoder,
            model.encoder.state_dict(),
            model.decoder.state_dict(),
            tuple(origins),
            tuple(settings.get("targets", ())),
        )
    veco = find_veco_folder(folder)
    model, _, _ = load_checkpoint(veco or folder, torch.float32, cross_attention=veco is not None)
    state, prefix = model.state_dict(), f"{model.base_model_prefix}."
    encoder = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) and CROSS_ATTENTION not in name
    }
    origins = tuple(range(model.config.num_hidden_layers))
    return InitialWeights(model.config, encoder, state, origins)


def random_weights(config: Any) -> InitialWeights:
    """Return no weights, only the shape of the encoder: all weights will be random."""
    return InitialWeights(config, {}, {}, tuple(range(config.num_hidden_layers)))


def choose_decoder_layers(n_layers: int, plan: DecoderPlan) -> list[int]:
    """Return the numbers of the layers that the decoder consists of.

    >>> choose_decoder_layers(6, DecoderPlan(layers=2))
    [4, 5]
    >>> choose_decoder_layers(3, DecoderPlan(which="first"))
    [0, 1, 2]
    """
    n_wanted = n_layers if plan.layers is None else plan.layers
    if n_wanted > n_layers:
        raise InputError(
            f"decoder.layers={n_wanted}, but the model has {n_layers} layers",
            fix="lower decoder.layers",
        )
    first = n_layers - n_wanted if plan.which == "last" else 0
    return list(range(first, first + n_wanted))


def pick_layers(state: State, numbers: Sequence[int]) -> dict[str, Tensor]:
    """Return the weights of some layers, numbered from 0, and all weights outside the layers.

    >>> sorted(pick_layers({"x.layer.0.w": 0, "x.layer.1.w": 1, "head": 2}, [1]).items())
    [('head', 2), ('x.layer.0.w', 1)]
    """
    new_numbers = {old: new for new, old in enumerate(numbers)}
    picked = {}
    for name, value in state.items():
        match = LAYER_NUMBER.search(name)
        if match is None:
            picked[name] = value
        elif int(match[0]) in new_numbers:
            picked[LAYER_NUMBER.sub(str(new_numbers[int(match[0])]), name, count=1)] = value
    return picked


def _build_halves(config: Any, n_tokens: int, n_layers: int) -> tuple[Any, Any]:
    """Return an encoder and a decoder of one shape with random weights."""
    from transformers import AutoModel, AutoModelForCausalLM

    check_can_decode(config.model_type)
    halves = []
    model_classes: list[Any] = [AutoModel, AutoModelForCausalLM]
    for model_class, is_decoder in zip(model_classes, (False, True), strict=True):
        own = copy.deepcopy(config)
        own.is_decoder = own.add_cross_attention = is_decoder
        own.vocab_size = n_tokens
        if is_decoder:
            own.num_hidden_layers = n_layers
            own.calque = None
        halves.append(model_class.from_config(own, attn_implementation=register_attention()))
    return halves[0], halves[1]


@torch.no_grad()
def _copy_weights(module: nn.Module, state: State) -> None:
    """Copy weights into a module; rows for additional tokens keep their values."""
    for name, own in module.state_dict().items():
        given = state.get(name)
        if given is None:
            assert any(part in name for part in OPTIONAL), name
            continue
        own[: len(given)].copy_(given) if own.ndim else own.copy_(given)


def _tie(encoder: Any, decoder: Any, tie: str, origins: Sequence[int], n_tokens: int) -> None:
    """Make the decoder share weights with the encoder; given weights must be equal in both."""
    body = find_family(decoder.config.model_type, None).get_body(decoder)
    pairs = [] if tie == "nothing" else [(encoder.embeddings, body.embeddings)]
    if tie == "embeddings":
        pairs = [(src.word_embeddings, tgt.word_embeddings) for src, tgt in pairs]
    if tie == "all":
        for number, layer in zip(origins, body.encoder.layer, strict=True):
            origin = encoder.encoder.layer[number]
            parts = ("attention", "intermediate", "output")
            pairs += [(getattr(origin, part), getattr(layer, part)) for part in parts]
    for src, tgt in pairs:
        if n_tokens and not _have_equal_weights(src, tgt, n_tokens):
            raise InputError(
                f"decoder.tie={tie}, but decoder and encoder of this model have different weights",
                fix="set model.decoder.tie=" + ("embeddings" if tie == "all" else "nothing"),
            )
        share_weights(src, tgt)
    decoder.tie_weights()


def _have_equal_weights(left: nn.Module, right: nn.Module, n_tokens: int) -> bool:
    """Compare two modules except for embeddings of new tokens, which are random."""
    other = dict(right.named_parameters())
    for name, parameter in left.named_parameters():
        is_embedding = name in ("weight", "word_embeddings.weight")
        n_rows = n_tokens if is_embedding else len(parameter)
        if not torch.equal(parameter[:n_rows], other[name][:n_rows]):
            return False
    return True


def share_weights(source: nn.Module, target: nn.Module) -> None:
    """Make a module use the parameters of another one; its settings, such as causality, stay."""
    modules = dict(source.named_modules())
    for name, module in target.named_modules():
        for key in module._parameters:
            module._parameters[key] = modules[name]._parameters[key]
