import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from calque.io.word_vectors import MARGIN, Marks, parse_decimals

plain = st.from_regex(r"[-+]?[0-9]{0,10}\.?[0-9]{0,20}", fullmatch=True)
scientific = st.from_regex(r"-?[0-9]\.[0-9]{1,8}[eE][-+]?[0-9]{1,3}", fullmatch=True)
floats = st.floats(width=32).map(str) | st.floats().map(repr)
rubbish = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12)


def parse(*fields: str) -> tuple[list[float], list[int]]:
    """Parse fields that stand in one line."""
    marks = Marks.of(b"x" * MARGIN + f" {' '.join(fields)}\n".encode())
    around = np.flatnonzero(marks.kinds <= ord(" "))
    numbers, failed = parse_decimals(marks, around[None])
    assert numbers.dtype == np.float32
    return numbers[0].tolist(), failed.tolist()


def parse_by_float(field: str) -> float | None:
    """What Python reads, rounded to 32 bits; None for what such a float cannot hold."""
    try:
        value = float(field.encode()) if "_" not in field else np.nan
    except ValueError:
        return None
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return float(rounded) if np.isfinite(rounded) else None


@given(st.lists(plain | scientific | floats | rubbish, min_size=1, max_size=8))
@example(["0.1234", "-0.12345678", "0.123456789", "-0.0012345678", "12345678.5", "123456789.5"])
@example(["", "-", ".", "-.", "--1", "1-2", "5-", "1.-2", "-1.-2", "1..2", ".5", "-.5", "5.", "+5"])
@example(["nan", "inf", "-inf", "1e39", "-1e39", "1e-50", "0x10", "1_000", "１", "3.4028235e38"])
@example(["999999999999999", "9999999999999999", "0.999999999999999", "0.9999999999999999"])
@example(["9007199254740993", "0.1234567890123456789", "-0", "-0.0", "00000000000000000001"])
@example(["1,5", "1/5", "1:5", "1;5", "1e5", "1E5", "e5", "12e", "0.1f", "0.1é"])
def test_numbers_are_those_of_float(fields):
    numbers, failed = parse(*fields)
    expected = [parse_by_float(field) for field in fields]
    assert failed == [k for k, value in enumerate(expected) if value is None]
    wanted = [0.0 if value is None else value for value in expected]
    assert list(map(str, numbers)) == list(map(str, wanted))  # strings, for the sign of −0.0


@pytest.mark.parametrize("format_", ["%.4f", "%.6g", "%.9g", "%.17g", "%f", "%e"])
def test_random_numbers_in_common_formats(format_):
    values = np.random.default_rng(0).standard_normal(2000) * 10.0 ** np.arange(-9, 11, 0.01)
    fields = [format_ % value for value in values]
    numbers, failed = parse(*fields)
    assert failed == []
    assert numbers == np.array(list(map(float, fields))).astype(np.float32).tolist()


def test_each_row_has_its_own_marks():
    marks = Marks.of(b"x" * MARGIN + b" 1 2\ny 3 4\n")
    blanks = np.flatnonzero(marks.kinds <= ord(" "))
    numbers, failed = parse_decimals(marks, np.array([blanks[:3], blanks[3:6]]))
    assert numbers.tolist() == [[1, 2], [3, 4]]
    assert failed.tolist() == []
