"""A short training of an encoder on the bitext that is to be aligned, before it is aligned.

Hidden words are to be guessed, and to point at the translations that the encoder itself finds for
them: the EM of Chi et al., 2021 (XLM-Align), on the text at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calque.io.files import write_atomically
from calque.models.inference import device_of
from calque.training.loop import train
from calque.training.recipe import find_recipe, load_recipe
from calque.training.start import anchor_paths, prepare_text
from calque.word_alignment.neural import AlignSettings
from calque.word_alignment.protocol import WordPair

if TYPE_CHECKING:
    from calque.models.encoder import Encoder


RECIPE, TEXT = "adapt", "bitext.tsv"
# On a CPU steps are small and few: a hundred of them take minutes.
STEPS = {"cpu": 100, "cuda": 500}
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
LONGEST = 256  # tokens of a pair; the few that are longer are left out, and counted


@dataclass(frozen=True, slots=True)
class Adaptation:
    """How long to train, and where the text, the run and the new model go."""

    folder: Path
    steps: int | None = None
    learning_rate: float | None = None

    def train(
        self,
        encoder: Encoder,
        pairs: Iterable[WordPair],
        say: Callable[[str], None] = lambda text: None,
    ) -> Path:
        """Train a copy of the encoder, and give the folder of the new model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with write_atomically(self.folder / TEXT) as stream:
            stream.writelines(f"{' '.join(src)}\t{' '.join(tgt)}\n" for src, tgt in pairs)
        overrides = self._fit(encoder)
        recipe = anchor_paths(load_recipe(find_recipe(RECIPE), overrides), self.folder)
        # In one process: others would run a user's script again if it has no main guard.
        prepare_text(recipe, self.folder, self.folder / "text", say=say, n_workers=1)
        return train(recipe, self.folder / "text", self.folder / "run")

    def _fit(self, encoder: Encoder) -> Sequence[str]:
        """Fit the recipe to the model and the device."""
        kind = device_of(encoder).type
        kind = kind if kind in STEPS else "cpu"
        settings = AlignSettings.of(encoder)
        rate, steps = self.learning_rate, self.steps or STEPS[kind]
        return [
            f"model.start={encoder.folder}",
            f"schedule.steps={steps}",
            f"schedule.warmup={min(30, steps // 10)}",
            f"objectives.0.batch_tokens={BATCH_TOKENS[kind]}",
            f"objectives.0.label_layer={settings.layer}",
            f"objectives.0.positions={settings.positions}",
            f"data.max_length={min(encoder.max_tokens, LONGEST)}",
            *([] if rate is None else [f"optimizer.learning_rate={rate}"]),
        ]
