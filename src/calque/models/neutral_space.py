"""Language-neutral sentence vectors: remove the directions that identify the language.

Yang et al., 2021, "A Simple and Effective Method To Eliminate the Self Language Bias in
Multilingual Representations". This needs neither bitext nor labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from calque.errors import InputError, first_line
from calque.io.tensor_files import read_tensors

if TYPE_CHECKING:
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.float32]

NEUTRAL_FILE = "neutral.safetensors"


def find_language_directions(means: Array) -> tuple[Array, Array]:
    """Return the mean of the mean vectors of the languages, and the directions of their variation.

    The directions are the right singular vectors of the centered means: at most one fewer than
    there are languages. Paper: the states of one language are decomposed at a time; the means of
    many languages do the same at once.

    >>> mean, directions = find_language_directions(np.float32([[1, 0], [3, 0]]))
    >>> mean.tolist(), np.abs(directions).tolist()
    ([2.0, 0.0], [[1.0, 0.0]])
    """
    if len(means) < 2:
        raise InputError("there is only one language", fix="give at least two languages")
    center = means.mean(axis=0, dtype=np.float64)
    _, strengths, directions = np.linalg.svd(means - center, full_matrices=False)
    tiny = strengths[0] * max(means.shape) * np.finfo(np.float32).eps
    kept = strengths > max(tiny, np.finfo(np.float64).tiny)
    return center.astype(np.float32), directions[kept].astype(np.float32)


def remove_directions(vectors: Array, mean: Array, directions: Array) -> Array:
    """Return vectors without the mean and the directions; a zero vector (no text) stays zero.

    >>> remove_directions(np.float32([[5, 7]]), np.float32([2, 0]), np.float32([[1, 0]])).tolist()
    [[0.0, 7.0]]
    """
    centered = vectors - mean
    neutral = (centered - (centered @ directions.T) @ directions).astype(np.float32)
    neutral[~vectors.any(axis=1)] = 0
    return neutral


@dataclass(frozen=True, slots=True)
class NeutralSpace:
    """What to remove from the mean-pooled states of one layer, and the languages it is based on."""

    mean: Array
    directions: Array
    layer: int
    languages: tuple[str, ...]

    def apply(self, vectors: Array) -> Array:
        """Return vectors in which the means of the languages coincide."""
        return remove_directions(vectors, self.mean, self.directions)

    def save(self, folder: Path) -> None:
        """Write the space into a model's folder."""
        from safetensors.numpy import save_file

        tensors = {"mean": self.mean, "directions": np.ascontiguousarray(self.directions)}
        about = {"layer": str(self.layer), "languages": " ".join(self.languages)}
        save_file(tensors, folder / NEUTRAL_FILE, metadata=about)


def load_neutral_space(folder: Path, hidden_size: int, n_layers: int) -> NeutralSpace | None:
    """Read the neutral space in a model's folder; return None if there is none."""
    path, fix = folder / NEUTRAL_FILE, "run `calque neutralize` again"
    if not path.exists():
        return None
    tensors, about = read_tensors(path, fix=fix)
    try:
        mean, directions = (tensors[name].float().numpy() for name in ("mean", "directions"))
        space = NeutralSpace(mean, directions, int(about["layer"]), (*about["languages"].split(),))
    except (KeyError, ValueError) as error:
        problem = f"the file cannot be read: {first_line(error)}"
        raise InputError(problem, file=path, fix=fix) from error
    if mean.shape != (hidden_size,) or directions.shape[1:] != (hidden_size,):
        problem = f"the vectors have shape {list(mean.shape)}, but the model has size {hidden_size}"
        raise InputError(problem, file=path, fix=fix)
    if not 0 <= space.layer <= n_layers:
        raise InputError(f"the model has no layer {space.layer}", file=path, fix=fix)
    return space
