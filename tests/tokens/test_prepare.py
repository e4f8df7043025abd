"""Preparation of text: what is stored, reused and held out, also after a kill."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from calque.errors import InputError
from calque.io.cleaning import CleaningReport, CleaningRules
from calque.io.word_vectors import VectorBlock
from calque.tokens import prepare as preparation
from calque.tokens.prepare import (
    HeldOutPairs,
    PreparedCorpus,
    TextSource,
    WordFilter,
    open_prepared,
    prepare_corpora,
    read_clean,
    read_held_out_pairs,
    read_vector_blocks,
    train_tokenizer_on_sources,
    verify_prepared,
)
from calque.tokens.ragged import Ragged
from calque.tokens.store import TokenStore, VectorStore
from calque.tokens.tokenizer import encode_sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

RULES = CleaningRules()
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from types import SimpleNamespace
from calque.tokens import prepare as preparation
from calque.io.cleaning import CleaningRules

class Saved(list):  # transformers takes seconds to import
    backend_tokenizer = SimpleNamespace(to_str=lambda pretty: "")

    def save_pretrained(self, folder):
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)

def die(stage, done, total):
    if stage.startswith("preparing en-ja") and done > 4:
        os.kill(os.getpid(), signal.SIGKILL)

preparation.BLOCK = 4
data, tokenizer, folder = map(Path, sys.argv[1:])
sources = [
    preparation.TextSource((data / f"en-{code}.tsv",), ("en", code)) for code in ("de", "ja")
]
preparation.prepare_corpora(
    sources, Saved(range(1500)), folder, rules=CleaningRules(), progress=die
)
"""


@pytest.fixture
def data() -> Path:
    return Path(__file__).parents[1] / "data"


@pytest.fixture
def sources(data: Path) -> list[TextSource]:
    return [TextSource((data / f"en-{code}.tsv",), ("en", code)) for code in ("de", "ja")]


