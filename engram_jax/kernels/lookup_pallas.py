"""Rows of an FP8 table by id, as a Mosaic GPU kernel.

Every thread moves pieces of 8 values: it reads the row's id, 8 bytes of the row and
their scale byte, and writes 16 bytes of bfloat16. Pieces are numbered through the whole
output, so that neighbouring threads write neighbouring bytes whatever D is. A packed
row is cut into pieces of at most 8 bytes that are copied as they are.

Why inline Mosaic code: Pallas has no per-thread gather. Its nearest form, one bulk copy
(TMA) per row, took 25.5 to 27.7 us for 98,304 rows of 256 on an H200 against 22.9 us
for per-thread reads, and cannot read a table in pinned host memory, which these can.
The interpreter does not run such code; the bit arithmetic is tested apart from it.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from .mosaic_pallas import (
    WARPGROUP,
    Predicate,
    Word,
    address,
    decode_e4m3,
    e8m0_pair,
    load,
    store,
    thread_index,
)

INTERPRET_REASON = "it reads memory per thread, which the interpreter cannot do"

_BLOCK = 32  # values that share a scale
_PIECE = 8  # values, or bytes of a packed row, that a thread moves at a time
# Pieces that a thread reads before it uses the first. On an H200, rows of 256: one is
# enough for a few rows, which are better spread over the whole card; 98,304 rows take
# 26.7 us with one, 23.3 with two, 23.8 with four; packed 21.6, 17.1 and 15.7 us.
_MANY_ROWS, _IN_FLIGHT, _IN_FLIGHT_PACKED = 4096, 2, 4


@dataclasses.dataclass(frozen=True)
class _Sizes:
    rows_in_table: int
    width: int  # D
    rows: int  # n

    @property
    def scales(self) -> int:
        return self.width // _BLOCK


def unsupported_reason(
    weight: jax.Array,
    scale: jax.Array,
    ids: jax.Array,
    row_start: jax.Array | int = 0,
    row_end: jax.Array | int | None = None,
    *,
    packed: bool = False,
    interpret: bool = False,
) -> str | None:
    """Say why `lookup_pallas` cannot take these operands, or give None."""
    del scale, row_start, row_end, packed
    if interpret:
        return INTERPRET_REASON
    if weight.shape[1] % _BLOCK:
        return f"rows have {weight.shape[1]} values, not a multiple of {_BLOCK}"
    if ids.size * weight.shape[1] // _PIECE >= 2**31:
        return f"{ids.size} rows have more pieces than 32 bits can count"
    return None


def _local_row(
    refs: Mapping[str, Any], row: Word, exists: Predicate, sizes: _Sizes
) -> tuple[Word, Predicate]:
    """Give an output row's row in the table (64 bits), and whether there is one."""
    (id_,) = load(address(refs["ids"]) + row.widen() * 4, only_if=exists)
    (start,), (end,) = load(address(refs["start"])), load(address(refs["end"]))
    local = id_ - start
    inside = (
        exists
        & id_.compare("sge", start)
        & id_.compare("slt", end)
        & local.compare("ult", sizes.rows_in_table)  # whatever the window says
    )
    return local.widen(), inside


def _dequantize(refs: Mapping[str, Any], pieces: list[Word], sizes: _Sizes) -> None:
    per_row = sizes.width // _PIECE
    todo = []
    for piece in pieces:
        exists = piece.compare("ult", sizes.rows * per_row)
        row, part = piece // per_row, piece % per_row
        local, inside = _local_row(refs, row, exists, sizes)
        todo.append((piece, part, local, exists, inside))
    # All reads are issued before the first result is used.
    read = []
    for _, part, local, _, inside in todo:
        values = address(refs["weight"]) + local * sizes.width
        scales = address(refs["scale"]) + local * sizes.scales
        block = part // (_BLOCK // _PIECE)
        words = load(values + part.widen() * _PIECE, 2, only_if=inside)
        read.append((words, *load(scales + block.widen(), width=8, only_if=inside)))
    for (piece, _, _, exists, _), (words, byte) in zip(todo, read, strict=True):
        # Outside the window all bytes are 0, and 0 * 2**-127 is the zero wanted.
        scale = e8m0_pair(byte)
        out = [pair for word in words for pair in decode_e4m3(word, scale)]
        where = address(refs["out"]) + piece.widen() * (2 * _PIECE)
        store(where, out, only_if=exists)


