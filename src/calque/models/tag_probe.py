"""A transfer probe: tags learned from frozen states of one language, predicted in all languages.

The classifier is multinomial logistic regression, solved with L-BFGS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.nn import functional as F

from calque.errors import InputError
from calque.io.conllu import NO_TAG, OUTSIDE, TaggedSentence, check_bio_tags, count_spans
from calque.models.pooling import WordBatches, batch_words, encode_first_subwords

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]

PENALTY = 0.01
MAX_ITERATIONS = 50
# Number of curvature pairs in L-BFGS.
HISTORY = 10


@dataclass(frozen=True, slots=True)
class LinearTagger:
    """Predicts the class with the highest wᵀh + b."""

    weight: Float[Tensor, "hidden classes"]
    bias: Float[Tensor, "classes"]

    def predict(self, states: Float[Tensor, "words hidden"]) -> Int[Tensor, "words"]:
        """Return the most probable class of every state."""
        with torch.autocast(states.device.type, enabled=False):
            return (states.float() @ self.weight + self.bias).argmax(dim=1)


@torch.no_grad()
def fit_tagger(
    states: Float[Tensor, "words hidden"],
    labels: Int[Tensor, "words"],
    n_classes: int,
    *,
    penalty: float = PENALTY,
    max_iterations: int = MAX_ITERATIONS,
) -> LinearTagger:
    """Return the minimum of mean cross-entropy + penalty/2 · ‖W‖² over standardized states.

    The problem is convex and the start is 0: the same states give the same tagger. With n words,
    scikit-learn's C is 1/(n · penalty). Features with almost no variance are not scaled.
    """
    with torch.autocast(states.device.type, enabled=False):
        states = states.float()
        mean, deviation = states.mean(dim=0), states.std(dim=0, correction=0)
        deviation = torch.where(deviation > 1e-6, deviation, 1.0)
        weight, bias = _solve(
            (states - mean) / deviation, labels, n_classes, penalty, max_iterations
        )
        scaled = weight / deviation[:, None]
        return LinearTagger(scaled, bias - mean @ scaled)


def _solve(
    inputs: Float[Tensor, "words hidden"],
    labels: Int[Tensor, "words"],
    n_classes: int,
    penalty: float,
    max_iterations: int,
) -> tuple[Float[Tensor, "hidden classes"], Float[Tensor, "classes"]]:
    weight = inputs.new_zeros(inputs.shape[1], n_classes).requires_grad_()
    bias = inputs.new_zeros(n_classes).requires_grad_()
    solver = torch.optim.LBFGS(
        [weight, bias],
        max_iter=max_iterations,
        history_size=HISTORY,
        tolerance_grad=1e-6,
        tolerance_change=1e-9,
        line_search_fn="strong_wolfe",
    )

    def compute_loss() -> Tensor:
        with torch.enable_grad():
            solver.zero_grad()
            loss = F.cross_entropy(inputs @ weight + bias, labels)
            loss = loss + penalty / 2 * weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(compute_loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


# "accuracy": share of words with the right tag; "span_f1": F1 of whole spans of B-, I-, O tags.
ProbeMetric = Literal["accuracy", "span_f1"]
UNTAGGED = -1


@dataclass(frozen=True, slots=True)
class TransferScores:
    """Scores by language, and the gap between the source language and the others."""

    source: str
    scores: dict[str, float]

    @property
    def own(self) -> float:
        """The score of the language that the tagger was trained on."""
        return self.scores[self.source]

    @property
    def others(self) -> float:
        """The mean score of the other languages."""
        return float(np.mean([v for name, v in self.scores.items() if name != self.source]))

    @property
    def gap(self) -> float:
        """The score of the source minus the mean of the others (Hu et al., 2020).

        >>> TransferScores("en", {"en": 0.75, "de": 0.5, "sw": 0.25}).gap
        0.375
        """
        return self.own - self.others


@dataclass(frozen=True, slots=True)
class _TaggedWords:
    """Batches of words, the tag number of each word (−1: none), and words per sentence."""

    batches: WordBatches
    tags: IntArray
    lengths: IntArray

    @property
    def is_tagged(self) -> npt.NDArray[np.bool_]:
        return np.not_equal(self.tags, UNTAGGED)


class TagProbe:
    """Fits a linear tagger on words of the source language and scores it in all languages.

    A word is represented by its first subword. Sentences are tokenized once; `measure` can be
    called repeatedly while the encoder is trained. A word whose tag does not occur in the training
    data, or that has no subwords, counts as wrong.
    """

    def __init__(
        self,
        encoder: Encoder,
        train: Sequence[TaggedSentence],
        tests: Mapping[str, Sequence[TaggedSentence]],
        *,
        source: str,
        metric: ProbeMetric = "accuracy",
    ) -> None:
        _check_languages(source, tests)
        self.source, self.metric = source, metric
        known = _tags_of(train)
        everywhere = sorted(set(chain.from_iterable(map(_tags_of, tests.values()))))
        extra = [OUTSIDE] if metric == "span_f1" else []
        # The classes of the tagger come first.
        self.names = list(dict.fromkeys([*known, *everywhere, *extra]))
        self.n_classes = len(known)
        if metric == "span_f1":
            check_bio_tags(self.names)
        if self.n_classes < 2:
            raise InputError(
                f"the training data of the probe has {self.n_classes} different tags in {source}",
                fix="give data with at least two tags",
            )
        numbers = {name: number for number, name in enumerate(self.names)} | {NO_TAG: UNTAGGED}
        self.train = _tokenize(encoder, train, numbers)
        self.tests = {name: _tokenize(encoder, test, numbers) for name, test in tests.items()}
        for name, text in self.tests.items():
            if not text.is_tagged.any():
                problem = f"the test data of the probe has no tags in {name}"
                raise InputError(problem, fix="give a tagged file")

    def measure(
        self,
        encoder: Encoder,
        layers: Sequence[int],
        on_language: Callable[[str], None] = lambda language: None,
    ) -> dict[int, TransferScores]:
        """Return the scores of an encoder at some layers, computed in evaluation mode."""
        was_training = encoder.training
        encoder.eval()
        try:
            taggers = self._fit(encoder, layers)
            scores: dict[int, dict[str, float]] = {layer: {} for layer in layers}
            for language, text in self.tests.items():
                states = _encode_words(encoder, text.batches, layers, language)
                for layer, tagger, of_layer in zip(layers, taggers, states, strict=True):
                    predicted = tagger.predict(of_layer).cpu().numpy()
                    scores[layer][language] = self._score(text, predicted)
                on_language(language)
        finally:
            encoder.train(was_training)
        return {layer: TransferScores(self.source, by_name) for layer, by_name in scores.items()}

    def describe(self) -> str:
        """Return a summary of the training and test data, including words that cannot be right."""
        words = {name: int(text.is_tagged.sum()) for name, text in self.tests.items()}
        shown = f"{len(self.train.lengths):,} sentences of {self.source} with {self.n_classes} tags"
        shown += f", tests in {len(words)} languages with {sum(words.values()):,} words"
        foreign = Counter[str]()
        for text in self.tests.values():
            foreign.update(text.tags[text.tags >= self.n_classes].tolist())
        if foreign:
            names = " ".join(sorted(self.names[int(number)] for number in foreign))
            shown += f"; {foreign.total():,} have tags that {self.source} does not have ({names})"
        texts = [self.train, *self.tests.values()]
        n_empty = sum(int((~text.batches.has_pieces).sum()) for text in texts)
        n_untagged = sum(int((~text.is_tagged).sum()) for text in texts)
        if n_empty:
            shown += f"; {n_empty:,} words have no subword"
        return shown + (f"; {n_untagged:,} words without a tag are ignored" if n_untagged else "")

    def _fit(self, encoder: Encoder, layers: Sequence[int]) -> list[LinearTagger]:
        usable = torch.from_numpy(self.train.is_tagged & self.train.batches.has_pieces)
        states = _encode_words(encoder, self.train.batches, layers, self.source)
        usable = usable.to(states[0].device)
        labels = torch.from_numpy(self.train.tags).to(usable.device)[usable]
        return [fit_tagger(of_layer[usable], labels, self.n_classes) for of_layer in states]

    def _score(self, text: _TaggedWords, predicted: IntArray) -> float:
        if self.metric == "span_f1":
            predicted = np.where(text.batches.has_pieces, predicted, self.names.index(OUTSIDE))
            return count_spans(text.tags, predicted, self.names, text.lengths).f1
        right = (predicted == text.tags) & text.batches.has_pieces
        return float(right[text.is_tagged].mean())


def _encode_words(
    encoder: Encoder, batches: WordBatches, layers: Sequence[int], language: str
) -> list[Float[Tensor, "words hidden"]]:
    """Return the states of all words at some layers, mapped if the encoder has linear maps."""
    states = encode_first_subwords(encoder, batches, layers)
    return states if encoder.maps is None else encoder.maps.apply_by_layer(states, language, layers)


def _check_languages(source: str, tests: Mapping[str, object]) -> None:
    if source not in tests:
        problem = f"the probe has no test data in its source language {source!r}"
        raise InputError(problem, fix="add test data in this language")
    if len(tests) < 2:
        problem = f"the probe has test data in {source!r} only"
        raise InputError(problem, fix="add test data in another language")


def _tags_of(sentences: Sequence[TaggedSentence]) -> list[str]:
    return sorted({tag for sentence in sentences for tag in sentence.tags} - {NO_TAG})


def _tokenize(
    encoder: Encoder, sentences: Sequence[TaggedSentence], numbers: Mapping[str, int]
) -> _TaggedWords:
    words = [sentence.words for sentence in sentences]
    tags = np.array([numbers[tag] for s in sentences for tag in s.tags], dtype=np.int64)
    lengths = np.array(list(map(len, words)), dtype=np.int64)
    return _TaggedWords(batch_words(encoder, words), tags, lengths)
