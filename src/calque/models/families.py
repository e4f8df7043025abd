"""What differs between the encoder families: where their parts are and how a layer is called."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from calque.errors import InputError
from calque.models.deberta import run_deberta

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.attention import Attend
    from calque.types import TokenBatch


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of one encoder architecture, as Hugging Face names them."""

    body: str
    layers: str
    embed: Callable[[Any, TokenBatch], Float[Tensor, "1 tokens hidden"]]
    prepare: Callable[[Any, Tensor, TokenBatch], Callable[[Any], dict[str, Any]]]
    head: Callable[[Any], Callable[[Tensor], Tensor]]
    final_norm: str | None = None
    # Parts of a checkpoint that the encoder does without, or that may start afresh.
    optional: tuple[str, ...] = ("pooler", "position_ids", "seq_relationship")
    head_prefixes: tuple[str, ...] = ("lm_head", "cls", "head", "decoder")
    # Whether layers are BERT's, which may run fused, and whose attention may read another sentence.
    like_bert: bool = False
    # Runs all layers where they attend in a way of their own, not in one that Calque gives them.
    run: Callable[[Any, Tensor, TokenBatch, Collection[int]], dict[int, Tensor]] | None = None
    # Where a checkpoint may have other names for the same weights, as `from_pretrained` takes them.
    renamed: Mapping[str, str] = field(default_factory=dict)

    def body_of(self, model: nn.Module) -> Any:
        """Return the model without its language-modelling head."""
        return getattr(model, self.body)

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        """Return the Transformer layers, in order."""
        part: Any = self.body_of(model)
        for name in self.layers.split("."):
            part = getattr(part, name)
        return part  # type: ignore[no-any-return]


def _embed_bert(body: Any, batch: TokenBatch) -> Tensor:
    """Embed as Hugging Face does, with the first token type for all tokens.

    Adding that one row, instead of looking it up per token, spares its gradient a scatter.
    """
    parts = body.embeddings
    # RoBERTa counts positions from its padding index + 1, BERT from 0.
    first = getattr(parts, "padding_idx", None)
    positions = batch.positions + (0 if first is None else first + 1)
    token_type = parts.token_type_embeddings.weight[0]
    summed = parts.word_embeddings(batch.ids) + token_type + parts.position_embeddings(positions)
    embedded: Tensor = parts.dropout(parts.LayerNorm(summed))
    return embedded[None]


def _embed_plainly(body: Any, batch: TokenBatch) -> Tensor:
    embedded: Tensor = body.embeddings(batch.ids[None], position_ids=batch.positions[None])
    return embedded


def _embed_modernbert(body: Any, batch: TokenBatch) -> Tensor:
    embedded: Tensor = body.embeddings(input_ids=batch.ids[None])
    return embedded


def _no_arguments(body: Any, hidden: Tensor, batch: TokenBatch) -> Callable[[Any], dict[str, Any]]:
    return lambda layer: {}


def _rotary_arguments(
    body: Any, hidden: Tensor, batch: TokenBatch
) -> Callable[[Any], dict[str, Any]]:
    kinds = set(body.config.layer_types)
    tables = {kind: body.rotary_emb(hidden, batch.positions[None], kind) for kind in kinds}
    return lambda layer: {"position_embeddings": tables[layer.attention_type]}


def _roberta_head(model: Any) -> Callable[[Tensor], Tensor]:
    head = model.lm_head
    return lambda states: head.layer_norm(nn.functional.gelu(head.dense(states)))


