"""Decoding on a mesh with one kernel that hashes and reads the peers' memory.

CPU devices share their memory. So a stand-in for the GPU's kernel, which has tests of
its own, hashes by the XLA form and reads by the addresses that each device was given.
"""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from mesh_cases import mesh, stack24
from small_stack import random_hidden, random_ids
from test_peer_read import fetch_by_address

from engram_jax import EngramSharding, kernels, mxfp8
from engram_jax.hash_state import compressed_or_dead
from engram_jax.kernels import wkv_pallas
from engram_jax.mesh_stack import advance_lookback as advance_windows
from engram_jax.mesh_stack import pad_replicas

LAYOUT = stack24().layout


@pytest.fixture
def calls(monkeypatch):
    """Lets CPU devices pass for GPUs; lists the stand-in's tokens, and whether a part.

    A token's rows come padded to a multiple of 8 tokens, the padding NaN. Windows' ids
    come with 1,000 added, and with a dead mask only where one was given.
    """
    found = []

    def ngram_rows(
        weights,
        scales,
        *,
        records,
        columns,
        rows_per_shard,
        first_token,
        num_tokens,
        advance_lookback,
        **batch,
    ):
        assert len(weights) == len(scales) == len(records)
        width, ids = weights[0].shape[1], batch["input_ids"]
        found.append((num_tokens, first_token is not None))
        hashes, windows = kernels.ngram_hash(**batch, backend="xla"), None
        if advance_lookback:
            windows, dead = advance_windows(stack24().hash_state, batch)
            masks = batch["dead_mask"], batch["lookback_dead_mask"]
            windows = windows + 1000, None if masks == (None, None) else dead
        alive = compressed_or_dead(ids, batch["dead_mask"], batch["token_map"]) >= 0
        alive &= jnp.arange(len(ids)) < batch["query_start_loc"][-1]
        first = 0 if first_token is None else first_token[0]
        room = (0, max(num_tokens, len(ids)))
        wanted = (
            lax.dynamic_slice_in_dim(
                jnp.pad(x, (room, *[(0, 0)] * (x.ndim - 1)), constant_values=fill),
                first,
                num_tokens,
            )
            for x, fill in ((hashes, -1), (alive, False))
        )
        hashes, alive = wanted

        packed = fetch_by_address(records, hashes, width, columns, rows_per_shard)
        rows = mxfp8.dequantize(*mxfp8.unpack(packed))
        padding = (0, -num_tokens % 8), (0, 0)
        ordered = (
            wkv_pallas.permute_columns(rows[:, layer].reshape(num_tokens, -1))
            for layer in range(len(weights))
        )
        return (
            tuple(
                kernels.OrderedRows(
                    jnp.pad(x, padding, constant_values=jnp.nan), num_tokens
                )
                for x in ordered
            ),
            alive,
            windows,
        )

    def peer_lookup(weights, scales, records, ids, *, packed, **cut):
        assert len(weights) == len(scales)
        assert packed
        found.append("peer_lookup")
        width = weights[0].shape[1]
        return fetch_by_address(records, ids, width, **cut)

    monkeypatch.setattr(kernels, "ngram_rows", ngram_rows)
    monkeypatch.setattr(kernels, "peer_lookup", peer_lookup)
    monkeypatch.setattr(kernels, "reads_at_once", lambda *_, **__: True)
    monkeypatch.setattr("engram_jax.sharding.mesh_reason", lambda mesh, **_: None)
    return found


def run(sharding, batch, tokens, *, by_replica=False):
    """Outputs of both layers, mask, hashes and slot cache."""
    graph, state = nnx.split(stack24().shard(sharding))
    static = {name: batch[name] for name in ("block_size",) if name in batch}
    arrays = {name: x for name, x in batch.items() if name not in static}

    @jax.jit
    def step(state, hidden, arrays):
        stack = nnx.merge(graph, state)
        make = stack.replica_batch if by_replica else stack.batch
        made: Any = make(**arrays, **static)
        made, cache = made if "slot_cache" in arrays else (made, None)
        outputs = stack(1, hidden, made), stack(3, hidden, made)
        return outputs, made.token_mask, made.hash_ids, cache

    # Before the tables go: a reader may still be at its peers'.
    return jax.block_until_ready(step(state, random_hidden(tokens), arrays))


