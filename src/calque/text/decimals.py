"""Decimal numbers out of text, a few hundred thousand at a time: four times `numpy.loadtxt`.

Digits are read eight at a time: eight bytes are one 64-bit integer, and three multiplications
make the number they spell (Lemire, 2021). What is not plain decimals, such as 1.5e-07, is left
to Python, and so are numbers of more digits than a double holds exactly; the result is always
that of `float`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    IntArray = npt.NDArray[np.int64]
    ByteArray = npt.NDArray[np.uint8]
    WordArray = npt.NDArray[np.uint64]
    BoolArray = npt.NDArray[np.bool_]

# Digits are loaded from up to this many bytes before their end, so text needs that many before.
MARGIN = 16
MAX_DIGITS = 15  # a double holds all such integers, and one division by a power of ten is exact
BEYOND = 2.0**128 - 2.0**103  # rounds to infinity in 32 bits, what is below does not

_MINUS, _POINT, _ZERO = b"-.0"
# Keeps the last k of eight bytes: in little-endian order they are the highest.
_LAST = np.array([(1 << 64) - (1 << 8 * (8 - k)) for k in range(9)], dtype=np.uint64)
_POWERS = 10 ** np.arange(MAX_DIGITS + 1, dtype=np.uint64)
_SIGNED_POWERS = np.concatenate([_POWERS, -_POWERS.astype(np.float64)])


@dataclass(frozen=True, slots=True)
class Marks:
    """The bytes below "0" of a text and where they are: blanks, signs, points, punctuation."""

    data: bytes
    places: IntArray
    kinds: ByteArray

    @staticmethod
    def of(data: bytes) -> Marks:
        """Find the marks of a text that begins with `MARGIN` bytes of no interest."""
        codes = np.frombuffer(data, np.uint8)
        places = np.flatnonzero(codes < _ZERO)
        return Marks(data, places, codes[places])


def parse_decimals(
    marks: Marks, around: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.float32], IntArray]:
    """Read the numbers between marks that follow one another in a row.

    Says too which of them, counted row by row, are no numbers or not finite; they are read as 0.

    >>> marks = Marks.of(b"_" * MARGIN + b" 0.25 -3 1e-2 x ")
    >>> numbers, failed = parse_decimals(marks, np.flatnonzero(marks.kinds == ord(" "))[None])
    >>> numbers.tolist(), failed.tolist()
    ([[0.25, -3.0, 0.009999999776482582, 0.0]], [3])
    """
    places = marks.places[around]
    starts, ends = (places[:, :-1] + 1).ravel(), places[:, 1:].ravel()
    last = (around[:, 1:] - 1).ravel()
    has_point = marks.kinds[last] == _POINT
    is_negative = marks.kinds[(around[:, :-1] + 1).ravel()] == _MINUS
    points = np.where(has_point, marks.places[last], ends)
    n_whole, n_decimals = points - starts - is_negative, ends - points - has_point
    is_odd = np.diff(around).ravel() != 1 + has_point.view(np.int8) + is_negative
    is_odd |= (n_whole + n_decimals - 1).view(np.uint64) >= MAX_DIGITS
    mantissas = _read_decimals(marks.data, ends, n_decimals, is_odd)
    _add_whole(mantissas, marks.data, points, n_whole, n_decimals, is_odd)
    powers = np.minimum(n_decimals, MAX_DIGITS) + (MAX_DIGITS + 1) * is_negative.view(np.int8)
    values = mantissas.view(np.int64) / _SIGNED_POWERS[powers]
    failed = _parse_slowly(marks.data, starts, ends, np.flatnonzero(is_odd), values)
    return values.astype(np.float32).reshape(len(around), -1), failed


def _add_whole(
    mantissas: WordArray,
    data: bytes,
    points: IntArray,
    n_whole: IntArray,
    n_decimals: IntArray,
    is_odd: BoolArray,
) -> None:
    """Add the digits before the points; marks as odd what has other characters there."""
    digits = np.frombuffer(data, np.uint8)[points - 1] - np.uint8(_ZERO)
    wrong, some = digits > 9, np.flatnonzero((digits > 0) | (n_whole != 1))
    if len(some):  # seldom many: most vectors have numbers like 0.1234
        whole, not_digits = _read_digits(data, points[some], n_whole[some])
        mantissas[some] += whole * _POWERS.take(n_decimals[some], mode="clip")
        wrong[some] = not_digits | (n_whole[some] > 8)
    is_odd |= wrong


def _read_decimals(
    data: bytes, ends: IntArray, n_decimals: IntArray, is_odd: BoolArray
) -> WordArray:
    """Read the digits after the points; marks as odd what has other characters there."""
    decimals, wrong = _read_digits(data, ends, n_decimals)
    is_odd |= wrong
    rest = np.flatnonzero(n_decimals > 8)
    if len(rest):
        high, wrong = _read_digits(data, ends[rest] - 8, n_decimals[rest] - 8)
        decimals[rest] += high * np.uint64(10**8)
        is_odd[rest] |= wrong
    return decimals


def _read_digits(data: bytes, ends: IntArray, n_digits: IntArray) -> tuple[WordArray, BoolArray]:
    """Read the last digits before each end, at most eight, and tell where others stand there."""
    eights: WordArray = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))
    digits = eights[ends - 8]
    digits ^= np.uint64(0x3030303030303030)
    digits &= _LAST.take(n_digits, mode="clip")
    wrong = digits + np.uint64(0x0606060606060606)
    wrong |= digits
    wrong &= np.uint64(0xF0F0F0F0F0F0F0F0)
    # Neighbors are added up to pairs, pairs to fours, fours to eights.
    pairs = digits >> np.uint64(8)
    digits *= np.uint64(10)
    digits += pairs
    mask = np.uint64(0x000000FF000000FF)
    np.right_shift(digits, np.uint64(16), out=pairs)
    pairs &= mask
    pairs *= np.uint64(1 + (10**4 << 32))
    digits &= mask
    digits *= np.uint64(100 + (10**6 << 32))
    digits += pairs
    digits >>= np.uint64(32)
    return digits, wrong != 0


def _parse_slowly(
    data: bytes,
    starts: IntArray,
    ends: IntArray,
    odd: IntArray,
    values: npt.NDArray[np.float64],
) -> IntArray:
    """Fill in the values of odd fields, 0 for what is no number, and say which those are."""
    places = zip(starts[odd].tolist(), ends[odd].tolist(), strict=True)
    parsed = [parse_number(data[start:end]) for start, end in places]
    values[odd] = [0.0 if value is None else value for value in parsed]
    return odd[[value is None for value in parsed]]


def parse_number(text: bytes) -> float | None:
    """Read one number that a 32-bit float can hold; None for anything else.

    >>> parse_number(b"-1e-3"), parse_number(b"nan"), parse_number(b"1_0"), parse_number(b"1e99")
    (-0.001, None, None, None)
    """
    try:
        value = float(text) if b"_" not in text else math.nan
    except ValueError:
        return None
    return value if abs(value) < BEYOND else None
