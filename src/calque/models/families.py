"""Differences between the supported encoder families: where their parts are, how layers are run."""

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
    """The parts of one encoder architecture, as Hugging Face names them.

    `body` and `layers` are attribute paths. `embed` computes the embedding output, `prepare` the
    keyword arguments of every layer, `head` the part of the language-modeling head before the
    vocabulary matrix.
    """

    body: str
    layers: str
    embed: Callable[[Any, TokenBatch], Float[Tensor, "1 tokens hidden"]]
    prepare: Callable[[Any, Tensor, TokenBatch], Callable[[Any], dict[str, Any]]]
    head: Callable[[Any], Callable[[Tensor], Tensor]]
    final_norm: str | None = None
    # Parts of a checkpoint that the encoder does not need, or that may be initialized.
    optional: tuple[str, ...] = ("pooler", "position_ids", "seq_relationship")
    head_prefixes: tuple[str, ...] = ("lm_head", "cls", "head", "decoder")
    # Whether the layers are BERT's: they can run fused, and they can have cross-attention.
    is_bert_like: bool = False
    # Runs all layers of a family that cannot use the packed attention functions.
    run: Callable[[Any, Tensor, TokenBatch, Collection[int]], dict[int, Tensor]] | None = None
    # Other names of the same weights in some checkpoints, as `from_pretrained(key_mapping=)`.
    renamed: Mapping[str, str] = field(default_factory=dict)

    def get_body(self, model: nn.Module) -> Any:
        """Return the model without its language-modeling head."""
        return getattr(model, self.body)

    def get_layers(self, model: nn.Module) -> nn.ModuleList:
        """Return the Transformer layers, in order."""
        part: Any = self.get_body(model)
        for name in self.layers.split("."):
            part = getattr(part, name)
        return part  # type: ignore[no-any-return]


def _embed_bert(body: Any, batch: TokenBatch) -> Tensor:
    """Embed as Hugging Face does, with token type 0 for all tokens.

    That row is added instead of being looked up per token: its gradient needs no scatter.
    """
    parts = body.embeddings
    # RoBERTa counts positions from its padding index + 1, BERT from 0.
    first = getattr(parts, "padding_idx", None)
    positions = batch.positions + (0 if first is None else first + 1)
    token_type = parts.token_type_embeddings.weight[0]
    summed = parts.word_embeddings(batch.ids) + token_type + parts.position_embeddings(positions)
    embedded: Tensor = parts.dropout(parts.LayerNorm(summed))
    return embedded[None]


def _embed_with_positions(body: Any, batch: TokenBatch) -> Tensor:
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
    "roberta", "encoder.layer", _embed_bert, _no_arguments, _roberta_head, is_bert_like=True
)

FAMILIES: dict[str, Family] = {
    "bert": Family(
        "bert",
        "encoder.layer",
        _embed_bert,
        _no_arguments,
        lambda model: model.cls.predictions.transform,
        is_bert_like=True,
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(
        "distilbert",
        "transformer.layer",
        _embed_with_positions,
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
    "deberta-v2": Family(  # also DeBERTa-v3 and mDeBERTa
        "deberta",
        "encoder.layer",
        _embed_with_positions,
        _no_arguments,
        lambda model: model.cls.predictions.transform,
        run=run_deberta,
        renamed={
            r"^lm_predictions\.lm_head\.(dense|LayerNorm)\.": r"cls.predictions.transform.\1.",
            r"^lm_predictions\.lm_head\.bias": "cls.predictions.bias",
        },
    ),
}


def find_family(model_type: object, name: object) -> Family:
    """Return the family of a model type; raise an error that lists all families if unknown."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"encoders of type {model_type!r} are not supported",
            file=name,
            fix=f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[model_type]


def run_layer(
    layer: nn.Module, hidden: Tensor, attend: Attend, arguments: dict[str, Any]
) -> Tensor:
    """Run one Hugging Face layer on packed states."""
    result = layer(hidden, attention_mask=None, attend=attend, **arguments)
    states: Tensor = result[0] if isinstance(result, tuple) else result
    return states


def run_fused_layer(
    layer: Any,
    hidden: Tensor,
    attend: Attend,
    read: Tensor | None = None,
    attend_cross: Attend | None = None,
) -> Tensor:
    """Run a BERT layer faster than Hugging Face's own code does.

    One product computes the query, key and value projections, and states stay in half precision
    between layers, where autocast would widen them at every norm. With `attend_cross`, the layer's
    cross-attention reads the states `read`.
    """
    core = layer.attention.self
    states = _project(core, (core.query, core.key, core.value), hidden)
    hidden = _attend_fused(layer.attention, states, hidden, attend)
    if attend_cross is not None:
        assert read is not None
        core = layer.crossattention.self
        query = _project(core, (core.query,), hidden)
        states = [*query, *_project(core, (core.key, core.value), read)]
        hidden = _attend_fused(layer.crossattention, states, hidden, attend_cross)
    inner, output = layer.intermediate(hidden), layer.output
    return _add_norm(output.LayerNorm, output.dropout(output.dense(inner)), hidden)


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


def _add_norm(norm: nn.LayerNorm, update: Tensor, hidden: Tensor) -> Tensor:
    summed = update + hidden
    wide = summed.float() if summed.dtype in (torch.bfloat16, torch.float16) else summed
    normed = nn.functional.layer_norm(wide, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return normed.to(summed.dtype)
