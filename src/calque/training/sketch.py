"""The weights of a recipe by name, without numbers: wrong patterns are told before text is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from calque.models.loading import build_model, find_folder, load_config
from calque.models.seq2seq_start import sketch_halves
from calque.models.veco import build_plugged, plain_config
from calque.objectives import build_objective
from calque.training.model_start import shape_of
from calque.training.step import TrainStep, find_trained, freeze

if TYPE_CHECKING:
    from calque.training.recipe import ModelSection, Recipe


def check_freezing(recipe: Recipe) -> None:
    """Refuse what `freeze` cannot mean: a pattern that matches nothing, or all that there is."""
    if not recipe.freeze:
        return
    step = _sketch_step(recipe)
    freeze(step, recipe.freeze)
    # Maps are made for the languages of the text, which are not known yet.
    if all(settings.kind != "linear_map" for settings in recipe.objectives):
        find_trained(step)


def _sketch_step(recipe: Recipe) -> TrainStep:
    """Make all that is trained, the encoder without memory for its weights."""
    encoder: Any = nn.Module()
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        config, encoder.model = _sketch_model(recipe.model)
    objectives = [build_objective(settings) for settings in recipe.objectives]
    for objective in objectives:
        objective.add_weights(config.hidden_size, torch.Generator())
    return TrainStep(encoder, objectives)


def _sketch_model(section: ModelSection) -> tuple[Any, nn.Module]:
    """Make a model on no device, and give the description of its encoder."""
    if section.start is None:
        config = _describe(section)
    elif section.decoder is not None:
        return sketch_halves(section.start, section.decoder.plan())
    else:
        config = load_config(find_folder(section.start))
    if section.decoder is not None:
        return sketch_halves(config, section.decoder.plan())
    if section.cross_attention is not None:
        return config, build_plugged(config)
    return config, build_model(plain_config(config))


def _describe(section: ModelSection) -> Any:
    """Describe a new encoder as far as names go: those do not depend on its vocabulary."""
    from transformers import AutoConfig

    return AutoConfig.for_model(section.architecture, **shape_of(section))
