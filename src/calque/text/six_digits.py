"""Numbers as text with six significant digits, as `%.6g` writes them, at three times its speed.

Eight digits are worked out at a time within one 64-bit integer, a byte for each. A number takes
sixteen bytes at first; those it does not need are NUL, and removed from all of them at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    WordArray = npt.NDArray[np.uint64]

NUMBER = "%.6g"
# What the fast way can write; for the rest `%.6g` changes its notation or needs two digits before
# the point.
SMALLEST, BEYOND = 1e-4, 9.99999

_POWERS = 10.0 ** np.arange(10)
# Keeps the first k of eight bytes: in little-endian order they are the lowest.
_FIRST = np.array([(1 << 8 * k) - 1 for k in range(9)], dtype=np.uint64)
_CELL = 16
_BEGIN = 3  # where text begins in a cell: a blank and "-1.23457e-05" are 13 bytes, the most


def format_rows(matrix: npt.NDArray[np.float32]) -> list[bytes]:
    """Write every row of finite numbers, with blanks between them.

    >>> format_rows(np.array([[0.5, -2, 1e-7], [1 / 3, 1234567, 0]], dtype=np.float32))
    [b'0.5 -2 1e-07', b'0.333333 1.23457e+06 0']
    """
    values = matrix.astype(np.float64).ravel()
    sizes = np.abs(values)
    cells = _fill_cells(sizes, np.signbit(values))
    odd = np.flatnonzero(((sizes < SMALLEST) & (sizes > 0)) | (sizes >= BEYOND))
    if len(odd):
        texts = [b" " + (NUMBER % value).encode() for value in values[odd].tolist()]
        letters = np.array(texts, dtype=f"S{_CELL - _BEGIN}").view(np.uint8)
        cells[odd, _BEGIN:] = letters.reshape(len(odd), -1)
    cells.reshape(len(matrix), -1)[:, _BEGIN] = ord("\n")
    return cells.tobytes().translate(None, b"\0").split(b"\n")[1:]


def _fill_cells(
    sizes: npt.NDArray[np.float64], is_negative: npt.NDArray[np.bool_]
) -> npt.NDArray[np.uint8]:
    """Write numbers in cells: blank, sign, digit, point, nine digits; what is not needed is NUL.

    The products are exact, as a 32-bit float has 24 bits and 10⁹ = 2⁹ · 5⁹ adds 21: the digits
    are those of the number itself, rounded to even.
    """
    n_decimals = 5 + sum((sizes < limit).view(np.int8) for limit in (1, 0.1, 0.01, 0.001))
    scaled = np.rint(np.minimum(sizes, BEYOND) * _POWERS[n_decimals]) * _POWERS[9 - n_decimals]
    whole, rest = np.divmod(scaled.astype(np.uint64), np.uint64(10**9))
    tenths, rest = np.divmod(rest, np.uint64(10**8))
    digits = _spread_digits(rest)
    # The exponent of a float tells the highest bit that is set, and so the last digit but zeros.
    last_bit = (digits.astype(np.float64).view(np.uint64) >> np.uint64(52)).view(np.int64) - 1023
    n_kept = np.maximum(last_bit >> 3, -1) + 1
    cells = np.empty((len(sizes), 2), dtype="<u8")
    cells[:, 1] = (digits | np.uint64(0x3030303030303030)) & _FIRST[n_kept]
    has_point = ((tenths > 0) | (n_kept > 0)).astype(np.uint64)
    text = has_point * np.uint64(0x302E << 48) + (tenths << np.uint64(56))
    text += (whole << np.uint64(40)) + np.uint64(ord("0") << 40 | ord(" ") << 24)
    cells[:, 0] = text + is_negative.astype(np.uint64) * np.uint64(ord("-") << 32)
    return cells.view(np.uint8)


def _spread_digits(numbers: WordArray) -> WordArray:
    """Give the eight digits of numbers below 10⁸ a byte each, the first digit the lowest byte."""
    high, low = np.divmod(numbers, np.uint64(10**4))
    fours = high + (low << np.uint64(32))
    hundreds = (fours * np.uint64(5243) >> np.uint64(19)) & np.uint64(0x7F0000007F)
    pairs = hundreds + (fours - hundreds * np.uint64(100) << np.uint64(16))
    tens = (pairs * np.uint64(103) >> np.uint64(10)) & np.uint64(0x000F000F000F000F)
    digits: WordArray = tens + (pairs - tens * np.uint64(10) << np.uint64(8))
    return digits
