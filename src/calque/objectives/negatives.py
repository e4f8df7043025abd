"""A queue of earlier features: more negatives than one batch has."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

# The key of what equals nothing: places, the keys that do not last, count from 0.
NO_KEY = -1


class Rows(NamedTuple):
    """Pairs of features of unit length, the keys of what they stand for, and which are real."""

    src: Float[Tensor, "pairs features"]
    tgt: Float[Tensor, "pairs features"]
    src_keys: Int[Tensor, "pairs"]
    tgt_keys: Int[Tensor, "pairs"]
    real: Bool[Tensor, "pairs"]

    def without_keys(self) -> Rows:
        """Forget what the pairs stand for: they equal no others."""
        nothing = torch.full_like(self.src_keys, NO_KEY)
        return self._replace(src_keys=nothing, tgt_keys=nothing)


class NegativeQueue(nn.Module):
    """The features of the last pairs, the newest first, without gradients.

    Paper: a memory bank is what Wu and Dredze (2020, section 4) leave to others; this is the
    queue of He et al. (2019) without a second encoder, so its rows are a few steps old.
    """

    src: Tensor
    tgt: Tensor
    src_keys: Tensor
    tgt_keys: Tensor
    real: Tensor

    def __init__(self, n_pairs: int, n_features: int) -> None:
        super().__init__()
        for name in ("src", "tgt"):
            self.register_buffer(name, torch.zeros(n_pairs, n_features))
            self.register_buffer(f"{name}_keys", torch.zeros(n_pairs, dtype=torch.int64))
        self.register_buffer("real", torch.zeros(n_pairs, dtype=torch.bool))

    def rows(self) -> Rows:
        """Give what is in the queue."""
        # Copies: the buffers change before the gradients are computed.
        return Rows(*(getattr(self, name).clone() for name in Rows._fields))

    @torch.no_grad()
    def push(self, new: Rows) -> None:
        """Put pairs in, those that are not real excepted; the oldest fall out."""
        real = torch.cat([new.real, self.real])
        kept = torch.argsort(~real, stable=True)[: len(self.real)]
        for name in Rows._fields:
            both = torch.cat([getattr(new, name), getattr(self, name)])
            getattr(self, name).copy_(both[kept])
