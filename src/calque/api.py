"""Calque from Python: load a model, embed sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from calque.models.encoder import Encoder
from calque.models.inference import load_encoder
from calque.sentences.embed import embed_sentences

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Model(Encoder):
    """An encoder with the tools at hand; `folder` is where its plain Hugging Face files lie."""

    def embed(
        self,
        sentences: Iterable[str],
        *,
        layer: int | None = None,
        raw: bool = False,
        language: str | Sequence[str] | None = None,
        center_by: Sequence[str] | None = None,
        normalize: bool = False,
        batch_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return one vector per sentence; see `calque.sentences.embed.embed_sentences`."""
        return embed_sentences(
            self,
            sentences,
            layer=layer,
            raw=raw,
            language=language,
            center_by=center_by,
            normalize=normalize,
            batch_tokens=batch_tokens,
        )


def load(
    name: str | Path | None = None,
    device: str = "auto",
    *,
    maps: bool | str | Path | None = None,
) -> Model:
    """Load a folder, a hub name or, without a name, the embedded model, ready to use.

    It runs in bfloat16 on CUDA and in single precision elsewhere. With `maps`, its states are
    mapped by language (see `LanguageMaps`): True for the maps in its own folder, or another folder.
    """
    return load_encoder(name, device, maps=maps, cls=Model)
