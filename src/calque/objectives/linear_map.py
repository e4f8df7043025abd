"""Linear mapping: one matrix per language and layer that maps words to their English partners.

Wu and Dredze, 2020, after Wang et al., 2019. The encoder is frozen and runs without dropout. The
maps are learned by gradient steps, each followed by a step toward orthogonality (Lample et al.,
2018). `training.closed_form` computes the same maps in closed form, in one pass over the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor

from calque.algorithms.procrustes import orthogonalize_step
from calque.errors import InputError
from calque.models.language_maps import LanguageMaps
from calque.objectives.base import (
    Objective,
    ObjectiveSettings,
    evaluation_mode,
    n_processes,
    total_over_processes,
)
from calque.objectives.linked_words import WordPairBatch, WordPairCollator
from calque.tokens.tokenizer import SpecialTokens
from calque.types import LossTerms

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder
    from calque.objectives.base import Collate
    from calque.tokens.ragged import BatchShape


class LinearMapSettings(ObjectiveSettings):
    """Settings of the maps in a recipe."""

    kind: Literal["linear_map"] = "linear_map"
    # "gradient": steps, as in the paper; "procrustes", "least_squares": exact, in one pass.
    solver: Literal["gradient", "procrustes", "least_squares"] = "gradient"
    # Size of the step toward an orthogonal matrix (Wu and Dredze, Eq. 2), for solver=gradient.
    beta: float = Field(0.01, gt=0, le=0.5)
    words: Literal["first", "mean"] = "first"
    # Layer 0 is the embedding output.
    layers: Literal["all"] | list[int] = "all"
    # The language that all others are mapped to; every pair must contain it.
    pivot: str = "en"


@dataclass(frozen=True, slots=True)
class PairRoles:
    """The language that is mapped in each language pair, as an index into `languages`.

    In pairs that are `swapped`, that language is the source.
    """

    languages: tuple[str, ...]
    numbers: tuple[int, ...]
    swapped: tuple[bool, ...]

    @classmethod
    def of(cls, pairs: Sequence[str], pivot: str) -> Self:
        """Return the roles for pairs such as en-de; each must contain the pivot once.

        >>> PairRoles.of(["de-en", "en-de", "en-fr"], "en")
        PairRoles(languages=('de', 'fr'), numbers=(0, 0, 1), swapped=(True, False, False))
        """
        found = []
        for pair in pairs:
            src, _, tgt = pair.partition("-")
            if (src == pivot) == (tgt == pivot):
                raise InputError(
                    f"linear_map: {pair} is not a pair of {pivot!r} and another language",
                    fix="set the pivot of the objective, or leave this language out",
                )
            found.append((tgt, False) if src == pivot else (src, True))
        languages = sorted({language for language, _ in found})
        numbers = tuple(languages.index(language) for language, _ in found)
        return cls(tuple(languages), numbers, tuple(is_swapped for _, is_swapped in found))


@dataclass(frozen=True, slots=True)
class LinkStates:
    """States of linked words at several layers: of the pivot (`src`) and of mapped languages."""

    src: Float[Tensor, "layers links hidden"]
    tgt: Float[Tensor, "layers links hidden"]
    weights: Float[Tensor, "links"]
    languages: Int[Tensor, "links"]

    def split(self, n_languages: int) -> list[Int[Tensor, "links"]]:
        """Return the links of every language."""
        counts = torch.bincount(self.languages, minlength=n_languages)
        return list(torch.split(self.languages.argsort(), counts.tolist()))

    def total_weights(self, n_languages: int) -> Float[Tensor, "languages"]:
        """Return the sum of the link weights of every language."""
        return torch.bincount(self.languages, self.weights, n_languages)


def sum_errors(
    linked: LinkStates, maps: Float[Tensor, "languages layers hidden hidden"]
) -> Float[Tensor, "languages layers"]:
    """Return Σ w‖s − t W‖² of every language and layer (Wu and Dredze, Eq. 1)."""
    sums = []
    for W, rows in zip(maps.unbind(), linked.split(len(maps)), strict=True):
        errors = linked.src[:, rows] - linked.tgt[:, rows] @ W
        sums.append(errors.square().sum(dim=-1) @ linked.weights[rows])
    return torch.stack(sums)


def sum_distances(linked: LinkStates, n_languages: int) -> Float[Tensor, "languages layers"]:
    """Return Σ w‖s − t‖² of every language and layer: the error without maps."""
    distances = (linked.src - linked.tgt).square().sum(dim=-1) * linked.weights
    sums = distances.new_zeros(n_languages, len(distances))
    return sums.index_add(0, linked.languages, distances.mT)


def encode_linked_words(
    encoder: Encoder,
    batch: WordPairBatch,
    layers: Sequence[int],
    words: Literal["first", "mean"],
) -> tuple[Float[Tensor, "layers links hidden"], Float[Tensor, "layers links hidden"]]:
    """Encode sentences and return the states of both words of every link."""
    linked = [batch.linked_states(states, words) for states in encoder(batch.tokens, layers)]
    return torch.stack([src for src, _ in linked]), torch.stack([tgt for _, tgt in linked])


class LinearMap(Objective):
    """Learn one map per language and layer, and keep the best of each by validation loss."""

    n_sides: ClassVar[int] = 2
    n_special_tokens: ClassVar[int] = 4  # <s> and </s> of both sentences
    encodes_separately: ClassVar[bool] = True
    needs_links: ClassVar[bool] = True
    needs_languages: ClassVar[bool] = True
    roles: PairRoles
    maps: nn.Parameter
    best_maps: nn.Parameter
    best_losses: Tensor
    unmapped_losses: Tensor
    seen: Tensor

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._encode: Callable[..., tuple[Tensor, Tensor]] = encode_linked_words

    def build_collator(self, special_tokens: SpecialTokens, shape: BatchShape | None) -> Collate:
        """Return a collator of linked words."""
        return WordPairCollator(special_tokens, shape)

    def start(self, encoder: Encoder, languages: Sequence[str]) -> None:
        """Create identity maps on the encoder's device."""
        if self.settings.solver != "gradient":
            raise InputError(
                f"linear_map: solver={self.settings.solver} cannot be combined with gradient steps",
                fix="make it the only objective of the recipe, or set solver=gradient",
            )
        if any(parameter.requires_grad for parameter in encoder.parameters()):
            raise InputError(
                "linear_map needs a frozen encoder",
                fix="freeze it: --set \"freeze=['encoder.*']\"",
            )
        self.roles = PairRoles.of(languages, self.settings.pivot)
        n_maps = len(self.roles.languages), len(self.choose_layers(encoder))
        device = next(encoder.parameters()).device
        identity = torch.eye(encoder.hidden_size, device=device).expand(*n_maps, -1, -1)
        self.maps = nn.Parameter(identity.clone())
        # Not a buffer: DDP would broadcast it to all processes before every step.
        self.best_maps = nn.Parameter(identity.clone(), requires_grad=False)
        self.register_buffer("best_losses", torch.full(n_maps, torch.inf, device=device))
        self.register_buffer("unmapped_losses", torch.full(n_maps, torch.inf, device=device))
        # Sums since the last validation: errors, distances and, in the last column, weights.
        shape = (n_maps[0], 2 * n_maps[1] + 1)
        self.register_buffer("seen", torch.zeros(shape, device=device), persistent=False)

    def compile(self, *arguments: Any, **options: Any) -> None:
        """Compile the pass of the encoder; the rest is small and its sizes vary."""
        self._encode = torch.compile(encode_linked_words, *arguments, **options)

    def prepare(self, encoder: Encoder, batch: WordPairBatch) -> LinkStates:
        """Return the states of linked words, without gradient and dropout."""
        return self.encode_links(encoder, batch, self.roles)

    def encode_links(self, encoder: Encoder, batch: WordPairBatch, roles: PairRoles) -> LinkStates:
        """Return the states of linked words, those of the pivot as `src`."""
        device = batch.src.device
        numbers = torch.tensor(roles.numbers, device=device)[batch.languages]
        is_swapped: Bool[Tensor, "links"] = torch.tensor(roles.swapped, device=device)
        is_swapped = is_swapped[batch.languages]
        oriented = replace(
            batch,
            src=torch.where(is_swapped, batch.tgt, batch.src),
            tgt=torch.where(is_swapped, batch.src, batch.tgt),
        )
        layers = self.choose_layers(encoder)
        with torch.no_grad(), evaluation_mode(encoder):
            src, tgt = self._encode(encoder, oriented, layers, self.settings.words)
        return LinkStates(src, tgt, batch.weights, numbers)

    def forward(self, encoder: Encoder, batch: LinkStates) -> LossTerms:
        """Return the mean over links and layers of ‖s − t W‖².

        Paper: one language at a time; here languages share a batch. Adam is invariant to the scale
        of gradients, so that each map is learned as if it were alone.
        """
        n_languages, n_layers = self.best_losses.shape
        with torch.autocast(batch.src.device.type, enabled=False):
            errors, distances = sum_errors(batch, self.maps), sum_distances(batch, n_languages)
            weights = batch.total_weights(n_languages)
        if not self.training:
            parts = (errors.detach(), distances, weights[:, None])
            self.seen += torch.cat(parts, dim=1).to(self.seen.dtype)
        # DDP averages over the processes: the result is the mean over all links.
        total = n_layers * total_over_processes(weights.sum()) / n_processes()
        total = torch.where(total > 0, total, 1.0)
        return LossTerms(errors.sum() / total, {"unmapped": distances.sum() / total})

    @torch.no_grad()
    def after_step(self) -> None:
        """Move the maps toward orthogonality (Wu and Dredze, Eq. 2)."""
        if isinstance(self.maps, DTensor):
            raise InputError(
                "linear_map: the maps cannot be sharded over processes",
                fix="set engine.distributed=ddp",
            )
        for maps in self.maps:
            maps.copy_(orthogonalize_step(maps, self.settings.beta))

    @torch.no_grad()
    def after_validation(self) -> None:
        """Keep every map whose validation loss is the best so far."""
        n_layers = self.best_losses.shape[1]
        means = self.seen[:, :-1] / self.seen[:, -1:]  # NaN without validation examples
        losses, distances = means[:, :n_layers], means[:, n_layers:]
        is_better = losses < self.best_losses
        self.best_losses.copy_(torch.where(is_better, losses, self.best_losses))
        self.unmapped_losses.copy_(distances.nan_to_num(nan=torch.inf))
        self.best_maps[is_better] = self.maps[is_better]
        self.seen.zero_()

    def save_files(self, encoder: Encoder, folder: Path) -> None:
        """Write the best maps; the last ones if there were no validation examples."""
        is_validated = self.best_losses.isfinite()[..., None, None]
        maps = torch.where(is_validated, self.best_maps, self.maps).detach()
        losses = {"unmapped": self.unmapped_losses, "mapped": self.best_losses}
        names = self.roles.languages
        self.save_maps(encoder, folder, maps, names, validation=describe_losses(names, losses))

    def save_maps(
        self,
        encoder: Encoder,
        folder: Path,
        maps: Float[Tensor, "languages layers hidden hidden"],
        languages: Sequence[str],
        **metrics: Any,
    ) -> None:
        """Write maps with a description of how they were computed, and metrics.

        The encoder has not changed, so that its neutral space is written again.
        """
        settings = self.settings
        about = {"solver": settings.solver, "words": settings.words}
        about |= {"beta": settings.beta} if settings.solver == "gradient" else {}
        layers = tuple(self.choose_layers(encoder))
        LanguageMaps(maps, tuple(languages), layers, settings.pivot, about | metrics).save(folder)
        if encoder.neutral is not None:
            encoder.neutral.save(folder)

    def choose_layers(self, encoder: Encoder) -> list[int]:
        """Return the layers to map, in order."""
        layers = self.settings.layers
        numbers = range(encoder.n_layers + 1) if layers == "all" else layers
        return sorted({encoder.check_layer(number) for number in numbers})


def describe_losses(
    languages: Sequence[str], losses: dict[str, Float[Tensor, "languages layers"]]
) -> dict[str, dict[str, list[float | None]]]:
    """Return losses by language and layer; None if there is no value."""
    return {
        language: {
            name: [round(x, 6) if abs(x) < torch.inf else None for x in values[number].tolist()]
            for name, values in losses.items()
        }
        for number, language in enumerate(languages)
    }
