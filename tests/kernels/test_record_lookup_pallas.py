"""The lookup at an address: its rows, what it touches, its refusal, that it compiles.

The inline code runs on simulated threads; what the address names is a buffer of its
own, so that a read beside the table fails.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import aot
from kernels.simulated_threads import Memory, Word, simulate

from engram_jax.kernels import lookup_pallas, record_lookup, record_lookup_pallas

ROWS = 40


def make_records(width: int) -> np.ndarray:
    shape = ROWS, width + width // 32
    return np.random.default_rng(width).integers(0, 256, shape).astype(np.uint8)


def run(monkeypatch, records: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, Memory]:
    """Runs the kernel's threads on flat ids."""
    width = records.shape[1] * 32 // 33
    sizes = lookup_pallas.Sizes(width, ids.size)
    out = np.full((ids.size, records.shape[1]), 0xAA, np.uint8)
    threads = sizes.pieces(packed=True) + 5  # some have nothing to do
    operands = {"ids": ids, "table": np.zeros(2, np.uint32), "records": records}
    memory = Memory(operands, {"out": out}, threads=threads)
    address = np.array([int(memory.address("records").value)], "<u8")
    memory.bytes[memory.names.index("table")][:] = address.view(np.uint8)
    simulate(monkeypatch, memory, lookup_pallas, record_lookup_pallas)
    locate = functools.partial(
        record_lookup_pallas.record_row,
        {name: name for name in memory.names},
        num_rows=ROWS,
        width=width,
    )
    mine = [Word(np.arange(threads))]
    lookup_pallas.copy_packed(locate, memory.address("out"), mine, sizes)
    return out, memory


@pytest.mark.parametrize("width", [32, 64, 96, 256, 288])
def test_rows_are_the_records(monkeypatch, width):
    """Any width: a row begins at a multiple of 1, 2, 4 or 8 bytes."""
    records = make_records(width)
    ids = np.array([0, ROWS - 1, 7, 7, 13], np.int32)
    out, memory = run(monkeypatch, records, ids)
    np.testing.assert_array_equal(out, records[ids])
    assert memory.touched["records"]


def test_ids_outside_read_as_zeros_and_touch_nothing(monkeypatch):
    ids = np.array([-1, ROWS, -(2**31), 2**31 - 1], np.int32)
    out, memory = run(monkeypatch, make_records(64), ids)
    assert not out.any()
    assert not memory.touched["records"]


def test_refuses_what_it_cannot_count():
    ids = jax.ShapeDtypeStruct((70_000_000,), jnp.int32)
    address = jax.ShapeDtypeStruct((2,), jnp.uint32)
    read = functools.partial(record_lookup, num_rows=10, head_dim=256)
    with pytest.raises(NotImplementedError, match="more pieces than 32 bits"):
        jax.eval_shape(read, address, ids)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 256), (16, 96), (4096, 256)])
def test_compiles_for_hopper(tokens, width, x64):
    """V4.1's rows, more bytes than 32 bits count: one kernel, and no table in it."""
    read = functools.partial(record_lookup, num_rows=384_006_168, head_dim=width)
    with jax.enable_x64(x64):
        compiled = aot.compile_for_hopper(
            read,
            aot.operand((2,), jnp.uint32),
            aot.operand((tokens, 24), jnp.int32),
        )
    text = aot.text_of(compiled)
    assert text.count("mosaic_gpu") >= 1
    assert aot.temporary_bytes(compiled) == 0
    assert "fusion(" not in text


def test_compiles_inside_transformations():
    def read(address, ids):
        once = functools.partial(record_lookup, address, num_rows=100, head_dim=64)
        _, scanned = jax.lax.scan(lambda carry, i: (carry, once(i)), 0, ids)
        return scanned, jax.vmap(jax.checkpoint(once))(ids)

    compiled = aot.compile_for_hopper(
        read, aot.operand((2,), jnp.uint32), aot.operand((6, 24), jnp.int32)
    )
    assert aot.text_of(compiled).count("mosaic_gpu") >= 2
