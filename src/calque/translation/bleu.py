"""BLEU and chrF of translations, computed by SacreBLEU (Post, 2018; Popović, 2015)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from calque.errors import InputError, MissingExtra
from calque.io.segmentation import UNSPACED_LANGUAGES, language_code

# SacreBLEU's tokenizers for languages without spaces between words. The Japanese and Korean ones
# need additional packages; with the default tokenizer, a Thai phrase would be one word.
TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"} | dict.fromkeys(
    UNSPACED_LANGUAGES, "char"
)


@dataclass(frozen=True, slots=True)
class TranslationScores:
    """BLEU and chrF in percent, and SacreBLEU's signatures of how they were computed."""

    bleu: float
    chrf: float
    n_lines: int
    bleu_signature: str
    chrf_signature: str

    @property
    def metrics(self) -> dict[str, float]:
        """Return the scores by name, the main one first."""
        return {"bleu": self.bleu, "chrf": self.chrf}


def load_metrics() -> tuple[Any, Any]:
    """Return SacreBLEU's classes BLEU and CHRF; raise MissingExtra if it is not installed."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise MissingExtra("sacrebleu", "eval") from error
    return BLEU, CHRF


def score_translations(
    translations: Sequence[str], references: Sequence[str], language: str = ""
) -> TranslationScores:
    """Return the scores of translations, given one reference each and their language."""
    BLEU, CHRF = load_metrics()
    if len(translations) != len(references):
        raise InputError(
            f"there are {len(translations):,} translations for {len(references):,} references",
            fix="provide one reference per line",
        )
    if not references:
        raise InputError("there are no lines to score", fix="choose another test set")
    try:
        bleu = BLEU(tokenize=TOKENIZERS.get(language_code(language), "13a"))
    except (ImportError, RuntimeError):  # the tokenizer's package is not installed
        bleu = BLEU(tokenize="char")
    chrf, texts = CHRF(), list(translations)
    scores = [metric.corpus_score(texts, [list(references)]).score for metric in (bleu, chrf)]
    signatures = [str(metric.get_signature()) for metric in (bleu, chrf)]
    return TranslationScores(scores[0], scores[1], len(texts), signatures[0], signatures[1])
