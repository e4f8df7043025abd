"""From sources to prepared text: files, languages, links, tokenizers and errors."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.toy_tokenizers import sentence_piece

import calque
from calque.errors import InputError
from calque.tokens.prepare import TextSource
from calque.tokens.tokenizer import load_tokenizer
from calque.training.distributed import lock_folder
from calque.training.recipe import DataSection, Recipe, SourceSection
from calque.training.sources import (
    check_text,
    find_recipe_tokenizer,
    find_sources,
    open_text,
    prepare,
    prepare_text,
)

MakeRecipe = Callable[..., Recipe]
SOURCE = "data.sources=[{path: en-de.tsv, kind: bitext}]"


def find(tmp_path: Path, *sections: dict[str, object], **data: object) -> list[TextSource]:
    sources = [SourceSection.model_validate(section) for section in sections]
    return find_sources(DataSection(sources=sources, **data), tmp_path / "recipes")  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files beside a recipe, and others in the working directory."""
    for name in ("recipes/en-de.tsv", "recipes/en-fr.tsv.gz", "work/en-fi.tsv", "work/de.txt.xz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for name in ("a.en", "a.de", "b.en", "b.de", "en-de.tsv"):
        (tmp_path / "work" / name).touch()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_paths_start_from_the_recipe_or_the_working_directory(folder: Path) -> None:
    first, second = find(
        folder, {"path": "en-de.tsv", "kind": "bitext"}, {"path": "en-fi.tsv", "kind": "bitext"}
    )
    assert first.paths == (folder / "recipes/en-de.tsv",)
    assert (second.paths, second.languages) == ((Path("en-fi.tsv"),), ("en", "fi"))
    with pytest.raises(InputError, match=r"^sv\.txt: no such file"):
        find(folder, {"path": "sv.txt", "kind": "text"})


def test_star_matches_several_files(folder: Path) -> None:
    found = find(folder, {"path": "en-*", "kind": "bitext", "weight": 2.0, "include_tags": ["a"]})
    assert [source.languages for source in found] == [("en", "de"), ("en", "fr")]
    assert {(source.weight, source.keep_tags) for source in found} == {(2.0, ("a",))}
    found = find(folder, {"path": "en-*", "kind": "bitext"}, leave_out_languages=["fr"])
    assert [source.languages for source in found] == [("en", "de")]
    with pytest.raises(InputError, match="the recipe has no text"):
        find(folder, {"path": "en-*", "kind": "bitext"}, leave_out_languages=["en"])
    with pytest.raises(InputError, match="the recipe has no text"):
        find(folder)


def test_two_paths_are_sides_or_bitexts(folder: Path) -> None:
    (moses,) = find(folder, {"path": ["a.en", "a.de"], "kind": "bitext"})
    assert (moses.paths, moses.languages) == ((Path("a.en"), Path("a.de")), ("en", "de"))
    many = find(folder, {"path": ["?.en", "?.de"], "kind": "bitext"})
    assert [source.paths for source in many] == [
        (Path("a.en"), Path("a.de")),
        (Path("b.en"), Path("b.de")),
    ]
    two = find(folder, {"path": ["en-de.tsv", "en-fi.tsv"], "kind": "bitext"})
    assert [source.languages for source in two] == [("en", "de"), ("en", "fi")]
    with pytest.raises(InputError, match="2 files on one side and 1 on the other"):
        find(folder, {"path": ["?.en", "a.de"], "kind": "bitext"})


def test_languages_come_from_the_name_or_the_recipe(folder: Path) -> None:
    (text,) = find(folder, {"path": "de.txt.xz", "kind": "text"})
    assert text.languages == ("de",)
    (named,) = find(folder, {"path": "a.en", "kind": "bitext", "languages": "sw-yo"})
    assert named.languages == ("sw", "yo")
    with pytest.raises(InputError, match=r"a\.en: the languages cannot be inferred.*: en-de"):
        find(folder, {"path": "a.en", "kind": "bitext"})


def test_links_are_found_with_their_bitext(folder: Path) -> None:
    for name in ("en-de.links", "en-fr.links"):
        (folder / "recipes" / name).touch()
    found = find(
        folder, {"path": ["en-de.tsv", "en-fr.tsv.gz"], "kind": "bitext", "links": "*.links"}
    )
    assert [source.links for source in found] == [
        folder / "recipes/en-de.links",
        folder / "recipes/en-fr.links",
    ]
    (moses,) = find(folder, {"path": ["a.en", "a.de"], "kind": "bitext", "links": ["en-de.links"]})
    assert moses.links == folder / "recipes/en-de.links"
    with pytest.raises(InputError, match=r"\*\.links: there are 2 files of links for 1 bitexts"):
        find(folder, {"path": "en-de.tsv", "kind": "bitext", "links": "*.links"})
    with pytest.raises(InputError, match=r"no\.links: no such file"):
        find(folder, {"path": "en-de.tsv", "kind": "bitext", "links": "no.links"})


def test_vectors_are_found_like_text(folder: Path) -> None:
    for name in ("recipes/de.vec", "recipes/fi.vec.gz"):
        (folder / name).touch()
    found = find(folder, {"path": "*.vec*", "kind": "vectors", "max_words": 10, "weight": 2.0})
    assert [source.languages for source in found] == [("de",), ("fi",)]
    assert {(source.vectors, source.max_words, source.weight) for source in found} == {
        (True, 10, 2.0)
    }
    (text,) = find(folder, {"path": "de.txt.xz", "kind": "text"})
    assert (text.vectors, text.max_words) == (False, None)


# Preparing


def write_sources(folder: Path) -> None:
    lines = [f"The number is {k}.\tDie Zahl ist {k}.\n" for k in range(60)]
    (folder / "en-de.tsv").write_text("".join([*lines, "\tleer\n", lines[0]]))


@pytest.mark.parametrize("languages", ["../../x-de", "en-..", "en-a/b", "en-"])
def test_languages_that_would_leave_the_folder_are_an_error(
    languages: str, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    recipe = tiny_recipe(SOURCE.replace("bitext", f"bitext, languages: {languages}"))
    with pytest.raises(InputError, match=r"en-de\.tsv: '.*' cannot be the code of a language"):
        prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)


def test_prepare_reports_and_writes(
    tiny_recipe: MakeRecipe, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sources(tmp_path)
    (tmp_path / "r.yaml").write_text(tiny_recipe(SOURCE).to_yaml())
    progress: list[tuple[str, int, int | None]] = []
    with caplog.at_level(logging.INFO, "calque"):
        result = prepare(
            tmp_path / "r.yaml",
            output=tmp_path / "text",
            settings={"tokenizer.vocab_size": 80},
            workers=1,
            progress=lambda *call: progress.append(call),
        )
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "training a tokenizer of 80 entries"
    assert "60 of 62 examples kept; dropped: " in second
    (corpus,), tokenizer = open_text(tmp_path / "text")
    assert len(tokenizer) <= 80
    assert progress[-1] == (f"preparing {corpus.name}", 60, None)
    assert (result.folder, result.n_corpora) == (tmp_path / "text", 1)
    assert (result.n_examples, result.n_tokens) == (60, sum(corpus.n_tokens))


def test_tokenizer_is_trained_again_when_its_settings_change(
    tiny_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sources(tmp_path)

    def is_trained(*changes: str) -> bool:
        recipe = tiny_recipe(SOURCE, "tokenizer.vocab_size=80", *changes)
        caplog.clear()
        with caplog.at_level(logging.INFO, "calque"):
            prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)
        return caplog.messages[0].startswith("training a tokenizer")

    assert is_trained()
    assert not is_trained()
    assert not is_trained("data.sources.0.weight=2.0", "data.alpha=0.2", "schedule.steps=9")
    assert is_trained("tokenizer.vocab_size=70")
    assert is_trained("data.cleaning.max_chars=18")
    assert not is_trained(f"tokenizer.path={tiny_folder}")
    assert is_trained()
    file = tmp_path / "text" / "tokenizer" / "tokenizer.json"
    before = file.read_bytes()
    file.write_bytes(before.replace(b"is", b"si"))
    assert is_trained()
    assert file.read_bytes() == before


def test_text_that_another_process_prepares_is_an_error(
    tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    with lock_folder(tmp_path / "text"), pytest.raises(InputError, match=r"text: process \d+ on"):
        prepare_text(tiny_recipe(SOURCE), tmp_path, tmp_path / "text", n_workers=1)


def test_partial_tokenizer_is_not_left(
    tiny_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later runs would use it."""
    from transformers import PreTrainedTokenizerFast

    def run_out_of_space(tokenizer: object, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_text('{"version": ')
        raise Exception("File too large (os error 27)")

    write_sources(tmp_path)
    recipe = tiny_recipe(SOURCE, "tokenizer.vocab_size=80")
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "save_pretrained", run_out_of_space)
        with pytest.raises(InputError, match=r"tokenizer: .*cannot be written: .*File too"):
            prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)
    assert not (tmp_path / "text").exists()
    assert prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)


def test_output_that_is_a_file_is_an_error(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_sources(tmp_path)
    recipe = tiny_recipe(SOURCE)
    with pytest.raises(InputError, match=r"en-de\.tsv: this is not a folder"):
        prepare_text(recipe, tmp_path, tmp_path / "en-de.tsv", n_workers=1)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no mask", "the tokenizer has no mask token"),
        ("too many", "entries but the model has [0-9]+ embeddings"),
        ("another", "another vocabulary than this model's"),
    ],
)
def test_unsuitable_tokenizer_is_an_error_before_text_is_prepared(
    fault: str, message: str, tiny_recipe: MakeRecipe, tiny_folder: Path, tmp_path: Path
) -> None:
    write_sources(tmp_path)
    start, theirs = tmp_path / "start", tmp_path / "theirs"
    shutil.copytree(tiny_folder, start)
    tokenizer = load_tokenizer(start)
    if fault == "no mask":
        tokenizer.mask_token = None
    if fault == "too many":
        tokenizer.add_tokens([f"<{number}>" for number in range(9999)])
    changes = [f"model.start={start}"]
    if fault == "another":
        sentence_piece(["▁a", "▁b"]).save_pretrained(theirs)
        changes.append(f"tokenizer.path={theirs}")
    else:
        tokenizer.save_pretrained(start)
    recipe = tiny_recipe(SOURCE, *changes)
    with pytest.raises(InputError, match=message):
        prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)
    assert not (tmp_path / "text").exists()


def test_missing_hold_out_file_is_an_error(tiny_recipe: MakeRecipe, tmp_path: Path) -> None:
    write_sources(tmp_path)
    recipe = tiny_recipe(SOURCE, "data.hold_out=no.tsv")
    with pytest.raises(InputError, match=r"no\.tsv: the file of held-out pairs does not exist"):
        prepare_text(recipe, tmp_path, tmp_path / "text", n_workers=1)
    assert not (tmp_path / "text").exists()


@pytest.mark.parametrize("name", ["folder", "calque-mini"])
def test_model_and_tokenizer_are_found_by_folder_or_name(
    name: str, tiny_recipe: MakeRecipe, tiny_folder: Path
) -> None:
    given = str(tiny_folder) if name == "folder" else name
    expected = load_tokenizer(tiny_folder if name == "folder" else calque.load().folder)
    for change in (f"model.start={given}", f"tokenizer.path={given}"):
        found = find_recipe_tokenizer(tiny_recipe(change), Path("nowhere"))
        assert found is not None
        assert found.get_vocab() == expected.get_vocab()
    assert find_recipe_tokenizer(tiny_recipe(), Path("nowhere")) is None


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{path: en-de.tsv, kind: bitext}", "cross_attention_lm needs plain text"),
        ("{path: en.txt, kind: text}", "translation_lm needs bitext"),
    ],
)
def test_source_of_the_wrong_kind_is_an_error(
    source: str, message: str, tiny_recipe: MakeRecipe, tmp_path: Path
) -> None:
    """VECO's recipe with bitext only: neighboring lines are those of plain text."""
    for name in ("en-de.tsv", "en.txt"):
        (tmp_path / name).touch()
    objectives = (
        "objectives=[{kind: cross_attention_lm, pairs: neighbors, batch_tokens: 512},"
        " {kind: translation_lm, batch_tokens: 512}]"
    )
    recipe = tiny_recipe(objectives, "model.cross_attention=self", f"data.sources=[{source}]")
    with pytest.raises(InputError, match=f"{message}, and data.sources has none"):
        check_text(recipe, tmp_path)
