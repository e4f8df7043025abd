"""Dependency arcs and their relations by biaffine scores (Dozat and Manning, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

ARC_SIZE, RELATION_SIZE = 500, 100
DROPOUT = 0.33
SLOPE = 0.1
# What a head that is no word scores: far below any other, and finite.
IMPOSSIBLE = -1e6


@dataclass(frozen=True, slots=True)
class WordViews:
    """All words of a batch, and the root as the last row, in the four parts they can play."""

    arc_words: Float[Tensor, "rows arc"]
    arc_heads: Float[Tensor, "rows arc"]
    relation_words: Float[Tensor, "rows relation"]
    relation_heads: Float[Tensor, "rows relation"]


class BiaffineHead(nn.Module):
    """Scores every word of a sentence as the head of every other, and the relations of arcs.

    s(d, h) = dᵀUh + uᵀh for arcs, and for each relation [d; 1]ᵀV[h; 1]; d and h are what two small
    networks make of the states of word and head. The root has a state of its own, which is learnt.
    """

    def __init__(
        self,
        hidden_size: int,
        n_relations: int,
        generator: torch.Generator,
        *,
        arc_size: int = ARC_SIZE,
        relation_size: int = RELATION_SIZE,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.sizes = (arc_size, arc_size, relation_size, relation_size)
        self.root = nn.Parameter(torch.randn(hidden_size, generator=generator))
        self.project = nn.Linear(hidden_size, sum(self.sizes))  # one product instead of four
        with torch.no_grad():
            self.project.weight.normal_(0, hidden_size**-0.5, generator=generator)
            self.project.bias.zero_()
        self.arc = nn.Parameter(torch.zeros(arc_size, arc_size))
        self.arc_bias = nn.Parameter(torch.zeros(arc_size))
        wide = relation_size + 1
        self.relation = nn.Parameter(torch.zeros(wide, n_relations, wide))
        self.dropout = nn.Dropout(dropout)

    def view(self, states: Float[Tensor, "words hidden"]) -> WordViews:
        """Give the parts that words, and the root after them, can play."""
        rows = torch.cat([states, self.root[None].to(states.dtype)])
        made = self.dropout(F.leaky_relu(self.project(rows), SLOPE))
        return WordViews(*made.split(self.sizes, dim=1))

    def score_arcs(
        self,
        views: WordViews,
        table: Int[Tensor, "sentences words"],
        is_word: Bool[Tensor, "sentences words"],
    ) -> Float[Tensor, "sentences words heads"]:
        """Score the heads of the words that `table` points to; head 0 is the root.

        Where there is no word, the table may point anywhere. The scores are of single precision:
        half of it would make equals of many.
        """
        root = len(views.arc_heads) - 1
        heads = views.arc_heads[F.pad(table, (1, 0), value=root)]
        words = (views.arc_words @ self.arc + self.arc_bias)[table]
        wide = torch.promote_types(words.dtype, torch.float32)
        with torch.autocast(words.device.type, enabled=False):
            scores = words.to(wide) @ heads.to(wide).transpose(1, 2)
        return scores.masked_fill(~F.pad(is_word, (1, 0), value=True)[:, None], IMPOSSIBLE)

    def score_relations(
        self, views: WordViews, heads: Int[Tensor, "words"]
    ) -> Float[Tensor, "words relations"]:
        """Score the relations of all words to their heads, which are rows of the views."""
        words = F.pad(views.relation_words[:-1], (0, 1), value=1.0)
        above = F.pad(views.relation_heads, (0, 1), value=1.0)[heads]
        weighted = (words @ self.relation.flatten(1)).unflatten(1, self.relation.shape[1:])
        return (weighted @ above[:, :, None])[..., 0]
