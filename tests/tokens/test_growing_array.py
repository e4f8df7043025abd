"""A file that grew is, byte for byte, what NumPy would have written at once."""

from __future__ import annotations

import io

import numpy as np
import pytest

from calque.tokens.store import NpyWriter


@pytest.mark.parametrize("n_rows", [0, 1, 7, 123_456])
@pytest.mark.parametrize(
    ("dtype", "row_shape"), [("<f4", (3,)), (np.uint16, ()), (np.int64, ())], ids=str
)
def test_same_bytes_as_numpy(n_rows: int, dtype: object, row_shape: tuple[int, ...]) -> None:
    generator = np.random.default_rng(0)
    rows = generator.integers(0, 60_000, (n_rows, *row_shape)).astype(dtype)
    grown, whole = io.BytesIO(), io.BytesIO()
    array = NpyWriter(grown, dtype, row_shape)
    for part in np.array_split(rows, 3):
        array.append(part)
    array.close()
    np.save(whole, rows)
    assert grown.getvalue() == whole.getvalue()
