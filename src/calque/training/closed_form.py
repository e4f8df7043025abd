"""Linear maps in closed form: one pass over the text, summed into matrices of constant size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import distributed

from calque.algorithms.procrustes import PairSums, solve_least_squares, solve_procrustes
from calque.errors import InputError
from calque.io.files import write_atomically
from calque.io.outputs import write_folder
from calque.objectives import build_objective
from calque.objectives.linear_map import (
    LinearMap,
    LinearMapSettings,
    PairRoles,
    describe_losses,
    sum_distances,
    sum_errors,
)
from calque.tokens.sampling import BlockSampler, derive_seed
from calque.tokens.streams import BLOCK_SIZE, BatchStream, BatchT, StreamPosition, load_batches
from calque.tokens.tokenizer import SpecialTokens
from calque.training.data import open_stream
from calque.training.distributed import main_process_first
from calque.training.sources import open_text
from calque.training.start import build_accelerator, build_encoder
from calque.training.telemetry import Telemetry

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float
    from torch import Tensor

    from calque.objectives.linear_map import LinkStates
    from calque.training.recipe import Recipe
    from calque.types import Progress

    IntArray = npt.NDArray[np.int64]

# Relative cutoff of singular values: states have single precision, smaller ones are rounding.
CUTOFF = 1e-6


def is_closed_form(recipe: Recipe) -> bool:
    """Return whether a recipe's maps are solved in one pass; other objectives are an error then."""
    solvers = [s.solver for s in recipe.objectives if isinstance(s, LinearMapSettings)]
    closed = [solver for solver in solvers if solver != "gradient"]
    if closed and len(recipe.objectives) > 1:
        raise InputError(
            f"linear_map: solver={closed[0]} cannot be combined with other objectives",
            fix="remove the others, or set solver=gradient",
        )
    return bool(closed)


def fit_maps(recipe: Recipe, text: Path, folder: Path, *, progress: Progress | None = None) -> int:
    """Fit a recipe's maps, write FOLDER/model, and return the number of batches.

    Processes started by torchrun share the batches and add up their sums.
    """
    if (folder / "model").exists():
        raise InputError("the folder contains a model", file=folder, fix="use another folder")
    return MapFit(recipe, text, folder).run(progress)


