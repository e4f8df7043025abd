"""What a task with a head gives the one loop of fine-tuning: examples in, a loss out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import torch
from torch import nn

from calque.evaluation.finetuning.plug_in import PluggedTokens, check_plug, read_plugged
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

# Rows of this many tokens still attend as small dense matrices, which is fastest for sentences.
LONGEST = 256


class DeviceBatch(Protocol):
    """Examples laid out as tensors: a frozen dataclass that can be copied to a device.

    To be replayed on a GPU, all its tensors have sizes that follow from the `BatchShape` alone.
    """

    def to(self, device: torch.device | str) -> Self:
        """Copy the tensors to a device, without waiting for the copy."""
        ...


B = TypeVar("B", bound=DeviceBatch)
B_co = TypeVar("B_co", bound=DeviceBatch, covariant=True)


class Examples(Protocol[B_co]):
    """Encoded examples of which any can be laid out as a batch.

    `lengths` are their tokens in the encoder, special ones included.
    """

    @property
    def lengths(self) -> IntArray:
        """Give the number of tokens of every example."""
        ...

    def collate(self, rows: IntArray, shape: BatchShape | None = None) -> B_co:
        """Lay out some examples, without padding or up to a fixed shape."""
        ...


class HeadModel(nn.Module):
    """An encoder with something on top: `encoder` is the body, all other weights are the head.

    Subclasses compute the mean loss of a batch in `forward`, without waiting for the device, and
    predict in methods of their own. In the setting "features" the encoder is frozen and `read`
    gives a learnt mixture of its layers instead of the last.
    """

    # Whether the loss may be recorded as a CUDA graph: no waiting, no sizes that follow from data.
    replays = True
    # Whether its examples can be read beside their translations, by VECO.
    can_plug = False

    def __init__(
        self, encoder: Encoder, settings: TaskSettings, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.encoder, self.freezes = encoder, settings.freezes
        self.plugs = settings.plug == "in"
        if self.plugs:
            check_plug(encoder, can_plug=self.can_plug)
        encoder.requires_grad_(not self.freezes)
        if settings.body_dropout is not None:
            for module in encoder.modules():
                if isinstance(module, nn.Dropout):
                    module.p = settings.body_dropout
        self.reader: LastLayer | LayerMixture = LastLayer()
        if self.freezes:
            self.reader = LayerMixture(
                encoder.n_layers,
                encoder.hidden_size,
                extra_layers=settings.extra_layers,
                dropout=settings.dropout,
                generator=generator,
            )
        self.dropout = nn.Dropout(settings.dropout)

    @property
    def width(self) -> int:
        """Give the number of features of a token."""
        return self.encoder.hidden_size * (2 if self.plugs else 1)

    def read(self, tokens: TokenBatch | PluggedTokens) -> Float[Tensor, "tokens hidden"]:
        """Give the states of all tokens, some features dropped while training."""
        if isinstance(tokens, PluggedTokens):
            plugged: Tensor = self.dropout(read_plugged(self.encoder, tokens))
            return plugged
        states: Tensor = self.dropout(self.reader(self.encoder, tokens))
        return states

    def forward(self, batch: Any) -> Float[Tensor, ""]:
        """Give the mean loss of a batch."""
        raise NotImplementedError

    def train(self, mode: bool = True) -> Self:
        """Switch dropout on or off; a frozen encoder has none."""
        super().train(mode)
        if self.freezes:
            self.encoder.eval()
        return self


def longest_sequence(encoder: Encoder, settings: TaskSettings) -> int:
    """Give the most tokens that a sequence may have, special ones included."""
    asked = settings.max_length or LONGEST
    return min(asked, encoder.max_tokens)


def place_on(model: nn.Module, encoder: Encoder) -> None:
    """Move a head to where its encoder is."""
    model.to(next(encoder.parameters()).device)
