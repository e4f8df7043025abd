"""Train an encoder briefly on the bitext that is to be aligned.

The aligner at hand links the words of the bitext: the encoder alone, or together with a statistical
aligner. Then the encoder learns that linked words are similar, and predicts masked words.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.links import format_pharaoh
from calque.models.inference import device_of, has_fast_bf16
from calque.training.loop import train
from calque.training.recipe_io import anchor_paths, load_recipe
from calque.training.sources import prepare_text
from calque.types import count_progress
from calque.word_alignment.hybrid import HybridAligner
from calque.word_alignment.neural import WordAligner

if TYPE_CHECKING:
    from calque.types import Progress
    from calque.word_alignment.protocol import WordPair

RECIPE, TEXT, LINKS = "adapt", "linked.tsv", "linked.links"
STEPS = {"cpu": 200, "cuda": 500}
BATCH_TOKENS = {"cpu": 8192, "cuda": 32768}
MAX_LENGTH = 256  # tokens of a pair; the few longer pairs are left out
BLOCK_PAIRS = 2048


def adapt_encoder(
    aligner: WordAligner | HybridAligner,
    pairs: Iterable[WordPair],
    folder: Path,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    progress: Progress | None = None,
) -> Path:
    """Train a copy of the aligner's encoder on sentence pairs; return the folder of the new model.

    The linked text, the training run and the model are written to `folder`, which must be new or
    empty. Only as much text is linked as the training reads about once, if a word has two tokens
    (special ones included).
    """
    check_new_folder(folder)
    words = aligner.words if isinstance(aligner, HybridAligner) else aligner
    encoder = words.encoder
    device = device_of(encoder).type
    device = device if device in STEPS else "cpu"
    # Other CPUs emulate bf16, which is far slower than fp32.
    use_bf16 = device == "cpu" and has_fast_bf16()
    steps = steps or STEPS[device]
    folder.mkdir(parents=True, exist_ok=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=use_bf16):
        most_words = steps * BATCH_TOKENS[device] // 2
        n_pairs = _link_text(aligner, pairs, folder, most_words, progress)
    if n_pairs == 0:
        problem = "the text has no sentence pairs to adapt the encoder to"
        raise InputError(problem, fix="pass a text or bitext with pairs, or drop --adapt")
    overrides = [
        f"model.start={encoder.folder}",
        f"schedule.steps={steps}",
        f"schedule.warmup={min(30, steps // 10)}",
        f"objectives.0.batch_tokens={BATCH_TOKENS[device]}",
        f"objectives.0.layer={words.layer}",
        f"objectives.0.positions={words.settings.positions}",
        # The states that are compared: those of a pair side by side, or of two sentences.
        f"objectives.0.joint={float(words.settings.encode == 'joint')}",
        f"objectives.0.separate={float(words.settings.encode == 'separate')}",
        f"data.max_length={min(encoder.max_tokens, MAX_LENGTH)}",
    ]
    if learning_rate is not None:
        overrides.append(f"optimizer.learning_rate={learning_rate}")
    if use_bf16:
        overrides.append("engine.precision=bf16")
    recipe = anchor_paths(load_recipe(RECIPE, overrides), folder)
    # One process: others would run a user's script again if it has no main guard.
    prepare_text(recipe, folder, folder / "text", n_workers=1)
    return train(recipe, output=folder / "run", prepared=folder / "text", progress=progress).model


def check_new_folder(folder: Path) -> None:
    """Raise InputError if a folder has files, which an adapted model would replace or mix with."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        problem = "the folder of the adapted model is not empty"
        raise InputError(problem, file=folder, fix="choose a new folder")


def _link_text(
    aligner: WordAligner | HybridAligner,
    pairs: Iterable[WordPair],
    folder: Path,
    most_words: int,
    progress: Progress | None,
) -> int:
    """Write the first pairs, up to a number of words, and their links; return their number."""
    advance = count_progress(progress, "linking words to learn from", None)
    pairs, n_pairs, n_words = iter(pairs), 0, 0
    with write_atomically(folder / TEXT) as text, write_atomically(folder / LINKS) as links:
        while n_words < most_words and (block := list(islice(pairs, BLOCK_PAIRS))):
            found = aligner.align_block(block, n_pairs)
            text.writelines(f"{' '.join(src)}\t{' '.join(tgt)}\n" for src, tgt in block)
            links.writelines(f"{line}\n" for line in format_pharaoh(found.links))
            n_pairs += len(block)
            n_words += sum(len(src) + len(tgt) for src, tgt in block)
            advance(len(block))
    return n_pairs
