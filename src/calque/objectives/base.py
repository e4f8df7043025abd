"""What every objective is: settings, a collator that builds its batches, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from calque.text.batching import BatchShape
from calque.text.tokenization import special_ids

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder
    from calque.text.batching import Ragged
    from calque.types import LossTerms

    Collate = Callable[[tuple[Ragged, ...], torch.Generator], Any]


class ObjectiveSettings(BaseModel):
    """What the recipe says of every objective."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: str
    weight: float = Field(1.0, ge=0)
    # Tokens of one micro-batch, marks and padding included.
    batch_tokens: int = Field(16_384, gt=0)


@dataclass(frozen=True, slots=True)
class Marks:
    """The special tokens around sentences, read off the tokenizer."""

    first: int
    last: int
    between: int
    pad: int
    mask: int
    special: tuple[int, ...]
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Self:
        """Read `<s>`, `</s>` and their like; XLM-R puts two marks between a pair, BERT one."""
        n_pair_marks = tokenizer.num_special_tokens_to_add(pair=True)
        return cls(
            first=_id(tokenizer.cls_token_id),
            last=_id(tokenizer.sep_token_id),
            between=n_pair_marks - 2,
            pad=_id(tokenizer.pad_token_id),
            mask=_id(tokenizer.mask_token_id),
            special=tuple(special_ids(tokenizer)),
            vocab_size=len(tokenizer),
        )


class Objective(nn.Module):
    """One idea of one paper: turns a batch and the model into a loss.

    It receives the model at every call and never keeps it. Weights of its own (a pointer
    network, say) are ordinary parameters of this module.
    """

    n_sides: ClassVar[int]

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def n_marks(self, marks: Marks) -> int:
        """Count the special tokens an example gains."""
        raise NotImplementedError

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Return the function that loading workers build batches with."""
        raise NotImplementedError

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Make the weights of its own, if it has any, for an encoder of that width."""

    def find_fault(
        self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]
    ) -> str | None:
        """Say, before a run begins, what is wrong with training this encoder on such examples."""
        return None

    def prepare(self, encoder: Encoder, batch: Any) -> Any:
        """Complete a micro-batch by what the encoder as it is now says of it, without gradients.

        This comes before `forward`, and is not part of what is compiled for that.
        """
        return batch

    def forward(self, encoder: Encoder, batch: Any) -> LossTerms:
        """Compute the loss of one micro-batch."""
        raise NotImplementedError


def _id(value: int | None) -> int:
    if value is None:
        from calque.types import InputError

        raise InputError(
            "the tokenizer lacks a first, last, padding or mask token",
            fix="use the tokenizer of a masked language model",
        )
    return value
