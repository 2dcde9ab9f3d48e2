"""Read and write safetensors files lazily, FP8 and E8M0 included.

The readers of the ``safetensors`` package for NumPy and Flax do not know F8_E4M3
and F8_E8M0; this one maps the file and views it through ``ml_dtypes``.
"""

import contextlib
import dataclasses
import errno
import json
import math
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""NumPy dtypes of the format's dtype names."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_ALIGNMENT = 64  # JAX shares memory with NumPy only from addresses like these
_CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Say where a tensor lies.

    Attributes:
      name: The tensor's name in its file.
      path: The file.
      dtype: The format's name of the dtype, such as ``F8_E4M3``.
      shape: The tensor's shape.
      start: The first byte, counted from the start of the file.
      nbytes: The number of bytes.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Return the NumPy dtype, or refuse one that NumPy does not have."""
        if self.dtype not in DTYPES:
            raise ValueError(
                f"{self.name} in {self.path} has dtype {self.dtype}, which NumPy "
                f"cannot hold; known are {', '.join(DTYPES)}."
            )
        return DTYPES[self.dtype]


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of a JSON object's pairs, refusing a key that occurs twice.

    Meant for ``json.loads(text, object_pairs_hook=unique_keys)``: by itself, the
    parser keeps the last of two equal keys and says nothing.

    Args:
      pairs: Keys and values in the file's order.

    Returns:
      The dict.

    Raises:
      ValueError: A key occurs twice.

    Example:
      >>> json.loads('{"a": 1, "a": 2}', object_pairs_hook=unique_keys)
      Traceback (most recent call last):
      ValueError: 'a' is given twice
    """
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"{key!r} is given twice")
        result[key] = value
    return result


