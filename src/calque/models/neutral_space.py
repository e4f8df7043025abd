"""Removing what tells languages apart from sentence vectors, with no bitext and no labels.

Yang et al., 2021 (A Simple and Effective Method To Eliminate the Self Language Bias in
Multilingual Representations).

A model's neutral space: which directions of its sentence vectors tell languages apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from calque.errors import InputError, first_line

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.float32]


def find_language_directions(means: Array) -> tuple[Array, Array]:
    """Find the mean of the languages' mean vectors, and the directions in which they differ.

    The directions are the right singular vectors of the centred means: at most one fewer than
    there are languages. Paper: it decomposes the states of one language at a time; the means of
    many do the same at once.

    >>> mean, directions = find_language_directions(np.float32([[1, 0], [3, 0]]))
    >>> mean.tolist(), np.abs(directions).tolist()
    ([2.0, 0.0], [[1.0, 0.0]])
    """
    if len(means) < 2:
        raise InputError(f"{len(means)} language has no direction", fix="give two or more")
    center = means.mean(axis=0, dtype=np.float64)
    _, strengths, directions = np.linalg.svd(means - center, full_matrices=False)
    tiny = strengths[0] * max(means.shape) * np.finfo(np.float32).eps
    kept = strengths > max(tiny, np.finfo(np.float64).tiny)
    return center.astype(np.float32), directions[kept].astype(np.float32)


def remove_directions(vectors: Array, mean: Array, directions: Array) -> Array:
    """Subtract the mean and project the directions out; a zero vector (no text) stays zero.

    >>> remove_directions(np.float32([[5, 7]]), np.float32([2, 0]), np.float32([[1, 0]])).tolist()
    [[0.0, 7.0]]
    """
    centered = vectors - mean
    neutral = (centered - (centered @ directions.T) @ directions).astype(np.float32)
    neutral[~vectors.any(axis=1)] = 0
    return neutral


FILE = "neutral.safetensors"


@dataclass(frozen=True, slots=True)
class NeutralSpace:
    """What to remove from one layer's mean-pooled states, and the languages it was found on."""

    mean: Array
    directions: Array
    layer: int
    languages: tuple[str, ...]

    def apply(self, vectors: Array) -> Array:
        """Give vectors in which the languages' means coincide."""
        return remove_directions(vectors, self.mean, self.directions)

    def save(self, folder: Path) -> None:
        """Write it beside a model's other files."""
        import numpy as np
        from safetensors.numpy import save_file

        tensors = {"mean": self.mean, "directions": np.ascontiguousarray(self.directions)}
        about = {"layer": str(self.layer), "languages": " ".join(self.languages)}
        save_file(tensors, folder / FILE, metadata=about)


def load_neutral_space(folder: Path, hidden_size: int) -> NeutralSpace | None:
    """Read a model's neutral space; None if it has none."""
    from safetensors import SafetensorError, safe_open

    path = folder / FILE
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="numpy") as file:
            about = file.metadata() or {}
            mean, directions = file.get_tensor("mean"), file.get_tensor("directions")
        languages = tuple(about["languages"].split())
        space = NeutralSpace(mean, directions, int(about["layer"]), languages)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(
            f"cannot be read: {first_line(error)}", file=path, fix="run `calque neutralize` again"
        ) from error
    if mean.shape != (hidden_size,) or directions.shape[1:] != (hidden_size,):
        raise InputError(
            f"is for vectors of {mean.shape[-1]}, the model's have {hidden_size}",
            file=path,
            fix="run `calque neutralize` again",
        )
    return space
