"""Rows read from the peers' memory: the same rows, no collective, no stale address.

CPU devices share their memory, too. So here a stand-in for the GPU's kernel, which has
tests of its own, reads by the addresses that each device was given.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo_collectives import counts
from jax.sharding import AxisType, Mesh, PartitionSpec
from mesh_cases import (
    abstract_mesh,
    column_ids,
    mesh,
    packed_rows,
    ranked_tables,
    sharded,
    stack24,
)
from small_stack import random_hidden, random_ids

from engram_jax import (
    EngramSharding,
    ParallelEngramEmbedding,
    gpu_driver,
    kernels,
    mxfp8,
    peer_read,
    shards,
)
from engram_jax.exchange import fetch_rows
from engram_jax.host_storage import PinnedHostTable
from engram_jax.mesh_stack import state_shardings

LAYOUT = stack24().layout
WIDTH = 32


@pytest.fixture(scope="module")
def tables():
    return ranked_tables(LAYOUT)


def read_by_address(records, ids, width, columns, rows_per_shard):
    """Packed rows of ids [T, L, C], from wherever the records say."""
    rows = np.zeros((*ids.shape, width + width // 32), np.uint8)
    for token, layer, column in np.ndindex(ids.shape):
        number, last = int(ids[token, layer, column]), len(records[layer]) - 2
        shard = column // columns if columns else number // rows_per_shard[layer]
        entry = records[layer][min(shard, last)].copy()
        weight, scale, ends, _ = entry.view("<u8").tolist()
        start, end = ends & 0xFFFFFFFF, ends >> 32
        if start <= number < end:
            local = number - start
            row = ctypes.string_at(weight + local * width, width)
            row += ctypes.string_at(scale + local * (width // 32), width // 32)
            rows[token, layer, column] = np.frombuffer(row, np.uint8)
    return rows


def fetch_by_address(records, ids, width, columns, rows_per_shard):
    """Packed rows inside jit, from wherever the records say."""

    def read(records, ids):
        known = [np.asarray(record) for record in records]
        return read_by_address(known, np.asarray(ids), width, columns, rows_per_shard)

    shape = jax.ShapeDtypeStruct((*ids.shape, width + width // 32), jnp.uint8)
    operands = (list(records), ids)
    return jax.pure_callback(read, shape, *operands, vmap_method="sequential")


@pytest.fixture
def peers(monkeypatch):
    """Lets CPU devices pass for GPUs; counts the calls of the stand-in."""
    calls = []

    def peer_lookup(weights, scales, records, ids, *, columns, rows_per_shard, packed):
        calls.append(ids.shape)
        width = weights[0].shape[1]
        assert {x.dtype.itemsize for x in (*weights, *scales)} == {1}
        rows = fetch_by_address(records, ids, width, columns, rows_per_shard)
        return rows if packed else mxfp8.dequantize(*mxfp8.unpack(rows))

    monkeypatch.setattr(kernels, "peer_lookup", peer_lookup)
    monkeypatch.setattr("engram_jax.sharding.mesh_reason", lambda mesh, **_: None)
    return calls


# --- The same rows --------------------------------------------------------------------

MESHES = [
    ((2, 1), {}),
    ((5, 1), {}),
    ((1, 4), {}),
    ((2, 3), {}),
    ((2, 3), {"spread": False}),
    ((1, 3), {"spread": False}),
    ((2, 2), {"sequence_parallel": True}),
    ((4, 1), {"sequence_parallel": True}),
    ((2, 2), {"sequence_parallel": True, "shard_projection": True}),
    ((4, 1), {"cut": "rows"}),
    ((2, 2), {"cut": "rows", "sequence_parallel": True}),
    ((2, 2), {"cut": "rows", "row_format": "bfloat16"}),
    ((2, 2), {"row_format": "bfloat16"}),
    ((1, 1), {}),
]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "choices"),
    MESHES,
    ids=["-".join(map(str, (*s, *c.values()))) for s, c in MESHES],
)
def test_rows_are_exact_and_no_collective_runs(peers, tables, shape, choices, kind):
    """13 tokens divide by no mesh but 1; each device reads its own tokens' only."""
    devices = mesh(shape[0], shape[1], kind)
    sharding = EngramSharding.on(devices, LAYOUT, exchange="peer_read", **choices)
    parts = sharded(tables, sharding)
    graph, state = nnx.split(nnx.List(parts))
    padded = sharding.pad_tokens(13)
    ids = jnp.pad(
        column_ids(LAYOUT, 13), ((0, padded - 13), (0, 0), (0, 0)), constant_values=-1
    )
    wanted = packed_rows(tables, ids)
    ids = jax.device_put(ids, sharding.named(sharding.replica))

    @jax.jit
    def fetch(state, ids):
        return fetch_rows(sharding, list(nnx.merge(graph, state)), ids)

    compiled = fetch.lower(state, ids).compile()
    rows = compiled(state, ids)
    if sharding.row_format == "bfloat16":
        wanted = np.asarray(mxfp8.dequantize(*mxfp8.unpack(jnp.asarray(wanted))))
        rows = np.asarray(rows).view(np.uint16)
        wanted = wanted.view(np.uint16)
    np.testing.assert_array_equal(np.asarray(rows), wanted)
    assert not counts(compiled.as_text())
    own = padded // sharding.size(sharding.row_token_axes)
    assert peers == ([(own, *ids.shape[1:])] if sharding.table_axes else [])


