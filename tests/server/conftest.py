"""A server over a tiny model and small folders, called without a network."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from calque.server.routes import build_server
from calque.server.serve import load_data
from calque.server.served_data import ServedData

DATA = Path(__file__).parents[1] / "data"
VECTORS = {"en": ["house", "cat"], "de": ["Haus", "Katze"], "fr": ["maison", "chat"]}
CallServer = Callable[..., httpx.Response]


def write_metrics(folder: Path, n_steps: int, *, end: str = "") -> Path:
    """Write the metrics of a run, of which `end` is an incomplete last line."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"kind": "train", "step": step, "loss/mlm": 5 - step / 200, "seconds": step / 2}
        | {"tokens_per_second": 1000.0}
        for step in range(10, n_steps + 1, 10)
    ]
    file = folder / "metrics.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + end, "utf-8")
    (folder / "recipe.yaml").write_text("schedule:\n  steps: 1000\n", "utf-8")
    return file


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results, runs and vectors; in each, a link leads to a secret outside."""
    place = tmp_path_factory.mktemp("served")
    shutil.copytree(DATA / "results", place / "results")
    write_metrics(place / "runs" / "first", 200, end='{"kind": "train", "st')
    vectors = place / "vectors"
    vectors.mkdir()
    for language, words in VECTORS.items():
        rows = [f"{word} {row == 0:d} {row == 1:d} 0.1" for row, word in enumerate(words)]
        (vectors / f"{language}.vec").write_text("2 3\n" + "\n".join(rows) + "\n", "utf-8")
    secret = place / "secret"
    write_metrics(secret, 10)
    (secret / "xx.vec").write_text("1 3\nsecret 1 0 0\n", "utf-8")
    (place / "runs" / "linked").symlink_to(secret)
    (place / "runs" / "file").mkdir()
    (place / "runs" / "file" / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (vectors / "xx.vec").symlink_to(secret / "xx.vec")
    return place


@pytest.fixture(scope="session")
def served_data(folders: Path, tiny_folder: Path) -> Iterator[ServedData]:
    data = load_data(
        [tiny_folder, "calque-mini"],
        results=folders / "results",
        runs=folders / "runs",
        vectors=folders / "vectors",
        device="cpu",
    )
    yield data
    data.close()


@pytest.fixture(scope="session")
def call(served_data: ServedData) -> CallServer:
    """Send a request to the application: `call("POST", "/align", json={...})`."""
    return make_call(build_server(served_data))


def make_call(app: Any) -> CallServer:
    def call(method: str, path: str, **options: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.request(method, path, **options)

        return asyncio.run(send())

    return call
