"""Hidden states computed with Hugging Face only."""

from __future__ import annotations

import torch

from calque.models.encoder import Encoder


def compute_states(
    encoder: Encoder, words: list[str], layer: int
) -> tuple[torch.Tensor, list[list[int]]]:
    """Run the Hugging Face model on one sentence; also return the tokens of each word."""
    tokenizer, ids, spans = encoder.tokenizer, [encoder.tokenizer.cls_token_id], []
    for word in words:
        pieces = tokenizer(word, add_special_tokens=False)["input_ids"]
        spans.append(list(range(len(ids), len(ids) + len(pieces))))
        ids += pieces
    ids.append(tokenizer.sep_token_id)
    with torch.no_grad():
        output = encoder.model(torch.tensor([ids]), output_hidden_states=True)
    return output.hidden_states[layer][0], spans
