"""The training objectives by the names recipes use. A new one: its file, a line here, its test."""

from __future__ import annotations

from calque.objectives.base import Objective, ObjectiveSettings
from calque.objectives.masked_lm import (
    MaskedLM,
    MaskedLMSettings,
    TranslationLM,
    TranslationLMSettings,
)

AnySettings = MaskedLMSettings | TranslationLMSettings

OBJECTIVES: dict[str, type[Objective]] = {
    "masked_lm": MaskedLM,
    "translation_lm": TranslationLM,
}


def build_objective(settings: AnySettings) -> Objective:
    """Make the objective a recipe's settings describe."""
    return OBJECTIVES[settings.kind](settings)


__all__ = ["OBJECTIVES", "AnySettings", "Objective", "ObjectiveSettings", "build_objective"]
