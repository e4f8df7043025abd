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
    from calque.evaluation.dataset_check import check_data
    from calque.evaluation.evaluate import evaluate
    from calque.word_alignment.file_job import align_file
    from calque.word_alignment.hybrid import HybridAligner
    from calque.word_alignment.linked_bitext import link_bitext
    from calque.word_alignment.neural import WordAligner
    from calque.word_alignment.statistical import StatisticalAligner

    __version__: str

__all__ = [
    "HybridAligner",
    "InputError",
    "Model",
    "StatisticalAligner",
    "WordAligner",
    "__version__",
    "align_file",
    "link_bitext",
    "load",
]

# Looked up at first use: `import calque` alone must not import torch.
_HOMES = {
    "InputError": "calque.errors",
    "Model": "calque.api",
    "HybridAligner": "calque.word_alignment.hybrid",
    "StatisticalAligner": "calque.word_alignment.statistical",
    "WordAligner": "calque.word_alignment.neural",
    "align_file": "calque.word_alignment.file_job",
    "link_bitext": "calque.word_alignment.linked_bitext",
    "check_data": "calque.evaluation.dataset_check",
    "evaluate": "calque.evaluation.evaluate",
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
