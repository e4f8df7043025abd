"""Configurations of models: config.json, checked before a model of this size is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from calque.errors import InputError
from calque.io.structured import read_json
from calque.models.families import find_family
from calque.models.weights import has_weights, read_weight_shapes

CONFIG = "config.json"
MODEL_FOLDER_FIX = "give a Hugging Face model folder"
# The parts of an encoder–decoder, each with a configuration of its own.
HALVES = ("encoder", "decoder")
# Settings with which transformers would run other code or look for other files; we never do.
IGNORED = (
    "auto_map",
    "attn_implementation",
    "_attn_implementation",
    "experts_implementation",
    "_experts_implementation",
    "fusion_config",
    "transformers_weights",
)
# The lowest and highest value of each size.
SIZES = {
    "vocab_size": (1, 1 << 24),
    "hidden_size": (1, 1 << 16),
    "num_hidden_layers": (1, 1 << 10),
    "num_attention_heads": (1, 1 << 10),
    "intermediate_size": (1, 1 << 20),
    "hidden_dim": (1, 1 << 20),  # the same, for DistilBERT
    "max_position_embeddings": (1, 1 << 24),
    "type_vocab_size": (0, 1 << 16),
    "num_labels": (0, 1 << 20),
}


def read_config(folder: Path, *, fix: str = MODEL_FOLDER_FIX) -> dict[str, Any]:
    """Read the config.json of a model."""
    if not (folder / CONFIG).exists():
        raise InputError(f"this folder has no {CONFIG}", file=folder, fix=fix)
    return read_json(folder / CONFIG, dict, fix=fix)


def read_model_type(folder: Path) -> str | None:
    """Read the model type of a folder; None if config.json is bad, which the loaders report."""
    try:
        model_type = read_config(folder).get("model_type")
    except InputError:
        return None
    return model_type if isinstance(model_type, str) else None


def load_config(folder: Path) -> Any:
    """Read the configuration of an encoder."""
    content = read_config(folder)
    model_type = content.get("model_type")
    if model_type == "encoder-decoder" and (folder / "encoder").is_dir():
        fix = f"give {folder / 'encoder'}"
        raise InputError("this is an encoder–decoder", file=folder, fix=fix)
    find_family(model_type, folder)
    return choose_head(build_config(folder, content))


def build_config(folder: Path, content: dict[str, Any]) -> Any:
    """Return the Hugging Face configuration of a config.json.

    Raises:
        InputError: A setting is wrong, no model can be built, or the model would be far larger
            than the weights in the folder.
    """
    from transformers import CONFIG_MAPPING

    try:
        config = CONFIG_MAPPING[content["model_type"]].from_dict(_clean(content))
        parts = [getattr(config, name) for name in HALVES if name in content] or [config]
        for part in parts:
            _check_sizes(part)
        check_settings(config, parts[0].num_hidden_layers)
        shapes = read_weight_shapes(folder) if has_weights(folder) else None
        _check_buildable(parts, shapes)
    except InputError as error:
        place = error.file or folder / CONFIG
        raise InputError(error.problem, file=place, fix=error.fix or MODEL_FOLDER_FIX) from error
    except Exception as error:
        cause = error.__cause__ or error  # the checks of transformers wrap it
        kind = "" if isinstance(cause, ValueError) else f"{type(cause).__name__}: "
        problem = f"this is not the configuration of a model: {kind}{' '.join(str(cause).split())}"
        raise InputError(problem, file=folder / CONFIG, fix=MODEL_FOLDER_FIX) from error
    return config


def choose_head(config: Any) -> Any:
    """Choose the DeBERTa head that transformers can load: its two heads differ only in names."""
    if getattr(config, "legacy", None) is False:
        config.legacy = True
    return config


def max_sequence_length(config: Any) -> int:
    """Return the longest sequence that the positions of a model allow, special tokens included."""
    n_positions = int(config.max_position_embeddings)
    is_shifted = config.model_type in ("roberta", "xlm-roberta", "camembert")
    return n_positions - int(config.pad_token_id) - 1 if is_shifted else n_positions


def check_settings(config: Any, n_layers: int) -> None:
    """Raise an error if a setting that Calque stores under "calque" has a wrong type or value."""
    settings = getattr(config, "calque", None)
    if settings is None:
        return
    _check_type("calque", settings, lambda value: isinstance(value, dict))
    alignment = settings.get("alignment") or {}
    _check_type("calque.alignment", alignment, lambda value: isinstance(value, dict))

    def is_layer(value: object) -> bool:
        return _is_whole(value) and -n_layers - 1 <= value <= n_layers  # type: ignore[operator]

    checks: dict[str, Callable[[Any], bool]] = {
        "retrieval_layer": is_layer,
        "targets": lambda names: _is_list(names, str),
        "decoder_layers": lambda layers: _is_list(layers, int) and all(map(is_layer, layers)),
        "directions": lambda pairs: (
            _is_list(pairs, list) and all(_is_list(pair, str) and len(pair) == 2 for pair in pairs)
        ),
        "layer": lambda layer: layer is None or is_layer(layer),
        "sharpness": _is_number,
        "spelling": _is_number,
        "threshold": lambda value: value is None or _is_number(value),
        "calibration": lambda value: value is None or _is_calibration(value),
        "n_iterations": lambda number: _is_whole(number) and 1 <= number <= 1 << 10,
        **dict.fromkeys(("method", "encode", "positions"), lambda name: isinstance(name, str)),
    }
    for name, value in (settings | alignment).items():
        if name in checks:
            _check_type(f"calque.{name}", value, checks[name])


def _clean(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration without ignored settings, after a check of what costs memory."""
    if content.get("quantization_config") is not None:
        problem = "the weights are quantized, which Calque does not support"
        raise InputError(problem, fix="use the model in its original precision")
    n_labels = content.get("num_labels", 0)
    _check_type("num_labels", n_labels, lambda n: _is_whole(n) and 0 <= n <= 1 << 20)
    kept = {name: value for name, value in content.items() if name not in IGNORED}
    halves = {name: _clean(kept[name]) for name in HALVES if isinstance(kept.get(name), dict)}
    return kept | halves


