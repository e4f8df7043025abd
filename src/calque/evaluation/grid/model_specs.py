"""What a result was made from, as short hashes of bytes: a changed file cannot go unnoticed.

What may enter a study: encoders, the same architecture with random weights, word vectors.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from calque.errors import InputError

if TYPE_CHECKING:
    import torch

    from calque.models.encoder import Encoder
    from calque.models.seq2seq import Seq2Seq


DIGITS = 10


def hash_values(values: object) -> str:
    """Name anything that JSON can say.

    >>> hash_values({"b": 1, "a": None}) == hash_values({"a": None, "b": 1})
    True
    """
    text = json.dumps(values, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def hash_files(files: Iterable[tuple[str, Path]]) -> str:
    """Name the contents of files, each with what it is called, in whatever order they come."""
    digests = []
    for name, path in files:
        try:
            with open(path, "rb") as stream:
                digests.append((name, hashlib.file_digest(stream, "sha256").hexdigest()))
        except OSError as error:
            raise InputError(str(error.strerror).lower(), file=path) from error
    return hash_values(sorted(digests))


def find_data(data: Path, patterns: Sequence[str]) -> list[tuple[str, Path]]:
    """List the files of a task beneath the user's folder, in `xtreme/` there, or right in it.

    A set's own folder stands for the one above: what is learnt from may lie beside it.
    """
    roots = (data, data / "xtreme")
    found = [(path.relative_to(r), path) for r in roots for p in patterns for path in r.glob(p)]
    if not found and any(pattern.startswith(f"{data.name}/**") for pattern in patterns):
        return find_data(data.parent, patterns)
    if not found:
        inside = [pattern.partition("/")[::2] for pattern in patterns]
        # A pattern of any depth is for a folder of the right name, not for whatever is there.
        inside = [(f, p) for f, p in inside if f == data.name or "**" not in p]
        found = [
            (Path(f, path.relative_to(data)), path) for f, p in inside for path in data.glob(p)
        ]
    return sorted({(str(name), path) for name, path in found if path.is_file()})


RANDOM = "random:"
SEED = "{seed}"  # in a path: one model a seed, each of a training run of its own
# A finished VECO has the full model in a folder inside.
WEIGHTS = (
    "*.safetensors",
    "config.json",
    "tokenizer*.json",
    "*.model",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "veco/*.safetensors",
)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A model by the name it has in the results, what it is, and where it lies.

    `random` is the sanity floor: the configuration and the tokenizer of a model, with weights
    drawn from the seed as Hugging Face initializes them. `seed` is that of the training run which
    made the model, where several runs share a name: they differ as seeds of one model do.
    """

    name: str
    kind: Literal["encoder", "random", "vectors"]
    folder: Path
    seed: int | None = None

    @property
    def needs_seed(self) -> bool:
        """Whether the seed decides what the model is, even where nothing is trained."""
        return self.kind == "random"

    def hash(self) -> str:
        """Name the weights, or what random weights are drawn for."""
        if self.kind == "vectors":
            from calque.vectors.static import VectorFolder

            files = VectorFolder(self.folder).files
            return hash_files((path.name, path) for path in files.values())
        found = [path for pattern in WEIGHTS for path in self.folder.glob(pattern)]
        if self.kind == "encoder":
            return hash_files((path.relative_to(self.folder).as_posix(), path) for path in found)
        shape = [path for path in found if path.suffix != ".safetensors"]
        return hash_values([RANDOM, hash_files((path.name, path) for path in shape)])


def find_entrants(
    names: Sequence[str], *, of_vectors: bool, seeds: Sequence[int] = ()
) -> list[Entrant]:
    """Find models by folder, hub name, embedded name, `random:` before it, or NAME=any of these.

    A path with `{seed}` in it stands for one model a seed. A model given twice counts once; two
    models of one name are an error.
    """
    return [
        _find_entrant(name, source.replace(SEED, str(seed)), of_vectors, seed)
        for name, source in name_models(names).items()
        for seed in (seeds if SEED in source else [None])
    ]


