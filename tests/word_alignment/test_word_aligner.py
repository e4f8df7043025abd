"""The neural word aligner against plain transformers, in windows, batches and odd cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import calque
from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.tokens.words import WordEncoder
from calque.word_alignment.neural import AlignSettings, WordAligner
from calque.word_alignment.pair_windows import Room, cut_pairs

Row = tuple[str, str, str]
Pair = tuple[list[str], list[str]]


@pytest.fixture(scope="module")
def pairs(demo_rows: list[Row]) -> list[Pair]:
    return [(row[2].split(), row[1].split()) for row in demo_rows[::6]]


def align_plainly(folder: Path, pair: Pair, layer: int, joint: bool) -> list[tuple[int, int]]:
    """Mutual argmax of cosines of mean-pooled words out of `AutoModel`: no code of Calque's."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()

    def pool(states: torch.Tensor, owners: list[int | None], n_words: int) -> torch.Tensor:
        rows = [
            states[[k for k, owner in enumerate(owners) if owner == word]].mean(0)
            for word in range(n_words)
        ]
        return torch.nn.functional.normalize(torch.stack(rows), dim=-1)

    with torch.no_grad():
        if joint:
            inputs = tokenizer(*pair, is_split_into_words=True, return_tensors="pt")
            states = model(**inputs, output_hidden_states=True).hidden_states[layer][0]
            owners, sides = inputs.word_ids(), inputs.sequence_ids()
            src, tgt = (
                pool(
                    states,
                    [w if s == side else None for w, s in zip(owners, sides, strict=True)],
                    len(pair[side]),
                )
                for side in (0, 1)
            )
        else:
            src, tgt = (
                pool(
                    model(**inputs, output_hidden_states=True).hidden_states[layer][0],
                    inputs.word_ids(),
                    len(words),
                )
                for words in pair
                for inputs in [tokenizer(words, is_split_into_words=True, return_tensors="pt")]
            )
    cosines = src @ tgt.T
    best_tgt, best_src = cosines.argmax(1), cosines.argmax(0)
    return [(i, int(j)) for i, j in enumerate(best_tgt) if best_src[j] == i]


@pytest.mark.parametrize("encode", ["joint", "separate"])
@pytest.mark.parametrize("layer", [0, 3])
def test_matches_plain_transformers(
    tiny_folder: Path, pairs: list[Pair], encode: str, layer: int
) -> None:
    aligner = WordAligner(
        Encoder.load(tiny_folder),
        method="argmax",
        layer=layer,
        encode=encode,  # type: ignore[arg-type]
    )
    some = pairs[:12]
    plain = [align_plainly(tiny_folder, pair, layer, encode == "joint") for pair in some]
    assert aligner.align(some) == plain


