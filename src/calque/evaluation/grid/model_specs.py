"""The models of an evaluation: where they are, the hashes of their files, and how they are loaded.

A model is an encoder, the same architecture with random weights, or a folder of word vectors.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from calque.errors import InputError
from calque.io.result_records import is_name

if TYPE_CHECKING:
    import torch

    from calque.models.encoder import Encoder
    from calque.models.seq2seq import Seq2Seq

RANDOM = "random:"
SEED = "{seed}"  # in a path: one model per seed, each from its own training run
MODEL_FILES = (
    "*.safetensors",
    "config.json",
    "tokenizer*.json",
    "*.model",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "veco/*.safetensors",  # the full model of a finished VECO run
)
N_DIGITS = 10


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model of an evaluation.

    Attributes:
        name: Name in the results.
        kind: An encoder (or encoder-decoder), the same configuration with random weights drawn
            from the seed, or word vectors.
        folder: Where its files are.
        seed: Seed of the training run that made the model, if several runs share the name: they
            count as seeds of one model.
        maps: Folder of the linear maps that are applied to its states, if there are any.
    """

    name: str
    kind: Literal["encoder", "random", "vectors"]
    folder: Path
    seed: int | None = None
    maps: Path | None = None

    def hash(self) -> str:
        """Return the hash of the files that determine the model, with its maps if it has some."""
        if self.kind == "vectors":
            from calque.vectors.static import VectorFolder

            files = VectorFolder(self.folder).files
            return hash_files((path.name, path) for path in files.values())
        found = [path for pattern in MODEL_FILES for path in self.folder.glob(pattern)]
        if self.kind == "encoder":
            digest = hash_files((path.relative_to(self.folder).as_posix(), path) for path in found)
        else:
            shape = [path for path in found if path.suffix != ".safetensors"]
            digest = hash_values([RANDOM, hash_files((path.name, path) for path in shape)])
        if self.maps is None:
            return digest
        found = sorted(self.maps.glob("maps.*"))
        return hash_values([digest, hash_files((path.name, path) for path in found)])


def find_models(
    names: Sequence[str],
    *,
    vectors: bool = False,
    seeds: Sequence[int] = (),
    maps: str | None = None,
) -> list[ModelSpec]:
    """Find models given as a folder, hub name or calque-mini, or as NAME= before one of these.

    `random:` before a model means random weights. A path with `{seed}` means one model per seed.
    A model given twice counts once; two models with the same name are an error. Linear maps in the
    folder of a model belong to it, unless `maps` is another folder or "none".
    """
    sources: dict[str, str] = {}
    for name, source in map(_split_name, names):
        if not is_name(name):
            problem = f"the name of a model is too long or has control characters: {name!r}"
            raise InputError(problem, fix="give it another name: NAME=FOLDER")
        if sources.setdefault(name, source) != source:
            problem = f"two models have the name {name!r}"
            raise InputError(problem, fix="give one of them another name: NAME=FOLDER")
    return [
        _find_model(name, source.replace(SEED, str(seed)), vectors, seed, maps)
        for name, source in sources.items()
        for seed in (seeds if SEED in source else [None])
    ]


def hash_values(values: object) -> str:
    """Return the hash of anything that can be written as JSON.

    >>> hash_values({"b": 1, "a": None}) == hash_values({"a": None, "b": 1})
    True
    """
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:N_DIGITS]


def hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Return the hash of the names and contents of files, in any order."""
    digests = []
    for name, path in files:
        try:
            with open(path, "rb") as stream:
                digests.append((name, hashlib.file_digest(stream, "sha256").hexdigest()))
        except OSError as error:
            raise InputError(str(error.strerror).lower(), file=path) from error
    return hash_values(sorted(digests))


def find_data(data: Path, patterns: Sequence[str]) -> list[tuple[str, Path]]:
    """List the files of a task in the data folder, in `xtreme/` there, or in a dataset's folder.

    Given the folder of a dataset, its parent is searched too: training files may be beside it.
    """
    roots = (data, data / "xtreme")
    found = [(path.relative_to(r), path) for r in roots for p in patterns for path in r.glob(p)]
    if not found and any(pattern.startswith(f"{data.name}/**") for pattern in patterns):
        return find_data(data.parent, patterns)
    if not found:
        inside = [pattern.partition("/")[::2] for pattern in patterns]
        # A pattern of any depth applies only to a folder with the right name.
        inside = [(f, p) for f, p in inside if f == data.name or "**" not in p]
        found = [
            (Path(f, path.relative_to(data)), path) for f, p in inside for path in data.glob(p)
        ]
    return sorted({(str(name), path) for name, path in found if path.is_file()})


class EncoderCache:
    """Returns fresh copies of an encoder, whose files are read once.

    All copies share the tokenizer, so that texts tokenized for one seed can be used for the next;
    weights are copied, since a task may change them.
    """

    def __init__(self) -> None:
        self._key: tuple[ModelSpec, torch.dtype, bool] | None = None
        self._encoder: Encoder | None = None

    def load(
        self,
        spec: ModelSpec,
        seed: int | None,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plugged: bool = False,
    ) -> Encoder:
        """Return an encoder in evaluation mode, with its linear maps if it has some.

        `plugged` means with VECO's cross-attention.
        """
        import torch

        from calque.models.encoder import Encoder
        from calque.models.language_maps import load_maps
        from calque.models.veco import Veco

        is_veco = plugged and spec.kind != "random"
        key = (spec, dtype, is_veco)
        if self._encoder is None or key != self._key:
            self._encoder = None  # free the memory of the last one first
            self._encoder = (Veco if is_veco else Encoder).load(spec.folder, dtype=dtype)
            self._key = key
        cached = self._encoder
        if spec.kind == "random":
            model = draw_model(cached.model.config, seed or 0).to(dtype)
            encoder = Encoder(model, cached.tokenizer, spec.folder)
            if plugged:
                generator = torch.Generator().manual_seed(seed or 0)
                encoder = Veco.plug(encoder, "random", generator)
        else:
            encoder = type(cached)(copy.deepcopy(cached.model), cached.tokenizer, spec.folder)
            encoder.neutral = cached.neutral
        if spec.maps is not None:
            maps = load_maps(spec.maps, encoder.hidden_size, encoder.n_layers)
            encoder.maps = maps.to(device)
        return encoder.to(device).eval()


def load_translator(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Seq2Seq:
    """Load an encoder-decoder."""
    from calque.models.seq2seq import Seq2Seq

    if spec.kind == "random":
        problem = "a model with random weights cannot translate"
        raise InputError(problem, file=spec.folder, fix="leave out random: for translation tasks")
    return Seq2Seq.load(spec.folder, device=device, dtype=dtype)


def draw_model(config: Any, seed: int) -> Any:
    """Return a model with random weights that depend on the seed only.

    Hugging Face draws from the global generator, whose state is restored afterwards.
    """
    import torch

    from calque.models.loading import build_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config)


def _find_model(
    name: str, source: str, vectors: bool, seed: int | None, maps: str | None
) -> ModelSpec:
    from calque.models.loading import find_model

    if vectors:
        if not Path(source).is_dir():
            fix = "pass a folder with files de.vec, en.vec, ..."
            raise InputError("the folder does not exist", file=source, fix=fix)
        return ModelSpec(name, "vectors", Path(source), seed)
    folder = find_model(source.removeprefix(RANDOM))
    if not (folder / "config.json").is_file():
        problem = "the folder has no config.json"
        raise InputError(problem, file=folder, fix="pass a Hugging Face model folder")
    kind: Literal["random", "encoder"] = "random" if source.startswith(RANDOM) else "encoder"
    return ModelSpec(name, kind, folder, seed, _find_maps(folder, kind, maps))


def _find_maps(folder: Path, kind: str, maps: str | None) -> Path | None:
    """Return the folder of a model's maps; those in its own folder do not fit random weights."""
    from calque.models.language_maps import NO_MAPS, OWN_FOLDER, has_maps

    if maps is None:
        return folder if kind == "encoder" and has_maps(folder) else None
    if maps == NO_MAPS:
        return None
    found = folder if maps == OWN_FOLDER else Path(maps)
    if not has_maps(found):
        fix = f"pass a folder written by `calque train linear-map`, or {NO_MAPS}"
        raise InputError("there are no maps in this folder", file=found, fix=fix)
    return found


def _split_name(text: str) -> tuple[str, str]:
    """Split NAME=SOURCE; a source without a name is its own name.

    >>> _split_name("base=runs/mlm/model"), _split_name("calque-mini/")
    (('base', 'runs/mlm/model'), ('calque-mini', 'calque-mini'))
    """
    name, equals, source = text.partition("=")
    if equals and name and source and "/" not in name and not os.path.exists(text):
        return name, source
    plain = text.rstrip("/") or text
    return plain, plain