def _check_sizes(config: Any) -> None:
    for name, (low, high) in SIZES.items():
        value = getattr(config, name, None)
        if value is not None and not (_is_whole(value) and low <= value <= high):
            raise InputError(f"{name} is {value!r}, not a whole number from {low} to {high}")
    if max_sequence_length(config) < 3:
        raise InputError("max_position_embeddings leaves no room for text")


def _check_buildable(configs: list[Any], shapes: dict[str, list[int]] | None) -> None:
    """Build the models without memory for their weights, and compare their size to the weights."""
    from transformers import AutoModel

    n_stored = math.inf
    if shapes is not None:
        n_stored = sum(map(math.prod, shapes.values()))
        if sum(config.num_hidden_layers for config in configs) > len(shapes):
            raise InputError("num_hidden_layers is larger than the number of tensors")
    n_parameters = 0
    for config in configs:
        with torch.device("meta"):
            model = AutoModel.from_config(config)
        n_parameters += sum(parameter.numel() for parameter in model.parameters())
    if n_parameters > 2 * n_stored:
        problem = f"it describes {n_parameters:,} numbers, but the weights have {n_stored:,}"
        raise InputError(problem)


def _check_type(name: str, value: object, is_valid: Callable[[Any], bool]) -> None:
    if not is_valid(value):
        raise InputError(f"the value of {name} is not valid: {value!r}")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_calibration(value: object) -> bool:
    names = {"slope", "intercept", "threshold"}
    return isinstance(value, dict) and set(value) == names and all(map(_is_number, value.values()))


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)
