"""The fused decode front end: equal to hash, lookup and reordering, and it compiles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from kernels import aot
from kernels.ragged_batches import PAD_ID, make_layout, random_batch
from kernels.simulated_threads import Memory, Word, simulate
from kernels.test_lookup_pallas import assert_same_rows
from kernels.test_ngram_hash_pallas import HISTORIES, operands, xla_form

from engram_jax import kernels
from engram_jax.kernels import (
    decode_front_end_pallas,
    lookup_pallas,
    ngram_hash_pallas,
    peer_lookup_pallas,
    record_lookup_pallas,
    wkv_pallas,
)
from engram_jax.shards import TableShards


def tables(layout, width):
    rng = np.random.default_rng(0)
    for rows in layout.num_rows:
        weight = rng.integers(0, 256, (rows, width), np.uint8)
        yield weight, rng.integers(0, 256, (rows, width // 32), np.uint8)


def separate_kernels(batch, layout, weights, scales):
    """Hash, lookup and reordering by their XLA forms."""
    hashes = xla_form(batch, layout)
    for layer, (weight, scale) in enumerate(zip(weights, scales, strict=True)):
        rows = kernels.lookup(
            jnp.asarray(weight),
            jnp.asarray(scale),
            jnp.asarray(hashes[:, layer]),
            backend="xla",
        )
        yield np.asarray(wkv_pallas.permute_columns(rows.reshape(len(rows), -1)))


def alive_tokens(batch):
    """Tokens of a request that are neither dead nor outside the vocabulary."""
    ids = np.asarray(batch["input_ids"])
    alive = (ids >= 0) & (ids < len(batch["token_map"]))
    if batch.get("dead_mask") is not None:
        alive &= ~np.asarray(batch["dead_mask"])
    starts, token = batch["query_start_loc"], np.arange(len(ids))
    return alive & (token >= starts[0]) & (token < starts[-1])


def run_inline_code(
    monkeypatch,
    layout,
    batch,
    weights,
    scales,
    locate,
    *,
    owned=None,
    records=None,
    width=None,
):
    """Runs the kernel's threads; `owned`: first token and count of those wanted.

    With `records`, weights and scales are those of all shards by name, and `records`
    fills in the addresses. `width`: values of a row; None: those of the weights.
    """
    arrays = {name: value for name, value in batch.items() if name != "block_size"}
    given = ngram_hash_pallas.batch_operands(**arrays)
    static = ngram_hash_pallas.batch_sizes(
        given, layout, PAD_ID, batch.get("block_size")
    )
    given |= ngram_hash_pallas.layout_constants(layout)
    buffers = {name: np.asarray(array) for name, array in given.items()}
    tokens = static.tokens
    if owned is not None:
        first, tokens = owned
        buffers["first"] = np.array([first], np.int32)
    buffers |= weights | scales
    width = width or next(iter(weights.values())).shape[1]
    if records is not None:
        shape = records.shape
        buffers |= {
            f"record {n}": np.zeros(shape, np.uint32) for n in range(layout.num_layers)
        }
    out = {
        f"out {n}": np.full((64, layout.n_hash_cols * width), 0.5, ml_dtypes.bfloat16)
        for n in range(layout.num_layers)
    }
    alive = np.full(tokens, 2, np.uint8)
    pieces = tokens * layout.n_hash_cols * width // 16 + 3
    memory = Memory(buffers, out | {"alive": alive}, threads=pieces)
    if records is not None:
        records.write(memory)
    modules = (
        ngram_hash_pallas,
        lookup_pallas,
        peer_lookup_pallas,
        record_lookup_pallas,
    )
    simulate(monkeypatch, memory, *modules, decode_front_end_pallas)
    for layer in range(layout.num_layers):
        decode_front_end_pallas._move_piece(
            {name: name for name in memory.names},
            static,
            layout,
            Word.of(layer),
            Word(np.arange(pieces)),
            width,
            tokens,
            locate,
        )
    rows = []
    for written in out.values():
        actual, padding = np.split(written, [tokens])
        assert (padding == 0.5).all()  # stays as it was
        rows.append(actual)
    return rows, alive, memory


def named(name, arrays):
    return {f"{name} {number}": array for number, array in enumerate(arrays)}


@pytest.mark.parametrize(
    ("sizes", "history"),
    [
        ((2, 4, 8, 64), HISTORIES[0]),
        ((1, 2, 1, 128), HISTORIES[1]),
        ((3, 3, 5, 192), HISTORIES[4]),
    ],
)
def test_inline_code_equals_separate_kernels(monkeypatch, sizes, history):
    *shape, width = sizes
    layout = make_layout(*shape, smallest=40)
    batch = random_batch(4, 11, 3, layout.max_ngram_size, **history)
    weights, scales = zip(*tables(layout, width), strict=True)
    expected = separate_kernels(batch, layout, weights, scales)
    locate = functools.partial(
        decode_front_end_pallas._own_row, rows_in_tables=layout.num_rows, width=width
    )
    parts = named("weight", weights), named("scale", scales)
    rows, alive, _ = run_inline_code(monkeypatch, layout, batch, *parts, locate)
    for actual, wanted in zip(rows, expected, strict=True):
        assert_same_rows(actual, wanted)
    np.testing.assert_array_equal(alive, alive_tokens(batch))


class Records:
    """Tables whose rows are records, known by their addresses."""

    shape = (2,)

    def __init__(self, weights, scales):
        parts = zip(weights, scales, strict=True)
        whole = [np.concatenate(part, axis=1) for part in parts]
        self.tables = named("table", whole)

    def write(self, memory):
        """Fills in where everything lies in the simulated memory."""
        for layer, name in enumerate(self.tables):
            address = np.array([int(memory.address(name).value)], "<u8")
            place = memory.names.index(f"record {layer}")
            memory.bytes[place][:] = address.view(np.uint8)


@pytest.mark.parametrize("width", [128, 256])
def test_rows_at_an_address_are_those_of_arrays(monkeypatch, width):
    layout = make_layout(2, 3, 4, smallest=40)
    batch = random_batch(5, 11, 3, layout.max_ngram_size, **HISTORIES[0])
    weights, scales = zip(*tables(layout, width), strict=True)
    expected = separate_kernels(batch, layout, weights, scales)
    records = Records(weights, scales)
    locate = functools.partial(
        decode_front_end_pallas._record_row, rows_in_tables=layout.num_rows, width=width
    )
    rows, alive, memory = run_inline_code(
        monkeypatch,
        layout,
        batch,
        records.tables,
        {},
        locate,
        records=records,
        width=width,
    )
    for actual, wanted in zip(rows, expected, strict=True):
        assert_same_rows(actual, wanted)
    np.testing.assert_array_equal(alive, alive_tokens(batch))
    assert all(memory.touched[name] for name in records.tables)


class Peers:
    """The shards of all layers' tables, as one device of several sees them."""

    def __init__(self, layout, shards, weights, scales, device, stale=()):
        self.layout, self.shards, self.device = layout, shards, device
        self.weights, self.scales, self.stale = {}, {}, stale
        self.shape = (shards.num_shards + 1, 8)
        for layer, shard in np.ndindex(shards.row_start.shape):
            rows = slice(*self.rows(layer, shard))
            self.weights[self.name("weight", layer, shard)] = weights[layer][rows]
            self.scales[self.name("scale", layer, shard)] = scales[layer][rows]

    def rows(self, layer, shard):
        ends = self.shards.row_start, self.shards.row_end
        return tuple(int(x[layer, shard]) for x in ends)

    def name(self, part, layer, shard):
        """The device's own shard is the kernel's operand."""
        return f"{part} {layer}" + (f" of {shard}" if shard != self.device else "")

    def write(self, memory):
        """Fills in where everything lies in the simulated memory."""
        shards = range(self.shards.num_shards)
        for layer in range(self.layout.num_layers):
            addresses = [
                [
                    int(memory.address(self.name(part, layer, shard)).value)
                    for part in ("weight", "scale")
                ]
                for shard in shards
            ]
            rows = [self.rows(layer, shard) for shard in shards]
            record = kernels.make_record(addresses, rows, self.device)
            if layer in self.stale:
                record[-1, 0] += 64
            place = memory.names.index(f"record {layer}")
            memory.bytes[place][:] = record.view(np.uint8).reshape(-1)

    @property
    def locate(self):
        by_heads = self.shards.cut == "heads"
        tables = peer_lookup_pallas.PeerTables(
            self.shards.num_shards,
            self.shards.columns if by_heads else None,
            self.shards.rows_per_shard,
        )
        return functools.partial(peer_lookup_pallas.find_row, tables=tables, width=64)


