"""The safetensors reader and writer: dtypes, damage, sparse files, interruption."""

import json
import math
import os
import resource
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from engram_jax.safetensors_file import (
    DTYPES,
    SafetensorsWriter,
    map_tensor,
    read_header,
    read_rows,
    whole_directory,
)


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def interrupt(_: Any, error: type[BaseException]) -> None:
    raise error


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "model.safetensors"


# Reading


def test_every_dtype_makes_the_round_trip(path):
    """Pitfall: the usual NumPy reader does not know F8_E4M3 and F8_E8M0."""
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 2, (3, 5, dtype.itemsize), np.uint8)
        .view(dtype)
        .reshape(3, 5)
        for name, dtype in DTYPES.items()
    }
    with SafetensorsWriter(path, {n: (n, (3, 5)) for n in arrays}) as writer:
        for name, array in arrays.items():
            writer.write(name, array)
    infos = read_header(path)
    assert list(infos) == list(arrays)
    for name, array in arrays.items():
        mapped = map_tensor(infos[name])
        assert mapped.dtype == array.dtype
        np.testing.assert_array_equal(mapped.view(np.uint8), array.view(np.uint8))
        rows = read_rows(infos[name], 1, 3)
        np.testing.assert_array_equal(rows.view(np.uint8), array[1:].view(np.uint8))
        with pytest.raises(ValueError, match="read-only"):
            mapped[0, 0] = array[0, 0]


def test_the_reference_library_reads_what_is_written(path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    bits = np.arange(8, dtype=np.uint8)
    tensors = {"a": ("F32", (3, 4)), "b": ("F8_E8M0", (8,))}
    with SafetensorsWriter(path, tensors, metadata={"made": "here"}) as writer:
        writer.write("a", values)
        writer.write("b", bits)
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"made": "here"}
        np.testing.assert_array_equal(file.get_tensor("a"), values)
        assert file.get_slice("b").get_dtype() == "F8_E8M0"


def test_files_of_the_reference_library_are_read(path):
    arrays = {
        "odd": np.arange(3, dtype=np.uint8),
        "b": np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        "c": np.arange(4, dtype=ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(7, np.int64),
    }
    safetensors.numpy.save_file(arrays, path)
    infos = read_header(path)
    assert set(infos) == set(arrays)
    for name, array in arrays.items():
        mapped = map_tensor(infos[name])
        assert mapped.shape == array.shape
        np.testing.assert_array_equal(mapped, array)


def test_tensor_at_an_odd_byte_is_read(path):
    values = np.array([1.5, -2.0], np.float32)
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    info = read_header(raw_file(path, header, b"\0" + values.tobytes()))["b"]
    np.testing.assert_array_equal(map_tensor(info), values)
    np.testing.assert_array_equal(read_rows(info, 0, 2), values)


def test_rows_are_read_into_memory_that_jax_can_share(path):
    table = np.arange(256 * 64, dtype=np.uint8).reshape(256, 64)
    with SafetensorsWriter(path, {"t": ("U8", (256, 64))}) as writer:
        writer.write("t", table)
    info = read_header(path)["t"]
    assert info.start % 64 == 0
    rows = read_rows(info, 7, 200)
    assert rows.ctypes.data % 64 == 0
    np.testing.assert_array_equal(rows, table[7:200])
    array = jax.device_put(rows, jax.devices("cpu")[0])
    assert array.addressable_data(0).unsafe_buffer_pointer() == rows.ctypes.data
    assert read_rows(info, 5, 5).shape == (0, 64)


def test_of_a_sparse_file_only_what_it_holds_becomes_resident(path):
    """Pitfall: a huge page for each of the few rows of a table on paper."""
    rows, step = 1 << 18, 1 << 14  # 64 MB, a row of it every 4 MB
    with SafetensorsWriter(path, {"t": ("U8", (rows, 256))}, sparse=True) as writer:
        for row in range(0, rows, step):
            writer.write("t", np.full((1, 256), 1 + row // step, np.uint8), row)

    def memory() -> int:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("Pss_Anon:"))
        return int(line.split()[1]) * 1024

    before = memory()
    table = read_rows(read_header(path)["t"], 0, rows)
    assert memory() - before < 4 << 20
    np.testing.assert_array_equal(table[::step, 0], np.arange(1, 17))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 5)])
def test_rows_outside_the_tensor_are_refused(path, start, stop):
    with SafetensorsWriter(path, {"t": ("U8", (4, 2))}, sparse=True):
        pass
    with pytest.raises(ValueError, match=r"Rows .* of t"):
        read_rows(read_header(path)["t"], start, stop)


