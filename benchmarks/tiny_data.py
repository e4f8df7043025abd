"""Tiny data and a tiny model, with which the tiny modes of other scripts try all their code.

    python benchmarks/tiny_data.py FOLDER
    python benchmarks/tiny_data.py --tiny          (in a temporary folder)

The text consists of the German and French sentences of the demo. FOLDER has the structure that the
studies expect: bitext/, tatoeba/, muse/, gold_alignments/, xtreme/ and translation/multi30k, and
the model is in FOLDER/encoder.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from importlib import resources
from pathlib import Path

SAMPLES = Path(__file__).parents[1] / "tests" / "data"
LANGUAGES = {"de": "deu", "fr": "fra"}
TAGGED = {
    "panx": "to\tO\nNew\tB-LOC\nYork\tI-LOC\n\nof\tO\nParis\tB-LOC\n\n",
    "udpos": "the\tDET\nold\tADJ\nhouse\tNOUN\n\na\tDET\nhouse\tNOUN\nfell\tVERB\n\n",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--tiny", action="store_true", help="write to a temporary folder")
    options = parser.parse_args()
    if options.tiny:
        with tempfile.TemporaryDirectory() as folder:
            write_data(Path(folder))
    elif options.folder is not None:
        write_data(options.folder)
    else:
        print("skipped: this script needs a folder, or --tiny")


def write_data(folder: Path) -> Path:
    """Write everything and return the path of the model."""
    from calque.io.bitext import write_bitext
    from calque.types import SentencePair

    for language, code in LANGUAGES.items():
        pairs = read_demo(language)
        bitext = [SentencePair(src, tgt, tag="tatoeba") for src, tgt in pairs]
        (folder / "bitext").mkdir(parents=True, exist_ok=True)
        write_bitext(folder / "bitext" / f"en-{language}.tsv", bitext)
        sides = {"eng": 0, code: 1}
        write_sides(folder / "tatoeba" / f"tatoeba.{code}-eng", pairs[:9], sides)
    for name in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
        path = folder / "translation" / "multi30k" / name
        write_sides(path, read_demo("de"), {"en": 0, "de": 1})
    for task, text in TAGGED.items():
        (folder / "xtreme" / task).mkdir(parents=True)
        for name in ("train-en", "dev-en", *(f"dev-{language}" for language in LANGUAGES)):
            (folder / "xtreme" / task / f"{name}.tsv").write_text(text, encoding="utf-8")
    (folder / "muse").mkdir()
    dictionary = folder / "muse" / "en-de.0-5000.txt"
    dictionary.write_text("house Haus\ntime Zeit\n", encoding="utf-8")
    shutil.copytree(SAMPLES / "gold", folder / "gold_alignments")
    print(f"{sum(path.is_file() for path in folder.rglob('*'))} files in {folder}")
    return save_encoder(folder / "encoder")


def read_demo(language: str) -> list[tuple[str, str]]:
    """Return the sentences of the demo in English and another language."""
    table = resources.files("calque").joinpath("data/demo.tsv").read_text("utf-8")
    rows = [line.split("\t") for line in table.splitlines()[1:]]
    return [(english, text) for name, english, text in rows if name == language]


def write_sides(path: Path, pairs: list[tuple[str, str]], sides: dict[str, int]) -> None:
    """Write each side of the pairs to a file with its own suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix, side in sides.items():
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        path.with_name(f"{path.name}.{suffix}").write_text(text, encoding="utf-8")


def save_encoder(folder: Path) -> Path:
    """Save a random encoder of 2 layers × 32 with the tokenizer of calque-mini."""
    import torch
    from transformers import XLMRobertaConfig

    from calque.models.encoder import Encoder
    from calque.models.loading import build_model, find_model
    from calque.tokens.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(find_model("calque-mini"))
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=130,
        type_vocab_size=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Encoder(build_model(config), tokenizer).save(folder)
    return folder


if __name__ == "__main__":
    main()
