"""Loading and saving plain Hugging Face folders: safetensors only, and no code in them is run."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calque.errors import InputError, first_line
from calque.models.attention import register_attention
from calque.models.families import Family, find_family
from calque.tokens.tokenizer import TOKENIZER_FILES, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


EMBEDDED_MODEL = "calque-mini"
# Hugging Face's name of a layer's cross-attention.
CROSS_ATTENTION = "crossattention"
# Seconds to wait for a connection to the hub: without network, a name must fail quickly.
CONNECT_TIMEOUT = 1.5
MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt")


class MissingHeadWarning(UserWarning):
    """The checkpoint has no language-modeling head, so that one is initialized at random."""


def embedded_models() -> dict[str, Path]:
    """Return the names and folders of the models inside the package."""
    root = Path(str(resources.files("calque"))) / "data" / "models"
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def find_model(name: str | Path | None = None) -> Path:
    """Return the local folder of a model, downloading it from the hub if necessary.

    Args:
        name: A folder, a hub name or `calque-mini`, which is also the default.

    >>> find_model("calque-mini").name
    'calque-mini'
    """
    return _find_folder(name, MODEL_FILES)


def find_tokenizer(name: str | Path | None = None) -> Path:
    """Return the local folder of a tokenizer: as `find_model`, but without downloading weights."""
    return _find_folder(
        name, ("tokenizer*", "special_tokens_map.json", "config.json", *TOKENIZER_FILES)
    )


def _find_folder(name: str | Path | None, files: Sequence[str]) -> Path:
    name = EMBEDDED_MODEL if name is None else name
    if str(name) in (embedded := embedded_models()):
        return embedded[str(name)]
    if str(name) == EMBEDDED_MODEL:
        raise InputError(
            f"{EMBEDDED_MODEL} is not in this installation", fix="give the folder of another model"
        )
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise InputError("this is a file", file=name, fix="give the model's folder")
    return _download(str(name), files)


def _download(name: str, files: Sequence[str]) -> Path:
    """Return the folder of a hub name in the cache, updated if the hub can be reached."""
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    fix = f"download it first with `hf download {name}`, give a folder, or use {EMBEDDED_MODEL}"
    timeout: Any = httpx.Timeout(10.0, connect=CONNECT_TIMEOUT)
    hub_error: Exception | None = None
    try:
        HfApi().model_info(name, timeout=timeout)
    except HFValidationError as error:
        fix = f"give a folder, a hub name such as xlm-roberta-base, or {EMBEDDED_MODEL}"
        raise InputError(
            "there is no such folder, and this is not a hub name", file=name, fix=fix
        ) from error
    except Exception as error:  # noqa: BLE001 (offline, unknown, gated: there are many kinds)
        hub_error = error
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(files), local_files_only=hub_error is not None
            )
        )
    except Exception as error:
        reason = first_line(hub_error or error)
        problem = f"there is no such folder, and the hub could not provide it: {reason}"
        raise InputError(problem, file=name, fix=fix) from error


def load_checkpoint(
    name: str | Path | None, dtype: torch.dtype, *, cross_attention: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]:
    """Load a masked language model and its tokenizer; return them and their folder.

    With `cross_attention`, the checkpoint must have cross-attention weights and they are loaded;
    otherwise such weights are ignored.
    """
    folder = find_model(name)
    config = load_config(folder)
    _set_cross_attention(folder, config, wanted=cross_attention)
    family = find_family(config.model_type, folder)
    model = _load_weights(folder, config, family, dtype)
    tokenizer = load_tokenizer(folder)
    embeddings: Any = model.get_input_embeddings()
    check_vocabulary_size(folder, tokenizer, len(embeddings.weight))
    return model, tokenizer, folder


def check_vocabulary_size(folder: Path, tokenizer: PreTrainedTokenizerFast, n_rows: int) -> None:
    """Raise an error if the tokenizer has more entries than the model has embeddings."""
    if len(tokenizer) > n_rows:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} entries but the model has {n_rows} embeddings",
            file=folder,
            fix="use the tokenizer that the model was trained with",
        )


def max_sequence_length(config: Any) -> int:
    """Return the longest sequence that the positions of a model allow, special tokens included."""
    n_positions = int(config.max_position_embeddings)
    is_shifted = config.model_type in ("roberta", "xlm-roberta", "camembert")
    return n_positions - int(config.pad_token_id) - 1 if is_shifted else n_positions


def build_model(config: Any) -> PreTrainedModel:
    """Return an encoder of a given configuration with random weights."""
    from transformers import AutoModelForMaskedLM

    find_family(config.model_type, None)
    config = _choose_head(copy.deepcopy(config))
    model: Any = AutoModelForMaskedLM.from_config(config, attn_implementation=register_attention())
    return model  # type: ignore[no-any-return]


def save_checkpoint(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    dtype: torch.dtype | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write model and tokenizer as a folder that `AutoModel` loads unchanged.

    `state` replaces the model's own weights.
    """
    state = model.state_dict() if state is None else state
    # Tied weights are written once, even if `state` holds a copy under the second name.
    tied: dict[str, str] = model.all_tied_weights_keys
    state = {name: value for name, value in state.items() if tied.get(name) not in state}
    if dtype is not None:
        state = {key: x.to(dtype) if x.is_floating_point() else x for key, x in state.items()}
    with silence_transformers():
        # With the names of this model class, not those of the checkpoint it was loaded from.
        model.save_pretrained(folder, state_dict=state, save_original_format=False)
        tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    if json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class") == "TokenizersBackend":
        # This class name is known to older versions of transformers too.
        _update_json(path, tokenizer_class="PreTrainedTokenizerFast")
    if dtype is not None:
        _update_json(folder / "config.json", dtype=str(dtype).removeprefix("torch."))