class Preparation:
    """Prepares into one folder and records which corpora were written."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
        self.tokenizer, self.folder = tokenizer, folder

    def run(
        self, sources: list[TextSource], **options: Any
    ) -> tuple[list[PreparedCorpus], set[str]]:
        written = set()
        corpora = prepare_corpora(
            sources,
            self.tokenizer,
            self.folder,
            rules=options.pop("rules", RULES),
            progress=lambda stage, done, total: written.add(stage.removeprefix("preparing ")),
            **options,
        )
        return corpora, written


@pytest.fixture
def preparation_(tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Preparation:
    return Preparation(tiny_tokenizer, tmp_path / "prepared")


def read_ids(folder: Path, name: str, side: int) -> list[list[int]]:
    store = TokenStore.open(folder / name / f"side{side}")
    return [store.gather(np.array([k])).ids.tolist() for k in range(len(store))]


def files_of(folder: Path) -> dict[str, bytes]:
    stored = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(stored)}


def test_stores_contain_the_cleaned_text(
    preparation_: Preparation, sources: list[TextSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BLOCK", 7)  # several blocks per corpus
    corpora, written = preparation_.run(sources)
    assert written == {source.name for source in sources}
    for source, corpus in zip(sources, corpora, strict=True):
        report = CleaningReport()
        examples = list(read_clean(source, RULES, report))
        assert corpus.n_examples == len(examples) > 20
        assert corpus.cleaning == report.to_dict() | {"held_out": 0}
        for side in (0, 1):
            texts = [example[side] for example in examples]
            expected = [ids.tolist() for ids in encode_sentences(preparation_.tokenizer, texts)]
            assert read_ids(preparation_.folder, corpus.name, side) == expected
            assert corpus.n_tokens[side] == sum(map(len, expected))
    assert open_prepared(preparation_.folder) == corpora


def test_plain_text_and_tags(
    preparation_: Preparation, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    (tmp_path / "de.txt").write_text("Guten Tag!\n!!!\nGute Nacht!\nGuten Tag!\n", "utf-8")
    (tmp_path / "en-de.tsv").write_text(
        "Hello!\tHallo!\ta\nGood night!\tGute Nacht!\tb\nThank you!\tDanke!\tc\n", "utf-8"
    )
    text = TextSource((tmp_path / "de.txt",), ("de",))
    bitext = TextSource((tmp_path / "en-de.tsv",), ("en", "de"), ("a", "b"), ("b",))
    (first, second), _ = preparation_.run([text, bitext])
    expected = [
        ids.tolist() for ids in encode_sentences(tiny_tokenizer, ["Guten Tag!", "Gute Nacht!"])
    ]
    assert read_ids(preparation_.folder, first.name, 0) == expected
    assert first.cleaning["dropped"] == {"non-letters": 1, "duplicate": 1}
    assert (second.n_examples, second.languages) == (1, ("en", "de"))
    assert len({text.name, bitext.name, replace(bitext, exclude_tags=()).name}) == 3


@pytest.mark.slow
def test_worker_processes_store_the_same(
    preparation_: Preparation,
    sources: list[TextSource],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparation, "BLOCK", 3)
    preparation_.run(sources)
    many = Preparation(preparation_.tokenizer, tmp_path / "many")
    many.run(sources, n_workers=2)
    assert files_of(many.folder) == files_of(preparation_.folder)


def test_a_second_run_reuses_the_corpora(
    preparation_: Preparation, sources: list[TextSource]
) -> None:
    first, _ = preparation_.run(sources)
    before = {p: p.stat().st_mtime_ns for p in preparation_.folder.rglob("*.npy")}
    again, written = preparation_.run(sources)
    assert (again, written) == (first, set())
    assert {p: p.stat().st_mtime_ns for p in preparation_.folder.rglob("*.npy")} == before


def test_changes_are_noticed(
    preparation_: Preparation, sources: list[TextSource], tmp_path: Path
) -> None:
    moved = tmp_path / "en-de.tsv"
    moved.write_bytes(sources[0].paths[0].read_bytes())
    mine = [replace(sources[0], paths=(moved,)), sources[1]]
    names = [source.name for source in mine]
    preparation_.run(mine)
    with moved.open("a", encoding="utf-8") as stream:
        stream.write("A new line.\tEine neue Zeile.\n")
    corpora, written = preparation_.run(mine)
    assert written == {names[0]}
    longer = corpora[0].n_examples
    rules = CleaningRules(max_chars=40)
    corpora, written = preparation_.run(mine, rules=rules)
    assert written == set(names)
    assert corpora[0].n_examples < longer
    preparation_.run(mine)
    held_out = HeldOutPairs([("A new line.", "Eine neue Zeile.")])
    corpora, written = preparation_.run(mine, held_out=held_out)
    assert written == set(names)
    assert corpora[0].n_examples == longer - 1


def test_a_new_weight_changes_only_the_description(
    preparation_: Preparation, sources: list[TextSource]
) -> None:
    preparation_.run(sources)
    heavier = [replace(sources[0], weight=3.0), sources[1]]
    corpora, written = preparation_.run(heavier)
    assert written == set()
    assert [corpus.weight for corpus in corpora] == [3.0, 1.0]
    assert open_prepared(preparation_.folder) == corpora


def test_held_out_pairs_are_dropped_in_either_direction(
    preparation_: Preparation, sources: list[TextSource], tmp_path: Path
) -> None:
    pairs = [list(read_clean(source, RULES, CleaningReport())) for source in sources]
    (a, b), (c, d), (e, f) = pairs[0][0], pairs[0][5], pairs[1][3]
    lines = [
        f"eng\tdeu\t{a}\t{b}",
        f"{d}\t{c}",
        f" {e.replace(' ', '  ')}\t{f}",
        f"{a}\tsomething else",
    ]
    (tmp_path / "held.tsv").write_text("\n".join(lines) + "\n", "utf-8")
    held_out = read_held_out_pairs(tmp_path / "held.tsv")
    corpora, _ = preparation_.run(sources, held_out=held_out)
    assert [corpus.cleaning["held_out"] for corpus in corpora] == [2, 1]
    for corpus, examples, n_held_out in zip(corpora, pairs, (2, 1), strict=True):
        assert corpus.n_examples == len(examples) - n_held_out
    stored = read_ids(preparation_.folder, corpora[0].name, 0)
    held = [ids.tolist() for ids in encode_sentences(preparation_.tokenizer, [a, c])]
    assert not [ids for ids in held if ids in stored]
    assert read_held_out_pairs(None).keys == set()


def test_held_out_pairs_are_compared_after_normalization(
    preparation_: Preparation, tmp_path: Path
) -> None:
    (tmp_path / "en-fr.tsv").write_text("A  cafe\u0301!\tUn café !\nYes!\tOui !\n", "utf-8")
    source = TextSource((tmp_path / "en-fr.tsv",), ("en", "fr"))
    rules = CleaningRules(normalize=False)
    held_out = HeldOutPairs([("A café!", "Un cafe\u0301 !")])
    (corpus,), _ = preparation_.run([source], rules=rules, held_out=held_out)
    assert (corpus.n_examples, corpus.cleaning["held_out"]) == (1, 1)


@pytest.mark.slow
def test_a_kill_leaves_no_half_written_store(
    data: Path,
    sources: list[TextSource],
    tmp_path: Path,
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder, tokenizer = tmp_path / "prepared", tmp_path / "tokenizer"
    tiny_tokenizer.save_pretrained(tokenizer)
    command = [sys.executable, "-c", KILLED, str(data), str(tokenizer), str(folder)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    half = folder / sources[1].name
    assert list(half.glob("*.npy")) == [] and not (half / "corpus.json").exists()
    with pytest.raises(InputError, match="not a folder of prepared text"):
        open_prepared(folder)
    again = Preparation(tiny_tokenizer, folder)
    corpora, written = again.run(sources)
    assert written == {sources[1].name}  # the first was complete and is kept
    clean = Preparation(tiny_tokenizer, tmp_path / "clean")
    assert clean.run(sources)[0] == corpora
    assert files_of(folder) == files_of(clean.folder)


@pytest.mark.parametrize("n_written", [0, 1])
def test_an_interrupted_change_is_not_taken_for_the_old_text(
    n_written: int,
    preparation_: Preparation,
    sources: list[TextSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first corpus has its new stores; its description is missing or already written."""
    whole, _ = preparation_.run(sources)
    write = preparation._write_record

    def interrupt(path: Path, content: dict[str, Any]) -> None:
        if n_written:
            write(path, content)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "_write_record", interrupt)
        with pytest.raises(KeyboardInterrupt) as caught:
            preparation_.run(sources, rules=CleaningRules(max_chars=40))
    assert caught.value.__notes__ == [
        "0 of 2 corpora are complete; the same command prepares the others"
    ]
    with pytest.raises(InputError, match="not a folder of prepared text"):
        open_prepared(preparation_.folder)
    again, written = preparation_.run(sources)
    assert again == whole
    assert written == {sources[0].name}
    assert (
        len(TokenStore.open(preparation_.folder / whole[0].name / "side0")) == whole[0].n_examples
    )


