"""Dependency arcs and their relations by biaffine scores (Dozat and Manning, 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from calque.models.padding import spread_rows

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
    """All tokens of a batch, and the root as the last row, in the four parts they can play."""

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

    def view(self, states: Float[Tensor, "tokens hidden"]) -> WordViews:
        """Give the parts that tokens, and the root after them, can play."""
        rows = torch.cat([states, self.root[None].to(states.dtype)])
        made = self.dropout(F.leaky_relu(self.project(rows), SLOPE))
        return WordViews(*made.split(self.sizes, dim=1))

    def score_arcs(
        self,
        views: WordViews,
        cells: Int[Tensor, "tokens"],
        is_word: Bool[Tensor, "sentences words"],
    ) -> Float[Tensor, "sentences words heads"]:
        """Score the heads of all words of padded sentences; head 0 is the root.

        `cells` are the places of rows among sentences × words, counted row by row, or their number
        for a row that is no word. The scores are of single precision: half of it would make equals
        of many.
        """
        words = spread_rows(views.arc_words[:-1] @ self.arc + self.arc_bias, cells, is_word.shape)
        heads = spread_rows(views.arc_heads[:-1], cells, is_word.shape)
        root = views.arc_heads[-1].expand(len(is_word), 1, -1)
        wide = torch.promote_types(words.dtype, torch.float32)
        with torch.autocast(words.device.type, enabled=False):
            scores = words.to(wide) @ torch.cat([root, heads], dim=1).to(wide).transpose(1, 2)
        return scores.masked_fill(~F.pad(is_word, (1, 0), value=True)[:, None], IMPOSSIBLE)

    def score_relations(
        self, views: WordViews, heads: Int[Tensor, "tokens"]
    ) -> Float[Tensor, "tokens relations"]:
        """Score the relations of all rows but the root's to their heads, which are rows too."""
        words = F.pad(views.relation_words[:-1], (0, 1), value=1.0)
        # The gradient of an embedding adds up rows that many words share; that of indexing crawls.
        above = F.embedding(heads, F.pad(views.relation_heads, (0, 1), value=1.0))
        weighted = (words @ self.relation.flatten(1)).view(-1, *self.relation.shape[1:])
        scores: Tensor = (weighted @ above[:, :, None])[..., 0]
        return scores
