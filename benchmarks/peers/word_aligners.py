"""Other word aligners, each called as its own users would call it.

A package is imported only when its function is called; an ImportError names a missing package.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from calque.models.encoder import Encoder

Pair = tuple[list[str], list[str]]
Run = Callable[[], object]
Way = Callable[[Sequence[Pair]], Run]


@dataclass(frozen=True)
class Job:
    """What is measured: a model folder, its layer, the device, and a folder for files."""

    folder: Path
    layer: int
    device: str
    scratch: Path


def simalign_way(job: Job) -> Way:
    """Align pair by pair, as its interface does: both sides in one padded batch, all layers."""
    import simalign

    logging.getLogger("simalign.simalign").setLevel(logging.WARNING)  # its import changes the level
    aligner = simalign.SentenceAligner(
        str(job.folder),
        token_type="bpe",
        matching_methods="ai",
        device=job.device,
        layer=job.layer,
    )
    aligner.embed_loader.emb_model.float()  # half precision would be slow on a CPU
    return lambda pairs: lambda: [aligner.get_word_aligns(src, tgt) for src, tgt in pairs]


def awesome_way(job: Job) -> Way:
    """Run its program's alignment of a file, in batches of 32 in the order of the input."""
    replace_download_clients()
    from awesome_align import modeling, run_align
    from awesome_align.tokenization_bert import BertTokenizer

    vocabulary, model = write_as_bert(job)
    tokenizer = BertTokenizer(str(vocabulary), do_lower_case=False, max_len=512)
    for name in ("pad", "cls", "sep"):
        setattr(modeling, f"{name.upper()}_ID", getattr(tokenizer, f"{name}_token_id"))

    def prepare(pairs: Sequence[Pair]) -> Run:
        settings = argparse.Namespace(
            data_file=str(write_pairs(job.scratch / "awesome.txt", pairs)),
            output_file=str(job.scratch / "awesome.links"),
            output_prob_file=None,
            output_word_file=None,
            align_layer=job.layer,
            extraction="softmax",
            softmax_threshold=0.001,
            batch_size=32,
            num_workers=0,
            device=torch.device(job.device),
        )
        return lambda: quietly(run_align.word_align, settings, model, tokenizer)

    return prepare


def replace_download_clients() -> None:
    """Make awesome-align importable without the download clients that it no longer needs."""
    missing = {
        "boto3": {},
        "requests": {},
        "botocore": {},
        "botocore.config": {"Config": object},
        "botocore.exceptions": {"ClientError": Exception},
    }
    for name, content in missing.items():
        try:
            __import__(name)
        except ImportError:
            module = types.ModuleType(name)
            vars(module).update(content)
            sys.modules[name] = module


def write_as_bert(job: Job) -> tuple[Path, Any]:
    """Convert the model into a BERT for awesome-align: WordPieces, positions from 0.

    Subwords keep their ids and so their vectors; words may be split differently.
    """
    from awesome_align.configuration_bert import BertConfig
    from awesome_align.modeling import BertForMaskedLM

    encoder = Encoder.load(job.folder)
    if not encoder.can_fuse:
        raise ValueError("the model is not similar to BERT")
    config = encoder.model.config
    model = BertForMaskedLM(BertConfig(vocab_size_or_config_json_file=None, **shape_of(config)))
    body = encoder.family.get_body(encoder.model).state_dict()
    positions = "embeddings.position_embeddings.weight"
    body[positions] = body[positions][len(body[positions]) - encoder.max_tokens :]
    missing = model.bert.load_state_dict(body, strict=False).missing_keys
    if any("encoder" in name or "embeddings.w" in name for name in missing):
        raise ValueError(f"the weights do not fit: {missing[0]}")
    path = job.scratch / "vocab.txt"
    lines = map(as_word_piece, list_pieces(encoder.tokenizer, config.vocab_size))
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path, model


def shape_of(config: Any) -> dict[str, Any]:
    n_positions = config.max_position_embeddings
    if config.model_type != "bert":
        n_positions -= config.pad_token_id + 1
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += ("intermediate_size", "type_vocab_size", "layer_norm_eps")
    shape = {name: getattr(config, name) for name in names}
    return {**shape, "max_position_embeddings": n_positions}


def list_pieces(tokenizer: Any, size: int) -> list[str]:
    """Return the vocabulary in the order of ids, with BERT's names of special tokens."""
    pieces = [f"[unused{number}]" for number in range(size)]
    for piece, number in tokenizer.get_vocab().items():
        pieces[number] = piece
    special = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    for kind, name in special.items():
        number = getattr(tokenizer, f"{kind}_token_id")
        if number is not None:
            pieces[number] = name
    return pieces


def as_word_piece(piece: str) -> str:
    """Return a subword in the notation of WordPiece: `Haus` for `▁Haus`, `##tür` for `tür`."""
    if piece.startswith(("[", "##")):
        return piece
    return piece[1:] or piece if piece.startswith("▁") else f"##{piece}"


def eflomal_way(job: Job) -> Way:
    """Train on the pairs, which gives links in both directions."""
    import eflomal

    links = [str(job.scratch / name) for name in ("eflomal.forward", "eflomal.backward")]

    def prepare(pairs: Sequence[Pair]) -> Run:
        sides = [[" ".join(pair[side]) + "\n" for pair in pairs] for side in (0, 1)]
        return lambda: eflomal.Aligner().align(*sides, *links)

    return prepare


def fast_align_way(job: Job) -> Way:
    """Train on the pairs, then align them; the library symmetrizes."""
    import systran_align

    tables = [str(job.scratch / name) for name in ("fast_align.forward", "fast_align.backward")]

    def prepare(pairs: Sequence[Pair]) -> Run:
        text = str(write_pairs(job.scratch / "fast_align.txt", pairs))

        def run() -> None:
            systran_align.generate_alignment_probabilities(
                text, *tables, favor_diagonal=True, optimize_tension=True, variational_bayes=True
            )
            systran_align.Aligner(*tables).align_batch(*map(list, zip(*pairs, strict=True)))

        return run

    return prepare


def write_pairs(path: Path, pairs: Sequence[Pair]) -> Path:
    lines = (f"{' '.join(src)} ||| {' '.join(tgt)}\n" for src, tgt in pairs)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def quietly(work: Callable[..., object], *arguments: object) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        work(*arguments)


PEERS: dict[str, Callable[[Job], Way]] = {
    "simalign, argmax + itermax": simalign_way,
    "awesome-align, softmax": awesome_way,
    "eflomal, trained on the pairs": eflomal_way,
    "fast_align, trained on the pairs": fast_align_way,
}
