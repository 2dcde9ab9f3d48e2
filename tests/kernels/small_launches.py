"""Launches each GPU kernel at small sizes and compares it with its XLA form.

    compute-sanitizer --tool memcheck --error-exitcode 1 \
        --kernel-name kns=mosaic python tests/kernels/small_launches.py wkv

`test_sanitized.py` runs this for every kernel and tool.
"""

from __future__ import annotations

import functools
import mmap
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_stack import CONFIG, make_stack, random_ids, token_map

from engram_jax import EngramLayout, NgramHashState, kernels
from engram_jax.kernels import gate_pallas, wkv_pallas
from engram_jax.kernels.block_sizes import GateSizes, WkvSizes
from engram_jax.registered_memory import RegisteredMemory


def same(found, wanted) -> None:
    np.testing.assert_array_equal(
        np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8)
    )


def near(found, wanted) -> None:
    """Compares bfloat16 results whose sums were added up in another order."""
    found, wanted = (np.asarray(x, np.float32) for x in (found, wanted))
    atol = 2.0**-6 * np.abs(wanted).mean()
    np.testing.assert_allclose(found, wanted, rtol=2.0**-6, atol=atol)


def on_cpu():
    """Runs the XLA form elsewhere, so that nothing but the kernels is watched."""
    return jax.default_device(jax.devices("cpu")[0])


