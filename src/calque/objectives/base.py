"""The interface of objectives, their batches, and losses over the batches of all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from calque.tokens.ragged import BatchShape, Ragged
from calque.tokens.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from jaxtyping import Float

    from calque.models.encoder import Encoder
    from calque.types import LossTerms

    Collate = Callable[[tuple[Ragged, ...], torch.Generator], Any]

RecordT = TypeVar("RecordT", bound="DataclassInstance")

# The index of the links among the arrays of an example, and how many batches are searched for one.
LINKS, N_CHECKED_BATCHES = 4, 16


class ObjectiveSettings(BaseModel):
    """Settings that all objectives have in a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    kind: str
    weight: float = Field(1.0, ge=0)
    # Tokens per micro-batch, including special tokens and padding.
    batch_tokens: int = Field(16_384, gt=0, le=1 << 20)
    # Maximum number of sentences or pairs per micro-batch.
    batch_examples: int | None = Field(None, gt=0)
    # "raw" excludes bitext with links, whose words are separated by spaces.
    text: Literal["any", "raw"] = "any"
    # Longer examples are left out. Default: data.max_length.
    max_length: int | None = Field(None, gt=8)

    # Keys that older recipes do not have. They are not written while they have their default, so
    # that older recipes keep their fingerprint.
    newer_keys: ClassVar[tuple[str, ...]] = ("batch_examples", "text", "max_length")

    @model_serializer(mode="wrap")
    def _write(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        content: dict[str, Any] = write(self)
        known = type(self).model_fields
        return {
            key: value
            for key, value in content.items()
            if key not in self.newer_keys or value != known[key].default
        }


class Objective(nn.Module):
    """One training objective: computes a loss from a batch and the model.

    The model is an argument of every call and is never stored. Weights of the objective itself,
    such as a pointer network, are ordinary parameters of this module.
    """

    n_sides: ClassVar[int]
    # Special tokens that are added to an example, unless `count_special_tokens` computes them.
    n_special_tokens: ClassVar[int]
    # Whether the sentences of a pair are separate sequences, each as long as an example may be.
    encodes_separately: ClassVar[bool] = False
    # Whether examples have links, and the number of their language pair in `start`.
    needs_links: ClassVar[bool] = False
    needs_languages: ClassVar[bool] = False
    # Whether examples are words with static vectors.
    needs_vectors: ClassVar[bool] = False
    # Whether all weights of the encoder get a gradient, including the language-modeling head.
    uses_all_weights: ClassVar[bool] = True

    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    @property
    def pairs_neighbors(self) -> bool:
        """Whether a pair is a line of plain text and the line before it instead of bitext."""
        return False

    def count_special_tokens(self, special_tokens: SpecialTokens) -> int:
        """Return how many special tokens are added to an example."""
        return self.n_special_tokens

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return the function with which data-loading workers build batches."""
        raise NotImplementedError

    def add_weights(self, hidden_size: int, generator: torch.Generator) -> None:
        """Create the objective's own weights, if any, for an encoder of this hidden size."""

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Prepare for training with the initial encoder, which is already on its device.

        `languages` are those of the examples ("de", or "en-de" for pairs), in the order of their
        numbers. When a run is resumed, this is called again with the initial encoder.
        """

    def fit(
        self,
        encoder: Encoder,
        special_tokens: SpecialTokens,
        examples: Iterator[tuple[Ragged, ...]],
    ) -> None:
        """Compute what depends on the first training examples; called after every `start`."""

    def find_problem(
        self,
        encoder: Encoder,
        special_tokens: SpecialTokens,
        examples: Iterator[tuple[Ragged, ...]],
    ) -> str | None:
        """Return a warning about this encoder and these examples before training, or None.

        By default it reports missing links: without links the loss is 0, which looks like success.
        """
        has_links = (len(arrays[LINKS].ids) > 0 for arrays in islice(examples, N_CHECKED_BATCHES))
        if not self.needs_links or any(has_links):
            return None
        return "the first pairs have no links, so there is nothing to learn (see `calque links`)"

    def prepare(self, encoder: Encoder, batch: Any) -> Any:
        """Add what the current encoder computes for a micro-batch without gradients.

        This is called before `forward` and is not part of the compiled step.
        """
        return batch

    def forward(self, encoder: Encoder, batch: Any) -> LossTerms:
        """Return the loss of one micro-batch."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update state after every optimizer step, identically in all processes."""

    def after_validation(self) -> None:
        """Update state from the batches seen in evaluation mode since the last validation."""

    def save_files(self, encoder: Encoder, folder: Path) -> None:
        """Write files of this objective into the folder of the finished model."""


def choose_layer(encoder: Encoder, layer: int | None, depth: float = 1.0) -> int:
    """Return the number of a layer; by default the one at a fraction `depth` of the layers."""
    return round(depth * encoder.n_layers) if layer is None else encoder.check_layer(layer)


@contextmanager
def evaluation_mode(encoder: Encoder) -> Iterator[None]:
    """Switch dropout off, and restore the previous mode afterwards."""
    was_training = encoder.training
    encoder.eval()
    try:
        yield
    finally:
        encoder.train(was_training)


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """Base class of batches: a record of tensors and of other records."""

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory, for asynchronous copies to a GPU."""
        return _map_tensors(self, lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device | str) -> Self:
        """Return the batch on a device; the copy is asynchronous."""
        return _map_tensors(self, lambda tensor: tensor.to(device, non_blocking=True))


def _map_tensors(record: RecordT, function: Callable[[Tensor], Tensor]) -> RecordT:
    """Apply a function to every tensor of a record and of the records in it."""
    changed: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            changed[field.name] = function(value)
        elif is_dataclass(value) and not isinstance(value, type):
            changed[field.name] = _map_tensors(value, function)
    return replace(record, **changed)


def n_processes() -> int:
    """Return the number of processes that train together."""
    return distributed.get_world_size() if _is_distributed() else 1


def process_number() -> int:
    """Return the number of this process."""
    return distributed.get_rank() if _is_distributed() else 0


def _is_distributed() -> bool:
    return distributed.is_available() and distributed.is_initialized()


def total_over_processes(value: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return the sum of a number over the processes, without gradient."""
    total = value.detach().clone()
    if n_processes() > 1:
        distributed.all_reduce(total)
    return total


def gather_rows(*columns: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of all processes, concatenated in the order of the processes.

    All columns of a process have the same number of rows. Processes with fewer rows than others are
    padded with zeros. Gradients of the rows are summed over the processes.
    """
    return columns if n_processes() == 1 else _gather_columns(columns)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _gather_columns(columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    most = torch.tensor(len(columns[0]), device=columns[0].device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    n_missing = int(most) - len(columns[0])
    padded = (F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, n_missing)) for rows in columns)
    return tuple(_GatherRows.apply(rows.contiguous()) for rows in padded)  # type: ignore[no-untyped-call]


class _GatherRows(torch.autograd.Function):
    """Differentiable all-gather: PyTorch's own is deprecated."""

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
