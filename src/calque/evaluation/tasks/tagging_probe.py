"""Tagging with a linear probe: tags learned from frozen English hidden states, in all languages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from calque.errors import InputError
from calque.evaluation.records import LanguageScores
from calque.evaluation.tasks.untrained import choose_layers
from calque.io.conllu import read_tagged
from calque.models.tag_probe import ProbeMetric, TagProbe
from calque.training.recipe import ProbeSection

if TYPE_CHECKING:
    from calque.evaluation.settings import TaskSettings
    from calque.models.encoder import Encoder

POS, NER = "pos_probe", "ner_probe"
SOURCE = "en"
METRICS: dict[str, ProbeMetric] = {POS: "accuracy", NER: "span_f1"}


@dataclass(frozen=True, slots=True)
class Layout:
    """File names of a published dataset in its folder."""

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


def measure(
    encoder: Encoder,
    data: Path,
    *,
    task: str,
    languages: Sequence[str] | None = None,
    settings: TaskSettings,
    seed: int | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    train_sentences: int = 2000,
    test_sentences: int = 200,
) -> list[LanguageScores]:
    """Fit a linear tagger on the first subwords of English words and test it in all languages.

    English, the source, is always tested too. The fit is convex, so the seed has no effect. The
    sentences of a file are taken at equal distances from it.
    """
    layer, layers = choose_layers(encoder, settings, encoder.choose_layer("words"))
    files = find_files(data, task, languages)
    tests = {name: read_tagged(path, test_sentences) for name, path in files.find_tests().items()}
    train = read_tagged(files.train, train_sentences)
    probe = TagProbe(encoder, train, tests, source=SOURCE, metric=files.metric)
    done: list[str] = []

    def count_language(name: str) -> None:
        done.append(name)
        on_progress(len(done), len(tests))

    found = probe.measure(encoder, layers, count_language)
    scores = []
    for name, test in tests.items():
        by_layer: dict[int, dict[str, float]] = {
            number: {files.metric: 100 * result.scores[name]} for number, result in found.items()
        }
        scores.append(
            LanguageScores(
                name, by_layer[layer], len(test), layers=by_layer, counts={"layer": layer}
            )
        )
    return scores


def list_languages(data: Path, settings: TaskSettings | None = None, *, task: str) -> list[str]:
    """List the languages with tagged sentences, English first."""
    return list(find_files(data, task).find_tests())


def find_files(data: Path, task: str, languages: Sequence[str] | None = None) -> ProbeSection:
    """Find the files of a task in the folder of a published dataset or in a folder above it."""
    if not data.is_dir():
        raise InputError("the folder does not exist", file=data, fix="check --data")
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
                    metric=METRICS[task],
                )
    patterns = " or ".join(f"{layout.folder}/{layout.train}" for layout in LAYOUTS[task])
    problem = f"the folder has no files of {task}"
    raise InputError(problem, file=data, fix=f"pass a folder with {patterns}")
