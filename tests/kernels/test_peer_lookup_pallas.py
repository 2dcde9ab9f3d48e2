"""The lookup that reads other GPUs' memory: its rows, its refusal, that it compiles.

The inline code runs on simulated threads over the shards of real tables, each a buffer
of its own: an address that is off, or a read of a peer whose record is stale, fails.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from kernels import aot
from kernels.simulated_threads import Memory, Word, simulate
from mesh_cases import column_ids, packed_rows, ranked_tables, stack24

from engram_jax import mxfp8
from engram_jax.kernels import (
    lookup_pallas,
    make_record,
    peer_lookup,
    peer_lookup_pallas,
)
from engram_jax.shards import TableShards

LAYOUT = stack24().layout
LAYERS, COLUMNS = LAYOUT.offsets.shape


@pytest.fixture(scope="module")
def tables():
    return ranked_tables(LAYOUT)


class Peers:
    """The shards of both layers' tables in simulated memory, and one device's view."""

    def __init__(self, tables, shards: TableShards, device: int):
        self.shards, self.device = shards, device
        self.buffers = {}
        for layer, shard in np.ndindex(shards.row_start.shape):
            start, end = self.rows(layer, shard)
            for part in ("weight", "scale"):
                whole = np.asarray(getattr(tables[layer], part)[...]).view(np.uint8)
                self.buffers[self.name(part, layer, shard)] = whole[start:end]

    def rows(self, layer, shard):
        ends = (self.shards.row_start, self.shards.row_end)
        return tuple(int(x[layer, shard]) for x in ends)

    def name(self, part, layer, shard):
        """The device's own shard is the kernel's operand."""
        return f"{part} {layer}" + (f" of {shard}" if shard != self.device else "")

    def record(self, memory, layer):
        """What this device would record; addresses are of simulated memory."""
        shards = range(self.shards.num_shards)
        addresses = [
            [
                int(memory.address(self.name(part, layer, shard)).value)
                for part in ("weight", "scale")
            ]
            for shard in shards
        ]
        rows = [self.rows(layer, shard) for shard in shards]
        return make_record(addresses, rows, self.device)

    def read(self, monkeypatch, ids, *, packed, in_flight=1, stale=()):
        """Runs the kernel's threads on ids [T, L, C]; `stale`: moves, by layer."""
        width = 32
        sizes = lookup_pallas.Sizes(width, ids.size)
        kind = sizes.out_type(packed)
        out = np.full(kind.shape, 0xAA, np.uint8 if packed else ml_dtypes.bfloat16)
        pieces = sizes.pieces(packed)
        threads = -(-pieces // in_flight) + 5
        records = {
            f"record {layer}": np.zeros((self.shards.num_shards + 1, 8), np.uint32)
            for layer in range(LAYERS)
        }
        memory = Memory(
            {"ids": np.asarray(ids, np.int32), **records, **self.buffers},
            {"out": out},
            threads=threads,
        )
        for layer in range(LAYERS):
            record = self.record(memory, layer)
            moved = np.array(dict(stale).get(layer, (0, 0)), "<u8")
            record[-1, :4].view("<u8")[:] += moved
            place = memory.names.index(f"record {layer}")
            memory.bytes[place][:] = record.view(np.uint8).reshape(-1)
        simulate(monkeypatch, memory, lookup_pallas, peer_lookup_pallas)
        by_heads = self.shards.cut == "heads"
        locate = functools.partial(
            peer_lookup_pallas.peer_row,
            {name: name for name in memory.names},
            n_hash_cols=COLUMNS,
            tables=peer_lookup_pallas.PeerTables(
                self.shards.num_shards,
                self.shards.columns if by_heads else None,
                self.shards.rows_per_shard,
            ),
            width=width,
        )
        move = lookup_pallas.copy_packed if packed else lookup_pallas.dequantize
        mine = [Word(np.arange(threads) + i * threads) for i in range(in_flight)]
        move(locate, memory.address("out"), mine, sizes)
        return out.reshape(*ids.shape, -1), memory


def expected(tables, ids, packed):
    rows = packed_rows(tables, jnp.asarray(ids))
    if packed:
        return rows
    return np.asarray(mxfp8.dequantize(*mxfp8.unpack(jnp.asarray(rows))))


def assert_same_bits(actual, wanted):
    np.testing.assert_array_equal(actual.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", ["heads", "rows"])
@pytest.mark.parametrize("shards", [2, 3, 5, 8, 24])
def test_rows_are_those_of_one_device(monkeypatch, tables, shards, cut, packed):
    """Pitfall: the last shard has fewer columns or rows; every device asks for all."""
    cut_tables = TableShards.choose(LAYOUT, shards, cut)
    ids = np.asarray(column_ids(LAYOUT, 3, seed=shards))
    for device in {0, shards - 1}:
        peers = Peers(tables, cut_tables, device)
        got, memory = peers.read(monkeypatch, ids, packed=packed)
        assert_same_bits(got, expected(tables, ids, packed))
        touched = [peers.name("weight", layer, 0) for layer in range(LAYERS)]
        assert all(memory.touched[name] for name in touched)


@pytest.mark.parametrize("packed", [False, True])
def test_several_pieces_in_flight_give_the_same_rows(monkeypatch, tables, packed):
    ids = np.asarray(column_ids(LAYOUT, 5))
    peers = Peers(tables, TableShards.choose(LAYOUT, 2), 1)
    got, _ = peers.read(monkeypatch, ids, packed=packed, in_flight=4)
    assert_same_bits(got, expected(tables, ids, packed))


@pytest.mark.parametrize("cut", ["heads", "rows"])
def test_ids_outside_of_their_shard_touch_no_memory(monkeypatch, tables, cut):
    """An id beyond the table, and with a cut by heads one of another shard's column."""
    shards = TableShards.choose(LAYOUT, 3, cut)
    rows = np.array(LAYOUT.num_rows)[None, :, None]
    outside = np.concatenate([rows, rows + 5, 0 * rows - 1, 0 * rows + 2**31 - 1])
    ids = np.broadcast_to(outside, (4, LAYERS, COLUMNS)).astype(np.int32).copy()
    ids[3, 0] = -(2**31)
    if cut == "heads":
        ids[0] = LAYOUT.offsets[:, ::-1]  # the first column's row in the last, ..
        ids[0, :, 8:16] = -1  # but those of the middle shard stay in it
    got, memory = Peers(tables, shards, 1).read(monkeypatch, ids, packed=True)
    assert not got.any()
    assert not any(n for k, n in memory.touched.items() if k.startswith("weight"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("moved", [(16, 0), (0, 8), (1 << 32, 0)])
def test_a_replaced_table_gives_nan_and_no_read(monkeypatch, tables, moved, packed):
    """Layer 1's own shard is not where its record says; layer 0's is."""
    ids = np.asarray(column_ids(LAYOUT, 3))
    peers = Peers(tables, TableShards.choose(LAYOUT, 2), 0)
    got, memory = peers.read(monkeypatch, ids, packed=packed, stale={1: moved})
    wanted = expected(tables, ids, packed)
    assert_same_bits(got[:, 0], wanted[:, 0])
    inside = ids[:, 1] >= 0
    assert inside.any()
    assert not inside.all()
    if packed:
        rows = jnp.asarray(got[:, 1][inside])
        assert (rows[:, :32] == 0x7F).all()
        assert (rows[:, 32:] == 255).all()
        got = np.asarray(mxfp8.dequantize(*mxfp8.unpack(jnp.asarray(got))))
    got = got[:, 1].astype(np.float32)
    assert np.isnan(got[inside]).all()
    assert not got[~inside].any()
    assert not any(
        n for k, n in memory.touched.items() if k.startswith(("weight 1", "scale 1"))
    )


def test_no_tokens_give_no_rows(tables):
    weights = [table.weight[...] for table in tables]
    scales = [table.scale[...] for table in tables]
    records = [jnp.zeros((3, 8), jnp.uint32)] * 2
    ids = jnp.zeros((0, LAYERS, COLUMNS), jnp.int32)
    rows = peer_lookup(
        weights,
        scales,
        records,
        ids,
        columns=12,
        rows_per_shard=(1, 1),
        packed=True,
    )
    assert rows.shape == (0, LAYERS, COLUMNS, 33)


def test_refuses_what_it_cannot_do():
    with pytest.raises(NotImplementedError, match="have 48 values, not a multiple"):
        peer_lookup(
            [jnp.zeros((10, 48), jnp.uint8)],
            [jnp.zeros((10, 1), jnp.uint8)],
            [jnp.zeros((3, 8), jnp.uint32)],
            jnp.zeros((1, 1, 4), jnp.int32),
            columns=2,
            rows_per_shard=(1,),
            packed=True,
        )


def operands(mesh, layers, tokens, width, rows, shards):
    """Operands of a shard_map over the devices of a mesh, as shapes."""

    def struct(shape, dtype, *axes):
        place = jax.sharding.NamedSharding(mesh, P(*axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    devices = mesh.size
    return (
        [struct((devices * rows, width), jnp.float8_e4m3fn, "device")] * layers,
        [struct((devices * rows, width // 32), jnp.uint8, "device")] * layers,
        [struct((devices, shards + 1, 8), jnp.uint32, "device")] * layers,
        struct((tokens, layers, 24), jnp.int32, "device"),
    )


def on_each_device(function, mesh):
    """Runs it on each device's shards and its own record."""

    def body(weights, scales, records, ids):
        return function(weights, scales, [record[0] for record in records], ids)

    return jax.shard_map(
        body, mesh=mesh, in_specs=P("device"), out_specs=P("device"), check_vma=False
    )


@pytest.mark.parametrize("columns", [12, None])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [32, 8192])
def test_compiles_for_two_hoppers(tokens, packed, columns):
    """V4.1's two layers, each device its half of the rows: nothing but one kernel."""
    mesh = aot.hopper_mesh(2)
    read = functools.partial(
        peer_lookup, columns=columns, rows_per_shard=(192_003_084,) * 2, packed=packed
    )
    compiled = aot.compile_for_hopper(
        on_each_device(read, mesh),
        *operands(mesh, 2, tokens, 256, 192_003_084, 2),
        devices=2,
    )
    text = aot.text_of(compiled)
    assert text.count("mosaic_gpu") >= 1
    assert aot.temporary_bytes(compiled) == 0
    assert "all-" not in text
    assert "copy(" not in text
    assert "fusion(" not in text


@pytest.mark.parametrize("x64", [False, True])
def test_compiles_inside_transformations(x64):
    """Pitfall: a loop that copied its tables would make every row NaN."""
    mesh = aot.hopper_mesh(2)

    def read(weights, scales, records, ids):
        once = functools.partial(
            peer_lookup, columns=12, rows_per_shard=(100, 100), packed=True
        )
        at = functools.partial(once, weights, scales, records)
        _, scanned = jax.lax.scan(lambda carry, i: (carry, at(i)), 0, ids[:, None])
        return scanned, jax.vmap(jax.checkpoint(at))(ids[:, None])

    with jax.enable_x64(x64):
        compiled = aot.compile_for_hopper(
            on_each_device(read, mesh), *operands(mesh, 2, 6, 64, 1000, 2), devices=2
        )
    text = aot.text_of(compiled)
    assert text.count("mosaic_gpu") >= 2
    copies = [line for line in text.splitlines() if " copy(" in line]
    assert not any("f8e4m3fn[1000,64]" in line for line in copies)
