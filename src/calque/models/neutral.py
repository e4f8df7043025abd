"""A model's neutral space: which directions of its sentence vectors tell languages apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calque.align.neutral import remove_directions
from calque.types import InputError, first_line

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

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
