"""Loading and saving plain folders, finding models and tokenizers, errors of bad checkpoints."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer

from calque.errors import InputError
from calque.models import loading
from calque.models.encoder import Encoder
from calque.models.loading import embedded_models, find_model, find_tokenizer
from calque.tokens.ragged import Ragged, pack
from calque.tokens.tokenizer import encode_sentences

if TYPE_CHECKING:
    from calque.types import TokenBatch

WEIGHTS = "model.safetensors"
TEXT = ["Our guests will arrive in a few minutes.", "Unsere Gäste kommen an."]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that tests may damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def batch(tiny_encoder: Encoder) -> TokenBatch:
    return pack(Ragged.of(encode_sentences(tiny_encoder.tokenizer, TEXT)), pad_id=1)


def plain_states(model: Any, batch: TokenBatch) -> torch.Tensor:
    """Run transformers' own forward on the sentences, one by one."""
    parts = batch.ids.tensor_split(batch.offsets[1:-1].long())
    outputs = [model(ids[None], output_hidden_states=True) for ids in parts]
    return torch.cat([output.hidden_states[-1][0] for output in outputs])


@torch.no_grad()
def test_a_saved_folder_loads_with_transformers(
    tiny_encoder: Encoder, tiny_folder: Path, batch: TokenBatch
) -> None:
    (expected,) = tiny_encoder(batch)
    for kind in (AutoModel, AutoModelForMaskedLM):
        model, report = kind.from_pretrained(tiny_folder, output_loading_info=True)
        # To transformers a body has a pooler and no head.
        spare = [key for key in report["missing_keys"] if "pooler" not in key]
        spare += [key for key in report["unexpected_keys"] if kind is not AutoModel]
        assert spare == []
        assert model.config._attn_implementation == "sdpa"
        torch.testing.assert_close(plain_states(model.eval(), batch), expected)
    logits = AutoModelForMaskedLM.from_pretrained(tiny_folder).eval()(batch.ids[None, :5]).logits
    torch.testing.assert_close(logits, tiny_encoder.model(batch.ids[None, :5]).logits)
    assert "calque" not in (tiny_folder / "config.json").read_text("utf-8")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer(TEXT)["input_ids"] == tiny_encoder.tokenizer(TEXT)["input_ids"]


@torch.no_grad()
def test_loading_restores_what_was_saved(
    tiny_encoder: Encoder, tiny_folder: Path, batch: TokenBatch
) -> None:
    encoder = Encoder.load(tiny_folder)
    assert not encoder.training
    assert encoder.folder == tiny_folder
    state = tiny_encoder.model.state_dict()
    assert all(torch.equal(value, state[key]) for key, value in encoder.model.state_dict().items())
    for mine, theirs in zip(encoder(batch, [1, 4]), tiny_encoder(batch, [1, 4]), strict=True):
        assert torch.equal(mine, theirs)


def test_tied_weights_are_stored_and_loaded_once(tiny_encoder: Encoder, tiny_folder: Path) -> None:
    with safe_open(tiny_folder / WEIGHTS, "pt") as stored:
        shapes = [tuple(stored.get_slice(key).get_shape()) for key in stored.keys()]  # noqa: SIM118
    assert shapes.count((1500, 64)) == 1
    assert shapes.count((1500,)) == 1
    model = Encoder.load(tiny_folder).model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    n_parameters = sum(p.numel() for p in tiny_encoder.model.parameters())
    assert 0 < (tiny_folder / WEIGHTS).stat().st_size - 4 * n_parameters < 20_000


