"""Tables as records in host memory, and one in the memory of this process alone."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Int32, UInt8, UInt32

from . import kernels
from .config import QUANT_BLOCK
from .host_memory import HostMapping, HostMemoryOptions, HostMemoryReport
from .host_storage import HostRows, check_table, take_rows
from .kernels.dispatch import missing_gpu_reason
from .memory_plan import gigabytes, host_room
from .registered_memory import RegisteredMemory
from .safetensors_file import TensorInfo, read_rows

_log = logging.getLogger(__name__)

_CHUNK_BYTES = 16 << 20
_THREADS = 8


class RecordTable(HostRows):
    """Read rows whose values and scales lie side by side in host memory.

    A row of D = 256 is one record of 264 bytes, so that it costs one miss of the caches
    instead of two. Where the memory could be registered with CUDA, lookups inside jit
    are kernels that read it over PCIe; elsewhere they are calls back to the host. A
    `ParallelEngramEmbedding` that gets the table asks for that.

    Attributes:
      num_rows: Rows of the table.
      head_dim: Values of a row, D.
      direct_tokens: Up to this many tokens, `EngramPrefetch` leaves the reading to the
        GPU's kernel.
      report: What came of the options.

    Args:
      records: All rows' bytes [R, D + D/32], from the start of a page.
      report: What came of the options.
      may_register: `HostMemoryOptions.register`.
    """

    direct_tokens = 64

    def __init__(
        self,
        records: npt.NDArray[np.uint8],
        report: HostMemoryReport,
        *,
        may_register: bool = True,
    ) -> None:
        self.num_rows, width = records.shape
        self.head_dim = width * QUANT_BLOCK // (QUANT_BLOCK + 1)
        self.report = report
        self._records: npt.NDArray[np.uint8] | None = records
        self._registered: RegisteredMemory | None = None
        report.register = "not yet" if may_register else "off"

    def register(self) -> None:
        """Let the GPU read the rows by itself, if there is one and the options say so.

        It takes about a second for 17 GB; what came of it is in `report`. JAX's backend
        starts, if it has not.

        Raises:
          ValueError: The table was closed.
        """
        if self.report.register != "not yet":
            return
        records = self._open_records()
        try:
            self._registered = RegisteredMemory(records)
            self.report.register = "on"
        except OSError as error:
            self.report.register = f"not available: {error}"
        _log.info(
            "%s of host memory registered for the GPU to read: %s",
            gigabytes(records.nbytes),
            self.report.register,
        )

    @property
    def reads_on_device(self) -> bool:
        """Tell whether a kernel of the device reads the rows, instead of the host."""
        return self._registered is not None and missing_gpu_reason() is None

    def lookup_packed(self, ids: Int32[Array, "..."]) -> UInt8[Array, "... P"]:
        """Read rows as stored: D value bytes, then D/32 scale bytes.

        Args:
          ids: Rows, of any shape; an id outside the table reads as zeros.

        Returns:
          uint8 [..., D + D/32].

        Raises:
          ValueError: The table was closed.
        """
        if not self.reads_on_device:
            return super().lookup_packed(ids)
        return kernels.record_lookup(
            self.device_address(), ids, num_rows=self.num_rows, head_dim=self.head_dim
        )

    def device_address(self) -> UInt32[Array, "2"]:
        """Give where the device finds the table, where `reads_on_device`.

        A program that reads there must refer to this table: it keeps the memory.

        Returns:
          The address, as `kernels.record_lookup` takes it.

        Raises:
          ValueError: The table was closed.
        """
        self._open_records()
        assert self._registered is not None
        return jnp.asarray(self._registered.address)

    def read_into(self, ids: npt.NDArray[Any], out: npt.NDArray[np.uint8]) -> None:
        """Read rows on the host into memory that is there; threads may do so at once.

        Args:
          ids: Rows [n]; an id outside the table reads as zeros.
          out: [n, D + D/32], to be written.

        Raises:
          ValueError: The table was closed.
        """
        take_rows([self._open_records()], ids, out)

    def stored_rows(
        self, part: Literal["weight", "scale"], start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes of consecutive rows of the values or the scales."""
        rows = self._open_records()[start:stop]
        return (
            rows[:, : self.head_dim] if part == "weight" else rows[:, self.head_dim :]
        )

    def close(self) -> None:
        """Let go of the memory; also done when the table is forgotten.

        Memory that GPUs read is given back when the table is forgotten, and with it
        every compiled function that reads it.
        """
        self._records = None

    def _open_records(self) -> npt.NDArray[np.uint8]:
        records = self._records  # kept alive by a reader, whoever closes meanwhile
        if records is None:
            raise ValueError("this table in host memory was closed; load it again")
        return records


