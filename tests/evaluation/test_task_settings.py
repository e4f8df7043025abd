from __future__ import annotations

from dataclasses import fields, replace

import pytest

from calque.errors import InputError
from calque.evaluation.settings import TaskSettings

OTHER = {"setting": "features", "head": "crf", "select": "best", "precision": "fp32", "plug": "in"}


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
    ],
)
def test_what_cannot_be_meant(choice: dict[str, object]) -> None:
    with pytest.raises(InputError, match=next(iter(choice))):
        TaskSettings(**choice)  # type: ignore[arg-type]
