"""Settings of tasks: hashes, invalid values, and the cache of prepared data."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from calque.errors import InputError
from calque.evaluation.grid.task_run import hash_settings
from calque.evaluation.registry import TASKS
from calque.evaluation.settings import (
    N_CACHED,
    TaskSettings,
    build_settings,
    find_protocol,
    parse_setting,
    remember,
)

OTHER: dict[str, object] = {
    "setting": "features",
    "head": "crf",
    "select": "best",
    "precision": "fp32",
    "plug": "in",
    "layers": (1,),
    "similarity": "margin",
}


def test_every_field_is_in_the_hash() -> None:
    plain = TaskSettings()
    for field in fields(TaskSettings):
        value = getattr(plain, field.name)
        other: object = OTHER.get(field.name)
        if other is None and isinstance(value, bool):
            other = not value
        elif other is None:
            other = "de" if isinstance(value, str) else 0.5 if isinstance(value, float) else 7
        if field.name == "body_dropout":
            other = 0.5
        assert replace(plain, **{field.name: other}).hash() != plain.hash(), field.name


def test_the_same_choices_have_the_same_hash() -> None:
    assert TaskSettings(epochs=2).hash() == TaskSettings(epochs=2).hash()


@pytest.mark.parametrize(
    "choice",
    [
        {"setting": "one-shot"},
        {"epochs": 0},
        {"learning_rate": -1.0},
        {"learning_rate": float("inf")},
        {"head_learning_rate": float("inf")},
        {"weight_decay": float("inf")},
        {"learning_rate": float("nan")},
        {"warmup": 1.0},
        {"dropout": -0.1},
        {"max_length": 0},
        {"train_examples": 0},
        {"head": "tree"},
        {"select": "first"},
        {"precision": "fp8"},
        {"plug": "both"},
        {"plug": "in", "setting": "features"},
        {"weight_decay": -1.0},
        {"max_grad_norm": 0.0},
        {"neutral": True, "center": True},
        {"neutral": True, "layers": (1,)},
    ],
)
def test_invalid_values(choice: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(choice))):
        TaskSettings(**choice)  # type: ignore[arg-type]


def test_settings_count_in_the_hash_if_the_task_reads_them() -> None:
    task, base = TASKS["tatoeba"], TaskSettings()
    plain = hash_settings("tatoeba", task, base, ["de"])
    assert hash_settings("tatoeba", task, replace(base, epochs=9), ["de"]) == plain
    for change in ({"layer": 3}, {"center": True}, {"similarity": "margin"}):
        assert hash_settings("tatoeba", task, replace(base, **change), ["de"]) != plain
    assert hash_settings("tatoeba", task, base, ["de", "fr"]) != plain
    trained = replace(task, trained=True)
    assert hash_settings("x", trained, replace(base, epochs=9), None) != hash_settings(
        "x", trained, base, None
    )


# Section 3 and Appendix A of the paper: Adam at 2e-5 with 10 % warm-up, 5 epochs, 32 examples;
# features of a frozen encoder: 4 layers, 20 epochs, 128 examples, 1e-3 (NER and XNLI 1e-4), CRF.
@pytest.mark.parametrize(
    ("task", "frozen", "expected"),
    [
        ("xnli", False, (5, 2e-5, 32, "linear")),
        ("ner", False, (5, 2e-5, 32, "linear")),
        ("pos", False, (5, 2e-5, 32, "linear")),
        ("parsing", False, (5, 2e-5, 32, "linear")),
        ("xnli", True, (20, 1e-4, 128, "linear")),
        ("ner", True, (20, 1e-4, 128, "crf")),
        ("pos", True, (20, 1e-3, 128, "linear")),
        ("parsing", True, (20, 1e-3, 128, "linear")),
    ],
)
def test_protocol_of_wu_and_dredze(
    task: str, frozen: bool, expected: tuple[int, float, int, str]
) -> None:
    found = build_settings(TASKS[task].defaults, find_protocol("wu-dredze", task, frozen=frozen))
    assert (found.epochs, found.head_learning_rate, found.batch_examples, found.head) == expected
    assert (found.learning_rate, found.weight_decay, found.warmup) == (2e-5, 0.0, 0.1)
    assert (found.max_length, found.max_words, found.select) == (128, 128, "best")
    assert found.is_frozen == frozen and found.extra_layers == 4
    assert found.chinese_words and not found.pooler and not found.subtypes


def test_unknown_protocols_and_tasks_are_errors() -> None:
    assert find_protocol(None, "xquad", frozen=False) == {}
    for protocol, task, problem in (
        ("wu", "pos", "there is no protocol 'wu'"),
        ("wu-dredze", "xquad", "has no settings for xquad"),
    ):
        with pytest.raises(InputError, match=problem):
            find_protocol(protocol, task, frozen=False)


def test_choices_take_precedence_over_defaults() -> None:
    chosen = build_settings({"epochs": 7, "head": "crf"}, {"epochs": 2})
    assert (chosen.epochs, chosen.head) == (2, "crf")
    with pytest.raises(InputError, match="there is no setting 'speed'"):
        build_settings({"speed": 3})


def test_values_are_parsed_by_type() -> None:
    texts = {"graphs": "false", "learning_rate": "1e-4", "source": "de", "layers": "1,-1"}
    values = {name: parse_setting(name, text) for name, text in texts.items()}
    assert values == {"graphs": False, "learning_rate": 1e-4, "source": "de", "layers": (1, -1)}
    for name, text in (("epochs", "x"), ("graphs", "maybe")):
        with pytest.raises(InputError, match=f"the value '{text}' of {name} is invalid"):
            parse_setting(name, text)


def test_the_cache_keeps_the_values_used_last() -> None:
    class Tokenizer:
        pass

    tokenizer, made = Tokenizer(), list[int]()

    def make(number: int) -> int:
        made.append(number)
        return number

    for number in (*range(N_CACHED), 0, N_CACHED, 0, 1):
        assert remember(tokenizer, number, lambda number=number: make(number)) == number
    assert made == [*range(N_CACHED), N_CACHED, 1]
    assert remember(Tokenizer(), 0, lambda: "other") == "other"