@pytest.mark.parametrize("owned", [None, (0, 6), (6, 6)], ids=["all", "first", "last"])
@pytest.mark.parametrize("cut", ["heads", "rows"])
@pytest.mark.parametrize("shards", [2, 3])
def test_rows_of_peers_are_those_of_one_device(monkeypatch, shards, cut, owned):
    """Of all tokens or of a part; 11 tokens over two devices leave one of padding."""
    layout = make_layout(2, 3, 4, smallest=40)
    batch = random_batch(5, 11, 3, layout.max_ngram_size, **HISTORIES[0])
    weights, scales = zip(*tables(layout, 64), strict=True)
    expected = [
        np.pad(rows, ((0, 1), (0, 0)))
        for rows in separate_kernels(batch, layout, weights, scales)
    ]
    cut_tables = TableShards.choose(layout, shards, cut)
    first, count = owned or (0, 11)
    wanted = slice(first, first + count)
    for device in (0, shards - 1):
        peers = Peers(layout, cut_tables, weights, scales, device)
        rows, alive, memory = run_inline_code(
            monkeypatch,
            layout,
            batch,
            peers.weights,
            peers.scales,
            peers.locate,
            owned=owned,
            records=peers,
        )
        for actual, whole in zip(rows, expected, strict=True):
            assert_same_rows(actual, whole[wanted])
        known = np.pad(alive_tokens(batch), (0, 1))
        np.testing.assert_array_equal(alive, known[wanted])
        assert all(memory.touched[name] for name in peers.weights)


