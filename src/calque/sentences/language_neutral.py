"""Finding a model's neutral space from plain text, one file a language."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from calque.errors import InputError
from calque.models.neutral_space import NeutralSpace, find_language_directions
from calque.sentences.embed import embed_sentences

if TYPE_CHECKING:
    from calque.models.encoder import Encoder


FEWEST_SENTENCES = 50


def find_neutral_space(
    encoder: Encoder,
    texts: Mapping[str, Iterable[str]],
    *,
    layer: int | None = None,
    n_sentences: int = 2000,
    seed: int = 1,
    on_language: Callable[[str], None] = lambda language: None,
) -> NeutralSpace:
    """Embed a sample of every language's sentences and find what tells the languages apart."""
    number = encoder.choose_layer("sentences", layer)
    means = []
    for language, sentences in texts.items():
        sample = draw_sample(sentences, n_sentences, np.random.default_rng(seed))
        if len(sample) < FEWEST_SENTENCES:
            raise InputError(
                f"{len(sample)} sentences of {language} are too few for its mean",
                fix=f"give at least {FEWEST_SENTENCES}",
            )
        vectors = embed_sentences(encoder, sample, layer=number)
        means.append(vectors.mean(axis=0, dtype=np.float64))
        on_language(language)
    mean, directions = find_language_directions(np.asarray(means, dtype=np.float32))
    return NeutralSpace(mean, directions, number, tuple(texts))


def draw_sample(
    sentences: Iterable[str], n_sentences: int, generator: np.random.Generator
) -> list[str]:
    """Draw sentences from a stream, each with the same chance, in constant memory.

    >>> len(draw_sample(map(str, range(1000)), 3, np.random.default_rng(0)))
    3
    """
    sample: list[str] = []
    for number, sentence in enumerate(filter(str.strip, sentences)):
        if number < n_sentences:
            sample.append(sentence)
        elif (place := int(generator.integers(number + 1))) < n_sentences:
            sample[place] = sentence
    return sample


def save_neutral_model(encoder: Encoder, space: NeutralSpace, folder: Path) -> None:
    """Write a copy of a model's folder with the space in it; a folder that exists is an error."""
    if folder.exists():
        raise InputError("this folder exists", file=folder, fix="give a new one")
    draft = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        shutil.copytree(encoder.folder, draft)
        space.save(draft)
        draft.rename(folder)
    except OSError as error:
        raise InputError(f"cannot be written: {error}", file=folder) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
