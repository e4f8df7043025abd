"""Windows of sentence pairs as batches for the encoder: both sides in one sequence, or apart.

Word links from the states of a multilingual encoder, in batches of similar length.

The states of one layer are averaged word by word and compared across the two sentences; links
are read off the similarities by optimal transport, mutual argmax, itermax or matching.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias

import numpy as np
import torch
from torch.nn import functional as F

from calque.algorithms.matching import itermax, max_weight_matching, mutual_argmax
from calque.algorithms.transport import exponential_log_kernel, log_sinkhorn
from calque.errors import InputError
from calque.models.inference import BATCH_TOKENS, check_maps, device_of, run_batches
from calque.models.pooling import pool_words
from calque.objectives.base import Marks
from calque.objectives.masked_lm import join_sides, mark_sides
from calque.tokens.ragged import Ragged, add_marks, bucket_batches, interleave, pack, ranges
from calque.tokens.words import WordEncoder
from calque.types import TokenBatch
from calque.word_alignment.pair_windows import (
    PairWindows,
    Room,
    WindowLinks,
    cut_pairs,
    gather_links,
)
from calque.word_alignment.protocol import AlignedBlock, AlignReport, WordPair

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]
    SideMaps: TypeAlias = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class PairLayout:
    """How pairs are put before the model, and how much of them it can read."""

    marks: Marks
    joint: bool
    reset: bool
    room: Room

    @classmethod
    def of(
        cls,
        encoder: Encoder,
        encode: Literal["joint", "separate"],
        positions: Literal["reset", "continue"],
    ) -> Self:
        """Read the marks off the tokenizer; joint pairs that count on share the positions."""
        marks, most = Marks.of(encoder.tokenizer), encoder.max_tokens
        joint, reset = encode == "joint", positions == "reset"
        if joint and not reset:
            return cls(
                marks, joint, reset, Room(most - 2 - marks.between, most - 2 - marks.between)
            )
        return cls(marks, joint, reset, Room(most - 2, 2 * (most - 2)))

    def n_tokens(self, windows: PairWindows) -> IntArray:
        """Count the tokens of every window, marks included; of the longer side if apart."""
        n_src, n_tgt = windows.src.n_pieces(), windows.tgt.n_pieces()
        return n_src + n_tgt + 2 + self.marks.between if self.joint else n_src + n_tgt + 4


@dataclass(frozen=True, slots=True)
class PairBatch:
    """Some windows, packed: where the subwords of both sides lie, and the slots of their words.

    Word k of window n has slot n · width + k on its side; `src_words` and `tgt_words` count.
    """

    tokens: TokenBatch
    src_places: Int[Tensor, "src_pieces"]
    tgt_places: Int[Tensor, "tgt_pieces"]
    src_slots: Int[Tensor, "src_pieces"]
    tgt_slots: Int[Tensor, "tgt_pieces"]
    n_windows: int
    src_width: int
    tgt_width: int

    def to(self, device: torch.device) -> PairBatch:
        """Copy the arrays to a device."""
        if device.type == "cpu":
            return self
        return replace(
            self,
            tokens=self.tokens.to(device),
            src_places=self.src_places.to(device, non_blocking=True),
            tgt_places=self.tgt_places.to(device, non_blocking=True),
            src_slots=self.src_slots.to(device, non_blocking=True),
            tgt_slots=self.tgt_slots.to(device, non_blocking=True),
        )


def build_pair_batch(windows: PairWindows, rows: IntArray, layout: PairLayout) -> PairBatch:
    """Lay some windows end to end."""
    src_width = int(windows.src.n_words[rows].max())
    tgt_width = int(windows.tgt.n_words[rows].max())
    src, src_slots = windows.src.gather(rows, src_width)
    tgt, tgt_slots = windows.tgt.gather(rows, tgt_width)
    tokens, src_places, tgt_places = (_join if layout.joint else _set_apart)(src, tgt, layout)
    return PairBatch(
        tokens,
        torch.from_numpy(src_places),
        torch.from_numpy(tgt_places),
        torch.from_numpy(src_slots),
        torch.from_numpy(tgt_slots),
        len(rows),
        src_width,
        tgt_width,
    )


def _join(src: Ragged, tgt: Ragged, layout: PairLayout) -> tuple[TokenBatch, IntArray, IntArray]:
    """Make one sequence of each pair."""
    left, right = mark_sides(src, tgt, layout.marks)
    pairs, positions = join_sides(left, right, reset=layout.reset)
    starts = np.cumsum(pairs.lengths) - pairs.lengths
    n_opening = right.lengths - tgt.lengths - 1
    return (
        pack(pairs, positions=positions, pad_id=layout.marks.pad),
        ranges(starts + 1, src.lengths),
        ranges(starts + left.lengths + n_opening, tgt.lengths),
    )


def _set_apart(
    src: Ragged, tgt: Ragged, layout: PairLayout
) -> tuple[TokenBatch, IntArray, IntArray]:
    """Make two sequences of each pair, one after the other."""
    marks = layout.marks
    left, right = (add_marks(side, marks.first, marks.last) for side in (src, tgt))
    both, n_left = interleave(left, right)
    lengths = np.stack([left.lengths, right.lengths], axis=1).ravel()
    starts = np.cumsum(both.lengths) - both.lengths
    return (
        pack(Ragged(both.ids, lengths), pad_id=marks.pad),
        ranges(starts + 1, src.lengths),
        ranges(starts + n_left + 1, tgt.lengths),
    )


Method = Literal["ot", "itermax", "argmax", "match"]
Encoding = Literal["joint", "separate"]
BLOCK_PAIRS = 2048
# The exponential of −200 is nothing beside that of any cosine at the sharpness of use.
NEVER = -200.0


class Evidence(Protocol):
    """More to go by than the encoder's cosines: a lexicon, links by another aligner, places."""

    def score(self, windows: PairWindows, rows: IntArray) -> Float[Tensor, "windows src tgt"]:
        """Give log scores of the words of some windows, padded like their similarities."""
        ...


