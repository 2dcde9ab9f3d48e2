"""Tables in a mapped file and in pinned host memory, against plain indexing."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from kernels import aot

from engram_jax import host_storage, mxfp8
from engram_jax.embedding import ParallelEngramEmbedding, RowStorage
from engram_jax.host_storage import (
    MappedFileTable,
    PinnedHostTable,
    available_host_memory,
    pinned_host_sharding,
)
from engram_jax.safetensors_file import SafetensorsWriter, read_header, read_rows

ROWS, WIDTH = 1000, 64


@pytest.fixture(scope="module")
def table_bytes() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 256, (ROWS, WIDTH), np.uint8)
    return values, rng.integers(0, 256, (ROWS, WIDTH // 32), np.uint8)


@pytest.fixture
def path(tmp_path, table_bytes) -> Path:
    path = tmp_path / "table.safetensors"
    values, scales = table_bytes
    tensors = {"scale": ("F8_E8M0", scales.shape), "weight": ("F8_E4M3", values.shape)}
    with SafetensorsWriter(path, tensors) as writer:
        writer.write("weight", values)
        writer.write("scale", scales)
    return path


def open_table(path: Path) -> MappedFileTable:
    infos = read_header(path)
    return MappedFileTable(infos["weight"], infos["scale"])


@pytest.fixture(params=["mapped_file", "pinned_host"])
def table(request, path, table_bytes) -> MappedFileTable | PinnedHostTable:
    if request.param == "mapped_file":
        return open_table(path)
    values, scales = table_bytes
    return PinnedHostTable(
        values.view(ml_dtypes.float8_e4m3fn), scales.view(ml_dtypes.float8_e8m0fnu)
    )


def expected_rows(table_bytes: tuple[np.ndarray, np.ndarray], ids: Any) -> np.ndarray:
    values, scales = table_bytes
    ids = np.asarray(ids)
    inside = (ids >= 0) & (ids < ROWS)
    safe = np.where(inside, ids, 0)
    rows = np.concatenate([values[safe], scales[safe]], axis=-1)
    return np.where(inside[..., None], rows, 0)


IDS = [
    [],
    [5],
    [0, ROWS - 1, 7, 7, 7],
    [-1, ROWS, 3, -(2**31), 2**31 - 1],
    [[1, 2, 3], [4, -1, ROWS - 1]],
    list(range(997)),
]


@pytest.mark.parametrize("ids", IDS, ids=lambda ids: f"n{np.size(ids)}")
def test_rows_equal_plain_indexing(table, table_bytes, ids):
    """Pitfall: an id of -1 wraps and one past the end clamps to other rows."""
    ids = np.array(ids, np.int32)
    wanted = expected_rows(table_bytes, ids)
    np.testing.assert_array_equal(table.lookup_packed(jnp.asarray(ids)), wanted)
    jitted = jax.jit(table.lookup_packed)(jnp.asarray(ids))
    assert jitted.dtype == jnp.uint8
    np.testing.assert_array_equal(jitted, wanted)


def test_tables_have_the_interface_of_the_embedding(table):
    assert isinstance(table, RowStorage)
    assert (table.num_rows, table.head_dim) == (ROWS, WIDTH)


def test_embedding_over_a_table_equals_the_device_table(table, table_bytes):
    values, scales = map(jnp.asarray, table_bytes)
    on_device = ParallelEngramEmbedding(values, scales)
    elsewhere = ParallelEngramEmbedding.from_storage(table)
    ids = jnp.array([[0, 1, -1], [999, 1000, 5]])

    @nnx.jit
    def both(module, ids):
        return module(ids), module.lookup_packed(ids)

    rows, packed = both(elsewhere, ids)
    wanted_rows, wanted_packed = both(on_device, ids)
    np.testing.assert_array_equal(packed, wanted_packed)
    np.testing.assert_array_equal(rows.view(jnp.uint16), wanted_rows.view(jnp.uint16))


def test_split_and_merge_under_plain_jit(table, table_bytes):
    embedding = ParallelEngramEmbedding.from_storage(table)
    graph, state = nnx.split(embedding)

    @jax.jit
    @chex.assert_max_traces(1)
    def rows(state, ids):
        return nnx.merge(graph, state).lookup_packed(ids)

    for start in (0, 50):
        ids = np.arange(start, start + 7)
        np.testing.assert_array_equal(
            rows(state, jnp.asarray(ids)), expected_rows(table_bytes, ids)
        )
    chex.clear_trace_counter()


def test_vmap_and_scan(table, table_bytes):
    ids = np.arange(12).reshape(3, 4)
    mapped = jax.jit(jax.vmap(table.lookup_packed))(jnp.asarray(ids))
    np.testing.assert_array_equal(mapped, expected_rows(table_bytes, ids))
    _, scanned = jax.jit(
        lambda xs: jax.lax.scan(lambda c, x: (c, table.lookup_packed(x)), 0, xs)
    )(jnp.asarray(ids))
    np.testing.assert_array_equal(scanned, expected_rows(table_bytes, ids))


def test_gradient_flows_past_the_table(table):
    ids = jnp.arange(4)

    def loss(scale):
        rows = mxfp8.dequantize(*mxfp8.unpack(table.lookup_packed(ids)))
        finite = jnp.where(jnp.isfinite(rows), rows, 0).astype(jnp.float32)
        return (jnp.clip(finite, -1, 1) * scale).sum()

    gradient = jax.jit(jax.grad(loss))(1.0)
    np.testing.assert_allclose(gradient, loss(1.0), rtol=1e-5)


# The mapped file


def test_values_and_scales_may_lie_in_two_files(tmp_path, table_bytes):
    values, scales = table_bytes
    infos = {}
    for name, dtype, array in (
        ("weight", "F8_E4M3", values),
        ("scale", "F8_E8M0", scales),
    ):
        path = tmp_path / f"{name}.safetensors"
        with SafetensorsWriter(path, {name: (dtype, array.shape)}) as writer:
            writer.write(name, array)
        infos |= read_header(path)
    table = MappedFileTable(infos["weight"], infos["scale"])
    np.testing.assert_array_equal(
        table.gather([3, -1]), expected_rows(table_bytes, [3, -1])
    )


@pytest.mark.parametrize("cold", [True, False])
def test_missing_pages_are_asked_for_at_once(path, table_bytes, monkeypatch, cold):
    """Pitfall: rows and scales in two places cost two misses a row."""
    table = open_table(path)
    asked = []
    monkeypatch.setattr(
        host_storage._MappedRows, "will_need", lambda _, rows: asked.append(rows)
    )
    faults = iter([0, 5 if cold else 0])

    class Usage:
        @property
        def ru_majflt(self) -> int:
            return next(faults)

    monkeypatch.setattr(host_storage.resource, "getrusage", lambda _: Usage())
    ids = np.arange(200)
    np.testing.assert_array_equal(table.gather(ids), expected_rows(table_bytes, ids))
    assert [rows.tolist() for rows in asked] == (
        [list(range(64, 200))] * 2 if cold else []
    )


def test_pages_are_asked_for_within_the_mapping(path):
    part = open_table(path)._parts[0]
    part.will_need(np.array([0, 1, ROWS - 1]))
    part.will_need(np.zeros(0, np.int64))


def test_cold_rows_come_right(path, table_bytes):
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    ids = np.random.default_rng(1).integers(-1, ROWS + 1, 500)
    np.testing.assert_array_equal(
        open_table(path).gather(ids), expected_rows(table_bytes, ids)
    )


@pytest.mark.parametrize("how", ["truncated", "replaced", "removed", "appended"])
def test_file_changed_under_its_table_is_refused(path, tmp_path, how):
    """Pitfall: reading a mapping beyond its file's end kills the process."""
    table = open_table(path)
    look = jax.jit(table.lookup_packed)
    look(jnp.arange(3)).block_until_ready()
    if how == "truncated":
        os.truncate(path, 500)
    elif how == "replaced":
        other = tmp_path / "other"
        shutil.copy(path, other)
        os.replace(other, path)
    elif how == "removed":
        path.unlink()
    else:
        with path.open("ab") as file:
            file.write(b"x")
    pattern = re.escape(str(path)) + " was truncated, replaced or changed"
    with pytest.raises(ValueError, match=pattern):
        table.gather([1])
    with pytest.raises(Exception, match=pattern):
        look(jnp.arange(3)).block_until_ready()


