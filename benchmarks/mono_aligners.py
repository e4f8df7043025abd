"""Compare ways to extract word links from an encoder, such as the start of mono_study.py.

    python benchmarks/mono_aligners.py MODEL DATA --layer 5 --json docs/studies/mono-aligners.json
    python benchmarks/mono_aligners.py --tiny

DATA has gold_alignments/. Nothing is trained, so there is one model and no seeds: the differences
from itermax have the 95 % intervals of `calque compare` over sentence pairs. Both sentences are
encoded separately, and the spelling of words is not compared. `--tiny` uses a tiny model.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from study_cells import compare_results, write_differences
from tiny_data import write_data

BASE = "itermax"
SETTINGS: dict[str, dict[str, Any]] = {
    BASE: {"method": "itermax"},
    "argmax": {"method": "argmax"},
    "ot": {"method": "ot"},  # transport, with the kernel exp(20 · cosine)
    "ot-paper": {  # as in XLM-Align: the kernel is the dot product of subwords
        "method": "ot",
        "similarity": "dot",
        "unit": "subwords",
        "scale_first": "rows",
        "sharpness": 1.0,
    },
}


def main() -> None:
    """Read the options and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="folder of an encoder")
    parser.add_argument("data", type=Path, nargs="?", help="folder with gold_alignments/")
    parser.add_argument("--layer", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("mono-aligners.json"))
    parser.add_argument("--tiny", action="store_true", help="with a tiny model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if options.tiny:
            data = scratch / "data"
            options.model, options.data, options.layer = write_data(data), data, 1
            options.json = scratch / "found.json"
        if options.data is None:
            return print("skipped: this comparison needs a MODEL and DATA, or --tiny")
        return compare_aligners(options, scratch)


def compare_aligners(options: argparse.Namespace, scratch: Path) -> None:
    """Measure AER with the model's settings replaced by each of SETTINGS; store the differences."""
    import calque

    for name, chosen in SETTINGS.items():
        model = shutil.copytree(options.model, scratch / "models" / name)
        config = json.loads((model / "config.json").read_text("utf-8"))
        aligner = {"layer": options.layer, "encode": "separate"} | chosen
        config["calque"] = config.get("calque", {}) | {"alignment": aligner}
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
        result = calque.evaluate(
            f"{name}={model}",
            data=options.data,
            tasks="word_alignment",
            layers=[options.layer],
            output=scratch / "results" / name,
            jobs=0,
        )
        scores = {row["language"]: round(row["value"], 1) for row in result.records}
        print(name, scores, flush=True)
    rows = []
    for name in SETTINGS:
        if name != BASE:
            folders = [scratch / "results" / each for each in (name, BASE)]
            rows += compare_results(folders, name, BASE)
    write_differences(options.json, rows)


if __name__ == "__main__":
    main()