def ragged(tokens: int, *, seed: int = 2) -> dict[str, Any]:
    """Three requests, padding after them, dead tokens and lookback windows."""
    rng = np.random.default_rng(seed)
    starts = np.array([0, tokens // 3, tokens // 2, max(1, tokens - 2)])
    return {
        "input_ids": random_ids(tokens, seed),
        "positions": np.arange(tokens) + 3,
        "query_start_loc": starts,
        "dead_mask": rng.random(tokens) < 0.2,
        "lookback_token_ids": rng.integers(-1, 120, (3, 3)),
    }


MESHES = [
    # tp, dp, choices, tokens, the kernel's tokens on each device, whether a part
    ((2, 1), {"shard_projection": False}, 13, 13, False),
    ((2, 1), {"shard_projection": True}, 13, 13, False),
    ((5, 1), {"shard_projection": False}, 8, 8, False),
    ((4, 1), {"sequence_parallel": True}, 13, 4, True),
    ((1, 4), {}, 13, 4, True),
    ((2, 3), {"shard_projection": False}, 13, 5, True),
    ((2, 2), {"sequence_parallel": True}, 16, 4, True),
    ((2, 2), {"sequence_parallel": True, "shard_projection": True}, 13, 8, True),
    ((2, 1), {"sequence_parallel": True, "shard_projection": True}, 13, 14, False),
    ((2, 2), {"cut": "rows", "shard_projection": False}, 13, 7, True),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "choices", "tokens", "own", "part"),
    MESHES,
    ids=["-".join(map(str, (*m[0], *m[1]))) for m in MESHES],
)
def test_outputs_are_those_of_a_collective(
    calls, shape, choices, tokens, own, part, kind
):
    """Of a ragged batch: padding, dead tokens, and tokens that divide by nothing."""
    devices = mesh(shape[0], shape[1], kind)
    batch = ragged(tokens)
    cut = choices.get("cut", "heads")
    collective = "all_gather" if cut == "heads" else "all_reduce"
    wanted = run(
        EngramSharding.on(devices, LAYOUT, exchange=collective, **choices),
        batch,
        tokens,
    )
    assert not calls
    sharding = EngramSharding.on(devices, LAYOUT, exchange="peer_read", **choices)
    found = run(sharding, batch, tokens)
    assert calls == [(own, part)]
    chex.assert_trees_all_equal(found, wanted)


def test_a_slot_cache_is_written_once(calls):
    devices, tokens = mesh(2, 1), 8
    batch = ragged(tokens) | {
        "slot_cache": stack24().init_slot_cache(64),
        "slot_mapping": np.arange(tokens) + 8,
        "block_table": np.array([[0, 1], [2, 3], [4, 5]]),
        "block_size": 8,
    }
    wanted = run(
        EngramSharding.on(devices, LAYOUT, exchange="all_gather"), batch, tokens
    )
    found = run(EngramSharding.on(devices, LAYOUT, exchange="peer_read"), batch, tokens)
    assert calls == [(8, False)]
    chex.assert_trees_all_equal(found, wanted)
    assert (np.asarray(found[-1]) >= 0).any()


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    ("shape", "exchange"),
    [((2, 1), "peer_read"), ((1, 2), "peer_read"), ((2, 2), "all_gather")],
)
def test_windows_move_with_the_batch_on_every_device(calls, shape, exchange, masks):
    """By replica, too; where the kernel gives them those are taken."""
    sharding = EngramSharding.on(mesh(*shape), LAYOUT, exchange=exchange)
    stack, state = stack24().shard(sharding), stack24().hash_state
    added = 1000 if exchange == "peer_read" else 0
    batches = [ragged(6, seed=seed) for seed in range(shape[1])]
    wanted = []
    for batch in batches:
        if not masks:
            del batch["dead_mask"]
        windows, dead = advance_windows(state, state.operands(**batch))
        wanted.append((windows + added, dead))
    place: Any = {"advance_lookback": True}
    moved = jax.jit(lambda **batch: stack.batch(**batch, **place)[1])(**batches[0])
    chex.assert_trees_all_equal(moved, wanted[0])
    assert moved[0].sharding.is_fully_replicated
    padded = pad_replicas(batches)
    moved = jax.jit(lambda **batch: stack.replica_batch(**batch, **place)[1])(**padded)
    chex.assert_trees_all_equal(moved, jax.tree.map(lambda *x: jnp.stack(x), *wanted))
    assert len(calls) == (2 if added else 0)
    with pytest.raises(ValueError, match="lookback_token_ids is missing"):
        stack.replica_batch(**pad_replicas([None] * shape[1]), **place)


@pytest.mark.parametrize(
    ("shape", "choices", "slot", "expected"),
    [
        ((1, 4), {}, 5, [(5, False)]),
        ((2, 2), {"shard_projection": False}, 5, [(5, False)]),
        ((2, 2), {"sequence_parallel": True}, 6, [(3, True)]),
        ((2, 1), {"sequence_parallel": True}, 5, [(3, True)]),
        # A device would have tokens of two replicas.
        ((2, 2), {"sequence_parallel": True}, 5, ["peer_lookup"]),
    ],
)
def test_each_replica_hashes_and_reads_its_own(calls, shape, choices, slot, expected):
    """One replica has no tokens, and takes part."""
    devices, replicas = mesh(*shape), shape[1]
    parts: list[Any] = [ragged(slot, seed=7 + i) for i in range(replicas)]
    if replicas > 1:
        parts[1] = None
    batch = pad_replicas(parts, slot=slot)
    results = []
    for exchange in ("all_gather", "peer_read"):
        sharding = EngramSharding.on(devices, LAYOUT, exchange=exchange, **choices)
        found = run(sharding, batch, slot * replicas, by_replica=True)
        results.append(found)
    assert calls == expected
    chex.assert_trees_all_equal(*results)


def test_other_steps_read_rows_by_themselves(calls, monkeypatch):
    """Parts that run in another way, or more tokens than peers are read for."""
    sharding = EngramSharding.on(mesh(2, 1), LAYOUT)
    stack = stack24().shard(sharding)
    assert stack._tables_for_one_kernel()
    stack.layers[3].backend = "xla"
    assert not stack._tables_for_one_kernel()
    stack.layers[3].backend = None
    stack.layers[3].dequantize_projection()
    assert not stack._tables_for_one_kernel()
    monkeypatch.setattr(kernels, "reads_at_once", lambda *_, **__: False)
    whole = stack24().shard(
        EngramSharding.on(mesh(2, 1), LAYOUT, exchange="all_gather")
    )
    whole.batch(random_ids(4), np.arange(4), [0, 4])
    assert not calls


def test_a_replaced_table_is_refused(calls):
    sharding = EngramSharding.on(mesh(2, 1), LAYOUT, exchange="peer_read")
    stack = stack24().shard(sharding)
    stack.batch(random_ids(4), np.arange(4), [0, 4])
    assert calls == [(4, False)]
    variable = stack.layers[3].embedding.weight
    variable[...] = jax.block_until_ready(jnp.copy(variable[...]))
    with pytest.raises(ValueError, match="of layer index 1 does not lie where"):
        stack.batch(random_ids(4), np.arange(4), [0, 4])