def test_a_table_alone_reads_its_own_layer(peers, tables):
    """Layer 1 of a model, and tokens that divide by nothing."""
    sharding = EngramSharding.on(mesh(1, 3), LAYOUT, exchange="peer_read")
    table = tables[1].shard(sharding, 1)
    ids = column_ids(LAYOUT, 7)
    np.testing.assert_array_equal(
        table.lookup_packed(ids[:, 1]), packed_rows(tables, ids)[:, 1]
    )
    assert table(ids[:, 1]).dtype == jnp.bfloat16
    assert len(peers) == 2


def test_a_stack_s_outputs_and_gradients_are_those_of_a_collective(peers):
    def run(exchange):
        sharding = EngramSharding.on(mesh(2, 2), LAYOUT, exchange=exchange)
        graph, state = nnx.split(stack24().shard(sharding))

        def loss(hidden):
            stack = nnx.merge(graph, state)
            ids = random_ids(8)
            batch = stack.batch(ids, np.arange(8), np.array([0, 8]))
            return (stack(3, stack(1, hidden, batch), batch) ** 2).sum()

        # Before the tables go: a reader may still be at its peers'.
        return jax.block_until_ready(
            jax.jit(jax.value_and_grad(loss))(random_hidden(8))
        )

    chex.assert_trees_all_equal(run("peer_read"), run("all_to_all"))
    assert peers


def test_copies_of_a_table_are_read_within_their_replica(peers, tables):
    """A mesh with an axis that Engram knows nothing of, and one of size 1."""
    devices = np.array(jax.devices()).reshape(2, 2, 1, 2)
    four = Mesh(devices, ("pp", "dp", "ep", "tp"))
    sharding = EngramSharding.on(four, LAYOUT, exchange="peer_read")
    table = tables[0].shard(sharding, 0)
    at = {
        s.device: s.data.unsafe_buffer_pointer()
        for s in table.weight.addressable_shards
    }
    known = np.asarray(table.addresses[...])
    assert known.shape == (8, 5, 8)
    for number, device in enumerate(devices.flat):
        record = next(
            s for s in table.addresses.addressable_shards if s.device == device
        )
        np.testing.assert_array_equal(np.asarray(record.data)[0], known[number])
        pp, dp, _, tp = np.argwhere(devices == device)[0]
        # Shard number = tp_rank * dp_size + dp_rank.
        holders = [devices[pp, shard % 2, 0, shard // 2] for shard in range(4)]
        wanted = [at[d] for d in (*holders, devices[pp, dp, 0, tp])]
        found = known[number, :, :2].copy().view("<u8")[:, 0]
        assert found.tolist() == wanted


# --- The choice -----------------------------------------------------------------------


def test_few_tokens_read_peers_and_many_take_the_collective(peers, tables, monkeypatch):
    monkeypatch.setattr(shards, "PEER_READ_UP_TO", 4)
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT)
    assert (sharding.exchange, sharding.peer_read_up_to) == ("all_to_all", 4)
    assert "up to 4 tokens" in dict(sharding.reasons)["peer_read"]
    forms = [sharding.exchange_for(tokens) for tokens in (0, 7, 8, 9)]
    assert forms == ["peer_read", "peer_read", "peer_read", "all_to_all"]
    parts = sharded(tables, sharding)
    for tokens, calls in ((8, 1), (10, 1)):
        ids = column_ids(LAYOUT, tokens)
        np.testing.assert_array_equal(
            fetch_rows(sharding, parts, ids), packed_rows(tables, ids)
        )
        assert len(peers) == calls
    # All tensor ranks read all tokens of their replica.
    tensor = EngramSharding.on(mesh(2, 1), LAYOUT)
    assert tensor.exchange_for(4) == "peer_read"
    assert tensor.exchange_for(5) == "all_gather"
    asked = EngramSharding.on(mesh(1, 2), LAYOUT, exchange="all_to_all")
    assert asked.exchange_for(1) == "all_to_all"
    assert not asked.reads_peers


def test_tables_that_peers_cannot_read_take_the_collective(peers, tables, caplog):
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT)
    floats = ranked_tables(LAYOUT, floats=True)
    ids = column_ids(LAYOUT, 4)
    with caplog.at_level(logging.INFO, "engram_jax"):
        parts = sharded(floats, sharding)
    assert "rows come by all_to_all, not by peer_read (it is a float table)" in (
        caplog.text
    )
    wanted = np.stack([np.asarray(t(ids[:, i])) for i, t in enumerate(floats)], 1)
    np.testing.assert_array_equal(fetch_rows(sharding, parts, ids), wanted)
    assert not peers


