"""Small valid inputs of every format, most of them written by Calque itself."""

from __future__ import annotations

import gzip
import json
import lzma
import os
import shlex
import shutil
import signal
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tests.bucc_files import write_bucc
from tests.campaign.children import find_owner, run, start
from tests.campaign.tables import INTERRUPTED, WRITTEN

DATA = Path(__file__).parents[1] / "data"
RECIPE: dict[str, Any] = {
    "name": "campaign",
    "model": {"layers": 2, "hidden": 32, "heads": 2, "intermediate": 64, "positions": 64},
    "tokenizer": {"path": "in/model"},
    "data": {
        "sources": [
            {"path": "in/en-*.tsv", "kind": "bitext"},
            {"path": "in/de.txt", "kind": "text", "languages": "de"},
        ],
        "max_length": 64,
        "validation_examples": 3,
    },
    "objectives": [
        {"kind": "masked_lm", "batch_tokens": 256},
        {"kind": "translation_lm", "batch_tokens": 256, "weight": 0.5},
    ],
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"steps": 6, "warmup": 2},
    "checkpoints": {"every": 2, "validate_every": 2, "validation_batches": 1, "final": "best"},
    "telemetry": {"every": 1},
}
TRANSLATE: dict[str, Any] = RECIPE | {
    "model": RECIPE["model"] | {"decoder": {"languages": ["de", "en"]}},
    "objectives": [{"kind": "translation", "batch_tokens": 256, "direction": "both"}],
    "schedule": {"steps": 2, "warmup": 1},
}
NEW_TOKENIZER: dict[str, Any] = RECIPE | {"tokenizer": {"vocab_size": 400}}
MAPS: dict[str, Any] = RECIPE | {
    "model": {"start": "in/model"},
    "data": RECIPE["data"] | {"sources": [{"path": "in/linked.text", "kind": "bitext",
                                           "links": "in/linked.links", "languages": "en-de"}]},
    "objectives": [{"kind": "linear_map", "solver": "procrustes", "pivot": "en", "layers": [1]}],
}  # fmt: skip


def build_inputs(folder: Path) -> Path:
    """Write all inputs into FOLDER/in and return that folder."""
    inputs = folder / "in"
    inputs.mkdir()
    pid = os.fork()  # Training a tokenizer starts threads, after which this process could not fork.
    if not pid:
        code = 1
        try:
            os.chdir(folder)
            _write_texts(inputs)
            _write_model(inputs / "model")
            _write_data(inputs / "data")
            code = 0
        except BaseException:  # noqa: BLE001 - the child must end here
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the inputs cannot be built"
    for command in WRITTEN:
        child = run(shlex.split(command), folder, seconds=120)
        assert child.code == 0, f"{command}: {child.stderr}"
    for command, place, call in INTERRUPTED:
        child = start(shlex.split(command), folder, prepare=partial(kill_at, place, call))
        assert child.wait(60) and child.code == -signal.SIGKILL, f"{command}: {child.stderr}"
        assert not child.find_orphans(), command
    shutil.rmtree(folder / "tmp")
    for file in folder.glob("run-*"):
        file.unlink()
    return inputs


def kill_at(place: str, call: int) -> None:
    """Let the process kill itself when a function "module:name" is called so often."""
    owner, name = find_owner(place)
    function = getattr(owner, name)
    n_calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    setattr(owner, name, counted)


def _demo_rows() -> list[tuple[str, str, str]]:
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = (line.split("\t") for line in table.splitlines()[1:])
    return [(language, english, text) for language, english, text in rows]


