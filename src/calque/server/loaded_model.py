"""A loaded model that computes the requests of several clients in shared batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.inference import BATCH_TOKENS, device_of, run_batches
from calque.tokens.ragged import batch_by_length
from calque.tokens.words import WordEncoder
from calque.word_alignment.neural import AlignSettings, compare_words, link_words
from calque.word_alignment.pair_windows import (
    PairLayout,
    PairWindows,
    WindowLinks,
    build_pair_batch,
    gather_links,
    split_pairs,
)

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from calque.api import Model
    from calque.types import Links
    from calque.word_alignment.protocol import WordPair

    IntArray = npt.NDArray[np.int64]
    Matrix = npt.NDArray[np.float32]


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

    def __init__(self, name: str, model: Model) -> None:
        self.name, self.model = name, model
        self.settings = AlignSettings.of(model)
        self._layout = PairLayout.of(model, self.settings.encode, self.settings.positions)
        self._words = WordEncoder(model.tokenizer)

    @property
    def layer(self) -> int:
        """Layer whose words are compared by default."""
        return _check(self.settings.layer)

    def choose_settings(
        self, layer: int | None, method: str | None, threshold: float | None
    ) -> AlignSettings:
        """Return the alignment settings of a request; raise InputError if they do not exist."""
        return AlignSettings.of(self.model, layer=layer, method=method, threshold=threshold)

    def embed(self, requests: Sequence[Sequence[str]]) -> list[Matrix]:
        """Return the sentence vectors of every request."""
        vectors = self.model.embed([text for texts in requests for text in texts])
        return np.split(vectors, np.cumsum([len(texts) for texts in requests])[:-1])

    def align(self, jobs: Sequence[AlignJob]) -> list[list[AlignedPair]]:
        """Return the links of every job's pairs; all layers are computed in one pass."""
        pairs = [pair for job in jobs for pair in job.pairs]
        owners = np.repeat(np.arange(len(jobs)), [len(job.pairs) for job in jobs])
        windows = split_pairs(self._words, pairs, self._layout.limits)
        device = device_of(self.model)
        window_jobs = owners[windows.owners]
        layers = sorted({_layer(job) for job in jobs})
        found: list[WindowLinks] = []
        cosines = [np.zeros((len(src), len(tgt)), np.float32) for src, tgt in pairs]

        @torch.inference_mode()
        def align_batch(rows: IntArray) -> None:
            batch = build_pair_batch(windows, rows, self._layout).to(device)
            states = dict(zip(layers, self.model(batch.tokens, layers), strict=True))
            compared = {layer: compare_words(states[layer], batch) for layer in layers}
            for settings in dict.fromkeys(jobs[number].settings for number in window_jobs[rows]):
                kept = np.flatnonzero(
                    [jobs[number].settings == settings for number in window_jobs[rows]]
                )
                chosen = torch.from_numpy(kept).to(device)
                similarity, valid = (each[chosen] for each in compared[_check(settings.layer)])
                links, scores = link_words(similarity, valid, settings)
                found.append(WindowLinks.of(rows[kept], links, scores))
                for row, cosine in zip(rows[kept], similarity, strict=True):
                    if jobs[window_jobs[row]].matrix:
                        _fill(cosines[windows.owners[row]], windows, row, cosine)

        budget = BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"])
        batches = batch_by_length(self._layout.count_tokens(windows), budget) if windows else []
        n_threads = torch.get_num_threads() if device.type == "cpu" else 1
        run_batches(align_batch, batches, min(n_threads, max(1, len(batches))))
        links = _split_links(gather_links(windows, found, len(pairs)))
        aligned = iter(zip(links, cosines, strict=True))
        return [
            [
                AlignedPair(of_pair, matrix if job.matrix else None)
                for of_pair, matrix in (next(aligned) for _ in job.pairs)
            ]
            for job in jobs
        ]


def _layer(job: AlignJob) -> int:
    return _check(job.settings.layer)


def _check(layer: int | None) -> int:
    assert layer is not None  # AlignSettings.of has chosen one
    return layer


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
