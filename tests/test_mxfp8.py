"""MXFP8 rows: decoding every byte pair, quantising, packing, and the staged scales."""

from __future__ import annotations

import chex
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tolerances import assert_rows_equal

from engram_jax import mxfp8


def all_byte_pairs() -> tuple[np.ndarray, np.ndarray]:
    """Gives row s every e4m3 byte, all under scale byte s: [256, 256], [256, 8]."""
    values = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    return values, scale


def same_codes(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Tells equal e4m3 bytes apart from different ones; a NaN is any NaN."""
    both_nan = np.isnan(reference.E4M3[actual]) & np.isnan(reference.E4M3[expected])
    return (actual == expected) | both_nan


@pytest.mark.parametrize("as_bytes", [True, False])
def test_dequantize_decodes_all_65536_byte_pairs(as_bytes):
    """Pitfall: byte 0 is 2^-127 and not zero, byte 255 is NaN, and so is 0x7f."""
    values, scale = all_byte_pairs()
    given = jnp.asarray(values if as_bytes else values.view(ml_dtypes.float8_e4m3fn))
    rows = mxfp8.dequantize(given, jnp.asarray(scale))
    assert_rows_equal(rows, reference.bf16_bits(reference.dequantize(values, scale)))


def test_dequantize_to_float32_is_exact_where_float32_is_normal():
    """Only overflow and results below 2^-126 may differ from the exact product."""
    values, scale = all_byte_pairs()
    exact = reference.dequantize(values, scale)
    with np.errstate(over="ignore"):
        expected = exact.astype(np.float32)
    rows = np.asarray(
        mxfp8.dequantize(jnp.asarray(values), jnp.asarray(scale), jnp.float32)
    )
    chex.assert_type(rows, np.float32)
    normal = ~(np.abs(exact) < 2.0**-126)
    np.testing.assert_array_equal(rows[normal], expected[normal])
    tiny = ~normal
    assert ((rows == expected) | (rows == 0))[tiny].all()
    np.testing.assert_array_equal(np.signbit(rows[tiny]), np.signbit(exact[tiny]))


def test_scale_byte_zero_is_not_flushed_for_normal_results():
    """Pitfall: 2^-127 is a float32 subnormal that some paths turn into zero."""
    values = jnp.full((1, 32), 448, jnp.float8_e4m3fn)
    row = mxfp8.dequantize(values, jnp.zeros((1, 1), jnp.uint8), jnp.float32)
    np.testing.assert_array_equal(np.asarray(row), np.float32(448 * 2.0**-127))


def test_nan_is_decided_by_the_scale_byte():
    """Pitfall: testing the decoded scale for NaN misses byte 255 where it overflows."""
    values = jnp.zeros((1, 64), jnp.float8_e4m3fn)
    row = mxfp8.dequantize(values, jnp.array([[254, 255]], jnp.uint8))
    finite, nan = np.split(np.asarray(row, np.float32), 2, axis=1)
    np.testing.assert_array_equal(finite, 0)
    assert np.isnan(nan).all()


def test_negative_zero_keeps_its_sign():
    """-0 stays -0 under every scale that is a number."""
    values = jnp.full((255, 32), 0x80, jnp.uint8)
    scale = jnp.arange(255, dtype=jnp.uint8)[:, None]
    bits = np.asarray(mxfp8.dequantize(values, scale)).view(np.uint16)
    np.testing.assert_array_equal(bits, 0x8000)


def test_scales_may_come_as_e8m0_numbers():
    """A checkpoint's E8M0 array means the same as its bytes."""
    values, scale = all_byte_pairs()
    numbers = jnp.asarray(scale.view(ml_dtypes.float8_e8m0fnu))
    rows = mxfp8.dequantize(jnp.asarray(values), mxfp8.scale_bytes(numbers))
    assert_rows_equal(rows, reference.bf16_bits(reference.dequantize(values, scale)))


BLOCKS = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 3), st.integers(1, 3).map(lambda groups: 32 * groups)),
    elements=st.one_of(
        st.floats(width=32),
        st.floats(-600, 600, width=32),
        st.sampled_from([0.0, -0.0, 448.0, 464.0, 480.0, 2.0**-149, 2.0**-126]),
    ),
)


@hypothesis.given(BLOCKS)
def test_quantize_matches_the_loops(block):
    """Every code and scale byte, for NaN, infinity and subnormals too."""
    codes, scale = reference.quantize(block)
    values, scales = jax.jit(mxfp8.quantize)(jnp.asarray(block))
    chex.assert_type([values, scales], [jnp.float8_e4m3fn, jnp.uint8])
    np.testing.assert_array_equal(scales, scale)
    numbers = np.repeat(scale, 32, axis=-1) != 255
    same = same_codes(np.asarray(values).view(np.uint8), codes)
    assert same[numbers].all(), (block, np.asarray(values), codes)
    # What the codes of a NaN block are is open; what they decode to is not.
    decoded = np.asarray(mxfp8.dequantize(values, scales, jnp.float32))
    assert np.isnan(decoded[~numbers]).all()


@pytest.mark.parametrize("exponent", [-140, -130, -127, -100, -1, 0, 1, 100, 119])
def test_quantize_takes_the_smallest_power_of_two(exponent):
    """448 fits its scale, and the next float32 above it needs twice as much."""
    with np.errstate(under="ignore"):
        fits = np.float32(448 * 2.0**exponent)
        exceeds = np.nextafter(fits, np.float32(np.inf))
    block = np.zeros((2, 32), np.float32)
    block[0, 5], block[1, 5] = fits, -exceeds
    _, scale = mxfp8.quantize(jnp.asarray(block))
    expected = [[max(exponent, -127) + 127], [max(exponent + 1, -127) + 127]]
    np.testing.assert_array_equal(scale, expected)


