"""Tables in host memory that the GPU reads by itself."""
# ruff: noqa: N802, the names of functions are CUDA's

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import prefetch_cases
import pytest
import small_stack
from flax import nnx
from record_cases import ROWS, expected, write_table
from small_stack import CONFIG

from engram_jax import (
    EngramPrefetch,
    ParallelEngramEmbedding,
    gpu_driver,
    registered_memory,
)
from engram_jax.host_memory import HostMemoryOptions
from engram_jax.host_storage import PinnedHostTable
from engram_jax.host_table import HostTable
from engram_jax.registered_memory import RegisteredMemory
from engram_jax.safetensors_file import read_header
from engram_jax.shared_table import SharedHostTable

REFUSED, READ_ONLY = 801, 8


class Driver:
    """What is asked of CUDA: two GPUs; memory that is read-only is so registered."""

    def __init__(self, read_only=()):
        self.read_only, self.known, self.log = set(read_only), {}, []

    def cuDeviceGet(self, device, number):
        device._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 + device.value
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.log.append(f"on {context.value - 100}")
        return 0

    def cuCtxPopCurrent_v2(self, context):
        return 0

    def cuCtxSynchronize(self):
        self.log.append("wait")
        return 0

    def cuMemHostRegister_v2(self, memory, size, flags):
        if memory.value in self.read_only and not flags & READ_ONLY:
            return REFUSED
        if memory.value in self.known or flags & 3 != 3:
            return REFUSED
        self.known[memory.value] = size.value
        return 0

    def cuMemHostGetDevicePointer_v2(self, where, memory, flags):
        assert memory.value in self.known
        where._obj.value = memory.value + (1 << 40)
        return 0

    def cuMemHostUnregister(self, memory):
        self.log.append("unregister")
        return 0 if self.known.pop(memory.value, None) else REFUSED

    def cuGetErrorName(self, code, text):
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(gpu_driver, "_driver", lambda: stand_in)
    return stand_in


@pytest.fixture
def on_gpus(driver, monkeypatch):
    """The driver, and two devices that look as if kernels ran on them."""

    class Device:
        def __init__(self, number):
            self.local_hardware_id = number

    monkeypatch.setattr(registered_memory, "missing_gpu_reason", lambda: None)
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(0), Device(1)])
    return driver


def pages(count: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, count * mmap.PAGESIZE), np.uint8)


def test_memory_that_may_not_be_written_is_registered_to_be_read(driver):
    """Pitfall: a table in shared memory is mapped for reading only."""
    first, second = pages(1), pages(2)
    driver.read_only.add(second.ctypes.data)
    for memory in (first, second):
        address = memory.ctypes.data
        assert gpu_driver.register(1, address, memory.nbytes) == address + (1 << 40)
        assert driver.known[address] == memory.nbytes
    assert driver.log == ["on 1"] * 2


def test_a_refusal_is_named(driver):
    memory = pages(1)
    gpu_driver.register(0, memory.ctypes.data, memory.nbytes)
    with pytest.raises(
        OSError, match=r"CUDA_ERROR_801.*; to be read only: cuMemHost.*CUDA_ERROR_801"
    ):
        gpu_driver.register(0, memory.ctypes.data, memory.nbytes)


def test_memory_is_given_back_when_no_gpu_reads_it(on_gpus):
    memory = pages(3)
    address = memory.ctypes.data
    registered = RegisteredMemory(memory)
    assert int(registered.address.view("<u8")[0]) == address + (1 << 40)
    assert registered.address.dtype == np.uint32
    del memory
    gc.collect()
    assert address in on_gpus.known  # it is still there
    on_gpus.log.clear()
    del registered
    gc.collect()
    assert not on_gpus.known
    assert on_gpus.log == ["on 0", "wait", "on 1", "wait", "on 0", "unregister"]


def test_a_failure_at_the_end_is_logged(on_gpus, caplog):
    memory = pages(1)
    registered = RegisteredMemory(memory)
    on_gpus.known.clear()
    del registered
    gc.collect()
    assert "stays registered with CUDA: cuMemHostUnregister" in caplog.text