def read_header(path: str | os.PathLike[str]) -> dict[str, TensorInfo]:
    """Read and check the header of a safetensors file, but none of its data.

    Args:
      path: The file.

    Returns:
      Every tensor by name, in the order of their data.

    Raises:
      FileNotFoundError: There is no such file.
      ValueError: The file is shorter or longer than its header says, a tensor is
        given twice, or the header is damaged; the message names file and tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(_LENGTH_BYTES)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise ValueError(
                f"{path} is no safetensors file or is cut off: it has {size} bytes, "
                f"but its header alone would end at byte {_LENGTH_BYTES + length}."
            )
        if length > _MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} states a header of {length} bytes; at most "
                f"{_MAX_HEADER_BYTES} are allowed, so this is no safetensors file."
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The header of {path} is damaged: {error}.") from error
    if not isinstance(header, dict):
        raise ValueError(f"The header of {path} is no JSON object.")
    header.pop("__metadata__", None)
    data_start = _LENGTH_BYTES + length
    infos = [_tensor_info(path, name, e, data_start) for name, e in header.items()]
    infos.sort(key=lambda info: (info.start, info.nbytes))
    expected = data_start
    for info in infos:
        if info.start != expected:
            raise ValueError(
                f"{info.name} in {path} begins at byte {info.start}; the tensor before "
                f"it ends at {expected}. Tensors must follow each other without gaps "
                "or overlaps."
            )
        expected += info.nbytes
    if expected != size:
        what = "is cut off" if size < expected else "has bytes that no tensor owns"
        raise ValueError(
            f"{path} {what}: it has {size} bytes, its header describes {expected}. "
            "Copy or download it again."
        )
    return {info.name: info for info in infos}


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    malformed = ValueError(
        f"The header of {path} describes {name} by {entry!r}; it must give dtype, "
        "shape and data_offsets, in integers from 0 up."
    )
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise malformed from error
    numbers = (*shape, begin, end)
    if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in numbers):
        raise malformed
    if end < begin:
        raise malformed
    # Dtypes that NumPy does not know are left alone: no one here reads them.
    if dtype in DTYPES:
        wanted = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != wanted:
            raise ValueError(
                f"{name} in {path} has {end - begin} bytes; dtype {dtype} and shape "
                f"{list(shape)} need {wanted}."
            )
    return TensorInfo(name, path, dtype, shape, data_start + begin, end - begin)


def map_bytes(info: TensorInfo) -> tuple[mmap.mmap, int]:
    """Map a tensor's part of its file, read-only.

    Args:
      info: The tensor, of one byte or more.

    Returns:
      The mapping, which begins on a page's boundary, and the tensor's first byte in
      it.

    Raises:
      ValueError: The file has become too short.
    """
    with info.path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < info.start + info.nbytes:
            raise ValueError(
                f"{info.path} has {size} bytes, but {info.name} ends at byte "
                f"{info.start + info.nbytes}: the file changed since it was opened."
            )
        skip = info.start % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            file.fileno(),
            info.nbytes + skip,
            offset=info.start - skip,
            access=mmap.ACCESS_READ,
        )
    return mapping, skip


def map_tensor(info: TensorInfo) -> npt.NDArray[Any]:
    """Map a tensor read-only; pages come from the disk when touched.

    Args:
      info: The tensor.

    Returns:
      A read-only array that keeps the mapping open.

    Raises:
      ValueError: The dtype is unknown or the file has become too short.
    """
    dtype = info.numpy_dtype
    if info.nbytes == 0:
        return np.zeros(info.shape, dtype)
    mapping, skip = map_bytes(info)
    flat = np.frombuffer(mapping, np.uint8, info.nbytes, skip)
    return flat.view(dtype).reshape(info.shape)


def read_rows(info: TensorInfo, start: int, stop: int) -> npt.NDArray[Any]:
    """Read consecutive rows of a tensor into memory of their own.

    The memory is aligned so that JAX's CPU backend can use it without a copy, and
    the file is read, not mapped: nothing but the result becomes resident, and of a
    sparse file only what it holds.

    Args:
      info: The tensor, of one dimension or more.
      start: First row.
      stop: Row after the last one.

    Returns:
      A writable array of shape ``[stop - start, ...]``.

    Raises:
      ValueError: The rows lie outside the tensor, or the file ends early.
    """
    if not info.shape or not 0 <= start <= stop <= info.shape[0]:
        raise ValueError(
            f"Rows {start} to {stop} of {info.name} in {info.path} were asked for; its "
            f"shape is {list(info.shape)}."
        )
    shape = (stop - start, *info.shape[1:])
    dtype = info.numpy_dtype
    row_bytes = math.prod(info.shape[1:]) * dtype.itemsize
    total = shape[0] * row_bytes
    if total == 0:
        return np.zeros(shape, dtype)
    # Anonymous: zeros, from a page's boundary on. Shared has no huge pages as a rule.
    buffer = mmap.mmap(-1, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = np.frombuffer(buffer, np.uint8)
    first = info.start + start * row_bytes
    with info.path.open("rb") as file:
        descriptor = file.fileno()
        too_short = ValueError(
            f"{info.path} ends inside {info.name}: the file was cut off since it was "
            "opened."
        )
        if os.fstat(descriptor).st_size < first + total:
            raise too_short
        for begin, end in _data_ranges(descriptor, first, first + total):
            done = begin
            if end - begin == total:  # no holes that they would fill
                with contextlib.suppress(OSError):
                    buffer.madvise(mmap.MADV_HUGEPAGE)  # five times as fast
            while done < end:
                # Pieces keep the wait for Ctrl-C short.
                stop_at = min(done + _CHUNK_BYTES, end)
                piece = memoryview(flat)[done - first : stop_at - first]
                count = os.preadv(descriptor, [piece], done)
                if not count:
                    raise too_short
                done += count
    return flat.view(dtype).reshape(shape)


def _data_ranges(descriptor: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Give the parts of a file's range that are no holes: those are zeros already."""
    position = start
    while position < stop:
        try:
            begin = os.lseek(descriptor, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only holes follow
                return
            raise
        if begin >= stop:
            return
        position = min(os.lseek(descriptor, begin, os.SEEK_HOLE), stop)
        yield begin, position


class SafetensorsWriter:
    """Write a safetensors file piece by piece, whole or not at all.

    The file appears under its name when the ``with`` block ends well; an exception,
    Ctrl-C included, leaves nothing behind. Bytes that are never written read as
    zeros and take no disk space (where the file system supports that), which makes
    sparse tables possible. Data begins 64-byte aligned, so that JAX can use a
    mapping of the first tensor without a copy.

    Args:
      path: The file to make; an existing one is replaced at the end.
      tensors: Dtype (the format's name) and shape by tensor name, in the order in
        which they shall lie.
      metadata: Strings for the header's ``__metadata__``.
      sparse: Whether leaving bytes unwritten is intended; if not, the end of the
        block refuses a tensor that was not written wholly.

    Raises:
      ValueError: A dtype is unknown or, at the end, a tensor is incomplete.
      OSError: The disk has less room than the file takes.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "x.safetensors"
      >>> with SafetensorsWriter(path, {"x": ("F32", (2, 2))}) as writer:
      ...     writer.write("x", np.ones((2, 2), np.float32))
      >>> map_tensor(read_header(path)["x"]).tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        metadata: Mapping[str, str] | None = None,
        sparse: bool = False,
    ) -> None:
        self._path = Path(path)
        self._partial = _partial_name(self._path)
        self._sparse = sparse
        header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
        end = 0
        for name, (dtype, shape) in tensors.items():
            if dtype not in DTYPES:
                raise ValueError(
                    f"{name} has dtype {dtype}; known are {', '.join(DTYPES)}."
                )
            begin, end = end, end + math.prod(shape) * DTYPES[dtype].itemsize
            header[name] = {
                "dtype": dtype,
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode("utf-8")
        text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
        self._start = _LENGTH_BYTES + len(text)
        self._prefix = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self._size = self._start + end
        header.pop("__metadata__")
        self._entries = header
        self._written = dict.fromkeys(header, 0)
        self._descriptor = -1

    def __enter__(self) -> "SafetensorsWriter":
        if not self._sparse:
            free = shutil.disk_usage(self._path.parent).free
            if free < self._size:
                raise OSError(
                    f"{self._path} takes {self._size} bytes, but its disk has {free} "
                    "left."
                )
        self._descriptor = os.open(
            self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666
        )
        try:
            os.ftruncate(self._descriptor, self._size)
            os.pwrite(self._descriptor, self._prefix, 0)
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if exc is None:
                self._check_complete()
                os.fsync(self._descriptor)
                os.replace(self._partial, self._path)
        finally:
            self._discard()

    def write(self, name: str, values: npt.NDArray[Any], start_row: int = 0) -> None:
        """Write consecutive rows of a tensor.

        Args:
          name: The tensor.
          values: Rows, of the tensor's dtype (or its bytes as uint8) and its shape
            but for the first dimension; the whole tensor where it has no dimension.
          start_row: Row that the first of them becomes.

        Raises:
          ValueError: Dtype or shape are not the tensor's, or rows lie outside it.
        """
        entry = self._entries[name]
        shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
        as_bytes = values.dtype == np.uint8 and dtype.itemsize == 1
        if values.dtype != dtype and not as_bytes:
            raise ValueError(f"{name} takes {dtype}, not {values.dtype}.")
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        fits = values.shape[1:] == shape[1:] and len(values.shape) == len(shape)
        last = start_row + (values.shape[0] if values.shape else 1)
        if not fits or not 0 <= start_row <= last <= (shape[0] if shape else 1):
            raise ValueError(
                f"{name} has shape {list(shape)}; values of shape "
                f"{list(values.shape)} do not fit at row {start_row}."
            )
        begin = self._start + entry["data_offsets"][0] + start_row * row_bytes
        flat = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        done = 0
        while done < len(flat):
            piece = flat[done : done + _CHUNK_BYTES]
            done += os.pwrite(self._descriptor, piece, begin + done)
        self._written[name] += done

    def _check_complete(self) -> None:
        for name, entry in self._entries.items():
            begin, end = entry["data_offsets"]
            if not self._sparse and self._written[name] != end - begin:
                raise ValueError(
                    f"{name} has {end - begin} bytes, but {self._written[name]} were "
                    "written; the file is discarded. Write every row once, or pass "
                    "sparse=True where zeros are meant."
                )

    def _discard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._partial.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Make a directory that appears complete or not at all.

    Args:
      path: The directory to make; it must not exist, or be empty.

    Yields:
      A hidden directory beside it to put the files in. It takes the name `path`
      when the block ends well, and is removed when it does not, also on Ctrl-C.

    Raises:
      FileExistsError: `path` exists and is not an empty directory.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise FileExistsError(
            f"{path} exists and is not an empty directory; name another or remove it."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_name(path)
    partial.mkdir()
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
