"""Rows read from the memory of the other GPU, over NVLink or PCIe.

Needs two GPUs (``-m gpu``). What can be said without them is in `test_peer_read` and
`kernels/test_peer_lookup_pallas`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import mesh_stacks
import numpy as np
import pytest
from flax import nnx
from hlo_collectives import counts
from jax import lax
from mesh_cases import (
    column_ids,
    mesh,
    packed_rows,
    ranked_tables,
    sharded,
    stack24,
)
from small_stack import make_stack, random_hidden, random_ids

from engram_jax import EngramLayout, EngramSharding, ParallelEngramEmbedding, mxfp8
from engram_jax.exchange import fetch_rows
from engram_jax.mesh_stack import pad_replicas

pytestmark = pytest.mark.gpu

LAYOUT = stack24().layout


def wide_stack():
    """Rows wide enough for the kernel that hashes and reads all layers at once."""
    changes = {"head_dim": 64, "hidden_size": 64, "num_embeddings": (2000, 5000)}
    return make_stack(n_heads=8, vocab_base=20, **changes)


LAYOUT_WIDE = wide_stack().layout


@pytest.fixture(autouse=True)
def two_gpus():
    if len(jax.devices()) < 2:
        pytest.skip(reason=f"needs 2 GPUs, and there is {len(jax.devices())}")


@pytest.fixture(scope="module")
def tables():
    return ranked_tables(LAYOUT)


def fetch_of(sharding, parts):
    """A jitted fetch, the tables' state as its argument."""
    graph, state = nnx.split(nnx.List(parts))

    @jax.jit
    def fetch(state, ids):
        return fetch_rows(sharding, list(nnx.merge(graph, state)), ids)

    return fetch, state


def check_rows(fetch, state, tables, row_format, counts_of_tokens):
    """Compares fetched rows with the tables', and padding with zeros."""
    for tokens in counts_of_tokens:
        ids = column_ids(LAYOUT, tokens, seed=tokens)
        wanted = packed_rows(tables, ids)
        if row_format == "bfloat16":
            wanted = np.asarray(mxfp8.dequantize(*mxfp8.unpack(jnp.asarray(wanted))))
        rows = np.asarray(fetch(state, ids))
        np.testing.assert_array_equal(
            rows[:tokens].view(np.uint8), wanted.view(np.uint8)
        )
        assert not rows[tokens:].any()


@pytest.mark.parametrize("row_format", ["packed", "bfloat16"])
@pytest.mark.parametrize("cut", ["heads", "rows"])
@pytest.mark.parametrize(
    ("shape", "choices"),
    [((1, 2), {}), ((2, 1), {}), ((2, 1), {"sequence_parallel": True})],
    ids=["dp", "tp", "sp"],
)
def test_rows_are_those_of_one_gpu(tables, shape, choices, cut, row_format):
    """By any cut, to its own tokens or to all; 1,001 tokens have pieces in flight."""
    sharding = EngramSharding.on(
        mesh(*shape), LAYOUT, cut=cut, row_format=row_format, **choices
    )
    assert sharding.exchange_for(1) == "peer_read"  # chosen, not asked for
    fetch, state = fetch_of(sharding, sharded(tables, sharding))
    check_rows(fetch, state, tables, row_format, (1, 13, 1001))
    compiled = fetch.lower(state, column_ids(LAYOUT, 8)).compile()
    assert not counts(compiled.as_text())


def test_a_stack_gives_the_outputs_of_a_collective():
    def run(exchange):
        sharding = EngramSharding.on(mesh(1, 2), LAYOUT, exchange=exchange)
        graph, state = nnx.split(stack24().shard(sharding))

        @jax.jit
        def step(state, hidden, ids):
            stack = nnx.merge(graph, state)
            batch = stack.batch(ids, np.arange(8), np.array([0, 8]))
            return stack(3, stack(1, hidden, batch), batch)

        return np.asarray(step(state, random_hidden(8), random_ids(8)))

    np.testing.assert_array_equal(
        run("peer_read").view(np.uint16), run("all_to_all").view(np.uint16)
    )


