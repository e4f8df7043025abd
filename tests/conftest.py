"""A tiny random encoder of the XLM-R kind, with a tokenizer trained on the demo's sentences."""

from __future__ import annotations

import gc
import json
import runpy
import signal
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from subprocess import CompletedProcess

    from transformers import PreTrainedTokenizerFast

    from calque.models.encoder import Encoder

# A first call may import torch, which takes longer than any deadline worth having.
settings.register_profile("calque", deadline=None, derandomize=True)
settings.load_profile("calque")

# Processes in the background may ignore SIGINT (shells) and SIGHUP (nohup), which the tests send.
HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for kind, handler in HANDLERS.items():
    signal.signal(kind, handler)


@pytest.fixture(autouse=True)
def _default_signals() -> Iterator[None]:
    """Every test must leave the handling of signals as it was."""
    yield
    found = {kind: signal.signal(kind, handler) for kind, handler in HANDLERS.items()}
    assert found == HANDLERS


def pytest_collection_finish() -> None:
    """Leave the imported modules out of every later search for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def demo_rows() -> list[tuple[str, str, str]]:
    """Real sentences: language, English, sentence."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:]]
    return [(language, english, sentence) for language, english, sentence in rows]


@pytest.fixture(scope="session")
def tiny_tokenizer(demo_rows: list[tuple[str, str, str]]) -> PreTrainedTokenizerFast:
    from calque.tokens.tokenizer import train_tokenizer

    sentences = [sentence for row in demo_rows for sentence in row[1:]]
    return train_tokenizer(sentences, 1500)


@pytest.fixture(scope="session")
def tiny_encoder(tiny_tokenizer: PreTrainedTokenizerFast) -> Encoder:
    """4 layers × 64, windows of 128 tokens; shared by the session, so do not train it: copy it."""
    import torch
    from transformers import XLMRobertaConfig

    from calque.models.encoder import Encoder
    from calque.models.loading import build_model

    config = XLMRobertaConfig(
        vocab_size=len(tiny_tokenizer),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=130,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(build_model(config), tiny_tokenizer).eval()


@pytest.fixture(scope="session")
def tiny_folder(tiny_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same encoder as a plain Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_encoder.save(folder)
    return folder


@pytest.fixture(scope="session")
def deberta_encoder(demo_rows: list[tuple[str, str, str]]) -> Encoder:
    """3 layers × 64, described and with marks as mDeBERTa-v3; do not train it: copy it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import DebertaV2Config, DebertaV2Tokenizer

    from calque.models.encoder import Encoder
    from calque.models.loading import build_model

    learner = Tokenizer(models.Unigram())
    learner.pre_tokenizer = pre_tokenizers.Metaspace()
    marks = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    trainer = trainers.UnigramTrainer(
        vocab_size=1200, special_tokens=marks, unk_token="[UNK]", show_progress=False
    )
    learner.train_from_iterator([text for row in demo_rows for text in row[1:]], trainer)
    pieces = json.loads(learner.to_str())["model"]["vocab"]
    tokenizer = DebertaV2Tokenizer(vocab=[tuple(piece) for piece in pieces], unk_id=3)
    config = DebertaV2Config(
        vocab_size=len(tokenizer) + 7,  # mDeBERTa's table has rows to spare, too
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        relative_attention=True,
        max_relative_positions=-1,
        position_buckets=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type="p2c|c2p",
        position_biased_input=False,
        type_vocab_size=0,
        layer_norm_eps=1e-7,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Encoder(build_model(config), tokenizer).eval()


@pytest.fixture(scope="session")
def deberta_folder(deberta_encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same encoder as a plain Hugging Face folder."""
    folder = tmp_path_factory.mktemp("models") / "deberta"
    deberta_encoder.save(folder)
    return folder


@pytest.fixture(scope="session")
def taught_pairs(demo_rows: list[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """The English sentences and German translations that the tiny translator knows by heart."""
    return [(english, text) for language, english, text in demo_rows if language == "de"][:8]


@pytest.fixture(scope="session")
def translator_folder(
    taught_pairs: list[tuple[str, str]],
    tiny_tokenizer: PreTrainedTokenizerFast,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """An encoder–decoder trained by the loop until it knows eight pairs by heart, both ways."""
    import torch

    from calque.io.cleaning import CleaningRules
    from calque.tokens.prepare import TextSource, prepare_corpora
    from calque.training.loop import train
    from calque.training.recipe_io import parse_recipe

    place = tmp_path_factory.mktemp("translator")
    bitext, text = place / "en-de.tsv", place / "text"
    text.mkdir()
    lines = [f"{src}\t{tgt}\n" for src, tgt in taught_pairs]
    bitext.write_text("".join(lines), encoding="utf-8")
    sources = [TextSource((bitext,), ("en", "de"))]
    prepare_corpora(sources, tiny_tokenizer, text, rules=CleaningRules())
    shape = {"layers": 2, "hidden": 64, "heads": 4, "intermediate": 128, "positions": 64}
    task = {"direction": "both", "smoothing": 0.0}
    content = {
        "name": "by heart",
        "model": {**shape, "dropout": 0.0, "decoder": {"tie": "all", "languages": ["de", "en"]}},
        "data": {"max_length": 64, "validation_examples": 0},
        "objectives": [{"kind": "translation", "batch_tokens": 320, **task}],
        "optimizer": {"learning_rate": 8e-3},
        "schedule": {"steps": 150, "warmup": 10},
        "telemetry": {"every": 50},
    }
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(parse_recipe(content, "a recipe"), output=place / "run", prepared=text).model
    finally:
        torch.set_num_threads(n_threads)


@pytest.fixture(scope="session")
def fork_server() -> Iterator[Any]:
    """A process that has imported the libraries and runs scripts in forks of itself."""
    server = runpy.run_path(str(Path(__file__).with_name("fork_server.py")))["ForkServer"]()
    yield server
    server.close()


@pytest.fixture(scope="session")
def run_benchmark(
    fork_server: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., CompletedProcess[str]]:
    """Run a script of benchmarks/ with arguments, in a fork of a process with all imports."""
    folder = tmp_path_factory.mktemp("benchmarks")

    def run(name: str, *arguments: object, seconds: int = 300) -> CompletedProcess[str]:
        script = Path(__file__).parents[1] / "benchmarks" / name
        options = {"n_processes": 1, "output": folder / name, "seconds": seconds}
        return fork_server.run(script, *arguments, beside=script, **options)

    return run
