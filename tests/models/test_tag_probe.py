from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from calque.errors import InputError
from calque.io.conllu import TaggedSentence, read_tagged
from calque.models.encoder import Encoder
from calque.models.pooling import encode_words, lay_out_words
from calque.models.tag_probe import TagProbe, TransferScores

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
        layout = lay_out_words(tiny_encoder, [sentence.words for sentence in sentences])
        states = encode_words(tiny_encoder, layout, [layer])[0].double().numpy()
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


def test_an_encoder_is_left_as_it_was(probe: TagProbe, tiny_encoder: Encoder) -> None:
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


def test_what_cannot_be_right_is_wrong_and_told(tiny_encoder: Encoder) -> None:
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
        "3 sentences of en with 2 tags, tests of 2 languages with 5 words; 1 have tags unknown in"
        " en (FOO); 1 words have no subword; 1 words without a tag left out"
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
        ({"de": [("a/X", "b/Y")], "fr": [("a/X", "b/Y")]}, "no test of its source 'en'"),
        ({"en": [("a/X", "b/Y")]}, "no language beside 'en'"),
        ({"en": [("a/X",)], "de": [("a/_",)]}, "the probe's de has no tags"),
    ],
)
def test_bad_tests(tiny_encoder: Encoder, tests: dict[str, object], message: str) -> None:
    made = {name: [tag(*words) for words in sentences] for name, sentences in tests.items()}
    with pytest.raises(InputError, match=message):
        TagProbe(tiny_encoder, [tag("a/X", "b/Y")], made, source="en")


def test_bad_tags(tiny_encoder: Encoder) -> None:
    tests = {"en": [tag("a/X", "b/Y")], "de": [tag("a/X")]}
    with pytest.raises(InputError, match="the probe's en has 1 tags"):
        TagProbe(tiny_encoder, [tag("a/X")], tests, source="en")
    with pytest.raises(InputError, match="'X' is not a tag of a span"):
        TagProbe(tiny_encoder, [tag("a/X", "b/O")], tests, source="en", metric="span_f1")
