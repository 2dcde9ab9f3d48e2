"""The projection of a token's rows to keys and value."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, UInt8

from engram_jax import mxfp8

from .dispatch import Backend, kernel_with_xla_gradient, resolve_backend

_MIN_ROWS = 16
_ROUNDED = (jnp.float16, jnp.float32)
"""Dtypes of a float table's rows that are rounded to bfloat16."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OrderedRows:
    """Rows whose columns lie as the GPU projection reads its weight.

    `ngram_rows` makes them, for `wkv`.

    Attributes:
        values: bfloat16 [T or more, C*D]; what lies beyond T is not used.
        tokens: T; outside of `shard_map`, that of each device.
    """

    # Not typed further: JAX builds pytrees of placeholders, too.
    values: Any
    tokens: int = dataclasses.field(metadata={"static": True})


def library_reason(tokens: int, *, expanded: bool = True) -> str | None:
    """Say why, at this T, the library's bfloat16 product is faster than the kernel.

    Args:
        tokens: T.
        expanded: whether a bfloat16 copy of the weight is there to be multiplied.

    Returns:
        The reason, or None where the FP8 kernel is the faster one.
    """
    from . import block_sizes

    if not block_sizes.wkv_prefers_library(tokens, expanded=expanded):
        return None
    return f"the library's bfloat16 product is faster for {tokens} tokens"


def _flat_rows(rows) -> Array:
    """Rows as bfloat16 [T, C*D], whichever form they came in."""
    if isinstance(rows, OrderedRows):
        from . import wkv_pallas

        return wkv_pallas.unpermute_columns(rows.values[: rows.tokens])
    if rows.dtype == jnp.uint8:
        rows = mxfp8.dequantize(*mxfp8.unpack(rows))
    # Not -1, which a batch of no rows leaves open.
    return rows.reshape(rows.shape[0], math.prod(rows.shape[1:]))


def _tile_scale(scale, rows: int):
    """Scales of 32x32 blocks as one per row and 32 columns."""
    return jnp.repeat(scale, mxfp8.BLOCK, axis=0)[:rows]


def dequantize_weight(
    weight: Float8e4m3fn[Array, "N K"], scale: UInt8[Array, "NB KB"]
) -> BFloat16[Array, "N K"]:
    """Decode a projection weight with one scale per 32x32 block.

    `out[n, k] = weight[n, k] * 2^(scale[n // 32, k // 32] - 127)`, exact but for
    overflow and results below 2^-126.

    Args:
        weight: e4m3 values, or their bytes.
        scale: E8M0 bytes [ceil(N/32), K/32].

    Returns:
        bfloat16 [N, K].

    Raises:
        ValueError: the shapes do not fit each other.

    Example:
        >>> weight = jnp.ones((64, 32), jnp.float8_e4m3fn)
        >>> scale = jnp.array([[127], [128]], jnp.uint8)
        >>> dequantize_weight(weight, scale)[::32, 0]
        Array([1, 2], dtype=bfloat16)
    """
    _check_weight(weight, scale)
    return mxfp8.dequantize(weight, _tile_scale(mxfp8.scale_bytes(scale), len(weight)))


