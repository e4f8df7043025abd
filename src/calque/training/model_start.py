"""The encoder that a run begins with: loaded, plugged, given a decoder, or drawn from the seed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from calque.models.encoder import Encoder
from calque.models.language_tokens import without_languages
from calque.models.loading import build_model, count_positions, find_folder, load_config
from calque.models.seq2seq_start import (
    build_seq2seq,
    check_decodes,
    check_plan,
    choose_layers,
    read_weights,
    start_afresh,
)
from calque.models.veco import Veco, check_plugs
from calque.text.streams import seed_of
from calque.text.tokenization import load_tokenizer
from calque.types import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
