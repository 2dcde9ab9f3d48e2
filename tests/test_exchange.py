"""Rows fetched over a mesh: the same as on one device, with the collectives we want."""

from __future__ import annotations

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo_collectives import bytes_received, collectives, counts, total_received
from jax.sharding import AxisType
from mesh_cases import (
    abstract_mesh,
    column_ids,
    mesh,
    packed_rows,
    ranked_tables,
    sharded,
    stack24,
)
from prefetch_cases import mapped
from tolerances import assert_within

from engram_jax import ParallelEngramEmbedding, kernels, mxfp8
from engram_jax.exchange import exchange_rows, fetch_rows
from engram_jax.host_storage import PinnedHostTable
from engram_jax.sharding import EngramSharding
from engram_jax.shards import Cut

LAYOUT = stack24().layout
COLUMNS = LAYOUT.n_hash_cols
PACKED = 32 + 1


@pytest.fixture(scope="module")
def tables():
    return ranked_tables(LAYOUT)


def compile_fetch(sharding, tables, ids):
    """Compiles a fetch of all layers' rows, for running and for its HLO."""
    parts = sharded(tables, sharding)
    graph, state = nnx.split(nnx.List(parts))

    @functools.partial(jax.jit, keep_unused=True)
    def fetch(state, ids):
        return fetch_rows(sharding, list(nnx.merge(graph, state)), ids)

    compiled = fetch.lower(state, ids).compile()
    place = jax.tree.leaves(compiled.input_shardings[0])[-1]
    return compiled(state, jax.device_put(ids, place)), compiled.as_text()


# --- Any number of shards -------------------------------------------------------------


@pytest.mark.parametrize("axis", ["tp", "dp"])
@pytest.mark.parametrize(
    "shards",
    [1, 2, 3, 5, 7, 8, 16, 24, pytest.param(25, id="25-more-than-columns"), 32],
)
def test_rows_are_exact_for_any_number_of_shards(tables, shards, axis):
    """Each shard is one lane of a vmap with the axis' name: any count on one CPU."""
    tp, dp = (shards, 1) if axis == "tp" else (1, shards)
    slot = 2  # tokens of each replica
    ids = column_ids(LAYOUT, slot * dp)
    sharding = EngramSharding.on(abstract_mesh(tp, dp), LAYOUT)
    assert sharding.shards.cut == ("heads" if shards <= COLUMNS else "rows")

    def rows_of(layer, shard):
        """The shard's own rows, as a device would hold them."""
        start, end = (
            int(a[layer, shard])
            for a in (sharding.shards.row_start, sharding.shards.row_end)
        )
        part = np.zeros((sharding.shards.rows_per_shard[layer], PACKED), np.uint8)
        values, scale = tables[layer].weight[...], tables[layer].scale[...]
        part[: end - start] = np.asarray(mxfp8.pack(values, scale))[start:end]
        return part

    parts = [
        np.stack([rows_of(layer, shard) for shard in range(shards)])
        for layer in range(LAYOUT.num_layers)
    ]

    def lane(parts, ids):
        def lookup(part, ids, bounds):
            start, end = bounds
            inside = (ids >= start) & (ids < end)
            return jnp.where(
                inside[..., None], part[jnp.where(inside, ids - start, 0)], 0
            ).astype(jnp.uint8)

        def lookups(ids, bounds, columns):
            if columns is not None:
                ids = kernels.read_columns(ids, bounds[0, 2], columns)
            rows = [lookup(p, ids[:, i], bounds[i, :2]) for i, p in enumerate(parts)]
            return jnp.stack(rows, 1)

        return exchange_rows(sharding, lookups, ids, [0, 1])

    # Tokens of each replica; over the tensor axis all have the same.
    given = ids.reshape(dp, slot, *ids.shape[1:]) if axis == "dp" else ids
    where = 0 if axis == "dp" else None
    got = jax.jit(jax.vmap(lane, (0, where), axis_name=axis))(parts, given)
    expected = packed_rows(tables, ids)
    if axis == "dp":
        np.testing.assert_array_equal(got.reshape(expected.shape), expected)
    else:
        for rank in range(shards):
            np.testing.assert_array_equal(got[rank], expected)


# --- Every exchange on real devices ---------------------------------------------------

