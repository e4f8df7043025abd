"""Word links from the hidden states of a multilingual encoder.

The states of one layer are averaged word by word and compared across the two sentences; how alike
the words are spelled is added. Links are read from the similarities by optimal transport, mutual
argmax, itermax or matching, or from calibrated probabilities by a threshold. XLM-Align links
subwords instead, and words follow their subwords: see `AlignSettings`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, get_args

import numpy as np
import torch
from torch.nn import functional as F

from calque.algorithms.calibration import Calibration
from calque.algorithms.matching import itermax, max_weight_matching, mutual_argmax
from calque.algorithms.transport import (
    MIN_PRODUCT,
    exponential_log_kernel,
    log_sinkhorn,
    product_log_kernel,
)
from calque.errors import InputError, check_choice
from calque.models.inference import BATCH_TOKENS, check_maps, device_of, run_batches
from calque.models.pooling import pool_words
from calque.tokens.ragged import batch_by_length
from calque.tokens.words import WordEncoder
from calque.word_alignment.pair_windows import (
    PairBatch,
    PairLayout,
    PairWindows,
    WindowLinks,
    build_pair_batch,
    gather_links,
    split_pairs,
)
from calque.word_alignment.protocol import AlignedBlock, AlignReport, WordPair, check_pairs
from calque.word_alignment.spelling import Spelling

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Bool, Float
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]
    SideMaps: TypeAlias = tuple[Tensor | None, Tensor | None]

Method = Literal["ot", "itermax", "argmax", "match", "probability"]
Encoding = Literal["joint", "separate"]
Similarity = Literal["cosine", "dot"]
Unit = Literal["words", "subwords"]
METHODS, ENCODINGS = get_args(Method), get_args(Encoding)
SIMILARITIES, UNITS = get_args(Similarity), get_args(Unit)
# Settings that change the scores: with others than those stored, the stored calibration is wrong.
SCORE_FIELDS = ("layer", "encode", "positions", "sharpness", "similarity", "unit", "spelling")
DEFAULT_SHARPNESS = {"cosine": 20.0, "dot": 1.0}
BLOCK_PAIRS = 2048
# exp(−200) is negligible beside the exponential of any cosine times the sharpness.
MIN_LOG_SCORE = -200.0


class Evidence(Protocol):
    """Scores of word pairs that are added to the encoder's, such as those of a lexicon."""

    def score(self, windows: PairWindows, rows: IntArray) -> Float[Tensor, "windows src tgt"]:
        """Return log scores of the word pairs of some windows, padded as the similarities are."""
        ...


@dataclass(frozen=True, slots=True)
class AlignSettings:
    """How links are made; a model may store its best settings as "alignment" in its configuration.

    `sharpness` is s in the kernel of optimal transport and of the scores, exp(s · cos). With a
    `calibration`, scores are probabilities. A link needs at least a score of `threshold`: by
    default, that of the calibration for the method "probability" and 0 for the others. `positions`
    says whether the positions of the second sentence of a joint pair start again from 0, as they
    did when the model was trained. `spelling` is the weight of the similarity of spelling beside
    the cosine (see `Spelling`); it is 0 for dot products and for subwords.

    XLM-Align's aligner is `similarity="dot"`, with the kernel max(ε, hᵀh)^s and s = 1/μ (Eq. 1 and
    5); `scale_first="rows"`, the order of Eq. 6; and `unit="subwords"`, where words are linked if
    any of their subwords are.
    """

    method: Method = "itermax"
    layer: int | None = None
    encode: Encoding = "separate"
    positions: Literal["reset", "continue"] = "continue"
    sharpness: float = 20.0
    calibration: Calibration | None = None
    threshold: float | None = None
    n_iterations: int = 2
    similarity: Similarity = "cosine"
    unit: Unit = "words"
    scale_first: Literal["columns", "rows"] = "columns"
    spelling: float = 0.25

    @classmethod
    def of(cls, encoder: Encoder, **chosen: Any) -> Self:
        """Return the chosen values that are not None, then those of the model, then defaults."""
        stored = dict(encoder.settings.get("alignment") or {})
        unknown = set(stored) - {field.name for field in fields(cls)}
        if unknown:
            names = ", ".join(sorted(unknown))
            problem = f"the model has alignment settings that are not known here: {names}"
            raise InputError(problem, fix="install a newer version of calque")
        given = {name: value for name, value in chosen.items() if value is not None}
        similarity = stored.get("similarity", "cosine")
        if given.get("similarity", similarity) != similarity:
            stored["sharpness"] = DEFAULT_SHARPNESS[given["similarity"]]
        if stored.get("calibration") is not None:
            stored["calibration"] = Calibration(**stored["calibration"])
        settings, own = (cls(**values)._complete(encoder) for values in (stored | given, stored))
        if "calibration" not in given and any(
            getattr(settings, name) != getattr(own, name) for name in SCORE_FIELDS
        ):
            settings = replace(settings, calibration=None)
            if settings.method == "probability" and "method" not in given:
                settings = replace(settings, method="argmax")
        check_choice("method", settings.method, METHODS)
        check_choice("encode", settings.encode, ENCODINGS)
        check_choice("positions", settings.positions, ("reset", "continue"))
        check_choice("similarity", settings.similarity, SIMILARITIES)
        check_choice("unit", settings.unit, UNITS)
        check_choice("scale_first", settings.scale_first, ("columns", "rows"))
        if not 0 < settings.sharpness < math.inf:
            problem = f"the sharpness is {settings.sharpness:g}"
            raise InputError(problem, fix="pass a finite number greater than 0")
        if not 0 <= settings.spelling <= 1:
            problem = f"the weight of the spelling is {settings.spelling:g}"
            raise InputError(problem, fix="pass a number from 0 to 1")
        if given.get("spelling") and not settings.spelling:
            problem = "spelling can be compared beside cosines of words only"
            raise InputError(problem, fix="leave out the spelling, or the similarity and the unit")
        if settings.threshold is not None and not 0 <= settings.threshold <= 1:
            problem = f"the threshold is {settings.threshold:g}"
            raise InputError(problem, fix="pass a probability from 0 to 1")
        if settings.method == "probability" and settings.calibration is None:
            raise InputError(
                "the scores of the model are not calibrated for these settings",
                fix="choose another method, or calibrate them with --sweep and --store",
            )
        return settings

    def _complete(self, encoder: Encoder) -> Self:
        """Choose the layer, and compare the spelling only where that is possible."""
        can_spell = self.similarity == "cosine" and self.unit == "words"
        layer = encoder.choose_layer("words", self.layer)
        return replace(self, layer=layer, spelling=self.spelling if can_spell else 0.0)

    @property
    def min_score(self) -> float:
        """Lowest score of a link."""
        if self.threshold is not None:
            return self.threshold
        if self.method == "probability" and self.calibration is not None:
            return self.calibration.threshold
        return 0.0