def test_a_replaced_table_gives_nan_and_no_read(monkeypatch):
    """Layer 1's own shard is not where its record says; -1 is zeros even so."""
    layout = make_layout(2, 3, 4, smallest=40)
    batch = random_batch(5, 11, 3, layout.max_ngram_size, **HISTORIES[0])
    batch["query_start_loc"] = batch["query_start_loc"] // 2  # others of no request
    weights, scales = zip(*tables(layout, 64), strict=True)
    expected = list(separate_kernels(batch, layout, weights, scales))
    owned = (xla_form(batch, layout) >= 0).all((1, 2))
    assert owned.any()
    assert not owned.all()
    shards = TableShards.choose(layout, 2)
    peers = Peers(layout, shards, weights, scales, 0, stale=(1,))
    rows, _, memory = run_inline_code(
        monkeypatch,
        layout,
        batch,
        peers.weights,
        peers.scales,
        peers.locate,
        records=peers,
    )
    assert_same_rows(rows[0], expected[0])
    assert np.isnan(rows[1][owned].astype(np.float32)).all()
    assert not rows[1][~owned].astype(np.float32).any()
    touched = [n for k, n in memory.touched.items() if k.startswith("weight 1")]
    assert touched == [0, 0]


def test_refuses_what_it_cannot_do():
    layout = make_layout()
    reason = functools.partial(
        decode_front_end_pallas.unsupported_reason,
        tokens=3,
        layout=layout,
        pad_id=PAD_ID,
    )
    tables = [jnp.zeros((4, 64), jnp.uint8), jnp.zeros((4, 128), jnp.uint8)]
    assert reason(tables[:1]) is None
    assert "differ" in str(reason(tables))
    assert "multiple of 64" in str(reason([jnp.zeros((4, 96), jnp.uint8)]))
    assert "interpreter" in str(reason(tables[:1], interpret=True))
    assert "66 bytes" in str(reason(tables[:1], as_records=True))
    assert reason(tables[1:], as_records=True) is None


