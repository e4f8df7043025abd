"""An encoder with a task head, and the examples that the fine-tuning loop reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import nn

from calque.errors import InputError
from calque.evaluation.finetuning.plug_in import PlugInTokens, check_plug_in, encode_plug_in
from calque.models.heads import LastLayer, LayerMixture

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder
    from calque.tokens.ragged import BatchShape
    from calque.types import TokenBatch

    IntArray = npt.NDArray[np.int64]

# Rows of this length still use small dense attention matrices, which is fastest for sentences.
DEFAULT_MAX_LENGTH = 256


class DeviceBatch(Protocol):
    """A batch of tensors: a frozen dataclass that can be copied to a device.

    For CUDA graphs, the sizes of all tensors must depend on the `BatchShape` only.
    """

    def to(self, device: torch.device | str) -> Self:
        """Return a copy on a device, without waiting for the copy."""
        ...


BatchT = TypeVar("BatchT", bound=DeviceBatch)
BatchT_co = TypeVar("BatchT_co", bound=DeviceBatch, covariant=True)


class Examples(Protocol[BatchT_co]):
    """Encoded examples that can be collated into batches.

    `lengths` are their numbers of tokens, special tokens included.
    """

    @property
    def lengths(self) -> IntArray:
        """The number of tokens of every example."""
        ...

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> BatchT_co:
        """Return a batch of some examples, without padding or padded to a fixed shape."""
        ...


class HeadModel(nn.Module):
    """An encoder with a task head: `encoder` is the body, all other weights are the head.

    Subclasses compute the mean loss of a batch in `forward`, without waiting for the device, and
    predict in methods of their own. In the setting "features" the encoder is frozen, and `read`
    returns a learned mixture of its layers instead of the last layer. Only then may the encoder
    have linear maps, which are those of `language`: the source language until the model is tested.
    """

    # Whether the loss can be recorded as a CUDA graph: no waiting, no sizes that depend on data.
    can_replay = True
    # Whether the examples can be read together with their translations (VECO).
    supports_plug_in = False

    def __init__(
        self, encoder: Encoder, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.encoder, self.is_frozen = encoder, settings.is_frozen
        self.language = settings.source
        if encoder.maps is not None and not self.is_frozen:
            fix = "set setting=features, or load the model without maps"
            raise InputError("linear maps fit a frozen encoder only", fix=fix)
        self.uses_plug_in = settings.plug == "in"
        if self.uses_plug_in:
            check_plug_in(encoder, supports_plug_in=self.supports_plug_in)
        encoder.requires_grad_(not self.is_frozen)
        if settings.body_dropout is not None:
            for module in encoder.modules():
                if isinstance(module, nn.Dropout):
                    module.p = settings.body_dropout
        self.reader: LastLayer | LayerMixture = LastLayer()
        if self.is_frozen:
            self.reader = LayerMixture(
                encoder,
                extra_layers=settings.extra_layers,
                dropout=settings.dropout,
                generator=generator,
            )
        self.dropout = nn.Dropout(settings.dropout)

    @property
    def width(self) -> int:
        """The number of features of a token."""
        return self.encoder.hidden_size * (2 if self.uses_plug_in else 1)

    def read(self, tokens: TokenBatch | PlugInTokens) -> Float[Tensor, "tokens hidden"]:
        """Return the states of all tokens, with dropout during training."""
        if isinstance(tokens, PlugInTokens):
            plugged: Tensor = self.dropout(encode_plug_in(self.encoder, tokens))
            return plugged
        states: Tensor = self.dropout(self.reader(self.encoder, tokens, self.language))
        return states

    def forward(self, batch: Any) -> Float[Tensor, ""]:
        """Return the mean loss of a batch."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """Switch dropout on or off; a frozen encoder stays in evaluation mode."""
        super().train(mode)
        if self.is_frozen:
            self.encoder.eval()
        return self


def max_sequence_length(encoder: Encoder, settings: TaskSettings) -> int:
    """Return the maximum number of tokens of a sequence, special tokens included."""
    asked = settings.max_length or DEFAULT_MAX_LENGTH
    return min(asked, encoder.max_tokens)


def move_to_device_of(model: nn.Module, encoder: Encoder) -> None:
    """Move a model to the device of its encoder."""
    model.to(next(encoder.parameters()).device)
