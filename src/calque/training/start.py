"""The start of a run: its encoder (loaded, extended or random) and its Accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from calque.errors import InputError
from calque.io.shards import process_state
from calque.models.configuration import load_config, max_sequence_length
from calque.models.encoder import Encoder
from calque.models.loading import build_model, find_model
from calque.models.seq2seq import (
    build_seq2seq,
    build_untrained_halves,
    check_can_decode,
    check_decoder_plan,
    choose_decoder_layers,
    drop_language_tokens,
    random_weights,
    read_initial_weights,
)
from calque.models.veco import (
    Veco,
    build_cross_attention_model,
    check_cross_attention,
    without_cross_attention,
)
from calque.objectives import OBJECTIVES, build_objective
from calque.objectives.generation import Seq2SeqObjective
from calque.tokens.sampling import derive_seed
from calque.tokens.tokenizer import load_tokenizer
from calque.training.optimizer import freeze, trainable_parameters
from calque.training.step import TrainStep

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import PreTrainedTokenizerFast

    from calque.objectives import AnySettings
    from calque.training.recipe import ModelSection, Recipe


# Seeds the cross-attention differently from the objectives.
CROSS_ATTENTION_SEED = 1 << 16


def build_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Load the encoder of `model.start`, or build one with weights drawn from the recipe's seed."""
    build = _build_encoder if recipe.model.decoder is None else _build_seq2seq
    encoder = build(recipe, tokenizer)
    _set_dropout(encoder, recipe.model)
    _freeze_unused_biases(encoder)
    _check_length(recipe, encoder.max_tokens)
    return encoder


def build_config(model: ModelSection, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return the Hugging Face config of a new encoder."""
    from transformers import AutoConfig

    # RoBERTa numbers positions from the padding id + 1.
    is_roberta = model.architecture in ("xlm-roberta", "roberta")
    first_position = int(tokenizer.pad_token_id or 0) + 1 if is_roberta else 0
    return AutoConfig.for_model(
        model.architecture,
        **_shape(model),
        vocab_size=len(tokenizer),
        max_position_embeddings=model.positions + first_position,
        type_vocab_size=1 if is_roberta else 2,
        layer_norm_eps=1e-5,  # as in RoBERTa and XLM-R; 1e-12 is 0 in float16
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def check_start(recipe: Recipe) -> None:
    """Raise an InputError if the encoder does not fit the recipe, before text is prepared."""
    model = recipe.model
    plan = None if model.decoder is None else model.decoder.plan()
    if model.start is not None and plan is not None:
        return _check_length(recipe, check_decoder_plan(model.start, plan))
    kind, n_positions = model.architecture, model.positions
    if model.start is not None:
        config = load_config(find_model(model.start))
        kind, n_positions = config.model_type, max_sequence_length(config)
    if model.cross_attention is not None:
        check_cross_attention(kind)
    if plan is not None:
        check_can_decode(kind)
        choose_decoder_layers(model.layers, plan)
    return _check_length(recipe, n_positions)


def check_vocabulary(model: dict[str, int], text: dict[str, int], start: str | None) -> None:
    """Raise an InputError if the text was tokenized for a model with another vocabulary."""
    if model != text:
        raise InputError(
            "the text was prepared with another vocabulary than this model's",
            file=start,
            fix="prepare the text again without setting tokenizer.path",
        )


def check_freeze(recipe: Recipe) -> None:
    """Raise an InputError if a pattern of `freeze` matches no parameter, or all are frozen.

    The parameters are those of a model on the meta device, which has names but no memory.
    """
    if not recipe.freeze:
        return
    step = build_meta_step(recipe)
    freeze(step, recipe.freeze)
    # Linear maps are created for the languages of the text, which are not known yet.
    if all(settings.kind != "linear_map" for settings in recipe.objectives):
        trainable_parameters(step)


def build_meta_step(recipe: Recipe) -> TrainStep:
    """Build the encoder (without memory for its weights) and the objectives of a recipe."""
    encoder: Any = nn.Module()
    with torch.random.fork_rng(devices=()), torch.device("meta"):
        config, encoder.model = _build_meta_model(recipe.model)
    objectives = [build_objective(settings) for settings in recipe.objectives]
    for objective in objectives:
        objective.add_weights(config.hidden_size, torch.Generator())
    return TrainStep(encoder, objectives)


def build_accelerator(recipe: Recipe, encoder: Encoder) -> Accelerator:
    """Return the Accelerator: one process or many, DDP or FSDP2, bf16 on GPUs by default."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState

    state = process_state()
    is_sharded = recipe.engine.distributed == "fsdp" and state.num_processes > 1
    precision = recipe.engine.precision
    if precision == "auto":
        precision = "bf16" if state.device.type == "cuda" else "fp32"
    all_used = _trains_all_weights(recipe)
    mixed = "bf16" if precision == "bf16" else "no"
    # The state of an earlier run in this process is kept, and must not have another precision.
    if AcceleratorState._shared_state.get("_mixed_precision", mixed) != mixed:
        AcceleratorState._reset_state()
    accelerator = Accelerator(
        mixed_precision=mixed,
        cpu=state.device.type == "cpu",
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=not all_used)],
        fsdp_plugin=_plan_sharding(encoder, precision) if is_sharded else None,
    )
    if is_sharded and not accelerator.is_fsdp2:
        raise InputError(
            f"engine.distributed=fsdp does not work on {state.device.type}",
            fix="set engine.distributed=ddp, or use GPUs",
        )
    return accelerator


