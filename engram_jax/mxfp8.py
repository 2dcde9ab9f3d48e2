"""MXFP8: float8_e4m3fn values with one E8M0 scale byte per 32 of them.

Scales are uint8 throughout (byte b means 2^(b - 127), 255 is NaN): E8M0 arrays do not
compile in GPU kernels, and an E8M0 array "of zeros" is one of NaN.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, UInt8

BLOCK = 32
"""Values that share one scale."""

_E4M3_MAX = 448.0
_SCALE_BIAS = 127
_SCALE_NAN = 255
_ROWS, _GROUPS = 128, 4  # one F8_128x4 tile


def _as_bytes(x: Array, dtype: jnp.dtype, name: str) -> Array:
    """View an array of an 8-bit float type as bytes, or pass bytes through."""
    if x.dtype == jnp.uint8:
        return x
    if x.dtype != dtype:
        raise TypeError(
            f"{name} has dtype {x.dtype}; it must be {jnp.dtype(dtype).name} or uint8"
        )
    return lax.bitcast_convert_type(x, jnp.uint8)


def value_bytes(values: Array, name: str = "values") -> UInt8[Array, "..."]:
    """View e4m3 values as bytes; bytes pass through."""
    return _as_bytes(values, jnp.dtype(jnp.float8_e4m3fn), name)


def scale_bytes(scale: Array, name: str = "scale") -> UInt8[Array, "..."]:
    """View E8M0 scales as bytes; bytes pass through."""
    return _as_bytes(scale, jnp.dtype(jnp.float8_e8m0fnu), name)


def _power_of_two(exponent: Array) -> Array:
    """2^exponent as float32, for exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _ldexp(x: Array, exponent: Array) -> Array:
    """X * 2^exponent in two steps, so that no factor is a float32 subnormal.

    XLA flushes subnormals to zero on a CPU, a factor of 2^-127 included.
    """
    half = exponent >> 1
    return x * _power_of_two(half) * _power_of_two(exponent - half)


