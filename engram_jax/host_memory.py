"""Best effort for large memory: huge pages, NUMA spread, prefault and lock."""

import contextlib
import ctypes
import dataclasses
import errno
import mmap
import os
import re
import shlex
from pathlib import Path
from typing import Any

_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise, Linux 5.14
_MBIND = {"x86_64": 237, "aarch64": 235}
_INTERLEAVE = 3
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_HUGE_PAGE_BYTES = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_HUGE_FIELDS = ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")
_MOUNTS = Path("/proc/self/mountinfo")
_MAPPINGS = Path("/proc/self/smaps")
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
      register: Let the GPU read rows by itself, where there is one: for few rows that
        is sooner than to gather and copy them. Pages are then not swapped out, either.
    """

    huge_pages: bool = True
    interleave: bool = True
    prefault: bool = True
    lock: bool = False
    register: bool = True


@dataclasses.dataclass
class HostMemoryReport:
    """What came of each option: "on", "off", or why it is not.

    Attributes:
      huge_pages: Of `HostMemoryOptions.huge_pages`.
      interleave: Likewise.
      prefault: Likewise.
      lock: Likewise.
      register: Likewise; "not yet" until an embedding has the table.
    """

    huge_pages: str = "off"
    interleave: str = "off"
    prefault: str = "off"
    lock: str = "off"
    register: str = "off"

    def __str__(self) -> str:
        fields = dataclasses.asdict(self).items()
        return ", ".join(f"{name}: {value}" for name, value in fields)


class HostMapping:
    """Memory of a process's own, or a file in memory, with what options ask for.

    Attributes:
      buffer: The mapping.
      report: What was obtained.

    Args:
      descriptor: An open file; None takes private memory that no other process sees.
      size: Bytes to map, from its start.
      options: What to try.
      writable: Whether it is to be filled; private memory always is.

    Raises:
      MemoryError: The process may not have so much.
    """

    def __init__(
        self,
        descriptor: int | None,
        size: int,
        options: HostMemoryOptions,
        *,
        writable: bool = True,
    ) -> None:
        try:
            if descriptor is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self.buffer = mmap.mmap(-1, size, flags)
            else:
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                self.buffer = mmap.mmap(descriptor, size, access=access)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(
                f"no address space for {size} bytes of a table in host memory (see "
                "ulimit -v, /proc/sys/vm/overcommit_memory)"
            ) from error
        self.report = HostMemoryReport()
        self._options = options
        self._writable = writable
        self._descriptor = descriptor
        # Both hold for pages that come later only.
        if options.huge_pages:
            self.report.huge_pages = self._ask_for_huge_pages()
        if options.interleave and writable:
            self.report.interleave = _interleave(self.buffer)

    def populate(self, start: int, size: int) -> str | None:
        """Make pages present, with an error, not a signal, where there is no memory.

        Threads may do so at once.

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
        # mmap's own madvise would keep other threads waiting.
        failed = _call(
            "madvise",
            ctypes.c_void_p(_address(self.buffer) + first),
            ctypes.c_size_t(start + size - first),
            advice,
        )
        if not failed:
            return None
        if failed != errno.EINVAL:
            raise MemoryError(
                f"no memory for {size} bytes of a table in host memory: "
                f"{os.strerror(failed)}"
            )
        if self._writable and self._descriptor is not None:
            try:
                os.posix_fallocate(self._descriptor, first, start + size - first)
            except OSError as error:
                raise MemoryError(
                    f"no memory for {size} bytes of a table in host memory: {error}"
                ) from error
        return "not available before Linux 5.14"

    def settle(self) -> None:
        """Prefault and lock as the options say, and see how many pages are huge.

        Call it when the memory is filled.

        Raises:
          MemoryError: There is no memory left.
        """
        size = len(self.buffer)
        if self._options.prefault:
            # Filling did it. A reader lacks its own page table only.
            filled = None if self._writable else self.populate(0, size)
            self.report.prefault = filled or "on"
        if self._options.lock:
            self.report.lock = _lock(self.buffer)
        if self.report.huge_pages == "on":
            share = _huge_share(_address(self.buffer), size)
            if share == 0:
                self.report.huge_pages = "not available: the kernel gave small ones"
            elif share is not None:
                self.report.huge_pages = f"on, for {share:.0%} of the memory"

    def discard(self) -> None:
        """Give the memory back at once, whoever still refers to it; it reads as zeros.

        For what a failure left half filled: a traceback keeps its mapping alive.
        """
        advice = mmap.MADV_DONTNEED if self._descriptor is None else mmap.MADV_REMOVE
        # A file system that cannot do so gives it back with the last reference.
        with contextlib.suppress(OSError):
            self.buffer.madvise(advice)

    def _ask_for_huge_pages(self) -> str:
        if self._descriptor is None:
            obstacle = _private_obstacle()
        else:
            obstacle = _file_obstacle(self._descriptor)
        if obstacle is not None:
            return f"not available: {obstacle}"
        try:
            if len(self.buffer) < int(_HUGE_PAGE_BYTES.read_text()):
                return "not needed: smaller than one"
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            return f"not available: {os.strerror(error.errno or 0)}"
        return "on"