def test_invalid_text_raises_and_leaves_no_stores(
    preparation_: Preparation, tmp_path: Path
) -> None:
    (tmp_path / "en-de.tsv").write_bytes(b"Hello!\tHallo!\n" * 3 + b"Yes!\t\xff\xfe\n")
    source = TextSource((tmp_path / "en-de.tsv",), ("en", "de"))
    with pytest.raises(InputError, match="line 4: invalid UTF-8"):
        preparation_.run([source])
    assert list((preparation_.folder / source.name).iterdir()) == []
    missing = TextSource((tmp_path / "absent.tsv",), ("en", "de"))
    with pytest.raises(InputError, match=r"absent\.tsv: no such file"):
        preparation_.run([missing])


def test_an_empty_corpus(preparation_: Preparation, tmp_path: Path) -> None:
    (tmp_path / "de.txt").write_text("\n\n", "utf-8")
    (corpus,), _ = preparation_.run([TextSource((tmp_path / "de.txt",), ("de",))])
    assert (corpus.n_examples, corpus.n_tokens) == (0, (0,))
    assert read_ids(preparation_.folder, corpus.name, 0) == []


@pytest.mark.parametrize("content", [None, "{", "[]", '{"corpora": ["en-de.12345678"]}'])
def test_an_invalid_prepared_folder_raises(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "prepared.json").write_text(content, "utf-8")
    with pytest.raises(InputError, match="not a folder of prepared text") as caught:
        open_prepared(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["prepared.json", "tokenizer/tokenizer.json", "*/corpus.json", "*/side0.ids.npy"],
)
def test_any_changed_byte_is_found_and_the_text_is_prepared_again(
    name: str, preparation_: Preparation, sources: list[TextSource]
) -> None:
    corpora, _ = preparation_.run(sources)
    verify_prepared(preparation_.folder)
    before = files_of(preparation_.folder)
    path = next(preparation_.folder.glob(name))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"{path.name}: .*\(run `calque prepare`\)$"):
        verify_prepared(preparation_.folder)
    assert preparation_.run(sources)[0] == corpora
    assert files_of(preparation_.folder) == before