def test_rows_beyond_int32_byte_offsets_are_read(tmp_path):
    """Pitfall: int32 byte offsets overflow from row 8,388,608 of 256 values."""
    rows, width = 9_000_000, 256
    path = tmp_path / "large.safetensors"
    tensors = {"weight": ("F8_E4M3", (rows, width)), "scale": ("F8_E8M0", (rows, 8))}
    chosen = [8_388_607, 8_388_608, rows - 1]
    with SafetensorsWriter(path, tensors, sparse=True) as writer:
        for index, row in enumerate(chosen, 1):
            writer.write("weight", np.full((1, width), index, np.uint8), row)
            writer.write("scale", np.full((1, 8), 100 + index, np.uint8), row)
    packed = np.asarray(open_table(path).lookup_packed(jnp.array([*chosen, 0])))
    assert (packed[:3, :width] == np.arange(1, 4)[:, None]).all()
    assert (packed[:3, width:] == np.arange(101, 104)[:, None]).all()
    assert not packed[3].any()


# Pinned memory


def test_pinned_table_lies_in_pinned_memory(table_bytes):
    table = PinnedHostTable(*table_bytes)
    assert table.weight[...].sharding.memory_kind == "pinned_host"
    assert table.scale[...].sharding.memory_kind == "pinned_host"
    assert table.lookup_packed(jnp.arange(2)).sharding.memory_kind == "device"