def _distilbert_head(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda states: model.vocab_layer_norm(model.activation(model.vocab_transform(states)))


_ROBERTA = Family(
    "roberta", "encoder.layer", _embed_bert, _no_arguments, _roberta_head, like_bert=True
)

FAMILIES: dict[str, Family] = {
    "bert": Family(
        "bert",
        "encoder.layer",
        _embed_bert,
        _no_arguments,
        lambda model: model.cls.predictions.transform,
        like_bert=True,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        "distilbert",
        "transformer.layer",
        _embed_plainly,
        _no_arguments,
        _distilbert_head,
        head_prefixes=("vocab_",),
    ),
    "modernbert": Family(
        "model",
        "layers",
        _embed_modernbert,
        _rotary_arguments,
        lambda model: model.head,
        final_norm="final_norm",
    ),
    "deberta-v2": Family(  # of DeBERTa-v3 and mDeBERTa, too
        "deberta",
        "encoder.layer",
        _embed_plainly,
        _no_arguments,
        lambda model: model.cls.predictions.transform,
        run=run_deberta,
        renamed={
            r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.": r"cls.predictions.transform.\1.",
            r"^lm_predictions\.lm_head\.bias": "cls.predictions.bias",
        },
    ),
}


def family_of(model_type: str | None, name: object) -> Family:
    """Look a family up, or say which ones there are."""
    if model_type is None or model_type not in FAMILIES:
        raise InputError(
            f"encoders of type {model_type!r} are not supported",
            file=name,
            fix=f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]


def run_fused_layer(layer: Any, hidden: Tensor, attend: Attend) -> Tensor:
    """Run a layer of the BERT kind for speed.

    One product makes the three projections, and states stay in half precision between layers,
    where autocast would widen them at every norm.
    """
    core = layer.attention.self
    states = _project(core, (core.query, core.key, core.value), hidden)
    hidden = _attend_fused(layer.attention, states, hidden, attend)
    return _feed_forward(layer, hidden)


def run_fused_cross_layer(
    layer: Any, hidden: Tensor, attend: Attend, read: Tensor, attend_cross: Attend
) -> Tensor:
    """Run a layer with its cross-attention plugged in, as `run_fused_layer` runs one without."""
    core = layer.attention.self
    states = _project(core, (core.query, core.key, core.value), hidden)
    hidden = _attend_fused(layer.attention, states, hidden, attend)
    core = layer.crossattention.self
    states = [*_project(core, (core.query,), hidden), *_project(core, (core.key, core.value), read)]
    hidden = _attend_fused(layer.crossattention, states, hidden, attend_cross)
    return _feed_forward(layer, hidden)


def _project(core: Any, parts: Sequence[nn.Linear], hidden: Tensor) -> Sequence[Tensor]:
    weight = torch.cat([part.weight for part in parts])
    bias = torch.cat([part.bias for part in parts])
    projected = nn.functional.linear(hidden[0], weight, bias)
    shape = (-1, len(parts), core.num_attention_heads, core.attention_head_size)
    return projected.view(shape).unbind(1)


def _attend_fused(
    attention: Any, states: Sequence[Tensor], hidden: Tensor, attend: Attend
) -> Tensor:
    core, output = attention.self, attention.output
    query, key, value = states
    dropout = core.dropout.p if core.training else 0.0
    mixed = attend(query, key, value, dropout, core.scaling, None).flatten(1)[None]
    return _add_norm(output.LayerNorm, output.dropout(output.dense(mixed)), hidden)


def _feed_forward(layer: Any, hidden: Tensor) -> Tensor:
    inner, output = layer.intermediate(hidden), layer.output
    return _add_norm(output.LayerNorm, output.dropout(output.dense(inner)), hidden)


def _add_norm(norm: nn.LayerNorm, update: Tensor, hidden: Tensor) -> Tensor:
    summed = update + hidden
    wide = summed.float() if summed.dtype in (torch.bfloat16, torch.float16) else summed
    normed = nn.functional.layer_norm(wide, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed.to(summed.dtype)


def run_layer(
    layer: nn.Module, hidden: Tensor, attend: Attend, arguments: dict[str, Any]
) -> Tensor:
    """Call one Hugging Face layer on packed states."""
    result = layer(hidden, attention_mask=None, attend=attend, **arguments)
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states
