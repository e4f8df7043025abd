"""Measure how much attention a sentence and its translation pay to each other.

This is Figure 1 of VECO (Luo et al., 2021) in numbers: an encoder that reads two sentences in one
sequence may ignore one of them; cross-attention cannot, except by attending to special tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from calque.errors import InputError
from calque.models.attention import ATTENTION_NAME
from calque.models.deberta import read_deberta_attentions
from calque.models.encoder import Encoder
from calque.models.veco import Veco, find_veco_folder
from calque.tokens.tokenizer import encode_sentences
from calque.types import PairAttention, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from calque.types import Progress

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float32]
    # Kind, source to target, target to source, and the share if attention were uniform.
    Measurement = tuple[str, FloatArray, FloatArray, float]

Positions = Literal["reset", "continue"]


@dataclass(frozen=True, slots=True)
class _TokenizedPair:
    """Token ids of two sentences, and the special tokens around them."""

    src: IntArray
    tgt: IntArray
    cls_id: int
    sep_id: int
    n_between: int  # special tokens between the sentences: XLM-R has two, BERT one


def pair_attention(
    src: str,
    tgt: str,
    *,
    model: str | Path | Sequence[str | Path] | None = None,
    head: int | None = None,
    positions: Positions | None = None,
    progress: Progress | None = None,
) -> list[PairAttention]:
    """Return the attention between two sentences in one or several models.

    Every model has one result for self-attention, with both sentences in one sequence; a model
    trained with the objective `cross_attention_lm` has another one for its cross-attention.

    Args:
        src: A sentence.
        tgt: Its translation.
        model: Model folder, hub name, `calque-mini` (the default), or a list of them.
        head: One attention head, counted from 1. Default: the mean of all heads.
        positions: `reset` if the positions of the second sentence start again at 0, `continue` if
            they continue those of the first. Default: as the model was trained, or `continue`.
        progress: Called with the stage, the models done and their number.

    Examples:
        >>> (result,) = calque.pair_attention("Take a seat", "Setz dich")  # doctest: +SKIP
        >>> [round(share, 2) for share in result.shares]  # doctest: +SKIP
        [0.16, 0.2, 0.21, 0.19, 0.24, 0.31, 0.33, 0.28]
    """
    if positions not in (None, "reset", "continue"):
        raise InputError(
            f"positions cannot be {positions!r}", fix="choose reset or continue (--positions)"
        )
    models = [model] if model is None or isinstance(model, str | Path) else list(model)
    results: list[PairAttention] = []
    for number, name in enumerate(models, start=1):
        encoder = Encoder.load(name)
        results += measure_attention(
            encoder,
            load_cross_attention(encoder),
            src,
            tgt,
            label=name,
            head=head,
            positions=positions,
        )
        if progress is not None:
            progress("reading", number, len(models))
    return results


def load_cross_attention(encoder: Encoder) -> Veco | None:
    """Load the cross-attention that was trained with an encoder, if there is one."""
    folder = find_veco_folder(encoder.folder)
    return None if folder is None else Veco.load(folder)


@torch.no_grad()
def measure_attention(
    encoder: Encoder,
    veco: Veco | None,
    src: str,
    tgt: str,
    *,
    label: str | Path | None = None,
    head: int | None = None,
    positions: Positions | None = None,
) -> list[PairAttention]:
    """Return the attention between two sentences in an encoder, and in its cross-attention.

    The encoder must be on the CPU, and no other thread may use it meanwhile.
    """
    n_heads = encoder.config.num_attention_heads
    if head is not None and not 1 <= head <= n_heads:
        raise InputError(f"there is no attention head {head}", fix=f"choose 1 to {n_heads}")
    pair = _tokenize(encoder, src, tgt)
    measurements = [_measure_self_attention(encoder, pair, head, positions)]
    if veco is not None:
        measurements.append(_measure_cross_attention(veco, pair, head))
    name = str(label or encoder.folder.name)
    tokens = _decode_tokens(encoder, pair.src), _decode_tokens(encoder, pair.tgt)
    return [
        PairAttention(name, kind, *tokens, src_to_tgt, tgt_to_src, uniform)
        for kind, src_to_tgt, tgt_to_src, uniform in measurements
    ]


def _tokenize(encoder: Encoder, src: str, tgt: str) -> _TokenizedPair:
    tokenizer = encoder.tokenizer
    src_ids, tgt_ids = encode_sentences(tokenizer, [src, tgt])
    for text, ids in ((src, src_ids), (tgt, tgt_ids)):
        if not len(ids):
            raise InputError(f"there are no words in {text!r}", fix="pass two sentences")
    n_special = tokenizer.num_special_tokens_to_add(pair=True)
    n_tokens = len(src_ids) + len(tgt_ids) + n_special
    if n_tokens > encoder.max_tokens:
        raise InputError(
            f"the two sentences have {n_tokens} tokens, but the model reads {encoder.max_tokens}",
            fix="pass shorter sentences",
        )
    assert tokenizer.cls_token_id is not None
    assert tokenizer.sep_token_id is not None
    return _TokenizedPair(
        src_ids, tgt_ids, tokenizer.cls_token_id, tokenizer.sep_token_id, n_special - 2
    )


def _decode_tokens(encoder: Encoder, ids: IntArray) -> tuple[str, ...]:
    """Return tokens as text, without the prefixes that mark the start of words."""
    texts = [str(encoder.tokenizer.decode([int(token)])).strip() for token in ids]
    return tuple(text or "·" for text in texts)


def _measure_self_attention(
    encoder: Encoder, pair: _TokenizedPair, head: int | None, positions: Positions | None
) -> Measurement:
    """Measure the attention between the two parts of one sequence."""
    n_src, n_tgt = len(pair.src), len(pair.tgt)
    ids = [pair.cls_id, *pair.src, *[pair.sep_id] * pair.n_between, *pair.tgt, pair.sep_id]
    numbers = torch.arange(len(ids))
    trained = encoder.settings.get("alignment", {}).get("positions")
    if (positions or trained) == "reset":  # after the first separator
        numbers[n_src + 2 :] -= n_src + 2
    weights = _stack_layers(_read_self_attention(encoder, ids, numbers), head)
    start = 1 + n_src + pair.n_between
    src, tgt = slice(1, 1 + n_src), slice(start, start + n_tgt)
    uniform = 2 * n_src * n_tgt / (n_src + n_tgt) / len(ids)
    return "self-attention", weights[:, src, tgt], weights[:, tgt, src], uniform


def _read_self_attention(
    encoder: Encoder, ids: Sequence[int], positions: Tensor
) -> Sequence[Tensor]:
    """Return the attention weights inside one sequence, by layer."""
    body = encoder.family.get_body(encoder.model)
    if encoder.family.run is not None:  # DeBERTa: relative positions are computed from positions
        offsets = torch.tensor([0, len(ids)])
        batch = TokenBatch(torch.tensor(ids), positions, offsets, len(ids), len(ids))
        return read_deberta_attentions(body, batch)
    padding_idx = getattr(body.embeddings, "padding_idx", None)
    if padding_idx is not None:  # RoBERTa counts positions from here
        positions = positions + padding_idx + 1
    with _eager_attention(encoder):
        output = body(torch.tensor([ids]), position_ids=positions[None], output_attentions=True)
    attentions: Sequence[Tensor] | None = output.attentions
    if not attentions:
        raise InputError(
            f"this version of transformers returns no attention of {encoder.config.model_type}",
            fix="run `pip install --upgrade transformers`",
        )
    return attentions


def _measure_cross_attention(veco: Veco, pair: _TokenizedPair, head: int | None) -> Measurement:
    """Measure the cross-attention of each sentence to the other."""
    src, tgt = (
        torch.tensor([pair.cls_id, *ids, pair.sep_id], dtype=torch.long)
        for ids in (pair.src, pair.tgt)
    )
    n_src, n_tgt = len(pair.src), len(pair.tgt)
    uniform = (n_src * n_tgt / (n_tgt + 2) + n_tgt * n_src / (n_src + 2)) / (n_src + n_tgt)
    src_to_tgt = _stack_layers(_read_cross_attention(veco, src, tgt), head)[:, 1:-1, 1:-1]
    tgt_to_src = _stack_layers(_read_cross_attention(veco, tgt, src), head)[:, 1:-1, 1:-1]
    return "cross-attention", src_to_tgt, tgt_to_src, uniform


def _read_cross_attention(veco: Veco, ids: Tensor, other: Tensor) -> Sequence[Tensor]:
    """Return the cross-attention weights of one sequence to another, by layer."""
    body, layers = veco.family.get_body(veco.model), veco.family.get_layers(veco.model)
    weights: list[Tensor] = []
    hooks = [
        layer.crossattention.self.register_forward_hook(  # type: ignore[union-attr]
            lambda module, inputs, output: weights.append(output[1])
        )
        for layer in layers
    ]
    try:
        with _eager_attention(veco):
            states, memory = body.embeddings(ids[None]), body.embeddings(other[None])
            for layer in layers:  # without masks: unlike a decoder, tokens see all others
                memory = layer(memory)
            for layer in layers:
                states = layer(states, encoder_hidden_states=memory)
    finally:
        for hook in hooks:
            hook.remove()
    return weights


@contextmanager
def _eager_attention(encoder: Encoder) -> Iterator[None]:
    """Use Hugging Face's attention implementation that returns the weights."""
    encoder.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        encoder.model.set_attn_implementation(ATTENTION_NAME)


def _stack_layers(weights: Sequence[Tensor], head: int | None) -> FloatArray:
    """Choose a head of every layer or average all of them, and stack the layers."""
    layers = [layer[0].mean(dim=0) if head is None else layer[0, head - 1] for layer in weights]
    return torch.stack(layers).float().numpy()
