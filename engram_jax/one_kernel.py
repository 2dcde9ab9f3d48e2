"""Which tables the kernel that hashes may read, too, and how it takes them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .embedding import ParallelEngramEmbedding
from .hash_state import NgramHashState
from .host_storage import PinnedHostTable
from .host_table import RecordTable
from .layer import Engram


def tables_for_one_kernel(
    layers: Sequence[Engram], hash_state: NgramHashState, *, whole: bool
) -> list[ParallelEngramEmbedding]:
    """Give the tables of all layers, if one kernel may hash and read their rows.

    Args:
      layers: In the order of the layout.
      hash_state: Whose hashes address the tables.
      whole: Whether the tables are not cut over a mesh. Tables in host memory are read
        only then.

    Returns:
      The tables, all of one kind; none where some other way must be taken.
    """
    tables = [layer.embedding for layer in layers]
    parts = [*tables, *layers, hash_state]
    if any(part.backend != hash_state.backend for part in parts) or any(
        layer.wkv_scale is None for layer in layers
    ):
        return []
    for kind in (RecordTable, PinnedHostTable) if whole else ():
        storages = [x.storage for x in tables if isinstance(x.storage, kind)]
        if len(storages) == len(tables):
            return tables if all(x.reads_on_device for x in storages) else []
    return [] if any(table.scale is None for table in tables) else tables


def operands_for_one_kernel(
    tables: Sequence[ParallelEngramEmbedding],
) -> dict[str, Any] | None:
    """Give whole tables as `kernels.ngram_rows` takes them.

    Args:
      tables: What `tables_for_one_kernel` gave.

    Returns:
      Arguments of it; None where there are no tables.
    """
    records = [x.storage for x in tables if isinstance(x.storage, RecordTable)]
    if records:
        shapes = [(x.num_rows, x.head_dim) for x in records]
        return {
            "weights": [jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes],
            "scales": (),
            "addresses": [x.device_address() for x in records],
        }
    # Arrays in device memory, or in pinned host memory.
    arrays: list[Any] = [x if x.storage is None else x.storage for x in tables]
    if not arrays:
        return None
    return {
        "weights": [x.weight[...] for x in arrays],
        "scales": [x.scale[...] for x in arrays],
    }
