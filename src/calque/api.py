"""The main entry points in Python: `load` returns a `Model`, which embeds and aligns text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calque.models.encoder import Encoder
from calque.models.inference import load_encoder
from calque.sentences.embed import embed_sentences

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from calque.word_alignment.protocol import WordPair


class Model(Encoder):
    """A multilingual encoder that embeds sentences and aligns words.

    `folder` is the folder of its plain Hugging Face files. Load a model with `calque.load`.

    Examples:
        >>> import calque
        >>> model = calque.load("calque-mini", device="cpu")
        >>> model.folder.name
        'calque-mini'
    """

    def embed(
        self,
        sentences: Iterable[str],
        *,
        layer: int | None = None,
        raw: bool = False,
        languages: Sequence[str] | None = None,
        map_from: str | Sequence[str] | None = None,
        normalize: bool = False,
        batch_tokens: int | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return one vector per sentence, shape (sentences, hidden size).

        Sentences longer than the model's maximum length are split into windows, whose vectors are
        averaged. An empty sentence gets a zero vector.

        Args:
            sentences: The sentences.
            layer: Layer: 0 is the embedding layer, -1 the last. Default: the model's best layer, in
                its language-neutral space if it has one.
            raw: Ignore the language-neutral space.
            languages: One language per sentence: subtract the mean vector of each language.
            map_from: Language of the sentences, or one per sentence: apply the linear maps of the
                languages. Required if the model was loaded with maps.
            normalize: Scale every vector to length one.
            batch_tokens: Tokens per batch. Default: chosen for the device.

        Examples:
            >>> import calque
            >>> model = calque.load(device="cpu")
            >>> model.embed(["Guten Morgen!", "Good morning!"]).shape
            (2, 384)
        """
        return embed_sentences(
            self,
            sentences,
            layer=layer,
            raw=raw,
            language=map_from,
            center_by=languages,
            normalize=normalize,
            batch_tokens=batch_tokens,
        )

    def align(self, pairs: Iterable[WordPair], **options: Any) -> list[list[tuple[int, int]]]:
        """Return the word links of every pair as a list of (source word, target word).

        This is `WordAligner(model, **options).align(pairs)`. To align repeatedly, create the
        `WordAligner` once.

        Args:
            pairs: Pairs of word lists.
            **options: Options of `WordAligner`, such as `method`, `layer` or `threshold`.

        Examples:
            >>> import calque
            >>> calque.load(device="cpu").align([(["das", "Haus"], ["the", "house"])])
            [[(0, 0), (1, 1)]]
        """
        from calque.word_alignment.neural import WordAligner

        return WordAligner(self, **options).align(pairs)


def load(
    name: str | Path | None = None,
    device: str = "auto",
    *,
    maps: bool | str | Path | None = None,
    precision: str = "auto",
) -> Model:
    """Load a model for inference.

    Args:
        name: Folder, hub name or `calque-mini`, which is also the default.
        device: `auto` (the GPU if there is one), `cpu`, `cuda`, `cuda:1`, ...
        maps: True to load the linear maps of languages in the model's folder, or another folder.
        precision: `fp32`, `bf16`, or `auto`: bf16 on CUDA, fp32 elsewhere.

    Examples:
        >>> import calque
        >>> model = calque.load("calque-mini", device="cpu")
        >>> model.n_layers, model.hidden_size
        (8, 384)
    """
    return load_encoder(name, device, maps=maps, precision=precision, cls=Model)
