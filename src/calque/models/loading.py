"""Loading and saving plain Hugging Face folders: safetensors only, and no code in them is run."""

from __future__ import annotations

import copy
import gc
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from calque.errors import InputError, first_line
from calque.models.attention import register_attention
from calque.models.configuration import choose_head, load_config
from calque.models.families import Family, find_family
from calque.models.weights import COPY_AGAIN, read_weights
from calque.tokens.tokenizer import TOKENIZER_FILES, load_tokenizer, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


EMBEDDED_MODEL = "calque-mini"
# Hugging Face's name of a layer's cross-attention.
CROSS_ATTENTION = "crossattention"
# Seconds to wait for an answer of the hub: without network, a name must fail quickly.
HUB_SECONDS = 3.0
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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    fix = f"download it first with `hf download {name}`, give a folder, or use {EMBEDDED_MODEL}"
    hub_error = _ask_hub(name)
    if isinstance(hub_error, HFValidationError):
        fix = f"give a folder, a hub name such as xlm-roberta-base, or {EMBEDDED_MODEL}"
        problem = "there is no such folder, and this is not a hub name"
        raise InputError(problem, file=name, fix=fix) from hub_error
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


def _ask_hub(name: str) -> Exception | None:
    """Return None if the hub has a model, otherwise the error: offline, unknown, gated, ...

    A thread asks, since no timeout of the libraries limits the whole time: neither the search for
    an address nor an answer that comes byte by byte.
    """
    import httpx
    from huggingface_hub import HfApi

    answers: Queue[Exception | None] = Queue()

    def ask() -> None:
        timeout: Any = httpx.Timeout(HUB_SECONDS)
        try:
            HfApi().model_info(name, timeout=timeout)
            answers.put(None)
        except Exception as error:  # noqa: BLE001 (there are many kinds)
            answers.put(error)

    Thread(target=ask, daemon=True).start()
    try:
        return answers.get(timeout=HUB_SECONDS)
    except Empty:
        return TimeoutError(f"it did not answer within {HUB_SECONDS:g} seconds")


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Do not search for garbage: importing transformers creates many objects and frees few.

    This saves a sixth of the CPU time until the first alignment of a new process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@pause_garbage_collection()
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
    model = _load_encoder(folder, config, family, dtype)
    tokenizer = load_tokenizer(folder)
    embeddings: Any = model.get_input_embeddings()
    check_vocabulary_size(folder, tokenizer, len(embeddings.weight))
    return model, tokenizer, folder


def check_vocabulary_size(folder: Path, tokenizer: PreTrainedTokenizerFast, n_rows: int) -> None:
    """Raise an error if the tokenizer has more entries or higher ids than there are embeddings."""
    from tokenizers.models import Unigram

    n_ids = len(tokenizer)
    if not isinstance(tokenizer.backend_tokenizer.model, Unigram):  # whose ids are consecutive
        n_ids = max(n_ids, 1 + max(tokenizer.get_vocab().values(), default=0))
    if n_ids > n_rows:
        raise InputError(
            f"the tokenizer has {n_ids} entries but the model has {n_rows} embeddings",
            file=folder,
            fix="use the tokenizer that the model was trained with",
        )


def build_model(config: Any) -> PreTrainedModel:
    """Return an encoder of a given configuration with random weights."""
    from transformers import AutoModelForMaskedLM

    find_family(config.model_type, None)
    config = choose_head(copy.deepcopy(config))
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
        write_tokenizer(tokenizer, folder)
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


def _set_cross_attention(folder: Path, config: Any, *, wanted: bool) -> None:
    """Switch cross-attention on or off in a configuration."""
    has_cross_attention = bool(getattr(config, "add_cross_attention", False))
    if wanted and not has_cross_attention:
        fix = "give the folder `veco` of a model trained with cross_attention_lm"
        raise InputError("this model has no cross-attention", file=folder, fix=fix)
    if has_cross_attention and not wanted:
        config.is_decoder = config.add_cross_attention = False


def _load_encoder(folder: Path, config: Any, family: Family, dtype: torch.dtype) -> PreTrainedModel:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    has_cross_attention = getattr(config, "add_cross_attention", False)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if has_cross_attention else MODEL_FOR_MASKED_LM_MAPPING
    model, info = load_weights(
        classes[type(config)],
        folder,
        config,
        dtype,
        key_mapping=dict(family.renamed) or None,
        ignore_mismatched_sizes=True,  # `_check_keys` reports them by name
    )
    _check_keys(folder, family, info)
    return model  # type: ignore[no-any-return]


def load_weights(
    model_class: Any, folder: Path, config: Any, dtype: torch.dtype, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return a model with the weights of a folder, and which of them are missing or superfluous.

    The weights are read here, so that Hugging Face's code opens no files.
    """
    weights = read_weights(folder)
    try:
        with silence_transformers():
            model, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=weights,
                dtype=dtype,
                attn_implementation=register_attention(),
                output_loading_info=True,
                **options,
            )
    except Exception as error:
        problem = f"the weights cannot be loaded: {first_line(error)}"
        raise InputError(problem, file=folder, fix=COPY_AGAIN) from error
    return model, info


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
