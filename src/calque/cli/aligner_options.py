"""What the command line says of a word aligner, and what does not go together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from calque.errors import InputError

ALIGNERS = ("neural", "eflomal", "fast-align", "hybrid")
LEARNERS = ALIGNERS[1:]
METHODS = ("ot", "itermax", "argmax", "match")
ENCODINGS = ("joint", "separate")
SYMMETRIZATIONS = (
    "grow-diag-final-and",
    "grow-diag-final",
    "grow-diag",
    "intersection",
    "union",
    "forward",
    "backward",
)


@dataclass(frozen=True, slots=True)
class AlignerOptions:
    """What the command line says of the aligner; None leaves the choice to the aligner."""

    aligner: str = "neural"
    model: str | None = None
    method: str | None = None
    layer: int | None = None
    encode: str | None = None
    batch_tokens: int | None = None
    device: str = "auto"
    bitext: tuple[str, ...] = ()
    save: Path | None = None
    load: Path | None = None
    symmetrize: str | None = None
    adapt: bool = False
    adapt_steps: int | None = None
    save_model: Path | None = None
    map_from: tuple[str, str] | None = None
    maps: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("aligner", ALIGNERS), ("method", METHODS), ("encode", ENCODINGS)):
            check_choice(f"--{name}", getattr(self, name), known)
        if self.symmetrize is not None:
            check_choice("--symmetrize", self.symmetrize, SYMMETRIZATIONS)
        self._check_together()

    @property
    def learns(self) -> bool:
        """Whether something is trained before the aligning, on the text itself among others."""
        return self.adapt or (self.aligner in LEARNERS and self.load is None)

    def _check_together(self) -> None:
        """Refuse options that do not go together."""
        neural, statistical = self.aligner == "neural", self.aligner in ("eflomal", "fast-align")
        clashes = [
            (neural and self.load, "--load", "a statistical model is for hybrid, eflomal …"),
            (neural and self.save, "--save", "a statistical model is for hybrid, eflomal …"),
            (neural and self.symmetrize, "--symmetrize", "it is for eflomal"),
            (neural and self.bitext and not self.adapt, "--bitext", "add --adapt, or use hybrid"),
            (self.load and self.save, "--save", "the model of --load is saved already"),
            (self.load and self.bitext and not self.adapt, "--bitext", "--load trains nothing"),
            (statistical and self.adapt, "--adapt", "there is no encoder to adapt: use hybrid"),
            (statistical and self.method, "--method", "it is for neural and hybrid"),
            (self.save_model and not self.adapt, "--save-model", "it keeps what --adapt makes"),
            (self.adapt_steps and not self.adapt, "--adapt-steps", "add --adapt"),
            (self.maps and not self.map_from, "--maps", "name the languages: --map-from de-en"),
            (self.map_from and not neural, "--map-from", "maps are for neural"),
            (self.map_from and self.adapt, "--map-from", "maps do not fit an adapted encoder"),
        ]
        for clash, option, reason in clashes:
            if clash:
                raise InputError(f"{option} with --aligner {self.aligner}", fix=reason)


def check_choice(option: str, value: str | None, known: tuple[str, ...]) -> None:
    """Refuse a value that an option does not know."""
    if value is not None and value not in known:
        raise InputError(f"{option} {value} does not exist", fix=f"choose from: {', '.join(known)}")
