"""What every objective is: settings, a collator that builds its batches, and a loss.

Sentence pairs laid out for an encoder that reads each sentence alone.

Rows of all processes of a run as one batch, with gradients that find their way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from calque.tokens.ragged import BatchShape, Ragged, add_marks, pack
from calque.tokens.tokenizer import special_ids
from calque.types import TokenBatch

if TYPE_CHECKING:
    import numpy.typing as npt
    from _typeshed import DataclassInstance
    from jaxtyping import Float
    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder
    from calque.types import LossTerms

    Collate = Callable[[tuple[Ragged, ...], torch.Generator], Any]
    IntArray = npt.NDArray[np.int64]


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
        from calque.errors import InputError

        raise InputError(
            "the tokenizer lacks a first, last, padding or mask token",
            fix="use the tokenizer of a masked language model",
        )
    return value


RecordT = TypeVar("RecordT", bound="DataclassInstance")

FIELDS = ("ids", "lengths")
# An odd number without structure: equal sequences have equal hashes, others hardly ever.
HASH_BASE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class BatchOfArrays:
    """A record of arrays that travels to a device as one."""

    def pin_memory(self) -> Self:
        """Move the arrays to page-locked memory, from which copies to a GPU do not wait."""
        return _map_arrays(self, lambda array: array.pin_memory())

    def to(self, device: torch.device | str) -> Self:
        """Copy the arrays to a device, without waiting for the copy."""
        return _map_arrays(self, lambda array: array.to(device, non_blocking=True))


def _map_arrays(record: RecordT, act: Callable[[Tensor], Tensor]) -> RecordT:
    """Do something to every array of a record and of the records in it."""
    changed: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = act(value)
        elif is_dataclass(value) and not isinstance(value, type):
            changed[field.name] = _map_arrays(value, act)
    return replace(record, **changed)


def lay_apart(
    sides: tuple[Ragged, ...], marks: Marks, shape: BatchShape | None, *, own_marks: bool = True
) -> tuple[TokenBatch, IntArray]:
    """Pack both sentences of every pair as sequences of their own, sources before targets.

    Also give the sentence of every token: the number of its pair, for targets plus the number of
    pairs. Padding is of none, twice the number of pairs; so are marks unless they are owned. One
    side alone is packed likewise.
    """
    text = Ragged(*(np.concatenate([getattr(side, name) for side in sides]) for name in FIELDS))
    nobody = len(text.lengths)
    tokens = pack(add_marks(text, marks.first, marks.last), shape=shape, pad_id=marks.pad)
    numbers = np.arange(nobody)
    if own_marks:
        lengths = text.lengths + 2
        owned = Ragged(np.repeat(numbers, lengths), lengths)
    else:
        owned = Ragged(np.repeat(numbers, text.lengths), text.lengths)
        owned = add_marks(owned, nobody, nobody)
    return tokens, pack(owned, shape=shape, pad_id=nobody).ids.numpy()


def hash_sequences(ids: IntArray, lengths: IntArray) -> IntArray:
    """Give equal numbers to equal sequences; none of them may be empty.

    >>> a, b, c = hash_sequences(np.array([7, 8, 8, 7, 7, 8]), np.array([2, 2, 2])).tolist()
    >>> a == c, a == b
    (True, False)
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(ids)) - np.repeat(starts, lengths)
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(int(lengths.max(initial=1)), HASH_BASE))
        mixed = (ids.astype(np.uint64) + np.uint64(1)) * powers[places]
        sums = np.add.reduceat(mixed, starts) if len(lengths) else mixed
        return sums.view(np.int64)


def n_processes() -> int:
    """Count the processes that train together."""
    return distributed.get_world_size() if _is_shared() else 1


def process_number() -> int:
    """Give the number of this process."""
    return distributed.get_rank() if _is_shared() else 0


def total_over_processes(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Sum a number over the processes, without gradient."""
    total = value.detach().clone()
    if n_processes() > 1:
        distributed.all_reduce(total)
    return total


def gather_rows(*columns: Tensor) -> tuple[Tensor, ...]:
    """Put rows of all processes under one another, in the order of the processes.

    All columns of a process have as many rows; processes may have different numbers, and zeros
    fill them up to the most. Gradients of the rows come back summed over the processes.
    """
    return columns if n_processes() == 1 else _gather_columns(columns)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_columns(columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    most = torch.tensor(len(columns[0]), device=columns[0].device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    n_missing = int(most) - len(columns[0])
    return tuple(_Gathered.apply(_fill(one, n_missing)) for one in columns)  # type: ignore[no-untyped-call]


class _Gathered(torch.autograd.Function):
    """Rows of all processes; what each of them wants changed is summed on the way back.

    PyTorch's own differentiable gathering is deprecated.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(n_processes())]
        distributed.all_gather(parts, rows)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        distributed.all_reduce(total)
        n_rows = len(total) // n_processes()
        return total[process_number() * n_rows :][:n_rows]


def _fill(rows: Tensor, n_missing: int) -> Tensor:
    filled = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, n_missing)) if n_missing else rows
    return filled.contiguous()


def _is_shared() -> bool:
    return distributed.is_available() and distributed.is_initialized()
