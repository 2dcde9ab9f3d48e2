"""Memory of other GPUs, by CUDA's driver: who reaches whom, and across processes.

Nothing in JAX says this. A handle of memory is 64 bytes that another process of the
same host turns into an address of its own; they are of whole allocations, which JAX's
allocator hands out in parts.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_HANDLE_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAZY_PEER_ACCESS = 1
EXPORT_BYTES = _HANDLE_BYTES + 8 + 40


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * _HANDLE_BYTES),)


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    return driver


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'error').decode()} ({code})")


@functools.cache
def can_reach(one: int, other: int) -> bool:
    """Say whether a GPU can read another's memory; JAX then lets it.

    Args:
      one: The reading GPU's number in this process, `device.local_hardware_id`.
      other: The other's.

    Returns:
      What the driver says; False without one.
    """
    devices, answer = (ctypes.c_int(), ctypes.c_int()), ctypes.c_int()
    try:
        for device, number in zip(devices, (one, other), strict=True):
            _call("cuDeviceGet", ctypes.byref(device), number)
        _call("cuDeviceCanAccessPeer", ctypes.byref(answer), *devices)
    except OSError:
        return False
    return answer.value == 1


@contextlib.contextmanager
def _context(number: int) -> Iterator[None]:
    """Make a GPU's context, JAX's own, current in this thread."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(device), number)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    _call("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", ctypes.byref(context))
        _call("cuDevicePrimaryCtxRelease_v2", device)


def export_memory(number: int, address: int) -> npt.NDArray[np.uint8]:
    """Describe memory so that another process of this host can open it.

    Args:
      number: The GPU's number in this process.
      address: Of memory on it.

    Returns:
      uint8 [EXPORT_BYTES]: a handle of its allocation, the offset in it, and which
      start of which machine it belongs to.

    Raises:
      OSError: The driver has no handle for such memory.
    """
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with _context(number):
        ends = ctypes.byref(base), ctypes.byref(size)
        _call("cuMemGetAddressRange_v2", *ends, ctypes.c_uint64(address))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    offset = (address - base.value).to_bytes(8, "little")
    known = bytes(handle) + offset + _boot_id()
    return np.frombuffer(known, np.uint8)


def open_memory(number: int, exported: npt.NDArray[np.uint8]) -> int:
    """Give an address for memory that another process has exported.

    It stays mapped until this process ends.

    Args:
      number: The number in this process of the GPU that shall read it.
      exported: What `export_memory` gave there.

    Returns:
      The address.

    Raises:
      OSError: It is of another host, or the driver cannot open it.
    """
    known = exported.tobytes()
    offset, boot = known[_HANDLE_BYTES : _HANDLE_BYTES + 8], known[_HANDLE_BYTES + 8 :]
    if boot != _boot_id():
        raise OSError("the memory is on another host")
    return _opened(number, known[:_HANDLE_BYTES]) + int.from_bytes(offset, "little")


@functools.cache  # an allocation is opened once by each GPU, and holds many tables
def _opened(number: int, handle: bytes) -> int:
    address, known = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
    with _context(number):
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), known, _LAZY_PEER_ACCESS)
    return address.value


def _boot_id() -> bytes:
    text = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return text.encode()[:40].ljust(40, b"\0")
