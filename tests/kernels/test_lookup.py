"""Rows by id: every byte pair, shards, offsets beyond 32 bits, and no wider table."""

from __future__ import annotations

import functools
import mmap
from typing import Any

import chex
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy_reference as reference
import pytest
from hypothesis import strategies as st
from tolerances import assert_rows_equal, assert_within

from engram_jax import kernels

V41_ROWS = 384_006_168


def random_table(rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Makes any bytes, NaN codes and edge scales among them."""
    rng = np.random.default_rng(seed)
    weight = rng.integers(0, 256, (rows, width), np.uint8)
    scale = rng.integers(0, 256, (rows, width // 32), np.uint8)
    return weight, scale


def on_device(weight: np.ndarray, scale: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Gives the table in the dtypes that a checkpoint has inside the library."""
    return jnp.asarray(weight.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scale)


# --- Values ---------------------------------------------------------------------------


def test_golden_rows(run, golden):
    """Every e4m3 byte, edge scales, and ids outside of the table."""
    data = golden("lookup")
    table = on_device(data["weight"], data["scale"])
    rows = run(kernels.lookup, *table, jnp.asarray(data["ids"]))
    assert_rows_equal(rows, data["expected_bf16_bits"])


def test_golden_rows_of_a_shard(run, golden):
    """A shard holds its window's rows as rows 0, 1, ..; others read as zeros."""
    data = golden("lookup")
    start, end = map(int, data["window"])
    table = on_device(data["weight"][start:end], data["scale"][start:end])
    rows = run(kernels.lookup, *table, jnp.asarray(data["ids"]), row_start=start)
    assert_rows_equal(rows, data["expected_window_bf16_bits"])


def test_all_65536_byte_pairs(run):
    """Pitfall: scale bytes 0 and 255, NaN codes and -0 each have their own way."""
    weight = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    ids = np.arange(256, dtype=np.int32)
    rows = run(kernels.lookup, *on_device(weight, scale), jnp.asarray(ids))
    assert_rows_equal(rows, reference.lookup(weight, scale, ids))


def test_all_65536_byte_pairs_packed(run):
    """Packed rows are the bytes themselves, whatever they mean."""
    weight = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    ids = np.arange(256, dtype=np.int32)
    rows = run(kernels.lookup_packed, *on_device(weight, scale), jnp.asarray(ids))
    np.testing.assert_array_equal(rows, reference.lookup_packed(weight, scale, ids))


@pytest.mark.parametrize("operation", ["lookup", "lookup_packed"])
@pytest.mark.parametrize("shape", [(0,), (1,), (13,), (0, 24), (3, 24), (2, 3, 5)])
def test_ids_of_any_shape(run, operation, shape):
    """T = 0, 1 and a prime, with repeated ids and ids on both sides of the table."""
    weight, scale = random_table(16, 256)
    ids = np.random.default_rng(1).integers(-4, 20, shape, np.int32)
    rows = run(getattr(kernels, operation), *on_device(weight, scale), jnp.asarray(ids))
    expected = getattr(reference, operation)(weight, scale, ids)
    chex.assert_shape(rows, expected.shape)
    if operation == "lookup":
        assert_rows_equal(rows, expected)
    else:
        np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("width", [32, 64, 96, 256, 288])
def test_rows_of_any_width(run, width):
    """D is any multiple of 32."""
    weight, scale = random_table(40, width)
    ids = jnp.asarray(np.random.default_rng(2).integers(-2, 42, 50, np.int32))
    rows = run(kernels.lookup, *on_device(weight, scale), ids)
    assert_rows_equal(rows, reference.lookup(weight, scale, np.asarray(ids)))


@hypothesis.given(
    rows=st.integers(0, 9),
    start=st.integers(-3, 12),
    length=st.none() | st.integers(-2, 12),
    ids=st.lists(st.integers(-5, 25), max_size=12),
)
def test_a_window_answers_for_its_own_ids_only(rows, start, length, ids):
    """Any window, also an empty one, one past the table, and a table of no rows."""
    weight, scale = random_table(rows, 32)
    end = None if length is None else start + length
    ids = np.array(ids, np.int32)
    # A window never reaches past the rows that exist.
    stop = start + rows if end is None else min(end, start + rows)
    got = kernels.lookup(
        *on_device(weight, scale),
        jnp.asarray(ids),
        row_start=start,
        row_end=end,
        backend="xla",
    )
    assert_rows_equal(got, reference.lookup(weight, scale, ids, start, stop))


def test_shards_add_up_to_the_table(run):
    """Each id is answered by one shard; shard starts are traced values."""
    weight, scale = random_table(42, 256, seed=3)
    scale = np.clip(scale, 100, 140)
    weight[reference.E4M3[weight] != reference.E4M3[weight]] = 0
    ids = jnp.asarray(np.random.default_rng(4).integers(-1, 43, 31, np.int32))
    run(kernels.lookup, *on_device(weight, scale), ids)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def shard(weight, scale, start):
        return run(kernels.lookup, weight, scale, ids, row_start=start)

    parts = [
        shard(*on_device(weight[s : s + 7], scale[s : s + 7]), jnp.int32(s))
        for s in range(0, 42, 7)
    ]
    total = np.sum([np.asarray(part).astype(np.float32) for part in parts], axis=0)
    expected = reference.bf16_to_float(reference.lookup(weight, scale, np.asarray(ids)))
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("end", [None, 2**31 - 1])
def test_the_last_rows_that_int32_can_name(run, end):
    """A shard whose padding would reach past 2^31 - 1 still has its first rows."""
    weight, scale = random_table(16, 256)
    start = 2**31 - 1 - 10
    ids = np.array([start - 1, start, 2**31 - 2, -1, 0, -(2**31)], np.int32)
    rows = run(
        kernels.lookup,
        *on_device(weight, scale),
        jnp.asarray(ids),
        row_start=start,
        row_end=end,
    )
    stop = start + 16 if end is None else end
    assert_rows_equal(rows, reference.lookup(weight, scale, ids, start, stop))


def test_int64_ids_are_not_truncated(run):
    """An id of 2^32 + 3 names no row; it must not read row 3."""
    weight, scale = random_table(8, 256)
    with jax.enable_x64(True):
        ids = jnp.asarray(np.array([3, 2**32 + 3, -(2**32) + 3, 2**31], np.int64))
        rows = run(kernels.lookup, *on_device(weight, scale), ids)
    assert_rows_equal(rows, reference.lookup(weight, scale, np.array([3, -1, -1, -1])))


def test_e8m0_scales_are_their_bytes(run):
    """A table may carry its scales as E8M0 numbers."""
    weight, scale = random_table(16, 256)
    ids = jnp.arange(16)
    numbers = jnp.asarray(scale.view(ml_dtypes.float8_e8m0fnu))
    rows = run(kernels.lookup, on_device(weight, scale)[0], numbers, ids)
    assert_rows_equal(rows, reference.lookup(weight, scale, np.arange(16)))


# --- Offsets beyond 32 bits -----------------------------------------------------------


def virtual_bytes(rows: int, width: int) -> np.ndarray:
    """Reserves zeros that take memory only where they are touched."""
    # Linux's number for MAP_NORESERVE, which Python names from 3.13 on.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
    return np.frombuffer(mmap.mmap(-1, rows * width, flags), np.uint8).reshape(
        rows, width
    )


def row_of_id(row: int) -> tuple[np.ndarray, np.ndarray]:
    """Gives each row its own bytes, made from its number."""
    rng = np.random.default_rng(row)
    return rng.integers(0, 255, 256, np.uint8), rng.integers(0, 255, 8, np.uint8)


@functools.cache
def virtual_table(row_ids: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Makes V4.1's first table with the given rows written, without copying it."""
    weight, scale = virtual_bytes(V41_ROWS, 256), virtual_bytes(V41_ROWS, 8)
    for row in row_ids:
        weight[row], scale[row] = row_of_id(row)
    cpu = jax.devices("cpu")[0]
    table = jax.device_put((weight, scale), cpu)
    for array, source in zip(table, (weight, scale), strict=True):
        assert array.unsafe_buffer_pointer() == source.ctypes.data, "it was copied"
    return table


def compiled_lookup(operation, weight, scale, ids) -> jax.Array:
    """Reads rows, unless that would copy the table: it is larger than the machine."""
    ids = jnp.asarray(ids, jnp.int32)
    call = jax.jit(functools.partial(operation, backend="xla"))
    compiled = call.lower(weight, scale, ids).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 2**28
    return compiled(weight, scale, ids)


def test_offsets_beyond_32_bits():
    """Pitfall: byte 2^31 of the values is row 8,388,608, of the scales 268,435,456."""
    edges = [8_388_607, 8_388_608, 16_777_215, 16_777_216, 268_435_455, 268_435_456]
    ids = [0, *edges, V41_ROWS - 1]
    weight, scale = virtual_table(tuple(ids))
    expected = [row_of_id(row) for row in ids]
    packed = compiled_lookup(kernels.lookup_packed, weight, scale, ids)
    np.testing.assert_array_equal(packed, [np.concatenate(pair) for pair in expected])
    rows = compiled_lookup(kernels.lookup, weight, scale, ids)
    assert_rows_equal(
        rows,
        reference.bf16_bits(
            np.array([reference.dequantize(*pair) for pair in expected])
        ),
    )


def test_the_real_rows_of_a_real_text(golden):
    """Pitfall: small random tables hide faults that V4.1's primes and sizes show."""
    ids = golden("hash_v41")["expected"][:, 0]
    table = virtual_table(tuple(sorted(set(ids.ravel().tolist()))))
    rows = compiled_lookup(kernels.lookup, *table, ids)
    expected = [
        [reference.dequantize(*row_of_id(row)) for row in token] for token in ids
    ]
    assert_rows_equal(rows, reference.bf16_bits(np.array(expected)))


@pytest.mark.parametrize("operation", ["lookup", "lookup_packed"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.uint8])
@pytest.mark.parametrize("scale_dtype", [jnp.uint8, jnp.float8_e8m0fnu])
def test_the_table_is_never_made_in_a_wider_type(operation, dtype, scale_dtype):
    """Pitfall: a compiler that casts before it gathers copies the whole table."""
    weight = jax.ShapeDtypeStruct((V41_ROWS, 256), dtype)
    scale = jax.ShapeDtypeStruct((V41_ROWS, 8), scale_dtype)
    ids = jax.ShapeDtypeStruct((64, 24), jnp.int32)
    call = functools.partial(getattr(kernels, operation), backend="xla")
    memory = jax.jit(call).lower(weight, scale, ids).compile().memory_analysis()
    assert memory is not None
    rows = 64 * 24
    assert memory.temp_size_in_bytes < 16 * rows * 264
    assert memory.output_size_in_bytes <= rows * 512


# --- Transformations ------------------------------------------------------------------


def test_jit_traces_once(run):
    """Other ids, and another window, run the compiled code."""
    weight, scale = random_table(20, 256)
    table = on_device(weight, scale)
    run(kernels.lookup, *table, jnp.arange(3))

    @jax.jit
    @chex.assert_max_traces(n=1)
    def call(ids, start):
        return run(kernels.lookup, *table, ids, row_start=start)

    for seed, start in ((0, 0), (1, 5)):
        ids = np.random.default_rng(seed).integers(-2, 28, 17, np.int32)
        rows = call(jnp.asarray(ids), start)
        assert_rows_equal(rows, reference.lookup(weight, scale, ids, start))


def test_vmap_over_ids(run):
    """A batch axis equals more ids."""
    weight, scale = random_table(20, 256)
    ids = np.random.default_rng(5).integers(-2, 22, (3, 7), np.int32)
    call = functools.partial(run, kernels.lookup, *on_device(weight, scale))
    rows = jax.jit(jax.vmap(call))(jnp.asarray(ids))
    assert_rows_equal(rows, reference.lookup(weight, scale, ids))


def test_vmap_over_tables(run):
    """Several tables, each with its own ids."""
    weight, scale = random_table(30, 256)
    ids = np.random.default_rng(6).integers(-2, 12, (3, 7), np.int32)
    tables = [array.reshape(3, 10, -1) for array in on_device(weight, scale)]
    rows = jax.vmap(functools.partial(run, kernels.lookup))(*tables, jnp.asarray(ids))
    for index in range(3):
        part = slice(10 * index, 10 * index + 10)
        expected = reference.lookup(weight[part], scale[part], ids[index])
        assert_rows_equal(rows[index], expected)


def test_scan_over_decode_steps(run):
    """A table closed over by a loop gives the rows of one call."""
    weight, scale = random_table(20, 256)
    table = on_device(weight, scale)
    ids = np.random.default_rng(7).integers(-2, 22, (5, 4), np.int32)

    @jax.jit
    def decode(ids):
        def step(count, ids):
            return count + 1, run(kernels.lookup, *table, ids)

        return jax.lax.scan(step, 0, ids)

    count, rows = decode(jnp.asarray(ids))
    assert count == 5
    assert_rows_equal(rows, reference.lookup(weight, scale, ids))


def test_checkpoint_and_grad_go_through_an_fp8_table(run):
    """The table is a constant; what is computed from its rows is differentiated."""
    weight, scale = random_table(8, 256)
    scale = np.full_like(scale, 127)
    table, ids = on_device(weight & 0x77, scale), jnp.array([3, 3, -1, 7])

    @jax.checkpoint
    def loss(factor):
        rows = run(kernels.lookup, *table, ids).astype(jnp.float32)
        return (factor * rows).sum()

    gradient = jax.grad(loss)(jnp.ones(256))
    bits = reference.lookup(weight & 0x77, scale, np.asarray(ids))
    expected = reference.bf16_to_float(bits).sum(axis=0)
    assert_within("gradient_float32", gradient, expected, np.abs(expected))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_float_table_gets_the_gradient_of_its_rows(dtype):
    """Repeated ids add up, ids outside of the window add nothing."""
    rng = np.random.default_rng(8)
    table = jnp.asarray(rng.integers(-4, 5, (10, 32)), dtype)
    ids = np.array([7, 5, 5, 5, 30, -1, 14], np.int32)
    cotangent = rng.integers(-4, 5, (7, 32)).astype(np.float32)

    def loss(table):
        rows = kernels.lookup(table, None, jnp.asarray(ids), row_start=5)
        chex.assert_type(rows, dtype)
        return (rows.astype(jnp.float32) * cotangent).sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(table)
    expected = np.zeros((10, 32))
    for row, part in zip(ids, cotangent, strict=True):
        if 5 <= row < 15:
            expected[row - 5] += part
    chex.assert_type(gradient, dtype)
    np.testing.assert_array_equal(np.asarray(gradient).astype(np.float64), expected)
    assert value == (np.asarray(table).astype(np.float32) * expected).sum()


def test_x64_changes_nothing(run):
    """The rows and their dtype are those of the default mode."""
    weight, scale = random_table(20, 256)
    ids = np.random.default_rng(9).integers(-2, 22, 11, np.int32)
    with jax.enable_x64(True):
        rows = run(kernels.lookup, *on_device(weight, scale), jnp.asarray(ids))
    assert_rows_equal(rows, reference.lookup(weight, scale, ids))


# --- Refusals -------------------------------------------------------------------------


def spec(*shape, dtype=jnp.uint8):
    """Makes an operand of zeros."""
    return jnp.zeros(shape, dtype)


@pytest.mark.usefixtures("library_errors")
@pytest.mark.parametrize(
    ("operands", "error", "message"),
    [
        ((spec(4, 64), spec(4, 1), spec(3, dtype=jnp.int32)), ValueError, "scale"),
        ((spec(4, 64), spec(5, 2), spec(3, dtype=jnp.int32)), ValueError, "scale"),
        ((spec(4, 33), spec(4, 1), spec(3, dtype=jnp.int32)), ValueError, "of 32"),
        ((spec(4), spec(4, 1), spec(3, dtype=jnp.int32)), ValueError, "weight"),
        ((spec(4, 64), spec(4, 2), spec(3, dtype=jnp.float32)), TypeError, "ids"),
        (
            (spec(4, 64), spec(4, 2, dtype=jnp.float32), spec(3, dtype=jnp.int32)),
            TypeError,
            "scale",
        ),
        (
            (spec(4, 64, dtype=jnp.int8), spec(4, 2), spec(3, dtype=jnp.int32)),
            TypeError,
            "weight",
        ),
        ((spec(4, 64), None, spec(3, dtype=jnp.int32)), TypeError, "scale"),
    ],
)
@pytest.mark.parametrize("operation", ["lookup", "lookup_packed"])
def test_operands_that_do_not_fit_are_refused_by_name(
    operation, operands, error, message
):
    """One error that says what was given and what fits."""
    with pytest.raises(error, match=message):
        getattr(kernels, operation)(*operands)


def test_an_unknown_backend_is_refused():
    """Typing errors in a backend's name do not fall back to another."""
    weight, scale = on_device(*random_table(4, 32))
    backend: Any = "triton"
    with pytest.raises((ValueError, TypeError), match=r"triton"):
        kernels.lookup(weight, scale, jnp.arange(4), backend=backend)


# --- Tables of several layers ---------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_layers_are_those_of_each(packed):
    """Tables of different length, and bounds that promise more rows than they have."""
    parts = [random_table(rows, 64, seed=rows) for rows in (37, 0, 11)]
    weights, scales = zip(*(on_device(*part) for part in parts), strict=True)
    bounds = np.array([[0, 37], [5, 9], [100, 2**31 - 1]], np.int32)
    ids = np.random.default_rng(0).integers(-2, 120, (5, 3, 4)).astype(np.int32)
    rows = kernels.lookup_layers(
        weights, scales, jnp.asarray(ids), jnp.asarray(bounds), packed=packed
    )
    each = kernels.lookup_packed if packed else kernels.lookup
    for layer, (start, end) in enumerate(bounds):
        wanted = each(
            weights[layer],
            scales[layer],
            jnp.asarray(ids[:, layer]),
            row_start=start,
            row_end=end,
        )
        np.testing.assert_array_equal(
            np.asarray(rows[:, layer]).view(np.uint8), np.asarray(wanted).view(np.uint8)
        )


@pytest.mark.parametrize("first", [0, 1, 3, 4, 6])
def test_columns_of_layers_are_those_cut_out_before(first):
    """Three of four columns: those beyond read as zeros, whatever ids lie there."""
    parts = [random_table(rows, 64, seed=rows) for rows in (37, 11)]
    weights, scales = zip(*(on_device(*part) for part in parts), strict=True)
    bounds = jnp.array([[0, 37], [5, 9]], jnp.int32)
    ids = np.random.default_rng(0).integers(0, 37, (5, 2, 4)).astype(np.int32)
    wanted = np.full((5, 2, 3), -1, np.int32)
    wanted[:, :, : max(4 - first, 0)] = ids[:, :, first : first + 3]
    windows = jnp.pad(bounds, ((0, 0), (0, 1)), constant_values=first)
    read = jax.jit(kernels.lookup_layers, static_argnames="columns")
    np.testing.assert_array_equal(
        read(weights, scales, jnp.asarray(ids), windows, columns=3).view(np.uint16),
        read(weights, scales, jnp.asarray(wanted), bounds).view(np.uint16),
    )


def test_rows_of_layers_have_the_gradient_of_float_tables():
    tables = [jnp.ones((5, 32)), jnp.ones((4, 32))]
    ids, bounds = jnp.array([[[1, 1], [3, -1]]]), jnp.array([[0, 5], [0, 4]])

    def total(tables):
        return kernels.lookup_layers(tables, [None, None], ids, bounds).sum()

    first, second = jax.grad(total)(tables)
    assert first[:, 0].tolist() == [0, 2, 0, 0, 0]
    assert second[:, 0].tolist() == [0, 0, 0, 1]


def test_rows_of_layers_need_ids_of_each(library_errors):
    table = jnp.ones((4, 32))
    ids, bounds = jnp.zeros((5, 2, 3), jnp.int32), jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"for 1 tables they must be \[T, 1, C\]"):
        kernels.lookup_layers([table], [None], ids, bounds)
    with pytest.raises(ValueError, match=r"must be \[T, 1, C\] and \(1, 3\)"):
        kernels.lookup_layers([table], [None], ids[:, :1], bounds, columns=2)