class MapFit:
    """One pass over the text of a recipe: the encoder, the links and their sums."""

    def __init__(self, recipe: Recipe, text: Path, folder: Path) -> None:
        prepared, tokenizer = open_text(text)
        self.recipe, self.folder = recipe, folder
        self.encoder = build_encoder(recipe, tokenizer)
        self.accelerator = build_accelerator(recipe, self.encoder)
        self.device: torch.device = self.accelerator.device
        self.encoder.to(self.device)
        self.objective = cast(LinearMap, build_objective(recipe.objectives[0]))
        self.stream = open_stream(
            self.objective,
            prepared,
            text,
            recipe.data,
            SpecialTokens.of(tokenizer),
            seed=derive_seed(recipe.seed, 0),
            fixed_shape=False,
        )
        settings = self.objective.settings
        self.roles = PairRoles.of(self.stream.languages, settings.pivot)
        self.layers = self.objective.choose_layers(self.encoder)
        self.sums = PairSums.zeros(
            (len(self.roles.languages), len(self.layers)),
            self.encoder.hidden_size,
            gram=settings.solver == "least_squares",
            device=self.device,
        )

    def run(self, progress: Progress | None = None) -> int:
        """Read everything once, solve, write the model with its maps; return the batch count."""
        everything, engine = OnePass(self.stream.training), self.accelerator
        with Telemetry(
            self.folder if engine.is_main_process else None,
            everything.count_batches(),
            tensorboard=self.recipe.telemetry.tensorboard,
            progress=progress,
        ) as telemetry:
            telemetry.info(f"linear_map: {self.stream.describe()}")
            n_batches = self._add_all(everything, telemetry)
            for tensor in self.sums.tensors() if engine.num_processes > 1 else ():
                distributed.all_reduce(tensor)
            self._check_sums()
            with main_process_first() as is_main:
                if is_main:
                    self._finish(telemetry, n_batches)
        return n_batches

    def _add_all(self, everything: OnePass[Any], telemetry: Telemetry) -> int:
        """Add this process's share of the examples to its sums; return the number of batches."""
        n_tokens, last, n_processes = 0, StreamPosition(), self.accelerator.num_processes
        for number, (position, batch) in enumerate(self._load(everything, n_processes), start=1):
            n_tokens, last = n_tokens + batch.tokens.n_real, position
            self._add(self._read(batch))
            telemetry.advance(position.count)
            if number % self.recipe.telemetry.every == 0:
                # An estimate for all processes, which share the batches evenly.
                links = n_processes * float(self.sums.weights[:, 0].sum())
                telemetry.log_step(position.count, {"links": links}, n_processes * n_tokens)
                n_tokens = 0
        return last.count

    def _load(self, stream: OnePass[Any], n_ranks: int = 1) -> Iterator[tuple[StreamPosition, Any]]:
        """Load every n-th batch of a pass, built in advance with a GPU."""
        workers, on_gpu = self.recipe.engine.workers, self.device.type != "cpu"
        return load_batches(
            stream,
            rank=self.accelerator.process_index if n_ranks > 1 else 0,
            n_ranks=n_ranks,
            n_workers=2 * on_gpu if workers == "auto" else workers,
            pin_memory=on_gpu,
        )

    def _read(self, batch: Any) -> LinkStates:
        """Return the states of a batch's linked words."""
        with self.accelerator.autocast():
            return self.objective.encode_links(self.encoder, batch.to(self.device), self.roles)

    def _add(self, linked: LinkStates) -> None:
        """Add the links of a batch to the sums of their languages, at every layer."""
        for language, rows in enumerate(linked.split(len(self.roles.languages))):
            for layer in range(len(self.layers)) if len(rows) else ():
                src, tgt = linked.src[layer, rows], linked.tgt[layer, rows]
                self.sums.add((language, layer), src, tgt, linked.weights[rows])

    def _check_sums(self) -> None:
        """Raise an InputError if a language has no links, or states are not finite."""
        for language, weight in zip(self.roles.languages, self.sums.weights[:, 0], strict=True):
            if weight == 0:
                raise InputError(
                    f"linear_map: {language} has no links",
                    fix="add links of its bitext, or add it to data.leave_out_languages",
                )
        if not all(tensor.isfinite().all() for tensor in self.sums.tensors()):
            raise InputError("the encoder's states are not finite", fix="set engine.precision=fp32")

    def _finish(self, telemetry: Telemetry, n_batches: int) -> None:
        """Solve the maps, log their errors and write the model."""
        names, links = self.roles.languages, self.sums.weights[:, 0].tolist()
        maps, training = solve_maps(self.sums)
        about = {"links": dict(zip(names, links, strict=True))}
        about |= {"training": training.describe(names)}
        validation = self._validate(maps)
        if validation is not None:
            telemetry.log_validation(n_batches, validation.average())
            about |= {"validation": validation.describe(names)}
        for number, (language, n_links) in enumerate(zip(names, links, strict=True)):
            fit = validation and validation.summarize(number)
            fit = fit or f"{training.summarize(number)} on the training text"
            telemetry.info(f"{language}: {n_links:,.0f} links, mean ‖s − tW‖² {fit}")
        with write_atomically(self.folder / "recipe.yaml") as stream:
            stream.write(self.recipe.to_yaml())

        def write(folder: Path) -> None:
            dtype: torch.dtype = getattr(torch, self.recipe.checkpoints.dtype)
            self.encoder.save(folder, dtype=dtype)
            self.objective.save_maps(self.encoder, folder, maps, names, **about)

        write_folder(self.folder / "model", write)

    @torch.no_grad()
    def _validate(self, maps: Float[Tensor, "languages layers hidden hidden"]) -> MapLosses | None:
        """Return the losses of the maps on the validation text, if there is any."""
        if self.stream.validation is None:
            return None
        on_device = maps.to(self.device)
        errors = distances = torch.zeros(maps.shape[:2], dtype=torch.float64, device=self.device)
        weights = errors.new_zeros(len(maps))
        for _, batch in self._load(OnePass(self.stream.validation)):
            linked = self._read(batch)
            errors = errors + sum_errors(linked, on_device)
            distances = distances + sum_distances(linked, len(maps))
            weights = weights + linked.total_weights(len(maps))
        return MapLosses((distances / weights[:, None]).cpu(), (errors / weights[:, None]).cpu())