def test_batches_do_not_matter(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    alone = WordAligner(tiny_encoder, batch_tokens=1).align(pairs)
    assert WordAligner(tiny_encoder).align(pairs) == alone
    assert WordAligner(tiny_encoder).align(pairs[::-1]) == alone[::-1]


def test_layers_in_one_pass(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    aligner = WordAligner(tiny_encoder)
    found = aligner.align_layers(pairs, [0, 2, -1])
    for layer in (0, 2, tiny_encoder.n_layers):
        single = aligner.with_layer(layer).align_block(pairs)
        assert found[layer].links.to_lists() == single.links.to_lists()


def test_identical_sentences_align_along_the_diagonal(tiny_encoder: Encoder) -> None:
    words = ["we", "saw", "two", "small", "red", "houses", "near", "that", "river"]
    for method in ("ot", "itermax", "argmax", "match"):
        aligner = WordAligner(tiny_encoder, method=method, layer=1)  # type: ignore[arg-type]
        assert aligner.align([(words, words)]) == [[(i, i) for i in range(len(words))]], method


def test_empty_sides_have_no_links(tiny_encoder: Encoder) -> None:
    block = WordAligner(tiny_encoder).align_block(
        [([], ["a"]), (["b"], ["b"]), (["c"], []), ([], [])]
    )
    assert block.links.to_lists() == [[], [(0, 0)], [], []]
    assert (block.report.n_pairs, block.report.n_empty, block.report.n_links) == (4, 3, 1)
    assert WordAligner(tiny_encoder).align([]) == []


def test_words_without_subwords_are_never_linked(tiny_encoder: Encoder) -> None:
    nothing = "\u200b"
    assert len(WordEncoder(tiny_encoder.tokenizer).encode([[nothing]]).ids) == 0
    links = WordAligner(tiny_encoder, method="match").align([(["a", nothing, "b"], ["a", "b"])])[0]
    assert links and all(i != 1 for i, _ in links)


@pytest.mark.parametrize("encode", ["joint", "separate"])
def test_long_pairs_are_aligned_in_windows(
    tiny_encoder: Encoder, demo_rows: list[Row], encode: str
) -> None:
    words = " ".join(row[1] for row in demo_rows[:60]).split()
    aligner = WordAligner(tiny_encoder, method="argmax", layer=1, encode=encode)  # type: ignore[arg-type]
    block = aligner.align_block([(["a"], ["a"]), (words, words)])
    short, long = block.links.to_lists()
    assert short == [(0, 0)]
    assert block.report.n_long == 1 and block.report.n_windows > 3
    # A word finds itself, but for repeated ones.
    assert len({(i, j) for i, j in long if i == j}) > 0.7 * len(words)
    assert len({i for i, _ in long}) == len(long)  # argmax links one to one: no word twice


def test_a_huge_word_is_counted(tiny_encoder: Encoder) -> None:
    block = WordAligner(tiny_encoder).align_block([(["x" * 20_000, "house"], ["house"])])
    assert block.report.n_cut == 1
    assert block.links.n_pairs == 1


def test_scores_are_shares(tiny_encoder: Encoder, pairs: list[Pair]) -> None:
    links = WordAligner(tiny_encoder, method="itermax").align_block(pairs).links
    assert len(links.scores) == len(links.pairs) > 0
    assert (links.scores > 0).all() and (links.scores <= 1).all()


def test_settings_come_from_the_model(tiny_encoder: Encoder) -> None:
    assert AlignSettings.of(tiny_encoder).layer == round(2 / 3 * tiny_encoder.n_layers)
    assert AlignSettings.of(tiny_encoder, layer=-1).layer == tiny_encoder.n_layers
    with pytest.raises(InputError, match="method 'best' does not exist"):
        AlignSettings.of(tiny_encoder, method="best")


def test_strings_are_refused(tiny_encoder: Encoder) -> None:
    with pytest.raises(InputError, match="pair 1 is not two lists of words"):
        WordAligner(tiny_encoder).align([(["a"], ["b"]), ("das Haus", "the house")])


def test_the_public_name() -> None:
    assert calque.WordAligner is WordAligner


@pytest.mark.parametrize("room", [Room(40, 80), Room(40, 40), Room(12, 12)])
def test_windows_cover_every_word_and_fit(
    tiny_encoder: Encoder, demo_rows: list[Row], room: Room
) -> None:
    text = [" ".join(row[k] for row in demo_rows[:n]).split() for k, n in ((1, 30), (2, 22))]
    pairs = [(text[0], text[1]), (text[0][:3], text[1]), (text[1], text[0][:2]), (["a"], ["b"])]
    windows = cut_pairs(WordEncoder(tiny_encoder.tokenizer), pairs, room)
    n_src, n_tgt = windows.src.n_pieces(), windows.tgt.n_pieces()
    assert (n_src <= room.side).all() and (n_tgt <= room.side).all()
    assert (n_src + n_tgt <= room.both).all()
    for number, (src, tgt) in enumerate(pairs):
        rows = np.flatnonzero(windows.owners == number)
        side, words = (windows.src, src) if len(src) >= len(tgt) else (windows.tgt, tgt)
        start = side.pieces.first_words[number]
        owned = [np.arange(side.own_first[r], side.own_stop[r]) - start for r in rows]
        assert np.concatenate(owned).tolist() == list(range(len(words)))  # each exactly once
        for r in rows:
            assert side.first[r] <= side.own_first[r] and side.own_stop[r] <= side.stop[r]
