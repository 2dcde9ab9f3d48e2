"""One copy of a table for all processes of a node, in shared memory."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import stat
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int32, UInt8

from .config import QUANT_BLOCK
from .host_memory import HostMapping, HostMemoryOptions, HostMemoryReport
from .host_storage import check_table, take_rows
from .memory_plan import (
    SHARED_DIRECTORY_VARIABLE,
    gigabytes,
    host_room,
    shared_directory,
    shared_room,
)
from .safetensors_file import TensorInfo, read_rows

_log = logging.getLogger(__name__)

_PREFIX = "engram_jax-"
_FORMAT = 1
_HEADER_BYTES = 4096
_CHUNK_BYTES = 16 << 20
_POLL_SECONDS = 0.05


class SharedHostTable:
    """Read rows from shared memory, of which a node's processes have one copy.

    The first process to come fills it from the checkpoint, others wait until it is
    whole. A row's values and scales lie side by side, 264 bytes for D = 256, so that a
    row costs one miss of the caches instead of two. The memory is given back when the
    last process closes its table or ends, however it ends: what a killed process
    leaves is found, and removed or used, by the next one that loads any table.

    Works on machines without an accelerator, too. Two programs that load the same
    files share one copy.

    Attributes:
      num_rows: Rows of the table.
      head_dim: Values of a row, D.
      report: What came of the options.
      filled: Whether this process filled it.

    Args:
      weight: Where the e4m3 values [R, D] lie.
      scale: Where the E8M0 bytes [R, D/32] lie.
      options: Huge pages and the like; None takes `HostMemoryOptions()`.
      directory: In memory; None takes ``ENGRAM_JAX_SHARED_DIRECTORY`` or ``/dev/shm``.
      show_progress: None shows a bar where the error output is a terminal.

    Raises:
      MemoryError: It does not fit; the message has the figures.
      ValueError: Dtypes or shapes do not fit, a file changed while it was read, or
        there is no such directory.
    """

    def __init__(
        self,
        weight: TensorInfo,
        scale: TensorInfo,
        *,
        options: HostMemoryOptions | None = None,
        directory: str | os.PathLike[str] | None = None,
        show_progress: bool | None = None,
    ) -> None:
        self.num_rows, self.head_dim = check_table(
            (weight.dtype, weight.shape), (scale.dtype, scale.shape)
        )
        width = self.head_dim + self.head_dim // QUANT_BLOCK
        folder = shared_directory() if directory is None else Path(directory)
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is no directory; a table in shared memory needs one that "
                f"lies in memory. Name one in {SHARED_DIRECTORY_VARIABLE}, or use "
                'placement="mapped_file".'
            )
        header = _header(weight, scale)
        path = _table_path(folder, header)
        size = _HEADER_BYTES + self.num_rows * width
        options = HostMemoryOptions() if options is None else options
        remove_unused_tables(folder, but=path)
        with _locked(path):
            descriptor = _open_whole(path, header, size)
            self.filled = descriptor is None
            report = None
            if descriptor is None:
                _check_room(folder, size)
                show = sys.stderr.isatty() if show_progress is None else show_progress
                with _progress(f"{weight.name} to {folder}", size, show) as advance:
                    descriptor, report = _create(
                        path, header, size, (weight, scale), options, advance
                    )
            # Kept for life: the last one to let go of it removes the table.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        mapping = HostMapping(descriptor, size, options, writable=False)
        self.report: HostMemoryReport = mapping.report
        if report is not None:
            self.report.huge_pages = report.huge_pages
            self.report.interleave = report.interleave
        flat = np.frombuffer(mapping.buffer, np.uint8, offset=_HEADER_BYTES)
        self._records = flat.reshape(self.num_rows, width)
        self._release = weakref.finalize(self, _close, path, descriptor, os.getpid())
        _log.info(
            "%s in shared memory: %s, %s (%s)",
            weight.name,
            gigabytes(size),
            "filled" if self.filled else "shared with another process",
            self.report,
        )

    def lookup_packed(self, ids: Int32[Array, "..."]) -> UInt8[Array, "... P"]:
        """Read rows as stored: D value bytes, then D/32 scale bytes.

        Inside jit this is a call back to the host, which runs when the ids are there.
        No gradient flows: the table is constant.

        Args:
          ids: Rows, of any shape; an id outside the table reads as zeros.

        Returns:
          uint8 [..., D + D/32].
        """
        result = jax.ShapeDtypeStruct((*ids.shape, self._records.shape[1]), jnp.uint8)
        return jax.pure_callback(self.gather, result, ids, vmap_method="expand_dims")

    def gather(self, ids: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Read rows on the host: `lookup_packed` for NumPy."""
        ids = np.asarray(ids)
        out = np.empty((ids.size, self._records.shape[1]), np.uint8)
        self.read_into(ids.reshape(-1), out)
        return out.reshape(*ids.shape, out.shape[1])

    def read_into(self, ids: npt.NDArray[Any], out: npt.NDArray[np.uint8]) -> None:
        """Read rows on the host into memory that is there; threads may do so at once.

        Args:
          ids: Rows [n]; an id outside the table reads as zeros.
          out: [n, D + D/32], to be written.

        Raises:
          ValueError: The table was closed.
        """
        if not self._release.alive:
            raise ValueError("this table in shared memory was closed; load it again")
        take_rows([self._records], ids, out)

    def stored_rows(
        self, part: Literal["weight", "scale"], start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes of consecutive rows of the values or the scales."""
        rows = self._records[start:stop]
        return (
            rows[:, : self.head_dim] if part == "weight" else rows[:, self.head_dim :]
        )

    def close(self) -> None:
        """Let go of the memory; the last process that does so gives it back.

        Also done when the table is forgotten, and when the process ends.
        """
        self._release()
        self._records = np.empty((0, self._records.shape[1]), np.uint8)


def shared_bytes(
    weight: TensorInfo, scale: TensorInfo, directory: Path | None = None
) -> int:
    """Count the bytes of a table that is in shared memory already; 0 if it is not."""
    folder = shared_directory() if directory is None else directory
    try:
        return _table_path(folder, _header(weight, scale)).stat().st_size
    except OSError:
        return 0


def remove_unused_tables(directory: Path, but: Path | None = None) -> list[Path]:
    """Remove what killed processes left behind: tables that no process has open.

    Args:
      directory: Where shared tables lie.
      but: A table to leave as it is.

    Returns:
      What was removed.
    """
    removed = []
    for path in sorted(directory.glob(f"{_PREFIX}{os.getuid()}-*")):
        base = path.with_name(path.name.split(".")[0] + ".table")
        if base == but or (path.suffix == ".lock" and base.exists()):
            continue
        with _locked(base, wait=False) as held:
            if not held or path.suffix == ".lock":
                continue  # somebody fills it, or the lock goes with its table
            try:
                descriptor = os.open(path, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                if _last(descriptor):
                    path.unlink(missing_ok=True)
                    removed.append(path)
            finally:
                os.close(descriptor)
    if removed:
        _log.info("Removed tables that no process used: %s", removed)
    return removed


def _header(weight: TensorInfo, scale: TensorInfo) -> bytes:
    """Say what a table holds: whatever differs makes another table."""
    parts = []
    for info in (weight, scale):
        status = info.path.stat()
        parts.append(
            {
                "device": status.st_dev,
                "inode": status.st_ino,
                "size": status.st_size,
                "changed": status.st_mtime_ns,
                "start": info.start,
                "shape": info.shape,
            }
        )
    return json.dumps({"format": _FORMAT, "parts": parts}).encode()


def _table_path(folder: Path, header: bytes) -> Path:
    digest = hashlib.sha256(header).hexdigest()[:24]
    return folder / f"{_PREFIX}{os.getuid()}-{digest}.table"


@contextlib.contextmanager
def _locked(table: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of everyone who opens, fills or closes a table.

    The kernel releases it when its holder dies, however it does.
    """
    path = table.with_suffix(".lock")
    told = False
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            if not wait:
                yield False
                return
            if not told:
                _log.info("Waiting for another process that fills %s.", table)
                told = True
            time.sleep(_POLL_SECONDS)
            continue
        # Whoever held it may have removed the file, and others made a new one.
        if _same_file(descriptor, path):
            break
        os.close(descriptor)
    try:
        yield True
    finally:
        if not table.exists():
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _open_whole(path: Path, header: bytes, size: int) -> int | None:
    """Open a table that is there, or give None; call it with the lock held."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    status = os.fstat(descriptor)
    found = os.pread(descriptor, len(header), 0)
    ours = status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode)
    if ours and status.st_size == size and found == header:
        return descriptor
    os.close(descriptor)
    path.unlink()
    return None


def _check_room(folder: Path, size: int) -> None:
    room, host, limit = shared_room(folder), *host_room()
    if size > room:
        raise MemoryError(
            f"A table takes {gigabytes(size)} of shared memory, but {gigabytes(room)} "
            f"are free in {folder}. Enlarge it (mount -o remount,size=..; docker run "
            f"--shm-size), name another directory in {SHARED_DIRECTORY_VARIABLE}, or "
            'use placement="mapped_file".'
        )
    if size > host:
        raise MemoryError(
            f"A table takes {gigabytes(size)} of host memory, but {gigabytes(host)} "
            f'are available (limit: {limit}). placement="mapped_file" takes none.'
        )


def _create(
    path: Path,
    header: bytes,
    size: int,
    parts: tuple[TensorInfo, TensorInfo],
    options: HostMemoryOptions,
    advance: Callable[[int], None],
) -> tuple[int, HostMemoryReport]:
    """Fill a table and name it when it is whole; call it with the lock held."""
    # Without a name until then: the kernel frees it if this process dies.
    writer, partial = _unnamed(path)
    try:
        os.ftruncate(writer, size)
        mapping = HostMapping(writer, size, options, writable=True)
        _fill(mapping, parts, advance)
        if _header(*parts) != header:
            raise ValueError(
                f"{parts[0].path} or {parts[1].path} changed while it was read; load "
                "the checkpoint again"
            )
        os.pwrite(writer, header, 0)
        os.fchmod(writer, 0o400)
        if partial is None:
            # The directory only makes Python follow the link; the path is absolute.
            os.link(f"/proc/self/fd/{writer}", path, src_dir_fd=writer)
        else:
            partial.rename(path)
        # Opened anew: locks belong to an opening, and this one may write.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC), mapping.report
    except BaseException:
        if partial is not None:
            partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(writer)


def _unnamed(path: Path) -> tuple[int, Path | None]:
    try:
        flags = os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC
        return os.open(path.parent, flags, 0o600), None
    except OSError:  # a file system that has none
        partial = path.with_suffix(f".partial{os.getpid()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(partial, flags, 0o600), partial


def _fill(
    mapping: HostMapping,
    parts: tuple[TensorInfo, TensorInfo],
    advance: Callable[[int], None],
) -> None:
    rows, (head_dim, groups) = parts[0].shape[0], (p.shape[1] for p in parts)
    width = head_dim + groups
    flat = np.frombuffer(mapping.buffer, np.uint8, offset=_HEADER_BYTES)
    records = flat.reshape(rows, width)
    step = max(1, _CHUNK_BYTES // width)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        # First, so that memory running out is an error and no signal.
        mapping.populate(_HEADER_BYTES + start * width, (stop - start) * width)
        some = records[start:stop]
        some[:, :head_dim] = read_rows(parts[0], start, stop).view(np.uint8)
        some[:, head_dim:] = read_rows(parts[1], start, stop).view(np.uint8)
        advance((stop - start) * width)


@contextlib.contextmanager
def _progress(what: str, size: int, show: bool) -> Iterator[Callable[[int], None]]:
    if not show:
        yield lambda _: None
        return
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    from rich.console import Console

    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)


def _last(descriptor: int) -> bool:
    """Tell whether nobody else has a table open; call it with its lock held."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _close(path: Path, descriptor: int, process: int) -> None:
    if os.getpid() != process:  # a fork: the parent still uses it
        os.close(descriptor)
        return
    with _locked(path):
        try:
            # If another program's newer table has the name, it is not ours to remove.
            if _same_file(descriptor, path) and _last(descriptor):
                path.unlink()
        finally:
            os.close(descriptor)
