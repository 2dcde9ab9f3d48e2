"""Memory across processes, against a driver that is a few Python functions."""

from __future__ import annotations

import contextlib
import ctypes
import os

import pytest
from driver_stand_in import PAGE, Driver

from engram_jax import gpu_driver

BASE, SIZE = 7 << 40, 4 * PAGE
CONTENT = os.urandom(SIZE)


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(gpu_driver, "_driver", lambda: stand_in)
    monkeypatch.setattr(gpu_driver, "_kept", set())
    monkeypatch.setattr(gpu_driver, "_mapped", {})
    gpu_driver.can_reach.cache_clear()
    yield stand_in
    assert not stand_in.stack
    assert stand_in.retained == 0
    assert not stand_in.imported  # a mapping needs no handle
    assert stand_in.mapped == set(stand_in.reserved)
    gpu_driver.can_reach.cache_clear()
    stand_in.close()


@contextlib.contextmanager
def exported(handle):
    descriptor = gpu_driver.export_allocation(0, handle)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_the_driver_says_who_reaches_whom(driver):
    assert gpu_driver.can_reach(0, 1)
    assert not gpu_driver.can_reach(1, 0)
    assert not gpu_driver.can_reach(0, 5)  # there is no such GPU


def test_without_a_driver_nothing_is_reached(monkeypatch):
    def no_library(name):
        raise OSError(name)

    gpu_driver._driver.cache_clear()
    gpu_driver.can_reach.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert not gpu_driver.can_reach(0, 1)
    gpu_driver.can_reach.cache_clear()


def test_what_lies_in_another_process_is_read_by_an_address(driver):
    handle = driver.allocate(CONTENT, BASE)
    found = gpu_driver.find_allocation(0, BASE + 4321, 100)
    assert found == (handle, SIZE, 4321)
    with exported(handle) as descriptor:
        address = gpu_driver.map_allocation(1, 5, handle, SIZE, descriptor)
    # The descriptor is closed and the handle released: the mapping stays.
    assert ctypes.string_at(address, SIZE) == CONTENT


def test_tables_within_one_allocation_are_mapped_with_it_once(driver):
    """For each GPU that reads; and each process's allocations are its own."""
    handle = driver.allocate(CONTENT, BASE)
    first, second = (gpu_driver.find_allocation(0, BASE + at, 8) for at in (0, 999))
    assert first == (handle, SIZE, 0)
    assert second == (handle, SIZE, 999)
    assert driver.allocations[handle].references == 2  # JAX's, and the one kept
    with exported(handle) as descriptor:
        readers = [(1, 5), (1, 5), (0, 5), (1, 6)]
        addresses = [
            gpu_driver.map_allocation(number, process, handle, SIZE, descriptor)
            for number, process in readers
        ]
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 3
    assert driver.calls.count("cuMemMap") == 3


def test_a_later_allocation_is_never_taken_for_an_earlier_one(driver):
    """Pitfall: JAX frees memory, and gets other memory at the same address."""
    before = driver.allocate(CONTENT, BASE)
    gpu_driver.find_allocation(0, BASE, SIZE)
    with exported(before) as descriptor:
        first = gpu_driver.map_allocation(1, 5, before, SIZE, descriptor)
    driver.free(before)
    driver.allocate(CONTENT[::-1], BASE)
    after, size, _ = gpu_driver.find_allocation(0, BASE, SIZE)
    assert after != before
    with exported(after) as descriptor:
        second = gpu_driver.map_allocation(1, 5, after, size, descriptor)
    assert ctypes.string_at(first, SIZE) == CONTENT
    assert ctypes.string_at(second, SIZE) == CONTENT[::-1]


@pytest.mark.parametrize("value", ["cuda_async", None])
def test_memory_of_another_allocator_is_refused(driver, monkeypatch, value):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    if value:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", value)
    driver.allocate(CONTENT, BASE)
    driver.refused.add("cuMemRetainAllocationHandle")
    with pytest.raises(OSError, match="of JAX's default allocator only") as error:
        gpu_driver.find_allocation(0, BASE, 8)
    said = str(error.value)
    assert f"CLIENT_ALLOCATOR is {value or 'not set'}: leave it unset" in said
    assert "(cuMemRetainAllocationHandle: CUDA_ERROR_1 (1))" in said


def test_memory_that_is_not_within_one_allocation_is_refused(driver):
    driver.allocate(CONTENT, BASE)
    driver.allocate(CONTENT, BASE + SIZE)
    gpu_driver.find_allocation(0, BASE + 100, SIZE - 100)
    with pytest.raises(OSError, match="lie in several allocations"):
        gpu_driver.find_allocation(0, BASE + 100, SIZE - 99)


@pytest.mark.parametrize(
    "name",
    [
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemGetAddressRange_v2",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
    ],
)
def test_the_driver_s_refusals_are_named_and_leave_nothing(driver, name):
    handle = driver.allocate(CONTENT, BASE)

    def open_it():
        gpu_driver.find_allocation(0, BASE, SIZE)
        with exported(handle) as descriptor:
            return gpu_driver.map_allocation(1, 5, handle, SIZE, descriptor)

    driver.refused.add(name)
    with pytest.raises(OSError, match=rf"{name}: CUDA_ERROR_1 \(1\)"):
        open_it()
    assert not driver.reserved
    driver.refused.clear()
    assert ctypes.string_at(open_it(), SIZE) == CONTENT
