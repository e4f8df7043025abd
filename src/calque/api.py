"""Calque from Python: load a model, embed sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.language_maps import BESIDE, load_maps
from calque.models.loading import EMBEDDED, embedded_models
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
        languages: Sequence[str] | None = None,
        map_from: str | Sequence[str] | None = None,
        normalize: bool = False,
        batch_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return one vector a sentence; see `calque.sentences.embed.embed_sentences`."""
        return embed_sentences(
            self,
            sentences,
            layer=layer,
            raw=raw,
            languages=languages,
            map_from=map_from,
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
    if str(name or EMBEDDED) == EMBEDDED and EMBEDDED not in embedded_models():
        raise InputError(
            f"{EMBEDDED} is not in this installation", fix="give the folder of another model"
        )
    place = choose_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    model = Model.load(name, device=place, dtype=dtype)
    if maps is not None and maps is not False:
        folder = model.folder if maps is True or maps == BESIDE else Path(maps)
        model.maps = load_maps(folder, model.hidden_size, model.n_layers).to(place)
    return model


def choose_device(name: str = "auto") -> torch.device:
    """Choose the GPU if there is one, or the device asked for if it works."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device {name!r} cannot be used: {str(error).splitlines()[0]}",
            fix="try auto, cpu or cuda",
        ) from error
    return device
