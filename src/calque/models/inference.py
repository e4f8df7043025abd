"""Loading and running encoders for inference: devices, blocks of input, batches on all cores."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from calque.errors import InputError, check_choice, first_line
from calque.models.encoder import Encoder
from calque.models.language_maps import OWN_FOLDER, load_maps

if TYPE_CHECKING:
    import numpy.typing as npt

    from calque.models.language_maps import LanguageMaps

    Vectors = npt.NDArray[np.float32]

EncoderT = TypeVar("EncoderT", bound=Encoder)
BatchT = TypeVar("BatchT")
PRECISIONS = ("auto", "fp32", "bf16")


def load_encoder(
    name: str | Path | EncoderT | None = None,
    device: str = "auto",
    *,
    maps: bool | str | Path | None = None,
    precision: str = "auto",
    cls: type[EncoderT] = Encoder,  # type: ignore[assignment]
) -> EncoderT:
    """Load an encoder for inference.

    Args:
        name: Folder, hub name or `calque-mini`, which is also the default. An encoder that is
            already loaded is returned as it is.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        maps: True to load the linear maps of languages in the model's folder, or another folder.
        precision: `fp32`, `bf16`, or `auto`: bf16 on CUDA, fp32 elsewhere.
        cls: Class of the returned object.
    """
    if isinstance(name, Encoder):
        return name
    torch_device = choose_device(device)
    encoder = cls.load(name, device=torch_device, dtype=choose_dtype(precision, torch_device))
    if maps is not None and maps is not False:
        folder = encoder.folder if maps is True or maps == OWN_FOLDER else Path(maps)
        encoder.maps = load_maps(folder, encoder.hidden_size, encoder.n_layers).to(torch_device)
    return encoder


# On a CPU a batch should fit one core's cache, on a GPU fill the machine.
BATCH_TOKENS = {"cpu": 1024, "cuda": 1 << 16}


def check_maps(encoder: Encoder, language: object) -> LanguageMaps | None:
    """Return the maps to apply; raise InputError unless both maps and a language are given."""
    if encoder.maps is None and language is not None:
        raise InputError(
            "this model was loaded without maps",
            fix="load it with maps=True, or with the folder of other maps",
        )
    if encoder.maps is not None and language is None:
        raise InputError(
            "this model maps vectors by language, but the language is not given",
            fix=f"name the language, {encoder.maps.pivot!r} for no map, or load it without maps",
        )
    return encoder.maps


def cut_blocks(
    sentences: Iterable[str], max_lines: int, max_characters: int
) -> Iterator[list[str]]:
    """Split a stream of lines into blocks of bounded size."""
    block: list[str] = []
    n_characters = 0
    for sentence in sentences:
        block.append(sentence)
        n_characters += len(sentence)
        if len(block) == max_lines or n_characters >= max_characters:
            yield block
            block, n_characters = [], 0
    if block:
        yield block


def run_batches(work: Callable[[BatchT], None], batches: Sequence[BatchT], n_workers: int) -> None:
    """Call `work` for every batch, each batch on one core.

    Several cores on one batch would wait for each other after every operation, which takes twice
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
        torch.set_num_threads(n_workers)  # for threads that are started later


def device_of(encoder: Encoder) -> torch.device:
    """Return the device of an encoder's weights."""
    return next(encoder.parameters()).device


def has_fast_bf16() -> bool:
    """Return whether this CPU has instructions for bf16; others emulate it, which is far slower."""
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))


def choose_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the type of an encoder's weights and states on a device."""
    check_choice("--precision", precision, PRECISIONS)
    if precision == "bf16" and device.type == "cpu" and not has_fast_bf16():
        raise InputError(
            "this CPU has no instructions for bf16, which would be far slower than fp32",
            fix="use --precision fp32",
        )
    is_bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if is_bf16 else torch.float32


def choose_device(name: str = "auto") -> torch.device:
    """Return the named device; with "auto" the GPU if there is one, the CPU otherwise."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        problem = f"device {name!r} cannot be used: {first_line(error)}"
        raise InputError(problem, fix=f"use {known}") from error
    return device
