"""The transfer probe and its linear tagger against scikit-learn."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from calque.errors import InputError
from calque.io.conllu import TaggedSentence, read_tagged
from calque.models.encoder import Encoder
from calque.models.pooling import batch_words, encode_first_subwords
from calque.models.tag_probe import TagProbe, TransferScores, fit_tagger

TAGGED = Path(__file__).parent.parent / "data" / "tagged"
TESTS = {"en": "en_ewt-dev.conllu", "de": "de_gsd-dev.conllu.xz", "zh": "dev-zh.tsv"}


@pytest.fixture(scope="module")
def probe(tiny_encoder: Encoder) -> TagProbe:
    tests = {language: read_tagged(TAGGED / name) for language, name in TESTS.items()}
    return TagProbe(tiny_encoder, read_tagged(TAGGED / "en_ewt-train.conllu"), tests, source="en")


def tag(*pairs: str) -> TaggedSentence:
    words, tags = zip(*(pair.split("/") for pair in pairs), strict=True)
    return TaggedSentence(words, tags)


def test_scores_are_those_of_scikit_learn(probe: TagProbe, tiny_encoder: Encoder) -> None:
    layer, train = 2, read_tagged(TAGGED / "en_ewt-train.conllu")
    found = probe.measure(tiny_encoder, [layer])[layer]

    def read(sentences: list[TaggedSentence]) -> tuple[object, list[str]]:
        layout = batch_words(tiny_encoder, [sentence.words for sentence in sentences])
        states = encode_first_subwords(tiny_encoder, layout, [layer])[0].double().numpy()
        return states, [tag for sentence in sentences for tag in sentence.tags]

    states, tags = read(train)
    scaler = StandardScaler().fit(states)
    peer = LogisticRegression(C=1 / (0.01 * len(tags)), max_iter=1000)
    peer.fit(scaler.transform(states), tags)
    for language, name in TESTS.items():
        states, tags = read(read_tagged(TAGGED / name))
        expected = float((peer.predict(scaler.transform(states)) == tags).mean())
        # Bounded iterations: a word or two may fall otherwise.
        assert found.scores[language] == pytest.approx(expected, abs=2.5 / len(tags))


def test_it_learns_more_than_the_most_frequent_tag(probe: TagProbe, tiny_encoder: Encoder) -> None:
    tags = [tag for s in read_tagged(TAGGED / TESTS["en"]) for tag in s.tags]
    usual = max(tags.count(tag) for tag in set(tags)) / len(tags)
    found = probe.measure(tiny_encoder, [0, 4])
    assert set(found) == {0, 4}
    assert found[0].own > usual + 0.15


def test_the_encoder_is_not_changed(probe: TagProbe, tiny_encoder: Encoder) -> None:
    encoder = Encoder(deepcopy(tiny_encoder.model), tiny_encoder.tokenizer)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    expected = probe.measure(tiny_encoder, [3])[3].scores
    for training in (True, False):
        encoder.train(training)
        state = torch.random.get_rng_state()
        assert probe.measure(encoder, [3])[3].scores == expected  # dropout is off
        assert torch.equal(torch.random.get_rng_state(), state)
        assert all(module.training is training for module in encoder.modules())
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_the_gap_by_hand() -> None:
    scores = TransferScores("en", {"en": 0.9, "de": 0.7, "fr": 0.6, "sw": 0.2})
    assert scores.own == 0.9
    assert scores.others == pytest.approx(0.5)
    assert scores.gap == pytest.approx(0.4)


def test_words_with_unknown_tags_or_no_subword_count_as_wrong(tiny_encoder: Encoder) -> None:
    train = [tag("the/DET", "cat/NOUN"), tag("the/DET", "dog/NOUN"), tag("a/DET", "cat/NOUN")]
    tests = {
        "en": [tag("the/DET", "cat/NOUN")],
        # A tag that the source lacks, a word without subwords, a word without a tag.
        "de": [tag("the/DET", "cat/FOO", "\u200b/DET", "dog/_")],
    }
    probe = TagProbe(tiny_encoder, train, tests, source="en")
    found = probe.measure(tiny_encoder, [0])[0]
    assert found.scores == {"en": 1.0, "de": pytest.approx(1 / 3)}
    assert probe.describe() == (
        "3 sentences of en with 2 tags, tests in 2 languages with 5 words; 1 have tags that en"
        " does not have (FOO); 1 words have no subword; 1 words without a tag are ignored"
    )


def test_spans_are_scored_whole(tiny_encoder: Encoder) -> None:
    train = [
        tag("to/O", "New/B-LOC", "York/I-LOC"),
        tag("to/O", "Paris/B-LOC"),
        tag("New/B-LOC", "York/I-LOC", "to/O"),
        tag("Paris/B-LOC", "to/O"),
    ]
    tests = {
        "en": [tag("to/O", "New/B-LOC", "York/I-LOC", "to/O", "Paris/B-LOC")],
        # The kind PER is unknown: one of two gold spans is right, and nothing too much is found.
        "de": [tag("to/O", "New/B-LOC", "York/I-LOC", "\u200b/B-PER")],
    }
    probe = TagProbe(tiny_encoder, train, tests, source="en", metric="span_f1")
    found = probe.measure(tiny_encoder, [0])[0]
    assert found.scores == {"en": 1.0, "de": pytest.approx(2 / 3)}


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (
            {"de": [("a/X", "b/Y")], "fr": [("a/X", "b/Y")]},
            "no test data in its source",
        ),
        ({"en": [("a/X", "b/Y")]}, "test data in 'en' only"),
        ({"en": [("a/X",)], "de": [("a/_",)]}, "test data of the probe has no tags in de"),
    ],
)
def test_bad_tests(tiny_encoder: Encoder, tests: dict[str, object], message: str) -> None:
    made = {name: [tag(*words) for words in sentences] for name, sentences in tests.items()}
    with pytest.raises(InputError, match=message):
        TagProbe(tiny_encoder, [tag("a/X", "b/Y")], made, source="en")


def test_bad_tags(tiny_encoder: Encoder) -> None:
    tests = {"en": [tag("a/X", "b/Y")], "de": [tag("a/X")]}
    with pytest.raises(InputError, match="probe has 1 different tags in en"):
        TagProbe(tiny_encoder, [tag("a/X")], tests, source="en")
    with pytest.raises(InputError, match="'X' is not a BIO tag"):
        TagProbe(tiny_encoder, [tag("a/X", "b/O")], tests, source="en", metric="span_f1")


def draw(n_words: int, n_features: int, n_classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """States of unequal spread and mean, and labels that partly depend on them."""
    generator = np.random.default_rng(seed)
    states = generator.normal(size=(n_words, n_features)).astype(np.float32)
    scores = states @ generator.normal(size=(n_features, n_classes))
    labels = (scores + generator.gumbel(size=scores.shape)).argmax(axis=1)
    labels[:n_classes] = np.arange(n_classes)
    states = states * generator.uniform(0.1, 5, n_features) + generator.normal(size=n_features)
    return states.astype(np.float32), labels


@settings(max_examples=10)
@given(st.integers(2, 5), st.integers(0, 100), st.sampled_from([0.003, 0.03, 0.3]))
def test_it_equals_the_logistic_regression_of_scikit_learn(
    n_classes: int, seed: int, penalty: float
) -> None:
    states, labels = draw(200, 6, n_classes, seed)
    tagger = fit_tagger(
        torch.from_numpy(states),
        torch.from_numpy(labels),
        n_classes,
        penalty=penalty,
        max_iterations=300,
    )
    scaler = StandardScaler().fit(states.astype(np.float64))
    # Two classes are one score there, and two here: that halves the penalty.
    strength = 1 / (penalty * len(states)) * (2 if n_classes == 2 else 1)
    peer = LogisticRegression(C=strength, tol=1e-8, max_iter=2000)
    peer.fit(scaler.transform(states.astype(np.float64)), labels)
    mine = torch.softmax(torch.from_numpy(states) @ tagger.weight + tagger.bias, dim=1).numpy()
    theirs = peer.predict_proba(scaler.transform(states.astype(np.float64)))
    np.testing.assert_allclose(mine, theirs, atol=2e-3)
    found = tagger.predict(torch.from_numpy(states)).numpy()
    assert (found == peer.predict(scaler.transform(states.astype(np.float64)))).mean() > 0.97


def test_a_constant_feature_does_no_harm() -> None:
    states, labels = draw(100, 4, 3, seed=1)
    wide = np.concatenate([states, np.full((100, 1), 7.0, dtype=np.float32)], axis=1)
    for inputs in (states, wide):
        tagger = fit_tagger(torch.from_numpy(inputs), torch.from_numpy(labels), 3)
        found = tagger.predict(torch.from_numpy(inputs)).numpy()
        assert (found == labels).mean() > 0.6
        assert bool(tagger.weight.isfinite().all())


def test_the_same_states_give_the_same_tagger_and_draw_nothing() -> None:
    states, labels = (torch.from_numpy(array) for array in draw(150, 5, 4, seed=2))
    before = torch.random.get_rng_state()
    first, second = (fit_tagger(states, labels, 4) for _ in range(2))
    assert torch.equal(first.weight, second.weight)
    assert torch.equal(first.bias, second.bias)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_autocast_changes_nothing() -> None:
    states, labels = (torch.from_numpy(array) for array in draw(150, 5, 4, seed=3))
    with torch.autocast("cpu", torch.bfloat16):
        inside = fit_tagger(states, labels, 4)
        found = inside.predict(states)
    outside = fit_tagger(states, labels, 4)
    assert torch.equal(inside.weight, outside.weight)
    assert torch.equal(inside.bias, outside.bias)
    assert torch.equal(found, outside.predict(states))
