"""Models of an evaluation: names, hashes of files, fresh copies and random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from calque.errors import InputError
from calque.evaluation.grid.model_specs import (
    EncoderCache,
    find_data,
    find_models,
    hash_files,
    hash_values,
)
from calque.evaluation.registry import TASKS

CPU = torch.device("cpu")


def test_random_weights_are_those_of_hugging_face(tiny_folder: Path) -> None:
    (spec,) = find_models([f"random:{tiny_folder}"])
    before = torch.get_rng_state()
    cache = EncoderCache()
    encoder = cache.load(spec, 5, CPU, torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained(tiny_folder))
    state = encoder.model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    other = cache.load(spec, 6, CPU, torch.float32)
    tables = [one.model.get_input_embeddings().weight for one in (encoder, other)]
    assert not torch.equal(*tables)
    assert not encoder.training


def test_every_run_gets_a_fresh_encoder(tiny_folder: Path) -> None:
    (spec,) = find_models([str(tiny_folder)])
    cache = EncoderCache()
    first = cache.load(spec, 1, CPU, torch.float32)
    wanted = {name: tensor.clone() for name, tensor in first.state_dict().items()}
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.zero_()
    second = cache.load(spec, 2, CPU, torch.float32)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in second.state_dict().items())
    assert second.tokenizer is first.tokenizer  # so that tokenized texts can be reused


@pytest.mark.parametrize("name", ["a\x1b[31m", "a\nb", "a" * 5000, "a\udcff"])
def test_names_with_control_characters_are_refused(tiny_folder: Path, name: str) -> None:
    with pytest.raises(InputError, match="the name of a model is too long or") as caught:
        find_models([f"{name}={tiny_folder}"])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 700


def test_the_hash_of_a_model_is_that_of_its_files(tiny_folder: Path, tmp_path: Path) -> None:
    (tiny,) = find_models([str(tiny_folder)])
    (random,) = find_models([f"random:{tiny_folder}"])
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tiny_folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    moved, moved_random = replace(tiny, folder=copy), replace(random, folder=copy)
    assert moved.hash() == tiny.hash() != random.hash()
    (copy / "README.md").write_text("not a file of the model")
    assert moved.hash() == tiny.hash()
    (copy / "model.safetensors").write_bytes(b"other")
    assert moved.hash() != tiny.hash()
    assert moved_random.hash() == random.hash()  # the weights are not read
    # A tokenizer's merges decide what a model reads, with random weights too.
    (copy / "merges.txt").write_text("#version: 0.2\na b\n")
    assert moved_random.hash() != random.hash()


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


def test_files_are_found_in_all_layouts(tmp_path: Path) -> None:
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


def test_training_files_beside_the_folder_of_a_dataset_count(tmp_path: Path) -> None:
    for name in ("mlqa/dev/dev-context-en-question-en.json", "squad/train-v1.1.json"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("{}", "utf-8")
    above = find_data(tmp_path, TASKS["mlqa"].files)
    assert [name for name, _ in above] == [
        "mlqa/dev/dev-context-en-question-en.json",
        "squad/train-v1.1.json",
    ]
    assert find_data(tmp_path / "mlqa", TASKS["mlqa"].files) == above
    assert find_data(tmp_path / "squad", TASKS["mlqa"].files) == above


def test_maps_are_part_of_the_hash(tiny_folder: Path, tmp_path: Path) -> None:
    (plain,) = find_models([str(tiny_folder)])
    (tmp_path / "maps.json").write_text("{}")
    (spec,) = find_models([str(tiny_folder)], maps=str(tmp_path))
    mapped = spec.hash()
    assert mapped != plain.hash()
    (tmp_path / "maps.json").write_text("[]")
    assert spec.hash() not in (mapped, plain.hash())


def test_names(tiny_folder: Path) -> None:
    tiny = str(tiny_folder)
    specs = find_models([f"a={tiny}", tiny, f"{tiny}/", f"b=random:{tiny}"])
    assert [(spec.name, spec.kind) for spec in specs] == [
        ("a", "encoder"),
        (tiny, "encoder"),
        ("b", "random"),
    ]
    with pytest.raises(InputError, match="two models have the name 'a'"):
        find_models([f"a={tiny}", f"a=random:{tiny}"])