def ragged_batch(tokens: int) -> dict:
    """Makes two requests with windows, dead tokens and a padding token."""
    return {
        "input_ids": random_ids(tokens),
        "positions": np.arange(tokens),
        "query_start_loc": [0, tokens // 2, max(tokens - 1, 0)],
        "dead_mask": np.arange(tokens) % 5 == 3,
        "lookback_token_ids": [[5, 7, -1], [1, 2, 3]],
    }


def hashes(tokens: int, backend: kernels.Backend) -> jax.Array:
    """Hashes a batch of `small_stack.CONFIG`."""
    layout = EngramLayout.from_config(CONFIG)
    state = NgramHashState(layout, token_map(), backend=backend)
    return state(**ragged_batch(tokens))


def same_windows(found, tokens: int) -> None:
    """Compares windows and mask after a batch of `small_stack.CONFIG`."""
    batch = ragged_batch(tokens)
    with on_cpu():
        state = NgramHashState(EngramLayout.from_config(CONFIG), token_map())
        wanted = state.advance_lookback(
            batch["lookback_token_ids"],
            None,
            batch["input_ids"],
            batch["query_start_loc"],
            dead_mask=batch["dead_mask"],
        )
        for part, other in zip(found, wanted, strict=True):
            same(part, other)


def ngram_hash() -> None:
    """Hashes batches of one and of several blocks."""
    for tokens in (3, 70, 600):
        found = hashes(tokens, "pallas")
        with on_cpu():
            same(found, hashes(tokens, "xla"))


def wide_stack(head_dim: int = 64):
    """Makes a small stack whose rows are wide enough for every kernel."""
    return make_stack(head_dim=head_dim)


def tables(head_dim: int = 64) -> list[tuple[np.ndarray, np.ndarray]]:
    """Gives the values and scales of both layers of a small stack."""
    with on_cpu():
        layers = wide_stack(head_dim).layers.values()
        return [
            (np.asarray(x.embedding.weight[...]), np.asarray(x.embedding.scale[...]))
            for x in layers
        ]


def lookup() -> None:
    """Reads rows at both ends of a window, and outside of it."""
    weight, scale = tables()[0]
    for count in (1, 37, 5000):
        ids = np.random.default_rng(count).integers(-3, 910, count).astype(np.int32)
        ids[0] = 889
        for function in (kernels.lookup, kernels.lookup_packed):

            def rows(backend, function=function, ids=ids):
                parts = map(jnp.asarray, (weight, scale, ids))
                return function(*parts, row_start=2, row_end=890, backend=backend)

            found = rows("pallas")
            with on_cpu():
                same(found, rows("xla"))

    weights, scales = zip(*(map(jnp.asarray, parts) for parts in tables()), strict=True)
    bounds = jnp.array([[2, 890], [0, 900]], jnp.int32)
    ids = np.random.default_rng(0).integers(-3, 910, (300, 2, 12)).astype(np.int32)
    for packed in (False, True):

        def rows_of_layers(backend, packed=packed):
            parts = weights, scales, jnp.asarray(ids), bounds
            return kernels.lookup_layers(*parts, packed=packed, backend=backend)

        found = rows_of_layers("pallas")
        with on_cpu():
            same(found, rows_of_layers("xla"))


def decode_front_end() -> None:
    """Hashes and reads the rows of both layers at once."""
    stack = wide_stack()
    for tokens in (2, 19, 64):
        batch, windows = stack.batch(**ragged_batch(tokens), advance_lookback=True)
        same_windows(windows, tokens)
        assert batch.rows is not None, "the fused kernel did not run"
        with on_cpu():
            ids = hashes(tokens, "xla")
            for index, (weight, scale) in enumerate(tables()):
                parts = jnp.asarray(weight), jnp.asarray(scale), ids[:, index]
                rows = kernels.lookup(*parts, backend="xla").reshape(tokens, -1)
                wanted = wkv_pallas.permute_columns(rows)
                same(batch.rows[index].values[:tokens], wanted[:tokens])


def halves() -> tuple[list, list, list, dict]:
    """Cuts both tables by rows, as for two GPUs, in the memory of this one.

    Returns:
        For each layer the parts in order, each values and scales; the first part's
        values and scales; its record; and how tables are cut.
    """
    parts, records, cut = [], [], {"columns": None, "rows_per_shard": []}
    for table in tables():
        rows = len(table[0])
        half = -(-rows // 2)
        ends = [(0, half), (half, rows)]
        layer = [[jnp.asarray(x[start:end]) for x in table] for start, end in ends]
        jax.block_until_ready(layer)
        places = [[x.unsafe_buffer_pointer() for x in part] for part in layer]
        records.append(jnp.asarray(kernels.make_record(places, ends, own=0)))
        parts.append(layer)
        cut["rows_per_shard"].append(half)
    return parts, [layer[0] for layer in parts], records, cut


def peer_lookup() -> None:
    """Reads rows by their shards' addresses, and none of a table that was moved."""
    parts, own, records, cut = halves()
    weights, scales = zip(*own, strict=True)
    moved = jax.block_until_ready(jnp.copy(weights[1]))
    for count, packed in ((1, True), (37, False), (700, True)):
        rng = np.random.default_rng(count)
        ids = rng.integers(-3, 910, (count, len(parts), 6)).astype(np.int32)
        ids[0, :, 0] = 889
        given = records, jnp.asarray(ids)
        options = {"packed": packed, **cut}
        found = kernels.peer_lookup(weights, scales, *given, **options)
        gone = kernels.peer_lookup((weights[0], moved), scales, *given, **options)
        with on_cpu():
            function = kernels.lookup_packed if packed else kernels.lookup
            for layer, table in enumerate(tables()):
                operands = map(jnp.asarray, (*table, ids[:, layer]))
                wanted = function(*operands, backend="xla")
                same(found[:, layer], wanted)
                if layer == 0:
                    same(gone[:, layer], wanted)
            inside = (ids[:, 1] >= 0) & (ids[:, 1] < len(tables()[1][0]))
            rows = np.asarray(gone[:, 1])
            assert not rows[~inside].any()
            nan = rows[inside][:, -1] == 255 if packed else np.isnan(rows[inside])
            assert nan.all()
    jax.block_until_ready(parts)  # nothing but the addresses held on to them


def peer_decode() -> None:
    """Hashes, and reads rows by their shards' addresses, those of a part of a batch."""
    parts, own, records, cut = halves()
    weights, scales = zip(*own, strict=True)
    for tokens, first, count in ((2, None, None), (19, 7, 11), (64, 32, 40)):
        state = wide_stack().hash_state
        given = ragged_batch(tokens)
        batch = state.operands(**given)
        rows, alive, windows = kernels.ngram_rows(
            weights,
            scales,
            **batch,
            **cut,
            records=records,
            first_token=None if first is None else jnp.array([first], jnp.int32),
            num_tokens=count,
            advance_lookback=True,
        )
        same_windows(windows, tokens)
        part = slice(first or 0, tokens if count is None else (first or 0) + count)
        with on_cpu():
            ids = hashes(tokens, "xla")[part]
            known = np.asarray(given["dead_mask"])[part]
            known = ~known & (np.arange(tokens)[part] < given["query_start_loc"][-1])
            same(alive[: len(ids)], known)
            assert not np.asarray(alive)[len(ids) :].any()
            for layer, table in enumerate(tables()):
                operands = map(jnp.asarray, (*table, ids[:, layer]))
                wanted = kernels.lookup(*operands, backend="xla")
                wanted = wkv_pallas.permute_columns(wanted.reshape(len(ids), -1))
                values = rows[layer].values
                same(values[: len(ids)], wanted)
                assert not np.asarray(values[len(ids) : rows[layer].tokens]).any()
    jax.block_until_ready(parts)


def records(head_dim: int) -> list[RegisteredMemory]:
    """Gives both layers' tables as records in host memory that the GPU may read."""
    found = []
    for values, scales in tables(head_dim):
        whole = np.concatenate([values.view(np.uint8), scales.view(np.uint8)], 1)
        memory = np.frombuffer(mmap.mmap(-1, whole.nbytes), np.uint8)
        memory[...] = whole.reshape(-1)
        found.append(RegisteredMemory(memory))
    return found


def record_lookup() -> None:
    """Reads rows of any alignment at an address, at both ends and outside."""
    for head_dim in (32, 64, 256):
        (known, *_), (memory, *_) = tables(head_dim), records(head_dim)
        for count in (1, 37, 5000):
            ids = np.random.default_rng(count).integers(-3, 910, count).astype(np.int32)
            ids[0] = len(known[0]) - 1
            found = kernels.record_lookup(
                jnp.asarray(memory.address),
                jnp.asarray(ids),
                num_rows=len(known[0]),
                head_dim=head_dim,
            )
            with on_cpu():
                operands = map(jnp.asarray, (*known, ids))
                same(found, kernels.lookup_packed(*operands, backend="xla"))


def record_decode() -> None:
    """Hashes, and reads rows of tables in host memory."""
    memory = records(128)
    for tokens in (2, 19, 64):
        given = ragged_batch(tokens)
        rows, alive, windows = kernels.ngram_rows(
            [jax.ShapeDtypeStruct(x.shape, jnp.uint8) for x, _ in tables(128)],
            (),
            **wide_stack(128).hash_state.operands(**given),
            addresses=[jnp.asarray(x.address) for x in memory],
            advance_lookback=True,
        )
        same_windows(windows, tokens)
        with on_cpu():
            known = ~given["dead_mask"] & (
                np.arange(tokens) < given["query_start_loc"][-1]
            )
            same(alive, known)
            ids = hashes(tokens, "xla")
            for layer, table in enumerate(tables(128)):
                operands = map(jnp.asarray, (*table, ids[:, layer]))
                wanted = kernels.lookup(*operands, backend="xla")
                wanted = wkv_pallas.permute_columns(wanted.reshape(tokens, -1))
                same(rows[layer].values[:tokens], wanted)
    assert len(memory) == 2  # nothing but the addresses held on to it


def gate() -> None:
    """Gates with and without a ring of buffers, masked."""
    for tokens, streams, width, sizes in (
        (3, 4, 256, None),
        (1, 1, 32, None),
        (300, 4, 512, None),
        (37, 2, 5120, GateSizes(2, 4)),
        (9, 4, 96, GateSizes(3, 2)),
    ):
        rng = np.random.default_rng(tokens)
        shapes = (tokens, streams, width), (tokens, (streams + 1) * width)
        shapes += ((streams, width),) * 2
        arrays = [rng.normal(size=shape).astype(jnp.bfloat16) for shape in shapes]
        mask = np.arange(tokens) % 3 != 1
        options = {"eps": 1e-6, "clamp": 1e-6}
        found = gate_pallas.gate_pallas(*arrays, mask, sizes=sizes, **options)
        with on_cpu():
            arrays = map(jnp.asarray, arrays)
            masked = functools.partial(kernels.gate, token_mask=jnp.asarray(mask))
            near(found, masked(*arrays, backend="xla", **options))


def wkv() -> None:
    """Projects with one and with several slabs a warpgroup, and a large scale."""
    for tokens, outputs, inputs, largest, sizes in (
        (3, 640, 256, 130, None),
        (17, 200, 160, 220, None),
        (64, 1280, 384, 130, WkvSizes(256, 128, 2, 64, 3)),
        (100, 320, 512, 130, None),
        (1, 64, 6144, 220, None),
    ):
        rng = np.random.default_rng(tokens)
        weight = rng.integers(0, 126, (outputs, inputs)).astype(np.uint8)
        weight |= rng.integers(0, 2, weight.shape).astype(np.uint8) << 7
        scale = rng.integers(120, 130, (-(-outputs // 32), inputs // 32))
        scale[0, 0] = largest
        rows = rng.normal(size=(tokens, inputs)).astype(jnp.bfloat16)
        operands = rows, weight, scale.astype(np.uint8)
        found = wkv_pallas.wkv_pallas(*operands, sizes=sizes)
        with on_cpu():
            near(found, kernels.wkv(*map(jnp.asarray, operands), backend="xla"))


LAUNCHES = {
    function.__name__: function
    for function in (
        *(ngram_hash, lookup, peer_lookup, decode_front_end, peer_decode),
        *(record_lookup, record_decode, gate, wkv),
    )
}

if __name__ == "__main__":
    LAUNCHES[sys.argv[1]]()
    sys.stdout.write(f"{sys.argv[1]}: right\n")