def test_meshes_without_peers_take_the_collective():
    """Without the stand-in: this machine's devices are CPUs."""
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT)
    assert sharding.exchange_for(1) == "all_to_all"
    assert dict(sharding.reasons)["peer_read"] == "the device is a CPU, not a GPU"
    alone = EngramSharding.on(mesh(1, 1), LAYOUT)
    assert dict(alone.reasons)["peer_read"] == "every device holds all rows"


@dataclasses.dataclass(frozen=True)
class Gpu:
    """No GPUs here: stands in for one, as far as a function asks it."""

    local_hardware_id: int | None
    process_index: int = 0
    compute_capability: str = "9.0"
    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def mesh_of(*devices) -> Any:
    """Stands in for a mesh of these."""
    return SimpleNamespace(devices=np.array(devices, dtype=object))


@pytest.mark.parametrize(
    ("changes", "reachable", "reason"),
    [
        ({}, True, None),
        ({"process_index": 1}, True, "belong to 2 processes"),
        ({"compute_capability": "8.0"}, True, "has compute capability 8.0"),
        ({}, False, "cannot reach the memory of"),
        ({"local_hardware_id": None}, False, None),  # on paper
    ],
)
def test_a_mesh_says_why_its_peers_cannot_be_read(
    monkeypatch, library_errors, changes, reachable, reason
):
    monkeypatch.setattr(gpu_driver, "can_reach", lambda one, other: reachable)
    found = peer_read.mesh_reason(
        mesh_of(Gpu(0), dataclasses.replace(Gpu(1), **changes))
    )
    assert (found is None) if reason is None else (found and reason in found)


def test_processes_are_peers_only_if_asked_for_and_all_there(
    monkeypatch, library_errors
):
    two = mesh_of(Gpu(0), Gpu(0, process_index=1))
    assert "exchange='peer_read' asks" in str(peer_read.mesh_reason(two))
    reason = peer_read.mesh_reason(two, across_processes=True)
    assert "2 of 1 processes, and all must tell" in str(reason)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert peer_read.mesh_reason(two, across_processes=True) is None
    other = mesh_of(Gpu(0, process_index=1))
    assert "1 of 2 processes" in str(
        peer_read.mesh_reason(other, across_processes=True)
    )


# --- Refusals -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (lambda: mesh(1, 2), "cannot run on this mesh: the device is a CPU, not a GPU"),
        (lambda: abstract_mesh(1, 2), "the mesh is abstract, without devices"),
    ],
)
def test_peer_read_is_refused_where_it_cannot_run(where, message, library_errors):
    with pytest.raises(ValueError, match=message):
        EngramSharding.on(where(), LAYOUT, exchange="peer_read")


