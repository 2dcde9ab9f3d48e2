"""Best effort for large memory: huge pages, NUMA spread, prefault and lock."""

import ctypes
import dataclasses
import errno
import mmap
import os
from pathlib import Path

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise, Linux 5.14
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3
_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NODES = Path("/sys/devices/system/node/online")


@dataclasses.dataclass(frozen=True)
class HostMemoryOptions:
    """What to try for a table in host memory; none of it changes a result.

    Attributes:
      huge_pages: Ask for pages of 2 MB, so that random rows miss the address cache
        less often.
      interleave: Spread pages over the machine's NUMA nodes, so that no node's memory
        serves all reads.
      prefault: Make all pages present while loading, so that no step waits for one.
      lock: Keep pages from being swapped out; needs a limit (``ulimit -l``) that
        allows it.
    """

    huge_pages: bool = True
    interleave: bool = True
    prefault: bool = True
    lock: bool = False


@dataclasses.dataclass
class HostMemoryReport:
    """What came of each option: "on", "off", or why it is not.

    Attributes:
      huge_pages: Of `HostMemoryOptions.huge_pages`.
      interleave: Likewise.
      prefault: Likewise.
      lock: Likewise.
    """

    huge_pages: str = "off"
    interleave: str = "off"
    prefault: str = "off"
    lock: str = "off"

    def __str__(self) -> str:
        fields = dataclasses.asdict(self).items()
        return ", ".join(f"{name}: {value}" for name, value in fields)


class HostMapping:
    """A file in memory, mapped, with what `HostMemoryOptions` ask for.

    Attributes:
      buffer: The mapping.
      report: What was obtained.

    Args:
      descriptor: An open file.
      size: Bytes to map, from its start.
      options: What to try.
      writable: Whether it is to be filled.
    """

    def __init__(
        self,
        descriptor: int,
        size: int,
        options: HostMemoryOptions,
        *,
        writable: bool,
    ) -> None:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self.buffer = mmap.mmap(descriptor, size, access=access)
        self.report = HostMemoryReport()
        self._writable = writable
        self._descriptor = descriptor
        if options.huge_pages:
            self.report.huge_pages = self._huge_pages()
        if options.interleave and writable:
            self.report.interleave = _interleave(self.buffer)
        if options.lock:
            self.report.lock = _lock(self.buffer)
        if options.prefault and not writable:
            # Only this process's page table: the pages are there.
            self.report.prefault = self.populate(0, size) or "on"
        elif options.prefault:
            self.report.prefault = "on"  # by filling it

    def populate(self, start: int, size: int) -> str | None:
        """Make pages present, with an error, not a signal, where there is no memory.

        Args:
          start: First byte.
          size: How many.

        Returns:
          None, or why it was not done: an old kernel.

        Raises:
          MemoryError: There is no memory left.
        """
        first = start - start % mmap.PAGESIZE
        advice = _POPULATE_WRITE if self._writable else _POPULATE_READ
        try:
            self.buffer.madvise(advice, first, start + size - first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise MemoryError(
                    f"no memory for {size} bytes of a table in shared memory: "
                    f"{os.strerror(error.errno or 0)}"
                ) from error
        else:
            return None
        if self._writable:
            try:
                os.posix_fallocate(self._descriptor, first, start + size - first)
            except OSError as error:
                raise MemoryError(
                    f"no memory for {size} bytes of a table in shared memory: {error}"
                ) from error
        return "not available before Linux 5.14"

    def _huge_pages(self) -> str:
        try:
            setting = _SHARED_HUGE_PAGES.read_text().split("[")[1].split("]")[0]
        except (OSError, IndexError):
            return "not available: this kernel has none"
        if setting in ("never", "deny"):
            return f"not available: {_SHARED_HUGE_PAGES} is {setting}"
        try:
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            return f"not available: {os.strerror(error.errno or 0)}"
        return "on"


def _interleave(buffer: mmap.mmap) -> str:
    try:
        nodes = _parse_nodes(_NODES.read_text())
    except (OSError, ValueError):
        return "not available: the kernel tells no NUMA nodes"
    if len(nodes) < 2:
        return "not needed: one NUMA node"
    number = _MBIND.get(os.uname().machine)
    if number is None or max(nodes) >= 64:
        return f"not available on {os.uname().machine} with node {max(nodes)}"
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        number,
        ctypes.c_void_p(_address(buffer)),
        ctypes.c_ulong(len(buffer)),
        _INTERLEAVE,
        ctypes.byref(mask),
        ctypes.c_ulong(65),
        0,
    )
    if failed:
        return f"not available: {os.strerror(ctypes.get_errno())}"
    return f"on, over {len(nodes)} nodes"


def _lock(buffer: mmap.mmap) -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(_address(buffer))
    if libc.mlock(address, ctypes.c_size_t(len(buffer))):
        return f"not available: {os.strerror(ctypes.get_errno())} (see ulimit -l)"
    return "on"


def _address(buffer: mmap.mmap) -> int:
    import numpy as np

    return np.frombuffer(buffer, np.uint8).ctypes.data


def _parse_nodes(text: str) -> list[int]:
    """Read a list like ``0-2,5``."""
    nodes = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes.extend(range(int(first), int(last or first) + 1))
    return nodes