def test_rows_are_right_within_loops_and_vmap(tables):
    """A loop that copied its tables would make every row NaN."""
    sharding = EngramSharding.on(mesh(1, 2), LAYOUT, exchange="peer_read")
    graph, state = nnx.split(nnx.List(sharded(tables, sharding)))
    ids = column_ids(LAYOUT, 24).reshape(3, 8, *LAYOUT.offsets.shape)

    @jax.jit
    def both(state, ids):
        fetch = functools.partial(fetch_rows, sharding, list(nnx.merge(graph, state)))
        _, scanned = lax.scan(lambda carry, i: (carry, fetch(i)), 0, ids)
        return scanned, jax.vmap(jax.checkpoint(fetch))(ids)

    wanted = packed_rows(tables, ids.reshape(24, *ids.shape[2:]))
    for rows in both(state, ids):
        np.testing.assert_array_equal(rows.reshape(wanted.shape), wanted)


def test_a_replaced_table_is_refused_and_inside_jit_nan(tables):
    sharding = EngramSharding.on(
        mesh(1, 2), LAYOUT, exchange="peer_read", row_format="bfloat16"
    )
    parts = sharded(tables, sharding)
    fetch, state = fetch_of(sharding, parts)
    ids = column_ids(LAYOUT, 8)
    before = np.asarray(fetch(state, ids)).astype(np.float32)
    assert not np.isnan(before).any()
    parts[1].weight[...] = jnp.copy(parts[1].weight[...])  # the old one lives on
    with pytest.raises(ValueError, match="index 1 does not lie where its addresses"):
        fetch_rows(sharding, parts, ids)
    _, moved = nnx.split(nnx.List(parts))
    rows = np.asarray(fetch(moved, ids)).astype(np.float32)
    np.testing.assert_array_equal(rows[:, 0], before[:, 0])
    inside = np.asarray(ids[:, 1]) >= 0
    assert np.isnan(rows[:, 1][inside]).all()
    assert not rows[:, 1][~inside].any()
    parts[1].record_addresses()
    _, again = nnx.split(nnx.List(parts))
    rows = np.asarray(fetch(again, ids)).astype(np.float32)
    np.testing.assert_array_equal(rows, before)


@pytest.mark.parametrize("cut", ["heads", "rows"])
def test_last_rows_of_shards_of_more_than_2_31_bytes(cut):
    """Pitfall: offsets of values overflow int32 within one shard."""
    columns, width, shard = 24, mesh_stacks.V41.head_dim, 12 * 750_000
    layout = EngramLayout(
        layer_ids=(0,),
        primes=np.full((1, 3, 8), 750_000),
        offsets=np.arange(columns)[None] * 750_000,
        multipliers=np.array([[3, 5, 7, 9]]),
        num_rows=(2 * shard,),
        pad_token_id=0,
        compressed_vocab_size=100,
        max_ngram_size=4,
        n_heads=8,
    )
    assert shard * width > 2**31
    sharding = EngramSharding.on(mesh(1, 2), layout, cut=cut, exchange="peer_read")
    parts = mesh_stacks.make_table(mesh_stacks.V41, layout, 0, sharding)
    table = ParallelEngramEmbedding(*parts, sharding=sharding)
    ends = np.arange(1, columns + 1) * 750_000 - 1
    ids = np.stack([ends, ends - 1, ends, ends + 2 * shard]).astype(np.int32)
    if cut == "rows":  # any id in any column
        ids[2] = ends[::-1]
        ids[1, :4] = 0, shard - 1, shard, 2 * shard - 1
    rows = np.asarray(table.lookup_packed(jnp.asarray(ids)))
    expected = mesh_stacks.known_rows(0, ids, width)
    expected[3] = 0
    np.testing.assert_array_equal(rows, expected)


def hidden_states(tokens):
    shape = (tokens, 2, 64)
    return np.random.default_rng(0).normal(size=shape).astype(jnp.bfloat16)


