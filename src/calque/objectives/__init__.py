"""The training objectives by the names recipes use. A new one: its file, a line here, its test."""

from __future__ import annotations

from calque.objectives.base import Objective, ObjectiveSettings
from calque.objectives.denoising_alignment import (
    DenoisingAlignment,
    DenoisingAlignmentSettings,
)
from calque.objectives.linked_words import LinkedWords, LinkedWordsSettings
from calque.objectives.masked_lm import (
    MaskedLM,
    MaskedLMSettings,
    TranslationLM,
    TranslationLMSettings,
)

AnySettings = (
    MaskedLMSettings | TranslationLMSettings | DenoisingAlignmentSettings | LinkedWordsSettings
)

OBJECTIVES: dict[str, type[Objective]] = {
    "masked_lm": MaskedLM,
    "translation_lm": TranslationLM,
    "denoising_alignment": DenoisingAlignment,
    "linked_words": LinkedWords,
}


def build_objective(settings: AnySettings) -> Objective:
    """Make the objective a recipe's settings describe."""
    return OBJECTIVES[settings.kind](settings)


__all__ = ["OBJECTIVES", "AnySettings", "Objective", "ObjectiveSettings", "build_objective"]
