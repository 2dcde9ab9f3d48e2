"""Memory of other GPUs, by CUDA's driver: who reaches whom, and across processes.

Nothing in JAX says this. JAX's default allocator makes memory that can be given to
another process of the same host as a file descriptor. It is of a whole allocation,
which holds many arrays.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable, Iterator
from typing import Any

_POSIX_DESCRIPTOR = 1
_ON_DEVICE, _READ_AND_WRITE = 1, 3
_NO_FLAGS = ctypes.c_ulonglong(0)
_FOR_ALL_GPUS, _READ_ONLY = 1 | 2, 8  # 2: with an address there
_kept = set[int]()
_mapped = dict[tuple[int, int, int], int]()


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
    with contextlib.ExitStack() as undo:
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        undo.callback(_call, "cuDevicePrimaryCtxRelease_v2", device)
        _call("cuCtxPushCurrent_v2", context)
        undo.callback(_call, "cuCtxPopCurrent_v2", ctypes.byref(context))
        yield


def find_allocation(number: int, address: int, size: int) -> tuple[int, int, int]:
    """Find the allocation that memory is a part of, to export it.

    Args:
      number: The GPU's number in this process.
      address: Of memory on it.
      size: Its bytes.

    Returns:
      The allocation's handle, which no other one of this process ever has; its bytes;
      and where in it the memory begins.

    Raises:
      OSError: It is not of JAX's default allocator, and no other process can read it.
    """
    base, whole = ctypes.c_uint64(), ctypes.c_size_t()
    handle = ctypes.c_ulonglong()
    with _context(number):
        ends = ctypes.byref(base), ctypes.byref(whole)
        _call("cuMemGetAddressRange_v2", *ends, ctypes.c_uint64(address))
        retained = ctypes.byref(handle), ctypes.c_void_p(address)
        try:
            _call("cuMemRetainAllocationHandle", *retained)
        except OSError as error:
            allocator = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "not set")
            raise OSError(
                "other processes can read memory of JAX's default allocator only; "
                f"XLA_PYTHON_CLIENT_ALLOCATOR is {allocator}: leave it unset ({error})"
            ) from error
        # One reference is kept for good. While it is, the driver gives the handle to no
        # other allocation, so that processes which have mapped this one know it again,
        # and never take a later one at the same address for it. It costs no memory
        # beyond that which their mappings hold anyway.
        if handle.value in _kept:
            _call("cuMemRelease", handle)
        _kept.add(handle.value)
    offset = address - base.value
    if offset + size > whole.value:
        raise OSError(f"{size} bytes at {address:#x} lie in several allocations")
    return handle.value, whole.value, offset


def export_allocation(number: int, handle: int) -> int:
    """Make a file descriptor of an allocation.

    Args:
      number: The GPU's number in this process.
      handle: As `find_allocation` gives it.

    Returns:
      The descriptor; the caller closes it.

    Raises:
      OSError: The driver makes none of such memory.
    """
    descriptor = ctypes.c_int(-1)
    with _context(number):
        _call(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            ctypes.c_ulonglong(handle),
            _POSIX_DESCRIPTOR,
            _NO_FLAGS,
        )
    return descriptor.value


def map_allocation(
    number: int, process: int, handle: int, size: int, descriptor: int
) -> int:
    """Give an address for an allocation of another process.

    It is mapped once for a reading GPU, and until this process ends.

    Args:
      number: The number in this process of the GPU that shall read it.
      process: The number of the process that exported it.
      handle: The allocation's handle there.
      size: Its bytes.
      descriptor: What `export_allocation` gave there, as it arrived here.

    Returns:
      The address.

    Raises:
      OSError: The driver cannot map it.
    """
    key = number, process, handle
    if key not in _mapped:
        with _context(number):
            _mapped[key] = _map(number, ctypes.c_size_t(size), descriptor)
    return _mapped[key]


def _map(number: int, size: ctypes.c_size_t, descriptor: int) -> int:
    address, handle = ctypes.c_uint64(), ctypes.c_ulonglong()
    imported = ctypes.byref(handle), ctypes.c_void_p(descriptor), _POSIX_DESCRIPTOR
    _call("cuMemImportFromShareableHandle", *imported)
    with contextlib.ExitStack() as undo:
        zero = ctypes.c_size_t(0)
        try:
            place = ctypes.byref(address), size, zero, ctypes.c_uint64(0), _NO_FLAGS
            _call("cuMemAddressReserve", *place)
            undo.callback(_call, "cuMemAddressFree", address, size)
            _call("cuMemMap", address, size, zero, handle, _NO_FLAGS)
            undo.callback(_call, "cuMemUnmap", address, size)
        finally:
            _call("cuMemRelease", handle)  # the mapping holds the memory
        # Not every driver lets a GPU have memory for reading alone.
        access = (ctypes.c_int * 3)(_ON_DEVICE, number, _READ_AND_WRITE)
        _call("cuMemSetAccess", address, size, access, ctypes.c_size_t(1))
        undo.pop_all()
    return address.value


def register(number: int, address: int, size: int) -> int:
    """Let all GPUs of this process read host memory.

    Args:
      number: A GPU's number in this process.
      address: Of the memory, at the start of a page.
      size: Its bytes. They are locked in memory from now on.

    Returns:
      Where GPUs find it.

    Raises:
      OSError: The driver refuses.
    """
    where, size_ = ctypes.c_uint64(), ctypes.c_size_t(size)
    memory = ctypes.c_void_p(address)
    with _context(number):
        try:
            _call("cuMemHostRegister_v2", memory, size_, _FOR_ALL_GPUS)
        except OSError as refused:
            # What this process itself may not write is registered to be read.
            flags = _FOR_ALL_GPUS | _READ_ONLY
            try:
                _call("cuMemHostRegister_v2", memory, size_, flags)
            except OSError as error:
                raise OSError(f"{refused}; to be read only: {error}") from error
        _call("cuMemHostGetDevicePointer_v2", ctypes.byref(where), memory, 0)
    return where.value


def unregister(numbers: Iterable[int], address: int) -> None:
    """End what `register` began, when all GPUs have done what they were given.

    Args:
      numbers: Of all GPUs that may read it; the first is that of `register`.
      address: Of the memory.

    Raises:
      OSError: The driver refuses.
    """
    numbers = list(numbers)
    for number in numbers:
        with _context(number):
            _call("cuCtxSynchronize")
    with _context(numbers[0]):
        _call("cuMemHostUnregister", ctypes.c_void_p(address))
