"""Files in BUCC's layout, made of the sentences of the demo."""

from __future__ import annotations

from pathlib import Path


def write_bucc(
    folder: Path, rows: list[tuple[str, str, str]], *, language: str = "de", split: str = "dev"
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Write all sentences of a language, and English text that translates every second one."""
    pairs = [(sentence, english) for code, english, sentence in rows if code == language]
    src = [sentence for sentence, _ in pairs]
    # The other English sentences come from other languages.
    hidden = {english for _, english in pairs[::2]}
    known = {english for _, english in pairs}
    others = [english for _, english, _ in rows if english not in known]
    tgt = sorted({*hidden, *others[: len(pairs) // 2]})
    gold = [
        (f"{language}-{src.index(sentence) + 1:09}", f"en-{tgt.index(english) + 1:09}")
        for sentence, english in pairs
        if english in hidden
    ]
    for side, sentences in ((language, src), ("en", tgt)):
        lines = [f"{side}-{number:09}\t{text}\n" for number, text in enumerate(sentences, start=1)]
        (folder / f"{language}-en.{split}.{side}").write_text("".join(lines), encoding="utf-8")
    (folder / f"{language}-en.{split}.gold").write_text(
        "".join(f"{left}\t{right}\n" for left, right in gold), encoding="utf-8"
    )
    return src, tgt, gold
