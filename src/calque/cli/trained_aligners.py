"""Aligners that learn from a bitext before they align: statistical, hybrid, adapted."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.cli.side_check import SideCheck
from calque.types import InputError, MissingExtra

if TYPE_CHECKING:
    from calque.cli.aligner_options import AlignerOptions
    from calque.tools.aligning import Aligner, WordPair
    from calque.tools.statistical_aligner import StatisticalAligner

    ReadPairs = Callable[[], Iterator[WordPair]]

STATISTICAL = ("eflomal", "fast-align")


def get_statistical(
    options: AlignerOptions, read_pairs: ReadPairs, read_bitext: ReadPairs
) -> StatisticalAligner:
    """Load the statistical aligner, or train it on the pairs and the bitext beside them."""
    from calque.cli.progress import show_phases
    from calque.tools.statistical_aligner import StatisticalAligner

    if options.load is not None:
        model = StatisticalAligner.load(options.load)
        if options.aligner in STATISTICAL and model.kind != options.aligner:
            fix = f"give --aligner {model.kind}"
            raise InputError(f"a model of {model.kind}", file=options.load, fix=fix)
        return model
    kind: Any = options.aligner if options.aligner in STATISTICAL else choose_library()
    symmetrize = options.symmetrize or "grow-diag-final-and"
    check = SideCheck()
    pairs = chain(check.pass_text(read_pairs()), check.pass_bitext(read_bitext()))
    with show_phases(kind) as on_phase:
        model = StatisticalAligner.train(pairs, kind, symmetrize=symmetrize, on_phase=on_phase)
    if check.is_crossed:
        fix = "add --reverse-bitext, or drop it"
        print(f"warning: --bitext has its sides the other way round ({fix})", file=sys.stderr)
    if options.save is not None:
        model.save(options.save)
        print(f"{options.save}: {kind} trained on {model.n_pairs:,} pairs", file=sys.stderr)
    return model


def make_statistical(options: AlignerOptions, model: StatisticalAligner) -> Aligner:
    """Give what aligns: the model itself, or its links of the text it was trained on."""
    from calque.tools.statistical_aligner import TrainingText

    return model if options.load is not None else TrainingText(model)


def choose_library() -> str:
    """Prefer eflomal, whose links are better, where it is installed."""
    from calque.tools.eflomal_engine import import_eflomal
    from calque.tools.fast_align_engine import import_systran_align

    try:
        import_eflomal()
    except MissingExtra:
        import_systran_align()
        hint = "pip install 'calque[eflomal]' gives better links"
        print(f"eflomal is not installed: fast-align stands in for it ({hint})", file=sys.stderr)
        return "fast-align"
    return "eflomal"


@contextmanager
def adapt(options: AlignerOptions, encoder: Any, pairs: ReadPairs) -> Iterator[Any]:
    """Give the encoder after a short training on the pairs, or as it is if none is asked for."""
    from calque.api import load
    from calque.tools.adaptation import Adaptation

    if not options.adapt:
        yield encoder
        return
    with tempfile.TemporaryDirectory(prefix="calque-adapt-") as folder:
        job = Adaptation(options.save_model or Path(folder), options.adapt_steps)
        found = job.train(encoder, pairs(), lambda text: print(text, file=sys.stderr))
        if options.save_model is not None:
            print(f"{found}: the adapted model", file=sys.stderr)
        yield load(found, options.device)
