"""Rows of an embedding table by id: dequantised, or as packed bytes."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Int32, Integer, UInt8

from engram_jax import mxfp8

from .dispatch import Backend, resolve_backend
from .ids import OUTSIDE, narrow_ids

RowBound = int | np.integer | Integer[Array, ""]

_FLOAT_TABLES = (jnp.bfloat16, jnp.float16, jnp.float32)


def _check(weight, scale) -> None:
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {weight.shape}; it must be [rows, D]")
    if scale is None:
        if weight.dtype not in _FLOAT_TABLES:
            raise TypeError(
                f"weight has dtype {weight.dtype} and no scale; a table without scales "
                "must be bfloat16, float16 or float32"
            )
        return
    if weight.dtype not in (jnp.float8_e4m3fn, jnp.uint8):
        raise TypeError(
            f"weight has dtype {weight.dtype}; a table with scales must be "
            "float8_e4m3fn (or its bytes, uint8)"
        )
    if scale.dtype not in (jnp.uint8, jnp.float8_e8m0fnu):
        raise TypeError(
            f"scale has dtype {scale.dtype}; it must be uint8 or float8_e8m0fnu"
        )
    rows, width = weight.shape
    if width % mxfp8.BLOCK or scale.shape != (rows, width // mxfp8.BLOCK):
        raise ValueError(
            f"scale has shape {scale.shape} for a weight of shape {weight.shape}; it "
            f"must be [rows, D/{mxfp8.BLOCK}], and D a multiple of {mxfp8.BLOCK}"
        )


def _row_bound(bound):
    """A bound as int32: one beyond is the nearest, since no id lies between."""
    limits = jnp.iinfo(jnp.int32)
    if isinstance(bound, int | np.integer | np.ndarray):
        # Before JAX sees it: without x64, JAX would cut 2^32 off to 0.
        return jnp.asarray(np.clip(bound, limits.min, limits.max), jnp.int32)
    bound = jnp.asarray(bound)
    if not jnp.issubdtype(bound.dtype, jnp.integer):
        raise TypeError(f"row_start or row_end has dtype {bound.dtype}; both are ids")
    if jnp.iinfo(bound.dtype).max > limits.max:
        bound = jnp.clip(bound, max(limits.min, jnp.iinfo(bound.dtype).min), limits.max)
    return bound.astype(jnp.int32)


def _bounds(weights, row_start, row_end):
    """The ids that each table answers for, int32 [L, 2]; no `row_end`: all its rows."""
    row_start = _row_bound(row_start)
    # A window never reaches past the rows that exist, nor past int32: the padding rows
    # of a last shard may, and no id names them.
    last = jnp.iinfo(jnp.int32).max
    rows = np.array([min(weight.shape[0], last) for weight in weights], np.int32)
    end = jnp.minimum(row_start, last - rows) + rows
    if row_end is not None:
        end = jnp.minimum(_row_bound(row_end), end)
    return jnp.stack([jnp.broadcast_to(row_start, end.shape), end], axis=1)


def _take(table, ids, row_start, row_end):
    """The rows as stored, and which ids were inside; others hold row 0's bytes."""
    inside = (ids >= row_start) & (ids < row_end)
    local = jnp.where(inside, ids - row_start, 0)
    return table.at[local].get(mode="promise_in_bounds"), inside[..., None]


def _lookup_xla(weight, scale, ids, row_start, row_end):
    if weight.shape[0] == 0:
        dtype = jnp.bfloat16 if scale is not None else weight.dtype
        return jnp.zeros((*ids.shape, weight.shape[1]), dtype)
    rows, inside = _take(weight, ids, row_start, row_end)
    if scale is not None:
        # Bytes of the rows are cast, never the table's: a cast of the whole table
        # would copy it.
        scales, _ = _take(scale, ids, row_start, row_end)
        rows = mxfp8.dequantize(rows, mxfp8.scale_bytes(scales))
    return jnp.where(inside, rows, jnp.zeros((), rows.dtype))


def _lookup_packed_xla(weight, scale, ids, row_start, row_end):
    if weight.shape[0] == 0:
        return jnp.zeros((*ids.shape, weight.shape[1] + scale.shape[1]), jnp.uint8)
    values, inside = _take(weight, ids, row_start, row_end)
    scales, _ = _take(scale, ids, row_start, row_end)
    return jnp.where(
        inside, mxfp8.pack(values, mxfp8.scale_bytes(scales)), jnp.uint8(0)
    )


