"""Where the weights of an encoder–decoder come from: VECO, any encoder, another one, or nowhere."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from calque.models import attention
from calque.models.families import FAMILIES, family_of
from calque.models.language_tokens import add_language_tokens
from calque.models.loading import (
    PLUG,
    count_positions,
    find_folder,
    load_checkpoint,
    load_config,
)
from calque.models.seq2seq import (
    KIND,
    Seq2Seq,
    join_halves,
    load_description,
    load_halves,
    share_weights,
)
from calque.models.veco import find_full
from calque.types import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    State = Mapping[str, Tensor]

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
