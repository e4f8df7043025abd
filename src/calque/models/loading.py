"""Loading and saving plain Hugging Face folders: safetensors only, nothing in them is executed."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calque.errors import InputError, first_line
from calque.models import attention
from calque.models.families import Family, family_of
from calque.tokens.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


EMBEDDED = "calque-mini"
# What Hugging Face calls a layer's cross-attention.
PLUG = "crossattention"


class HeadlessCheckpoint(UserWarning):
    """The checkpoint has no language-modelling head, so that one is drawn at random."""


def embedded_models() -> dict[str, Path]:
    """Name the models inside the package and their folders."""
    root = Path(str(resources.files("calque"))) / "data" / "models"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def load_checkpoint(
    name: str | Path | None, dtype: torch.dtype, *, plugged: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]:
    """Load a masked language model and its tokenizer; a bad checkpoint is a one-line error.

    Cross-attention that a checkpoint has beside the encoder is left out, unless `plugged`: then
    it must be there.
    """
    folder = find_folder(EMBEDDED if name is None else name)
    config = load_config(folder)
    _set_plug(folder, config, plugged=plugged)
    family = family_of(config.model_type, folder)
    model = _load_weights(folder, config, family, dtype)
    tokenizer = load_tokenizer(folder)
    embeddings: Any = model.get_input_embeddings()
    check_rows(folder, tokenizer, len(embeddings.weight))
    return model, tokenizer, folder


def check_rows(folder: Path, tokenizer: PreTrainedTokenizerFast, n_rows: int) -> None:
    """Refuse a tokenizer that has more entries than its model has embeddings."""
    if len(tokenizer) > n_rows:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} entries but the model {n_rows} embeddings",
            file=folder,
            fix="use the tokenizer the model was trained with",
        )


def find_folder(name: str | Path) -> Path:
    """Find the folder of an embedded model, of a path, or of a hub name (fetched or cached)."""
    if str(name) in (embedded := embedded_models()):
        return embedded[str(name)]
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError("this is a file", file=name, fix="give the model's folder")
    return _fetch(str(name))


def count_positions(config: Any) -> int:
    """Give the longest sequence that the positions of a described model allow, marks included."""
    n_positions = int(config.max_position_embeddings)
    shifted = config.model_type in ("roberta", "xlm-roberta", "camembert")
    return n_positions - int(config.pad_token_id) - 1 if shifted else n_positions


def build_model(config: Any) -> PreTrainedModel:
    """Make an encoder of a given configuration with random weights."""
    from transformers import AutoModelForMaskedLM

    family_of(config.model_type, None)
    config = _choose_head(copy.deepcopy(config))
    model: Any = AutoModelForMaskedLM.from_config(config, attn_implementation=attention.register())
    return model  # type: ignore[no-any-return]


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    dtype: torch.dtype | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model and tokenizer as a folder that `AutoModel` loads unchanged."""
    state = _drop_tied(model, model.state_dict() if state is None else state)
    if dtype is not None:
        state = {key: x.to(dtype) if x.is_floating_point() else x for key, x in state.items()}
    with quiet():
        # Under the names that the model has, whatever those of the checkpoint before were.
        model.save_pretrained(folder, state_dict=state, save_original_format=False)
        tokenizer.save_pretrained(folder)
    _name_tokenizer(folder / "tokenizer_config.json")
    if dtype is not None:
        _set_stored_dtype(folder / "config.json", dtype)