A2A, AG, AR, RS = "all-to-all", "all-gather", "all-reduce", "reduce-scatter"
GATHERED = {"ids_exchange": "all_gather"}
EXCHANGES = [
    # tp, dp, choices, collectives expected
    ((1, 1), {}, {}),
    ((4, 1), {}, {AG: 1}),
    ((5, 1), {}, {AG: 1}),
    ((1, 4), {}, {A2A: 2}),
    ((1, 4), GATHERED, {AG: 1, A2A: 1}),
    ((1, 5), {}, {A2A: 2}),
    ((2, 2), {"exchange": "all_gather"}, {AG: 1, A2A: 1}),
    ((1, 4), {"exchange": "all_gather", "row_format": "bfloat16"}, {AG: 1, A2A: 1}),
    ((1, 4), {"exchange": "all_gather", "row_format": "bfloat16"} | GATHERED, {AG: 2}),
    ((2, 3), {}, {AG: 1, A2A: 2}),
    ((2, 3), GATHERED, {AG: 2, A2A: 1}),
    ((2, 3), {"spread": False}, {AG: 1}),
    ((1, 3), {"spread": False}, {}),
    ((2, 2), {"exchange": "all_gather"} | GATHERED, {AG: 2}),
    ((2, 2), {"sequence_parallel": True} | GATHERED, {AG: 1, A2A: 1}),
    ((2, 3), {"sequence_parallel": True}, {A2A: 2}),
    ((4, 1), {"sequence_parallel": True}, {A2A: 1}),
    ((2, 2), {"sequence_parallel": True, "exchange": "all_gather"}, {AG: 1, A2A: 1}),
    ((2, 2), {"sequence_parallel": True, "shard_projection": True}, {AG: 1, A2A: 2}),
    ((4, 1), {"cut": "rows"}, {AR: 1}),
    ((1, 4), {"cut": "rows"}, {AG: 1, RS: 1}),
    ((2, 2), {"cut": "rows"}, {AG: 1, RS: 1, AR: 1}),
    ((2, 2), {"cut": "rows", "exchange": "all_reduce"}, {AG: 1, AR: 1}),
    ((2, 2), {"cut": "rows", "sequence_parallel": True}, {AG: 1, RS: 1}),
    ((2, 2), {"cut": "rows", "row_format": "bfloat16"}, {AG: 1, RS: 1, AR: 1}),
]


@pytest.mark.parametrize(
    ("shape", "choices", "expected"),
    EXCHANGES,
    ids=["-".join(map(str, (*s, *c.values()))) for s, c, _ in EXCHANGES],
)
def test_exchanges_bring_exact_rows_by_the_collectives_they_name(
    tables, shape, choices, expected
):
    """Pitfall: odd shard counts, wide exchanges. 13 tokens divide by no mesh but 1."""
    sharding = EngramSharding.on(mesh(*shape), LAYOUT, **choices)
    ids = column_ids(LAYOUT, 13)
    rows, hlo = compile_fetch(sharding, tables, ids)
    assert rows.shape[0] == sharding.pad_tokens(13)
    wanted = packed_rows(tables, ids)
    got = np.asarray(rows)[:13]
    if sharding.row_format == "bfloat16":
        wanted = np.asarray(mxfp8.dequantize(*mxfp8.unpack(jnp.asarray(wanted))))
        got, wanted = got.view(np.uint16), wanted.view(np.uint16)
    np.testing.assert_array_equal(got, wanted)
    assert not np.asarray(rows[13:]).any()  # padding reads as zeros
    assert counts(hlo) == expected


@pytest.mark.parametrize("ids_exchange", ["all_gather", "all_to_all"])
def test_ids_of_no_row_of_their_column_read_as_zeros(tables, ids_exchange):
    """Pitfall: such an id is no place in the shard that holds its column either."""
    sharding = EngramSharding.on(mesh(1, 4), LAYOUT, ids_exchange=ids_exchange)
    ids = np.array(column_ids(LAYOUT, 8))
    outside = np.resize([-1, -(2**31), 2**31 - 1, LAYOUT.num_rows[0] * 8], 12)
    ids[:, 0, ::2] = outside
    rows, _ = compile_fetch(sharding, tables, jnp.asarray(ids))
    assert not np.asarray(rows)[:, 0, ::2].any()
    wanted = packed_rows(tables, column_ids(LAYOUT, 8))
    wanted[:, 0, ::2] = 0
    np.testing.assert_array_equal(rows, wanted)


def test_float_tables_keep_every_bit(tables):
    """A sum of row shards would turn -0 into +0."""
    floats = ranked_tables(LAYOUT, floats=True)
    ids = column_ids(LAYOUT, 8)
    wanted = np.stack([np.asarray(t(ids[:, i])) for i, t in enumerate(floats)], 1)
    assert np.signbit(wanted[..., 0]).any()
    cases: list[tuple[tuple[int, int], Cut]] = [
        ((1, 4), "rows"),
        ((2, 2), "rows"),
        ((2, 2), "heads"),
    ]
    for shape, cut in cases:
        sharding = EngramSharding.on(mesh(*shape), LAYOUT, cut=cut)
        rows, _ = compile_fetch(sharding, floats, ids)
        np.testing.assert_array_equal(
            np.asarray(rows).view(np.uint32), wanted.view(np.uint32)
        )


