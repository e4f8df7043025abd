"""models.inference."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.language_maps import BESIDE, load_maps
from calque.models.loading import EMBEDDED, embedded_models

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.language_maps import LanguageMaps

    Vectors = npt.NDArray[np.float32]

EncoderT = TypeVar("EncoderT", bound=Encoder)
BatchT = TypeVar("BatchT")


def load_encoder(
    name: str | Path | EncoderT | None = None,
    device: str = "auto",
    *,
    maps: bool | str | Path | None = None,
    cls: type[EncoderT] = Encoder,  # type: ignore[assignment]
) -> EncoderT:
    """Load an encoder for inference: in bfloat16 on CUDA, in single precision elsewhere.

    Args:
        name: Folder, hub name or `calque-mini`, which is also the default. An encoder that is
            already loaded is returned as it is.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        maps: True to load the linear maps of languages in the model's folder, or another folder.
        cls: Class of the returned object.
    """
    if isinstance(name, Encoder):
        return name
    if str(name or EMBEDDED) == EMBEDDED and EMBEDDED not in embedded_models():
        raise InputError(
            f"{EMBEDDED} is not in this installation", fix="give the folder of another model"
        )
    torch_device = choose_device(device)
    dtype = torch.bfloat16 if torch_device.type == "cuda" else torch.float32
    encoder = cls.load(name, device=torch_device, dtype=dtype)
    if maps is not None and maps is not False:
        folder = encoder.folder if maps is True or maps == BESIDE else Path(maps)
        encoder.maps = load_maps(folder, encoder.hidden_size, encoder.n_layers).to(torch_device)
    return encoder


# On a CPU a batch should fit one core's cache, on a GPU fill the machine.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 16}


def check_maps(encoder: Encoder, map_from: object) -> LanguageMaps | None:
    """Give the maps to apply; to be silent about the language where there are maps is an error."""
    if encoder.maps is None and map_from is not None:
        fix = "load it with maps=True, or the folder of other maps"
        raise InputError("this model was loaded without maps", fix=fix)
    if encoder.maps is not None and map_from is None:
        raise InputError(
            "this model maps by language, and is not told the language",
            fix=f"give map_from, {encoder.maps.pivot!r} for what stays, or load it without maps",
        )
    return encoder.maps


def cut_blocks(sentences: Iterable[str], most: int, most_characters: int) -> Iterator[list[str]]:
    """Cut a stream of lines into blocks of bounded size."""
    block: list[str] = []
    n_characters = 0
    for sentence in sentences:
        block.append(sentence)
        n_characters += len(sentence)
        if len(block) == most or n_characters >= most_characters:
            yield block
            block, n_characters = [], 0
    if block:
        yield block


def run_batches(work: Callable[[BatchT], None], batches: Sequence[BatchT], n_workers: int) -> None:
    """Do the work for every batch, one core a batch.

    Several cores on one batch would wait for each other after every operation: that took twice
    the CPU time on two busy cores.
    """
    if n_workers == 1:
        for batch in batches:
            work(batch)
        return
    pool = ThreadPoolExecutor(n_workers, initializer=partial(torch.set_num_threads, 1))
    try:
        deque(pool.map(work, batches), maxlen=0)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(n_workers)  # for threads yet to start; this one never changed


def device_of(encoder: Encoder) -> torch.device:
    """Tell where an encoder is."""
    return next(encoder.parameters()).device
