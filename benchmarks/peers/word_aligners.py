"""Other word aligners as functions from pairs to a run, each as its own users would call it.

They are imported when they are made: an ImportError says what is not installed.
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
    """What is measured: a model folder at a layer, on a device, with room for files."""

    folder: Path
    layer: int
    device: str
    scratch: Path


def simalign_way(job: Job) -> Way:
    """Align pair by pair, as its interface does: both sides make one padded batch, all layers."""
    import simalign

    logging.getLogger("simalign.simalign").setLevel(logging.WARNING)  # importing it lowered that
    aligner = simalign.SentenceAligner(
        str(job.folder),
        token_type="bpe",
        matching_methods="ai",
        device=job.device,
        layer=job.layer,
    )
    aligner.embed_loader.emb_model.float()  # a folder may hold half precision, slow on a CPU
    return lambda pairs: lambda: [aligner.get_word_aligns(src, tgt) for src, tgt in pairs]


def awesome_way(job: Job) -> Way:
    """Run its program's alignment of a file, in batches of 32 in the order of the input."""
    stand_in_for_downloads()
    from awesome_align import modeling, run_align
    from awesome_align.tokenization_bert import BertTokenizer

    vocabulary, model = write_as_bert(job)
    tokenizer = BertTokenizer(str(vocabulary), do_lower_case=False, max_len=512)
    for mark in ("pad", "cls", "sep"):
        setattr(modeling, f"{mark.upper()}_ID", getattr(tokenizer, f"{mark}_token_id"))

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


def stand_in_for_downloads() -> None:
    """Let awesome-align be imported without the clients of the storage it no longer needs."""
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
    """Turn the model into the BERT that awesome-align reads: WordPieces, positions from 0.

    Subwords keep their numbers and so their vectors; a word may be split otherwise.
    """
    from awesome_align.configuration_bert import BertConfig
    from awesome_align.modeling import BertForMaskedLM

    encoder = Encoder.load(job.folder)
    if not encoder.can_fuse:
        raise ValueError("not a model of the BERT kind")
    config = encoder.model.config
    model = BertForMaskedLM(BertConfig(vocab_size_or_config_json_file=None, **shape_of(config)))
    body = encoder.family.get_body(encoder.model).state_dict()
    places = "embeddings.position_embeddings.weight"
    body[places] = body[places][len(body[places]) - encoder.max_tokens :]
    missing = model.bert.load_state_dict(body, strict=False).missing_keys
    if any("encoder" in name or "embeddings.w" in name for name in missing):
        raise ValueError(f"its weights do not fit: {missing[0]}")
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
    """List the vocabulary in the order of its numbers, special tokens by BERT's names."""
    pieces = [f"[unused{number}]" for number in range(size)]
    for piece, number in tokenizer.get_vocab().items():
        pieces[number] = piece
    marks = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    for mark, name in marks.items():
        number = getattr(tokenizer, f"{mark}_token_id")
        if number is not None:
            pieces[number] = name
    return pieces


def as_word_piece(piece: str) -> str:
    """Write a subword as WordPiece does: `▁Haus` as `Haus`, `tür` as `##tür`."""
    if piece.startswith(("[", "##")):
        return piece
    return piece[1:] or piece if piece.startswith("▁") else f"##{piece}"


def eflomal_way(job: Job) -> Way:
    """Train on the pairs, which gives their links in both directions."""
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