def _write_texts(folder: Path) -> None:
    rows = _demo_rows()
    pairs = [(english, text) for language, english, text in rows if language == "de"]
    words = [(" ".join(src.split()), " ".join(tgt.split())) for src, tgt in pairs]
    files = {
        "en-de.tsv": "".join(f"{src}\t{tgt}\ttag\n" for src, tgt in pairs),
        "words.txt": "".join(f"{src} ||| {tgt}\n" for src, tgt in words),
        "news.en": "".join(f"{src}\n" for src, _ in pairs),
        "news.de": "".join(f"{tgt}\n" for _, tgt in pairs),
        "en.txt": "".join(f"{english}\n" for _, english, _ in rows),
        "de.txt": "".join(f"{text} {n}\n" for n in range(4) for _, text in pairs),
        "big.txt": "".join(f"{src} {n} ||| {tgt} {n}\n" for n in range(8) for src, tgt in words),
        "big.en": "".join(f"{src} {n}\n" for n in range(8) for src, _ in pairs),
        "big.de": "".join(f"{tgt} {n}\n" for n in range(8) for _, tgt in pairs),
        "linked.text": "".join(f"{src} ||| {tgt}\n" for src, tgt in words),
        "linked.links": "0-0 1-1 2-2\n" * len(words),
        "recipe.yaml": yaml.safe_dump(RECIPE, sort_keys=False),
        "translate.yaml": yaml.safe_dump(TRANSLATE, sort_keys=False),
        "tokenizer.yaml": yaml.safe_dump(NEW_TOKENIZER, sort_keys=False),
        "maps.yaml": yaml.safe_dump(MAPS, sort_keys=False),
    }
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    content = (folder / "words.txt").read_bytes()
    (folder / "words.txt.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "words.txt.xz").write_bytes(lzma.compress(content))
    import zstandard

    (folder / "words.txt.zst").write_bytes(zstandard.compress(content))
    _write_vectors(folder)


def _write_vectors(folder: Path) -> None:
    from calque.vectors.static import WordVectors

    random = np.random.default_rng(0)
    matrix = random.standard_normal((40, 8)).astype(np.float32)
    for language in ("en", "de"):
        words = [f"{language}{row}" for row in range(len(matrix))]
        vectors = WordVectors(words, matrix + np.float32(0.1 * (language == "de")))
        vectors.save(folder / f"{language}.vec")
        vectors.save(folder / f"{language}.bin", binary=True)
    (folder / "en-de.dict").write_text("".join(f"en{row} de{row}\n" for row in range(30)))
    np.save(folder / "random.npy", random.standard_normal((25, 32)).astype(np.float32))


def _write_model(folder: Path) -> None:
    """A random encoder of 2 layers × 32, in one file and in several ones with an index."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import XLMRobertaConfig

    from calque.models.encoder import Encoder
    from calque.models.loading import build_model
    from calque.tokens.tokenizer import train_tokenizer

    torch.manual_seed(0)
    tokenizer = train_tokenizer([text for row in _demo_rows() for text in row[1:]], 600)
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=66,
        type_vocab_size=1,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    Encoder(build_model(config), tokenizer).eval().save(folder)
    sharded = folder.with_name("sharded")
    shutil.copytree(folder, sharded)
    weights = load_file(sharded / "model.safetensors")
    (sharded / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, sharded / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(tensor.nbytes for tensor in weights.values())
    content = {"metadata": {"total_size": size}, "weight_map": index}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(content, indent=2))


def _write_data(folder: Path) -> None:
    """Test data of the tasks, in the layout that `calque evaluate` expects."""
    for name in ("panx", "udpos", "xnli", "pawsx"):
        shutil.copytree(DATA / "xtreme" / name, folder / name)
    for name in ("xquad", "tydiqa", "mlqa"):
        shutil.copytree(DATA / "questions" / name, folder / name)
    for name in ("xnli", "pawsx"):
        shutil.copy(folder / name / "dev-en.tsv", folder / name / "train-en.tsv")
    (folder / "squad").mkdir()
    shutil.copy(DATA / "questions/xquad/xquad.en.json", folder / "squad/train-v1.1.json")
    shutil.copytree(DATA / "ud", folder / "ud")
    shutil.copytree(DATA / "gold", folder / "gold_alignments")
    shutil.copytree(DATA / "reviews", folder / "cls")
    shutil.copytree(DATA / "results", folder.with_name("scores"))
    rows = _demo_rows()
    for name in ("tatoeba", "bucc2018", "muse", "word_similarity/rg65_cross", "translation"):
        (folder / name).mkdir(parents=True)
    for side, column in (("eng", 1), ("deu", 2)):
        text = "".join(f"{row[column]}\n" for row in rows if row[0] == "de")
        (folder / f"tatoeba/tatoeba.deu-eng.{side}").write_text(text, "utf-8")
        (folder / f"translation/newstest2014.{side[:2]}").write_text(text, "utf-8")
    write_bucc(folder / "bucc2018", rows)
    entries = "".join(f"en{row} de{row}\n" for row in range(30))
    (folder / "muse/en-de.5000-6500.txt").write_text(entries)
    pairs = "".join(f"en{row}\tde{row + 1}\t{row / 10}\n" for row in range(20))
    (folder / "word_similarity/rg65_cross/rg65_EN-DE.txt").write_text(pairs)
    (folder.with_name("vectors")).mkdir()
    for language in ("en", "de"):
        shutil.copy(folder.with_name(f"{language}.vec"), folder.with_name("vectors"))
