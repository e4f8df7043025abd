"""Find the language-neutral space of a model from plain text in several languages."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.io.bitext import read_sentences
from calque.io.outputs import write_folder
from calque.models.inference import load_encoder
from calque.models.neutral_space import NeutralSpace, find_language_directions
from calque.sentences.embed import embed_sentences

if TYPE_CHECKING:
    from calque.io.files import PathLike
    from calque.models.encoder import Encoder
    from calque.types import Progress

MIN_SENTENCES = 50


@dataclass(frozen=True, slots=True)
class NeutralizeResult:
    """Where the model was written, the layer, and how many directions were removed and kept."""

    output: Path
    layer: int
    n_removed: int
    n_kept: int


def neutralize(
    model: str | Path | Encoder,
    texts: Sequence[PathLike],
    *,
    output: PathLike,
    layer: int | None = None,
    sentences: int = 2000,
    device: str = "auto",
    progress: Progress | None = None,
) -> NeutralizeResult:
    """Copy a model and store how its languages differ, so that `embed` removes these differences.

    Neither bitext nor training is needed: only the mean vector of each language is used.

    Args:
        model: Model folder, hub name, `calque-mini` or a loaded model.
        texts: One file per language with one sentence per line. The file names up to the first dot
            are the languages: en.txt, de.txt.xz, ...
        output: Folder of the new model, which must not exist.
        layer: Layer of the vectors. Default: the model's best layer.
        sentences: Number of sentences to draw from each file.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        progress: Called with the stage, the languages done and their number.

    Examples:
        >>> texts = ["en.txt", "de.txt", "fr.txt"]
        >>> calque.neutralize("calque-mini", texts, output="neutral").n_removed  # doctest: +SKIP
        2
    """
    output, paths = Path(output), list(map(Path, texts))
    names = [path.name.split(".")[0] for path in paths]
    for name, path in zip(names, paths, strict=True):
        if names.count(name) > 1:
            raise InputError(
                f"there are two files of the language {name!r}",
                file=path,
                fix="pass one file per language, named after it: en.txt, de.txt",
            )
    if output.exists():
        raise InputError("this folder exists already", file=output, fix="choose a new folder")
    encoder = load_encoder(model, device)
    streams = {name: read_sentences(path) for name, path in zip(names, paths, strict=True)}
    space = find_neutral_space(
        encoder, streams, layer=layer, n_sentences=sentences, progress=progress
    )
    save_neutral_model(encoder, space, output)
    n_removed = len(space.directions)
    return NeutralizeResult(output, space.layer, n_removed, encoder.hidden_size - n_removed)


def find_neutral_space(
    encoder: Encoder,
    texts: Mapping[str, Iterable[str]],
    *,
    layer: int | None = None,
    n_sentences: int = 2000,
    seed: int = 1,
    progress: Progress | None = None,
) -> NeutralSpace:
    """Embed a sample of the sentences of every language and find how the languages differ."""
    number = encoder.check_layer(encoder.retrieval_layer if layer is None else layer)
    means = []
    for language, sentences in texts.items():
        sample = draw_sample(sentences, n_sentences, np.random.default_rng(seed))
        if len(sample) < MIN_SENTENCES:
            raise InputError(
                f"{len(sample)} sentences of {language} are too few to estimate its mean",
                fix=f"provide at least {MIN_SENTENCES}",
            )
        vectors = embed_sentences(encoder, sample, layer=number)
        means.append(vectors.mean(axis=0, dtype=np.float64))
        if progress is not None:
            progress("embedding", len(means), len(texts))
    mean, directions = find_language_directions(np.asarray(means, dtype=np.float32))
    return NeutralSpace(mean, directions, number, tuple(texts))


def draw_sample(
    sentences: Iterable[str], n_sentences: int, generator: np.random.Generator
) -> list[str]:
    """Draw sentences from a stream with equal probability, in constant memory (reservoir sampling).

    >>> len(draw_sample(map(str, range(1000)), 3, np.random.default_rng(0)))
    3
    """
    sample: list[str] = []
    for number, sentence in enumerate(filter(str.strip, sentences)):
        if number < n_sentences:
            sample.append(sentence)
        elif (slot := int(generator.integers(number + 1))) < n_sentences:
            sample[slot] = sentence
    return sample


def save_neutral_model(encoder: Encoder, space: NeutralSpace, folder: Path) -> None:
    """Write a copy of a model's folder with the neutral space in it."""
    if folder.exists():
        raise InputError("this folder exists already", file=folder, fix="choose a new folder")

    def fill(draft: Path) -> None:
        shutil.copytree(encoder.folder, draft, dirs_exist_ok=True)
        space.save(draft)

    write_folder(folder, fill)
