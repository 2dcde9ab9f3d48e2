"""Tables that live outside device memory: in a file, or in pinned host memory."""

import mmap
import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.experimental.compute_on import compute_on
from jaxtyping import Array, Int32, UInt8

from .config import QUANT_BLOCK
from .constant import Constant
from .kernels import lookup_packed
from .kernels.dispatch import missing_gpu_reason
from .memory_plan import host_room
from .mxfp8 import pack, scale_bytes
from .safetensors_file import TensorInfo, map_bytes, read_rows
from .staging import host_view

_PROBE_ROWS = 64


class HostRows:
    """Read rows on the host, or by a call back to it inside jit, through `read_into`.

    Equality and hash go by identity, so that a module can hold a table as a static
    attribute under jit.

    Attributes:
      num_rows: Rows of the table.
      head_dim: Values of a row, D.
    """

    num_rows: int
    head_dim: int

    def lookup_packed(self, ids: Int32[Array, "..."]) -> UInt8[Array, "... P"]:
        """Read rows as stored: D value bytes, then D/32 scale bytes.

        Inside jit this is a call back to the host, which runs when the ids are there.
        No gradient flows: the table is constant.

        Args:
          ids: Rows, of any shape; an id outside the table reads as zeros.

        Returns:
          uint8 [..., D + D/32].

        Raises:
          ValueError: As `read_into` (JAX may wrap it in an exception of its own).
        """
        width = self.head_dim + self.head_dim // QUANT_BLOCK
        result = jax.ShapeDtypeStruct((*ids.shape, width), jnp.uint8)
        return jax.pure_callback(self.gather, result, ids, vmap_method="expand_dims")

    def gather(self, ids: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Read rows on the host: `lookup_packed` for NumPy.

        Args:
          ids: Rows, of any shape; an id outside the table reads as zeros.

        Returns:
          uint8 [..., D + D/32].

        Raises:
          ValueError: As `read_into`.
        """
        ids = np.asarray(ids)
        width = self.head_dim + self.head_dim // QUANT_BLOCK
        out = np.empty((ids.size, width), np.uint8)
        self.read_into(ids.reshape(-1), out)
        return out.reshape(*ids.shape, width)

    def read_into(self, ids: npt.NDArray[Any], out: npt.NDArray[np.uint8]) -> None:
        """Read rows on the host into memory that is there; threads may do so at once.

        Args:
          ids: Rows [n]; an id outside the table reads as zeros.
          out: [n, D + D/32], to be written.

        Raises:
          ValueError: The table cannot be read any more.
        """
        raise NotImplementedError


class MappedFileTable(HostRows):
    """Read rows from a memory-mapped safetensors file; no memory of its own.

    Pages come from the disk when a row is first read, and stay in the kernel's page
    cache as long as there is room.

    Cost: 1,536 rows from a cold disk take about 40 ms (the missing pages are asked for
    all at once), from the page cache about 1 ms.

    Attributes:
      num_rows: Rows of the table.
      head_dim: Values of a row, D.

    Args:
      weight: Where the e4m3 values [R, D] lie.
      scale: Where the E8M0 bytes [R, D/32] lie; another file will do.

    Raises:
      ValueError: Dtypes or shapes do not fit, or a file is too short.
    """

    def __init__(self, weight: TensorInfo, scale: TensorInfo) -> None:
        rows, head_dim = check_table(
            (weight.dtype, weight.shape), (scale.dtype, scale.shape)
        )
        self.num_rows = rows
        self.head_dim = head_dim
        self._parts = (_MappedRows(weight), _MappedRows(scale))
        self._identities = {path: _identity(path) for path in (weight.path, scale.path)}

    def read_into(self, ids: npt.NDArray[Any], out: npt.NDArray[np.uint8]) -> None:
        """Read rows on the host into memory that is there; threads may do so at once.

        Args:
          ids: Rows [n]; an id outside the table reads as zeros.
          out: [n, D + D/32], to be written.

        Raises:
          ValueError: The file was truncated, replaced or removed since the table was
            opened.
        """
        # A page that its file no longer has kills the process (SIGBUS), so the check
        # comes before the first access.
        for path, identity in self._identities.items():
            if _identity(path) != identity:
                raise ValueError(
                    f"{path} was truncated, replaced or changed since its table was "
                    f"opened (it had {identity[0]} bytes). Load the checkpoint again."
                )
        known = np.flatnonzero((ids >= 0) & (ids < self.num_rows))
        if known.size < ids.size:
            out[...] = 0
        rows = ids[known].astype(np.int64)  # byte offsets pass 2**31
        # Rows of the first few tokens show whether the table is in the page cache. If
        # not, asking for all missing pages at once lets the disk work in parallel; if
        # it is, that would only cost time.
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        self._read(rows[:_PROBE_ROWS], known[:_PROBE_ROWS], out)
        if resource.getrusage(resource.RUSAGE_THREAD).ru_majflt > faults:
            for part in self._parts:
                part.will_need(rows[_PROBE_ROWS:])
        self._read(rows[_PROBE_ROWS:], known[_PROBE_ROWS:], out)

    def stored_rows(
        self, part: Literal["weight", "scale"], start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes of consecutive rows of the values or the scales."""
        # Read, not mapped, so that a pass over the table does not become resident.
        info = self._parts[part == "scale"].info
        return read_rows(info, start, stop).view(np.uint8)

    def _read(
        self,
        rows: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64],
        out: npt.NDArray[np.uint8],
    ) -> None:
        values, scales = self._parts
        out[places, : self.head_dim] = values.table[rows]
        out[places, self.head_dim :] = scales.table[rows]