class HostTable(RecordTable):
    """Read rows from this process's own memory, in huge pages where there are any.

    For one process: its memory has huge pages where the kernel's default setting
    (``madvise``) allows them, which shared memory has only where an administrator
    mounted it so. Rows come as from the other places, some of them sooner. Processes
    that load the same table each take its size; `SharedHostTable` takes it once.

    Works on machines without an accelerator, too.

    Cost: loading takes D + D/32 bytes a row, and some 140 MB while it lasts.

    Attributes:
      num_rows: Rows of the table.
      head_dim: Values of a row, D.
      report: What came of the options.

    Args:
      weight: Where the e4m3 values [R, D] lie.
      scale: Where the E8M0 bytes [R, D/32] lie; another file will do.
      options: Huge pages and the like; None takes `HostMemoryOptions()`.
      show_progress: None shows a bar where the error output is a terminal.

    Raises:
      MemoryError: It does not fit; the message has the figures.
      ValueError: Dtypes or shapes do not fit, or a file changed while it was read.
    """

    def __init__(
        self,
        weight: TensorInfo,
        scale: TensorInfo,
        *,
        options: HostMemoryOptions | None = None,
        show_progress: bool | None = None,
    ) -> None:
        parts = (weight, scale)
        rows, head_dim = check_table(*((x.dtype, x.shape) for x in parts))
        size = rows * (head_dim + head_dim // QUANT_BLOCK)
        states = file_states(*parts)
        check_host_room(size)
        options = HostMemoryOptions() if options is None else options
        mapping = HostMapping(None, size, options)
        what = f"{weight.name} to memory"
        records = fill_records(mapping, 0, parts, states, what, show_progress)
        mapping.settle()
        records.flags.writeable = False
        super().__init__(records, mapping.report, may_register=options.register)
        _log.info(
            "%s in this process's memory: %s (%s)",
            weight.name,
            gigabytes(size),
            self.report,
        )


def file_states(weight: TensorInfo, scale: TensorInfo) -> list[dict[str, Any]]:
    """Say what a table's files hold: whatever differs makes another table."""
    states = []
    for info in (weight, scale):
        status = info.path.stat()
        states.append(
            {
                "device": status.st_dev,
                "inode": status.st_ino,
                "size": status.st_size,
                "changed": status.st_mtime_ns,
                "start": info.start,
                "shape": info.shape,
            }
        )
    return states


def check_host_room(size: int, what: str = "A table") -> None:
    """Refuse what does not fit in host memory.

    Args:
      size: Bytes that shall be taken.
      what: By what.

    Raises:
      MemoryError: The message has the figures.
    """
    room, limit = host_room()
    if size > room:
        raise MemoryError(
            f"{what} takes {gigabytes(size)} of host memory, but {gigabytes(room)} are "
            f'available (limit: {limit}). placement="mapped_file" takes none.'
        )


def fill_records(
    mapping: HostMapping,
    offset: int,
    parts: tuple[TensorInfo, TensorInfo],
    states: list[dict[str, Any]],
    what: str,
    show_progress: bool | None,
) -> npt.NDArray[np.uint8]:
    """Read a table from its files, values and scales side by side; all or nothing.

    Several threads do: one alone makes some 2 GB/s, less than a disk gives. Memory
    that runs out is an error, no signal: pages are asked for before they are written,
    and what the machine and the control groups have left is looked at for each piece,
    as others may take it meanwhile.

    Args:
      mapping: Where to.
      offset: Bytes to leave free at its start.
      parts: Where the values and the scales lie.
      states: Their `file_states` when the table was first looked at.
      what: Name for the progress bar.
      show_progress: None shows a bar where the error output is a terminal.

    Returns:
      The records [R, D + D/32], in the mapping.

    Raises:
      MemoryError: There is no memory left. As after any failure and Ctrl-C, what was
        taken has been given back.
      ValueError: A file changed meanwhile.
    """
    rows, head_dim = parts[0].shape
    width = head_dim + head_dim // QUANT_BLOCK
    flat = np.frombuffer(mapping.buffer, np.uint8, rows * width, offset)
    records = flat.reshape(rows, width)
    step = max(1, _CHUNK_BYTES // width)

    def fill(start: int) -> int:
        stop = min(start + step, rows)
        size = (stop - start) * width
        check_host_room(size, "The next piece of a table")
        mapping.populate(offset + start * width, size)
        some = records[start:stop]
        some[:, :head_dim] = read_rows(parts[0], start, stop).view(np.uint8)
        some[:, head_dim:] = read_rows(parts[1], start, stop).view(np.uint8)
        return size

    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    pool = futures.ThreadPoolExecutor(threads, "engram-fill")
    try:
        with _progress(what, rows * width, show_progress) as advance:
            for count in pool.map(fill, range(0, rows, step)):
                advance(count)
        if file_states(*parts) != states:
            raise ValueError(
                f"{parts[0].path} or {parts[1].path} changed while it was read; load "
                "the checkpoint again"
            )
    except BaseException:
        pool.shutdown(cancel_futures=True)
        mapping.discard()
        raise
    finally:
        pool.shutdown()
    return records


@contextlib.contextmanager
def _progress(
    what: str, size: int, show: bool | None
) -> Iterator[Callable[[int], None]]:
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=size)
        yield lambda count: bar.advance(task, count)
