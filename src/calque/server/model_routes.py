"""Routes that compute something with a model, in batches that concurrent requests share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import FastAPI, HTTPException
from fastapi.concurrency import run_in_threadpool

from calque.io.segmentation import split_on_spaces
from calque.server.loaded_model import (
    AlignedPair,
    AlignJob,
    AttentionJob,
    EmbedJob,
    TranslationJob,
    WordsJob,
)
from calque.server.projection import project, project_jobs
from calque.server.schemas import (
    MAX_CELLS,
    MAX_POINTS,
    MAX_TOTAL_CHARACTERS,
    AlignReply,
    AlignRequest,
    AttentionReading,
    AttentionReply,
    AttentionRequest,
    EmbedReply,
    EmbedRequest,
    PairLinks,
    ProjectedPoint,
    ProjectionReply,
    ProjectionRequest,
    SearchMatch,
    SearchReply,
    SearchRequest,
    TranslateReply,
    TranslateRequest,
    WordLink,
)
from calque.server.served_data import COMPUTE_SECONDS, PROJECTION_SECONDS, ServedData
from calque.server.text_words import find_words
from calque.types import PairAttention

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")

# Digits of scores and coordinates in responses.
DIGITS = 4
VECTOR_DIGITS = 6
MAX_INLINE_CHARACTERS = 2_000
# Why a projection is not there in time, and what to do.
LATE_PROJECTION = {
    "tsne": "t-SNE takes too long: try again with fewer points, or choose PCA.",
    "umap": "UMAP compiles its code when it is first used, which can take minutes and goes on "
    "now: try again later, or choose PCA.",
}


def add_model_routes(app: FastAPI, data: ServedData) -> None:
    """Add the routes; a route without its model answers 404."""

    @app.post("/align")
    async def align(request: AlignRequest) -> AlignReply:
        """Link the words of sentence pairs."""
        loaded = data.find_model(request.model)
        settings = loaded.choose_settings(
            request.layer, request.method, request.threshold, request.sharpness
        )
        texts = [text for pair in request.pairs for text in (pair.src, pair.tgt)]
        size = check_size(texts)
        words = await split_texts(texts, find_words if request.tokenize else split_on_spaces)
        pairs = list(zip(words[::2], words[1::2], strict=True))
        if request.matrix:
            check_cells(sum(len(src) * len(tgt) for src, tgt in pairs), "pass shorter pairs")
        aligned = await compute(loaded.align, AlignJob(pairs, settings, request.matrix), size)
        return AlignReply(
            model=loaded.name,
            layer=loaded.model.choose_layer("words", settings.layer),
            method=settings.method,
            threshold=settings.min_score,
            calibrated=settings.calibration is not None,
            pairs=[
                _format_pair(src, tgt, found)
                for (src, tgt), found in zip(pairs, aligned, strict=True)
            ],
        )

    @app.post("/embed")
    async def embed(request: EmbedRequest) -> EmbedReply:
        """Return one vector per sentence."""
        loaded = data.find_model(request.model)
        job = EmbedJob(request.texts, language=request.language)
        loaded.check_embed(job)
        vectors = await compute(loaded.embed, job, check_size(request.texts))
        rounded = _round(vectors, VECTOR_DIGITS)
        return EmbedReply(model=loaded.name, dimension=vectors.shape[1], vectors=rounded)

    @app.post("/search")
    async def search(request: SearchRequest) -> SearchReply:
        """Find the sentences nearest to a sentence, in every language."""
        data.sentences.check(request.languages)
        embed = data.default_model.embed
        (vector,) = await compute(embed, EmbedJob([request.text]), check_size([request.text]))
        matches = await run_in_threadpool(data.sentences.find, vector, request.n, request.languages)
        return SearchReply(
            matches=[
                SearchMatch(
                    language=sentence.language,
                    text=sentence.text,
                    score=round(score, DIGITS),
                    line=sentence.line,
                )
                for sentence, score in matches
            ]
        )

    @app.post("/projection")
    async def projection(request: ProjectionRequest) -> ProjectionReply:
        """Show sentences, or words in their context, as points in two dimensions."""
        loaded = data.find_model(request.model)
        texts = [each.text for each in request.texts]
        labels = [(each.text, each.language) for each in request.texts]
        size = check_size(texts)
        if request.unit == "sentence":
            job = EmbedJob(texts, request.layer)
            loaded.check_embed(job)
            vectors = await compute(loaded.embed, job, size)
        else:
            settings = loaded.choose_settings(request.layer)
            words = await split_texts(texts, find_words)
            labels = [
                (word, each.language)
                for each, found in zip(request.texts, words, strict=True)
                for word in found
            ]
            if not 1 <= len(labels) <= MAX_POINTS:
                problem = f"there are {len(labels)} words; pass 1 to {MAX_POINTS}"
                raise HTTPException(422, problem)
            vectors = await compute(loaded.embed_words, WordsJob(words, settings), size)
        if request.method == "pca":
            points = await run_in_threadpool(project, vectors, request.method)
        else:
            points = await data.projections.compute(
                project_jobs,
                (vectors, request.method),
                seconds=PROJECTION_SECONDS,
                late=LATE_PROJECTION[request.method],
            )
        return ProjectionReply(
            model=loaded.name,
            method=request.method,
            points=[
                ProjectedPoint(x=x, y=y, text=text, language=language)
                for (x, y), (text, language) in zip(_round(points), labels, strict=True)
            ],
        )

    @app.post("/attention")
    async def attention(request: AttentionRequest) -> AttentionReply:
        """Return the attention of two sentences to each other, by layer."""
        loaded = data.find_model(request.model)
        size = check_size([request.src, request.tgt])
        job = AttentionJob(request.src, request.tgt, request.head)
        found = await compute(loaded.read_attention, job, size)
        n_layers = min(len(each.shares) for each in found)
        if request.layer is not None and not 1 <= request.layer <= n_layers:
            raise HTTPException(422, f"there is no layer {request.layer}; pass 1 to {n_layers}")
        n_layers = 1 if request.layer is not None else n_layers
        n_cells = sum(2 * len(each.src) * len(each.tgt) * n_layers for each in found)
        check_cells(n_cells, "pass one layer or shorter sentences")
        return AttentionReply(readings=[_format_attention(each, request.layer) for each in found])

    @app.post("/translate")
    async def translate(request: TranslateRequest) -> TranslateReply:
        """Translate sentences, if the server was started with a translator."""
        if data.translator is None:
            raise HTTPException(404, "this server has no translator (--translator)")
        job = TranslationJob(request.texts, request.src_lang, request.tgt_lang, request.beams)
        data.translator.check(job)
        size = check_size(request.texts)
        translations = await compute(data.translator.translate, job, size)
        return TranslateReply(translations=translations)

    async def compute(
        function: Callable[[Sequence[PayloadT]], Sequence[ResultT]], payload: PayloadT, size: int
    ) -> ResultT:
        return await data.queue.compute(function, payload, size, seconds=COMPUTE_SECONDS)


async def split_texts(texts: Sequence[str], split: Callable[[str], list[str]]) -> list[list[str]]:
    """Return the words of texts; long texts are split in another thread, so that nobody waits."""
    if sum(map(len, texts)) <= MAX_INLINE_CHARACTERS:
        return [split(text) for text in texts]
    return await run_in_threadpool(lambda: [split(text) for text in texts])


def check_size(texts: Sequence[str]) -> int:
    """Return the number of characters of a request; raise an error if there are too many."""
    size = sum(map(len, texts))
    if size > MAX_TOTAL_CHARACTERS:
        raise HTTPException(413, f"the texts have more than {MAX_TOTAL_CHARACTERS:,} characters")
    return size


def check_cells(n_cells: int, fix: str) -> None:
    """Raise an error if the matrices of a response would be too large."""
    if n_cells > MAX_CELLS:
        problem = f"the matrices have {n_cells:,} cells, the maximum is {MAX_CELLS:,} ({fix})"
        raise HTTPException(413, problem)


def _format_pair(src: list[str], tgt: list[str], found: AlignedPair) -> PairLinks:
    links = [WordLink(src=i, tgt=j, score=round(score, DIGITS)) for i, j, score in found.links]
    matrix = None if found.matrix is None else _round(found.matrix)
    return PairLinks(src=src, tgt=tgt, links=links, matrix=matrix)


def _format_attention(found: PairAttention, layer: int | None) -> AttentionReading:
    layers = list(range(1, len(found.shares) + 1)) if layer is None else [layer]
    rows = [number - 1 for number in layers]
    return AttentionReading(
        model=found.model,
        kind=found.kind,
        src=list(found.src),
        tgt=list(found.tgt),
        layers=layers,
        src_to_tgt=_round(found.src_to_tgt[rows]),
        tgt_to_src=_round(found.tgt_to_src[rows]),
        shares=[round(found.shares[row], DIGITS) for row in rows],
        uniform=round(found.uniform, DIGITS),
    )


def _round(array: npt.NDArray[np.float32], digits: int = DIGITS) -> list[Any]:
    rounded: list[Any] = array.astype(float).round(digits).tolist()
    return rounded
