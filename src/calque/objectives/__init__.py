"""The training objectives by the names that recipes use.

A new objective needs a module, an entry here, and a test.
"""

from __future__ import annotations

from calque.objectives.base import Objective, ObjectiveSettings
from calque.objectives.contrastive import (
    SentenceContrastive,
    SentenceContrastiveSettings,
    WordContrastive,
    WordContrastiveSettings,
)
from calque.objectives.cross_attention_lm import CrossAttentionLM, CrossAttentionLMSettings
from calque.objectives.denoising_alignment import DenoisingAlignment, DenoisingAlignmentSettings
from calque.objectives.distillation import Distillation, DistillationSettings
from calque.objectives.generation import (
    DenoisingSeq2Seq,
    DenoisingSeq2SeqSettings,
    Translation,
    TranslationSettings,
)
from calque.objectives.linear_map import LinearMap, LinearMapSettings
from calque.objectives.linked_words import LinkedWords, LinkedWordsSettings
from calque.objectives.masked_lm import (
    MaskedLM,
    MaskedLMSettings,
    TranslationLM,
    TranslationLMSettings,
)
from calque.objectives.regression import L2Settings, Regression
from calque.objectives.static_target import StaticTarget, StaticTargetSettings

AnySettings = (
    MaskedLMSettings
    | TranslationLMSettings
    | CrossAttentionLMSettings
    | DenoisingAlignmentSettings
    | LinkedWordsSettings
    | WordContrastiveSettings
    | SentenceContrastiveSettings
    | L2Settings
    | LinearMapSettings
    | StaticTargetSettings
    | DistillationSettings
    | TranslationSettings
    | DenoisingSeq2SeqSettings
)

OBJECTIVES: dict[str, type[Objective]] = {
    "masked_lm": MaskedLM,
    "translation_lm": TranslationLM,
    "cross_attention_lm": CrossAttentionLM,
    "denoising_alignment": DenoisingAlignment,
    "linked_words": LinkedWords,
    "word_contrastive": WordContrastive,
    "sentence_contrastive": SentenceContrastive,
    "l2": Regression,
    "linear_map": LinearMap,
    "static_target": StaticTarget,
    "distillation": Distillation,
    "translation": Translation,
    "denoising_seq2seq": DenoisingSeq2Seq,
}


def build_objective(settings: AnySettings) -> Objective:
    """Return the objective that the settings of a recipe describe."""
    return OBJECTIVES[settings.kind](settings)


__all__ = ["OBJECTIVES", "AnySettings", "Objective", "ObjectiveSettings", "build_objective"]
