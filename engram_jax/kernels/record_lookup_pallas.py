"""Packed rows of a table that is known by its address only, as a Mosaic GPU kernel.

The address is data, so that a program does not depend on where a table lies. Reading is
that of `lookup_pallas`: over PCIe a row of 256 values is 33 pieces of 8 bytes, and all
rows' pieces are in flight at once.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax

from . import lookup_pallas
from .lookup_pallas import Place, Sizes
from .mosaic_pallas import Predicate, Word, address, load


def record_bytes(width: int) -> int:
    """Count the bytes of a row of `width` values and their scales."""
    return width + width // lookup_pallas.BLOCK


def place_of(table: Word, row: Word, inside: Predicate, width: int) -> Place:
    """Give the place of a row of the table at an address."""
    values = table + row.widen() * record_bytes(width)
    return Place(values, values + width, inside)


def record_row(
    refs: Mapping[str, Any],
    row: Word,
    exists: Predicate,
    *,
    num_rows: int,
    width: int,
) -> Place:
    """Find an output row in a table whose rows are records of values and scales."""
    (id_,) = load(address(refs["ids"]) + row.widen() * 4, only_if=exists)
    (table,) = load(address(refs["table"]), width=64)
    inside = exists & id_.compare("ult", num_rows)  # a negative id is a large one
    return place_of(table, id_, inside, width)


@functools.partial(jax.jit, static_argnames=("num_rows", "width"))
def record_lookup_pallas(
    table: jax.Array, ids: jax.Array, *, num_rows: int, width: int
) -> jax.Array:
    """Read packed rows at an address; `record_lookup` says what.

    Args:
      table: Its address, uint32 [2].
      ids: int32, of any shape.
      num_rows: Rows of the table.
      width: Values of a row.

    Returns:
      uint8 [..., D + D/32].
    """
    sizes = Sizes(width, ids.size)
    if sizes.pieces(packed=True) >= 2**31:
        raise NotImplementedError(
            f"record_lookup: {ids.size} rows have more pieces than 32 bits can count"
        )
    rows = lookup_pallas.read_rows(
        "record_rows",
        functools.partial(record_row, num_rows=num_rows, width=width),
        {"ids": ids.reshape(-1), "table": table},
        sizes,
        packed=True,
    )
    return rows.reshape(*ids.shape, rows.shape[-1])