def read_columns(
    ids: Integer[Array, "*batch C"], first: RowBound, columns: int
) -> Integer[Array, "*batch c"]:
    """Take some neighbouring columns of ids, of which a last few may not exist.

    Args:
        ids: rows of each token, any leading axes.
        first: the first column to take. May be traced.
        columns: how many.

    Returns:
        Their ids; -1 for columns beyond C.

    Example:
        >>> read_columns(jnp.array([[5, 6, 7]]), 2, 2)
        Array([[ 7, -1]], dtype=int32)
    """
    # As many more columns as are taken: a slice's start is clamped otherwise.
    missing = [(0, 0)] * (ids.ndim - 1) + [(0, columns)]
    ids = jnp.pad(ids, missing, constant_values=OUTSIDE)
    return lax.dynamic_slice_in_dim(ids, first, columns, axis=-1)


def _run(packed, weights, scales, ids, bounds, backend, columns=None):
    """Rows of ids [T, L, C], by one launch where the kernel runs."""
    operation = "lookup_packed" if packed else "lookup"

    def unsupported_reason(interpret):
        if any(scale is None for scale in scales):
            return "the table is not FP8"
        from . import lookup_pallas

        return lookup_pallas.unsupported_reason(
            weights, ids, columns=columns, interpret=interpret
        )

    chosen = resolve_backend(operation, backend, unsupported_reason)
    weights, scales = zip(
        *(
            # An FP8 table is a constant.
            (weight, scale) if scale is None else lax.stop_gradient((weight, scale))
            for weight, scale in zip(weights, scales, strict=True)
        ),
        strict=True,
    )
    if chosen == "xla":
        form = _lookup_packed_xla if packed else _lookup_xla
        ids_of = [ids[:, layer] for layer in range(len(weights))]
        if columns is not None:
            ids_of = [
                read_columns(ids, first, columns)
                for ids, first in zip(ids_of, bounds[:, 2], strict=True)
            ]
        bounds = _bounds(weights, bounds[:, 0], bounds[:, 1])  # the kernel looks itself
        rows = [
            form(weight, scale, ids, *bound)
            for weight, scale, ids, bound in zip(
                weights, scales, ids_of, bounds, strict=True
            )
        ]
        return jnp.stack(rows, axis=1)
    from . import lookup_pallas  # here, since importing Pallas takes a second

    kernel = functools.partial(
        lookup_pallas.lookup_pallas,
        packed=packed,
        columns=columns,
        interpret=chosen == "pallas_interpret",
    )
    scales = tuple(mxfp8.scale_bytes(scale) for scale in scales)
    return jax.custom_batching.sequential_vmap(kernel)(weights, scales, ids, bounds)


def _one_table(packed, weight, scale, ids, row_start, row_end, backend):
    _check(weight, scale)
    bounds = _bounds([weight], row_start, row_end)
    ids = narrow_ids(ids)
    given = ids.reshape(-1, 1, 1)
    rows = _run(packed, (weight,), (scale,), given, bounds, backend)
    return rows.reshape(*ids.shape, rows.shape[-1])


def lookup(
    weight: Float8e4m3fn[Array, "R D"] | UInt8[Array, "R D"] | Float[Array, "R D"],
    scale: UInt8[Array, "R G"] | Array | None,
    ids: Integer[Array, "..."],
    *,
    row_start: RowBound = 0,
    row_end: RowBound | None = None,
    backend: Backend | None = None,
) -> BFloat16[Array, "... D"] | Float[Array, "... D"]:
    """Read rows of a table by id, dequantised.

    `out[i] = weight[ids[i] - row_start] * 2^(scale - 127)` in float32, rounded once to
    bfloat16. An id outside [row_start, row_end) reads as zeros and touches no memory.

    Reads D + D/32 bytes and writes 2 D for each id; never casts the whole table.

    Gradient: an FP8 table and its scales are constants. Without scales the table is a
    float array, rows come out in its dtype, and its gradient is a scatter-add.

    Args:
        weight: [R, D], float8_e4m3fn values or their bytes; or, with `scale=None`,
            bfloat16, float16 or float32.
        scale: [R, D/32] E8M0 bytes (uint8, or float8_e8m0fnu), or None.
        ids: integers of any shape.
        row_start: the id of the table's row 0: a shard's first row. May be traced.
        row_end: one past the last id that this table answers for; None means
            `row_start + R`. May be traced.
        backend: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        bfloat16 [..., D]; of a float table, its dtype.

    Raises:
        TypeError: a dtype is none of the above.
        ValueError: shapes do not fit each other.
        NotImplementedError: an explicit backend cannot run here.

    Example:
        >>> weight = jnp.ones((4, 32), jnp.float8_e4m3fn)
        >>> scale = jnp.full((4, 1), 128, jnp.uint8)
        >>> lookup(weight, scale, jnp.array([3, -1]))[:, 0]
        Array([2, 0], dtype=bfloat16)
    """
    return _one_table(False, weight, scale, ids, row_start, row_end, backend)