def name_models(texts: Sequence[str]) -> dict[str, str]:
    """Tell where models lie by the names they shall have, each once.

    >>> name_models(["base=runs/mlm/model", "calque-mini/", "calque-mini"])
    {'base': 'runs/mlm/model', 'calque-mini': 'calque-mini'}
    """
    found: dict[str, str] = {}
    for name, source in map(_split_name, texts):
        if found.setdefault(name, source) != source:
            problem = f"two models are called {name!r}"
            raise InputError(problem, fix="name one of them: NAME=FOLDER")
    return found


def _find_entrant(name: str, source: str, of_vectors: bool, seed: int | None) -> Entrant:
    from calque.models.loading import find_folder

    if of_vectors:
        if not Path(source).is_dir():
            fix = "give a folder with de.vec, en.vec …"
            raise InputError("no such folder", file=source, fix=fix)
        return Entrant(name, "vectors", Path(source), seed)
    is_random = source.startswith(RANDOM)
    folder = find_folder(source.removeprefix(RANDOM))
    if not (folder / "config.json").is_file():
        fix = "give a Hugging Face model folder"
        raise InputError("no config.json here", file=folder, fix=fix)
    return Entrant(name, "random" if is_random else "encoder", folder, seed)


def _split_name(text: str) -> tuple[str, str]:
    """Tell the name a model shall have from where it is.

    >>> _split_name("base=runs/mlm/model"), _split_name("calque-mini/")
    (('base', 'runs/mlm/model'), ('calque-mini', 'calque-mini'))
    """
    name, equals, source = text.partition("=")
    if equals and name and source and "/" not in name and not Path(text).exists():
        return name, source
    plain = text.rstrip("/") or text
    return plain, plain


class EncoderShelf:
    """Gives fresh encoders of one model again and again, reading its files once.

    The tokenizer is the same object every time, so that what was tokenized for one seed can serve
    the next; weights are a copy, since a task may change them.
    """

    def __init__(self) -> None:
        self._entrant: Entrant | None = None
        self._choice: tuple[torch.dtype, bool] | None = None
        self._encoder: Encoder | None = None

    def take(
        self,
        entrant: Entrant,
        seed: int | None,
        device: torch.device,
        dtype: torch.dtype,
        *,
        plugged: bool = False,
    ) -> Encoder:
        """Give an encoder in evaluation mode on a device; `plugged`, with its cross-attention."""
        from calque.models.encoder import Encoder
        from calque.models.veco import Veco

        choice = dtype, plugged and entrant.kind != "random"
        if self._encoder is None or (entrant, choice) != (self._entrant, self._choice):
            self._encoder = None  # let go of the last one first
            kind = Veco if choice[1] else Encoder
            self._encoder = kind.load(entrant.folder, dtype=dtype)
            self._entrant, self._choice = entrant, choice
        kept = self._encoder
        if entrant.kind == "random":
            model = draw_model(kept.model.config, seed or 0).to(dtype)
            fresh = Encoder(model, kept.tokenizer, entrant.folder)
            if plugged:
                fresh = Veco.plug(fresh, "random", _make_generator(seed))
        else:
            fresh = type(kept)(copy.deepcopy(kept.model), kept.tokenizer, entrant.folder)
            fresh.neutral = kept.neutral
        return fresh.to(device).eval()


def load_translator(entrant: Entrant, device: torch.device, dtype: torch.dtype) -> Seq2Seq:
    """Load an encoder–decoder; one with random weights would translate nothing."""
    from calque.models.seq2seq import Seq2Seq

    if entrant.kind == "random":
        fix = "leave random: out where translations are scored"
        raise InputError("random weights translate nothing", file=entrant.folder, fix=fix)
    return Seq2Seq.load(entrant.folder, device=device, dtype=dtype)


def _make_generator(seed: int | None) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(seed or 0)


def draw_model(config: Any, seed: int) -> Any:
    """Make a model of a configuration with weights that the seed decides.

    Hugging Face draws from the global generator, which is left as it was.
    """
    import torch

    from calque.models.loading import build_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_model(config)
