"""Weights: no file but safetensors in the model's folder is opened, and all numbers are finite."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calque.cli import run
from calque.errors import InputError
from calque.models.encoder import Encoder
from calque.models.language_maps import LanguageMaps, load_maps
from calque.models.neutral_space import NEUTRAL_FILE, load_neutral_space
from calque.models.seq2seq import DecoderPlan, Seq2Seq, build_seq2seq, read_initial_weights
from calque.models.veco import Veco
from calque.models.weights import INDEX, WEIGHTS, list_weight_files
from calque.vectors.mapping import read_maps

RAN = "ran"


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def hostile_pickle(folder: Path, *, zipped: bool = False) -> bytes:
    if not zipped:
        return pickle.dumps(Hostile(folder / RAN))
    stream = io.BytesIO()
    torch.save(Hostile(folder / RAN), stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def plain_folders(
    tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """A folder of each kind of model."""
    root = tmp_path_factory.mktemp("kinds")
    tiny_encoder.save(root / "encoder")
    Veco.plug(tiny_encoder).save(root / "veco")
    weights = read_initial_weights(root / "encoder", DecoderPlan())
    build_seq2seq(DecoderPlan(layers=2), weights, tiny_encoder.tokenizer).save(root / "seq2seq")
    return {path.name: path for path in root.iterdir()}


LOADERS: dict[str, Callable[[Path], object]] = {
    "encoder": Encoder.load,
    "veco": Veco.load,
    "seq2seq": Seq2Seq.load,
}


@pytest.fixture(params=LOADERS)
def loader(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def folder(plain_folders: dict[str, Path], loader: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain_folders[loader], tmp_path / "model"))


def name_in_index(*names: str, inside: str | None = None) -> Callable[[Path], None]:
    """Replace the weights by an index that names files; hostile ones are at these paths."""

    def spoil(folder: Path) -> None:
        tensors = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        for name in (inside,) if inside else names:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(hostile_pickle(folder, zipped=True))
        weight_map = {name: names[k % len(names)] for k, name in enumerate(tensors)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    return spoil


def name_absolute(folder: Path) -> None:
    outside = folder.parent / "outside.safetensors"
    name_in_index(str(outside), inside="../outside.safetensors")(folder)


def replace_weights(*, zipped: bool) -> Callable[[Path], object]:
    return lambda folder: (folder / WEIGHTS).write_bytes(hostile_pickle(folder, zipped=zipped))


def rename_weights(name: str, *, index: bool = False) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = list(load_file(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(hostile_pickle(folder, zipped=True))
        content = {"weight_map": dict.fromkeys(tensors, name)}
        if index:
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))

    return spoil


def name_in_config(folder: Path) -> None:
    """Name the weights as transformers 5 allows."""
    rename_weights("x.bin")(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "x.bin"}))


IN_INDEX = r"the index names '.*', but Calque loads safetensors files of this folder"
A_PICKLE = "is a pickle, which can run code"
INVALID = "is not a valid safetensors file"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (name_in_index("x.bin"), IN_INDEX),
        (name_in_index("weights.txt"), IN_INDEX),
        (name_in_index("x.SAFETENSORS"), IN_INDEX),
        (name_in_index("safetensors"), IN_INDEX),
        (name_in_index("../outside.safetensors"), IN_INDEX),
        (name_in_index("deeper/x.safetensors"), IN_INDEX),
        (name_in_index("..\\x.safetensors"), IN_INDEX),
        (name_absolute, IN_INDEX),
        (name_in_index("a.safetensors", "x.bin"), IN_INDEX),
        (name_in_index("a.safetensors"), INVALID),
        (replace_weights(zipped=True), INVALID),
        (replace_weights(zipped=False), INVALID),
        (rename_weights("pytorch_model.bin"), A_PICKLE),
        (rename_weights("pytorch_model.bin", index=True), A_PICKLE),
        (rename_weights("PYTORCH_MODEL.BIN"), A_PICKLE),
        (rename_weights("consolidated.00.pth"), A_PICKLE),
        (rename_weights("Model.SafeTensors"), "this folder has no model.safetensors"),
        (rename_weights("tf_model.h5"), "this folder has no model.safetensors"),
        (name_in_config, A_PICKLE),
    ],
)
def test_a_pickle_is_never_opened(
    spoil: Callable[[Path], object], problem: str, loader: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=problem) as caught:
        LOADERS[loader](folder)
    assert str(caught.value).startswith(str(folder))
    assert not (folder / RAN).exists()


def test_the_pickles_of_these_tests_are_hostile(tmp_path: Path) -> None:
    pickle.loads(hostile_pickle(tmp_path))
    assert (tmp_path / RAN).exists()


def test_files_that_are_not_weights_are_ignored(loader: str, folder: Path) -> None:
    """Adapters, other formats and code beside the weights of a sound model."""
    for name in ("adapter_model.bin", "pytorch_model.bin", "training_args.bin", "spiece.pkl"):
        (folder / name).write_bytes(hostile_pickle(folder))
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(folder.parent)}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    code = f"import os; os.mkdir({str(folder / RAN)!r})\n"
    (folder / "evil.py").write_text(code)
    evil = {"AutoConfig": "evil.A", "AutoModel": "evil.B", "AutoTokenizer": ["evil.C", "evil.C"]}
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        content |= {"auto_map": evil, "attn_implementation": "evil/kernel"}
        for half in ("encoder", "decoder"):
            if half in content:
                content[half] |= {"auto_map": evil, "_attn_implementation": "evil/kernel"}
        (folder / name).write_text(json.dumps(content))
    LOADERS[loader](folder)
    assert not (folder / RAN).exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_other_files_of_tensors_are_never_pickles(tmp_path: Path, zipped: bool) -> None:
    LanguageMaps(torch.eye(4)[None, None], ("de",), (0,), "en").save(tmp_path)
    for name in ("maps.safetensors", NEUTRAL_FILE):
        (tmp_path / name).write_bytes(hostile_pickle(tmp_path, zipped=zipped))
    for load in (
        lambda: load_maps(tmp_path, 4, 2),
        lambda: load_neutral_space(tmp_path, 4, 2),
        lambda: read_maps(tmp_path),
    ):
        with pytest.raises(InputError, match=INVALID):
            load()
    assert not (tmp_path / RAN).exists()


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ("{", "this is not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ("{}", "the index names no files"),
        ('{"weight_map": {}}', "the index names no files"),
        ('{"weight_map": "model.safetensors"}', "the index names no files"),
        ('{"weight_map": {"a": 5}}', "the index names '5'"),
        ('{"weight_map": {"a": ["a.safetensors"]}}', "the index names"),
        ('{"weight_map": {"a": "a.safetensors"}}', "the file a.safetensors is missing"),
        ("[" * 100_000, "the JSON is nested too deeply"),
    ],
)
def test_errors_of_an_index(index: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(InputError, match=problem):
        list_weight_files(tmp_path)


def test_sharded_weights_and_links_are_loaded(tiny_encoder: Encoder, tmp_path: Path) -> None:
    """As in the hub's cache: the files of a snapshot are links to files named by their hash."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    tiny_encoder.save(snapshot)
    state = load_file(snapshot / WEIGHTS)
    (snapshot / WEIGHTS).unlink()
    names = [f"model-0000{k}-of-00002.safetensors" for k in (1, 2)]
    parts = {name: dict(list(state.items())[k::2]) for k, name in enumerate(names)}
    weight_map = {key: name for name, part in parts.items() for key in part}
    (snapshot / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    for name, part in parts.items():
        save_file(part, snapshot / name)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(Path("..", "..", "blobs", str(number)))
    loaded = Encoder.load(snapshot).model.state_dict()
    expected = tiny_encoder.model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def spoil_tensor(folder: Path, value: float) -> str:
    """Write one bad number, and return the name of its tensor."""
    state = load_file(folder / WEIGHTS)
    name = max(name for name in state if name.endswith("output.dense.weight"))
    state[name][3, 5] = value
    save_file(state, folder / WEIGHTS)
    return name


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_not_finite_are_refused(value: float, loader: str, folder: Path) -> None:
    name = spoil_tensor(folder, value)
    with pytest.raises(InputError, match=rf"safetensors: the tensor {name} has numbers that are"):
        LOADERS[loader](folder)


def test_commands_refuse_weights_that_are_not_finite(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    name = spoil_tensor(model, torch.nan)
    text, out = tmp_path / "text", tmp_path / "out.npy"
    other, pairs = tmp_path / "other", tmp_path / "pairs"
    for path in (text, other):
        path.write_text("a b\n" * 3)
    pairs.write_text("a b ||| c d\n" * 3)
    for command in (
        ["embed", text, "-o", out, "--model", model],
        ["align", pairs, "-o", out, "--model", model],
        ["mine", text, text, "-o", out, "--model", model],
        ["extract", text, "-o", out, "--model", model, "--language", "en", "--min-count", "1"],
        ["neutralize", model, text, other, "-o", out],
    ):
        assert run([str(word) for word in command]) == 2
        message = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"the tensor {name} has numbers that are not finite" in message
        assert not out.exists()
