"""Kernels read 32-bit ids: of wider ones they would take the halves for ids."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_cases import column_ids, mesh, ranked_tables, sharded, stack24

from engram_jax import EngramSharding, kernels
from engram_jax.exchange import fetch_rows
from engram_jax.kernels import lookup_pallas, peer_lookup_pallas

WIDTH = 32


def ids_of(dtype) -> jax.Array:
    ids = jnp.arange(2 * 2 * 3).reshape(2, 2, 3).astype(dtype)
    return ids.at[0, 0, 0].set(2**32 + 5) if dtype == np.int64 else ids


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64])
@pytest.mark.parametrize("name", ["lookup_layers", "peer_lookup"])
def test_kernels_are_given_int32(monkeypatch, library_errors, dtype, name):
    """No GPU here: a stand-in for the launch looks at what it gets."""
    seen = []

    def launch(weights, scales, *operands, **_):
        ids = operands[-1] if name == "peer_lookup" else operands[0]
        seen.extend(x.dtype for x in operands if not isinstance(x, tuple))
        seen.append(ids.shape)
        return jnp.broadcast_to(ids[..., None].astype(jnp.uint8), (*ids.shape, 33))

    monkeypatch.setattr(lookup_pallas, "lookup_pallas", launch)
    monkeypatch.setattr(peer_lookup_pallas, "peer_lookup_pallas", launch)
    module = sys.modules["engram_jax.kernels.lookup"]
    monkeypatch.setattr(module, "resolve_backend", lambda *_: "pallas")
    weights = [jnp.zeros((9, WIDTH), jnp.uint8)] * 2
    scales = [jnp.zeros((9, 1), jnp.uint8)] * 2
    with jax.enable_x64(True):
        ids = ids_of(dtype)
        if name == "lookup_layers":
            bounds = jnp.array([[0, 9], [0, 9]])
            rows = kernels.lookup_layers(weights, scales, ids, bounds, packed=True)
            assert seen == [jnp.int32, jnp.int32, ids.shape]
        else:
            records = [jnp.zeros((2, 8), jnp.uint32)] * 2
            cut = {"columns": None, "rows_per_shard": (9, 9)}
            rows = kernels.peer_lookup(
                weights, scales, records, ids, packed=True, **cut
            )
            assert seen == [jnp.int32, ids.shape]
        # Beyond 32 bits: no row's id, and not that of its lower half.
        assert rows[0, 0, 0, 0] == (255 if dtype == np.int64 else 0)
        assert rows[1, 1, 2, 0] == 11


def test_padding_of_unsigned_ids_is_no_row(library_errors):
    """Pitfall: -1 of eight bits is 255, a row like any other."""
    layout = stack24().layout
    tables = ranked_tables(layout)
    sharding = EngramSharding.on(mesh(1, 2), layout)
    ids = np.clip(np.asarray(column_ids(layout, 3)), 0, 255)
    rows = fetch_rows(sharding, sharded(tables, sharding), jnp.asarray(ids, jnp.uint8))
    assert rows.shape[0] == 4
    assert not np.asarray(rows[3]).any()