class WordAligner:
    """Links the words of sentence pairs with the hidden states of an encoder.

    Examples:
        >>> aligner = calque.WordAligner(calque.load())  # doctest: +SKIP
        >>> aligner.align([(["das", "Haus"], ["the", "house"])])  # doctest: +SKIP
        [[(0, 0), (1, 1)]]

    Args:
        encoder: A loaded model.
        method: "ot" (optimal transport), "itermax", "argmax", "match" or "probability" (all word
            pairs with at least the probability `threshold`). This and the following options
            default to the settings stored with the model.
        layer: Layer of the encoder; 0 is the embedding layer, -1 the last.
        encode: "joint" (both sentences in one sequence) or "separate".
        sharpness: Factor of the cosines in optimal transport and in the scores; the exponent of
            dot products.
        calibration: Turns scores into probabilities. The one that a model stores is valid for its
            layer, encoding, sharpness, similarity and unit, and is not used with others.
        threshold: Minimum score of a link.
        similarity: "cosine", or "dot" with XLM-Align's kernel max(ε, hᵀh)^sharpness.
        unit: "words" compares the means of subwords; "subwords" links subwords, and words if any
            of their subwords are linked, as XLM-Align does.
        scale_first: "columns", or "rows" as in XLM-Align's Eq. 6, for optimal transport.
        spelling: Weight of the similarity of spelling beside the cosine, from 0 to 1.
        languages: Languages of the two sides, for a model loaded with linear maps. Sentences are
            then encoded separately, as they were when the maps were fitted.
        batch_tokens: Tokens per batch. Default: chosen for the device.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        method: Method | None = None,
        layer: int | None = None,
        encode: Encoding | None = None,
        sharpness: float | None = None,
        calibration: Calibration | None = None,
        threshold: float | None = None,
        similarity: Similarity | None = None,
        unit: Unit | None = None,
        scale_first: Literal["columns", "rows"] | None = None,
        spelling: float | None = None,
        languages: tuple[str, str] | None = None,
        batch_tokens: int | None = None,
    ) -> None:
        self.encoder, self.batch_tokens = encoder, batch_tokens
        self.maps, self.languages = check_maps(encoder, languages), languages
        if self.maps is not None and languages is not None:
            if encode == "joint":
                problem = "linear maps are fitted on sentences that are encoded separately"
                raise InputError(problem, fix="drop encode, or load the model without maps")
            encode = "separate"
            for language in languages:
                self.maps.check(language)
        self.settings = AlignSettings.of(
            encoder,
            method=method,
            layer=layer,
            encode=encode,
            sharpness=sharpness,
            calibration=calibration,
            threshold=threshold,
            similarity=similarity,
            unit=unit,
            scale_first=scale_first,
            spelling=spelling,
        )
        self._layout = PairLayout.of(encoder, self.settings.encode, self.settings.positions)
        self._words = WordEncoder(encoder.tokenizer)

    @property
    def method(self) -> Method:
        """How links are read from similarities."""
        return self.settings.method

    @property
    def layer(self) -> int:
        """Layer whose states are compared."""
        assert self.settings.layer is not None  # AlignSettings.of has chosen one
        return self.settings.layer

    def with_layer(self, layer: int) -> WordAligner:
        """Return the same aligner at another layer."""
        other = WordAligner(self.encoder, languages=self.languages, batch_tokens=self.batch_tokens)
        other.settings = replace(self.settings, layer=self.encoder.check_layer(layer))
        other._layout = self._layout
        return other

    def align(self, pairs: Iterable[WordPair]) -> list[list[tuple[int, int]]]:
        """Return the links of every pair as a list of (source word, target word).

        Args:
            pairs: Pairs of word lists, such as (["das", "Haus"], ["the", "house"]).
        """
        everything = check_pairs(pairs)
        found: list[list[tuple[int, int]]] = []
        for start in range(0, len(everything), BLOCK_PAIRS):
            found += self.align_block(everything[start : start + BLOCK_PAIRS]).links.to_lists()
        return found

    def align_block(
        self, pairs: Sequence[WordPair], first: int = 0, *, evidence: Evidence | None = None
    ) -> AlignedBlock:
        """Align some pairs; `evidence` is added to the similarities."""
        return self.align_layers(pairs, [self.layer], evidence)[self.layer]

    def align_layers(
        self, pairs: Sequence[WordPair], layers: Sequence[int], evidence: Evidence | None = None
    ) -> Mapping[int, AlignedBlock]:
        """Align some pairs at several layers in one pass of the encoder.

        A calibration is used at all layers, so that its threshold is only nearly the best at most.
        """
        numbers = [self.encoder.check_layer(layer) for layer in layers]
        settings = [replace(self.settings, layer=number) for number in numbers]
        return dict(zip(numbers, self.align_each(pairs, settings, evidence), strict=True))

    def align_each(
        self,
        pairs: Sequence[WordPair],
        settings: Sequence[AlignSettings],
        evidence: Evidence | None = None,
    ) -> list[AlignedBlock]:
        """Align some pairs with each of several settings in one pass of the encoder.

        The settings may differ in everything but `encode` and `positions`.
        """
        numbers = sorted({choice.layer for choice in settings if choice.layer is not None})
        windows = split_pairs(self._words, pairs, self._layout.limits)
        device = device_of(self.encoder)
        parts: list[list[WindowLinks]] = [[] for _ in settings]
        maps = {number: self._find_maps(number) for number in numbers}
        is_spelled = any(choice.spelling for choice in settings)
        spelling = Spelling(pairs, device) if is_spelled else None

        @torch.inference_mode()
        def align_batch(rows: IntArray) -> None:
            batch = build_pair_batch(windows, rows, self._layout).to(device)
            more = None if evidence is None else evidence.score(windows, rows).to(device)
            spelled = None if spelling is None else spelling.compare(windows, rows)
            states = dict(zip(numbers, self.encoder(batch.tokens, numbers), strict=True))
            for number in numbers:
                self.encoder.check_finite(states[number], number)
            for choice, found in zip(settings, parts, strict=True):
                assert choice.layer is not None
                layer_maps = maps[choice.layer]
                links, scores, _ = link_batch(
                    states[choice.layer], batch, choice, layer_maps, spelled, more
                )
                found.append(WindowLinks.of(rows, links, scores))

        budget = self.batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
        n_tokens = self._layout.count_tokens(windows)
        batches = batch_by_length(n_tokens, budget) if len(windows) else []
        run_batches(align_batch, batches, torch.get_num_threads() if device.type == "cpu" else 1)
        blocks = []
        for found in parts:
            links = gather_links(windows, found, len(pairs))
            report = AlignReport(
                len(pairs),
                len(links.pairs),
                windows.n_empty,
                windows.n_long,
                windows.n_windows,
                windows.n_cut,
            )
            blocks.append(AlignedBlock(links, report))
        return blocks

    def _find_maps(self, layer: int) -> SideMaps:
        """Return the linear maps of both sides at a layer, or None for both."""
        if self.maps is None or self.languages is None:
            return None, None
        src, tgt = self.languages
        return self.maps.find(src, layer), self.maps.find(tgt, layer)


def link_batch(
    states: Float[Tensor, "tokens hidden"],
    batch: PairBatch,
    settings: AlignSettings,
    maps: SideMaps = (None, None),
    spelled: Float[Tensor, "windows src tgt"] | None = None,
    evidence: Float[Tensor, "windows src tgt"] | None = None,
) -> tuple[
    Bool[Tensor, "windows src tgt"],
    Float[Tensor, "windows src tgt"],
    Float[Tensor, "windows src tgt"],
]:
    """Return the links, scores and similarities of the words of every window.

    `spelled` are the similarities of spelling, which are not part of those returned. If subwords
    are linked, a word pair has the highest score and similarity of its subword pairs.
    """
    if settings.unit == "words":
        similarity, valid = compare_words(states, batch, maps, settings.similarity)
        compared = similarity
        if spelled is not None:
            compared = similarity + settings.spelling * spelled
        return (*link_words(compared, valid, settings, evidence), similarity)
    pieces = batch.split_words()
    similarity, valid = compare_words(states, pieces, maps, settings.similarity)
    links, scores = link_words(similarity, valid, settings)
    is_linked = pieces.max_by_word(links.float(), batch) > 0
    return is_linked, pieces.max_by_word(scores, batch), pieces.max_by_word(similarity, batch)


def compare_words(
    states: Float[Tensor, "tokens hidden"],
    batch: PairBatch,
    maps: SideMaps = (None, None),
    similarity: Similarity = "cosine",
) -> tuple[Float[Tensor, "windows src tgt"], Bool[Tensor, "windows src tgt"]]:
    """Return the similarities of all word pairs of every window, and which word pairs exist.

    A word's vector is the mean of its subwords, mapped if its side has a map. Words without
    subwords do not exist here.
    """
    src, has_src = _pool(
        states[batch.src_positions], batch.src_slots, batch.n_windows, batch.src_width, maps[0]
    )
    tgt, has_tgt = _pool(
        states[batch.tgt_positions], batch.tgt_slots, batch.n_windows, batch.tgt_width, maps[1]
    )
    if similarity == "cosine":
        src, tgt = F.normalize(src, dim=-1), F.normalize(tgt, dim=-1)
    return src @ tgt.mT, has_src[:, :, None] & has_tgt[:, None, :]


def link_words(
    similarity: Float[Tensor, "windows src tgt"],
    valid: Bool[Tensor, "windows src tgt"],
    settings: AlignSettings,
    evidence: Float[Tensor, "windows src tgt"] | None = None,
) -> tuple[Bool[Tensor, "windows src tgt"], Float[Tensor, "windows src tgt"]]:
    """Return links and their scores from similarities; evidence is added to the log kernel.

    A score from 0 to 1 is the geometric mean of two softmax probabilities, over the words of
    either side; with a calibration, it is a probability. The method "ot" applies itermax to the
    transport plan of a few Sinkhorn iterations between uniform masses of the words.
    """
    if settings.similarity == "dot":
        log_kernel = product_log_kernel(similarity, valid, settings.sharpness)
        similarity = similarity.clamp(min=MIN_PRODUCT)
    else:
        log_kernel = exponential_log_kernel(similarity, valid, settings.sharpness)
    if evidence is not None:
        log_kernel = log_kernel + evidence
        similarity = (log_kernel / settings.sharpness).clamp(min=-1.0)
    padded = log_kernel.clamp(min=MIN_LOG_SCORE)
    scores = ((padded.log_softmax(dim=1) + padded.log_softmax(dim=2)) / 2).exp()
    if settings.calibration is not None:
        scores = settings.calibration.apply(scores)
    if settings.method == "ot":
        src_mass, tgt_mass = (
            filled / filled.sum(dim=1, keepdim=True).clamp(min=1)
            for filled in (valid.any(dim=2), valid.any(dim=1))
        )
        plan = log_sinkhorn(
            log_kernel, src_mass, tgt_mass, settings.n_iterations, settings.scale_first
        ).exp()
        links = itermax(plan.masked_fill(~valid, -torch.inf))
    elif settings.method == "itermax":
        positive = similarity if settings.similarity == "dot" else (1 + similarity) / 2
        links = itermax(positive.masked_fill(~valid, -torch.inf))
    elif settings.method == "argmax":
        links = mutual_argmax(log_kernel)
    elif settings.method == "probability":
        links = valid
    else:
        links = max_weight_matching(similarity.masked_fill(~valid, -torch.inf))
    return links & (scores >= settings.min_score), scores


def _pool(
    states: Float[Tensor, "pieces hidden"],
    slots: Tensor,
    n_windows: int,
    width: int,
    W: Float[Tensor, "hidden hidden"] | None,
) -> tuple[Float[Tensor, "windows width hidden"], Bool[Tensor, "windows width"]]:
    words = pool_words(states, slots, n_windows * width)
    words = words if W is None else words @ W.to(words)
    filled = torch.zeros(n_windows * width, dtype=torch.bool, device=states.device)
    filled[slots] = True
    return words.view(n_windows, width, -1), filled.view(n_windows, width)
