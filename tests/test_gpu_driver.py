"""Memory across processes, against a driver that is a few Python functions."""
# ruff: noqa: N802, the names of functions are CUDA's

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from engram_jax import gpu_driver

ALREADY_MAPPED, INVALID = 208, 1


class Driver:
    """What the functions ask of CUDA: two GPUs, and one allocation on each."""

    def __init__(self):
        self.stack, self.retained, self.mapped = [], 0, set()
        self.reachable = {(10, 11)}

    def __getattr__(self, name):
        raise AssertionError(f"{name} is not part of what may be called")

    def cuDeviceGet(self, device, number):
        device._obj.value = 10 + number
        return 0 if number < 2 else INVALID

    def cuDeviceCanAccessPeer(self, answer, one, other):
        answer._obj.value = (one.value, other.value) in self.reachable
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 * device.value
        self.retained += 1
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):
        self.retained -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.stack.pop()
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):
        if address.value < 1 << 40:
            return INVALID
        base._obj.value = address.value >> 40 << 40
        size._obj.value = 1 << 40
        return 0

    def cuIpcGetMemHandle(self, handle, base):
        assert self.stack, "no context"
        text = f"allocation {base.value >> 40}".encode()
        ctypes.memmove(handle, text.ljust(64, b"\0"), 64)
        return 0

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):
        assert flags == 1  # peer access on demand
        key = self.stack[-1], bytes(handle)
        if key in self.mapped:
            return ALREADY_MAPPED
        self.mapped.add(key)
        number = int(bytes(handle).rstrip(b"\0").split()[1])
        address._obj.value = (self.stack[-1] << 50) + (number << 44)
        return 0

    def cuGetErrorName(self, code, text):
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    monkeypatch.setattr(gpu_driver, "_driver", lambda: stand_in)
    gpu_driver.can_reach.cache_clear()
    gpu_driver._opened.cache_clear()
    yield stand_in
    assert not stand_in.stack
    assert stand_in.retained == 0
    gpu_driver.can_reach.cache_clear()
    gpu_driver._opened.cache_clear()


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


def test_tables_within_one_allocation_are_opened_with_it_once(driver):
    """Pitfall: a handle is of the whole allocation, and is not opened twice."""
    first, second = ((7 << 40) + offset for offset in (4096, 123_456_789_012))
    exported = [gpu_driver.export_memory(0, address) for address in (first, second)]
    assert {x.shape for x in exported} == {(gpu_driver.EXPORT_BYTES,)}
    opened = [gpu_driver.open_memory(1, part) for part in exported]
    base = (1100 << 50) + (7 << 44)
    assert opened == [base + 4096, base + 123_456_789_012]
    # Another GPU of this process has an address of its own.
    assert gpu_driver.open_memory(0, exported[0]) == (1000 << 50) + (7 << 44) + 4096


def test_memory_of_another_host_is_refused(driver, monkeypatch, tmp_path):
    exported = gpu_driver.export_memory(0, 7 << 40)
    other = tmp_path / "boot_id"
    other.write_text("11111111-2222-3333-4444-555555555555\n")
    monkeypatch.setattr(gpu_driver, "_BOOT_ID", other)
    with pytest.raises(OSError, match="the memory is on another host"):
        gpu_driver.open_memory(1, exported)


def test_the_driver_s_refusals_are_named(driver):
    with pytest.raises(OSError, match=r"cuMemGetAddressRange_v2: CUDA_ERROR_1 \(1\)"):
        gpu_driver.export_memory(0, 5)
    exported = gpu_driver.export_memory(0, 7 << 40)
    gpu_driver.open_memory(1, exported)
    gpu_driver._opened.cache_clear()
    with pytest.raises(OSError, match="CUDA_ERROR_208"):
        gpu_driver.open_memory(1, np.array(exported))
