"""A dependency parser: an encoder, biaffine scores on top, and the best tree of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from calque.models.biaffine import IMPOSSIBLE, BiaffineHead, WordViews
from calque.models.heads import mean_cross_entropy
from calque.models.trees import decode_trees
from calque.tasks.finetuning import predict
from calque.tasks.head_task import HeadModel, place_on
from calque.tasks.precision import working_precision

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.tasks.parse_examples import ParseBatch, ParseExamples
    from calque.tasks.task_settings import TaskSettings

    IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Parses:
    """Heads and relations of all words, sentence after sentence; heads count from 1, 0 is the root.

    In `n_searched` sentences the best heads of the words made no tree of one root.
    """

    heads: IntArray
    relations: IntArray
    n_searched: int


class Parser(HeadModel):
    """Learns heads, and relations given the right heads; predicts the best tree, then relations.

    `root` is the number of the relation that the root's word has, and no other.
    """

    def __init__(
        self,
        encoder: Encoder,
        n_relations: int,
        root: int,
        settings: TaskSettings,
        generator: torch.Generator,
    ) -> None:
        super().__init__(encoder, settings, generator)
        self.head, self.root = BiaffineHead(encoder.hidden_size, n_relations, generator), root
        place_on(self, encoder)

    def score(self, batch: ParseBatch) -> tuple[WordViews, Float[Tensor, "rows words heads"]]:
        """Give the parts that words can play, and the scores of all heads."""
        views: WordViews = self.head.view(self.read(batch.tokens))
        return views, self.head.score_arcs(views, batch.cells, batch.is_word)

    def forward(self, batch: ParseBatch) -> Float[Tensor, ""]:
        """Give the mean loss of heads plus that of relations."""
        views, arcs = self.score(batch)
        relations = self.head.score_relations(views, batch.head_rows)
        on_heads = mean_cross_entropy(arcs.flatten(0, 1), batch.heads.flatten())
        return on_heads + mean_cross_entropy(relations, batch.relations)

    def parse(self, examples: ParseExamples, settings: TaskSettings) -> Parses:
        """Find the tree of every sentence."""
        first_words = np.cumsum(examples.n_words) - examples.n_words
        heads = np.zeros(len(examples.heads), dtype=np.int64)
        relations = np.zeros_like(heads)
        n_searched = 0
        # All is queued on the device before the first scores are waited for.
        for rows, batch, (views, arcs) in list(predict(self, examples, settings, self.score)):
            n_words = examples.n_words[rows]
            is_word = np.arange(arcs.shape[1]) < n_words[:, None]
            found, n_here = decode_trees(arcs.cpu().numpy(), n_words)
            n_searched += n_here
            words = (first_words[rows][:, None] + np.arange(arcs.shape[1]))[is_word]
            heads[words] = found[is_word]
            begins = np.repeat(np.cumsum(n_words) - n_words, n_words)
            above = torch.from_numpy(np.where(heads[words] > 0, begins + heads[words] - 1, -1))
            with torch.no_grad(), working_precision(self, settings):
                kinds = self._relate(views, batch.places[: len(words)], above)
            relations[words] = kinds.cpu().numpy()
        return Parses(heads, relations, n_searched)

    def _relate(self, views: WordViews, places: Tensor, above: Tensor) -> Tensor:
        """Choose the relations of words to the words above them; the root's is for its word alone.

        `above` counts words, −1 being the root.
        """
        above = above.to(places.device)
        n_tokens = len(views.arc_heads) - 1
        head_rows = places.new_full((n_tokens,), n_tokens)
        head_rows[places] = torch.where(above < 0, n_tokens, places[above.clamp(min=0)])
        scores = self.head.score_relations(views, head_rows)[places].float()
        scores[:, self.root] = torch.where(above < 0, -IMPOSSIBLE, IMPOSSIBLE)
        return scores.argmax(dim=1)
