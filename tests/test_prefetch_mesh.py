"""Rows fetched ahead on a mesh against those that the mesh fetches itself."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import mesh_cases
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from prefetch_cases import mapped, random_batch, run_layers, same, with_storage
from small_stack import random_hidden, random_ids

from engram_jax.mesh_stack import pad_replicas
from engram_jax.prefetch import EngramPrefetch
from engram_jax.sharding import EngramSharding


@pytest.mark.parametrize(
    ("tp", "dp", "kind"),
    [(2, 1, AxisType.Auto), (2, 2, AxisType.Explicit), (1, 3, AxisType.Auto)],
)
def test_stacks_on_a_mesh(tmp_path, tp, dp, kind):
    """Pitfall: sharded tables, a token count that does not divide."""
    stack = with_storage(mesh_cases.stack24(), mapped(tmp_path))
    mesh = mesh_cases.mesh(tp, dp, kind)
    sharding = EngramSharding.on(mesh, stack.layout)
    sharded = stack.shard(sharding)
    tokens = 13
    arguments = random_batch(tokens, 4)
    hidden = random_hidden(tokens)

    @nnx.jit
    def direct(stack, hidden, arguments):
        return run_layers(stack, hidden, stack.batch(**arguments))

    @nnx.jit
    def step(stack, hidden, batch):
        return run_layers(stack, hidden, batch)

    arguments = {k: jnp.asarray(v) for k, v in arguments.items()}
    explicit = kind == AxisType.Explicit
    with (
        jax.set_mesh(mesh) if explicit else contextlib.nullcontext(),
        EngramPrefetch(sharded, threads=2) as prefetch,
    ):
        expected = direct(sharded, hidden, arguments)
        for _ in range(3):
            batch = prefetch.start(**arguments).result()
            same(step(sharded, hidden, batch), expected)
        with pytest.raises(NotImplementedError, match="mesh"):
            EngramPrefetch(sharded, unique=True)


def test_replica_batches_on_a_mesh(tmp_path):
    stack = with_storage(mesh_cases.stack24(), mapped(tmp_path))
    sharded = stack.shard(EngramSharding.on(mesh_cases.mesh(1, 2), stack.layout))
    one = {"input_ids": random_ids(5), "positions": np.arange(5)}
    batches: dict[str, Any] = pad_replicas(
        [one | {"query_start_loc": [0, 5]}, None], slot=6
    )
    hidden = random_hidden(12)
    expected = run_layers(sharded, hidden, sharded.replica_batch(**batches))
    with EngramPrefetch(sharded, threads=1) as prefetch:
        batch = prefetch.start(**batches).result()
        same(run_layers(sharded, hidden, batch), expected)


def test_device_tables_on_a_mesh_fetch_as_ever():
    stack = mesh_cases.stack24()
    sharded = stack.shard(EngramSharding.on(mesh_cases.mesh(2, 1), stack.layout))
    arguments = random_batch(6, 2)
    hidden = random_hidden(6)
    with EngramPrefetch(sharded, threads=1) as prefetch:
        batch = prefetch.start(**arguments).result()
        expected = run_layers(sharded, hidden, sharded.batch(**arguments))
        same(run_layers(sharded, hidden, batch), expected)