class _MappedRows:
    """Bytes of one tensor of a table, mapped for reading rows all over it."""

    def __init__(self, info: TensorInfo) -> None:
        self.info = info
        self._mapping, self._skip = map_bytes(info)
        # Otherwise the kernel reads 128 KB around each row: 20 times as slow.
        self._mapping.madvise(mmap.MADV_RANDOM)
        flat = np.frombuffer(self._mapping, np.uint8, info.nbytes, self._skip)
        self.table = flat.reshape(info.shape)

    def will_need(self, rows: npt.NDArray[np.int64]) -> None:
        """Ask the kernel to begin reading the pages of rows, without waiting."""
        width, page = self.table.shape[1], mmap.PAGESIZE
        first = self._skip + rows * width
        pages = np.unique(np.concatenate([first, first + width - 1]) // page)
        for start in (pages * page).tolist():
            self._mapping.madvise(mmap.MADV_WILLNEED, start, page)


class PinnedHostTable(nnx.Module):
    """Keep a table in page-locked host memory, through JAX's memory kinds.

    On a Hopper GPU the lookup's kernel reads the rows from there; elsewhere the host
    gathers them and they are copied to the device, all inside jit. On a GPU, JAX's pool
    of such memory is 64 GB unless the environment variable
    ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB`` says otherwise before JAX starts.

    Attributes:
      num_rows: Rows of the table.
      head_dim: Values of a row, D.
      direct_tokens: Up to this many tokens, `EngramPrefetch` leaves the reading to the
        GPU's kernel.
      weight: e4m3 values [R, D] in host memory.
      scale: E8M0 bytes [R, D/32] in host memory.

    Args:
      weight: e4m3 values [R, D] (or their bytes), a NumPy or JAX array.
      scale: E8M0 scales [R, D/32] or their bytes.
      sharding: Where they go; None takes `pinned_host_sharding`.

    Raises:
      ValueError: Dtypes or shapes do not fit, or there is no pinned memory.

    Example:
      >>> table = PinnedHostTable(np.ones((4, 32), jnp.float8_e4m3fn),
      ...                         np.full((4, 1), 127, np.uint8))
      >>> table.lookup_packed(jnp.array([3, -1]))[:, -1]
      Array([127,   0], dtype=uint8)
    """

    direct_tokens = 64

    def __init__(
        self,
        weight: npt.NDArray[Any] | Array,
        scale: npt.NDArray[Any] | Array,
        sharding: jax.sharding.Sharding | None = None,
    ) -> None:
        names = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "uint8": "U8"}
        rows, head_dim = check_table(
            (names.get(str(weight.dtype), str(weight.dtype)), weight.shape),
            (names.get(str(scale.dtype), str(scale.dtype)), scale.shape),
        )
        self.num_rows = rows
        self.head_dim = head_dim
        sharding = sharding or pinned_host_sharding()
        self.weight = Constant(jax.device_put(weight, sharding))
        # As bytes: a zero of the E8M0 type does not exist, and kernels refuse it.
        bytes_of_scale = (
            scale.view(np.uint8)
            if isinstance(scale, np.ndarray)
            else scale_bytes(scale)
        )
        self.scale = Constant(jax.device_put(bytes_of_scale, sharding))

    @property
    def reads_on_device(self) -> bool:
        """Tell whether a kernel of the device reads the rows, instead of the host."""
        return missing_gpu_reason() is None

    def read_into(self, ids: npt.NDArray[Any], out: npt.NDArray[np.uint8]) -> None:
        """Read rows on the host into memory that is there; threads may do so at once.

        Args:
          ids: Rows [n]; an id outside the table reads as zeros.
          out: [n, D + D/32], to be written.
        """
        # NumPy's own conversion would copy a table of a GPU's pinned memory.
        parts = [host_view(part[...]) for part in (self.weight, self.scale)]
        take_rows([part.view(np.uint8) for part in parts], ids, out)

    def stored_rows(
        self, part: Literal["weight", "scale"], start: int, stop: int
    ) -> npt.NDArray[np.uint8]:
        """Return the bytes of consecutive rows of the values or the scales."""
        table = self.weight if part == "weight" else self.scale
        return np.asarray(table[start:stop]).view(np.uint8)

    def lookup_packed(self, ids: Int32[Array, "..."]) -> UInt8[Array, "... P"]:
        """Read rows as stored: D value bytes, then D/32 scale bytes.

        Args:
          ids: Rows, of any shape; an id outside the table reads as zeros.

        Returns:
          uint8 [..., D + D/32], in device memory.
        """
        return lookup_pinned(self.weight[...], self.scale[...], ids, 0, self.num_rows)