@pytest.fixture
def source(tmp_path) -> Path:
    write_table(tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


def open_table(kind, source, **options):
    infos = read_header(source)
    if kind is SharedHostTable:
        options["directory"] = source.parent
    table = kind(infos["weight"], infos["scale"], **options)
    asked = options.get("options", HostMemoryOptions()).register
    known = "not yet" if asked else "off"  # loading starts no backend
    assert table.report.register == known
    assert not table.reads_on_device
    ParallelEngramEmbedding.from_storage(table)
    return table


@pytest.mark.parametrize("kind", [HostTable, SharedHostTable])
def test_without_a_gpu_the_host_reads(kind, source, caplog):
    caplog.set_level("INFO", "engram_jax")
    table = open_table(kind, source)
    assert "registered for the GPU to read: not available: the device" in caplog.text
    assert table.report.register == "not available: the device is a CPU, not a GPU"
    assert not table.reads_on_device
    off = open_table(kind, source, options=HostMemoryOptions(register=False))
    assert off.report.register == "off"


@pytest.mark.parametrize("kind", [HostTable, SharedHostTable])
def test_what_the_driver_refuses_is_reported(kind, source, on_gpus, monkeypatch):
    monkeypatch.setattr(Driver, "cuMemHostRegister_v2", lambda *_: REFUSED)
    table = open_table(kind, source)
    assert table.report.register.startswith("not available: cuMemHostRegister_v2")
    ids = np.array([0, ROWS - 1, -1])
    np.testing.assert_array_equal(table.gather(ids), expected(source, ids))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostTable, SharedHostTable])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_the_gpu_reads_what_the_host_reads(kind, source, tokens):
    table = open_table(kind, source)
    assert table.report.register == "on"
    assert table.reads_on_device
    ids = np.random.default_rng(0).integers(-2, ROWS + 2, (tokens, 24)).astype(np.int32)
    read = jax.jit(table.lookup_packed)
    wanted = expected(source, ids)
    for device in jax.local_devices():
        rows = read(jax.device_put(jnp.asarray(ids), device))
        assert rows.dtype == jnp.uint8
        np.testing.assert_array_equal(np.asarray(rows), wanted)
    assert "callback" not in read.lower(jnp.asarray(ids)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostTable, SharedHostTable])
def test_a_closed_table_serves_the_programs_that_have_it(kind, source):
    table = open_table(kind, source)
    read = jax.jit(table.lookup_packed)
    ids = jnp.arange(ROWS)
    wanted = np.asarray(read(ids))
    table.close()
    np.testing.assert_array_equal(np.asarray(read(ids)), wanted)
    with pytest.raises(ValueError, match="was closed"):
        read(ids[:3])  # another shape is another program
    del table, read
    gc.collect()
    # The driver takes the same memory again only if it had given it back.
    again = [open_table(kind, source) for _ in "abc"]
    assert all(one.report.register == "on" for one in again)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostTable, SharedHostTable])
def test_few_tokens_need_no_host_thread(tmp_path, kind):
    """And the rows are the same."""

    def storage(layer_id, values, scales):
        file = prefetch_cases.mapped(tmp_path)(layer_id, values, scales)
        del file
        return open_table(kind, tmp_path / f"{layer_id}.safetensors")

    whole = small_stack.make_stack()
    stack = prefetch_cases.with_storage(whole, storage)
    hidden = jnp.ones((65, CONFIG.hc_mult, CONFIG.hidden_size), jnp.bfloat16)
    with EngramPrefetch(stack) as prefetch:
        for tokens, direct in ((64, True), (65, False)):
            tokens_of = prefetch_cases.random_batch(tokens, 1)
            batch = prefetch.start(**tokens_of).result()
            assert (batch.rows is None) is direct
            out = prefetch_cases.run_layers(stack, hidden[:tokens], batch)
            wanted = prefetch_cases.run_layers(
                whole, hidden[:tokens], whole.batch(**tokens_of)
            )
            prefetch_cases.same(out, wanted)


def read_by_one_kernel(stack, hidden, batch) -> tuple[Any, Any]:
    """A batch's outputs, and the program that makes them."""
    graph, state = nnx.split(stack)

    @jax.jit
    def step(state, hidden, batch):
        stack = nnx.merge(graph, state)
        return prefetch_cases.run_layers(stack, hidden, stack.batch(**batch))

    return step(state, hidden, batch), step.lower(state, hidden, batch).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [HostTable, SharedHostTable, PinnedHostTable])
def test_decoding_hashes_and_reads_in_one_kernel(tmp_path, kind):
    def storage(layer_id, values, scales):
        prefetch_cases.mapped(tmp_path)(layer_id, values, scales)
        path = tmp_path / f"{layer_id}.safetensors"
        if kind is PinnedHostTable:
            return kind(values, scales)
        return open_table(kind, path)

    whole = small_stack.make_stack(  # rows wide enough, in records, too
        n_heads=8,
        vocab_base=20,
        head_dim=128,
        hidden_size=64,
        num_embeddings=(2000, 5000),
    )
    stack = prefetch_cases.with_storage(whole, storage)
    batch = {
        "input_ids": small_stack.random_ids(13),
        "positions": np.arange(13),
        "query_start_loc": np.array([0, 5, 11]),  # two tokens of no request
        "dead_mask": np.arange(13) % 5 == 3,
    }
    hidden = jnp.ones((13, 2, 64), jnp.bfloat16)
    out, program = read_by_one_kernel(stack, hidden, batch)
    wanted, known = read_by_one_kernel(whole, hidden, batch)
    prefetch_cases.same(out, wanted)
    for text in (program, known):
        assert "decode_front_end" in text
        assert "callback" not in text