@dataclass(frozen=True, slots=True)
class AlignSettings:
    """How links are made; a model carries its best as "alignment" in its configuration.

    `sharpness` multiplies cosines before the exponential of transport and of the scores, and a
    link needs a cosine of `threshold`. `positions` say whether the second sentence of a joint
    pair counts from 0 again, which must be as it was in the training of the model.
    """

    method: Method = "itermax"
    layer: int | None = None
    encode: Encoding = "separate"
    positions: Literal["reset", "continue"] = "continue"
    sharpness: float = 20.0
    threshold: float = -1.0
    n_iterations: int = 2

    @classmethod
    def of(cls, encoder: Encoder, **chosen: Any) -> Self:
        """Take what is chosen (not None), then what the model carries, then common sense.

        Without a word in the model, two thirds of the way up: layer 8 of 12, as in SimAlign.
        """
        carried = dict(encoder.settings.get("alignment") or {})
        unknown = set(carried) - {field.name for field in fields(cls)}
        if unknown:
            problem = f"unknown alignment settings: {', '.join(sorted(unknown))}"
            raise InputError(problem, fix="install a newer calque")
        given = {name: value for name, value in chosen.items() if value is not None}
        settings = cls(**(carried | given))
        _check("method", settings.method, ("ot", "itermax", "argmax", "match"))
        _check("encode", settings.encode, ("joint", "separate"))
        _check("positions", settings.positions, ("reset", "continue"))
        layer = round(2 / 3 * encoder.n_layers) if settings.layer is None else settings.layer
        return replace(settings, layer=encoder.check_layer(layer))


