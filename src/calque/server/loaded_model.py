"""A loaded model that computes the requests of several clients in shared batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.inference import BATCH_TOKENS, device_of
from calque.models.language_maps import has_maps, load_maps
from calque.models.pooling import batch_words, encode_first_subwords
from calque.tokens.ragged import batch_by_length
from calque.tokens.words import WordEncoder
from calque.translation.pair_attention import load_cross_attention, measure_attention
from calque.translation.translate import Translator
from calque.word_alignment.neural import AlignSettings, link_batch
from calque.word_alignment.pair_windows import (
    PairLayout,
    PairWindows,
    WindowLinks,
    build_pair_batch,
    gather_links,
    split_pairs,
)
from calque.word_alignment.spelling import Spelling

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from calque.api import Model
    from calque.models.seq2seq import Seq2Seq
    from calque.models.veco import Veco
    from calque.types import Links, PairAttention
    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]
    Matrix = npt.NDArray[np.float32]

BatchT = TypeVar("BatchT")
ResultT = TypeVar("ResultT")

MIN_BATCH_TOKENS = 128


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """Sentences to embed at a layer, by default the best; `language` chooses a linear map."""

    texts: Sequence[str]
    layer: int | None = None
    language: str | None = None


@dataclass(frozen=True, slots=True)
class WordsJob:
    """Sentences, as lists of words, whose words are to be embedded with the layer of settings."""

    sentences: Sequence[Sequence[str]]
    settings: AlignSettings


@dataclass(frozen=True, slots=True)
class AttentionJob:
    """A pair of sentences, and one attention head or None for the mean of all."""

    src: str
    tgt: str
    head: int | None = None


@dataclass(frozen=True, slots=True)
class AlignJob:
    """Pairs of word lists to align with some settings."""

    pairs: Sequence[WordPair]
    settings: AlignSettings
    matrix: bool = False


@dataclass(frozen=True, slots=True)
class AlignedPair:
    """Links of a pair with their scores; the matrix has the cosines of all word pairs."""

    links: Sequence[tuple[int, int, float]]
    matrix: Matrix | None


class LoadedModel:
    """A model and what is prepared once for all requests.

    Its methods compute the jobs of several requests at once. Only one thread may call them.
    """

    def __init__(self, name: str, model: Model, cores: ModelCores) -> None:
        self.name, self.model = name, model
        self.settings = AlignSettings.of(model)
        self._layout = PairLayout.of(model, self.settings.encode, self.settings.positions)
        self._words = WordEncoder(model.tokenizer)
        self._cores = cores
        self._mapped = _add_maps(model)
        self._attention: tuple[Encoder, Veco | None] | None = None

    @property
    def layer(self) -> int:
        """Layer whose words are compared by default."""
        return _layer(self.settings)

    @property
    def probability_threshold(self) -> float | None:
        """Threshold of the method "probability"; None if scores are not calibrated."""
        calibration = self.settings.calibration
        return None if calibration is None else calibration.threshold

    @property
    def n_heads(self) -> int:
        """Number of attention heads of a layer."""
        return int(self.model.config.num_attention_heads)

    @property
    def map_languages(self) -> list[str]:
        """Languages whose sentence vectors can be mapped; the first one needs no map."""
        maps = None if self._mapped is None else self._mapped.maps
        return [] if maps is None else [maps.pivot, *maps.languages]

    def choose_settings(
        self,
        layer: int | None = None,
        method: str | None = None,
        threshold: float | None = None,
        sharpness: float | None = None,
    ) -> AlignSettings:
        """Return the alignment settings of a request; raise InputError if they do not exist."""
        return AlignSettings.of(
            self.model, layer=layer, method=method, threshold=threshold, sharpness=sharpness
        )

    def check_embed(self, job: EmbedJob) -> None:
        """Raise InputError if the model does not have the layer, or no map of the language."""
        layer = self.model.choose_layer("sentences", job.layer)
        if job.language is None:
            return
        if self._mapped is None or self._mapped.maps is None:
            fix = "leave out the language, or fit maps with `calque train linear-map`"
            raise InputError(f"the model {self.name!r} has no linear maps of languages", fix=fix)
        self._mapped.maps.check(job.language, layer)

    def embed(self, jobs: Sequence[EmbedJob]) -> list[Matrix]:
        """Return the sentence vectors of every job; jobs with the same settings share batches."""
        results: list[Matrix] = [np.zeros((0, self.model.hidden_size), np.float32)] * len(jobs)
        for numbers in _group((job.layer, job.language) for job in jobs):
            first, texts = jobs[numbers[0]], [text for n in numbers for text in jobs[n].texts]
            model = self.model if first.language is None or not self._mapped else self._mapped
            embed = partial(model.embed, layer=first.layer, map_from=first.language)
            vectors = np.concatenate(self._cores.map(embed, self._cores.divide(texts)))
            ends = np.cumsum([len(jobs[n].texts) for n in numbers])
            for number, part in zip(numbers, np.split(vectors, ends[:-1]), strict=True):
                results[number] = part
        return results

    def embed_words(self, jobs: Sequence[WordsJob]) -> list[Matrix]:
        """Return the vectors of all words of every job in their context, in one pass."""
        sentences = [sentence for job in jobs for sentence in job.sentences]
        layers = sorted({_layer(job.settings) for job in jobs})
        batches = batch_words(self.model, sentences)
        states = encode_first_subwords(self.model, batches, layers)
        ends = np.cumsum([sum(map(len, job.sentences)) for job in jobs])
        parts = [np.split(state.cpu().numpy(), ends[:-1]) for state in states]
        return [parts[layers.index(_layer(job.settings))][k] for k, job in enumerate(jobs)]

    def read_attention(self, jobs: Sequence[AttentionJob]) -> list[list[PairAttention]]:
        """Return the attention between the two sentences of every job.

        It is read on the CPU, in single precision.
        """
        if self._attention is None:
            on_cpu = device_of(self.model).type == "cpu"
            encoder = self.model if on_cpu else Encoder.load(self.model.folder)
            self._attention = encoder, load_cross_attention(encoder)
        return [
            measure_attention(*self._attention, job.src, job.tgt, label=self.name, head=job.head)
            for job in jobs
        ]

    def align(self, jobs: Sequence[AlignJob]) -> list[list[AlignedPair]]:
        """Return the links of every job's pairs; all layers are computed in one pass."""
        pairs = [pair for job in jobs for pair in job.pairs]
        windows = split_pairs(self._words, pairs, self._layout.limits)
        spelling = Spelling(pairs, device_of(self.model))
        job_numbers = np.repeat(np.arange(len(jobs)), [len(job.pairs) for job in jobs])
        jobs_of_windows = [jobs[number] for number in job_numbers[windows.owners]]
        cosines = [
            np.zeros((len(src), len(tgt)) if job.matrix else (0, 0), np.float32)
            for job in jobs
            for src, tgt in job.pairs
        ]

        def align_batch(rows: IntArray) -> list[WindowLinks]:
            found = []
            for rows_of, links, scores, similarity in self._link(
                windows, rows, [jobs_of_windows[row].settings for row in rows], spelling
            ):
                found.append(WindowLinks.of(rows_of, links, scores))
                for row, cosine in zip(rows_of, similarity, strict=True):
                    if jobs_of_windows[row].matrix:
                        _fill(cosines[windows.owners[row]], windows, row, cosine)
            return found

        n_tokens = self._layout.count_tokens(windows)
        batches = batch_by_length(n_tokens, self._cores.choose_budget(int(n_tokens.sum())))
        parts = self._cores.map(align_batch, batches if len(windows) else [])
        links = gather_links(windows, [part for found in parts for part in found], len(pairs))
        aligned = iter(zip(_split_links(links), cosines, strict=True))
        return [
            [
                AlignedPair(of_pair, matrix if job.matrix else None)
                for of_pair, matrix in (next(aligned) for _ in job.pairs)
            ]
            for job in jobs
        ]

    @torch.inference_mode()
    def _link(
        self,
        windows: PairWindows,
        rows: IntArray,
        settings: Sequence[AlignSettings],
        spelling: Spelling,
    ) -> list[tuple[IntArray, Tensor, Tensor, Tensor]]:
        """Return rows with their links, scores and similarities, one group per settings.

        `settings` has those of every row. The encoder runs once, for all layers.
        """
        device = device_of(self.model)
        batch = build_pair_batch(windows, rows, self._layout).to(device)
        layers = sorted({_layer(each) for each in settings})
        states = dict(zip(layers, self.model(batch.tokens, layers), strict=True))
        spelled = spelling.compare(windows, rows)
        found = []
        for numbers in _group(settings):
            each = settings[numbers[0]]
            links, scores, similarity = link_batch(
                states[_layer(each)], batch, each, spelled=spelled
            )
            found.append((rows[numbers], links[numbers], scores[numbers], similarity[numbers]))
        return found


