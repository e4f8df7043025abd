"""Calque aligns multilingual Transformer encoders across languages.

>>> import calque
>>> model = calque.load()                                         # doctest: +SKIP
>>> model.embed(["Guten Morgen!", "Good morning!"]).shape         # doctest: +SKIP
(2, 384)
>>> aligner = calque.WordAligner(model)                           # doctest: +SKIP
>>> aligner.align([(["das", "Haus"], ["the", "house"])])          # doctest: +SKIP
[[(0, 0), (1, 1)]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from calque.api import Model, load
    from calque.errors import InputError
    from calque.word_alignment.neural import WordAligner

    __version__: str

__all__ = ["InputError", "Model", "WordAligner", "__version__", "load"]

# Looked up at first use: `import calque` alone must not import torch.
_HOMES = {
    "InputError": "calque.errors",
    "Model": "calque.api",
    "WordAligner": "calque.word_alignment.neural",
    "load": "calque.api",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("calque")
    if name not in _HOMES:
        raise AttributeError(f"module 'calque' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
