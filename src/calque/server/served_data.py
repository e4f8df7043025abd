"""What the server was started with: models, sentences and folders."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from calque.errors import InputError
from calque.server.batching import BatchQueue
from calque.server.loaded_model import LoadedModel, LoadedTranslator
from calque.server.sentence_search import SentenceIndex
from calque.server.study import StudyFolder
from calque.server.training_runs import TrainingRuns
from calque.server.word_lookup import WordLookup

# Time that a request may wait for the model.
COMPUTE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ServedData:
    """Models and folders of a server; what is None is not offered.

    `projecting` is held by the one request that may compute a slow projection.
    """

    models: dict[str, LoadedModel]
    sentences: SentenceIndex
    words: WordLookup | None = None
    study: StudyFolder | None = None
    runs: TrainingRuns | None = None
    translator: LoadedTranslator | None = None
    queue: BatchQueue = field(default_factory=BatchQueue)
    projecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def default_model(self) -> LoadedModel:
        """The first model."""
        return next(iter(self.models.values()))

    @property
    def views(self) -> list[str]:
        """The views of the page that can be shown."""
        optional = {
            "dictionary": self.words,
            "study": self.study,
            "runs": self.runs,
            "translate": self.translator,
        }
        there = [name for name, data in optional.items() if data is not None]
        return ["align", "search", "space", "attention", *there]

    def find_model(self, name: str | None) -> LoadedModel:
        """Return the model with a name, by default the first."""
        if name is None:
            return self.default_model
        if name not in self.models:
            fix = f"choose from: {', '.join(self.models)}"
            raise InputError(f"the server has no model {name!r}", fix=fix)
        return self.models[name]