def test_packed_all_to_all_moves_264_bytes_a_row_and_about_half_of_bfloat16(tables):
    """The same tokens, with V4.1's row width in proportion: 33 bytes for 32 values."""
    ids = column_ids(LAYOUT, 16)

    def rows_received(**choices):
        sharding = EngramSharding.on(mesh(1, 4), LAYOUT, **choices)
        _, hlo = compile_fetch(sharding, tables, ids)
        *_, rows = collectives(hlo)
        return bytes_received(*rows), total_received(hlo)

    packed, everything = rows_received()
    # 4 tokens of this replica, 2 layers, 18 of 24 columns from the other three.
    assert packed == 4 * 2 * 18 * PACKED
    assert everything == packed + 4 * 2 * 18 * 4  # and the others' ids of 6 columns
    whole, everything_whole = rows_received(
        exchange="all_gather", row_format="bfloat16"
    )
    assert whole == 12 * 2 * 24 * 64  # all tokens' rows from the other three
    assert packed <= 0.53 * whole
    assert everything <= 0.53 * everything_whole
    same_form, _ = rows_received(exchange="all_to_all", row_format="bfloat16")
    assert same_form == 4 * 2 * 18 * 64
    assert packed <= 0.53 * same_form


def test_one_exchange_serves_all_layers(tables):
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT)
    one = counts(compile_fetch(sharding, tables, column_ids(LAYOUT, 8))[1])
    layer = [table.shard(sharding, 1) for table in tables[1:]]
    ids = column_ids(LAYOUT, 8)[:, 1:]
    alone = jax.jit(lambda ids: fetch_rows(sharding, layer, ids, [1]))
    np.testing.assert_array_equal(alone(ids), packed_rows(tables[1:], ids))
    assert counts(alone.lower(ids).compile().as_text()) == one


def test_batches_of_no_tokens_have_no_rows(tables):
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT)
    rows, _ = compile_fetch(sharding, tables, column_ids(LAYOUT, 0))
    assert rows.shape == (0, 2, COLUMNS, PACKED)


def test_a_replica_without_tokens_takes_part(tables):
    """Pitfall: its ids are all -1, and the others' rows come as ever."""
    ids = column_ids(LAYOUT, 8)
    ids = ids.at[2:4].set(-1)
    sharding = EngramSharding.on(mesh(1, 4), LAYOUT)
    rows, _ = compile_fetch(sharding, tables, ids)
    np.testing.assert_array_equal(rows, packed_rows(tables, ids))
    assert not np.asarray(rows[2:4]).any()


def test_embedding_reads_one_layer_on_a_mesh(tables):
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT)
    ids = column_ids(LAYOUT, 7)[:, 1]
    table = tables[1].shard(sharding, 1)
    np.testing.assert_array_equal(
        table.lookup_packed(ids), tables[1].lookup_packed(ids)
    )
    chex.assert_trees_all_equal(table(ids), tables[1](ids))
    with pytest.raises(ValueError, match=r"must be \[T, C\]"):
        table(ids[0])


@pytest.mark.parametrize("cut", ["heads", "rows"])
def test_tables_in_pinned_host_memory_are_cut_too(tables, cut):
    pinned = [
        ParallelEngramEmbedding.from_storage(
            PinnedHostTable(table.weight[...], table.scale[...])
        )
        for table in tables
    ]
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT, cut=cut)
    ids = column_ids(LAYOUT, 6)
    spread = sharded(pinned, sharding)
    assert spread[0].weight[...].sharding.memory_kind == "pinned_host"
    rows, _ = compile_fetch(sharding, pinned, ids)
    np.testing.assert_array_equal(np.asarray(rows)[:6], packed_rows(tables, ids))


def test_tables_in_files_are_read_by_id_however_ids_come(tables, tmp_path):
    """Pitfall: a device's shard has places, a whole file has ids."""
    make = mapped(tmp_path)
    files = [
        ParallelEngramEmbedding.from_storage(
            make(number, np.asarray(table.weight[...]), np.asarray(table.scale[...]))
        )
        for number, table in enumerate(tables)
    ]
    sharding = EngramSharding.on(mesh(1, 4), LAYOUT, ids_exchange="all_to_all")
    ids = column_ids(LAYOUT, 8)
    rows, _ = compile_fetch(sharding, files, ids)
    np.testing.assert_array_equal(rows, packed_rows(tables, ids))


# --- Gradients ------------------------------------------------------------------------

GRADIENTS = [
    ((1, 1), {}),
    ((2, 1), {}),
    ((1, 2), {"exchange": "all_gather"}),
    ((1, 4), {}),
    ((2, 2), GATHERED),
    ((2, 2), {"sequence_parallel": True}),
    ((2, 2), {"spread": False}),
    ((2, 2), {"cut": "rows"}),
    ((2, 2), {"cut": "rows", "exchange": "all_reduce"}),
    ((2, 4), {}),
    ((8, 1), {"cut": "rows"}),
    ((2, 4), {"cut": "rows", "sequence_parallel": True}),
]


