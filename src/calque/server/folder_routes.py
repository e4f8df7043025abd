"""Routes that show what is in the folders of the server: vectors, results and training runs."""

from __future__ import annotations

import math
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Response

from calque.server.schemas import (
    MAX_MATCHES,
    LexiconReply,
    RunMetrics,
    RunReply,
    StudyReply,
    WordNeighbor,
)
from calque.server.served_data import ServedData
from calque.server.training_runs import MetricRow

# Digits of cosines in responses.
DIGITS = 4

Label = Annotated[str, Query(min_length=1, max_length=200)]
OptionalLabel = Annotated[str | None, Query(max_length=200)]


def add_folder_routes(app: FastAPI, data: ServedData) -> None:
    """Add the routes; a route without its folder answers 404.

    These functions wait for files, so each request runs in a thread of its own.
    """

    @app.get("/lexicon", responses={404: {"description": "The word is not known."}})
    def lexicon(
        word: Label, language: Label, n: Annotated[int, Query(ge=1, le=MAX_MATCHES)] = 5
    ) -> LexiconReply:
        """Find the nearest words in every other language of the word vectors."""
        if data.words is None:
            raise HTTPException(404, "this server has no word vectors (--vectors)")
        found = data.words.find(word, language, n)
        if found is None:
            raise HTTPException(404, f"{word!r} is not among the words of {language}")
        return LexiconReply(
            word=word,
            language=language,
            neighbors={
                name: [WordNeighbor(word=each, score=round(score, DIGITS)) for each, score in words]
                for name, words in found.items()
            },
        )

    @app.get("/results")
    def results(
        task: OptionalLabel = None, language: OptionalLabel = None, baseline: OptionalLabel = None
    ) -> StudyReply:
        """Compare models with a baseline, by default with the first model of the results."""
        if data.study is None:
            raise HTTPException(404, "this server has no results (--results)")
        return StudyReply.model_validate(data.study.describe(task, language, baseline))

    @app.get(
        "/results/plots/{name}.svg",
        response_class=Response,
        responses={200: {"content": {"image/svg+xml": {}}}},
    )
    def plot(name: str, baseline: OptionalLabel = None) -> Response:
        """Return a plot of a task; its name is in the results."""
        svg = None if data.study is None else data.study.plot(name, baseline)
        if svg is None:
            raise HTTPException(404, "there is no such plot")
        return Response(svg, media_type="image/svg+xml")

    @app.get("/runs")
    def runs() -> list[RunReply]:
        """List the training runs, the most recently updated first."""
        if data.runs is None:
            raise HTTPException(404, "this server has no runs (--runs)")
        return [RunReply.model_validate(run) for run in data.runs.describe()]

    @app.get("/runs/{name:path}")
    def run(name: str, after: int = -1) -> RunMetrics:
        """Return the metrics of a run after a step."""
        found = None if data.runs is None else data.runs.read(name, after)
        if found is None:
            raise HTTPException(404, "there is no such run")
        described, rows = found
        return RunMetrics(run=RunReply.model_validate(described), metrics=list(map(_clean, rows)))


def _clean(row: MetricRow) -> dict[str, Any]:
    """Return the values of a row that are numbers or text; JSON has no NaN."""
    kept = {name: value for name, value in row.items() if isinstance(value, int | float | str)}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in kept.items()
    }
