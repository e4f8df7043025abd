"""Tagging by a linear probe: words' tags learnt from frozen states in English, by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.io.conllu import read_tagged
from calque.models.tag_probe import Metric, TagProbe
from calque.training.recipe import ProbeSection
from calque.types import Score

if TYPE_CHECKING:
    from calque.models.encoder import Encoder


POS, NER = "pos_probe", "ner_probe"
SOURCE, MEAN, GAP = "en", "mean", "gap"
MAIN_METRICS: dict[str, Metric] = {POS: "accuracy", NER: "span_f1"}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a published set of files is laid out in its folder."""

    folder: str
    train: str
    test: str


LAYOUTS = {
    POS: (
        Layout("udpos", "train-en.tsv*", "dev-{language}.tsv*"),  # XTREME
        Layout("ud", "en_*-ud-train*.conllu*", "{language}*-ud-dev.conllu*"),
        Layout("ud", "UD_*/en_*-ud-train*.conllu*", "UD_*/{language}*-ud-dev.conllu*"),
    ),
    NER: (Layout("panx", "train-en.tsv*", "dev-{language}.tsv*"),),
}


def score_tagging_probe(
    encoder: Encoder,
    data: Path,
    *,
    task: str,
    model: str,
    languages: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    train_sentences: int = 2000,
    test_sentences: int = 200,
    on_language: Callable[[str], None] = lambda language: None,
) -> list[Score]:
    """Fit a linear tagger on English words' first subwords, and score it in all languages.

    Rows of language "mean" average over the languages other than English; rows of metric "gap" are
    English minus that mean. Of every file so many sentences are taken, spread over it.
    """
    numbers = range(encoder.n_layers + 1) if layers is None else layers
    asked = list(dict.fromkeys(encoder.check_layer(number) for number in numbers))
    files = find_files(data, task, languages)
    tests = {name: read_tagged(path, test_sentences) for name, path in files.find_tests().items()}
    train = read_tagged(files.train, train_sentences)
    probe = TagProbe(encoder, train, tests, source=SOURCE, metric=files.metric)
    sizes = {name: len(test) for name, test in tests.items()}
    sizes[MEAN] = sum(sizes.values()) - sizes[SOURCE]
    scores: list[Score] = []
    for layer, found in probe.measure(encoder, asked, on_language).items():
        make = partial(Score, model, task, layer=layer)
        for name, value in {**found.scores, MEAN: found.others}.items():
            scores.append(make(name, files.metric, value, sizes[name]))
        scores.append(make(MEAN, GAP, found.gap, sizes[MEAN]))
    return scores


def find_files(data: Path, task: str, languages: Sequence[str] | None = None) -> ProbeSection:
    """Find the files of a task, in a published set's folder or in one that holds it."""
    if not data.is_dir():
        raise InputError("no such folder", file=data, fix="check --data")
    for layout in LAYOUTS[task]:
        inside = [data / layout.folder, data / "xtreme" / layout.folder]
        for folder in [data] if data.name == layout.folder else inside:
            train = sorted(folder.glob(layout.train))
            if train:
                return ProbeSection(
                    train=str(train[0]),
                    test=str(folder / layout.test),
                    source=SOURCE,
                    languages=None if languages is None else list(languages) or None,
                    metric=MAIN_METRICS[task],
                )
    shown = " or ".join(f"{layout.folder}/{layout.train}" for layout in LAYOUTS[task])
    raise InputError(f"no files of {task} here", file=data, fix=f"give a folder with {shown}")
