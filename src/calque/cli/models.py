"""`calque models`: what comes with the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def models() -> None:
    """List the models inside the package."""
    from rich.console import Console
    from rich.table import Table

    from calque.models.loading import embedded_models

    found = embedded_models()
    if not found:
        print("No model is embedded in this installation; commands take --model FOLDER.")
        return
    table = Table("model", "MiB", "layers", "hidden", "vocabulary", "languages", "scores")
    for name, folder in found.items():
        table.add_row(name, *describe_model(folder))
    console = Console()
    console.print(table)
    for name, folder in found.items():
        console.print(f"{name}: {folder}", soft_wrap=True, highlight=False)


def describe_model(folder: Path) -> list[str]:
    """Read a model's size, shape, languages and scores off its folder; nothing is loaded."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    settings: dict[str, Any] = config.get("calque") or {}
    n_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    scores = [f"{name} {value:.3g}" for name, value in settings.get("scores", {}).items()]
    card = "see README.md" if (folder / "README.md").exists() else "–"
    return [
        f"{n_bytes / 2**20:.1f}",
        str(config["num_hidden_layers"]),
        str(config["hidden_size"]),
        f"{config['vocab_size']:,}",
        " ".join(settings.get("languages", [])) or card,
        "\n".join(scores) or card,
    ]