def quantize_weight(
    weight: Float[Array, "N K"],
) -> tuple[Float8e4m3fn[Array, "N K"], UInt8[Array, "NB KB"]]:
    """Quantise a projection weight with one scale per 32x32 block.

    The scales follow `mxfp8.quantize`; the inverse of `dequantize_weight` for a weight
    that came from it, up to a common factor of value and scale.

    Args:
        weight: bfloat16 or float32 [N, K], K a multiple of 32.

    Returns:
        float8_e4m3fn [N, K] and E8M0 bytes [ceil(N/32), K/32].

    Raises:
        ValueError: K is not a multiple of 32.

    Example:
        >>> quantize_weight(jnp.ones((64, 32)))[1].tolist()
        [[119], [119]]
    """
    rows, width = weight.shape
    if width % mxfp8.BLOCK:
        raise ValueError(
            f"weight has shape {weight.shape}; its width must be a multiple of "
            f"{mxfp8.BLOCK}"
        )
    block = mxfp8.BLOCK
    padded = jnp.pad(weight, ((0, -rows % block), (0, 0)))
    blocks = padded.reshape(-1, block, width // block, block).swapaxes(1, 2)
    values, scale = mxfp8.quantize_blocks(
        blocks.reshape(*blocks.shape[:2], block * block)
    )
    values = values.reshape(blocks.shape).swapaxes(1, 2).reshape(padded.shape)
    return values[:rows], scale


def _product(rows, weight):
    """`rows @ weight.T` in bfloat16 with float32 accumulation, the same at every T.

    Below a few rows XLA's CPU product adds in another order, so that a token decoded
    alone would differ in the last bit from the same token in a prefill.
    """
    tokens = rows.shape[0]
    if tokens < _MIN_ROWS:
        rows = jnp.pad(rows, ((0, _MIN_ROWS - tokens), (0, 0)))
    dims = (((1,), (1,)), ((), ()))

    def accumulate_wide(rows, weight):
        product = lax.dot_general(
            rows, weight, dims, preferred_element_type=jnp.float32
        )
        return product.astype(jnp.bfloat16)

    def round_inside(rows, weight):
        # cuBLAS accumulates in float32 anyway; a float32 result in memory that another
        # kernel rounds takes a tenth longer.
        return lax.dot_general(rows, weight, dims, preferred_element_type=jnp.bfloat16)

    product = lax.platform_dependent(
        rows, weight, cuda=round_inside, default=accumulate_wide
    )
    return product[:tokens]


def _wkv_xla(rows, weight, scale):
    return _product(_flat_rows(rows), dequantize_weight(weight, scale))


def _check_weight(weight, scale) -> None:
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}; it must be [N, C*D]")
    if scale is None:
        if weight.dtype not in (jnp.bfloat16, jnp.float32):
            raise TypeError(
                f"weight has dtype {weight.dtype} and no scale; a weight without "
                "scales must be bfloat16 or float32"
            )
        return
    if weight.dtype not in (jnp.float8_e4m3fn, jnp.uint8):
        raise TypeError(
            f"weight has dtype {weight.dtype}; a weight with scales must be "
            "float8_e4m3fn (or its bytes, uint8)"
        )
    out_width, in_width = weight.shape
    wanted = (-(-out_width // mxfp8.BLOCK), in_width // mxfp8.BLOCK)
    if in_width % mxfp8.BLOCK or scale.shape != wanted:
        raise ValueError(
            f"scale has shape {scale.shape} for a weight of shape {weight.shape}; it "
            f"must be {wanted}, one per {mxfp8.BLOCK}x{mxfp8.BLOCK} block, and the "
            f"weight's width a multiple of {mxfp8.BLOCK}"
        )


def _check(rows, weight, scale, expanded) -> None:
    _check_weight(weight, scale)
    if expanded is not None and (
        expanded.shape != weight.shape or expanded.dtype != jnp.bfloat16
    ):
        raise ValueError(
            f"expanded has shape {expanded.shape} and dtype {expanded.dtype}; it must "
            f"be dequantize_weight(weight, scale), bfloat16 {weight.shape}"
        )
    if isinstance(rows, OrderedRows):
        rows = rows.values
    if rows.dtype == jnp.uint8:
        packed_width = mxfp8.BLOCK + 1
        if rows.ndim != 3 or rows.shape[2] % packed_width:
            raise ValueError(
                f"packed rows have shape {rows.shape}; they must be [T, C, D + D/32]"
            )
        width = rows.shape[1] * (rows.shape[2] // packed_width) * mxfp8.BLOCK
    elif rows.dtype in (jnp.bfloat16, *_ROUNDED):
        if rows.ndim not in (2, 3):
            raise ValueError(
                f"rows have shape {rows.shape}; they must be [T, C*D] or [T, C, D]"
            )
        width = rows.shape[1] * (rows.shape[2] if rows.ndim == 3 else 1)
    else:
        raise TypeError(
            f"rows have dtype {rows.dtype}; they must be bfloat16, float16, float32, "
            "or packed uint8"
        )
    if width != weight.shape[1]:
        raise ValueError(
            f"rows of shape {rows.shape} and dtype {rows.dtype} are {width} wide; "
            f"weight of shape {weight.shape} takes {weight.shape[1]}"
        )


def wkv(
    rows: BFloat16[Array, "T CD"]
    | BFloat16[Array, "T C D"]
    | UInt8[Array, "T C P"]
    | Float[Array, "T ..."]
    | OrderedRows,
    weight: Float8e4m3fn[Array, "N CD"] | UInt8[Array, "N CD"] | Float[Array, "N CD"],
    scale: UInt8[Array, "NB KB"] | Array | None,
    *,
    expanded: BFloat16[Array, "N CD"] | None = None,
    backend: Backend | None = None,
) -> BFloat16[Array, "T N"]:
    """Project a token's rows, concatenated, to M keys and one value of width E.

    `out = rows @ (weight * 2^(scale - 127)).T` over bfloat16 factors, which hold every
    e4m3 value and row exactly, accumulated in float32 and rounded once to bfloat16.
    N = (M + 1) * E.

    Cost: 2 T N C D operations; at small T the time is that of reading `weight` once.
    On a GPU the FP8 kernel runs up to the T at which the library's bfloat16 product
    becomes faster. That product multiplies `expanded`, or else a copy of the weight
    that each call makes.

    Gradient: with respect to float `rows`. An FP8 weight and packed rows are constants.
    Without scales the weight is a float array, cast to bfloat16 for the product, and is
    differentiated too.

    Args:
        rows: bfloat16 (or float16 or float32, rounded to bfloat16) [T, C*D] or
            [T, C, D], or packed uint8 [T, C, D + D/32] as `lookup_packed` gives them,
            or `OrderedRows`.
        weight: float8_e4m3fn [N, C*D] or its bytes; or bfloat16 or float32 with
            `scale=None`.
        scale: E8M0 bytes [ceil(N/32), C*D/32], one per 32x32 block, or None.
        expanded: `dequantize_weight(weight, scale)`, if the caller keeps it.
        backend: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        bfloat16 [T, N]: M keys of width E, then the value.

    Raises:
        TypeError: a dtype is none of the above.
        ValueError: shapes do not fit each other.
        NotImplementedError: an explicit backend cannot run here.

    Example:
        >>> weight = jnp.ones((64, 64), jnp.float8_e4m3fn)
        >>> scale = jnp.full((2, 2), 127, jnp.uint8)
        >>> wkv(jnp.ones((3, 2, 32), jnp.bfloat16), weight, scale)[0, 0]
        Array(64, dtype=bfloat16)
    """
    _check(rows, weight, scale, expanded)
    values: Any = rows.values if isinstance(rows, OrderedRows) else rows
    tokens = rows.tokens if isinstance(rows, OrderedRows) else values.shape[0]
    if values.dtype in _ROUNDED:
        rows = values = values.astype(jnp.bfloat16)

    def unsupported_reason(interpret):
        if scale is None:
            return "the weight is not FP8"
        if backend is None:
            reason = library_reason(tokens, expanded=expanded is not None)
            if reason is not None:
                return reason
        from . import wkv_pallas

        return wkv_pallas.unsupported_reason(values, weight, scale, interpret=interpret)

    chosen = resolve_backend("wkv", backend, unsupported_reason)
    if scale is None:
        return _product(_flat_rows(rows), weight.astype(jnp.bfloat16))
    weight, scale, expanded = lax.stop_gradient(
        (weight, mxfp8.scale_bytes(scale), expanded)
    )
    if chosen == "xla":
        if expanded is not None:
            return _product(_flat_rows(rows), expanded)
        return _wkv_xla(rows, weight, scale)
    from . import wkv_pallas  # here, since importing Pallas takes a second

    if isinstance(
        rows, OrderedRows
    ):  # of constant tables: there is nothing to differentiate
        kernel = functools.partial(wkv_pallas.wkv_permuted, tokens=tokens)
        return jax.custom_batching.sequential_vmap(kernel)(values, weight, scale)
    kernel = functools.partial(
        wkv_pallas.wkv_pallas, interpret=chosen == "pallas_interpret"
    )
    return kernel_with_xla_gradient(kernel, _wkv_xla)(values, weight, scale)