def _drop_tied(model: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the second name of tied weights, even where it holds a copy of its own."""
    tied: dict[str, str] = model.all_tied_weights_keys
    return {name: value for name, value in state.items() if tied.get(name) not in state}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and load reports of transformers: Calque checks and says itself."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _name_tokenizer(path: Path) -> None:
    """Give the tokenizer the class name that older versions of transformers know too."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("tokenizer_class") == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _set_stored_dtype(path: Path, dtype: torch.dtype) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    fix = f"check the name; embedded models: {', '.join(embedded_models()) or 'none'}"
    try:
        wanted = ["*.json", "*.safetensors", "*.model", "*.txt"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except HFValidationError as error:
        raise InputError("no such folder, and not a hub name", file=name, fix=fix) from error
    except Exception as error:  # the hub client raises many kinds: offline, gated, unknown
        problem = f"no such folder, and the hub gave: {first_line(error).removeprefix('Got: ')}"
        raise InputError(problem, file=name, fix=fix) from error


def load_config(folder: Path) -> Any:
    """Read the description of an encoder; one that is none is a one-line error."""
    from transformers import AutoConfig

    path, fix = folder / "config.json", "give a Hugging Face model folder"
    if not path.exists():
        raise InputError("no config.json here", file=folder, fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("model_type") == "encoder-decoder" and (folder / "encoder").is_dir():
            inside = folder / "encoder"
            raise InputError("this is an encoder–decoder", file=folder, fix=f"give {inside}")
        family_of(content.get("model_type"), folder)
        return _choose_head(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except InputError:
        raise
    except Exception as error:  # not JSON, not an object, or a value of the wrong type
        problem = f"not the configuration of a model: {' '.join(str(error).split())}"
        raise InputError(problem, file=path, fix=fix) from error


def _choose_head(config: Any) -> Any:
    """Take the one head of DeBERTa's two that transformers loads: they differ in names alone."""
    if getattr(config, "legacy", None) is False:
        config.legacy = True
    return config


def _set_plug(folder: Path, config: Any, *, plugged: bool) -> None:
    """Describe the model with or without its cross-attention."""
    has_plug = bool(getattr(config, "add_cross_attention", False))
    if plugged and not has_plug:
        fix = "give the folder `veco` of a model trained with cross_attention_lm"
        raise InputError("this model has no cross-attention", file=folder, fix=fix)
    if has_plug and not plugged:
        config.is_decoder = config.add_cross_attention = False


def _load_weights(folder: Path, config: Any, family: Family, dtype: torch.dtype) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    refuse_pickle(folder)
    has_plug = getattr(config, "add_cross_attention", False)
    kind: Any = AutoModelForCausalLM if has_plug else AutoModelForMaskedLM
    try:
        with quiet():
            model, info = kind.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation=attention.register(),
                key_mapping=dict(family.renamed) or None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_keys` refuses them, by name
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise InputError(
            f"the weights cannot be read: {first_line(error)}",
            file=folder,
            fix="copy the checkpoint again; its files are truncated or do not belong together",
        ) from error
    _check_keys(folder, family, info)
    return model  # type: ignore[no-any-return]


def refuse_pickle(folder: Path) -> None:
    """Refuse a folder without safetensors, and say so where a pickle lies there instead."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise InputError(
            f"{pickles[0]} is a pickle, which can run code; Calque loads safetensors only",
            file=folder,
            fix="convert it with safetensors' convert script and remove the pickle",
        )
    fix = "give the model's folder; one that the hub has as a pickle alone must be converted first"
    raise InputError("no model.safetensors here", file=folder, fix=fix)


def _check_keys(folder: Path, family: Family, info: dict[str, Any]) -> None:
    """Refuse weights that do not fill the body, or that hold more layers; say a missing head."""
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    around = family.layers.split(".")[0]
    surplus = [key for key in info["unexpected_keys"] if f"{around}." in key]
    surplus = [key for key in surplus if f".{PLUG}." not in key]
    missing = [
        key for key in info["missing_keys"] if not any(part in key for part in family.optional)
    ]
    head = [key for key in missing if key.startswith(family.head_prefixes)]
    body = sorted(key for key in [*missing, *mismatched, *surplus] if key not in head)
    if body:
        raise InputError(
            f"{len(body)} tensors are missing, too many or of another shape, first {body[0]}",
            file=folder,
            fix="config.json and the weights do not belong together",
        )
    if head:
        warnings.warn(
            f"{folder}: no language-modelling head in the checkpoint; it starts at random",
            HeadlessCheckpoint,
            stacklevel=2,
        )
