"""What every objective is: settings, a collator that builds its batches, and a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
)
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
    # Sentences or pairs of one micro-batch, unless it has `batch_tokens` before.
    batch_examples: int | None = Field(None, gt=0)
    # "raw": without bitext that has links, whose words are set apart by spaces.
    text: Literal["any", "raw"] = "any"

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what is as ever: a recipe older than these keys keeps its fingerprint."""
        content: dict[str, Any] = write(self)
        usual = {"batch_examples": None, "text": "any"}
        return {k: v for k, v in content.items() if k not in usual or v != usual[k]}


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


# Where the links are among the arrays of an example, and how many batches are searched for one.
LINKS, N_LOOKED_AT = 4, 16


class Objective(nn.Module):
    """One idea of one paper: turns a batch and the model into a loss.

    It receives the model at every call and never keeps it. Weights of its own (a pointer
    network, say) are ordinary parameters of this module.
    """

    n_sides: ClassVar[int]
    # Whether the sides of a pair are read apart, so that each of them may be as long as an example.
    reads_apart: ClassVar[bool] = False
    # Whether examples come with links, and with the number of their language pair in `start`.
    needs_links: ClassVar[bool] = False
    needs_languages: ClassVar[bool] = False
    # Whether examples are words that come with their static vectors, and nothing else is one.
    needs_vectors: ClassVar[bool] = False
    # Whether every weight of the encoder gets a gradient, the language-modelling head's included.
    uses_all_weights: ClassVar[bool] = True

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    @property
    def pairs_neighbors(self) -> bool:
        """Whether a pair is a line of plain text after the line before it, and not bitext."""
        return False

    def n_marks(self, marks: Marks) -> int:
        """Count the special tokens an example gains."""
        raise NotImplementedError

    def make_collate(self, marks: Marks, shape: BatchShape | None) -> Collate:
        """Return the function that loading workers build batches with."""
        raise NotImplementedError

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Make the weights of its own, if it has any, for an encoder of that width."""

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Take what is needed of the encoder before it is trained, on the device where it is.

        `languages` are those of the examples, in the order of their numbers: "de", or "en-de".
        Called again when a run goes on, with the encoder that the run began with.
        """

    def fit(self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]) -> None:
        """Take what is needed of the first training examples; this follows every `start`."""

    def find_fault(
        self, encoder: Encoder, marks: Marks, examples: Iterator[tuple[Ragged, ...]]
    ) -> str | None:
        """Say, before a run begins, what is wrong with training this encoder on such examples.

        Without links their losses are 0, which looks like success.
        """
        linked = (len(arrays[LINKS].ids) > 0 for arrays in islice(examples, N_LOOKED_AT))
        if not self.needs_links or any(linked):
            return None
        return "the first pairs have no links, and nothing to learn from (see `calque links`)"

    def prepare(self, encoder: Encoder, batch: Any) -> Any:
        """Complete a micro-batch by what the encoder as it is now says of it, without gradients.

        This comes before `forward`, and is not part of what is compiled for that.
        """
        return batch

    def forward(self, encoder: Encoder, batch: Any) -> LossTerms:
        """Compute the loss of one micro-batch."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Do what follows every step of the optimizer, the same in all processes."""

    def after_validation(self) -> None:
        """Draw conclusions from the batches seen in evaluation mode since the last time."""

    def save_beside(self, encoder: Encoder, folder: Path) -> None:
        """Write into the finished model's folder what of this objective is to be kept."""


def _id(value: int | None) -> int:
    if value is None:
        from calque.types import InputError

        raise InputError(
            "the tokenizer lacks a first, last, padding or mask token",
            fix="use the tokenizer of a masked language model",
        )
    return value
