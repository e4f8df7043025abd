"""Train an encoder briefly on the bitext that is to be aligned.

Masked words are predicted and point at the translations that the encoder itself finds for them:
the EM procedure of XLM-Align (Chi et al., 2021) on the text at hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from calque.io.files import write_atomically
from calque.models.inference import device_of
from calque.training.loop import train
from calque.training.recipe_io import anchor_paths, load_recipe
from calque.training.sources import prepare_text
from calque.word_alignment.neural import AlignSettings
from calque.word_alignment.protocol import WordPair

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.types import Progress

RECIPE, TEXT = "adapt", "bitext.tsv"
# On a CPU steps are small and few: a hundred of them take minutes.
STEPS = {"cpu": 100, "cuda": 500}
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
MAX_LENGTH = 256  # tokens of a pair; the few longer pairs are left out


def adapt_encoder(
    encoder: Encoder,
    pairs: Iterable[WordPair],
    folder: Path,
    *,
    steps: int | None = None,
    learning_rate: float | None = None,
    progress: Progress | None = None,
) -> Path:
    """Train a copy of the encoder on sentence pairs; return the folder of the new model.

    The text, the training run and the model are written to `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder / TEXT) as stream:
        stream.writelines(f"{' '.join(src)}\t{' '.join(tgt)}\n" for src, tgt in pairs)
    device = device_of(encoder).type
    device = device if device in STEPS else "cpu"
    settings = AlignSettings.of(encoder)
    steps = steps or STEPS[device]
    overrides = [
        f"model.start={encoder.folder}",
        f"schedule.steps={steps}",
        f"schedule.warmup={min(30, steps // 10)}",
        f"objectives.0.batch_tokens={BATCH_TOKENS[device]}",
        f"objectives.0.label_layer={settings.layer}",
        f"objectives.0.positions={settings.positions}",
        f"data.max_length={min(encoder.max_tokens, MAX_LENGTH)}",
    ]
    if learning_rate is not None:
        overrides.append(f"optimizer.learning_rate={learning_rate}")
    recipe = anchor_paths(load_recipe(RECIPE, overrides), folder)
    if progress is not None:
        progress("adapting the encoder", 0, None)
    # One process: others would run a user's script again if it has no main guard.
    prepare_text(recipe, folder, folder / "text", n_workers=1)
    return train(recipe, output=folder / "run", prepared=folder / "text", progress=progress).model
