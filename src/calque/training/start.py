"""The encoder that a run begins with: loaded, plugged, given a decoder, or drawn from the seed.

The weights of a recipe by name, without numbers: wrong patterns are told before text is read.

Getting ready to train: text, tokenizer, paths, engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from calque.errors import InputError, first_line
from calque.io.files import check_place, write_atomically
from calque.io.outputs import join_processes, write_folder
from calque.models.encoder import Encoder
from calque.models.loading import build_model, check_rows, count_positions, find_folder, load_config
from calque.models.seq2seq import (
    build_seq2seq,
    check_decodes,
    check_plan,
    choose_layers,
    read_weights,
    sketch_halves,
    start_afresh,
    without_languages,
)
from calque.models.veco import Veco, build_plugged, check_plugs, plain_config
from calque.objectives import OBJECTIVES, build_objective
from calque.objectives.base import Marks
from calque.objectives.distillation import DistillationSettings
from calque.objectives.generation import Writing
from calque.tokens.prepare import (
    PreparedCorpus,
    open_prepared,
    prepare_corpora,
    read_hold_out,
    train_on_sources,
)
from calque.tokens.streams import seed_of
from calque.tokens.tokenizer import load_tokenizer
from calque.training.data import check_sources, cleaning_rules, find_sources
from calque.training.recipe import anchor_probe
from calque.training.step import TrainStep, find_trained, freeze

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import PreTrainedTokenizerFast

    from calque.objectives import AnySettings
    from calque.training.recipe import ModelSection, Recipe


# Sets the draws for cross-attention apart from those of the objectives.
PLUG_SEED = 1 << 16


def build_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Load the encoder to start from, or make one with weights drawn from the recipe's seed."""
    make = _start_encoder if recipe.model.decoder is None else _start_seq2seq
    encoder = make(recipe, tokenizer)
    _set_dropout(encoder, recipe.model)
    _retire_biases(encoder)
    _check_length(recipe, encoder.max_tokens)
    return encoder


def check_start(recipe: Recipe) -> None:
    """Refuse an encoder that cannot be trained so before any text is prepared for it."""
    model = recipe.model
    plan = None if model.decoder is None else model.decoder.plan()
    if model.start is not None and plan is not None:
        return _check_length(recipe, check_plan(model.start, plan))
    kind, n_positions = model.architecture, model.positions
    if model.start is not None:
        config = load_config(find_folder(model.start))
        kind, n_positions = config.model_type, count_positions(config)
    if model.cross_attention is not None:
        check_plugs(kind)
    if plan is not None:
        check_decodes(kind)
        choose_layers(model.layers, plan)
    return _check_length(recipe, n_positions)


def _check_length(recipe: Recipe, n_positions: int) -> None:
    if recipe.data.max_length > n_positions:
        raise InputError(
            f"data.max_length={recipe.data.max_length} exceeds the model's {n_positions}",
            fix="lower data.max_length",
        )


def _start_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Make an encoder alone, or one with cross-attention plugged in."""
    if recipe.model.start is not None:
        kind = Veco if recipe.model.cross_attention == "start" else Encoder
        encoder = kind.load(recipe.model.start)
        check_vocabulary(encoder.tokenizer.get_vocab(), tokenizer.get_vocab(), recipe)
        _forget_origin(encoder, recipe.name)
    else:
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(recipe.seed)
            encoder = Encoder(build_model(make_config(recipe.model, tokenizer)), tokenizer)
    if recipe.model.cross_attention in ("self", "random"):
        generator = torch.Generator().manual_seed(seed_of(recipe.seed, PLUG_SEED))
        encoder = Veco.plug(encoder, recipe.model.cross_attention, generator)
    return encoder


def _start_seq2seq(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Make an encoder–decoder; languages that were taught before have tokens of their own."""
    assert recipe.model.decoder is not None
    plan, start = recipe.model.decoder.plan(), recipe.model.start
    if start is None:
        weights = start_afresh(make_config(recipe.model, tokenizer))
    else:
        known = load_tokenizer(find_folder(start))
        theirs, ours = (without_languages(each.get_vocab()) for each in (known, tokenizer))
        check_vocabulary(theirs, ours, recipe)
        weights, tokenizer = read_weights(start, plan), known
    encoder = build_seq2seq(plan, weights, tokenizer, seed=recipe.seed)
    _forget_origin(encoder, recipe.name)
    return encoder


def check_vocabulary(model: dict[str, int], text: dict[str, int], recipe: Recipe) -> None:
    """Refuse text that was tokenised for another model."""
    if model != text:
        raise InputError(
            "the text was prepared with another vocabulary than this model's",
            file=recipe.model.start,
            fix="prepare the text again, without a tokenizer.path of its own",
        )


def _forget_origin(encoder: Encoder, recipe: str) -> None:
    """Keep the choices stored with the encoder, but not the scores: it will be another one."""
    if settings := encoder.settings:
        settings.pop("scores", None)
        encoder.config.calque = settings | {"recipe": recipe}


