"""Getting ready to train: text, tokenizer, paths, engine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from calque.models.encoder import Encoder
from calque.models.loading import (
    check_rows,
    find_folder,
    load_config,
)
from calque.objectives import OBJECTIVES, build_objective
from calque.objectives.base import Marks
from calque.objectives.distillation import DistillationSettings
from calque.objectives.translation import Writing
from calque.text.files import check_place, write_atomically
from calque.text.preparation import PreparedCorpus, open_prepared, prepare_corpora, read_hold_out
from calque.text.tokenization import load_tokenizer
from calque.text.tokenizer_training import train_on_sources
from calque.training.checkpoints import write_folder
from calque.training.data import check_sources, cleaning_rules, find_sources
from calque.training.model_start import check_start, check_vocabulary
from calque.training.probe_settings import anchor_probe
from calque.training.processes import join_processes
from calque.training.sketch import check_freezing
from calque.types import InputError, first_line

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import PreTrainedTokenizerFast

    from calque.objectives import AnySettings
    from calque.training.recipe import Recipe

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
