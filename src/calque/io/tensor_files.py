"""Read safetensors files from outside: whatever is wrong with them is an InputError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.errors import InputError, first_line

if TYPE_CHECKING:
    from torch import Tensor

COPY_AGAIN = "copy the file again; it is truncated or damaged"


def read_tensors(path: Path, *, fix: str = COPY_AGAIN) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a file, mapped into memory, and its metadata.

    Raises:
        InputError: The file cannot be read, or a number in it is NaN or infinite.
    """
    with _open(path, fix) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
        bad = next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)
    if bad is not None:
        raise InputError(f"the tensor {bad} has numbers that are not finite", file=path, fix=fix)
    return tensors, metadata


def read_shapes(path: Path, *, fix: str = COPY_AGAIN) -> dict[str, list[int]]:
    """Return the shapes of the tensors of a file; only its header is read."""
    with _open(path, fix) as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinite numbers.

    One pass over the numbers without temporary copies: a NaN is also the minimum and maximum.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    low, high = (tensor.float() if tensor.itemsize == 1 else tensor).aminmax()
    return bool(low.isfinite() & high.isfinite())


@contextmanager
def _open(path: Path, fix: str) -> Iterator[Any]:
    from safetensors import safe_open

    if not path.is_file():  # a pipe would be waited for
        problem = "this is not a file" if path.exists() else "there is no such file"
        raise InputError(problem, file=path, fix=fix)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except Exception as error:
        problem = f"this is not a valid safetensors file: {first_line(error)}"
        raise InputError(problem, file=path, fix=fix) from error
