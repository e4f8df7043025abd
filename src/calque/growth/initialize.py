"""Weights of a model with a new vocabulary, initialized from a monolingual model (MetaXLM).

The body is everything that does not depend on the vocabulary: positions, token types, layers and
the transformation before the last matrix of the language modeling head. Embedding rows are means of
matched rows, or drawn from the distribution of the matched rows.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from calque.errors import InputError
from calque.growth.match import SPECIAL, UNMATCHED
from calque.models.families import find_family
from calque.models.loading import MissingHeadWarning, build_model, load_checkpoint

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from calque.growth.match import RowSources, VocabularyMatch

Initialize: TypeAlias = Literal["both", "body", "embeddings", "none"]
Unmatched: TypeAlias = Literal["moments", "normal", "pieces"]

NORMAL_DEVIATION = 0.02
BLOCK_ROWS = 1 << 14
JITTERS = (1e-9, 1e-7, 1e-5, 1e-3)


@dataclass(frozen=True, slots=True)
class MonolingualModel:
    """A monolingual model, its tokenizer, and whether it has a language modeling head."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    has_head: bool


def load_monolingual(name: str | Path) -> MonolingualModel:
    """Load a monolingual model, with or without a language modeling head."""
    # A missing head is initialized at random, which must not advance the global generator.
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=()):
        warnings.simplefilter("always", MissingHeadWarning)
        model, tokenizer, folder = load_checkpoint(name, torch.float32)
    others = [each for each in caught if not issubclass(each.category, MissingHeadWarning)]
    for warning in others:
        warnings.warn(warning.message, stacklevel=2)
    return MonolingualModel(model, tokenizer, folder, has_head=len(others) == len(caught))


def grow_model(
    mono: MonolingualModel,
    n_rows: int,
    roles: dict[str, int],
    match: VocabularyMatch | None,
    *,
    copy_body: bool,
    unmatched: Unmatched,
    seed: int,
) -> PreTrainedModel:
    """Return a model with `n_rows` pieces: with the body, the matched rows, both or neither.

    Weights that are not copied are initialized with the seed as in a new model.
    """
    config = _adapt_config(mono.model, n_rows, roles)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = build_model(config)
        if copy_body:
            _copy_body(mono, model)
        if match is not None:
            generator = torch.Generator().manual_seed(seed)
            _fill_rows(mono, model, match, unmatched, generator)
    model.eval()
    return model


def _adapt_config(model: PreTrainedModel, n_rows: int, roles: dict[str, int]) -> Any:
    """Return the same configuration for another vocabulary and its special ids.

    RoBERTa counts positions from its padding id + 1: they move with it, their number stays.
    """
    config: Any = copy.deepcopy(model.config)
    if _counts_from_padding(model):
        shift = roles["pad"] - config.pad_token_id
        if roles["pad"] >= config.max_position_embeddings:
            raise InputError(
                f"the id of the padding token, {roles['pad']}, exceeds the number of positions, "
                "which this model counts from that id",
                fix="use a tokenizer whose padding token is among the first ids",
            )
        config.max_position_embeddings += shift
    config.vocab_size = n_rows
    for role in ("pad", "bos", "eos", "cls", "sep"):
        if role in ("pad", "bos", "eos") or hasattr(config, f"{role}_token_id"):
            setattr(config, f"{role}_token_id", roles[role])
    if hasattr(config, "calque"):  # the best layers and scores of the other model
        del config.calque
    return config


def _copy_body(mono: MonolingualModel, model: PreTrainedModel) -> None:
    """Copy every weight that is in the checkpoint and does not depend on the vocabulary."""
    prefixes = find_family(model.config.model_type, mono.folder).head_prefixes
    skipped = {id(weight) for weight in _weights_by_piece(mono.model)}
    positions = id(_positions(mono.model))
    for name, weight in mono.model.named_parameters():
        is_new = not mono.has_head and name.startswith(prefixes)
        if id(weight) in skipped or is_new:
            continue
        target = model.get_parameter(name)
        if id(weight) == positions and weight.shape != target.shape:
            first, old_first = int(model.config.pad_token_id), int(mono.model.config.pad_token_id)
            target[first + 1 :] = weight[old_first + 1 :]
        else:
            target.copy_(weight)