@dataclass(frozen=True, slots=True)
class TranslationJob:
    """Texts to translate with some settings."""

    texts: Sequence[str]
    src_lang: str | None
    tgt_lang: str | None
    beams: int


class LoadedTranslator:
    """An encoder-decoder model; only one thread may call its methods."""

    def __init__(self, model: Seq2Seq) -> None:
        self.model = model

    @property
    def languages(self) -> list[str]:
        """The languages that the model translates into, as far as it says."""
        return list(self.model.start_tokens) or self.model.target_languages

    def check(self, job: TranslationJob) -> None:
        """Raise InputError if the model cannot translate with these settings."""
        self._build(job)

    def translate(self, jobs: Sequence[TranslationJob]) -> list[list[str]]:
        """Return the translations of every job; jobs with the same settings share batches."""
        results: list[list[str]] = [[] for _ in jobs]
        for numbers in _group((job.src_lang, job.tgt_lang, job.beams) for job in jobs):
            texts = [text for number in numbers for text in jobs[number].texts]
            translated = self._build(jobs[numbers[0]]).translate(texts)
            for number in numbers:
                results[number] = [next(translated) for _ in jobs[number].texts]
        return results

    def _build(self, job: TranslationJob) -> Translator:
        return Translator(self.model, src_lang=job.src_lang, tgt_lang=job.tgt_lang, beams=job.beams)


