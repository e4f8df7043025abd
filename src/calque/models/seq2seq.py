"""The tokens that decoders begin with: one for each language that a model writes.

An encoder–decoder out of Hugging Face's own parts, trained on packed text, used by `generate()`.

It *is* an `Encoder`, whose `model` happens to be Hugging Face's EncoderDecoderModel. So the one
training loop saves, averages and resumes it as it does any encoder, under Hugging Face's names, and
a finished run is a folder that `EncoderDecoderModel.from_pretrained` loads in anyone's code. A
decoder owned by an objective would be none of that: no average, no folder, and weights tied across
two owners. What compares states of the encoder (probes, other objectives) works on it, too.

Where the weights of an encoder–decoder come from: VECO, any encoder, another one, or nowhere.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import nn

from calque.errors import InputError, first_line
from calque.models import attention
from calque.models.attention import plan_causal, plan_cross
from calque.models.encoder import Encoder, working_dtype
from calque.models.families import FAMILIES, family_of, run_fused_cross_layer
from calque.models.loading import (
    PLUG,
    build_model,
    count_positions,
    find_folder,
    load_checkpoint,
    load_config,
    quiet,
    refuse_pickle,
    save_checkpoint,
)
from calque.models.veco import find_full
from calque.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from calque.models.families import Family
    from calque.types import TokenBatch

    State = Mapping[str, Tensor]

# The decoder of a model with several target languages begins with the language's own token.
LANGUAGE_TOKEN = "<2{}>"


def choose_language(
    language: str | None, targets: Sequence[str], taught: Sequence[str]
) -> str | None:
    """Choose the language whose token a decoder begins with; None where there are no such tokens.

    `targets` have a token, and `taught` are those that it was taught to translate into.

    >>> choose_language(None, ["de", "en"], ["en"]), choose_language("de", [], ["de"])
    ('en', None)
    """
    known = list(targets) or list(taught)
    if language is None and len(taught) == 1:
        language = taught[0]
    if language is None and len(targets) > 1:
        problem = "this model writes several languages, and is not told which"
        raise InputError(problem, fix=f"name one of {', '.join(targets)}")
    if language is not None and known and language not in known:
        problem = f"this model does not write {language}"
        raise InputError(problem, fix=f"name one of {', '.join(known)}")
    return (language or targets[0]) if targets else None


def find_first_token(model: Any, folder: Path | None) -> int:
    """Give the token that a decoder begins with, whatever it writes."""
    for known in (model.config, model.generation_config):
        first = getattr(known, "decoder_start_token_id", None)
        if first is not None:
            return int(first)
    raise InputError(
        "this model does not say which token its decoder begins with",
        file=folder,
        fix="set decoder_start_token_id in its config.json",
    )


def language_token_id(tokenizer: Any, language: str) -> int:
    """Look up the token of a language."""
    found = tokenizer.get_vocab().get(LANGUAGE_TOKEN.format(language))
    if found is None:
        raise InputError(f"the tokenizer has no token for the language {language}")
    return int(found)


def add_language_tokens(tokenizer: Any, languages: list[str]) -> Any:
    """Give a copy of a tokenizer a token for each language that has none yet."""
    wanted = [LANGUAGE_TOKEN.format(language) for language in languages]
    known = tokenizer.get_vocab()
    missing = [token for token in wanted if token not in known]
    if not missing:
        return tokenizer
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(missing, special_tokens=True)
    return grown


def without_languages(vocabulary: dict[str, int]) -> dict[str, int]:
    """Leave the tokens of languages out of a vocabulary: text never holds them."""
    head, tail = LANGUAGE_TOKEN.split("{}")
    return {
        piece: number
        for piece, number in vocabulary.items()
        if not (piece.startswith(head) and piece.endswith(tail) and len(piece) <= 8)
    }


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


# Families whose layers have a cross-attention to plug in.
CAN_DECODE = tuple(name for name, family in FAMILIES.items() if family.like_bert)
LAYER = re.compile(r"(?<=\.layer\.)\d+(?=\.)")
# What may be missing in the weights to begin with, and is then drawn at random.
OPTIONAL = (PLUG, "pooler.")


@dataclass(frozen=True, slots=True)
class DecoderPlan:
    """What the decoder is made of.

    Of the layers there are, the first or last so many are taken; all without a number. `tie` says
    which weights of the decoder stay the encoder's own. Each of the `languages` gets a token to
    begin with; without any, they are those of the model to start from, or the model writes one
    language and needs none. Cross-attention is that of the model to start from, if it has one.
    """

    layers: int | None = None
    which: Literal["first", "last"] = "last"
    cross_attention: Literal["start", "random"] = "start"
    tie: Literal["nothing", "embeddings", "all"] = "embeddings"
    languages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights to begin with, by Hugging Face's names in either half; none: all at random.

    `origins` tell which layer of the encoder each layer of the decoder goes with, and `targets`
    the languages that have a token to begin with.
    """

    config: Any
    encoder: State
    decoder: State
    origins: tuple[int, ...]
    targets: tuple[str, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Count the tokens whose embeddings are given."""
        return int(self.config.vocab_size) if self.encoder else 0


def build_seq2seq(
    plan: DecoderPlan, weights: Weights, tokenizer: PreTrainedTokenizerFast, *, seed: int = 0
) -> Seq2Seq:
    """Make an encoder–decoder; what the weights do not give is drawn from the seed.

    Paper: VECO's self-attention begins both halves, its cross-attention the decoder's; from any
    other encoder the latter is random. Whether the halves stay tied is left open there.
    """
    chosen = choose_layers(len(weights.origins), plan)
    origins = [weights.origins[number] for number in chosen]
    languages = list(plan.languages or weights.targets)
    grown = add_language_tokens(tokenizer, languages)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        # Many encoders have more embeddings than their tokenizer has entries: they are kept.
        n_rows = max(len(grown), weights.n_tokens)
        encoder, decoder = _make_halves(weights.config, n_rows, len(chosen))
    if weights.encoder:
        _fill(encoder, weights.encoder)
        _fill(decoder, pick_layers(weights.decoder, chosen))
    _tie(encoder, decoder, plan.tie, origins, weights.n_tokens)
    _retire_pooler(encoder)
    model = join_halves(encoder, decoder, grown, languages)
    model.config.calque["decoder_layers"] = origins
    return Seq2Seq(model, grown)


def check_plan(start: str | Path, plan: DecoderPlan) -> int:
    """Refuse a decoder that a model cannot give, by its description alone; give its positions."""
    config, n_layers = _describe(start)
    choose_layers(n_layers, plan)
    return count_positions(config)


def sketch_halves(start: Any, plan: DecoderPlan) -> tuple[Any, nn.Module]:
    """Make both halves at random and apart, for their names; also give the encoder's description.

    `start` is a folder or a hub name, or the description of a new encoder.
    """
    is_name = isinstance(start, str | Path)
    config, n_layers = _describe(start) if is_name else (start, start.num_hidden_layers)
    encoder, decoder = _make_halves(config, config.vocab_size, len(choose_layers(n_layers, plan)))
    return config, nn.ModuleDict({"encoder": encoder, "decoder": decoder})


def _describe(start: str | Path) -> tuple[Any, int]:
    """Describe the encoder of a model to start from, and count the layers for the decoder."""
    folder = find_folder(start)
    if _read_config(folder).get("model_type") == KIND:
        whole = load_description(folder)
        return whole.encoder, whole.decoder.num_hidden_layers
    config = load_config(folder)
    check_decodes(config.model_type)
    return config, config.num_hidden_layers


def check_decodes(model_type: str) -> None:
    """Refuse a family whose layers have no cross-attention."""
    if model_type not in CAN_DECODE:
        raise InputError(
            f"a {model_type} model has no cross-attention to make a decoder of",
            fix=f"use one of {', '.join(CAN_DECODE)}",
        )


def read_weights(start: str | Path, plan: DecoderPlan) -> Weights:
    """Read the weights of an encoder, of VECO with cross-attention, or of another translator."""
    found = _read_folder(find_folder(start))
    if plan.cross_attention == "start":
        return found
    bare = {name: value for name, value in found.decoder.items() if PLUG not in name}
    return replace(found, decoder=bare)


def _read_folder(folder: Path) -> Weights:
    content = _read_config(folder)
    if content.get("model_type") == KIND:
        model = load_halves(folder, torch.float32)
        n_layers, n_encoder = (
            half.num_hidden_layers for half in (model.config.decoder, model.config.encoder)
        )
        known = getattr(model.config, "calque", None) or {}
        origins = known.get("decoder_layers") or range(n_encoder - n_layers, n_encoder)
        targets = tuple(known.get("targets", ()))
        encoder, decoder = (half.state_dict() for half in (model.encoder, model.decoder))
        return Weights(model.config.encoder, encoder, decoder, tuple(origins), targets)
    full = find_full(folder)
    whole, _, _ = load_checkpoint(full or folder, torch.float32, plugged=full is not None)
    state, prefix = whole.state_dict(), f"{whole.base_model_prefix}."
    encoder = {
        name.removeprefix(prefix): value
        for name, value in state.items()
        if name.startswith(prefix) and PLUG not in name
    }
    return Weights(whole.config, encoder, state, tuple(range(whole.config.num_hidden_layers)))


def start_afresh(config: Any) -> Weights:
    """Begin with no weights, only the shape of the encoder."""
    return Weights(config, {}, {}, tuple(range(config.num_hidden_layers)))


def choose_layers(n_layers: int, plan: DecoderPlan) -> list[int]:
    """Number the layers that the decoder is made of.

    >>> choose_layers(6, DecoderPlan(layers=2)), choose_layers(3, DecoderPlan(which="first"))
    ([4, 5], [0, 1, 2])
    """
    n_wanted = n_layers if plan.layers is None else plan.layers
    if n_wanted > n_layers:
        raise InputError(
            f"decoder.layers={n_wanted}, but there are {n_layers}", fix="lower decoder.layers"
        )
    first = n_layers - n_wanted if plan.which == "last" else 0
    return list(range(first, first + n_wanted))


def pick_layers(state: State, numbers: Sequence[int]) -> dict[str, Tensor]:
    """Keep some layers of a model's weights, numbered anew.

    >>> sorted(pick_layers({"x.layer.0.w": 0, "x.layer.1.w": 1, "head": 2}, [1]).items())
    [('head', 2), ('x.layer.0.w', 1)]
    """
    places = {old: new for new, old in enumerate(numbers)}
    picked = {}
    for name, value in state.items():
        found = LAYER.search(name)
        if found is None:
            picked[name] = value
        elif int(found[0]) in places:
            picked[LAYER.sub(str(places[int(found[0])]), name, count=1)] = value
    return picked


def _read_config(folder: Path) -> dict[str, Any]:
    """Look into a configuration; what is wrong with it the loaders say."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _make_halves(config: Any, n_tokens: int, n_layers: int) -> tuple[Any, Any]:
    """Make an encoder and a decoder of one shape, at random."""
    from transformers import AutoModel, AutoModelForCausalLM

    check_decodes(config.model_type)
    halves = []
    kinds: list[Any] = [AutoModel, AutoModelForCausalLM]
    for kind, is_decoder in zip(kinds, (False, True), strict=True):
        own = copy.deepcopy(config)
        own.is_decoder = own.add_cross_attention = is_decoder
        own.vocab_size = n_tokens
        if is_decoder:
            own.num_hidden_layers = n_layers
            own.calque = None
        halves.append(kind.from_config(own, attn_implementation=attention.register()))
    return halves[0], halves[1]


@torch.no_grad()
def _fill(module: nn.Module, state: State) -> None:
    """Copy weights into a module; where it has more rows, as for new tokens, into the first."""
    for name, own in module.state_dict().items():
        given = state.get(name)
        if given is None:
            assert any(part in name for part in OPTIONAL), name
            continue
        own[: len(given)].copy_(given) if own.ndim else own.copy_(given)


def _tie(encoder: Any, decoder: Any, tie: str, origins: Sequence[int], n_tokens: int) -> None:
    """Make the decoder use weights of the encoder; such as it was given must be the same."""
    family = family_of(decoder.config.model_type, None)
    body = family.body_of(decoder)
    pairs = [] if tie == "nothing" else [(encoder.embeddings, body.embeddings)]
    if tie == "embeddings":
        pairs = [(src.word_embeddings, tgt.word_embeddings) for src, tgt in pairs]
    if tie == "all":
        for number, layer in zip(origins, body.encoder.layer, strict=True):
            twin = encoder.encoder.layer[number]
            parts = ("attention", "intermediate", "output")
            pairs += [(getattr(twin, part), getattr(layer, part)) for part in parts]
    for src, tgt in pairs:
        if n_tokens and not _are_equal(src, tgt, n_tokens):
            raise InputError(
                f"decoder.tie={tie}, but this model's decoder has other weights than its encoder",
                fix="set model.decoder.tie=" + ("embeddings" if tie == "all" else "nothing"),
            )
        share_weights(src, tgt)
    decoder.tie_weights()


def _are_equal(left: nn.Module, right: nn.Module, n_tokens: int) -> bool:
    """Compare two modules; the rows of new tokens were drawn apart, and do not count."""
    other = dict(right.named_parameters())
    for name, one in left.named_parameters():
        is_table = name in ("weight", "word_embeddings.weight")
        n_rows = n_tokens if is_table else len(one)
        if not torch.equal(one[:n_rows], other[name][:n_rows]):
            return False
    return True


def _retire_pooler(encoder: Any) -> None:
    """Freeze what Hugging Face's encoder has and nothing reads; without it none could load it."""
    if encoder.pooler is not None:
        for parameter in encoder.pooler.parameters():
            parameter.requires_grad_(False).zero_()
