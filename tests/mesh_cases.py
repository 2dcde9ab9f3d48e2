"""Stacks, meshes and tables whose every byte tells where it came from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from small_stack import make_stack

import engram_jax
from engram_jax.sharding import EngramSharding


def mesh(tp: int, dp: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """Makes a mesh of the first tp * dp CPU devices."""
    devices = jax.devices()[: tp * dp]
    return jax.make_mesh((tp, dp), ("tp", "dp"), (kind,) * 2, devices=devices)


def abstract_mesh(tp: int, dp: int = 1) -> AbstractMesh:
    """Makes a mesh without devices, of any size."""
    return AbstractMesh((tp, dp), ("tp", "dp"), (AxisType.Auto,) * 2)


@functools.cache
def stack24() -> engram_jax.EngramStack:
    """Makes a stack of two layers with V4.1's 24 columns, on one device."""
    return make_stack(n_heads=8, vocab_base=20, num_embeddings=(2000, 5000))


def ranked_rows(rows: int, width: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Makes values and scales that are functions of row and column: all differ."""
    place = np.arange(rows)[:, None] * width + np.arange(width)
    values = (place * 2654435761 >> 7) % 120 | (place & 1) << 7
    scale = 118 + np.arange(rows)[:, None] % 9
    return values.astype(np.uint8), np.repeat(scale, width // 32, 1).astype(np.uint8)


def ranked_tables(layout: engram_jax.EngramLayout, *, floats: bool = False):
    """Makes a ranked table for each layer, on one device."""
    tables = []
    for rows in layout.num_rows:
        values, scale = ranked_rows(rows)
        if floats:
            # Negative zeros, too: a sum of shards must not turn them into +0.
            known = values.view(jnp.float8_e4m3fn).astype(np.float32)
            known[:, 0] = -0.0
            table = engram_jax.ParallelEngramEmbedding(jnp.asarray(known))
        else:
            table = engram_jax.ParallelEngramEmbedding(
                jnp.asarray(values).view(jnp.float8_e4m3fn), jnp.asarray(scale)
            )
        tables.append(table)
    return tables


def column_ids(layout: engram_jax.EngramLayout, tokens: int, seed: int = 0):
    """Makes ids [T, L, C] within their columns, each column's ends, and some -1."""
    rng = np.random.default_rng(seed)
    primes = layout.primes.reshape(layout.offsets.shape)
    ids = layout.offsets + rng.integers(0, primes, (tokens, *primes.shape))
    if tokens > 2:
        ids[0], ids[1] = layout.offsets, layout.offsets + primes - 1
    ids[rng.random(ids.shape) < 0.1] = -1
    return jnp.asarray(ids, jnp.int32)


def packed_rows(tables, ids) -> np.ndarray:
    """Reads rows [T, L, C, P] on one device."""
    rows = [
        table.lookup_packed(ids[:, layer].reshape(-1)).reshape(*ids[:, layer].shape, -1)
        for layer, table in enumerate(tables)
    ]
    return np.stack([np.asarray(part) for part in rows], 1)


def sharded(tables, sharding: EngramSharding):
    """Puts the tables on the mesh."""
    return [table.shard(sharding, layer) for layer, table in enumerate(tables)]