def test_pinned_table_takes_rows_read_from_a_file(path, table_bytes):
    infos = read_header(path)
    table = PinnedHostTable(
        read_rows(infos["weight"], 0, ROWS), read_rows(infos["scale"], 0, ROWS)
    )
    np.testing.assert_array_equal(
        table.lookup_packed(jnp.arange(ROWS)), expected_rows(table_bytes, range(ROWS))
    )


def test_device_without_pinned_memory_is_refused(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self) -> list[Memory]:
            return [Memory()]

    monkeypatch.setattr(host_storage.jax, "local_devices", lambda: [Device()])
    with pytest.raises(ValueError, match="no pinned_host memory, only device"):
        pinned_host_sharding()


# What is refused


@pytest.mark.parametrize(
    ("weight", "scale", "named"),
    [
        (("F8_E4M3", (10, 64)), ("F8_E8M0", (10, 1)), "scale"),
        (("F8_E4M3", (10, 64)), ("F8_E8M0", (9, 2)), "scale"),
        (("F8_E4M3", (10, 64)), ("F32", (10, 2)), "scale is F32"),
        (("BF16", (10, 64)), ("F8_E8M0", (10, 2)), "weight is BF16"),
        (("F8_E4M3", (10, 48)), ("F8_E8M0", (10, 1)), "multiple of 32"),
        (("F8_E4M3", (640,)), ("F8_E8M0", (10, 2)), "weight"),
        (("F8_E4M3", (0, 64)), ("F8_E8M0", (0, 2)), "must have rows"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, weight, scale, named):
    path = tmp_path / "t.safetensors"
    with SafetensorsWriter(path, {"weight": weight, "scale": scale}, sparse=True):
        pass
    with pytest.raises(ValueError, match=named):
        open_table(path)


def test_pinned_parts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="scale"):
        PinnedHostTable(np.zeros((4, 32), np.uint8), np.zeros((4, 2), np.uint8))
    with pytest.raises(ValueError, match="float32"):
        PinnedHostTable(np.zeros((4, 32), np.float32), np.zeros((4, 1), np.uint8))


def test_available_memory_is_a_plausible_figure():
    assert 1 << 20 < available_host_memory() < 1 << 50


@pytest.mark.gpu
def test_pinned_table_serves_a_gpu(table_bytes):
    """On a GPU nothing but the rows asked for may move to the device."""
    table = PinnedHostTable(*table_bytes)
    ids = jnp.array([[0, 1, -1], [ROWS - 1, ROWS, 5]])
    compiled = jax.jit(table.lookup_packed).lower(ids).compile()
    np.testing.assert_array_equal(compiled(ids), expected_rows(table_bytes, ids))
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < table.weight[...].nbytes


@pytest.mark.gpu
def test_mapped_table_serves_a_gpu(path, table_bytes):
    ids = np.random.default_rng(0).integers(-1, ROWS + 1, (64, 24))
    rows = jax.jit(open_table(path).lookup_packed)(jnp.asarray(ids))
    assert rows.devices() == jnp.zeros(()).devices()
    np.testing.assert_array_equal(rows, expected_rows(table_bytes, ids))


def test_rows_are_read_after_they_have_arrived():
    """A copy into pinned memory goes on after the call that began it."""
    values = jnp.arange(1 << 26, dtype=jnp.uint32).astype(jnp.uint8).reshape(-1, 256)
    table = PinnedHostTable(values, jnp.full((1 << 18, 8), 127, jnp.uint8))
    out = np.empty((1, 264), np.uint8)
    table.read_into(np.array([(1 << 18) - 1]), out)
    np.testing.assert_array_equal(out[0, :256], np.arange(256))


@pytest.mark.parametrize("tokens", [1, 96])
def test_pinned_table_is_read_by_the_gpus_kernel(table_bytes, tokens):
    """Compiled for Hopper: the kernel alone, no copy of the table."""
    values, scales = table_bytes
    table = PinnedHostTable(values, scales)
    graph, state = nnx.split(table)

    def read(state, ids):
        return nnx.merge(graph, state).lookup_packed(ids)

    leaves, tree = jax.tree.flatten(state)
    operands = [
        aot.operand(x.shape, x.dtype, memory_kind="pinned_host") for x in leaves
    ]
    compiled = aot.compile_for_hopper(
        lambda operands, ids: read(jax.tree.unflatten(tree, operands), ids),
        operands,
        aot.operand((tokens, 24), jnp.int32),
    )
    assert aot.temporary_bytes(compiled) == 0
    assert "copy" not in aot.text_of(compiled)
