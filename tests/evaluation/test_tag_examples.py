from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from calque.evaluation.tasks.tagging import encode_tagged
from calque.io.conllu import TaggedSentence
from calque.models.heads import NO_LABEL
from calque.tokens.layout import fit_batch_shape

SENTENCES = [
    TaggedSentence(("Ich", "mag", "Katzen", "."), ("PRON", "VERB", "NOUN", "PUNCT")),
    TaggedSentence(("Extraordinarily", "long", "sentences"), ("ADV", "_", "NEW")),
    TaggedSentence(("\u200d", "No"), ("X", "ADV")),
]
NAMES = ["ADV", "NOUN", "PRON", "PUNCT", "VERB", "X"]


@pytest.mark.parametrize("fixed", [False, True])
def test_labels_are_at_first_subwords(tiny_tokenizer: PreTrainedTokenizerFast, fixed: bool) -> None:
    examples = encode_tagged(tiny_tokenizer, SENTENCES, NAMES, longest=128, overlap=0.25)
    rows = np.array([2, 0, 1])
    shape = fit_batch_shape(examples.lengths, [rows]) if fixed else None
    batch = examples.collate(rows, shape)
    found: list[list[tuple[str, str]]] = []
    for start, stop in zip(batch.tokens.offsets[:-1], batch.tokens.offsets[1:], strict=True):
        ids, labels = (x[start:stop].tolist() for x in (batch.tokens.ids, batch.labels))
        pairs = [
            (tiny_tokenizer.convert_ids_to_tokens(token), examples.names[label])
            for token, label in zip(ids, labels, strict=True)
            if label != NO_LABEL
        ]
        if pairs:
            found.append(pairs)
    expected = []
    for row in (0, 1, 2):  # first subwords according to transformers
        sentence = SENTENCES[row]
        encoding = tiny_tokenizer(list(sentence.words), is_split_into_words=True)
        pieces = encoding.tokens()
        firsts = {w: k for k, w in reversed(list(enumerate(encoding.word_ids()))) if w is not None}
        expected.append(
            [(pieces[firsts[w]], tag) for w, tag in enumerate(sentence.tags) if w in firsts]
        )
    expected[1] = [pair for pair in expected[1] if pair[1] != "_"]
    assert sorted(found) == sorted(expected)
    assert examples.counts == {
        "words_without_subwords": 1,
        "words_without_tag": 1,
        "words_of_unknown_tag": 1,
    }


def test_long_sentences_are_split_into_windows(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    words = tuple(f"w{k}" for k in range(60))
    tags = tuple(["NOUN", "VERB"][k % 2] for k in range(60))
    long = TaggedSentence(words, tags)
    examples = encode_tagged(
        tiny_tokenizer, [SENTENCES[0], long, SENTENCES[0]], NAMES, longest=24, overlap=0.25
    )
    assert examples.lengths.max() <= 24 and len(examples.lengths) > 4
    assert examples.counts == {"sentences_in_windows": 1}
    assert examples.words.tolist() == list(range(68))  # every word once, in order
    first = tiny_tokenizer(["w30"], is_split_into_words=True, add_special_tokens=False).input_ids
    row = int(np.searchsorted(examples.first_words, 34, "right")) - 1
    start = int(examples.lengths[:row].sum() + examples.offsets[34])
    assert examples.windows.ids[start : start + len(first)].tolist() == first
    at_edge = (examples.offsets == 1).sum()
    assert at_edge == 3  # other windows begin with words of the window before