@torch.no_grad()
@pytest.mark.parametrize("given", ["own weights", "a copy of the weights"])
def test_half_precision_halves_the_file(
    tiny_encoder: Encoder, tmp_path: Path, batch: TokenBatch, given: str
) -> None:
    state = None
    if given == "a copy of the weights":  # as gathered from several processes: nothing is tied
        state = {key: value.clone() for key, value in tiny_encoder.model.state_dict().items()}
    tiny_encoder.save(tmp_path / "half", dtype=torch.float16, state=state)
    n_parameters = sum(p.numel() for p in tiny_encoder.model.parameters())
    assert 0 < (tmp_path / "half" / WEIGHTS).stat().st_size - 2 * n_parameters < 20_000
    assert AutoConfig.from_pretrained(tmp_path / "half").dtype == torch.float16
    assert AutoModel.from_pretrained(tmp_path / "half").dtype == torch.float16
    half = Encoder.load(tmp_path / "half")
    assert half.model.dtype == torch.float32  # as asked for
    assert tiny_encoder.model.dtype == torch.float32  # not changed by saving
    torch.testing.assert_close(half(batch)[0], tiny_encoder(batch)[0], rtol=1e-2, atol=1e-2)
    assert Encoder.load(tmp_path / "half", dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_given_weights_are_saved_instead_of_the_models(
    tiny_encoder: Encoder, tmp_path: Path
) -> None:
    state = {key: value + 1 for key, value in tiny_encoder.model.state_dict().items()}
    tiny_encoder.save(tmp_path, state=state)
    loaded = Encoder.load(tmp_path).model.state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())


def test_settings_are_saved_with_the_model(tiny_encoder: Encoder, tmp_path: Path) -> None:
    encoder = deepcopy(tiny_encoder)
    encoder.model.config.calque = {"retrieval_layer": 3}
    encoder.save(tmp_path, dtype=torch.float16)
    assert Encoder.load(tmp_path).settings == {"retrieval_layer": 3}
    AutoModel.from_pretrained(tmp_path)


def test_a_body_alone_loads_with_a_warning(
    tiny_encoder: Encoder, tiny_folder: Path, tmp_path: Path, batch: TokenBatch
) -> None:
    with loading.silence_transformers():
        AutoModel.from_pretrained(tiny_folder).save_pretrained(tmp_path)
    tiny_encoder.tokenizer.save_pretrained(tmp_path)
    with pytest.warns(loading.MissingHeadWarning, match="no language-modeling head"):
        encoder = Encoder.load(tmp_path)
    torch.testing.assert_close(encoder(batch)[0], tiny_encoder(batch)[0])


def test_saving_and_loading_are_quiet(
    tiny_encoder: Encoder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tiny_encoder.save(tmp_path)
        Encoder.load(tmp_path)
    assert capfd.readouterr() == ("", "")


def set_config(**values: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | values), "utf-8")

    return spoil


def write_config(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(text, "utf-8")


def keep_bytes(n_bytes: int) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / WEIGHTS
        path.write_bytes(path.read_bytes()[:n_bytes])

    return spoil


def use_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def grow_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["quokka", "numbat"])
    tokenizer.save_pretrained(folder)


def drop_layer(folder: Path) -> None:
    state = {
        key: value for key, value in load_file(folder / WEIGHTS).items() if "layer.2" not in key
    }
    save_file(state, folder / WEIGHTS, {"format": "pt"})


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


