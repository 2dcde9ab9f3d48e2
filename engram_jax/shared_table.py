"""One copy of a table for all processes of a node, in shared memory."""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import logging
import os
import stat
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .config import QUANT_BLOCK
from .host_memory import HostMapping, HostMemoryOptions, HostMemoryReport
from .host_storage import check_table
from .host_table import RecordTable, check_host_room, file_states, fill_records
from .memory_plan import (
    SHARED_DIRECTORY_VARIABLE,
    gigabytes,
    shared_directory,
    shared_room,
)
from .safetensors_file import TensorInfo

_log = logging.getLogger(__name__)

_PREFIX = "engram_jax-"
_FORMAT = 1
_HEADER_BYTES = 4096
_POLL_SECONDS = 0.05


class SharedHostTable(RecordTable):
    """Read rows from shared memory, of which a node's processes have one copy.

    The first process to come fills it from the checkpoint, others wait until it is
    whole. The memory is given back when the last process closes its table or ends,
    however it ends: what a killed process leaves is found, and removed or used, by the
    next one that loads any table.

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
        parts = (weight, scale)
        rows, head_dim = check_table(*((x.dtype, x.shape) for x in parts))
        width = head_dim + head_dim // QUANT_BLOCK
        folder = shared_directory() if directory is None else Path(directory)
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is no directory; a table in shared memory needs one that "
                f"lies in memory. Name one in {SHARED_DIRECTORY_VARIABLE}, or use "
                'placement="host" or "mapped_file".'
            )
        states = file_states(*parts)
        path = _table_path(folder, states)
        size = _HEADER_BYTES + rows * width
        options = HostMemoryOptions() if options is None else options
        remove_unused_tables(folder, but=path)
        with _locked(path):
            descriptor = _open_whole(path, _header(states), size)
            self.filled = descriptor is None
            filled = None
            if descriptor is None:
                _check_room(folder, size)
                descriptor, filled = _create(
                    path, size, parts, states, options, show_progress
                )
            # Kept for life: the last one to let go of it removes the table.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        mapping = HostMapping(descriptor, size, options, writable=False)
        mapping.settle()
        if filled is not None:
            mapping.report.huge_pages = filled.huge_pages
            mapping.report.interleave = filled.interleave
        flat = np.frombuffer(mapping.buffer, np.uint8, offset=_HEADER_BYTES)
        records = flat.reshape(rows, width)
        super().__init__(records, mapping.report, may_register=options.register)
        self._release = weakref.finalize(self, _close, path, descriptor, os.getpid())
        _log.info(
            "%s in shared memory: %s, %s (%s)",
            weight.name,
            gigabytes(size),
            "filled" if self.filled else "shared with another process",
            self.report,
        )

    def close(self) -> None:
        """Let go of the memory; the last process that does so gives it back.

        Also done when the table is forgotten, and when the process ends.
        """
        self._release()
        super().close()


def shared_bytes(
    weight: TensorInfo, scale: TensorInfo, directory: Path | None = None
) -> int:
    """Count the bytes of a table that is in shared memory already; 0 if it is not."""
    folder = shared_directory() if directory is None else directory
    try:
        return _table_path(folder, file_states(weight, scale)).stat().st_size
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


def _header(states: list[dict[str, Any]]) -> bytes:
    return json.dumps({"format": _FORMAT, "parts": states}).encode()


def _table_path(folder: Path, states: list[dict[str, Any]]) -> Path:
    digest = hashlib.sha256(_header(states)).hexdigest()[:24]
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
    room = shared_room(folder)
    if size > room:
        raise MemoryError(
            f"A table takes {gigabytes(size)} of shared memory, but {gigabytes(room)} "
            f"are free in {folder}. Enlarge it (mount -o remount,size=..; docker run "
            f"--shm-size), name another directory in {SHARED_DIRECTORY_VARIABLE}, or "
            'use placement="host" (each process its own) or "mapped_file".'
        )
    check_host_room(size)


def _create(
    path: Path,
    size: int,
    parts: tuple[TensorInfo, TensorInfo],
    states: list[dict[str, Any]],
    options: HostMemoryOptions,
    show_progress: bool | None,
) -> tuple[int, HostMemoryReport]:
    """Fill a table and name it when it is whole; call it with the lock held."""
    # Without a name until then: the kernel frees it if this process dies.
    writer, partial = _unnamed(path)
    try:
        os.ftruncate(writer, size)
        # Its readers lock it.
        mapping = HostMapping(writer, size, dataclasses.replace(options, lock=False))
        what = f"{parts[0].name} to {path.parent}"
        fill_records(mapping, _HEADER_BYTES, parts, states, what, show_progress)
        mapping.settle()
        os.pwrite(writer, _header(states), 0)
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
