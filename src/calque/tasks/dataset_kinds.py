"""What is to be known of a dataset, and how its files are recognized."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileKind:
    """Files of a dataset: a pattern of their path, and how they are read.

    The pattern is looked for in FOLDER/…/NAME; its groups `language` and `split` say what a file
    holds. `reader` names one of `calque.tasks.dataset_readers`; a file without one only belongs to
    another and is read with it.
    """

    pattern: str
    reader: str | None = None
    split: str = ""


@dataclass(frozen=True, slots=True)
class Dataset:
    """All there is to know of a dataset before it is used."""

    title: str
    about: str
    languages: str
    licence: str
    source: str
    citation: str
    layout: tuple[str, ...]
    tasks: tuple[str, ...]
    files: tuple[FileKind, ...]
    non_commercial: bool = False
    # What is missing when a folder has some of the set: these languages, these splits.
    expected: str = ""
    splits: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