def _copy_packed(refs: Mapping[str, Any], pieces: list[Word], sizes: _Sizes) -> None:
    # Values and scales both start at a multiple of `unit` in every row.
    unit = math.gcd(_PIECE, sizes.scales)
    value_pieces, per_row = sizes.width // unit, (sizes.width + sizes.scales) // unit
    todo = []
    for piece in pieces:
        exists = piece.compare("ult", sizes.rows * per_row)
        row, part = piece // per_row, piece % per_row
        local, inside = _local_row(refs, row, exists, sizes)
        values = address(refs["weight"]) + local * sizes.width + part.widen() * unit
        scales = address(refs["scale"]) + local * sizes.scales
        scales += (part - value_pieces).widen() * unit
        is_value = part.compare("ult", value_pieces)
        todo.append((piece, is_value.select(values, scales), exists, inside))
    read = [load(where, width=8 * unit, only_if=ok) for _, where, _, ok in todo]
    for (piece, _, exists, _), words in zip(todo, read, strict=True):
        where = address(refs["out"]) + piece.widen() * unit
        store(where, words, width=8 * unit, only_if=exists)


def _pieces(sizes: _Sizes, packed: bool) -> int:
    if not packed:
        return sizes.rows * sizes.width // _PIECE
    unit = math.gcd(_PIECE, sizes.scales)
    return sizes.rows * (sizes.width + sizes.scales) // unit


@functools.partial(jax.jit, static_argnames=("packed", "interpret", "in_flight"))
def lookup_pallas(
    weight: jax.Array,
    scale: jax.Array,
    ids: jax.Array,
    row_start: jax.Array | int,
    row_end: jax.Array | int,
    *,
    packed: bool,
    interpret: bool = False,
    in_flight: int | None = None,
) -> jax.Array:
    """Read rows of a table by id; `kernels.lookup` and `lookup_packed` say what.

    Args:
      weight: e4m3 or uint8 [R, D]; device or pinned host memory.
      scale: uint8 [R, D/32].
      ids: int32 [n].
      row_start: Id of the table's row 0.
      row_end: One past the last id that is answered for.
      packed: Give the stored bytes instead of numbers.
      interpret: Must be False; see `INTERPRET_REASON`.
      in_flight: Pieces that a thread reads before it uses the first.

    Returns:
      bfloat16 [n, D]; packed, uint8 [n, D + D/32].
    """
    reason = unsupported_reason(weight, scale, ids, packed=packed, interpret=interpret)
    if reason is not None:
        raise NotImplementedError(f"lookup_pallas: {reason}")
    sizes = _Sizes(weight.shape[0], weight.shape[1], ids.shape[0])
    out_type = jax.ShapeDtypeStruct(
        (sizes.rows, sizes.width + sizes.scales if packed else sizes.width),
        jnp.uint8 if packed else jnp.bfloat16,
    )
    pieces = _pieces(sizes, packed)
    if pieces == 0:
        return jnp.zeros(out_type.shape, out_type.dtype)
    if in_flight is None:
        in_flight = _IN_FLIGHT_PACKED if packed else _IN_FLIGHT
        in_flight = in_flight if sizes.rows >= _MANY_ROWS else 1

    operands = {
        "weight": weight,
        "scale": scale,
        "ids": ids,
        "start": jnp.asarray(row_start, jnp.int32).reshape(1),
        "end": jnp.asarray(row_end, jnp.int32).reshape(1),
    }

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * (len(operands) + 1), plgpu.Layout.WG_SPLAT),
    )
    def move(ctx, *arguments):
        del ctx
        *buffers, cta = arguments
        refs = dict(zip([*operands, "out"], buffers, strict=True))
        first = Word(cta.registers.item()) * (WARPGROUP * in_flight) + thread_index()
        mine = [first + WARPGROUP * i for i in range(in_flight)]
        (_copy_packed if packed else _dequantize)(refs, mine, sizes)

    def lookup_rows(*buffers):
        move(*buffers, lax.axis_index("cta"))

    return plgpu.kernel(
        lookup_rows,
        out_type=out_type,
        grid=(-(-pieces // (WARPGROUP * in_flight)),),
        grid_names=("cta",),
    )(*operands.values())