def test_tables_that_peers_cannot_read_are_refused_as_asked(peers, tables):
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT, exchange="peer_read")

    def refused(message, make):
        with pytest.raises(ValueError, match=message) as error:
            make()
        assert "layer index 0" in str(error.value)

    floats = ranked_tables(LAYOUT, floats=True)
    refused("it is a float table", lambda: floats[0].shard(sharding, 0))
    values, scale = tables[0].weight[...], tables[0].scale[...]
    pinned = ParallelEngramEmbedding.from_storage(PinnedHostTable(values, scale))
    refused("it lies in pinned_host memory", lambda: pinned.shard(sharding, 0))
    plain = ParallelEngramEmbedding(values, scale, backend="xla")
    refused("its backend is 'xla'", lambda: plain.shard(sharding, 0))
    refused(
        "it is being traced",
        lambda: jax.eval_shape(
            lambda v, s: ParallelEngramEmbedding(v, s, sharding=sharding).weight[...],
            values,
            scale,
        ),
    )


# --- Replaced tables ------------------------------------------------------------------


@pytest.mark.parametrize("part", ["weight", "scale"])
def test_a_replaced_table_is_refused_until_it_is_recorded(peers, tables, part):
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT, exchange="peer_read")
    parts = sharded(tables, sharding)
    ids = column_ids(LAYOUT, 4)
    variable = getattr(parts[1], part)
    old = variable[...]
    bits = jax.lax.bitcast_convert_type(old, jnp.uint8)
    new = jax.lax.bitcast_convert_type(bits ^ 1, old.dtype)
    variable[...] = jax.block_until_ready(new)
    with pytest.raises(
        ValueError, match="of layer index 1 does not lie where"
    ) as error:
        fetch_rows(sharding, parts, ids)
    assert "2 of 2 devices" in str(error.value)
    assert "record_addresses()" in str(error.value)
    fetch_rows(sharding, parts[:1], ids[:, :1], [0])  # the other is where it was
    parts[1].record_addresses()
    wanted = packed_rows(tables, ids)
    columns = slice(0, WIDTH) if part == "weight" else slice(WIDTH, None)
    wanted[:, 1][np.asarray(ids[:, 1]) >= 0, columns] ^= 1
    np.testing.assert_array_equal(fetch_rows(sharding, parts, ids), wanted)


def test_a_table_put_on_other_devices_is_refused(peers, tables):
    """Restored without its sharding: all of it on one device."""
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT, exchange="peer_read")
    table = tables[0].shard(sharding, 0)
    known = np.asarray(table.weight[...])
    for place in (jax.devices()[5], sharding.named(PartitionSpec())):
        table.weight.set_value(jax.device_put(known, place))
        with pytest.raises(ValueError, match="on 2 of 2 devices"):
            table.check_addresses()
        # Its addresses would be those of other rows.
        with pytest.raises(ValueError, match="layer index 0 lies as"):
            table.record_addresses()
    place = sharding.named(sharding.table)
    table.weight.set_value(jax.device_put(known, place))
    table.record_addresses()
    ids = column_ids(LAYOUT, 4)
    np.testing.assert_array_equal(
        table.lookup_packed(ids[:, 0]), packed_rows(tables, ids)[:, 0]
    )


def test_a_restored_state_is_refused(peers, tables):
    """Tables and addresses copied together, as from a saved state."""
    sharding = EngramSharding.on(mesh(2, 1), LAYOUT, exchange="peer_read")
    table = tables[0].shard(sharding, 0)
    graph, state = nnx.split(table)
    host = jax.tree.map(np.asarray, state)
    again = jax.tree.map(lambda x, y: jax.device_put(x.copy(), y.sharding), host, state)
    restored = nnx.merge(graph, again)
    table.check_addresses()
    with pytest.raises(ValueError, match="replaced, copied or restored"):
        restored.check_addresses()
    restored.record_addresses()
    restored.check_addresses()
    ids = column_ids(LAYOUT, 3)
    np.testing.assert_array_equal(
        restored.lookup_packed(ids[:, 0]), packed_rows(tables, ids)[:, 0]
    )


def test_addresses_are_laid_out_as_the_state_says(peers):
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT, exchange="peer_read")
    stack = stack24().shard(sharding)
    places = state_shardings(sharding, stack)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda x: x.sharding, nnx.state(stack)), places
    )
    again = jax.device_put(nnx.state(stack), places)  # nothing moves
    nnx.update(stack, again)
    for layer in stack.layers.values():
        layer.embedding.check_addresses()
    other = dataclasses.replace(sharding, exchange="all_gather")
    assert stack24().shard(other).layers[1].embedding.addresses is None
