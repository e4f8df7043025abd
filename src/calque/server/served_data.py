"""What the server was started with: models, sentences and folders."""

from __future__ import annotations

from dataclasses import dataclass, field

from calque.errors import InputError
from calque.server.batching import BatchQueue
from calque.server.loaded_model import LoadedModel, LoadedTranslator
from calque.server.sentence_search import SentenceIndex
from calque.server.study import StudyFolder
from calque.server.training_runs import TrainingRuns
from calque.server.word_lookup import WordLookup

# Time that a request may wait for the model, and for t-SNE or UMAP after that. Both together are
# shorter than the time for an answer, so that a request is answered before it is cut off.
COMPUTE_SECONDS = 60.0
PROJECTION_SECONDS = 45.0
MAX_PROJECTIONS = 8  # that wait


@dataclass(frozen=True, slots=True)
class ServedData:
    """Models and folders of a server; what is None is not offered.

    `queue` computes with the models, `projections` computes t-SNE and UMAP, one at a time.
    """

    models: dict[str, LoadedModel]
    sentences: SentenceIndex
    words: WordLookup | None = None
    study: StudyFolder | None = None
    runs: TrainingRuns | None = None
    translator: LoadedTranslator | None = None
    queue: BatchQueue = field(default_factory=BatchQueue)
    projections: BatchQueue = field(
        default_factory=lambda: BatchQueue(
            wait_seconds=0, max_jobs=MAX_PROJECTIONS, max_batch_size=1
        )
    )

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

    def close(self) -> None:
        """Reject the requests that wait for a model or a projection."""
        self.queue.close()
        self.projections.close()

    def find_model(self, name: str | None) -> LoadedModel:
        """Return the model with a name, by default the first."""
        if name is None:
            return self.default_model
        if name not in self.models:
            fix = f"choose from: {', '.join(self.models)}"
            raise InputError(f"the server has no model {name!r}", fix=fix)
        return self.models[name]
