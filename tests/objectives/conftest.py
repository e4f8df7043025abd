"""An encoder with fewer layers than the session's, for tests that compile."""

from __future__ import annotations

from copy import deepcopy

import pytest

from calque.models.encoder import Encoder


def keep_layers(encoder: Encoder, n_layers: int) -> Encoder:
    """Return a copy of an encoder with its first layers only."""
    copy = deepcopy(encoder)
    body = copy.family.get_body(copy.model)
    body.encoder.layer = body.encoder.layer[:n_layers]
    copy.model.config.num_hidden_layers = n_layers
    return copy


@pytest.fixture
def compilable_encoder(tiny_encoder: Encoder) -> Encoder:
    """One layer, run as in a compiled training: Hugging Face's own layers may not be traceable."""
    encoder = keep_layers(tiny_encoder, 1)
    encoder.use_fused_layers = True
    return encoder
