"""CUDA's driver as far as memory across processes needs it, on a CPU.

An allocation is a file in memory, so that its descriptors can be sent and mapped as
those of a GPU's are; what is read through an address is really what was written there.
"""
# ruff: noqa: N802, the names of functions are CUDA's

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os

ALREADY_FREED, INVALID = 201, 1
PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@dataclasses.dataclass
class Allocation:
    """Memory of a GPU: where JAX has it, and the file that others can map."""

    base: int
    size: int
    file: int
    references: int = 1  # JAX's own


class Driver:
    """A driver of two GPUs."""

    def __init__(self):
        self.stack, self.retained, self.calls = [], 0, []
        self.reachable = {(10, 11)}
        self.allocations: dict[int, Allocation] = {}
        self.imported: dict[int, int] = {}  # handles to files
        self.reserved: dict[int, int] = {}  # addresses to bytes
        self.mapped: set[int] = set()
        self.refused: set[str] = set()
        self.next_handle = (1 << 63) + 1

    def __getattr__(self, name):
        function = type(self).__dict__.get(f"on_{name}")
        if function is None:
            raise AssertionError(f"{name} is not part of what may be called")

        def call(*arguments):
            self.calls.append(name)
            for argument in arguments:
                # What ctypes takes for an int has 32 bits.
                assert not isinstance(argument, int) or 0 <= argument < 1 << 31
            return INVALID if name in self.refused else function(self, *arguments)

        return call

    def allocate(self, content: bytes, base: int) -> int:
        """Makes an allocation as JAX would; returns its handle."""
        size = -(-len(content) // PAGE) * PAGE
        file = os.memfd_create("allocation")
        os.pwrite(file, content.ljust(size, b"\0"), 0)
        self.next_handle += 1
        self.allocations[self.next_handle] = Allocation(base, size, file)
        return self.next_handle

    def free(self, handle: int) -> None:
        """Lets go of it as JAX would."""
        assert self._release(handle) == 0

    def close(self) -> None:
        """Closes the files."""
        for known in self.allocations.values():
            os.close(known.file)

    def _release(self, handle: int) -> int:
        if handle in self.imported:
            os.close(self.imported.pop(handle))
            return 0
        known = self.allocations.get(handle)
        if known is None:
            return ALREADY_FREED
        known.references -= 1
        if not known.references:
            os.close(known.file)
            # The next one gets the handle of this one.
            del self.allocations[handle]
            self.next_handle = handle - 1
        return 0

    def _holder(self, address: int) -> tuple[int, Allocation] | None:
        holders = [
            (handle, known)
            for handle, known in reversed(self.allocations.items())
            if known.base <= address < known.base + known.size
        ]
        # Whole pages of arrays that are smaller overlap: the nearest is meant, and of
        # several at one address the last.
        return max(holders, key=lambda holder: holder[1].base, default=None)

    # --- Devices and contexts ---------------------------------------------------------

    def on_cuDeviceGet(self, device, number):
        device._obj.value = 10 + number
        return 0 if number < 2 else INVALID

    def on_cuDeviceCanAccessPeer(self, answer, one, other):
        answer._obj.value = (one.value, other.value) in self.reachable
        return 0

    def on_cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 100 * device.value
        self.retained += 1
        return 0

    def on_cuDevicePrimaryCtxRelease_v2(self, device):
        self.retained -= 1
        return 0

    def on_cuCtxPushCurrent_v2(self, context):
        self.stack.append(context.value)
        return 0

    def on_cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.stack.pop()
        return 0

    def on_cuGetErrorName(self, code, text):
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0

    # --- Memory -----------------------------------------------------------------------

    def on_cuMemGetAddressRange_v2(self, base, size, address):
        found = self._holder(address.value)
        if found is None:
            return INVALID
        base._obj.value, size._obj.value = found[1].base, found[1].size
        return 0

    def on_cuMemRetainAllocationHandle(self, handle, address):
        found = self._holder(address.value)
        if found is None:
            return INVALID
        handle._obj.value, known = found
        known.references += 1
        return 0

    def on_cuMemRelease(self, handle):
        return self._release(handle.value)

    def on_cuMemExportToShareableHandle(self, descriptor, handle, kind, flags):
        assert (kind, flags.value) == (1, 0)  # a file descriptor
        assert self.stack, "no context"
        descriptor._obj.value = os.dup(self.allocations[handle.value].file)
        return 0

    def on_cuMemImportFromShareableHandle(self, handle, descriptor, kind):
        assert kind == 1
        assert self.stack, "no context"
        self.next_handle += 1
        handle._obj.value = self.next_handle
        self.imported[self.next_handle] = os.dup(descriptor.value)
        return 0

    def on_cuMemAddressReserve(self, address, size, alignment, wanted, flags):
        assert (alignment.value, wanted.value, flags.value) == (0, 0, 0)
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        place = _libc.mmap(None, size.value, 0, private, -1, 0)
        self.reserved[place] = size.value
        address._obj.value = place
        return 0

    def on_cuMemMap(self, address, size, offset, handle, flags):
        assert (offset.value, flags.value) == (0, 0)
        assert self.reserved[address.value] == size.value
        file = self.imported[handle.value]
        assert os.fstat(file).st_size == size.value
        where = address.value, size.value, 0, mmap.MAP_SHARED | _MAP_FIXED, file, 0
        assert _libc.mmap(*where) == address.value
        self.mapped.add(address.value)
        return 0

    def on_cuMemSetAccess(self, address, size, access, count):
        kind, number, flags = access
        assert (kind, flags, count.value) == (1, 3, 1)
        assert self.stack[-1] == 100 * (10 + number)
        return _libc.mprotect(address.value, size.value, mmap.PROT_READ)

    def on_cuMemUnmap(self, address, size):
        self.mapped.remove(address.value)
        return 0

    def on_cuMemAddressFree(self, address, size):
        assert address.value not in self.mapped
        assert self.reserved.pop(address.value) == size.value
        return _libc.munmap(address.value, size.value)