def lookup_packed(
    weight: Float8e4m3fn[Array, "R D"] | UInt8[Array, "R D"],
    scale: UInt8[Array, "R G"] | Array,
    ids: Integer[Array, "..."],
    *,
    row_start: RowBound = 0,
    row_end: RowBound | None = None,
    backend: Backend | None = None,
) -> UInt8[Array, "... P"]:
    """Read rows of a table by id as they are stored: D value bytes, D/32 scale bytes.

    The form that exchanges and the projection take; 264 bytes a row for D = 256. An id
    outside [row_start, row_end) reads as zero bytes.

    Gradient: none, the table is a constant.

    Args:
        weight: [R, D], float8_e4m3fn values or their bytes.
        scale: [R, D/32] E8M0 bytes (uint8, or float8_e8m0fnu).
        ids: integers of any shape.
        row_start: the id of the table's row 0. May be traced.
        row_end: one past the last id answered for; None means `row_start + R`.
        backend: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        uint8 [..., D + D/32].

    Raises:
        TypeError: a dtype is none of the above, or the table has no scales.
        ValueError: shapes do not fit each other.
        NotImplementedError: an explicit backend cannot run here.

    Example:
        >>> weight = jnp.ones((4, 32), jnp.float8_e4m3fn)
        >>> scale = jnp.full((4, 1), 128, jnp.uint8)
        >>> lookup_packed(weight, scale, jnp.array([3, -1]))[:, -2:]
        Array([[ 56, 128],
               [  0,   0]], dtype=uint8)
    """
    if scale is None:
        raise TypeError("lookup_packed reads FP8 rows with scales; scale is None")
    return _one_table(True, weight, scale, ids, row_start, row_end, backend)


def lookup_layers(
    weights: Sequence[
        Float8e4m3fn[Array, "_ D"] | UInt8[Array, "_ D"] | Float[Array, "_ D"]
    ],
    scales: Sequence[UInt8[Array, "_ G"] | Array | None],
    ids: Int32[Array, "T L C"],
    bounds: Int32[Array, "L 2"] | Int32[Array, "L 3"],
    *,
    columns: int | None = None,
    packed: bool = False,
    backend: Backend | None = None,
) -> Array:
    """Read rows of one table a layer: `lookup` or `lookup_packed` of each.

    `out[:, l] = lookup(weights[l], scales[l], ids[:, l])` with the bounds of layer l,
    which on a GPU one launch writes where they belong: rows of two layers that are
    put together afterwards take longer to copy than to read. So do columns of ids that
    are cut out before: given `columns`, it reads them where they lie.

    Gradient: as `lookup`.

    Args:
        weights: [R, D] of each layer, all FP8 or all float.
        scales: their scales, or None for each.
        ids: rows of each token.
        bounds: for each layer `row_start` and `row_end`; given `columns`, also the
            first column that is read.
        columns: how many columns are read; those beyond C read as zeros. None: all.
        packed: give the stored bytes instead of numbers.
        backend: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        bfloat16 [T, L, C, D], or of float tables their dtype; packed, uint8
        [T, L, C, D + D/32]; C of the columns read.

    Raises:
        TypeError: a dtype is none that `lookup` takes.
        ValueError: shapes do not fit each other.
        NotImplementedError: an explicit backend cannot run here.

    Example:
        >>> weights = [jnp.ones((4, 32)), jnp.zeros((4, 32))]
        >>> ids, bounds = jnp.ones((5, 2, 3), jnp.int32), jnp.array([[0, 4], [0, 4]])
        >>> lookup_layers(weights, [None, None], ids, bounds)[0, :, 0, 0]
        Array([1., 0.], dtype=float32)
    """
    layers = len(weights)
    wanted = (layers, 2 if columns is None else 3)
    if ids.ndim != 3 or ids.shape[1] != layers or bounds.shape != wanted:
        raise ValueError(
            f"ids have shape {ids.shape} and bounds {bounds.shape}; for {layers} "
            f"tables they must be [T, {layers}, C] and {wanted}"
        )
    for weight, scale in zip(weights, scales, strict=True):
        _check(weight, scale)
    ids, bounds = narrow_ids(ids), narrow_ids(bounds, "bounds")
    return _run(packed, weights, scales, ids, bounds, backend, columns)