def _fill_rows(
    mono: MonolingualModel,
    model: PreTrainedModel,
    match: VocabularyMatch,
    unmatched: Unmatched,
    generator: torch.Generator,
) -> None:
    """Fill the embedding of each piece, its row in an untied head, and its bias.

    They are drawn together, so that a drawn bias is consistent with its row.
    """
    old, new = _kept_weights(mono, mono.model), _kept_weights(mono, model)
    wide = torch.cat([weight.reshape(len(weight), -1) for weight in old], dim=1)
    filled = combine_rows(wide, match.sources)
    is_unmatched = torch.from_numpy(match.rules == UNMATCHED)
    n_unmatched = int(is_unmatched.sum())
    if unmatched != "normal":
        known = torch.from_numpy((match.rules != UNMATCHED) & (match.rules != SPECIAL))
        filled[is_unmatched] = draw_like(filled[known], n_unmatched, generator)
    else:
        width = sum(weight.shape[1] for weight in old if weight.ndim == 2)
        drawn = NORMAL_DEVIATION * torch.randn((n_unmatched, width), generator=generator)
        filled[is_unmatched] = torch.nn.functional.pad(drawn, (0, wide.shape[1] - width))
    if is_unmatched[model.config.pad_token_id]:
        filled[model.config.pad_token_id] = 0
    start = 0
    for weight in new:
        width = weight[0].numel()
        weight.copy_(filled[:, start : start + width].reshape(weight.shape))
        start += width


def _weights_by_piece(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights with one row per piece: the embedding, then those of an untied head.

    If nothing is tied, the head has a second bias that is never used.
    """
    embeddings: Any = model.get_input_embeddings()
    decoder: Any = model.get_output_embeddings()
    owners = [module for module in model.modules() if getattr(module, "decoder", None) is decoder]
    biases = [decoder.bias, *(getattr(owner, "bias", None) for owner in owners)]
    weights = [embeddings.weight, decoder.weight, *(bias for bias in biases if bias is not None)]
    return list({id(weight): weight for weight in weights}.values())


def _kept_weights(mono: MonolingualModel, model: PreTrainedModel) -> list[nn.Parameter]:
    """Return those of them that are in the checkpoint: without a head, only the embedding."""
    weights = _weights_by_piece(model)
    return weights if mono.has_head else weights[:1]


def _counts_from_padding(model: PreTrainedModel) -> bool:
    body = find_family(model.config.model_type, None).get_body(model)
    return getattr(body.embeddings, "padding_idx", None) is not None


def _positions(model: PreTrainedModel) -> Tensor | None:
    body = find_family(model.config.model_type, None).get_body(model)
    table = getattr(body.embeddings, "position_embeddings", None)
    return None if table is None else table.weight


def combine_rows(
    matrix: Float[Tensor, "old hidden"], sources: RowSources
) -> Float[Tensor, "new hidden"]:
    """Return weighted sums of rows; a row without sources is zero."""
    combined = matrix.new_zeros((sources.n_rows, matrix.shape[1]))
    for start in range(0, len(sources.rows), BLOCK_ROWS):
        chosen = slice(start, start + BLOCK_ROWS)
        parts = matrix[torch.from_numpy(sources.sources[chosen])]
        parts *= torch.from_numpy(sources.weights[chosen]).to(matrix)[:, None]
        combined.index_add_(0, torch.from_numpy(sources.rows[chosen]), parts)
    return combined


def draw_like(
    known: Float[Tensor, "known hidden"], n_rows: int, generator: torch.Generator
) -> Float[Tensor, "{n_rows} hidden"]:
    """Draw rows from the normal distribution with the mean and covariance of known rows.

    The rows are μ + L z with L Lᵀ = Σ + jitter · I. The jitter, a small fraction of the mean
    variance, makes this possible with fewer rows than dimensions.
    """
    if len(known) < 2:
        raise InputError(
            f"{len(known)} matched rows have no covariance", fix="set unmatched to normal"
        )
    mean = known.mean(dim=0, dtype=torch.float64)
    factor = _factor_covariance(known, mean).to(known)
    drawn = known.new_empty((n_rows, known.shape[1]))
    for start in range(0, n_rows, BLOCK_ROWS):
        block = drawn[start : start + BLOCK_ROWS]
        noise = torch.randn(block.shape, generator=generator, dtype=known.dtype)
        torch.addmm(mean.to(known), noise, factor.T, out=block)
    return drawn


def _factor_covariance(
    known: Float[Tensor, "known hidden"], mean: Float[Tensor, "hidden"]
) -> Float[Tensor, "hidden hidden"]:
    """Return the Cholesky factor of a covariance, with as little jitter as necessary."""
    covariance = mean.new_zeros((len(mean), len(mean)))
    for start in range(0, len(known), BLOCK_ROWS):  # in float64, so not all at once
        centered = known[start : start + BLOCK_ROWS].double() - mean
        covariance += centered.T @ centered / (len(known) - 1)
    scale = covariance.diagonal().mean()
    identity = torch.eye(len(covariance), dtype=covariance.dtype)
    for jitter in JITTERS:
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(covariance + jitter * scale * identity)
        if not failed:
            return factor
    if scale == 0:  # all rows are the same
        return torch.zeros_like(covariance)
    raise InputError(
        "the covariance of the matched rows cannot be factored", fix="set unmatched to normal"
    )
