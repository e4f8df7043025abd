"""First values of embedding rows: means of known rows, and draws from their distribution.

A model over a new vocabulary, grown out of a monolingual one of the same architecture.

The body is all that does not depend on the vocabulary: positions, token types, layers and the
transformation before the language-modelling head's last matrix.
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
from calque.models.families import family_of
from calque.models.loading import HeadlessCheckpoint, build_model, load_checkpoint

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor, nn
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from calque.growth.match import RowSources, VocabularyMatch


N_ROWS_AT_ONCE = 1 << 14
JITTERS = (1e-9, 1e-7, 1e-5, 1e-3)


def combine_rows(
    matrix: Float[Tensor, "old hidden"], sources: RowSources
) -> Float[Tensor, "new hidden"]:
    """Add up weighted rows; a row without sources is zero, one with a single source a copy."""
    combined = matrix.new_zeros((sources.n_rows, matrix.shape[1]))
    for start in range(0, len(sources.rows), N_ROWS_AT_ONCE):
        chosen = slice(start, start + N_ROWS_AT_ONCE)
        parts = matrix[torch.from_numpy(sources.sources[chosen])]
        parts *= torch.from_numpy(sources.weights[chosen]).to(matrix)[:, None]
        combined.index_add_(0, torch.from_numpy(sources.rows[chosen]), parts)
    return combined


def draw_like(
    known: Float[Tensor, "known hidden"], n_rows: int, generator: torch.Generator
) -> Float[Tensor, "{n_rows} hidden"]:
    """Draw rows from the normal distribution with the mean and covariance of known rows.

    μ + L z with L Lᵀ = Σ + jitter; the jitter, a small share of the mean variance, lets rows fewer
    than dimensions do.
    """
    if len(known) < 2:
        raise InputError(f"{len(known)} matched rows: no covariance", fix="set unmatched=normal")
    mean = known.mean(dim=0, dtype=torch.float64)
    factor = _factor_covariance(known, mean).to(known)
    drawn = known.new_empty((n_rows, known.shape[1]))
    for start in range(0, n_rows, N_ROWS_AT_ONCE):
        block = drawn[start : start + N_ROWS_AT_ONCE]
        noise = torch.randn(block.shape, generator=generator, dtype=known.dtype)
        torch.addmm(mean.to(known), noise, factor.T, out=block)
    return drawn


def draw_normal(
    n_rows: int, hidden: int, deviation: float, generator: torch.Generator
) -> Float[Tensor, "{n_rows} {hidden}"]:
    """Draw rows around zero, as new models begin."""
    return deviation * torch.randn((n_rows, hidden), generator=generator)


def _factor_covariance(
    known: Float[Tensor, "known hidden"], mean: Float[Tensor, "hidden"]
) -> Float[Tensor, "hidden hidden"]:
    """Find the Cholesky factor of a covariance, with as little jitter as it takes."""
    covariance = mean.new_zeros((len(mean), len(mean)))
    for start in range(0, len(known), N_ROWS_AT_ONCE):  # twice as wide, so not all at once
        centered = known[start : start + N_ROWS_AT_ONCE].double() - mean
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
        "the covariance of the matched rows cannot be factored", fix="set unmatched=normal"
    )


Initialize: TypeAlias = Literal["both", "body", "embeddings", "none"]
Unmatched: TypeAlias = Literal["moments", "normal"]
NORMAL_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Mono:
    """A monolingual model, its tokenizer, and whether its checkpoint has a head for words."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    folder: Path
    has_head: bool


def load_mono(name: str | Path) -> Mono:
    """Load a monolingual model; one without a language-modelling head will do."""
    # A head that is missing is drawn at random: that is no business of the caller's generator.
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=()):
        warnings.simplefilter("always", HeadlessCheckpoint)
        model, tokenizer, folder = load_checkpoint(name, torch.float32)
    others = [each for each in caught if not issubclass(each.category, HeadlessCheckpoint)]
    for warning in others:
        warnings.warn(warning.message, stacklevel=2)
    return Mono(model, tokenizer, folder, has_head=len(others) == len(caught))


def grow_model(
    mono: Mono,
    n_rows: int,
    roles: dict[str, int],
    match: VocabularyMatch | None,
    *,
    copies_body: bool,
    unmatched: Unmatched,
    seed: int,
) -> PreTrainedModel:
    """Make a model of `n_rows` pieces, with the body, the matched rows, both or none of them.

    What is not copied is new: drawn with the seed as the architecture says.
    """
    config = adapt_config(mono.model, n_rows, roles)
    with torch.random.fork_rng(devices=()), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        model = build_model(config)
        if copies_body:
            copy_body(mono, model)
        if match is not None:
            generator = torch.Generator().manual_seed(seed)
            fill_rows(mono, model, match, unmatched, generator)
    model.eval()
    return model