@pytest.mark.parametrize(
    ("shape", "choices"),
    GRADIENTS,
    ids=["-".join(map(str, (*s, *c.values()))) for s, c in GRADIENTS],
)
def test_float_tables_get_one_device_s_gradient_once(shape, choices):
    """Pitfall: not once per replica, and no part of it is lost."""
    floats = ranked_tables(LAYOUT, floats=True)
    ids = column_ids(LAYOUT, 13)
    factor = jnp.asarray(
        np.random.default_rng(1).normal(size=(13, 2, COLUMNS, 32)), jnp.float32
    )

    def loss(state, read):
        return (jnp.square(read(state)) * factor).sum()

    def on_one_device(weights):
        rows = [
            jnp.where(ids[:, i, :, None] >= 0, w[ids[:, i]], 0)
            for i, w in enumerate(weights)
        ]
        return jnp.stack(rows, 1)

    weights = [t.weight[...] for t in floats]
    wanted = jax.jit(jax.grad(loss), static_argnums=1)(weights, on_one_device)
    sharding = EngramSharding.on(mesh(*shape), LAYOUT, **choices)
    graph, state = nnx.split(nnx.List(sharded(floats, sharding)))

    def on_mesh(state):
        return fetch_rows(sharding, list(nnx.merge(graph, state)), ids)[:13]

    got = jax.jit(jax.grad(loss), static_argnums=1)(state, on_mesh)
    got = jax.tree.leaves(got)
    for layer, (whole, cut) in enumerate(zip(wanted, got, strict=True)):
        rows = sharding.shards.rows_per_shard[layer]
        for shard in range(sharding.shards.num_shards):
            start = int(sharding.shards.row_start[layer, shard])
            end = int(sharding.shards.row_end[layer, shard])
            mine = np.asarray(cut[shard * rows : shard * rows + end - start])
            assert_within("gradient_float32", mine, np.asarray(whole[start:end]))
            rest = cut[shard * rows + end - start : (shard + 1) * rows]
            assert not np.asarray(rest).any()


# --- Kinds of meshes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "in_context"),
    list(itertools.product((AxisType.Auto, AxisType.Explicit), (0, 1))),
)
def test_auto_and_explicit_meshes_give_the_same_rows(tables, kind, in_context):
    devices = mesh(2, 2, kind)
    sharding = EngramSharding.on(devices, LAYOUT)
    ids = column_ids(LAYOUT, 13)
    parts = sharded(tables, sharding)
    fetch = jax.jit(lambda ids: fetch_rows(sharding, parts, ids))
    if in_context:
        with jax.set_mesh(devices):
            rows = fetch(ids)
    else:
        rows = fetch(ids)
    np.testing.assert_array_equal(np.asarray(rows)[:13], packed_rows(tables, ids))


def test_another_mesh_in_use_is_refused(tables):
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT)
    parts = sharded(tables, sharding)
    with (
        jax.set_mesh(mesh(4, 1)),
        pytest.raises(ValueError, match="Use one mesh for both"),
    ):
        fetch_rows(sharding, parts, column_ids(LAYOUT, 4))


def test_axes_may_have_any_names_and_several_may_hold_tokens(tables):
    devices = jax.make_mesh((2, 2, 2), ("pod", "model", "fsdp"), (AxisType.Auto,) * 3)
    ids = column_ids(LAYOUT, 9)
    for sequence_parallel in (False, True):
        sharding = EngramSharding.on(
            devices,
            LAYOUT,
            tensor_axis="model",
            data_axis=("pod", "fsdp"),
            sequence_parallel=sequence_parallel,
        )
        rows, _ = compile_fetch(sharding, tables, ids)
        np.testing.assert_array_equal(np.asarray(rows)[:9], packed_rows(tables, ids))


def test_wrong_shapes_are_refused(tables, library_errors):
    sharding = EngramSharding.on(mesh(2, 2), LAYOUT)
    parts = sharded(tables, sharding)
    with pytest.raises(ValueError, match="rows of each token, layer and column"):
        fetch_rows(sharding, parts, column_ids(LAYOUT, 4)[:, :1])
    with pytest.raises(ValueError, match="place_table makes it"):
        fetch_rows(sharding, tables, column_ids(LAYOUT, 4))
    mixed = [parts[0], ranked_tables(LAYOUT, floats=True)[1].shard(sharding, 1)]
    with pytest.raises(ValueError, match="must be FP8, or all float"):
        fetch_rows(sharding, mixed, column_ids(LAYOUT, 4))