@dataclass(frozen=True, slots=True)
class MapLosses:
    """Mean ‖s − t W‖² of links, by language and layer, with W = I and with the maps."""

    unmapped: Float[Tensor, "languages layers"]
    mapped: Float[Tensor, "languages layers"]

    def average(self) -> dict[str, float]:
        """Return the means over languages and layers, under the names that training uses."""
        named = {"loss/linear_map": self.mapped, "loss/linear_map/unmapped": self.unmapped}
        return {name: float(values.nanmean()) for name, values in named.items()}

    def describe(self, languages: Sequence[str]) -> dict[str, Any]:
        """Return all losses by language."""
        return describe_losses(languages, {"unmapped": self.unmapped, "mapped": self.mapped})

    def summarize(self, language: int) -> str | None:
        """Return "before → after" of a language, averaged over the layers, or None if unknown."""
        before, after = self.unmapped[language].mean(), self.mapped[language].mean()
        return f"{before:.4g} → {after:.4g}" if after.isfinite() else None


def solve_maps(
    sums: PairSums,
) -> tuple[Float[Tensor, "languages layers hidden hidden"], MapLosses]:
    """Solve the maps of all languages and layers, and return them with their training losses.

    Maps are least squares if the sums include Gram matrices, and orthogonal otherwise. One language
    after the other is solved in CPU memory, so that there is no second copy of all sums.
    """
    maps = torch.empty(sums.cross.shape, dtype=torch.float32)
    losses = torch.empty(2, *sums.weights.shape, dtype=torch.float64)
    for number in range(len(maps)):
        own = sums.select(number)
        cross, gram = own.cross.cpu(), None if own.gram is None else own.gram.cpu()
        if gram is None:
            solved = solve_procrustes(cross)
        else:
            solved = solve_least_squares(gram, cross, CUTOFF)
        maps[number] = solved
        losses[0, number], losses[1, number] = own.residuals(), own.residuals(solved)
    return maps, MapLosses(losses[0], losses[1])


class OnePass(BatchStream[BatchT]):
    """The examples of a stream, each exactly once, whatever the shares of their languages."""

    def __init__(self, stream: BatchStream[BatchT]) -> None:
        vars(self).update(vars(stream))
        self.sampler = _InOrder([len(corpus) for corpus in stream.corpora])

    def iterate(
        self, position: StreamPosition, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[StreamPosition, BatchT | None]]:
        """Yield all batches from a position to the last one."""
        with suppress(_NoMoreBlocks):
            yield from super().iterate(position, wanted)

    def count_batches(self) -> int:
        """Count the batches without building them."""
        return sum(1 for _ in self.iterate(StreamPosition(), lambda number: False))


class _InOrder(BlockSampler):
    """Yields the examples of one corpus after the other, each once."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(sizes, [1.0] * len(sizes), BLOCK_SIZE, seed=0)
        self.starts = [
            (corpus, start)
            for corpus, size in enumerate(sizes)
            for start in range(0, size, BLOCK_SIZE)
        ]

    def block(self, number: int) -> tuple[IntArray, IntArray]:
        """Return the (corpus, example) indices of a block in order."""
        if number >= len(self.starts):
            raise _NoMoreBlocks
        corpus, start = self.starts[number]
        examples = np.arange(start, min(start + BLOCK_SIZE, self.sizes[corpus]))
        return np.full_like(examples, corpus), examples


class _NoMoreBlocks(Exception):
    """All blocks have been read."""