def _check_blocks(values: Array, scale: Array) -> None:
    wanted = (*values.shape[:-1], values.shape[-1] // BLOCK)
    if values.shape[-1] % BLOCK or scale.shape != wanted:
        raise ValueError(
            f"scale has shape {scale.shape} for values of shape {values.shape}; it "
            f"must be {wanted}: one scale per {BLOCK} values, whose number must be a "
            f"multiple of {BLOCK}"
        )


def quantize(
    x: Float[Array, "... D"],
) -> tuple[Float8e4m3fn[Array, "... D"], UInt8[Array, "... G"]]:
    """Quantise to MXFP8.

    `scale = 2^ceil(log2(max|x| / 448))` over each block of 32, the smallest power of
    two that brings the block into e4m3's range; `value = round_to_nearest_even(x /
    scale)`. A block of zeros gets byte 127 (a scale of 1), a block with a NaN or an
    infinity byte 255, so that all of it reads as NaN. Scales below 2^-127 do not exist:
    smaller blocks use byte 0.

    Args:
        x: bfloat16, float16 or float32, D a multiple of 32.

    Returns:
        The values, float8_e4m3fn [..., D], and the scale bytes, uint8 [..., D/32].

    Raises:
        ValueError: D is not a multiple of 32.

    Example:
        >>> values, scale = quantize(jnp.full((1, 32), 896.0))
        >>> float(values[0, 0]), int(scale[0, 0])
        (448.0, 128)

    References:
        OCP Microscaling Formats (MX) Specification 1.0, sections 5.2 and 6.3.
    """
    if not x.shape or x.shape[-1] % BLOCK:
        raise ValueError(
            f"x has shape {x.shape}; its last axis must be a multiple of {BLOCK}"
        )
    groups = x.shape[-1] // BLOCK  # not -1, which a batch of no rows leaves open
    values, scale = quantize_blocks(x.reshape(*x.shape[:-1], groups, BLOCK))
    return values.reshape(x.shape), scale


def quantize_blocks(
    blocks: Float[Array, "... B"],
) -> tuple[Float8e4m3fn[Array, "... B"], UInt8[Array, "..."]]:
    """Quantise with one scale for the whole last axis, as `quantize` does for 32.

    Args:
        blocks: bfloat16, float16 or float32.

    Returns:
        The values, float8_e4m3fn [..., B], and the scale bytes, uint8 [...].

    Example:
        >>> quantize_blocks(jnp.full((2, 3), 0.5))[1]
        Array([118, 118], dtype=uint8)
    """
    blocks = blocks.astype(jnp.float32)
    bits = lax.bitcast_convert_type(blocks, jnp.int32) & 0x7FFFFFFF
    largest = bits.max(axis=-1)
    # float32 orders like its bits. 448 = 1.75 * 2^8, so a mantissa above 1.75 needs
    # one more doubling. Subnormals are normalised by the count of leading zeros.
    subnormal = (largest >> 23) == 0
    shift = lax.clz(largest) - 8
    mantissa = jnp.where(subnormal, largest << shift, largest) & 0x7FFFFF
    exponent = jnp.where(subnormal, -126 - shift, (largest >> 23) - 127)
    exponent = exponent - 8 + (mantissa > 0x600000)
    byte = jnp.clip(exponent + _SCALE_BIAS, 0, _SCALE_NAN - 1)
    byte = jnp.where(largest == 0, _SCALE_BIAS, byte)
    byte = jnp.where(largest >= 0x7F800000, _SCALE_NAN, byte)

    power = _SCALE_BIAS - byte[..., None]
    # A subnormal input is its mantissa times 2^-149; as an integer it is not flushed.
    tiny = (bits >> 23) == 0
    magnitude = jnp.where(
        tiny,
        _ldexp((bits & 0x7FFFFF).astype(jnp.float32), jnp.maximum(power - 149, -126)),
        _ldexp(jnp.abs(blocks), power),
    )
    scaled = jnp.where(jnp.signbit(blocks), -magnitude, magnitude)
    return scaled.astype(jnp.float8_e4m3fn), byte.astype(jnp.uint8)


def dequantize(
    values: Float8e4m3fn[Array, "... D"] | UInt8[Array, "... D"],
    scale: UInt8[Array, "... G"],
    dtype: jnp.dtype | type = jnp.bfloat16,
) -> Float[Array, "... D"]:
    """Decode MXFP8: `value * 2^(byte - 127)` in float32, rounded once to `dtype`.

    Exact in bfloat16 but for overflow (infinity) and results below 2^-126, which may
    read as a zero of their sign. Byte 0 is 2^-127, byte 255 NaN.

    Args:
        values: e4m3 values or their bytes, D a multiple of 32.
        scale: E8M0 bytes, one per 32 values.
        dtype: of the result.

    Returns:
        `dtype` [..., D].

    Raises:
        ValueError: the shapes do not fit each other.
        TypeError: a dtype is neither uint8 nor the 8-bit float.

    Example:
        >>> values = jnp.ones((1, 32), jnp.float8_e4m3fn)
        >>> dequantize(values, jnp.array([[128]], jnp.uint8))[0, 0]
        Array(2, dtype=bfloat16)
    """
    byte = scale_bytes(scale).astype(jnp.int32)
    if values.dtype == jnp.uint8:
        values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    elif values.dtype != jnp.float8_e4m3fn:
        raise TypeError(
            f"values have dtype {values.dtype}; they must be float8_e4m3fn or uint8"
        )
    _check_blocks(values, byte)
    blocks = values.astype(jnp.float32).reshape(*byte.shape, BLOCK)
    byte = byte[..., None]
    scaled = _ldexp(blocks, byte - _SCALE_BIAS)
    scaled = jnp.where(byte == _SCALE_NAN, jnp.nan, scaled)
    return scaled.reshape(values.shape).astype(dtype)


def pack(
    values: Float8e4m3fn[Array, "... D"] | UInt8[Array, "... D"],
    scale: UInt8[Array, "... G"],
) -> UInt8[Array, "... P"]:
    """Put each row's scales behind its values: D + D/32 bytes a row.

    Args:
        values: e4m3 values or their bytes.
        scale: E8M0 bytes, one per 32 values.

    Returns:
        uint8 [..., D + D/32].

    Raises:
        ValueError: the shapes do not fit each other.

    Example:
        >>> row = jnp.ones((3, 256), jnp.float8_e4m3fn)
        >>> pack(row, jnp.full((3, 8), 127, jnp.uint8)).shape
        (3, 264)
    """
    _check_blocks(values, scale)
    return jnp.concatenate([value_bytes(values), scale_bytes(scale)], axis=-1)


def unpack(
    packed: UInt8[Array, "... _"],
) -> tuple[Float8e4m3fn[Array, "... D"], UInt8[Array, "... G"]]:
    """Split packed rows into values and scales; the inverse of `pack`.

    Args:
        packed: uint8 [..., D + D/32].

    Returns:
        e4m3 values [..., D] and scale bytes [..., D/32].

    Raises:
        TypeError: `packed` is not uint8.
        ValueError: its last axis is not a multiple of 33.

    Example:
        >>> values, scale = unpack(jnp.zeros((2, 264), jnp.uint8))
        >>> values.shape, scale.shape
        ((2, 256), (2, 8))
    """
    if packed.dtype != jnp.uint8:
        raise TypeError(f"packed rows have dtype {packed.dtype}; they must be uint8")
    if packed.shape[-1] % (BLOCK + 1):
        raise ValueError(
            f"packed rows have {packed.shape[-1]} bytes; they must have D + D/32, "
            f"a multiple of {BLOCK + 1}"
        )
    width = packed.shape[-1] // (BLOCK + 1) * BLOCK
    values = lax.bitcast_convert_type(packed[..., :width], jnp.float8_e4m3fn)
    return values, packed[..., width:]


def to_f8_128x4(scale: UInt8[Array, "R G"]) -> UInt8[Array, " N"]:
    """Lay scales out as scaled matrix units want them ("F8_128x4").

    The byte of row r and group g goes to `(r // 128 * ceil(G / 4) + g // 4) * 512 +
    r % 32 * 16 + r % 128 // 32 * 4 + g % 4`; the rest, up to whole tiles of 128 rows
    and 4 groups, is zero.

    Args:
        scale: E8M0 bytes, one per 32 values.

    Returns:
        uint8, flat, of `ceil(R / 128) * ceil(G / 4) * 512` bytes.

    Raises:
        ValueError: `scale` is not a matrix.

    Example:
        >>> to_f8_128x4(jnp.ones((130, 6), jnp.uint8)).shape
        (2048,)

    References:
        NVIDIA cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    if scale.ndim != 2:
        raise ValueError(f"scale has shape {scale.shape}; it must be [rows, groups]")
    rows, groups = scale.shape
    padding = ((0, -rows % _ROWS), (0, -groups % _GROUPS))
    tiles = jnp.pad(scale_bytes(scale), padding).reshape(
        -(-rows // _ROWS), _ROWS // 32, 32, -(-groups // _GROUPS), _GROUPS
    )
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def from_f8_128x4(
    tiles: UInt8[Array, " N"], rows: int, groups: int
) -> UInt8[Array, "R G"]:
    """Undo `to_f8_128x4`.

    Args:
        tiles: uint8, flat.
        rows: R, the number of rows.
        groups: G, the number of scales in a row.

    Returns:
        uint8 [R, G].

    Raises:
        ValueError: `tiles` has not the size that R and G need.

    Example:
        >>> scale = jnp.arange(780, dtype=jnp.uint8).reshape(130, 6)
        >>> bool((from_f8_128x4(to_f8_128x4(scale), 130, 6) == scale).all())
        True
    """
    row_tiles, group_tiles = -(-rows // _ROWS), -(-groups // _GROUPS)
    wanted = row_tiles * group_tiles * _ROWS * _GROUPS
    if tiles.shape != (wanted,):
        raise ValueError(
            f"tiles has shape {tiles.shape}; [{rows}, {groups}] needs ({wanted},)"
        )
    grid = tiles.reshape(row_tiles, group_tiles, 32, _ROWS // 32, _GROUPS)
    grid = grid.transpose(0, 3, 2, 1, 4)
    return grid.reshape(row_tiles * _ROWS, group_tiles * _GROUPS)[:rows, :groups]