def test_quantize_keeps_what_is_already_e4m3():
    """Rows are exactly representable: the projection's input loses nothing."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 256, (64, 128), np.uint8)
    codes[reference.E4M3[codes] != reference.E4M3[codes]] = 0x7E
    scale = rng.integers(40, 200, (64, 4), np.uint8)
    rows = mxfp8.dequantize(jnp.asarray(codes), jnp.asarray(scale))
    again = mxfp8.dequantize(*mxfp8.quantize(rows))
    chex.assert_trees_all_equal(np.asarray(again), np.asarray(rows))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_quantize_takes_every_float_dtype(dtype):
    """The result is that of the same numbers in float32."""
    x = jnp.asarray(np.random.default_rng(2).normal(size=(7, 64)), dtype)
    codes, scale = reference.quantize(np.asarray(x).astype(np.float32))
    values, scales = mxfp8.quantize(x)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), codes)
    np.testing.assert_array_equal(scales, scale)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_pack_keeps_every_byte(rows):
    """D values then D/32 scales; unpacking gives them back, NaN codes included."""
    rng = np.random.default_rng(rows)
    values = rng.integers(0, 256, (rows, 256), np.uint8)
    scale = rng.integers(0, 256, (rows, 8), np.uint8)
    packed = mxfp8.pack(jnp.asarray(values), jnp.asarray(scale))
    chex.assert_shape(packed, (rows, 264))
    np.testing.assert_array_equal(packed, np.concatenate([values, scale], axis=1))
    back, scales = mxfp8.unpack(packed)
    chex.assert_type(back, jnp.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(back).view(np.uint8), values)
    np.testing.assert_array_equal(scales, scale)


def test_f8_128x4_matches_the_golden_scales(golden):
    """The layout that a scaled matrix unit reads."""
    data = golden("mxfp8_scales")
    tiles = mxfp8.to_f8_128x4(jnp.asarray(data["scales"]))
    np.testing.assert_array_equal(tiles, data["f8_128x4"])
    back = mxfp8.from_f8_128x4(tiles, *data["scales"].shape)
    np.testing.assert_array_equal(back, data["scales"])


@hypothesis.given(st.integers(0, 300), st.integers(1, 13))
@hypothesis.settings(max_examples=15)
def test_f8_128x4_matches_the_loops(rows, groups):
    """Zero padded to 128 rows and 4 groups, and reversible, for any size."""
    scales = np.random.default_rng(rows).integers(1, 256, (rows, groups), np.uint8)
    tiles = mxfp8.to_f8_128x4(jnp.asarray(scales))
    np.testing.assert_array_equal(tiles, reference.f8_128x4(scales))
    np.testing.assert_array_equal(mxfp8.from_f8_128x4(tiles, rows, groups), scales)


def test_jit_traces_each_function_once():
    """A second call with other numbers runs the compiled code."""
    x = np.random.default_rng(3).normal(size=(5, 64)).astype(np.float32)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def round_trip(x):
        values, scale = mxfp8.unpack(mxfp8.pack(*mxfp8.quantize(x)))
        return mxfp8.dequantize(values, scale)

    once, twice = round_trip(x), round_trip(2 * x)
    chex.assert_trees_all_equal(np.asarray(2 * once), np.asarray(twice))


def test_vmap_equals_the_batch():
    """Leading axes are all alike."""
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5, 64)), jnp.float32)
    mapped = jax.vmap(mxfp8.quantize)(x)
    whole = mxfp8.quantize(x)
    chex.assert_trees_all_equal(mapped, whole)
    chex.assert_trees_all_equal(
        jax.vmap(mxfp8.dequantize)(*whole), mxfp8.dequantize(*whole)
    )


def zeros(*shape):
    """Makes bytes of any shape."""
    return jnp.zeros(shape, jnp.uint8)


@pytest.mark.usefixtures("library_errors")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mxfp8.quantize(jnp.zeros((2, 33))), ValueError, "multiple of 32"),
        (lambda: mxfp8.quantize(jnp.zeros(())), ValueError, "multiple of 32"),
        (lambda: mxfp8.dequantize(zeros(2, 64), zeros(2, 1)), ValueError, r"\(2, 2\)"),
        (lambda: mxfp8.dequantize(zeros(2, 33), zeros(2, 1)), ValueError, "of 32"),
        (
            lambda: mxfp8.dequantize(jnp.zeros((2, 64)), zeros(2, 2)),
            TypeError,
            "float8_e4m3fn or uint8",
        ),
        (
            lambda: mxfp8.dequantize(zeros(2, 64), jnp.zeros((2, 2))),
            TypeError,
            "float8_e8m0fnu or uint8",
        ),
        (lambda: mxfp8.pack(zeros(2, 64), zeros(3, 2)), ValueError, r"\(2, 2\)"),
        (lambda: mxfp8.unpack(zeros(2, 256)), ValueError, "multiple of 33"),
        (lambda: mxfp8.unpack(jnp.zeros((2, 33))), TypeError, "uint8"),
        (lambda: mxfp8.to_f8_128x4(zeros(4)), ValueError, "groups"),
        (lambda: mxfp8.from_f8_128x4(zeros(100), 3, 3), ValueError, "512"),
    ],
)
def test_a_wrong_shape_or_dtype_is_refused_by_name(call, error, message):
    """One error that says what was given and what fits."""
    with pytest.raises(error, match=message):
        call()
