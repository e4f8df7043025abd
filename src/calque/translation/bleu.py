"""translation.scoring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calque.errors import InputError, MissingExtra
from calque.io.segmentation import SPACELESS, find_code

# SacreBLEU's tokenizers for languages without spaces; Japanese words need a package beside it. By
# its rules for spaced words a whole Thai phrase would be one.
TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"} | dict.fromkeys(SPACELESS, "char")


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


def load_metrics() -> tuple[Any, Any]:
    """Give SacreBLEU's BLEU and chrF, or say how to get them."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MissingExtra("sacrebleu", "eval") from error
    return BLEU, CHRF


def score_translations(
    translations: Sequence[str], references: Sequence[str], language: str = ""
) -> TranslationScores:
    """Score translations against one reference each; `language` is that of the references.

    Post, 2018 (SacreBLEU); Popović, 2015 (chrF).
    """
    BLEU, CHRF = load_metrics()
    if len(translations) != len(references):
        raise InputError(
            f"{len(translations):,} translations for {len(references):,} references",
            fix="give a reference for every line",
        )
    if not references:
        raise InputError("no lines to score", fix="give a test set")
    try:
        bleu = BLEU(tokenize=TOKENIZERS.get(find_code(language), "13a"))
    except (ImportError, RuntimeError):  # its tokenizer of words is a package of its own
        bleu = BLEU(tokenize="char")
    chrf, texts = CHRF(), list(translations)
    scores = [metric.corpus_score(texts, [list(references)]).score for metric in (bleu, chrf)]
    signatures = [str(metric.get_signature()) for metric in (bleu, chrf)]
    return TranslationScores(scores[0], scores[1], len(texts), signatures[0], signatures[1])
