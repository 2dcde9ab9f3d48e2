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
from collections.abc import Callable, Mapping, Sequence
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
    pick,
    store,
    thread_index,
)

INTERPRET_REASON = "it reads memory per thread, which the interpreter cannot do"

BLOCK = 32  # values that share a scale
_NAN_VALUE, _NAN_SCALE = 0x7F, 255  # bytes that stand for NaN
_PIECE = 8  # values, or bytes of a packed row, that a thread moves at a time
# Pieces that a thread reads before it uses the first. On an H200, rows of 256: one is
# enough for a few rows, which are better spread over the whole card; 98,304 rows take
# 26.7 us with one, 23.3 with two, 23.8 with four; packed 21.6, 17.1 and 15.7 us.
_MANY_ROWS, _IN_FLIGHT, _IN_FLIGHT_PACKED = 4096, 2, 4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Say how many rows come out, and how wide they are.

    Attributes:
      width: Values of a row, D.
      rows: Rows of the output.
    """

    width: int
    rows: int

    @property
    def scales(self) -> int:
        """Count the scales of a row."""
        return self.width // BLOCK

    def out_type(self, packed: bool) -> jax.ShapeDtypeStruct:
        """Give the type of the output: [rows, D] bfloat16, or D + D/32 bytes."""
        if packed:
            return jax.ShapeDtypeStruct((self.rows, self.width + self.scales), "uint8")
        return jax.ShapeDtypeStruct((self.rows, self.width), jnp.bfloat16)

    def pieces(self, packed: bool) -> int:
        """Count the pieces of the output, which threads share out."""
        if not packed:
            return self.rows * self.width // _PIECE
        unit = math.gcd(_PIECE, self.scales)
        return self.rows * (self.width + self.scales) // unit


@dataclasses.dataclass(frozen=True)
class Place:
    """Say where an output row's bytes lie.

    Attributes:
      values: Address of its first value.
      scales: Address of its first scale.
      inside: Whether there is such a row; else no memory is touched, and it is zeros.
      is_nan: Whether the row is NaN although no memory is touched for it; None: never.
    """

    values: Word
    scales: Word
    inside: Predicate
    is_nan: Predicate | None = None

    @classmethod
    def of(
        cls, weight: Word, scale: Word, row: Word, width: int, inside: Predicate
    ) -> "Place":
        """Give the place of a row of a table, by the addresses of its parts."""
        at = row.widen()
        return cls(weight + at * width, scale + at * (width // BLOCK), inside)

    def or_nan(self, word: Word, nan: Word) -> Word:
        """Give the word that was read, or `nan` for a row that is NaN."""
        return word if self.is_nan is None else self.is_nan.select(nan, word)


def by_layer(**arrays: Sequence[jax.Array]) -> dict[str, jax.Array]:
    """Name the operands of each layer: "weight 0", "weight 1", "scale 0", .."""
    return {
        f"{name} {layer}": array
        for name, layers in arrays.items()
        for layer, array in enumerate(layers)
    }


Locate = Callable[[Word, Predicate], Place]
"""Finds the place of an output row, by its number and whether it exists."""


def unsupported_reason(
    weights: Sequence[jax.Array],
    ids: jax.Array,
    *,
    columns: int | None = None,
    interpret: bool = False,
) -> str | None:
    """Say why `lookup_pallas` cannot take these operands, or give None."""
    if interpret:
        return INTERPRET_REASON
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        return f"tables differ in their rows' width: {sorted(widths)}"
    (width,) = widths
    if width % BLOCK:
        return f"rows have {width} values, not a multiple of {BLOCK}"
    rows = ids.size if columns is None else math.prod(ids.shape[:2]) * columns
    if rows * width // _PIECE >= 2**31:
        return f"{rows} rows have more pieces than 32 bits can count"
    if ids.size >= 2**31:
        return f"{ids.size} ids are more than 32 bits can count"
    return None


def own_row(
    refs: Mapping[str, Any],
    layer: Word,
    row: Word,
    exists: Predicate,
    *,
    rows_in_tables: Sequence[int],
    width: int,
) -> Place:
    """Find a row of a layer's table in this GPU's memory.

    Args:
      refs: The operands' references by name: "weight 0" and "scale 0" are layer 0's.
      layer: The layer's index.
      row: The row's number in the array; one outside reads as zeros.
      exists: Whether a row is asked for.
      rows_in_tables: How many rows each layer's array has.
      width: Values of a row.

    Returns:
      The place.
    """
    numbers = range(len(rows_in_tables))
    weight, scale = (
        pick(layer, [address(refs[f"{name} {number}"]) for number in numbers])
        for name in ("weight", "scale")
    )
    rows = pick(layer, [Word.of(rows) for rows in rows_in_tables])
    inside = exists & row.compare("ult", rows)
    return Place.of(weight, scale, row, width, inside)


def local_row(
    refs: Mapping[str, Any],
    row: Word,
    exists: Predicate,
    *,
    n_hash_cols: int,
    rows_in_tables: Sequence[int],
    width: int,
    columns: int | None = None,
) -> Place:
    """Find an output row in the tables that this GPU has, one of each layer.

    Args:
      refs: The operands' references by name: "ids", "bounds", and each layer's parts.
      row: The output row's number.
      exists: Whether there is such a row.
      n_hash_cols: Columns of the ids.
      rows_in_tables: How many rows each layer's array has.
      width: Values of a row.
      columns: How many columns are read, from the one on that bounds' third number
        names; those beyond the ids' have no row. None: all.

    Returns:
      The place.
    """
    per_layer = n_hash_cols if columns is None else columns
    layer = row // per_layer % len(rows_in_tables)
    bounds = address(refs["bounds"])
    if columns is None:
        start, end = load(bounds + layer.widen() * 8, 2)
    else:  # three words are no access of their own
        parts = [load(bounds + layer.widen() * 12 + 4 * part) for part in range(3)]
        (start,), (end,), (first,) = parts
        column = first + row % columns
        exists = exists & column.compare("ult", n_hash_cols)
        row = row // columns * n_hash_cols + column
    (id_,) = load(address(refs["ids"]) + row.widen() * 4, only_if=exists)
    answered = exists & id_.compare("sge", start) & id_.compare("slt", end)
    return own_row(
        refs,
        layer,
        id_ - start,
        answered,
        rows_in_tables=rows_in_tables,  # whatever the bounds say
        width=width,
    )


def dequantize(locate: Locate, out: Word, pieces: Sequence[Word], sizes: Sizes) -> None:
    """Write pieces of the output in bfloat16.

    Args:
      locate: Finds a row's bytes.
      out: Address of the output.
      pieces: Numbers of the pieces that this thread writes.
      sizes: Of the output.
    """
    per_row = sizes.width // _PIECE
    todo = []
    for piece in pieces:
        exists = piece.compare("ult", sizes.rows * per_row)
        row, part = piece // per_row, piece % per_row
        todo.append((piece, part, locate(row, exists), exists))
    # All reads are issued before the first result is used.
    read = []
    for _, part, place, _ in todo:
        block = part // (BLOCK // _PIECE)
        words = load(place.values + part.widen() * _PIECE, 2, only_if=place.inside)
        scale = load(place.scales + block.widen(), width=8, only_if=place.inside)
        read.append((words, *scale))
    for (piece, _, place, exists), (words, byte) in zip(todo, read, strict=True):
        # Outside the window all bytes are 0, and 0 * 2**-127 is the zero wanted.
        scale = e8m0_pair(place.or_nan(byte, Word.of(_NAN_SCALE)))
        out_words = [pair for word in words for pair in decode_e4m3(word, scale)]
        store(out + piece.widen() * (2 * _PIECE), out_words, only_if=exists)


def copy_packed(
    locate: Locate, out: Word, pieces: Sequence[Word], sizes: Sizes
) -> None:
    """Write pieces of the output as the bytes that are stored.

    Args:
      locate: Finds a row's bytes.
      out: Address of the output.
      pieces: Numbers of the pieces that this thread writes.
      sizes: Of the output.
    """
    # Values and scales both start at a multiple of `unit` in every row.
    unit = math.gcd(_PIECE, sizes.scales)
    value_pieces, per_row = sizes.width // unit, (sizes.width + sizes.scales) // unit
    todo = []
    for piece in pieces:
        exists = piece.compare("ult", sizes.rows * per_row)
        row, part = piece // per_row, piece % per_row
        place = locate(row, exists)
        values = place.values + part.widen() * unit
        scales = place.scales + (part - value_pieces).widen() * unit
        is_value = part.compare("ult", value_pieces)
        todo.append((piece, is_value, is_value.select(values, scales), place, exists))
    read = [
        load(where, width=8 * unit, only_if=place.inside)
        for _, _, where, place, _ in todo
    ]
    for (piece, is_value, _, place, exists), (word,) in zip(todo, read, strict=True):
        nan_value, nan_scale = (
            Word.of(int.from_bytes([byte] * (word.bits // 8)), word.bits)
            for byte in (_NAN_VALUE, _NAN_SCALE)
        )
        word_out = place.or_nan(word, is_value.select(nan_value, nan_scale))
        store(out + piece.widen() * unit, [word_out], width=8 * unit, only_if=exists)


@functools.partial(
    jax.jit, static_argnames=("packed", "columns", "interpret", "in_flight")
)
def lookup_pallas(
    weights: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    ids: jax.Array,
    bounds: jax.Array,
    *,
    packed: bool,
    columns: int | None = None,
    interpret: bool = False,
    in_flight: int | None = None,
) -> jax.Array:
    """Read rows of one table a layer by id; `kernels.lookup_layers` says what.

    Args:
      weights: e4m3 or uint8 [R, D] of each layer; device or pinned host memory.
      scales: uint8 [R, D/32].
      ids: int32 [T, L, C].
      bounds: Id of each table's row 0, and one past the last id that it answers for,
        int32 [L, 2]; given `columns`, also the first of them, [L, 3].
      packed: Give the stored bytes instead of numbers.
      columns: How many columns of ids to read, where they lie; None: all.
      interpret: Must be False; see `INTERPRET_REASON`.
      in_flight: Pieces that a thread reads before it uses the first.

    Returns:
      bfloat16 [T, L, C, D]; packed, uint8 [T, L, C, D + D/32]; C of the columns read.
    """
    reason = unsupported_reason(weights, ids, columns=columns, interpret=interpret)
    if reason is not None:
        raise NotImplementedError(f"lookup_pallas: {reason}")
    shape = (*ids.shape[:2], ids.shape[2] if columns is None else columns)
    sizes = Sizes(weights[0].shape[1], math.prod(shape))
    locate = functools.partial(
        local_row,
        n_hash_cols=ids.shape[2],
        rows_in_tables=[weight.shape[0] for weight in weights],
        width=sizes.width,
        columns=columns,
    )
    operands = {"ids": ids.reshape(-1), "bounds": bounds}
    operands |= by_layer(weight=weights, scale=scales)
    rows = read_rows(
        "lookup_rows", locate, operands, sizes, packed=packed, in_flight=in_flight
    )
    return rows.reshape(*shape, rows.shape[-1])


def read_rows(
    name: str,
    locate: Callable[..., Place],
    operands: Mapping[str, jax.Array],
    sizes: Sizes,
    *,
    packed: bool,
    in_flight: int | None = None,
) -> jax.Array:
    """Launch a kernel that writes the rows which `locate` finds.

    Args:
      name: The kernel's name, for profiles.
      locate: Finds a row's bytes: (refs, row, exists) -> `Place`, with refs the
        operands by name.
      operands: What it reads, by name.
      sizes: Of the output.
      packed: Give the stored bytes instead of numbers.
      in_flight: Pieces that a thread reads before it uses the first.

    Returns:
      bfloat16 [n, D]; packed, uint8 [n, D + D/32].
    """
    out_type, pieces = sizes.out_type(packed), sizes.pieces(packed)
    if pieces == 0:
        return jnp.zeros(out_type.shape, out_type.dtype)
    if in_flight is None:
        in_flight = _IN_FLIGHT_PACKED if packed else _IN_FLIGHT
        in_flight = in_flight if sizes.rows >= _MANY_ROWS else 1

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType(),) * (len(operands) + 1), plgpu.Layout.WG_SPLAT),
    )
    def move(ctx, *arguments):
        del ctx
        *buffers, out, cta = arguments
        refs = dict(zip(operands, buffers, strict=True))
        first = Word(cta.registers.item()) * (WARPGROUP * in_flight) + thread_index()
        mine = [first + WARPGROUP * i for i in range(in_flight)]
        find = functools.partial(locate, refs)
        (copy_packed if packed else dequantize)(find, address(out), mine, sizes)

    def kernel(*buffers):
        move(*buffers, lax.axis_index("cta"))

    kernel.__name__ = name
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(-(-pieces // (WARPGROUP * in_flight)),),
        grid_names=("cta",),
    )(*operands.values())
