"""Labels for translated sentences: a tagger that learnt from the source alone tags them.

Words change places in a translation, and so tags cannot be copied. As in FILTER (Fang et al.,
2020) and VECO, the model fine-tuned on English labels the translated training set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from calque.models.heads import NO_LABEL
from calque.tasks.tag_scores import repair_spans
from calque.tasks.tagger import Tagger
from calque.tasks.transfer import OnProgress, Run
from calque.text.spans import OUTSIDE
from calque.text.tagged import NO_TAG, TaggedSentence, read_untagged
from calque.types import InputError

if TYPE_CHECKING:
    from calque.models.encoder import Encoder
    from calque.tasks.lesson import Lesson
    from calque.tasks.task_settings import TaskSettings

# By language, translations with their new tags, each with the number of what it translates.
Taught: TypeAlias = Mapping[str, Sequence[tuple[TaggedSentence, int]]]


def teacher_settings(settings: TaskSettings) -> TaskSettings:
    """Let the teacher learn as its pupil does, but from the source alone."""
    return replace(settings, setting="zero-shot", plug="out")


def label_translations(
    encoder: Encoder,
    lesson: Lesson[TaggedSentence],
    seed: int,
    spans: bool,
    on_progress: OnProgress = lambda done, total: None,
) -> tuple[Taught, dict[str, int]]:
    """Train a tagger on the source, and tag all translations; the encoder stays as it was.

    Line k of a translation belongs to sentence k of the source's training files; empty lines are
    left out and counted. With `spans`, tags are made valid as they are when tests are scored.
    """
    source, files = lesson.corpus.settings.source, lesson.corpus.files
    texts = {name: read_untagged(path) for name, path in files.untagged.items() if name != source}
    n_all = len(lesson.corpus.load(files.train.get(source, ())))
    for name, sentences in texts.items():
        if len(sentences) != n_all:
            problem = f"{len(sentences):,} lines for {n_all:,} sentences of {source!r}"
            fix = "give a line for every sentence of the training file"
            raise InputError(problem, file=files.untagged[name], fix=fix)
    kept = {name: value.clone() for name, value in encoder.state_dict().items()}
    model, names, _ = lesson.train(encoder, seed, Run((source,), ()), on_progress)
    assert isinstance(model, Tagger)
    taught, n_empty = {}, 0
    for language, sentences in texts.items():
        full = [number for number, sentence in enumerate(sentences) if sentence.words]
        n_empty += n_all - len(full)
        tagged = tag_sentences(model, lesson, [sentences[k] for k in full], names, spans)
        taught[language] = list(zip(tagged, full, strict=True))
    with torch.no_grad():
        encoder.load_state_dict(kept)
    counts = {"labelled_by_teacher": sum(map(len, taught.values())), "translations_empty": n_empty}
    return taught, {name: count for name, count in counts.items() if count}


def tag_sentences(
    tagger: Tagger,
    lesson: Lesson[TaggedSentence],
    sentences: Sequence[TaggedSentence],
    names: list[str],
    spans: bool,
) -> list[TaggedSentence]:
    """Give sentences the tags that a tagger finds; a word it cannot read has none."""
    asked = [TaggedSentence(s.words, (names[0],) * len(s.words)) for s in sentences]
    examples = lesson.encode(asked, names)
    found = tagger.tag(examples, lesson.corpus.settings)
    if spans:
        known = np.where(found == NO_LABEL, names.index(OUTSIDE), found)
        tags, _ = repair_spans(known, names, examples.n_words)
    else:
        tags = [NO_TAG if number == NO_LABEL else names[number] for number in found.tolist()]
    ends = np.cumsum(examples.n_words).tolist()
    return [
        TaggedSentence(sentence.words, tuple(tags[end - len(sentence.words) : end]))
        for sentence, end in zip(sentences, ends, strict=True)
    ]