def _private_obstacle() -> str | None:
    """Say what keeps memory of a process's own from having huge pages."""
    setting = _setting(_HUGE_PAGES)
    if setting is None:
        return "this kernel has none"
    if setting == "never":
        return f"{_HUGE_PAGES} is never (echo madvise > {_HUGE_PAGES})"
    return None


def _file_obstacle(descriptor: int) -> str | None:
    """Say what keeps a file in memory from having huge pages.

    A mount has its own choice; `shmem_enabled` is about memory without a mount, but
    for "deny" and "force", which hold for all.
    """
    setting = _setting(_SHARED_HUGE_PAGES)
    if setting is None:
        return "this kernel has none"
    if setting == "deny":
        return f"{_SHARED_HUGE_PAGES} is deny (echo never > {_SHARED_HUGE_PAGES})"
    if setting == "force":
        return None
    place, kind, options = _mount(os.fstat(descriptor).st_dev)
    if kind != "tmpfs":
        return f"{place} is no tmpfs ({kind})"
    chosen = [x.removeprefix("huge=") for x in options if x.startswith("huge=")]
    if chosen in ([], ["never"]):
        remedy = f"mount -o remount,huge=advise {shlex.quote(place)}"
        return f"{place} is mounted without ({remedy})"
    return None


def _setting(path: Path) -> str | None:
    """Read what is chosen of a list like ``always [madvise] never``."""
    try:
        return path.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return None


def _mount(device: int) -> tuple[str, str, list[str]]:
    """Find where a file system is mounted, its type, and its options."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        own, _, file_system = line.partition(" - ")
        if number == own.split()[2]:
            kind, *_, options = file_system.split()
            place = re.sub(r"\\(\d{3})", lambda x: chr(int(x[1], 8)), own.split()[4])
            return place, kind, options.split(",")
    return "its directory", "unknown", []


def _huge_share(address: int, size: int) -> float | None:
    """Find how much of the memory that is present lies in huge pages.

    Returns:
      0 to 1, or None where nothing is present yet, or the kernel does not tell.
    """
    present = huge = 0
    ours = False
    try:
        with _MAPPINGS.open(encoding="ascii", errors="replace") as file:
            for line in file:
                name, *values = line.split()
                if not name.endswith(":"):  # a mapping begins: first-last
                    first, last = (int(x, 16) for x in name.split("-"))
                    ours = first < address + size and address < last
                elif ours and name == "Rss:":
                    present += int(values[0])
                elif ours and name in _HUGE_FIELDS:
                    huge += int(values[0])
    except OSError:
        return None
    return min(1.0, huge / present) if present else None


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
    failed = _call(
        "syscall",
        number,
        ctypes.c_void_p(_address(buffer)),
        ctypes.c_ulong(len(buffer)),
        _INTERLEAVE,
        ctypes.byref(mask),
        ctypes.c_ulong(65),
        0,
    )
    if failed:
        return f"not available: {os.strerror(failed)}"
    return f"on, over {len(nodes)} nodes"


def _lock(buffer: mmap.mmap) -> str:
    address = ctypes.c_void_p(_address(buffer))
    failed = _call("mlock", address, ctypes.c_size_t(len(buffer)))
    if failed:
        return f"not available: {os.strerror(failed)} (see ulimit -l)"
    return "on"


def _call(function: str, *arguments: Any) -> int:
    """Call the C library, other threads running on; 0, or the error's number."""
    libc = ctypes.CDLL(None, use_errno=True)
    return ctypes.get_errno() if getattr(libc, function)(*arguments) else 0


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
