"""A tiny recipe and real text prepared for it: a run of a few steps takes about a second."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from calque.training.recipe import Recipe
from calque.training.recipe_io import apply_setting, parse_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MakeRecipe = Callable[..., Recipe]
TrainInTwo = Callable[..., subprocess.CompletedProcess[str]]

MAIN = "from calque.cli import main\nmain()\n"
# Accelerate shards on GPUs only; torch itself also shards on CPUs, over gloo.
SHARDED = """
from accelerate import PartialState
from accelerate.utils import DistributedType
PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
"""

TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "intermediate": 64,
        "positions": 64,
        "dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "data": {"max_length": 64, "validation_examples": 3},
    "objectives": [
        {"kind": "masked_lm", "batch_tokens": 512},
        {"kind": "translation_lm", "batch_tokens": 512, "weight": 0.5},
    ],
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"steps": 8, "warmup": 2},
    "checkpoints": {"every": 3, "validate_every": 4, "validation_batches": 2},
    "telemetry": {"every": 1},
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: tiny matrices are slower on several ones."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def tiny_recipe() -> MakeRecipe:
    """Return a function that builds the tiny recipe with changes such as `schedule.steps=4`."""

    def make(*changes: str) -> Recipe:
        content = deepcopy(TINY)
        for change in changes:
            apply_setting(content, change)
        return parse_recipe(content, "the tiny recipe")

    return make


@pytest.fixture(scope="session")
def tiny_text(
    demo_rows: list[tuple[str, str, str]],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The demo's sentences as prepared bitext, one corpus per language."""
    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora

    files, folder = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("text")
    sources = []
    for language in dict.fromkeys(row[0] for row in demo_rows):
        lines = [f"{english}\t{text}\n" for code, english, text in demo_rows if code == language]
        file = files / f"en-{language}.tsv"
        file.write_text("".join(lines), encoding="utf-8")
        sources.append(TextSource((file,), ("en", language)))
    prepare_corpora(sources, tiny_tokenizer, folder, rules=CleaningRules())
    return folder


@pytest.fixture(scope="session")
def train_in_two(fork_server: Any) -> TrainInTwo:
    """Train into FOLDER/run by two processes, with DDP or FSDP."""

    def launch(
        folder: Path, recipe: Recipe, text: Path, *, sharded: bool = False, resume: bool = False
    ) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        (folder / "main.py").write_text((SHARDED if sharded else "") + MAIN)
        (folder / "r.yaml").write_text(recipe.to_yaml())
        options = ["train", folder / "r.yaml", "-o", folder / "run", "--prepared", text]
        return fork_server.run(folder / "main.py", *options, *(["--resume"] if resume else []))

    return launch
