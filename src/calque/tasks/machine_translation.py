"""Machine translation: SacreBLEU and chrF of whole test sets, with signatures to compare by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calque.text.files import read_lines
from calque.types import InputError, MissingExtra

if TYPE_CHECKING:
    from calque.tools.translator import Translator

# SacreBLEU's tokenizers for languages without spaces; Japanese words need a package beside it.
TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
PACKED = ("", ".gz", ".xz", ".zst")


@dataclass(frozen=True, slots=True)
class TranslationScores:
    """BLEU and chrF in percent, and what SacreBLEU says of how they were computed."""

    bleu: float
    chrf: float
    n_lines: int
    bleu_signature: str
    chrf_signature: str

    @property
    def metrics(self) -> dict[str, float]:
        """Give the scores by name, the main one first."""
        return {"bleu": self.bleu, "chrf": self.chrf}


def score_translations(
    translations: Sequence[str], references: Sequence[str], language: str = ""
) -> TranslationScores:
    """Score translations against one reference each; `language` is that of the references.

    Post, 2018 (SacreBLEU); Popović, 2015 (chrF).
    """
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MissingExtra("sacrebleu", "eval") from error
    if len(translations) != len(references):
        raise InputError(
            f"{len(translations):,} translations for {len(references):,} references",
            fix="give a reference for every line",
        )
    if not references:
        raise InputError("no lines to score", fix="give a test set")
    try:
        bleu = BLEU(tokenize=TOKENIZERS.get(language.partition("_")[0], "13a"))
    except (ImportError, RuntimeError):  # its tokenizer of words is a package of its own
        bleu = BLEU(tokenize="char")
    chrf, texts = CHRF(), list(translations)
    scores = [metric.corpus_score(texts, [list(references)]).score for metric in (bleu, chrf)]
    signatures = [str(metric.get_signature()) for metric in (bleu, chrf)]
    return TranslationScores(scores[0], scores[1], len(texts), signatures[0], signatures[1])


def find_test_sets(folder: Path, src: str, tgt: str) -> dict[str, tuple[Path, Path]]:
    """Find files whose names differ in their languages alone: newstest2014.en and newstest2014.de.

    They may be packed. In order of their names.
    """
    found = {}
    for path in sorted(folder.glob(f"*.{src}*")):
        for packing in PACKED:
            if path.name.endswith(f".{src}{packing}"):
                name = path.name.removesuffix(f".{src}{packing}")
                others = (path.with_name(f"{name}.{tgt}{other}") for other in PACKED)
                partner = next((other for other in others if other.is_file()), None)
                if partner is not None:
                    found[name] = (path, partner)
    if not found:
        raise InputError(
            f"no test set from {src} to {tgt}", file=folder, fix=f"put X.{src} and X.{tgt} there"
        )
    return found


def read_test_set(src: Path, tgt: Path) -> tuple[list[str], list[str]]:
    """Read the sources and the references of a test set, line by line."""
    sources, references = list(read_lines(src)), list(read_lines(tgt))
    if len(sources) != len(references):
        raise InputError(
            f"{len(references):,} lines, but {len(sources):,} in {src}",
            file=tgt,
            fix="a test set has a reference for every line",
        )
    return sources, references


def measure_translation(
    translator: Translator,
    sources: Iterable[str],
    references: Sequence[str],
    *,
    on_progress: Callable[[int], None] | None = None,
) -> TranslationScores:
    """Translate a test set and score it; `on_progress` is told of lines as they are done."""
    best = []
    for group in translator.translate(sources):
        best.append(group[0].text)
        if on_progress is not None:
            on_progress(1)
    return score_translations(best, references, translator.target)