def lookup_pinned(
    weight: Array,
    scale: Array,
    ids: Int32[Array, "..."],
    row_start: int | Int32[Array, ""],
    row_end: int | Int32[Array, ""],
) -> UInt8[Array, "... P"]:
    """Read rows of arrays in page-locked host memory, inside jit or `shard_map`.

    Args:
      weight: e4m3 values [R, D] or their bytes, in host memory.
      scale: E8M0 bytes [R, D/32], in host memory.
      ids: Rows, of any shape.
      row_start: The id of the arrays' row 0.
      row_end: One past the last id that they answer for.

    Returns:
      uint8 [..., D + D/32], in device memory; zeros for an id outside.
    """
    if missing_gpu_reason() is None:
        return lookup_packed(
            weight, scale, ids, row_start=row_start, row_end=row_end, backend="pallas"
        )
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    known = (ids >= row_start) & (ids < row_end)
    # Masked on the device: only a plain gather may run in host memory.
    safe = jax.device_put(jnp.where(known, ids - row_start, 0), host)
    take = compute_on(
        lambda table, rows: table.at[rows].get(mode="promise_in_bounds"),
        compute_type="device_host",
        out_memory_spaces=host,
    )
    values, scales = (
        jax.device_put(take(table, safe), device)  # pyright: ignore[reportCallIssue]
        for table in (weight, scale)
    )
    return jnp.where(known[..., None], pack(values, scales), jnp.uint8(0))


def take_rows(
    parts: Sequence[npt.NDArray[np.uint8]],
    ids: npt.NDArray[Any],
    out: npt.NDArray[np.uint8],
) -> None:
    """Gather rows whose parts lie in one or several arrays.

    Args:
      parts: Bytes [R, width] of each part, in the order of a packed row.
      ids: Rows [n]; one outside 0..R-1 reads as zeros.
      out: [n, sum of widths], to be written.

    Example:
      >>> out = np.empty((2, 3), np.uint8)
      >>> table = np.arange(8, dtype=np.uint8)
      >>> take_rows([table[:4].reshape(2, 2), table[4:6].reshape(2, 1)],
      ...           np.array([1, -1]), out)
      >>> out.tolist()
      [[2, 3, 5], [0, 0, 0]]
    """
    column = 0
    for part in parts:
        place = out[:, column : column + part.shape[1]]
        column += part.shape[1]
        # "clip" is the mode in which NumPy writes to `out` without a buffer between.
        if place.flags.c_contiguous:
            part.take(ids, 0, place, "clip")
        else:
            place[...] = part.take(ids, 0, mode="clip")
    # A negative id becomes a large one.
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))
    if ids.size and int(unsigned.max()) >= parts[0].shape[0]:
        out[unsigned >= parts[0].shape[0]] = 0


def pinned_host_sharding() -> jax.sharding.Sharding:
    """Name the page-locked host memory of JAX's first device.

    Returns:
      A sharding for ``jax.device_put``.

    Raises:
      ValueError: The device has no such memory.
    """
    device = jax.local_devices()[0]
    kinds = sorted(memory.kind for memory in device.addressable_memories())
    if "pinned_host" not in kinds:
        raise ValueError(
            f"{device} has no pinned_host memory, only {', '.join(kinds)}; choose "
            'placement="mapped_file" or "device".'
        )
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def available_host_memory() -> int:
    """Find how many bytes this process can still take, within its limits.

    Returns:
      The least of what the machine has free (page cache counts as free) and what
      the process's memory control groups leave.
    """
    return host_room()[0]


def check_table(
    weight: tuple[str, tuple[int, ...]], scale: tuple[str, tuple[int, ...]]
) -> tuple[int, int]:
    """Check a table's parts.

    Args:
      weight: Dtype (the file format's name) and shape of the values.
      scale: Of the scales.

    Returns:
      The number of rows, and their width D.

    Raises:
      ValueError: They do not fit.
    """
    (weight_dtype, shape), (scale_dtype, scale_shape) = weight, scale
    if weight_dtype not in ("F8_E4M3", "U8") or len(shape) != 2:
        raise ValueError(
            f"weight is {weight_dtype} {list(shape)}; it must be F8_E4M3 [rows, D]."
        )
    wanted = (shape[0], shape[1] // QUANT_BLOCK)
    if shape[1] % QUANT_BLOCK or not shape[0] or not shape[1]:
        raise ValueError(
            f"weight has shape {list(shape)}; it must have rows, and their width must "
            f"be a multiple of {QUANT_BLOCK}."
        )
    if scale_dtype not in ("F8_E8M0", "U8") or scale_shape != wanted:
        raise ValueError(
            f"scale is {scale_dtype} {list(scale_shape)}; a weight of shape "
            f"{list(shape)} needs F8_E8M0 {list(wanted)}."
        )
    return shape[0], shape[1]


def _identity(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return (-1,)
    return status.st_size, status.st_ino, status.st_dev, status.st_mtime_ns