@pytest.mark.parametrize("history", HISTORIES[:2])
@pytest.mark.parametrize("tokens", [1, 16])
def test_compiles_for_hopper(tokens, history):
    layout = make_layout()
    batch, block_size = operands(random_batch(0, tokens, tokens, 4, **history))
    static = {"layout": layout, "pad_id": PAD_ID, "block_size": block_size}
    weights = [aot.operand((rows, 256), jnp.float8_e4m3fn) for rows in layout.num_rows]
    scales = [aot.operand((rows, 8), jnp.uint8) for rows in layout.num_rows]
    compiled = aot.compile_for_hopper(
        lambda weights, scales, batch: decode_front_end_pallas.decode_front_end_pallas(
            weights, scales, **batch, **static
        ),
        weights,
        scales,
        batch,
    )
    rows, alive, windows = compiled.out_info
    assert windows is None
    assert [out.shape for out in rows] == [(8 if tokens == 1 else 16, 6144)] * 2
    assert (alive.shape, alive.dtype) == ((tokens,), jnp.bool_)
    assert "fusion" not in aot.text_of(compiled)  # nothing but the kernel


@pytest.mark.parametrize("kind", ["records", "pinned"])
def test_compiles_for_hopper_with_tables_in_host_memory(kind):
    """No table is copied to the device, whose memory it would not fit."""
    layout = make_layout()
    batch, _ = operands(random_batch(0, 16, 16, 4, **HISTORIES[0]))
    rows = layout.num_rows
    shapes = [jax.ShapeDtypeStruct((n, 256), jnp.uint8) for n in rows]
    tables, scales, addresses = (), (), None
    if kind == "records":
        addresses = [aot.operand((2,), jnp.uint32) for _ in rows]
    else:
        place = functools.partial(aot.operand, memory_kind="pinned_host")
        tables = [place((n, 256), jnp.float8_e4m3fn) for n in rows]
        scales = [place((n, 8), jnp.uint8) for n in rows]

    def read(tables, scales, addresses, batch):
        return kernels.ngram_rows(
            tables or shapes,
            scales,
            layout=layout,
            pad_id=PAD_ID,
            addresses=addresses,
            **batch,
        )

    compiled = aot.compile_for_hopper(read, tables, scales, addresses, batch)
    text = aot.text_of(compiled)
    assert aot.temporary_bytes(compiled) == 0
    assert "fusion" not in text
    assert "copy" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("tokens", [1, 16, 61])
def test_kernel_equals_separate_kernels(tokens, history):
    layout = make_layout(smallest=500)
    batch = random_batch(tokens, tokens, 1 + tokens // 2, 4, **history)
    weights, scales = zip(*tables(layout, 256), strict=True)
    out, alive, _ = decode_front_end_pallas.decode_front_end_pallas(
        [*map(jnp.asarray, weights)],
        [*map(jnp.asarray, scales)],
        **batch,
        layout=layout,
        pad_id=PAD_ID,
    )
    np.testing.assert_array_equal(alive, alive_tokens(batch))
    expected = separate_kernels(batch, layout, weights, scales)
    for actual, wanted in zip(out, expected, strict=True):
        assert_same_rows(np.asarray(actual)[:tokens], wanted)