def _build_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Load or build an encoder, with cross-attention if the recipe asks for it."""
    model = recipe.model
    if model.start is not None:
        kind = Veco if model.cross_attention == "start" else Encoder
        encoder = kind.load(model.start)
        check_vocabulary(encoder.tokenizer.get_vocab(), tokenizer.get_vocab(), model.start)
        _reset_settings(encoder, recipe.name)
    else:
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(recipe.seed)
            encoder = Encoder(build_model(build_config(model, tokenizer)), tokenizer)
    if model.cross_attention in ("self", "random"):
        generator = torch.Generator().manual_seed(derive_seed(recipe.seed, CROSS_ATTENTION_SEED))
        encoder = Veco.plug(encoder, model.cross_attention, generator)
    return encoder


def _build_seq2seq(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Load or build an encoder–decoder; a loaded one keeps the tokens of its target languages."""
    assert recipe.model.decoder is not None
    plan, start = recipe.model.decoder.plan(), recipe.model.start
    if start is None:
        weights = random_weights(build_config(recipe.model, tokenizer))
    else:
        known = load_tokenizer(find_model(start))
        theirs, ours = (drop_language_tokens(each.get_vocab()) for each in (known, tokenizer))
        check_vocabulary(theirs, ours, start)
        weights, tokenizer = read_initial_weights(start, plan), known
    encoder = build_seq2seq(plan, weights, tokenizer, seed=recipe.seed)
    _reset_settings(encoder, recipe.name)
    return encoder


def _reset_settings(encoder: Encoder, recipe: str) -> None:
    """Keep the settings stored with the encoder but not its scores, which training changes.

    Neither are the scores of its links probabilities any more.
    """
    if settings := encoder.settings:
        settings.pop("scores", None)
        if alignment := settings.get("alignment"):
            kept = {key: value for key, value in alignment.items() if key != "calibration"}
            if kept.get("method") == "probability":
                kept["method"] = "argmax"
            settings["alignment"] = kept
        encoder.config.calque = settings | {"recipe": recipe}


def _set_dropout(encoder: Encoder, model: ModelSection) -> None:
    """Set the dropout of every layer, and in the config, to the recipe's values."""
    for name, module in encoder.model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            in_attention = name.endswith(("attention.self.dropout", "attention.dropout"))
            module.p = model.attention_dropout if in_attention else model.dropout
        if hasattr(module, "attention_dropout"):  # a number in ModernBERT, not a module
            module.attention_dropout = model.attention_dropout
    for config in encoder.configs:
        for key in ("hidden_dropout_prob", "mlp_dropout", "embedding_dropout", "dropout"):
            if hasattr(config, key):
                setattr(config, key, model.dropout)
        for key in ("attention_probs_dropout_prob", "attention_dropout"):
            if hasattr(config, key):
                setattr(config, key, model.attention_dropout)


def _freeze_unused_biases(encoder: Encoder) -> None:
    """Freeze the second bias of a head, which is not used: DDP would wait for its gradient.

    Where the output layer is not tied to the embeddings, Hugging Face's heads have a bias of their
    own besides that of the output layer.
    """
    for module in encoder.model.modules():
        own = getattr(module, "bias", None)
        inside = getattr(getattr(module, "decoder", None), "bias", None)
        if isinstance(own, torch.nn.Parameter) and inside is not None and own is not inside:
            own.requires_grad_(False)


def _check_length(recipe: Recipe, n_positions: int) -> None:
    for objective in recipe.objectives:
        key, max_length = recipe.data.find_max_length(objective)
        if max_length > n_positions:
            raise InputError(
                f"{key}={max_length} exceeds the model's {n_positions} positions",
                fix=f"lower {key}",
            )


def _shape(model: ModelSection) -> dict[str, int]:
    """Return the parts of a new encoder's config that do not depend on its vocabulary."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate,
    }


def _build_meta_model(model: ModelSection) -> tuple[Any, nn.Module]:
    """Build a model on the meta device, and return its encoder's config with it.

    Names of parameters do not depend on the vocabulary, so any vocabulary does for a new encoder.
    """
    from transformers import AutoConfig

    plan = None if model.decoder is None else model.decoder.plan()
    if model.start is None:
        config = AutoConfig.for_model(model.architecture, **_shape(model))
    elif plan is not None:
        return build_untrained_halves(model.start, plan)
    else:
        config = load_config(find_model(model.start))
    if plan is not None:
        return build_untrained_halves(config, plan)
    if model.cross_attention is not None:
        return config, build_cross_attention_model(config)
    return config, build_model(without_cross_attention(config))


def _trains_all_weights(recipe: Recipe) -> bool:
    """Return whether every weight gets a gradient in every step, so that DDP need not search.

    The distance from the pretrained weights has a gradient for each of them.
    """

    def uses_all(settings: AnySettings) -> bool:
        is_regularized = getattr(settings, "parameter_weight", 0.0) > 0
        return OBJECTIVES[settings.kind].uses_all_weights or is_regularized

    kinds = [OBJECTIVES[settings.kind] for settings in recipe.objectives]
    generates = any(issubclass(kind, Seq2SeqObjective) for kind in kinds)
    has_untrained_decoder = recipe.model.decoder is not None and not generates
    is_unfrozen_later = recipe.freeze_steps is not None
    return (
        any(map(uses_all, recipe.objectives))
        and not is_unfrozen_later
        and not has_untrained_decoder
    )


def _plan_sharding(encoder: Encoder, precision: str) -> FullyShardedDataParallelPlugin:
    """Shard layer by layer; weights outside the layers are gathered for the whole step.

    With bf16, weights are communicated and used in bf16, but gradients are summed in float32.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    layer = encoder.family.get_layers(encoder.model)[0]
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(layer).__name__],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=bf16 if precision == "bf16" else None,
    )
