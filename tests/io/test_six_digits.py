import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from calque.io.word_vectors import format_rows

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-16, 16, width=32)


def by_python(matrix: np.ndarray) -> list[str]:
    """Format one by one; `%.6g` gives the same."""
    return [" ".join(f"{value:.6g}" for value in row) for row in matrix.tolist()]


@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 5)), elements=finite | usual))
@example(np.float32([[0, -0.0, 1, -1, 10, 9.99999, 9.999994, 9.999995, 9.999996, 1e6, 999999.5]]))
@example(np.float32([[0.09999996, 0.00099999996, 1e-4, 9.9999997e-5, 9.99999e-5, 1e-38, -3e38]]))
@example(np.float32([[0.1015625, 0.1015635, 0.0078125, 1.0000005, 0.5, 0.25, 0.125, 0.0625]]))
def test_it_writes_what_percent_does(matrix):
    assert [row.decode() for row in format_rows(matrix)] == by_python(matrix)


def test_a_hundred_thousand_numbers_of_every_size():
    rng = np.random.default_rng(0)
    values = rng.choice([-1, 1], 100_000) * 2.0 ** rng.uniform(-16, 6, 100_000)
    short = rng.integers(0, 4096, 100_000) / 2.0 ** rng.integers(0, 14, 100_000)  # with many ties
    matrix = np.concatenate([values, short]).astype(np.float32).reshape(-1, 100)
    assert [row.decode() for row in format_rows(matrix)] == by_python(matrix)


@given(arrays(np.float32, 20, elements=usual))
def test_what_was_written_is_written_again(values):
    (once,) = format_rows(values[None])
    (twice,) = format_rows(np.array([once.split()], dtype=np.float32))
    assert once == twice
