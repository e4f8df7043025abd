"""Calque aligns multilingual Transformer encoders across languages.

Everything that a program may import is in this package itself; each command of `calque` has a
function here with the same options as keywords.

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
    from calque.algorithms.calibration import Calibration
    from calque.api import Model, load
    from calque.errors import InputError
    from calque.evaluation.dataset_check import check_data
    from calque.evaluation.evaluate import evaluate
    from calque.growth.grow import grow
    from calque.io.cleaning import CleaningRules, clean_bitext
    from calque.report.compare import compare
    from calque.sentences.embed import embed_file
    from calque.sentences.language_neutral import neutralize
    from calque.sentences.mine import mine
    from calque.server.serve import serve
    from calque.training.gap_probe import transfer_gap
    from calque.training.loop import train
    from calque.training.sources import prepare
    from calque.translation.pair_attention import pair_attention
    from calque.translation.translate import Translator, translate_file
    from calque.vectors.extract import extract_vectors
    from calque.vectors.lexicon import induce_lexicon
    from calque.vectors.mapping import map_vectors
    from calque.vectors.static import WordVectors
    from calque.word_alignment.file_job import align_file
    from calque.word_alignment.hybrid import HybridAligner
    from calque.word_alignment.linked_bitext import link_bitext
    from calque.word_alignment.neural import WordAligner
    from calque.word_alignment.statistical import StatisticalAligner

    __version__: str

__all__ = [
    "Calibration",
    "CleaningRules",
    "HybridAligner",
    "InputError",
    "Model",
    "StatisticalAligner",
    "Translator",
    "WordAligner",
    "WordVectors",
    "__version__",
    "align_file",
    "check_data",
    "clean_bitext",
    "compare",
    "embed_file",
    "evaluate",
    "extract_vectors",
    "grow",
    "induce_lexicon",
    "link_bitext",
    "load",
    "map_vectors",
    "mine",
    "neutralize",
    "pair_attention",
    "prepare",
    "serve",
    "train",
    "transfer_gap",
    "translate_file",
]

# Imported at first use: `import calque` alone must not import torch.
_MODULES = {
    "Calibration": "calque.algorithms.calibration",
    "CleaningRules": "calque.io.cleaning",
    "HybridAligner": "calque.word_alignment.hybrid",
    "InputError": "calque.errors",
    "Model": "calque.api",
    "StatisticalAligner": "calque.word_alignment.statistical",
    "Translator": "calque.translation.translate",
    "WordAligner": "calque.word_alignment.neural",
    "WordVectors": "calque.vectors.static",
    "align_file": "calque.word_alignment.file_job",
    "check_data": "calque.evaluation.dataset_check",
    "clean_bitext": "calque.io.cleaning",
    "compare": "calque.report.compare",
    "embed_file": "calque.sentences.embed",
    "evaluate": "calque.evaluation.evaluate",
    "extract_vectors": "calque.vectors.extract",
    "grow": "calque.growth.grow",
    "induce_lexicon": "calque.vectors.lexicon",
    "link_bitext": "calque.word_alignment.linked_bitext",
    "load": "calque.api",
    "map_vectors": "calque.vectors.mapping",
    "mine": "calque.sentences.mine",
    "neutralize": "calque.sentences.language_neutral",
    "pair_attention": "calque.translation.pair_attention",
    "prepare": "calque.training.sources",
    "serve": "calque.server.serve",
    "train": "calque.training.loop",
    "transfer_gap": "calque.training.gap_probe",
    "translate_file": "calque.translation.translate",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("calque")
    if name not in _MODULES:
        raise AttributeError(f"module 'calque' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