class WordAligner:
    """Links the words of sentence pairs with an encoder.

    `WordAligner(calque.load()).align([(["das", "Haus"], ["the", "house"])])` gives one list of
    (source, target) a pair. What is not chosen is as the model's own settings say. With maps, an
    encoder needs the languages of both sides, `map_from`, and reads sentences apart, as it was
    when the maps were found.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        method: Method | None = None,
        layer: int | None = None,
        encode: Encoding | None = None,
        sharpness: float | None = None,
        threshold: float | None = None,
        map_from: tuple[str, str] | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        self.encoder, self.batch_tokens = encoder, batch_tokens
        self.maps, self.map_from = check_maps(encoder, map_from), map_from
        if self.maps is not None and map_from is not None:
            encode = _read_apart(encode)
            for language in map_from:
                self.maps.check(language)
        self.settings = AlignSettings.of(
            encoder,
            method=method,
            layer=layer,
            encode=encode,
            sharpness=sharpness,
            threshold=threshold,
        )
        self._words = WordEncoder(encoder.tokenizer)

    @property
    def method(self) -> Method:
        """How links are read off similarities."""
        return self.settings.method

    @property
    def layer(self) -> int:
        """The layer whose states are compared."""
        assert self.settings.layer is not None  # AlignSettings.of has chosen one
        return self.settings.layer

    def with_layer(self, layer: int) -> WordAligner:
        """Give the same aligner at another layer."""
        other = WordAligner(self.encoder, map_from=self.map_from, batch_tokens=self.batch_tokens)
        other.settings = replace(self.settings, layer=self.encoder.check_layer(layer))
        return other

    def align(self, pairs: Iterable[WordPair]) -> list[list[tuple[int, int]]]:
        """Link the words of pairs, each two lists of words; the answers are in their order."""
        everything = check_pairs(pairs)
        found: list[list[tuple[int, int]]] = []
        for start in range(0, len(everything), BLOCK_PAIRS):
            found += self.align_block(everything[start : start + BLOCK_PAIRS]).links.to_lists()
        return found

    def align_block(
        self, pairs: Sequence[WordPair], first: int = 0, *, evidence: Evidence | None = None
    ) -> AlignedBlock:
        """Align some pairs, in their order."""
        return self.align_layers(pairs, [self.layer], evidence)[self.layer]

    def align_layers(
        self, pairs: Sequence[WordPair], layers: Sequence[int], evidence: Evidence | None = None
    ) -> Mapping[int, AlignedBlock]:
        """Align some pairs at several layers, in one pass of the encoder."""
        numbers = [self.encoder.check_layer(layer) for layer in layers]
        layout = PairLayout.of(self.encoder, self.settings.encode, self.settings.positions)
        windows = cut_pairs(self._words, pairs, layout.room)
        device = device_of(self.encoder)
        parts: dict[int, list[WindowLinks]] = {number: [] for number in numbers}
        maps = {number: self._find_maps(number) for number in numbers}

        @torch.inference_mode()
        def align_batch(rows: IntArray) -> None:
            batch = build_pair_batch(windows, rows, layout).to(device)
            more = None if evidence is None else evidence.score(windows, rows).to(device)
            for number, states in zip(numbers, self.encoder(batch.tokens, numbers), strict=True):
                similarity, valid = compare_words(states, batch, maps[number])
                links, scores = link_words(similarity, valid, self.settings, more)
                parts[number].append(WindowLinks.of(rows, links, scores))

        budget = self.batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
        batches = bucket_batches(layout.n_tokens(windows), budget) if len(windows) else []
        run_batches(align_batch, batches, torch.get_num_threads() if device.type == "cpu" else 1)
        return {number: _join_parts(windows, parts[number], len(pairs)) for number in numbers}

    def _find_maps(self, layer: int) -> SideMaps:
        """Give what the words of either side are mapped by at a layer, if by anything."""
        if self.maps is None or self.map_from is None:
            return None, None
        src, tgt = self.map_from
        return self.maps.find(src, layer), self.maps.find(tgt, layer)


def compare_words(
    states: Float[Tensor, "tokens hidden"], batch: PairBatch, maps: SideMaps = (None, None)
) -> tuple[Float[Tensor, "windows src tgt"], Bool[Tensor, "windows src tgt"]]:
    """Average the states of every word, map those of a side that has a map, and compare the sides.

    Words without subwords are out.
    """
    src, has_src = _pool(
        states[batch.src_places], batch.src_slots, batch.n_windows, batch.src_width, maps[0]
    )
    tgt, has_tgt = _pool(
        states[batch.tgt_places], batch.tgt_slots, batch.n_windows, batch.tgt_width, maps[1]
    )
    return src @ tgt.mT, has_src[:, :, None] & has_tgt[:, None, :]


def link_words(
    similarity: Float[Tensor, "windows src tgt"],
    valid: Bool[Tensor, "windows src tgt"],
    settings: AlignSettings,
    evidence: Float[Tensor, "windows src tgt"] | None = None,
) -> tuple[Bool[Tensor, "windows src tgt"], Float[Tensor, "windows src tgt"]]:
    """Read links off cosines and, if there is more evidence, log scores that add to them.

    Beside the links come scores from 0 to 1: how sure the two words are of each other, the
    geometric mean of a softmax over the other words of either side.
    """
    log_kernel = exponential_log_kernel(similarity, valid, settings.sharpness)
    if evidence is not None:
        log_kernel = log_kernel + evidence
        similarity = (log_kernel / settings.sharpness).clamp(min=-1.0)
    padded = log_kernel.clamp(min=NEVER)
    scores = ((padded.log_softmax(dim=1) + padded.log_softmax(dim=2)) / 2).exp()
    if settings.method == "ot":
        src_mass, tgt_mass = _mass(valid.any(dim=2)), _mass(valid.any(dim=1))
        plan = log_sinkhorn(log_kernel, src_mass, tgt_mass, settings.n_iterations).exp()
        links = itermax(plan.masked_fill(~valid, -torch.inf))
    elif settings.method == "itermax":
        links = itermax(((1 + similarity) / 2).masked_fill(~valid, -torch.inf))
    elif settings.method == "argmax":
        links = mutual_argmax(log_kernel)
    else:
        links = max_weight_matching(similarity.masked_fill(~valid, -torch.inf))
    return links & (similarity >= settings.threshold), scores


def check_pairs(pairs: Iterable[WordPair]) -> list[WordPair]:
    """Refuse what is easily given by mistake: strings where lists of words belong."""
    everything = list(pairs)
    for number, pair in enumerate(everything):
        if len(tuple(pair)) != 2 or any(isinstance(side, str) for side in pair):
            raise InputError(
                f"pair {number} is not two lists of words",
                fix='give (["das", "Haus"], ["the", "house"]), or split the text first',
            )
    return everything


def _pool(
    states: Float[Tensor, "pieces hidden"],
    slots: Tensor,
    n_windows: int,
    width: int,
    W: Float[Tensor, "hidden hidden"] | None,
) -> tuple[Float[Tensor, "windows width hidden"], Bool[Tensor, "windows width"]]:
    words = pool_words(states, slots, n_windows * width)
    words = F.normalize(words if W is None else words @ W.to(words), dim=-1)
    filled = torch.zeros(n_windows * width, dtype=torch.bool, device=states.device)
    filled[slots] = True
    return words.view(n_windows, width, -1), filled.view(n_windows, width)


def _read_apart(encode: Encoding | None) -> Encoding:
    """Refuse what maps were not found for; the model's own choice does not count."""
    if encode == "joint":
        raise InputError("maps are of sentences read apart", fix="drop encode, or the maps")
    return "separate"


def _mass(filled: Bool[Tensor, "windows width"]) -> Float[Tensor, "windows width"]:
    return filled / filled.sum(dim=1, keepdim=True).clamp(min=1)


def _join_parts(windows: PairWindows, parts: Sequence[WindowLinks], n_pairs: int) -> AlignedBlock:
    links = gather_links(windows, parts, n_pairs)
    report = AlignReport(
        n_pairs,
        len(links.pairs),
        windows.n_empty,
        windows.n_long,
        windows.n_windows,
        windows.n_cut,
    )
    return AlignedBlock(links, report)


def _check(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{name} {value!r} does not exist", fix=f"choose from: {', '.join(known)}")