def _update_json(path: Path, **changes: str) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide the progress bars and load reports of transformers: Calque does its own checks."""
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


def load_config(folder: Path) -> Any:
    """Read the configuration of an encoder."""
    from transformers import AutoConfig

    path, fix = folder / "config.json", "give a Hugging Face model folder"
    if not path.exists():
        raise InputError("this folder has no config.json", file=folder, fix=fix)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("model_type") == "encoder-decoder" and (folder / "encoder").is_dir():
            raise InputError(
                "this is an encoder–decoder", file=folder, fix=f"give {folder / 'encoder'}"
            )
        find_family(content.get("model_type"), folder)
        return _choose_head(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except InputError:
        raise
    except Exception as error:  # not JSON, not an object, or a value of the wrong type
        problem = f"this is not the configuration of a model: {' '.join(str(error).split())}"
        raise InputError(problem, file=path, fix=fix) from error


def _choose_head(config: Any) -> Any:
    """Choose the DeBERTa head that transformers can load: its two heads differ only in names."""
    if getattr(config, "legacy", None) is False:
        config.legacy = True
    return config


def _set_cross_attention(folder: Path, config: Any, *, wanted: bool) -> None:
    """Switch cross-attention on or off in a configuration."""
    has_cross_attention = bool(getattr(config, "add_cross_attention", False))
    if wanted and not has_cross_attention:
        fix = "give the folder `veco` of a model trained with cross_attention_lm"
        raise InputError("this model has no cross-attention", file=folder, fix=fix)
    if has_cross_attention and not wanted:
        config.is_decoder = config.add_cross_attention = False


def _load_weights(folder: Path, config: Any, family: Family, dtype: torch.dtype) -> PreTrainedModel:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    check_safetensors(folder)
    has_cross_attention = getattr(config, "add_cross_attention", False)
    model_class: Any = AutoModelForCausalLM if has_cross_attention else AutoModelForMaskedLM
    try:
        with silence_transformers():
            model, info = model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                attn_implementation=register_attention(),
                key_mapping=dict(family.renamed) or None,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_check_keys` reports them by name
            )
    except (OSError, SafetensorError, RuntimeError, ValueError) as error:
        raise InputError(
            f"the weights cannot be read: {first_line(error)}",
            file=folder,
            fix="copy the checkpoint again; its files are truncated or do not belong together",
        ) from error
    _check_keys(folder, family, info)
    return model  # type: ignore[no-any-return]


def check_safetensors(folder: Path) -> None:
    """Raise an error if a folder has no safetensors file, for example only a pickle."""
    if any(folder.glob("*.safetensors")):
        return
    pickles = [path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth")]
    if pickles:
        raise InputError(
            f"{pickles[0]} is a pickle, which can run code; Calque loads safetensors only",
            file=folder,
            fix="convert it with the convert script of safetensors and remove the pickle",
        )
    fix = "give the model's folder; a model that the hub only has as a pickle must be converted"
    raise InputError("this folder has no model.safetensors", file=folder, fix=fix)


def _check_keys(folder: Path, family: Family, info: dict[str, Any]) -> None:
    """Raise an error if weights of the body are missing or superfluous; warn of a missing head."""
    mismatched = [entry[0] for entry in info["mismatched_keys"]]
    layers = family.layers.split(".")[0]
    surplus = [
        key
        for key in info["unexpected_keys"]
        if f"{layers}." in key and f".{CROSS_ATTENTION}." not in key
    ]
    missing = [
        key for key in info["missing_keys"] if not any(part in key for part in family.optional)
    ]
    head = [key for key in missing if key.startswith(family.head_prefixes)]
    body = sorted(key for key in [*missing, *mismatched, *surplus] if key not in head)
    if body:
        raise InputError(
            f"{len(body)} tensors are missing, superfluous or of a wrong shape, first {body[0]}",
            file=folder,
            fix="config.json and the weights do not belong together",
        )
    if head:
        warnings.warn(
            f"{folder}: the checkpoint has no language-modeling head; it is initialized at random",
            MissingHeadWarning,
            stacklevel=2,
        )
