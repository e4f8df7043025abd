"""Getting ready to train: text, tokenizer, encoder, streams, engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from calque.models.encoder import Encoder
from calque.models.loading import build_model
from calque.text.preparation import PreparedCorpus, open_prepared, prepare_corpora, read_hold_out
from calque.text.tokenization import load_tokenizer
from calque.text.tokenizer_training import train_on_sources
from calque.training.data import cleaning_rules, find_sources
from calque.types import InputError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerFast

    from calque.training.recipe import ModelSection, Recipe

Say = Callable[[str], None]


def prepare_text(
    recipe: Recipe, base: Path, folder: Path, *, say: Say, n_workers: int | None = None
) -> list[PreparedCorpus]:
    """Read, clean and tokenise all that a recipe names; what is there already is kept.

    `base` is the folder the recipe's relative paths start from.
    """
    sources, rules = find_sources(recipe.data, base), cleaning_rules(recipe.data)
    hold_out = read_hold_out(_beside(recipe.data.hold_out, base))
    tokenizer = find_tokenizer(recipe, folder)
    if tokenizer is None:
        say(f"training a tokenizer of {recipe.tokenizer.vocab_size} entries")
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
        tokenizer.save_pretrained(folder / "tokenizer")
    corpora = prepare_corpora(
        sources,
        tokenizer,
        folder,
        rules=rules,
        hold_out=hold_out,
        n_workers=n_workers or os.cpu_count() or 1,
        on_progress=lambda name, n_examples: say(f"{name}: {n_examples} examples"),
    )
    for corpus in corpora:
        say(f"{corpus.name}: {describe_cleaning(corpus)}")
    return corpora


def describe_cleaning(corpus: PreparedCorpus) -> str:
    """Say in a line what was kept and what was dropped, and why."""
    dropped = ", ".join(f"{reason} {n}" for reason, n in corpus.cleaning["dropped"].items())
    read = corpus.cleaning["n_read"]
    return f"{corpus.n_examples} of {read} examples kept; dropped: {dropped or 'none'}"


def find_tokenizer(recipe: Recipe, folder: Path) -> PreTrainedTokenizerFast | None:
    """Load the tokenizer a recipe names, or that of the model it starts from, or one made before."""
    name = recipe.tokenizer.path or recipe.model.start
    if name is not None:
        return load_tokenizer(name)
    made = folder / "tokenizer"
    return load_tokenizer(made) if (made / "tokenizer.json").exists() else None


def open_text(folder: Path) -> tuple[list[PreparedCorpus], PreTrainedTokenizerFast]:
    """Open a prepared folder: its corpora and its tokenizer."""
    return open_prepared(folder), load_tokenizer(folder / "tokenizer")


def build_encoder(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """Load the encoder to start from, or make one with weights drawn from the recipe's seed."""
    if recipe.model.start is not None:
        encoder = Encoder.load(recipe.model.start)
        if len(encoder.tokenizer) != len(tokenizer):
            raise InputError(
                f"the text has {len(tokenizer)} kinds of tokens, the model {len(encoder.tokenizer)}",
                file=recipe.model.start,
                fix="prepare the text with this model's tokenizer",
            )
    else:
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            encoder = Encoder(build_model(make_config(recipe.model, tokenizer)), tokenizer)
    _set_dropout(encoder, recipe.model)
    if recipe.data.max_length > encoder.max_tokens:
        raise InputError(
            f"data.max_length={recipe.data.max_length} exceeds the model's {encoder.max_tokens}",
            fix="lower data.max_length",
        )
    return encoder


def make_config(model: ModelSection, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Describe a new encoder as Hugging Face does."""
    from transformers import AutoConfig

    shifted = model.architecture in ("xlm-roberta", "roberta")
    first = int(tokenizer.pad_token_id or 0) + 1 if shifted else 0
    return AutoConfig.for_model(
        model.architecture,
        vocab_size=len(tokenizer),
        num_hidden_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        intermediate_size=model.intermediate,
        max_position_embeddings=model.positions + first,
        type_vocab_size=1 if shifted else 2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def make_accelerator(recipe: Recipe) -> Accelerator:
    """Set the engine up: one process or many, DDP or FSDP2, bf16 on a GPU that has it."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = None
    if recipe.engine.distributed == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
        )
    precision = recipe.engine.precision
    if precision == "auto":
        precision = "bf16" if torch.cuda.is_available() else "fp32"
    return Accelerator(
        mixed_precision="bf16" if precision == "bf16" else "no",
        cpu=not torch.cuda.is_available(),
        fsdp_plugin=plugin,
    )


def _set_dropout(encoder: Encoder, model: ModelSection) -> None:
    """Set the dropout of every layer to what the recipe says."""
    for name, module in encoder.model.named_modules():
        if isinstance(module, torch.nn.Dropout):
            in_attention = name.endswith("attention.self.dropout")
            module.p = model.attention_dropout if in_attention else model.dropout
        if hasattr(module, "attention_dropout"):  # ModernBERT keeps a number, not a module
            module.attention_dropout = model.attention_dropout
    config = encoder.model.config
    for key in ("hidden_dropout_prob", "mlp_dropout", "embedding_dropout"):
        if hasattr(config, key):
            setattr(config, key, model.dropout)
    for key in ("attention_probs_dropout_prob", "attention_dropout"):
        if hasattr(config, key):
            setattr(config, key, model.attention_dropout)


def _beside(path: str | None, base: Path) -> Path | None:
    if path is None:
        return None
    return base / path if (base / path).exists() else Path(path)