def decode(sharding, *, by_replica=False, replace=None):
    """Rows and outputs of a ragged batch; `replace`: a layer whose table is copied."""
    stack = wide_stack()
    if sharding is not None:
        stack = stack.shard(sharding)
    if replace is not None:
        table = stack.layers[replace].embedding
        old = table.weight[...]
        table.weight[...] = jax.block_until_ready(jnp.copy(old))
    graph, state = nnx.split(stack)
    batch = {
        "input_ids": random_ids(13),
        "positions": np.arange(13),
        "query_start_loc": np.array([0, 5, 11]),  # two tokens of no request
        "dead_mask": np.arange(13) % 5 == 3,
    }
    if by_replica:
        batch = pad_replicas([batch, batch])
    hidden = hidden_states(26 if by_replica else 13)

    @jax.jit
    def step(state, hidden, batch):
        stack = nnx.merge(graph, state)
        made = (stack.replica_batch if by_replica else stack.batch)(**batch)
        outputs = stack(1, hidden, made), stack(3, hidden, made)
        return made.rows, made.token_mask, outputs

    rows, mask, outputs = jax.tree.map(np.asarray, step(state, hidden, batch))
    return rows, mask, outputs


def own_rows(sharding, rows):
    """Each token's rows of what the devices have, padded to 8 tokens each."""
    pieces = sharding.size(sharding.row_token_axes)
    parts = np.split(rows.values, pieces)
    return np.concatenate([part[: rows.tokens] for part in parts])


@pytest.mark.parametrize("cut", ["heads", "rows"])
@pytest.mark.parametrize(
    ("shape", "choices", "by_replica"),
    [
        ((2, 1), {"shard_projection": False}, False),
        ((2, 1), {"shard_projection": True}, False),
        ((2, 1), {"sequence_parallel": True}, False),
        ((1, 2), {}, False),
        ((1, 2), {}, True),
    ],
    ids=["tp", "tp-cut", "sp", "dp", "dp-by-replica"],
)
def test_one_kernel_hashes_and_reads_as_on_one_gpu(shape, choices, by_replica, cut):
    """13 tokens: the last device has one of padding; two are of no request."""
    sharding = EngramSharding.on(mesh(*shape), LAYOUT_WIDE, cut=cut, **choices)
    rows, mask, outputs = decode(sharding, by_replica=by_replica)
    wanted, known, known_outputs = decode(None)
    twice = 2 if by_replica else 1
    np.testing.assert_array_equal(mask, np.tile(known, twice))
    for found, alone in zip(rows, wanted, strict=True):
        actual = own_rows(sharding, found)
        expected = np.tile(alone.values[:13], (twice, 1))
        count = len(expected)
        np.testing.assert_array_equal(
            actual[:count].view(np.uint16), expected.view(np.uint16)
        )
        assert not actual[count:].any()
    before = hidden_states(13).astype(np.float32)
    for found, alone in zip(outputs, known_outputs, strict=True):
        whole = alone.astype(np.float32)
        # As in `test_mesh_gpu`: sums may be added in another order.
        bound = 2.0**-7 * (np.abs(whole) + np.abs(whole - before))
        # The first replica's hidden states are those of one GPU.
        assert (np.abs(found[:13].astype(np.float32) - whole) <= bound).all()


def test_one_kernel_gives_nan_for_a_replaced_table():
    sharding = EngramSharding.on(mesh(2, 1), LAYOUT_WIDE, shard_projection=False)
    (first, second), mask, outputs = decode(sharding, replace=3)
    (known, _), _, _ = decode(None)
    np.testing.assert_array_equal(
        first.values[:13].view(np.uint16), known.values[:13].view(np.uint16)
    )
    found = second.values[:13].astype(np.float32)
    assert np.isnan(found[:11]).all()
    assert not found[11:].any()  # of no request
    assert np.isnan(outputs[1].astype(np.float32)[mask]).all()
    assert not np.isnan(outputs[1].astype(np.float32)[~mask]).any()


@pytest.mark.parametrize("row_format", ["packed", "bfloat16"])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
@pytest.mark.parametrize(
    ("shape", "choices"),
    [((1, 2), {}), ((2, 1), {}), ((2, 1), {"sequence_parallel": True})],
    ids=["dp", "tp", "sp"],
)
def test_a_collective_s_rows_are_those_of_one_gpu(
    tables, shape, choices, exchange, row_format
):
    """All layers' rows by one launch, and put in order once."""
    sharding = EngramSharding.on(
        mesh(*shape), LAYOUT, exchange=exchange, row_format=row_format, **choices
    )
    fetch, state = fetch_of(sharding, sharded(tables, sharding))
    check_rows(fetch, state, tables, row_format, (2, 13, 1001))
