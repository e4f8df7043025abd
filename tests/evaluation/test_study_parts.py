"""The parts of a study: models as entrants, hashes, the folder of results, the clock, the queue."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from calque.errors import InputError
from calque.evaluation.grid.cells import Cell, CellResult, choose_settings, hash_settings
from calque.evaluation.grid.grid import Clock, choose_languages, choose_next
from calque.evaluation.grid.model_specs import (
    EncoderShelf,
    Entrant,
    find_data,
    find_entrants,
    hash_files,
    hash_values,
)
from calque.evaluation.grid.results_folder import NOTE, ResultsFolder
from calque.evaluation.grid.runner import (
    check_outcomes,
    describe_end,
    describe_error,
    spoils_process,
)
from calque.evaluation.records import Outcome
from calque.evaluation.registry import TASKS, find_kinds, load_function
from calque.evaluation.settings import N_KEPT, TaskSettings, remember

CPU = torch.device("cpu")


def make_cell(task: str = "tatoeba", seed: int | None = 1, model: str = "m") -> Cell:
    entrant = Entrant(model, "encoder", Path("nowhere"))
    return Cell(entrant, task, TASKS[task], seed, Path(), None, TaskSettings(), "1-2-3")


RESULT = CellResult((Outcome("de", {"accuracy": 50.0}, 2),), seconds=1.5)


# Entrants.


def test_random_weights_are_those_of_hugging_face(tiny_folder: Path) -> None:
    (entrant,) = find_entrants([f"random:{tiny_folder}"], of_vectors=False)
    before = torch.get_rng_state()
    shelf = EncoderShelf()
    encoder = shelf.take(entrant, 5, CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tiny_folder))
    state = encoder.model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    other = shelf.take(entrant, 6, CPU, torch.float32)
    tables = [one.model.get_input_embeddings().weight for one in (encoder, other)]
    assert not torch.equal(*tables)
    assert not encoder.training


def test_every_cell_gets_a_fresh_encoder(tiny_folder: Path) -> None:
    (entrant,) = find_entrants([str(tiny_folder)], of_vectors=False)
    shelf = EncoderShelf()
    first = shelf.take(entrant, 1, CPU, torch.float32)
    wanted = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    second = shelf.take(entrant, 2, CPU, torch.float32)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.state_dict().items())
    assert second.tokenizer is first.tokenizer  # so that what it made can be used again


def test_the_hash_of_a_model_is_that_of_its_files(tiny_folder: Path, tmp_path: Path) -> None:
    (tiny,) = find_entrants([str(tiny_folder)], of_vectors=False)
    (floor,) = find_entrants([f"random:{tiny_folder}"], of_vectors=False)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    moved, moved_floor = replace(tiny, folder=copy), replace(floor, folder=copy)
    assert moved.hash() == tiny.hash() != floor.hash()
    (copy / "README.md").write_text("says nothing about the weights")
    assert moved.hash() == tiny.hash()
    (copy / "model.safetensors").write_bytes(b"other")
    assert moved.hash() != tiny.hash()
    assert moved_floor.hash() == floor.hash()  # which never reads the weights
    # A tokenizer's merges decide what a model reads, and a floor too.
    (copy / "merges.txt").write_text("#version: 0.2\na b\n")
    assert moved_floor.hash() != floor.hash()


# Hashes.


def test_hashes_are_the_same_everywhere(tmp_path: Path) -> None:
    # By `printf '%s' '{"a": [1, "ä"]}' | sha256sum`.
    assert hash_values({"a": [1, "ä"]}) == "5a9f439298"
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    files = [(name, tmp_path / name) for name in ("a.txt", "b.txt")]
    assert hash_files(files) == hash_files(reversed(files))
    assert hash_files([("c.txt", tmp_path / "a.txt"), files[1]]) != hash_files(files)
    with pytest.raises(InputError, match="no such file"):
        hash_files([("x", tmp_path / "x")])


def test_data_are_found_where_the_tasks_find_them(tmp_path: Path) -> None:
    patterns = ("udpos/*", "ud/*")
    (tmp_path / "xtreme" / "udpos").mkdir(parents=True)
    (tmp_path / "xtreme" / "udpos" / "dev-en.tsv").touch()
    found = find_data(tmp_path, patterns)
    assert [name for name, _ in found] == ["udpos/dev-en.tsv"]
    assert find_data(tmp_path / "xtreme", patterns) == found
    assert [path for _, path in find_data(tmp_path / "xtreme" / "udpos", patterns)][:1] == [
        path for _, path in found
    ]
    assert find_data(tmp_path / "xtreme" / "udpos" / "dev-en.tsv", patterns) == []


def test_what_is_learnt_from_beside_a_sets_folder_is_in_the_hash(tmp_path: Path) -> None:
    for name in ("mlqa/dev/dev-context-en-question-en.json", "squad/train-v1.1.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}", "utf-8")
    above = find_data(tmp_path, TASKS["mlqa"].files)
    assert [name for name, _ in above] == [
        "mlqa/dev/dev-context-en-question-en.json",
        "squad/train-v1.1.json",
    ]
    assert find_data(tmp_path / "mlqa", TASKS["mlqa"].files) == above
    assert find_data(tmp_path / "squad", TASKS["mlqa"].files) == [
        ("squad/train-v1.1.json", tmp_path / "squad" / "train-v1.1.json")
    ]


def test_settings_count_where_they_matter() -> None:
    kind, base = TASKS["tatoeba"], TaskSettings()
    plain = hash_settings("tatoeba", kind, base, ["de"])
    assert hash_settings("tatoeba", kind, replace(base, epochs=9), ["de"]) == plain
    assert hash_settings("tatoeba", kind, replace(base, layer=3), ["de"]) != plain
    assert hash_settings("tatoeba", kind, base, ["de", "fr"]) != plain
    trained = replace(kind, trained=True)
    assert hash_settings("x", trained, replace(base, epochs=9), None) != hash_settings(
        "x", trained, base, None
    )
    chosen = choose_settings(replace(kind, defaults={"epochs": 7, "head": "crf"}), {"epochs": 2})
    assert (chosen.epochs, chosen.head) == (2, "crf")


def test_what_a_task_lacks_names_the_task() -> None:
    data, settings = Path(__file__).parents[1] / "data", TaskSettings(source="zu")
    with pytest.raises(InputError, match=r"data: ner: no file to learn from in the source 'zu'"):
        choose_languages("ner", TASKS["ner"], data, settings, None)


def test_all_tasks_can_be_imported() -> None:
    for name, kind in TASKS.items():
        for reference in filter(None, (kind.measure, kind.languages, kind.score)):
            assert callable(load_function(reference, name))
        choose_settings(kind, {})
    assert list(find_kinds(["pos_probe", " tatoeba", "tatoeba"])) == ["pos_probe", "tatoeba"]


# Results.


def test_half_written_rows_are_cut_off(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path / "out") as results:
        results.add(make_cell(seed=1), RESULT)
    path = tmp_path / "out" / "results.jsonl"
    whole = path.read_bytes()
    two = whole.replace(b'"seed": 1', b'"seed": 2') * 2  # two rows, of which one was written
    path.write_bytes(whole + two[: len(two) // 2])
    note = {"start": len(whole), "end": len(whole) + len(two)}
    (tmp_path / "out" / NOTE).write_text(json.dumps(note))
    with ResultsFolder(tmp_path / "out") as results:
        assert list(results.cells) == [("m", "tatoeba", 1)]
        assert results.repairs == ["rows of a cell that was being written are dropped"]
    assert path.read_bytes() == whole
    path.write_bytes(whole + two)  # all of it: only the note was left
    (tmp_path / "out" / NOTE).write_text(json.dumps(note))
    with ResultsFolder(tmp_path / "out") as results:
        assert list(results.cells) == [("m", "tatoeba", 1), ("m", "tatoeba", 2)]
        assert results.repairs == []


def test_one_process_writes(tmp_path: Path) -> None:
    with ResultsFolder(tmp_path), pytest.raises(InputError, match="another process"):
        ResultsFolder(tmp_path)
    ResultsFolder(tmp_path).close()


def test_outcomes_are_checked() -> None:
    good = Outcome("de", {"a": 1.0}, 1)
    check_outcomes((good,))
    for bad in ((), (good, good), (Outcome("fr", {"a": float("nan")}, 1),)):
        with pytest.raises(InputError):
            check_outcomes(bad)


def test_errors_are_one_line() -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("CUDA out of memory.\nA long story")
    assert describe_error(caught.value).startswith("RuntimeError: CUDA out of memory. (test_study")
    assert spoils_process(caught.value) and spoils_process(MemoryError())
    assert not spoils_process(ValueError("no CUDA here"))
    assert describe_error(InputError("bad", fix="mend it")) == "bad (mend it)"
    assert describe_end(3) == "the worker ended with exit code 3"


# Time and order.


def test_the_clock_counts_jobs_and_tasks() -> None:
    clock = Clock()
    assert clock.estimate(["pos"], [], 1) is None
    clock.note("pos", 10)
    clock.note("pos", 20)
    assert clock.estimate(["pos", "pos"], [], 1) == 30
    assert clock.estimate(["pos", "pos"], [], 2) == 15
    assert clock.estimate(["ner"], [], 1) == 15  # unknown: as the others
    clock.note("ner", 45)
    assert clock.estimate(["ner", "qa"], [], 1) == 45 + 30
    assert clock.estimate(["pos"], [("pos", 5), ("ner", 60)], 1) == 15 + 10
    assert clock.estimate([], [("ner", 5)], 4) == 40  # nobody can help with the last
    assert clock.estimate([], [], 4) == 0


def test_workers_stay_with_what_they_have_ready() -> None:
    queue = [make_cell(task, seed) for task in ("pos_probe", "tatoeba") for seed in (1, 2)]
    workers: list[Any] = [SimpleNamespace(last=None), SimpleNamespace(last=None)]
    assert choose_next(queue, workers[0], workers) == 0
    workers[0].last = queue[0]
    assert choose_next(queue[1:], workers[1], workers) == 1  # the other task
    workers[1].last = queue[2]
    assert choose_next(queue[1:], workers[0], workers) == 0
    assert choose_next(queue[:2], workers[1], workers) == 0  # nothing else is left


def test_what_was_prepared_is_forgotten_in_time() -> None:
    class Tokenizer:
        pass

    tokenizer, made = Tokenizer(), list[int]()

    def make(number: int) -> int:
        made.append(number)
        return number

    for number in (*range(N_KEPT), 0, N_KEPT, 0, 1):
        assert remember(tokenizer, number, lambda number=number: make(number)) == number
    assert made == [*range(N_KEPT), N_KEPT, 1]
    assert remember(Tokenizer(), 0, lambda: "another's") == "another's"
