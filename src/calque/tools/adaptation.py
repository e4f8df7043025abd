"""A short training of an encoder on the bitext that is to be aligned, before it is aligned.

The words are taught to find their translations: those that a statistical aligner has linked or,
without one, those that the encoder itself finds (the EM of Chi et al., 2021, XLM-Align).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from calque.text.files import write_atomically
from calque.text.links import format_links
from calque.tools.aligning import Aligner, WordPair
from calque.tools.word_aligner import AlignSettings
from calque.training.loop import train
from calque.training.recipe import find_recipe, load_recipe
from calque.training.setup import anchor_paths, prepare_text

if TYPE_CHECKING:
    from calque.models.encoder import Encoder

BLOCK_PAIRS = 2048
# On a CPU steps are small and few: a hundred of them take minutes.
STEPS = {"cpu": 100, "cuda": 1000}
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}


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
        labeler: Aligner | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> Path:
        """Train a copy of the encoder, and give the folder of the new model."""
        self._write_text(pairs, labeler)
        path = find_recipe("adapt" if labeler is not None else "adapt-self")
        recipe = anchor_paths(load_recipe(path, self._overrides(encoder, labeler)), self.folder)
        prepare_text(recipe, self.folder, self.folder / "text", say=say, n_workers=1)
        return train(recipe, self.folder / "text", self.folder / "run")

    def _write_text(self, pairs: Iterable[WordPair], labeler: Aligner | None) -> None:
        """Write the pairs, their words apart, and the labeler's links."""
        linked = self.folder / "linked"
        linked.mkdir(parents=True, exist_ok=True)
        stream, first = iter(pairs), 0
        with ExitStack() as stack:
            text = stack.enter_context(write_atomically(linked / "bitext.tsv"))
            links = stack.enter_context(write_atomically(linked / "bitext.links"))
            while block := list(islice(stream, BLOCK_PAIRS)):
                text.writelines(f"{' '.join(src)}\t{' '.join(tgt)}\n" for src, tgt in block)
                if labeler is not None:
                    links.writelines(_label(labeler, block, first))
                first += len(block)

    def _overrides(self, encoder: Encoder, labeler: Aligner | None) -> Sequence[str]:
        """Fit the recipe to the model and the device."""
        kind = next(encoder.parameters()).device.type
        kind = kind if kind in STEPS else "cpu"
        settings = AlignSettings.of(encoder)
        where = "layer" if labeler is not None else "label_layer"
        rate, steps = self.learning_rate, self.steps or STEPS[kind]
        return [
            f"model.start={encoder.folder}",
            f"schedule.steps={steps}",
            f"schedule.warmup={min(30, steps // 10)}",
            f"objectives.0.batch_tokens={BATCH_TOKENS[kind]}",
            f"objectives.0.{where}={settings.layer}",
            f"objectives.0.positions={settings.positions}",
            f"data.max_length={min(encoder.max_tokens, 256)}",
            *([] if rate is None else [f"optimizer.learning_rate={rate}"]),
        ]


def _label(labeler: Aligner, block: Sequence[WordPair], first: int) -> list[str]:
    links = labeler.align_block(block, first).links
    return [line + "\n" for line in format_links(links, block, "pharaoh", scores=True)]
