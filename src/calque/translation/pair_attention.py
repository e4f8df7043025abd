"""How much two sentences look at each other: inside one sequence, or through a cross-attention.

Figure 1 of VECO (Luo et al., 2021) as numbers: an encoder that reads a sentence and its translation
side by side may leave one of them alone; a cross-attention cannot, but may look at marks only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from calque.errors import InputError
from calque.models.attention import ATTENTION_NAME
from calque.models.deberta import read_deberta_attentions
from calque.models.encoder import Encoder
from calque.models.veco import Veco, find_full
from calque.tokens.tokenizer import encode_sentences
from calque.types import PairAttention, TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    IntArray = npt.NDArray[np.int64]
    FloatArray = npt.NDArray[np.float32]

Positions = Literal["reset", "continue"]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two sentences in pieces, and the marks around them."""

    src: IntArray
    tgt: IntArray
    first: int
    last: int
    # How many marks lie between the sentences of a pair: XLM-R has two, BERT one.
    between: int


@torch.no_grad()
def read_pair(
    name: str | None, src: str, tgt: str, *, positions: Positions | None = None
) -> list[PairAttention]:
    """Measure a model by its folder or name: its self-attention, and its cross-attention if any.

    `positions` tell how the second sentence's are counted: by default as the model was trained, if
    it says so, or on from the first sentence's.
    """
    encoder = Encoder.load(name)
    pair = _cut(encoder, src, tgt)
    found = [_measure_side_by_side(encoder, pair, positions or _positions_of(encoder))]
    full = find_full(encoder.folder)
    if full is not None:
        found.append(_measure_across(Veco.load(full), pair))
    label = name or encoder.folder.name
    src_pieces, tgt_pieces = (_spell(encoder, ids) for ids in (pair.src, pair.tgt))
    return [
        PairAttention(label, kind, src_pieces, tgt_pieces, forth, back, even)
        for kind, forth, back, even in found
    ]


def _cut(encoder: Encoder, src: str, tgt: str) -> _Pair:
    tokenizer = encoder.tokenizer
    ids = encode_sentences(tokenizer, [src, tgt])
    for text, pieces in zip((src, tgt), ids, strict=True):
        if not len(pieces):
            raise InputError(f"no words in {text!r}", fix="give two sentences")
    n_marks = tokenizer.num_special_tokens_to_add(pair=True)
    n_tokens = len(ids[0]) + len(ids[1]) + n_marks
    if n_tokens > encoder.max_tokens:
        raise InputError(
            f"the sentences have {n_tokens} tokens together, the model reads {encoder.max_tokens}",
            fix="give shorter ones",
        )
    assert tokenizer.cls_token_id is not None
    assert tokenizer.sep_token_id is not None
    return _Pair(ids[0], ids[1], tokenizer.cls_token_id, tokenizer.sep_token_id, n_marks - 2)


def _positions_of(encoder: Encoder) -> Positions:
    found = encoder.settings.get("alignment", {}).get("positions")
    return "reset" if found == "reset" else "continue"


def _spell(encoder: Encoder, ids: IntArray) -> tuple[str, ...]:
    """Write pieces as people read them, without the marks of word starts."""
    texts = [str(encoder.tokenizer.decode([int(piece)])).strip() for piece in ids]
    return tuple(text or "·" for text in texts)


def _measure_side_by_side(
    encoder: Encoder, pair: _Pair, positions: Positions
) -> tuple[str, FloatArray, FloatArray, float]:
    """Read both sentences as one sequence, and take what its parts give each other."""
    n_src, n_tgt = len(pair.src), len(pair.tgt)
    ids = [pair.first, *pair.src, *[pair.last] * pair.between, *pair.tgt, pair.last]
    places = torch.arange(len(ids))
    if positions == "reset":  # the first mark between ends the source, a second begins the target
        places[n_src + 2 :] -= n_src + 2
    weights = _stack(_read(encoder, ids, places))
    start = 1 + n_src + pair.between
    src, tgt = slice(1, 1 + n_src), slice(start, start + n_tgt)
    even = 2 * n_src * n_tgt / (n_src + n_tgt) / len(ids)
    return "self-attention", weights[:, src, tgt], weights[:, tgt, src], even


def _read(encoder: Encoder, ids: Sequence[int], places: Tensor) -> Sequence[Tensor]:
    """Give the attention inside one sequence by layer."""
    body = encoder.family.get_body(encoder.model)
    if encoder.family.run is not None:  # distances are counted by places, too
        offsets = torch.tensor([0, len(ids)])
        batch = TokenBatch(torch.tensor(ids), places, offsets, len(ids), len(ids))
        return read_deberta_attentions(body, batch)
    first = getattr(body.embeddings, "padding_idx", None)  # RoBERTa counts positions after it
    places = places + (0 if first is None else first + 1)
    with _eager(encoder):
        read = body(torch.tensor([ids]), position_ids=places[None], output_attentions=True)
    attentions: Sequence[Tensor] = read.attentions
    return attentions


def _measure_across(veco: Veco, pair: _Pair) -> tuple[str, FloatArray, FloatArray, float]:
    """Read each sentence alone, then each through the cross-attention to the other."""
    marked = [torch.tensor([pair.first, *side, pair.last]) for side in (pair.src, pair.tgt)]
    n_src, n_tgt = len(pair.src), len(pair.tgt)
    even = (n_src * n_tgt / (n_tgt + 2) + n_tgt * n_src / (n_src + 2)) / (n_src + n_tgt)
    forth, back = _read_across(veco, *marked), _read_across(veco, *reversed(marked))
    return "cross-attention", forth[:, 1:-1, 1:-1], back[:, 1:-1, 1:-1], even


def _read_across(veco: Veco, ids: Tensor, other: Tensor) -> FloatArray:
    """Give the cross-attention of one sequence to another by layer."""
    body, layers = veco.family.get_body(veco.model), veco.family.get_layers(veco.model)
    seen: list[Tensor] = []
    hooks = [
        layer.crossattention.self.register_forward_hook(  # type: ignore[union-attr]
            lambda module, inputs, output: seen.append(output[1])
        )
        for layer in layers
    ]
    try:
        with _eager(veco):
            hidden, read = body.embeddings(ids[None]), body.embeddings(other[None])
            for layer in layers:  # without masks: all see all, unlike in a decoder
                read = layer(read)
            for layer in layers:
                hidden = layer(hidden, encoder_hidden_states=read)
    finally:
        for hook in hooks:
            hook.remove()
    return _stack(seen)


@contextmanager
def _eager(encoder: Encoder) -> Iterator[None]:
    """Let Hugging Face compute attention in the way that tells its weights."""
    encoder.model.set_attn_implementation("eager")
    try:
        yield
    finally:
        encoder.model.set_attn_implementation(ATTENTION_NAME)


def _stack(weights: Sequence[Tensor]) -> FloatArray:
    """Average heads, and lay the layers on each other."""
    return torch.stack([layer[0].mean(dim=0) for layer in weights]).float().numpy()