# Damage


def test_missing_file_is_named(path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors does not exist"):
        read_header(path)


@pytest.mark.parametrize("length", [0, 5, 8, 20])
def test_file_cut_off_in_its_header_is_named(path, length):
    raw_file(path, {"a": entry("U8", [4], 0, 4)}, b"1234")
    os.truncate(path, length)
    with pytest.raises(ValueError, match=r"model\.safetensors .*cut off"):
        read_header(path)


def test_file_cut_off_in_its_data_is_named(path):
    raw_file(path, {"a": entry("U8", [4], 0, 4)}, b"123")
    size = path.stat().st_size
    with pytest.raises(
        ValueError, match=rf"is cut off: it has {size} bytes.*{size + 1}"
    ):
        read_header(path)


def test_file_with_bytes_that_no_tensor_owns_is_named(path):
    raw_file(path, {"a": entry("U8", [4], 0, 4)}, b"12345")
    with pytest.raises(ValueError, match="no tensor owns"):
        read_header(path)


def test_tensor_given_twice_in_one_header_is_refused(path):
    """Pitfall: a plain JSON reader keeps only the last of two equal keys."""
    item = json.dumps(entry("U8", [4], 0, 4))
    raw_file(path, f'{{"a": {item}, "a": {item}}}'.encode(), b"1234")
    with pytest.raises(ValueError, match=r"model\.safetensors.*'a' is given twice"):
        read_header(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[1]",
        b'"text"',
        b"\xff\xfe",
        b"null",
        pytest.param(b"[" * 100_000, id="deep"),
    ],
)
def test_header_that_is_no_json_object_is_refused(path, header):
    with pytest.raises(ValueError, match=r"header of .*model\.safetensors"):
        read_header(raw_file(path, header))


@pytest.mark.parametrize(
    "item",
    [
        None,
        7,
        {},
        {"dtype": "U8", "shape": [4]},
        {"dtype": "U8", "data_offsets": [0, 4]},
        {"dtype": 8, "shape": [4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": 4, "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]},
        {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [0]},
        {"dtype": "U8", "shape": [4], "data_offsets": [-4, 0]},
    ],
)
def test_malformed_entry_is_refused_by_name(path, item):
    with pytest.raises(ValueError, match=r"describes tensor\.x"):
        read_header(raw_file(path, {"tensor.x": item}, b"1234"))


def test_size_that_does_not_fit_dtype_and_shape_is_refused(path):
    raw_file(path, {"a": entry("F32", [2], 0, 4)}, b"1234")
    with pytest.raises(ValueError, match=r"a in .* has 4 bytes.*F32.*need 8"):
        read_header(path)


@pytest.mark.parametrize(("begin", "name"), [(3, "overlap"), (5, "gap")])
def test_overlaps_and_gaps_are_refused(path, begin, name):
    header = {"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], begin, begin + 4)}
    with pytest.raises(ValueError, match=r"b in .* without gaps or overlaps"):
        read_header(raw_file(path, header, bytes(begin + 4)))


def test_unknown_dtype_is_refused_only_when_read(path):
    info = read_header(raw_file(path, {"a": entry("F4", [8], 0, 4)}, b"1234"))["a"]
    with pytest.raises(ValueError, match=r"a in .*F4"):
        map_tensor(info)


def test_absurd_header_length_is_refused(path):
    path.write_bytes((200_000_000).to_bytes(8, "little"))
    os.truncate(path, 300_000_000)
    with pytest.raises(ValueError, match="200000000"):
        read_header(path)


def test_file_truncated_after_opening_is_named(path):
    raw_file(path, {"a": entry("U8", [4], 0, 4)}, b"1234")
    info = read_header(path)["a"]
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ValueError, match="changed since it was opened"):
        map_tensor(info)
    with pytest.raises(ValueError, match="was cut off since"):
        read_rows(info, 0, 4)


# Writing


def test_rows_written_in_pieces_land_in_place(path):
    table = np.arange(40, dtype=np.int32).reshape(10, 4)
    with SafetensorsWriter(path, {"t": ("I32", (10, 4)), "s": ("F32", ())}) as writer:
        for start in (6, 0, 3):
            writer.write("t", table[start : start + (4 if start == 6 else 3)], start)
        writer.write("s", np.array(2.5, np.float32))
    infos = read_header(path)
    np.testing.assert_array_equal(map_tensor(infos["t"]), table)
    assert map_tensor(infos["s"]) == 2.5