@pytest.mark.slow
def test_a_worker_that_is_killed_is_one_line(
    preparation_: Preparation, sources: list[TextSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "_encode_block", kill_this_process)
    with pytest.raises(InputError, match=r"lack of memory \(use fewer --workers; a script"):
        preparation_.run(sources, n_workers=2)


def kill_this_process(block: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_tokenizer_is_trained_on_all_languages_without_held_out_text(
    tmp_path: Path,
) -> None:
    """With α = 0 a small language counts as much as English."""
    (tmp_path / "en.txt").write_text("".join(f"one {k} two\n" for k in "abcdefghij" * 9), "utf-8")
    (tmp_path / "ru.txt").write_text("да да\nнет\nЖ\n", "utf-8")
    sources = [TextSource((tmp_path / f"{code}.txt",), (code,)) for code in ("en", "ru")]
    tokenizer = train_tokenizer_on_sources(
        sources,
        CleaningRules(drop_duplicates=False),
        HeldOutPairs([("Ж",)]),
        vocab_size=60,
        n_characters=10_000,
        alpha=0.0,
        character_coverage=1.0,
        seed=0,
    )
    known = set("".join(tokenizer.get_vocab()))
    assert set("данет") <= known
    assert "Ж" not in known


def test_progress_of_tokenizer_training(
    sources: list[TextSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BLOCK", 10)
    calls: list[tuple[str, int, int | None]] = []
    train_tokenizer_on_sources(
        sources,
        RULES,
        HeldOutPairs(),
        vocab_size=400,
        n_characters=1000,
        alpha=0.5,
        character_coverage=0.9,
        seed=0,
        progress=lambda *call: calls.append(call),
    )
    assert list(dict.fromkeys(stage for stage, _, _ in calls)) == [
        "counting characters for the tokenizer",
        "drawing sentences for the tokenizer",
        "training the tokenizer",
    ]
    assert [done for _, done, _ in calls[:3]] == [10, 20, 30]


# Bitext with links


def write_linked(tmp_path: Path, links: str = "0-0 1-1\n0-1:0.5\n\n0-0\n") -> TextSource:
    text = "Good morning ||| Guten Morgen\nThank you ! ||| Danke sehr !\n"
    text += "Good evening ||| Guten Abend\nGood morning ||| Guten Morgen\n"
    (tmp_path / "en-de.text").write_text(text, "utf-8")
    (tmp_path / "en-de.links").write_text(links, "utf-8")
    return TextSource((tmp_path / "en-de.text",), ("en", "de"), links=tmp_path / "en-de.links")


def test_links_are_stored_with_their_pairs(
    preparation_: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preparation, "BLOCK", 2)
    source = write_linked(tmp_path)
    (corpus,), _ = preparation_.run([source])
    assert corpus.linked
    assert corpus.cleaning["dropped"] == {"duplicate": 1}
    folder = preparation_.folder / corpus.name
    everything = np.arange(3)
    links = TokenStore.open(folder / "links").gather(everything)
    assert links.lengths.tolist() == [2, 1, 0]
    assert links.ids.tolist() == [255, 1 << 20 | 1 << 8 | 255, 1 << 8 | 128]
    for side in (0, 1):
        counts = TokenStore.open(folder / f"words{side}").gather(everything)
        assert counts.lengths.tolist() == [2, 3, 2]
        ids = TokenStore.open(folder / f"side{side}").gather(everything)
        assert counts.ids.sum() == len(ids.ids) == corpus.n_tokens[side]
    assert open_prepared(preparation_.folder) == [corpus]


def test_changed_links_are_read_again(preparation_: Preparation, tmp_path: Path) -> None:
    source = write_linked(tmp_path)
    plain = replace(source, links=None)
    assert source.name != plain.name
    (corpus, other), written = preparation_.run([source, plain])
    assert written == {source.name, plain.name}
    assert not other.linked
    assert preparation_.run([source, plain])[1] == set()
    write_linked(tmp_path, links="0-0\n\n\n\n")
    (again, _), written = preparation_.run([source, plain])
    assert source.name in written
    assert again.fingerprint != corpus.fingerprint
    assert [corpus.linked for corpus in open_prepared(preparation_.folder)] == [True, False]


def test_held_out_pairs_are_found_when_split_into_words(
    preparation_: Preparation, tmp_path: Path
) -> None:
    held_out = HeldOutPairs([("Danke sehr!", "Thank you!"), ("Good", "Guten")])
    (corpus,), _ = preparation_.run([write_linked(tmp_path)], held_out=held_out)
    assert (corpus.n_examples, corpus.cleaning["held_out"]) == (2, 1)
    links = TokenStore.open(preparation_.folder / corpus.name / "links").gather(np.arange(2))
    assert links.lengths.tolist() == [2, 0]


@pytest.mark.slow
@pytest.mark.parametrize("n_workers", [1, 2])
def test_invalid_links_are_reported_by_workers_too(
    preparation_: Preparation, tmp_path: Path, n_workers: int
) -> None:
    source = write_linked(tmp_path, "0-0\n0-0\n0-7\n0-0\n")
    with pytest.raises(InputError, match=r"en-de\.links, line 3: the link 0-7"):
        preparation_.run([source], n_workers=n_workers)
    assert not (preparation_.folder / "prepared.json").exists()


# Words with vectors


def write_vectors(tmp_path: Path, words: list[str], shift: float = 0.0) -> TextSource:
    rows = [f"{word} {k + shift} {k + 0.5}\n" for k, word in enumerate(words)]
    (tmp_path / "de.vec").write_text(f"{len(words)} 2\n" + "".join(rows), "utf-8")
    return TextSource((tmp_path / "de.vec",), ("de",), vectors=True)


WORDS = ["der", "Gerücht", "</s>", "wahr", "der", "könnte", "ℵ⍼☃"]


def test_vectors_are_stored_with_their_words(
    preparation_: Preparation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_vectors(tmp_path, WORDS)
    read = preparation.read_vector_blocks
    monkeypatch.setattr(preparation, "read_vector_blocks", lambda *args: read(*args, size=1))
    monkeypatch.setattr("calque.io.word_vectors.BLOCK_BYTES", 16)  # several blocks
    (corpus,), written = preparation_.run([source])
    assert written == {source.name}
    assert (corpus.n_examples, corpus.dimensions, corpus.linked) == (4, 2, False)
    assert corpus.cleaning["dropped"] == {"unknown to the tokenizer": 2, "duplicate": 1}
    assert corpus.cleaning["n_read"] == 7
    kept = [0, 1, 3, 5]
    expected = encode_sentences(preparation_.tokenizer, [WORDS[k] for k in kept])
    assert read_ids(preparation_.folder, corpus.name, 0) == [ids.tolist() for ids in expected]
    assert corpus.n_tokens == (sum(map(len, expected)),)
    rows = VectorStore.open(preparation_.folder / corpus.name / "vectors").rows
    assert rows.tolist() == [[k, k + 0.5] for k in kept]
    assert open_prepared(preparation_.folder) == [corpus]


def test_only_changed_vectors_are_read_again(preparation_: Preparation, tmp_path: Path) -> None:
    source = write_vectors(tmp_path, WORDS)
    shorter = replace(source, max_words=2)
    assert len({source.name, shorter.name, replace(source, vectors=False).name}) == 3
    (_, short), _ = preparation_.run([source, shorter])
    assert (short.n_examples, short.cleaning["n_read"]) == (2, 2)
    assert preparation_.run([source, shorter])[1] == set()
    heavier = [replace(source, weight=2.0), shorter]
    assert preparation_.run(heavier)[1] == set()
    write_vectors(tmp_path, WORDS, shift=0.25)
    (again, _), written = preparation_.run([source, shorter])
    assert written == {source.name, shorter.name}
    rows = VectorStore.open(preparation_.folder / again.name / "vectors").rows
    assert rows[0].tolist() == [0.25, 0.5]
    assert [corpus.dimensions for corpus in open_prepared(preparation_.folder)] == [2, 2]


def test_invalid_vectors_raise_and_leave_no_stores(
    preparation_: Preparation, tmp_path: Path
) -> None:
    (tmp_path / "de.vec").write_text("der 1 2\ndie 1 two\n", "utf-8")
    source = TextSource((tmp_path / "de.vec",), ("de",), vectors=True)
    with pytest.raises(InputError, match=r"de\.vec, line 2"):
        preparation_.run([source])
    assert list((preparation_.folder / source.name).iterdir()) == []
    (tmp_path / "de.vec").write_text("0 5\n", "utf-8")
    with pytest.raises(InputError, match=r"de\.vec: .*word"):
        preparation_.run([source])
    with pytest.raises(InputError, match="not a folder of prepared text"):
        open_prepared(preparation_.folder)


@pytest.mark.slow
def test_worker_processes_store_the_same_vectors(
    preparation_: Preparation, demo_rows: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    words = list(dict.fromkeys(word for row in demo_rows for word in row[2].split()))
    source = write_vectors(tmp_path, words)
    preparation_.run([source])
    many = Preparation(preparation_.tokenizer, tmp_path / "many")
    many.run([source], n_workers=2)
    assert files_of(many.folder) == files_of(preparation_.folder)


def test_a_tokenizer_is_not_trained_on_vectors(tmp_path: Path) -> None:
    source = write_vectors(tmp_path, ["Ж", "ЖЖ"])
    (tmp_path / "en.txt").write_text("".join(f"one {k} two\n" for k in "abcdefghij"), "utf-8")
    tokenizer = train_tokenizer_on_sources(
        [source, TextSource((tmp_path / "en.txt",), ("en",))],
        CleaningRules(),
        HeldOutPairs(),
        vocab_size=60,
        n_characters=10_000,
        alpha=0.5,
        character_coverage=1.0,
        seed=0,
    )
    assert "Ж" not in set("".join(tokenizer.get_vocab()))


def write_vec(path: Path, words: list[str], width: int = 2) -> None:
    """Write a file in which word k has the vector k, k + 0.5, …"""
    lines = [f"{len(words)} {width}"]
    lines += [" ".join([w, *(f"{k + j / 2}" for j in range(width))]) for k, w in enumerate(words)]
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.mark.parametrize("name", ["de.vec", "de.vec.gz"])
@pytest.mark.parametrize("size", [1, 100, 10_000])
@pytest.mark.parametrize("max_words", [None, 1, 2500, 3000, 9999])
def test_blocks_contain_the_first_words(
    tmp_path: Path, name: str, size: int, max_words: int | None
) -> None:
    words = [f"w{k}" for k in range(3000)]
    write_vec(tmp_path / name, words)
    blocks = list(read_vector_blocks(tmp_path / name, max_words, size))
    assert [word for block in blocks for word in block.words] == words[:max_words]
    rows = np.concatenate([block.matrix for block in blocks])
    n_words = min(3000, max_words or 3000)
    np.testing.assert_array_equal(rows[:, 0], np.arange(n_words))
    assert all(len(block.words) >= min(size, n_words) for block in blocks[:-1])
    assert all(len(block.words) for block in blocks)


def test_invalid_lines_are_reported(tmp_path: Path) -> None:
    (tmp_path / "de.vec").write_text("a 1 2\nb 3 4\nc 5 oops\n")
    with pytest.raises(InputError, match=r"de\.vec, line 3"):
        list(read_vector_blocks(tmp_path / "de.vec"))
    with pytest.raises(InputError, match=r"absent\.vec: no such file"):
        list(read_vector_blocks(tmp_path / "absent.vec"))


@pytest.fixture
def report() -> CleaningReport:
    return CleaningReport()


@pytest.fixture
def word_filter(tmp_path: Path, report: CleaningReport) -> WordFilter:
    """`<s>` and `<unk>` are special, 7 is an ordinary word that was added."""
    added = [{"id": 0, "special": True}, {"id": 3, "special": True}, {"id": 7, "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return WordFilter.of(tmp_path / "tokenizer.json", report)


def test_bad_words_are_dropped_and_counted(word_filter: WordFilter, report: CleaningReport) -> None:
    words = ["das", "</s>", "\u200d", "das", "Haus", "☃a", "added"]
    pieces = Ragged.of([[10], [0], [], [10], [11, 12], [3, 13], [7]])
    matrix = np.arange(14, dtype=np.float32).reshape(7, 2)
    kept, vectors = word_filter.select(VectorBlock(words, matrix), pieces)
    assert kept.ids.tolist() == [10, 11, 12, 7]
    assert kept.lengths.tolist() == [1, 2, 1]
    np.testing.assert_array_equal(vectors, matrix[[0, 4, 6]])
    assert dict(report.dropped) == {
        "no subwords": 1,
        "unknown to the tokenizer": 2,
        "duplicate": 1,
    }
    assert report.examples["unknown to the tokenizer"] == [("</s>",), ("☃a",)]
    assert (report.n_read, report.n_kept) == (7, 3)
    # Words of earlier blocks are known.
    again, vectors = word_filter.select(
        VectorBlock(["Haus", "neu"], matrix[:2]), Ragged.of([[11, 12], [14]])
    )
    assert again.ids.tolist() == [14]
    np.testing.assert_array_equal(vectors, matrix[1:2])
    assert (report.n_read, report.n_kept, report.dropped["duplicate"]) == (9, 4, 2)


def test_words_with_zero_vectors_are_dropped(
    word_filter: WordFilter, report: CleaningReport
) -> None:
    matrix = np.array([[0, 1], [0, 0], [0, 0], [-1, 1]], dtype=np.float32)
    pieces = Ragged.of([[10], [11, 12], [], [13]])
    kept, vectors = word_filter.select(VectorBlock(["a", "b", "c", "d"], matrix), pieces)
    assert kept.ids.tolist() == [10, 13]
    np.testing.assert_array_equal(vectors, matrix[[0, 3]])
    assert dict(report.dropped) == {"no subwords": 1, "a vector of zeros": 1}
    assert report.examples["a vector of zeros"] == [("b",)]