class ModelCores:
    """The CPU cores that a model uses: every batch is computed on one of them.

    Several cores on one batch would wait for each other after every operation. On a GPU, this is
    one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._n_cores = torch.get_num_threads() if device.type == "cpu" else 1
        self._budget = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
        self._pool = ThreadPoolExecutor(
            self._n_cores, "cores", initializer=partial(torch.set_num_threads, 1)
        )

    def map(self, work: Callable[[BatchT], ResultT], batches: Sequence[BatchT]) -> list[ResultT]:
        """Return the results of all batches, in their order."""
        return list(self._pool.map(work, batches))

    def choose_budget(self, n_tokens: int) -> int:
        """Return the tokens per batch: a small number of tokens is still spread over all cores."""
        return max(min(self._budget, -(-n_tokens // self._n_cores)), MIN_BATCH_TOKENS)

    def divide(self, texts: list[str]) -> list[list[str]]:
        """Divide texts into one part per core."""
        size = max(1, -(-len(texts) // self._n_cores))
        return [texts[start : start + size] for start in range(0, len(texts), size)]


def _add_maps(model: Model) -> Model | None:
    """Return a model with the same weights and the linear maps of its folder, if there are some."""
    if not has_maps(model.folder):
        return None
    mapped = copy(model)
    mapped.maps = load_maps(model.folder, model.hidden_size, model.n_layers)
    return mapped


def _group(keys: Iterable[Hashable]) -> list[list[int]]:
    """Return the positions of equal keys together."""
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _layer(settings: AlignSettings) -> int:
    assert settings.layer is not None  # AlignSettings.of has chosen one
    return settings.layer


def _fill(matrix: Matrix, windows: PairWindows, row: int, cosine: Tensor) -> None:
    """Copy the cosines of a window into the matrix of its pair."""
    pair = windows.owners[row]
    first_src, first_tgt = (
        int(side.first[row] - side.pieces.first_words[pair]) for side in (windows.src, windows.tgt)
    )
    n_src, n_tgt = int(windows.src.n_words[row]), int(windows.tgt.n_words[row])
    matrix[first_src : first_src + n_src, first_tgt : first_tgt + n_tgt] = (
        cosine[:n_src, :n_tgt].float().cpu().numpy()
    )


def _split_links(links: Links) -> list[list[tuple[int, int, float]]]:
    """Return the links of every pair as (source word, target word, score)."""
    lists: list[list[tuple[int, int, float]]] = [[] for _ in range(links.n_pairs)]
    columns = (links.pairs, links.src, links.tgt, links.scores)
    for pair, src, tgt, score in zip(*(column.tolist() for column in columns), strict=True):
        lists[pair].append((src, tgt, score))
    return lists