def adapt_config(model: PreTrainedModel, n_rows: int, roles: dict[str, int]) -> Any:
    """Describe the same architecture over another vocabulary, with that one's special ids.

    RoBERTa counts positions from its padding id + 1, so with that they move: the window stays.
    """
    config: Any = copy.deepcopy(model.config)
    if _counts_from_padding(model):
        shift = roles["pad"] - config.pad_token_id
        if roles["pad"] >= config.max_position_embeddings:
            raise InputError(
                f"the padding token's id, {roles['pad']}, is beyond the model's positions, "
                "which are counted from it",
                fix="use a tokenizer that has it among its first ids",
            )
        config.max_position_embeddings += shift
    config.vocab_size = n_rows
    for role in ("pad", "bos", "eos", "cls", "sep"):
        if role in ("pad", "bos", "eos") or hasattr(config, f"{role}_token_id"):
            setattr(config, f"{role}_token_id", roles[role])
    if hasattr(config, "calque"):  # choices and scores that belong to the other model
        del config.calque
    return config


def copy_body(mono: Mono, model: PreTrainedModel) -> None:
    """Copy every weight that does not depend on the vocabulary, and that the checkpoint had."""
    prefixes = family_of(model.config.model_type, mono.folder).head_prefixes
    skipped = {id(weight) for weight in _weights_by_piece(mono.model)}
    positions = id(_positions(mono.model))
    for name, weight in mono.model.named_parameters():
        is_new = not mono.has_head and name.startswith(prefixes)
        if id(weight) in skipped or is_new:
            continue
        place = model.get_parameter(name)
        if id(weight) == positions and weight.shape != place.shape:
            first, old_first = int(model.config.pad_token_id), int(mono.model.config.pad_token_id)
            place[first + 1 :] = weight[old_first + 1 :]
        else:
            place.copy_(weight)


def fill_rows(
    mono: Mono,
    model: PreTrainedModel,
    match: VocabularyMatch,
    unmatched: Unmatched,
    generator: torch.Generator,
) -> None:
    """Fill what each piece has: its embedding, its row of an untied head and its bias there.

    They are drawn together, so that a drawn bias fits its row.
    """
    old, new = _kept_weights(mono, mono.model), _kept_weights(mono, model)
    wide = torch.cat([weight.reshape(len(weight), -1) for weight in old], dim=1)
    filled = combine_rows(wide, match.sources)
    free = torch.from_numpy(match.rules == UNMATCHED)
    if unmatched == "moments":
        known = torch.from_numpy((match.rules != UNMATCHED) & (match.rules != SPECIAL))
        filled[free] = draw_like(filled[known], int(free.sum()), generator)
    else:
        width = sum(weight.shape[1] for weight in old if weight.ndim == 2)
        drawn = draw_normal(int(free.sum()), width, NORMAL_DEVIATION, generator)
        filled[free] = torch.nn.functional.pad(drawn, (0, wide.shape[1] - width))
    if free[model.config.pad_token_id]:
        filled[model.config.pad_token_id] = 0
    start = 0
    for place in new:
        width = place[0].numel()
        place.copy_(filled[:, start : start + width].reshape(place.shape))
        start += width


def _weights_by_piece(model: PreTrainedModel) -> list[nn.Parameter]:
    """List the weights with a row a piece: the embedding, then those of the head that are others.

    Where nothing is tied, the head has a second bias that is never used.
    """
    embeddings: Any = model.get_input_embeddings()
    decoder: Any = model.get_output_embeddings()
    owners = [module for module in model.modules() if getattr(module, "decoder", None) is decoder]
    biases = [decoder.bias, *(getattr(owner, "bias", None) for owner in owners)]
    weights = [embeddings.weight, decoder.weight, *(bias for bias in biases if bias is not None)]
    return list({id(weight): weight for weight in weights}.values())


def _kept_weights(mono: Mono, model: PreTrainedModel) -> list[nn.Parameter]:
    """List those of them that the checkpoint had: without a head, the embedding alone."""
    weights = _weights_by_piece(model)
    return weights if mono.has_head else weights[:1]


def _counts_from_padding(model: PreTrainedModel) -> bool:
    body = family_of(model.config.model_type, None).body_of(model)
    return getattr(body.embeddings, "padding_idx", None) is not None


def _positions(model: PreTrainedModel) -> Tensor | None:
    body = family_of(model.config.model_type, None).body_of(model)
    table = getattr(body.embeddings, "position_embeddings", None)
    return None if table is None else table.weight