def test_array_that_is_not_contiguous_is_written_right(path):
    table = np.arange(12, dtype=np.int32).reshape(3, 4)
    with SafetensorsWriter(path, {"t": ("I32", (4, 3))}) as writer:
        writer.write("t", table.T)
    np.testing.assert_array_equal(map_tensor(read_header(path)["t"]), table.T)


def test_incomplete_tensor_discards_the_file(path):
    """Pitfall: a tensor that nobody wrote reads as zeros and gives fluent nonsense."""
    with (
        pytest.raises(ValueError, match="t has 8 bytes, but 4 were written"),
        SafetensorsWriter(path, {"t": ("U8", (2, 4))}) as writer,
    ):
        writer.write("t", np.ones((1, 4), np.uint8))
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_write_leaves_nothing_and_keeps_the_old_file(path, error):
    path.write_text("the old one")
    with pytest.raises(error), SafetensorsWriter(path, {"t": ("U8", (2,))}) as writer:
        interrupt(writer.write("t", np.ones(2, np.uint8)), error)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert path.read_text() == "the old one"


def test_nothing_appears_under_the_name_before_the_end(path):
    with SafetensorsWriter(path, {"t": ("U8", (2,))}) as writer:
        writer.write("t", np.ones(2, np.uint8))
        assert not path.exists()
    assert path.exists()


@pytest.mark.parametrize(
    ("values", "row"),
    [
        (np.ones((1, 3), np.uint8), 0),
        (np.ones((3, 4), np.uint8), 0),
        (np.ones((1, 4), np.uint8), 2),
        (np.ones((1, 4), np.uint8), -1),
        (np.ones(4, np.uint8), 0),
        (np.ones((1, 4), np.int8), 0),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(path, values, row):
    with (
        pytest.raises(ValueError, match="t "),
        SafetensorsWriter(path, {"t": ("U8", (2, 4))}) as writer,
    ):
        writer.write("t", values, row)


def test_unknown_dtype_is_not_written(path):
    with pytest.raises(ValueError, match="t has dtype F4"):
        SafetensorsWriter(path, {"t": ("F4", (2,))})


def test_file_larger_than_the_disk_is_refused_before_writing(path):
    with (
        pytest.raises(OSError, match=r"takes \d+ bytes, but its disk has \d+"),
        SafetensorsWriter(path, {"t": ("U8", (10**15,))}),
    ):
        pass
    assert list(path.parent.iterdir()) == []


def test_sparse_table_takes_neither_disk_nor_memory(path):
    """Pitfall: byte offsets beyond int32, at rows 8,388,608 and the last one."""
    rows = 20_000_000
    chosen = [0, 8_388_607, 8_388_608, rows - 1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SafetensorsWriter(path, {"t": ("U8", (rows, 256))}, sparse=True) as writer:
        for row in chosen:
            writer.write("t", np.full((1, 256), row % 251 + 1, np.uint8), row)
    table = map_tensor(read_header(path)["t"])
    for row in chosen:
        assert (table[row] == row % 251 + 1).all()
    assert not table[10_000_000].any()
    assert path.stat().st_size > rows * 256
    assert path.stat().st_blocks * 512 < 1 << 20
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < 50_000, f"{growth} KiB more"


def test_large_tensor_is_written_without_a_second_copy(path):
    table = np.ones((1 << 17, 256), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SafetensorsWriter(path, {"t": ("U8", table.shape)}) as writer:
        writer.write("t", table)
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth < 4_000, f"{growth} KiB more for {math.prod(table.shape)} bytes"


# Directories


def test_directory_appears_whole(tmp_path):
    target = tmp_path / "parent" / "out"
    with whole_directory(target) as partial:
        (partial / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def test_empty_directory_is_taken(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with whole_directory(target) as partial:
        (partial / "a").write_text("1")
    assert (target / "a").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_directory_leaves_nothing(tmp_path, error):
    with pytest.raises(error), whole_directory(tmp_path / "out") as partial:
        interrupt((partial / "a").write_text("1"), error)
    assert list(tmp_path.iterdir()) == []


def test_directory_with_files_is_not_overwritten(tmp_path):
    (tmp_path / "keep").write_text("1")
    with (
        pytest.raises(FileExistsError, match="not an empty"),
        whole_directory(tmp_path),
    ):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["keep"]
