"""A linear classifier of states: multinomial logistic regression, solved, not trained.

A probe of transfer: tags learnt from frozen states in one language, predicted in all.
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
from calque.io.conllu import NO_TAG, OUTSIDE, TaggedSentence, check_span_tags, count_spans
from calque.models.pooling import WordLayout, encode_words, lay_out_words

if TYPE_CHECKING:
    import numpy.typing as npt
    from jaxtyping import Float, Int
    from torch import Tensor

    from calque.models.encoder import Encoder

    IntArray = npt.NDArray[np.int64]

PENALTY = 0.01
MAX_ITERATIONS = 50
# Curvature pairs that L-BFGS keeps.
HISTORY = 10


@dataclass(frozen=True, slots=True)
class LinearTagger:
    """Predicts the class of the highest wᵀ(h − mean)/deviation + b."""

    weight: Float[Tensor, "hidden classes"]
    bias: Float[Tensor, "classes"]

    def predict(self, states: Float[Tensor, "words hidden"]) -> Int[Tensor, "words"]:
        """Give every state its most probable class."""
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
    """Minimize the mean cross-entropy + penalty/2 · ‖W‖² over standardized states, from zero.

    The problem is convex and nothing is drawn: the same states give the same tagger. With n words,
    scikit-learn's C is 1/(n · penalty). Features that hardly vary are left as they are.
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

    def measure() -> Tensor:
        with torch.enable_grad():
            solver.zero_grad()
            loss = F.cross_entropy(inputs @ weight + bias, labels)
            loss = loss + penalty / 2 * weight.square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss

    solver.step(measure)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


# "accuracy" is the share of words whose tag is right, "span_f1" of B-, I- and O tags the F1 of
# whole spans.
Metric = Literal["accuracy", "span_f1"]
UNTAGGED = -1


@dataclass(frozen=True, slots=True)
class TransferScores:
    """The score of every language, and how far the others stay behind the source."""

    source: str
    scores: dict[str, float]

    @property
    def own(self) -> float:
        """Give the score of the language that the tagger learnt from."""
        return self.scores[self.source]

    @property
    def others(self) -> float:
        """Give the mean score of the other languages."""
        return float(np.mean([v for name, v in self.scores.items() if name != self.source]))

    @property
    def gap(self) -> float:
        """Subtract the mean of the others from the source (Hu et al., 2020).

        >>> TransferScores("en", {"en": 0.75, "de": 0.5, "sw": 0.25}).gap
        0.375
        """
        return self.own - self.others


@dataclass(frozen=True, slots=True)
class _Text:
    """Sentences laid out, the number of each word's tag (−1: none), words a sentence."""

    layout: WordLayout
    tags: IntArray
    lengths: IntArray

    @property
    def is_tagged(self) -> npt.NDArray[np.bool_]:
        return np.not_equal(self.tags, UNTAGGED)


class TagProbe:
    """Fits a linear tagger on the source language's words and scores it in all languages.

    A word is its first subword's state. What an encoder's tokenizer makes of the sentences is
    computed once; `measure` may be called again and again while the encoder is trained. A word
    whose tag the source does not have, and one without subwords, counts as wrong.
    """

    def __init__(
        self,
        encoder: Encoder,
        train: Sequence[TaggedSentence],
        tests: Mapping[str, Sequence[TaggedSentence]],
        *,
        source: str,
        metric: Metric = "accuracy",
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
            check_span_tags(self.names)
        if self.n_classes < 2:
            raise InputError(f"the probe's {source} has {self.n_classes} tags", fix="give two")
        numbers = {name: number for number, name in enumerate(self.names)} | {NO_TAG: UNTAGGED}
        self.train = _lay_out(encoder, train, numbers)
        self.tests = {name: _lay_out(encoder, test, numbers) for name, test in tests.items()}
        for name, text in self.tests.items():
            if not text.is_tagged.any():
                raise InputError(f"the probe's {name} has no tags", fix="give a tagged file")

    def measure(
        self,
        encoder: Encoder,
        layers: Sequence[int],
        on_language: Callable[[str], None] = lambda language: None,
    ) -> dict[int, TransferScores]:
        """Score an encoder at some layers; it is read in evaluation mode and left as it was."""
        was_training = encoder.training
        encoder.eval()
        try:
            taggers = self._fit(encoder, layers)
            scores: dict[int, dict[str, float]] = {layer: {} for layer in layers}
            for language, text in self.tests.items():
                states = encode_words(encoder, text.layout, layers)
                for layer, tagger, here in zip(layers, taggers, states, strict=True):
                    found = tagger.predict(here).cpu().numpy()
                    scores[layer][language] = self._score(text, found)
                on_language(language)
        finally:
            encoder.train(was_training)
        return {layer: TransferScores(self.source, by_name) for layer, by_name in scores.items()}

    def describe(self) -> str:
        """Say what is learnt, what is scored, and what cannot be right."""
        words = {name: int(text.is_tagged.sum()) for name, text in self.tests.items()}
        shown = f"{len(self.train.lengths):,} sentences of {self.source} with {self.n_classes} tags"
        shown += f", tests of {len(words)} languages with {sum(words.values()):,} words"
        foreign = Counter[str]()
        for text in self.tests.values():
            foreign.update(text.tags[text.tags >= self.n_classes].tolist())
        if foreign:
            names = " ".join(sorted(self.names[int(number)] for number in foreign))
            shown += f"; {foreign.total():,} have tags unknown in {self.source} ({names})"
        texts = [self.train, *self.tests.values()]
        n_bare = sum(int((~text.layout.has_pieces).sum()) for text in texts)
        n_untagged = sum(int((~text.is_tagged).sum()) for text in texts)
        if n_bare:
            shown += f"; {n_bare:,} words have no subword"
        return shown + (f"; {n_untagged:,} words without a tag left out" if n_untagged else "")

    def _fit(self, encoder: Encoder, layers: Sequence[int]) -> list[LinearTagger]:
        usable = torch.from_numpy(self.train.is_tagged & self.train.layout.has_pieces)
        states = encode_words(encoder, self.train.layout, layers)
        usable = usable.to(states[0].device)
        labels = torch.from_numpy(self.train.tags).to(usable.device)[usable]
        return [fit_tagger(one[usable], labels, self.n_classes) for one in states]

    def _score(self, text: _Text, found: IntArray) -> float:
        if self.metric == "span_f1":
            found = np.where(text.layout.has_pieces, found, self.names.index(OUTSIDE))
            return count_spans(text.tags, found, self.names, text.lengths).f1
        right = (found == text.tags) & text.layout.has_pieces
        return float(right[text.is_tagged].mean())


def _check_languages(source: str, tests: Mapping[str, object]) -> None:
    if source not in tests:
        raise InputError(f"the probe has no test of its source {source!r}", fix="add one")
    if len(tests) < 2:
        raise InputError(f"the probe has no language beside {source!r}", fix="add one")


def _tags_of(sentences: Sequence[TaggedSentence]) -> list[str]:
    return sorted({tag for sentence in sentences for tag in sentence.tags} - {NO_TAG})


def _lay_out(
    encoder: Encoder, sentences: Sequence[TaggedSentence], numbers: Mapping[str, int]
) -> _Text:
    words = [sentence.words for sentence in sentences]
    tags = np.array([numbers[tag] for s in sentences for tag in s.tags], dtype=np.int64)
    lengths = np.array(list(map(len, words)), dtype=np.int64)
    return _Text(lay_out_words(encoder, words), tags, lengths)