MISMATCH = r"tensors are missing, superfluous or of a wrong shape, first \S*{}"
BELONG = r"\(config.json and the weights do not belong together\)"


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (use_pickle, r"pytorch_model\.bin is a pickle, which can run code.*safetensors only"),
        (remove(WEIGHTS), r"this folder has no model\.safetensors"),
        (keep_bytes(-1), r"this is not a valid safetensors file: .*\(copy the checkpoint again"),
        (keep_bytes(3000), r"this is not a valid safetensors file: .*\(copy the checkpoint again"),
        (keep_bytes(0), r"this is not a valid safetensors file: .*\(copy the checkpoint again"),
        (drop_layer, MISMATCH.format("layer.2") + ".*" + BELONG),
        (set_config(num_hidden_layers=5), MISMATCH.format("layer.4") + ".*" + BELONG),
        (set_config(num_hidden_layers=2), MISMATCH.format("layer.2") + ".*" + BELONG),
        (set_config(hidden_size=32), MISMATCH.format("") + ".*" + BELONG),
        (set_config(vocab_size=1600), MISMATCH.format("") + ".*" + BELONG),
        (set_config(model_type="bert"), MISMATCH.format("") + ".*" + BELONG),
        (set_config(num_attention_heads=7), "64.*not a multiple.*7"),
        (set_config(model_type="t5"), r"type 't5' are not supported \(use one of bert, roberta"),
        (set_config(model_type="nobody"), "type 'nobody' are not supported"),
        (write_config("{}"), "type None are not supported"),
        (write_config("[1]"), "the file does not hold a JSON object"),
        (write_config("{"), "this is not valid JSON"),
        (set_config(hidden_size="wide"), "not the configuration of a model.*hidden_size"),
        (remove("config.json"), r"this folder has no config\.json"),
        (grow_tokenizer, "the tokenizer has 1502 entries but the model has 1500 embeddings"),
        (remove("tokenizer.json"), "the folder has no tokenizer"),
    ],
)
def test_errors_of_bad_checkpoints(
    spoil: Callable[[Path], object], problem: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=problem) as caught:
        Encoder.load(folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_code_in_a_folder_is_not_run(folder: Path) -> None:
    mark = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\n", "utf-8")
    own = {"AutoConfig": "evil.Config", "AutoModelForMaskedLM": "evil.Model"}
    set_config(auto_map=own)(folder)
    Encoder.load(folder)  # transformers knows this type itself
    set_config(model_type="evil", auto_map=own)(folder)
    with pytest.raises(InputError, match="not supported"):
        Encoder.load(folder)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "nobody/has-this-model",
            r"no such folder.*\(download it first with `hf download",
        ),
        (
            "has-no-owner-either",
            r"no such folder.*\(download it first with `hf download",
        ),
        ("not/a/hub/name", r"no such folder, and this is not a hub name \(give a folder"),
    ],
)
def test_errors_of_unknown_names(name: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        Encoder.load(name)
    assert str(caught.value).startswith(f"{name}: ")
    assert "\n" not in str(caught.value)


def test_a_file_is_not_a_folder(tiny_folder: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: this is a file \(give the model's folder"):
        find_model(tiny_folder / "config.json")


def test_embedded_models_are_found_by_name(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "models").mkdir(parents=True)
    shutil.copytree(tiny_folder, tmp_path / "data" / "models" / loading.EMBEDDED_MODEL)
    monkeypatch.setattr("calque.models.loading.resources.files", lambda package: tmp_path)
    assert list(embedded_models()) == ["calque-mini"]
    assert Encoder.load().folder == Encoder.load("calque-mini").folder


@pytest.fixture
def silent_hub() -> Iterator[str]:
    """The address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("find", [find_model, find_tokenizer])
@pytest.mark.parametrize(
    ("hub", "reason"),
    [("http://127.0.0.1:9", "Connection refused"), (None, "timed out|did not answer within 3 s")],
    ids=["refused", "silent"],
)
def test_a_hub_name_without_network_is_one_error(
    find: Callable[[str], Path],
    hub: str | None,
    reason: str,
    silent_hub: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The hub is asked, cannot be reached, and the error says what to do, within 5 seconds."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub or silent_hub)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    began = time.monotonic()
    with pytest.raises(InputError, match=reason) as caught:
        find("someone/some-model")
    assert time.monotonic() - began < 5
    message = str(caught.value)
    assert message.startswith("someone/some-model: there is no such folder, and the hub could not")
    assert message.endswith(
        "(download it first with `hf download someone/some-model`, give a folder, "
        "or use calque-mini)"
    )


def test_a_cached_model_is_found_without_network(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--someone--some-model"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert find_model("someone/some-model") == snapshot


def test_tokenizers_are_found_like_models(tiny_folder: Path) -> None:
    assert find_tokenizer(str(tiny_folder)) == tiny_folder
    assert find_tokenizer("calque-mini") == find_tokenizer() == find_model()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_is_not_collected_while_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, *, was_enabled: bool
) -> None:
    seen = []

    def find(name: str | None) -> Path:
        seen.append(gc.isenabled())
        raise InputError("stop here")

    monkeypatch.setattr(loading, "find_model", find)
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(InputError, match="stop here"):
            loading.load_checkpoint(None, torch.float32)
        assert seen == [False]
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