def make_config(model: ModelSection, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Describe a new encoder as Hugging Face does."""
    from transformers import AutoConfig

    shifted = model.architecture in ("xlm-roberta", "roberta")
    first = int(tokenizer.pad_token_id or 0) + 1 if shifted else 0
    return AutoConfig.for_model(
        model.architecture,
        **shape_of(model),
        vocab_size=len(tokenizer),
        max_position_embeddings=model.positions + first,
        type_vocab_size=1 if shifted else 2,
        layer_norm_eps=1e-5,  # as the published RoBERTa and XLM-R; 1e-12 vanishes in float16
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def shape_of(model: ModelSection) -> dict[str, int]:
    """Give the numbers of a new encoder that do not depend on its vocabulary."""
    return {
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "intermediate_size": model.intermediate,
    }


def _set_dropout(encoder: Encoder, model: ModelSection) -> None:
    """Set the dropout of every layer to what the recipe says."""
    for name, module in encoder.model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            in_attention = name.endswith(("attention.self.dropout", "attention.dropout"))
            module.p = model.attention_dropout if in_attention else model.dropout
        if hasattr(module, "attention_dropout"):  # ModernBERT keeps a number, not a module
            module.attention_dropout = model.attention_dropout
    for config in encoder.configs:
        for key in ("hidden_dropout_prob", "mlp_dropout", "embedding_dropout", "dropout"):
            if hasattr(config, key):
                setattr(config, key, model.dropout)
        for key in ("attention_probs_dropout_prob", "attention_dropout"):
            if hasattr(config, key):
                setattr(config, key, model.attention_dropout)


def _retire_biases(encoder: Encoder) -> None:
    """Freeze a head's second bias, which nothing reads: DDP would wait for its gradient forever.

    Where the output layer is not tied to the embeddings, Hugging Face's heads have a bias of their
    own beside the one of the output layer.
    """
    for module in encoder.model.modules():
        own = getattr(module, "bias", None)
        inside = getattr(getattr(module, "decoder", None), "bias", None)
        if isinstance(own, torch.nn.Parameter) and inside is not None and own is not inside:
            own.requires_grad_(False)


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


Say = Callable[[str], None]
STAMP = "tokenizer_recipe.json"


def prepare_text(
    recipe: Recipe,
    base: Path,
    folder: Path,
    *,
    say: Say,
    n_workers: int | None = None,
    on_progress: Callable[[str, int], None] = lambda name, n_examples: None,
) -> list[PreparedCorpus]:
    """Read, clean and tokenise all that a recipe names; what is there already is kept.

    `base` is the folder the recipe's relative paths start from. `on_progress` is told the
    corpus and how many examples it has so far.
    """
    check_place(folder)
    sources, rules = find_sources(recipe.data, base), cleaning_rules(recipe.data)
    check_start(recipe)
    check_freezing(recipe)
    held_out = _beside(recipe.data.hold_out, base)
    if held_out is not None and not Path(held_out).is_file():
        fix = "correct data.hold_out, or go without: --set data.hold_out=null"
        raise InputError("no such file of pairs to hold out", file=held_out, fix=fix)
    hold_out = read_hold_out(None if held_out is None else Path(held_out))
    tokenizer = find_tokenizer(recipe, folder)
    if tokenizer is None:
        say(f"training a tokenizer of {recipe.tokenizer.vocab_size:,} entries")
        tokenizer = train_on_sources(
            sources,
            rules,
            hold_out,
            vocab_size=recipe.tokenizer.vocab_size,
            n_characters=recipe.tokenizer.sample_characters,
            alpha=recipe.tokenizer.alpha,
            character_coverage=recipe.tokenizer.character_coverage,
            seed=recipe.seed,
        )
        _keep_tokenizer(tokenizer, folder / "tokenizer")
    _check_tokenizer(recipe, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with write_atomically(folder / STAMP) as stream:
        stream.write(_stamp_tokenizer(recipe))
    corpora = prepare_corpora(
        sources,
        tokenizer,
        folder,
        rules=rules,
        hold_out=hold_out,
        n_workers=n_workers or os.cpu_count() or 1,
        on_progress=on_progress,
    )
    for corpus in corpora:
        say(f"{corpus.name}: {describe_cleaning(corpus)}")
    return corpora


def check_text(recipe: Recipe, base: Path) -> None:
    """Refuse a recipe with an objective that none of its text is for."""
    objectives = [build_objective(settings) for settings in recipe.objectives]
    check_sources(objectives, find_sources(recipe.data, base))


def describe_cleaning(corpus: PreparedCorpus) -> str:
    """Say in a line what was kept and what was dropped, and why."""
    dropped = ", ".join(f"{reason} {n}" for reason, n in corpus.cleaning["dropped"].items())
    read = corpus.cleaning["n_read"]
    return f"{corpus.n_examples} of {read} examples kept; dropped: {dropped or 'none'}"


def find_tokenizer(recipe: Recipe, folder: Path) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer a recipe names, or its model's, or the one trained for it before."""
    if recipe.tokenizer.path is not None:
        return load_tokenizer(recipe.tokenizer.path)
    if recipe.model.start is not None:
        return load_tokenizer(find_folder(recipe.model.start))
    made, stamp = folder / "tokenizer", folder / STAMP
    if not (made / "tokenizer.json").exists():
        return None
    is_stale = stamp.exists() and stamp.read_text(encoding="utf-8") != _stamp_tokenizer(recipe)
    return None if is_stale else load_tokenizer(made)


def _keep_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a trained tokenizer whole or not at all: half of one would be taken for it later."""

    def write(draft: Path) -> None:
        try:
            tokenizer.save_pretrained(draft)
        except Exception as error:  # the tokenizers library raises nothing more precise
            problem, fix = f"cannot be written: {first_line(error)}", "free some space"
            raise InputError(problem, file=folder, fix=fix) from error

    write_folder(folder, write)


def _check_tokenizer(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> None:
    """Refuse a tokenizer that the model cannot be trained with before any text is prepared."""
    Marks.of(tokenizer)
    start = recipe.model.start
    if start is None or recipe.model.decoder is not None:
        return
    folder = find_folder(start)
    check_rows(folder, tokenizer, load_config(folder).vocab_size)
    if recipe.tokenizer.path is not None:
        check_vocabulary(load_tokenizer(folder).get_vocab(), tokenizer.get_vocab(), recipe)


def _stamp_tokenizer(recipe: Recipe) -> str:
    """Write down what decides a trained tokenizer, so that a change of it is noticed."""
    content = {
        "seed": recipe.seed,
        "tokenizer": recipe.tokenizer.model_dump(),
        "sources": [
            source.model_dump(exclude={"weight"})
            for source in recipe.data.sources
            if source.kind != "vectors"
        ],
        "data": recipe.data.model_dump(include={"leave_out_languages", "hold_out", "cleaning"}),
    }
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def anchor_paths(recipe: Recipe, base: Path) -> Recipe:
    """Make folders and files beside the recipe findable from anywhere."""
    start = {"start": _beside(recipe.model.start, base)}
    path = {"path": _beside(recipe.tokenizer.path, base)}
    return recipe.model_copy(
        update={
            "model": recipe.model.model_copy(update=start),
            "tokenizer": recipe.tokenizer.model_copy(update=path),
            "objectives": [_anchor_teacher(settings, base) for settings in recipe.objectives],
            "probe": anchor_probe(recipe.probe, base),
        }
    )


def _anchor_teacher(settings: AnySettings, base: Path) -> AnySettings:
    """Find an objective's teacher beside the recipe, if it has one."""
    if not isinstance(settings, DistillationSettings):
        return settings
    return settings.model_copy(update={"teacher": _beside(settings.teacher, base)})


def open_text(folder: Path) -> tuple[list[PreparedCorpus], PreTrainedTokenizerFast]:
    """Open a prepared folder: its corpora and its tokenizer."""
    return open_prepared(folder), load_tokenizer(folder / "tokenizer")


def make_accelerator(recipe: Recipe, encoder: Encoder) -> Accelerator:
    """Set the engine up: one process or many, DDP or FSDP2, bf16 on a GPU that has it."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    state = join_processes()
    shards = recipe.engine.distributed == "fsdp" and state.num_processes > 1
    precision = recipe.engine.precision
    if precision == "auto":
        precision = "bf16" if state.device.type == "cuda" else "fp32"
    every_weight = any(_uses_all_weights(settings) for settings in recipe.objectives)
    every_weight = every_weight and recipe.freeze_steps is None and not _leaves_decoder(recipe)
    accelerator = Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        cpu=state.device.type == "cpu",
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=not every_weight)],
        fsdp_plugin=_plan_sharding(encoder, precision) if shards else None,
    )
    if shards and not accelerator.is_fsdp2:
        raise InputError(
            f"engine.distributed=fsdp shards nothing on {state.device.type}",
            fix="set engine.distributed=ddp, or use GPUs",
        )
    return accelerator


def _leaves_decoder(recipe: Recipe) -> bool:
    """Tell whether there is a decoder, but nothing that it learns to write."""
    writes = any(issubclass(OBJECTIVES[each.kind], Writing) for each in recipe.objectives)
    return recipe.model.decoder is not None and not writes


def _uses_all_weights(settings: AnySettings) -> bool:
    """Tell whether all weights get gradients: the distance from the start has one for each."""
    held = getattr(settings, "parameter_weight", 0.0)
    return OBJECTIVES[settings.kind].uses_all_weights or held > 0


def _plan_sharding(encoder: Encoder, precision: str) -> FullyShardedDataParallelPlugin:
    """Shard layer by layer; what is outside the layers is gathered for the whole step.

    Weights travel and compute in bf16 where asked, but gradients are summed in float32.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    layer = encoder.family.layers_of(encoder.model)[0]
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(layer).__name__],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=bf16 if precision == "bf16" else None,
    )


def _beside(path: str | None, base: Path) -> str | None:
    """Find a path beside the recipe, or leave it: to the working directory, or as a hub name."""
    if path is None:
        return None
    found = base / Path(path).expanduser()
    return str(found.resolve()) if found.exists() else path
