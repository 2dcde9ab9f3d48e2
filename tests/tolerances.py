"""Says how near a float must come to its float64 value, in one table.

Integers, hashes, packed bytes and row reads have no entry: they are compared exactly
(`assert_rows_equal` spells out what exact means for a row). An entry follows from the
number formats, and is never loosened to make a test pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import chex
import numpy as np
from numpy_reference import bf16_to_float


@dataclass(frozen=True)
class Tolerance:
    """Bounds an error by ``relative * |expected| + accumulated * magnitude``."""

    relative: float
    """Of the expected value: the final rounding, and float32 functions."""
    accumulated: float
    """Of the sum of magnitudes that went in: rounding before any cancellation."""


BF16_ROUNDING = 2.0**-8
"""Half a unit in the last of bfloat16's 8 bits, at the start of a binade."""

TOLERANCES = {
    # One rounding of the float64 output; the float32 sums before it are near exact.
    "gate_bfloat16": Tolerance(BF16_ROUNDING, 2.0**-18),
    "gate_float32": Tolerance(2.0**-23, 2.0**-18),
    # Products are exact and the sum is float32, over up to 6,144 terms.
    "wkv": Tolerance(BF16_ROUNDING, 2.0**-18),
    # A float32 gradient against float64: a few more float32 operations in a row.
    "gradient_float32": Tolerance(2.0**-14, 2.0**-14),
    # Cotangents are rounded to bfloat16 on their way through a bfloat16 operand.
    "gradient_bfloat16": Tolerance(2.0**-7, 2.0**-7),
}


def assert_within(
    operation: str, actual, expected: np.ndarray, magnitude: np.ndarray | float = 0.0
) -> None:
    """Compares with float64 values under the operation's entry of the table."""
    tolerance = TOLERANCES[operation]
    got, wanted = np.asarray(actual).astype(np.float64), np.asarray(expected)
    chex.assert_equal_shape([got, wanted])
    bound = tolerance.relative * np.abs(wanted) + tolerance.accumulated * magnitude
    # Written so that a NaN on one side is an excess.
    wrong = np.argwhere(~(np.abs(got - wanted) <= bound))
    if wrong.size:
        first = tuple(wrong[0])
        raise AssertionError(
            f"{operation}: {len(wrong)} of {got.size} values are off, first at "
            f"{tuple(map(int, first))}: got {got[first]}, expected {wanted[first]}, "
            f"allowed error {np.broadcast_to(bound, got.shape)[first]}"
        )


def assert_rows_equal(actual, expected_bits: np.ndarray) -> None:
    """Compares bfloat16 rows bit for bit, but for the two things that are left open.

    NaN is any NaN, and a result below 2^-126 is exact or a zero of its sign.
    """
    array = np.asarray(actual)
    assert array.dtype.name == "bfloat16", array.dtype
    got = array.view(np.uint16)
    chex.assert_equal_shape([got, expected_bits])
    expected = bf16_to_float(expected_bits)
    both_nan = np.isnan(expected) & np.isnan(bf16_to_float(got))
    flushed = (np.abs(expected) < 2.0**-126) & (got == (expected_bits & 0x8000))
    wrong = ~((got == expected_bits) | both_nan | flushed)
    where = np.argwhere(wrong)
    assert not where.size, (
        f"{len(where)} values differ, first at {where[0].tolist()}: got bits "
        f"{got[tuple(where[0])]:#06x}, expected {expected_bits[tuple(where[0])]:#06x}"
    )
