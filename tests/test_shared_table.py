"""Tables in shared memory: one copy, whole or not there, and nothing left behind."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import mesh_cases
import ml_dtypes
import numpy as np
import pytest
from golden_checkpoint import TINY, golden_batch
from record_cases import (
    IDS,
    ROWS,
    WIDTH,
    end,
    expected,
    line_of,
    start_filling,
    write_table,
)

from engram_jax import (
    EngramPrefetch,
    host_memory,
    host_table,
    load_engram,
    shared_table,
)
from engram_jax.embedding import RowStorage
from engram_jax.host_memory import HostMemoryOptions
from engram_jax.safetensors_file import SafetensorsWriter, read_header
from engram_jax.shared_table import SharedHostTable, remove_unused_tables


@pytest.fixture
def source(tmp_path) -> Path:
    write_table(tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A directory that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setenv("ENGRAM_JAX_SHARED_DIRECTORY", str(folder))
    return folder


def open_table(source: Path, **options) -> SharedHostTable:
    infos = read_header(source)
    return SharedHostTable(infos["weight"], infos["scale"], **options)


def start_process(source: Path, pause: float = 60) -> subprocess.Popen[str]:
    return start_filling("SharedHostTable", source, pause)


# --- Rows -----------------------------------------------------------------------------


def test_rows_equal_plain_indexing(source, folder):
    table = open_table(source)
    assert isinstance(table, RowStorage)
    assert (table.num_rows, table.head_dim) == (ROWS, WIDTH)
    wanted = expected(source, IDS)
    np.testing.assert_array_equal(table.gather(IDS), wanted)
    jitted = jax.jit(table.lookup_packed)(jnp.asarray(IDS))
    np.testing.assert_array_equal(jitted, wanted)
    np.testing.assert_array_equal(
        table.stored_rows("scale", 5, 9), table.gather(np.arange(5, 9))[:, WIDTH:]
    )
    table.close()
    assert not list(folder.iterdir())
    with pytest.raises(ValueError, match="was closed"):
        table.gather(IDS)


def test_load_engram_gives_the_golden_rows(folder, v41_token_map):
    stack = load_engram(
        TINY,
        tokenizer=v41_token_map,
        placement="shared_host",
        host_memory=HostMemoryOptions(huge_pages=False, lock=True),
    )
    batch, _, wanted = golden_batch(stack)
    for index, (layer_id, layer) in enumerate(stack.layers.items()):
        rows = np.asarray(jax.jit(layer.embedding)(batch.hash_ids[:, index]))
        np.testing.assert_array_equal(
            rows.astype(np.float32),
            wanted[f"rows_{layer_id}"].view(ml_dtypes.bfloat16).astype(np.float32),
        )
    for layer in stack.layers.values():
        assert isinstance(layer.embedding.storage, SharedHostTable)
        assert layer.embedding.storage.report.huge_pages == "off"
        assert layer.embedding.storage.report.lock != "off"
        layer.embedding.storage.close()
    assert not list(folder.iterdir())


def test_load_engram_on_a_mesh(folder, v41_token_map):
    mesh = mesh_cases.mesh(2, 2)
    shared = load_engram(
        TINY, tokenizer=v41_token_map, placement="shared_host", mesh=mesh
    )
    ids = jnp.arange(13)
    batch = shared.batch(ids, ids, jnp.array([0, 13]))
    expected = load_engram(TINY, tokenizer=v41_token_map, mesh=mesh).batch(
        ids, ids, jnp.array([0, 13])
    )
    np.testing.assert_array_equal(batch.rows, expected.rows)
    with EngramPrefetch(shared, threads=1) as prefetch:
        tokens = {"input_ids": np.arange(13), "positions": np.arange(13)}
        fetched = prefetch.start(**tokens, query_start_loc=[0, 13]).result()
        for index in range(2):
            np.testing.assert_array_equal(
                fetched.rows[index].packed(), expected.rows[:, index]
            )


# --- One copy -------------------------------------------------------------------------


def test_second_user_shares_and_the_last_one_cleans_up(source, folder):
    first = open_table(source)
    second = open_table(source)
    assert (first.filled, second.filled) == (True, False)
    first.close()
    first.close()
    assert [path.suffix for path in folder.iterdir() if path.suffix != ".lock"]
    np.testing.assert_array_equal(second.gather(IDS), expected(source, IDS))
    del second  # forgotten, not closed
    assert not list(folder.iterdir())


MEASURE = """
import sys
from engram_jax.safetensors_file import read_header
from engram_jax.shared_table import SharedHostTable
def memory():
    with open("/proc/self/smaps_rollup") as file:
        lines = [line.split() for line in file if line.startswith("Pss")]
    return {name: int(size) * 1024 for name, size, _ in lines}
infos = read_header(sys.argv[1])
before = memory()
table = SharedHostTable(infos["weight"], infos["scale"])
print("open", flush=True)
sys.stdin.readline()
after = memory()
print(after["Pss_Shmem:"] - before["Pss_Shmem:"],
      after["Pss_Anon:"] - before["Pss_Anon:"], flush=True)
sys.stdin.readline()
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_four_processes_hold_one_copy(tmp_path):
    """Pitfall: shared and own memory together, from /proc."""
    path = tmp_path / "table.safetensors"
    rows = 1_000_000
    tensors = {"weight": ("F8_E4M3", (rows, 256)), "scale": ("F8_E8M0", (rows, 8))}
    with SafetensorsWriter(path, tensors, sparse=True):
        pass
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MEASURE, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    try:
        assert [line_of(process) for process in processes] == ["open"] * 4
        shared = own = 0
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes:
            shmem, anon = map(int, line_of(process).split())
            shared, own = shared + shmem, own + anon
    finally:
        for process in processes:
            end(process)
    table = rows * 264
    assert 0.99 * table < shared < 1.01 * table
    slack = 4 * (6 << 20)  # Python's own
    assert shared + own < 1.02 * table + slack


# --- Faults ---------------------------------------------------------------------------


def test_others_wait_until_the_table_is_whole(source, folder):
    process = start_process(source, pause=1.5)
    assert line_of(process) == "half"
    assert not list(folder.glob("*.table"))
    table = open_table(source)  # waits
    assert not table.filled
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    assert line_of(process) == "filled"
    end(process)
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    table.close()
    assert not list(folder.iterdir())


def test_writer_killed_midway_leaves_nothing_that_looks_like_a_table(source, folder):
    """Pitfall: and one that waited fills it instead."""
    process = start_process(source)
    assert line_of(process) == "half"
    result: list[SharedHostTable] = []
    waiting = threading.Thread(target=lambda: result.append(open_table(source)))
    waiting.start()
    time.sleep(0.2)
    assert not result
    end(process, signal.SIGKILL)
    waiting.join(30)
    assert result[0].filled
    np.testing.assert_array_equal(result[0].gather(IDS), expected(source, IDS))
    result.pop().close()
    assert not list(folder.iterdir())


def test_interrupt_while_loading_leaves_nothing(source, folder):
    process = start_process(source, pause=1)  # pieces that were begun are waited for
    assert line_of(process) == "half"
    assert "KeyboardInterrupt" in end(process, signal.SIGINT)
    assert not list(folder.iterdir())


def test_readers_that_are_killed_do_not_count(source, folder):
    table = open_table(source)
    process = start_process(source)
    assert line_of(process) == "shared"
    end(process, signal.SIGKILL)
    table.close()
    assert not list(folder.iterdir())


def test_whole_table_of_a_killed_process_is_used_or_removed(source, folder, tmp_path):
    process = start_process(source, pause=0)
    assert [line_of(process), line_of(process)] == ["half", "filled"]
    end(process, signal.SIGKILL)
    (left,) = folder.glob("*.table")
    again = open_table(source)
    assert not again.filled
    np.testing.assert_array_equal(again.gather(IDS), expected(source, IDS))
    assert remove_unused_tables(folder) == []  # it is in use
    descriptor = os.open(left, os.O_RDONLY)
    copy = os.pread(descriptor, 1 << 20, 0)
    os.close(descriptor)
    again.close()
    left.write_bytes(copy)  # as if all its users had been killed
    write_table(tmp_path / "other.safetensors", seed=1)
    other = open_table(tmp_path / "other.safetensors")
    assert not left.exists()
    other.close()
    assert not list(folder.iterdir())


@pytest.mark.parametrize("damage", ["header", "size"])
def test_what_does_not_hold_this_table_is_filled_anew(source, folder, damage):
    table = open_table(source)
    (path,) = folder.glob("*.table")
    table.close()
    path.write_bytes(b"x" * (5000 if damage == "size" else 4096 + ROWS * 66))
    table = open_table(source)
    assert table.filled
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    table.close()


def test_other_files_make_another_table(source, folder):
    first = open_table(source)
    write_table(source, seed=3)
    second = open_table(source)
    assert second.filled
    assert (first.gather(IDS) != second.gather(IDS)).any()
    first.close()
    second.close()
    assert not list(folder.iterdir())


def test_source_that_changes_while_it_is_read_is_refused(source, folder, monkeypatch):
    real = host_table.read_rows

    def read_and_touch(info, start, stop):
        os.utime(info.path)
        return real(info, start, stop)

    monkeypatch.setattr(host_table, "read_rows", read_and_touch)
    with pytest.raises(ValueError, match="changed while it was read"):
        open_table(source)
    assert not list(folder.iterdir())


def test_file_systems_without_unnamed_files(source, folder, monkeypatch):
    monkeypatch.setattr(os, "O_TMPFILE", os.O_DIRECTORY)
    table = open_table(source)
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    table.close()
    monkeypatch.setattr(host_table, "read_rows", None)
    with pytest.raises(TypeError):
        open_table(source)
    assert not list(folder.iterdir())
    # What a killed writer left of its named file:
    (folder / f"engram_jax-{os.getuid()}-0123.partial7").write_bytes(b"x")
    assert len(remove_unused_tables(folder)) == 1
    assert not list(folder.iterdir())


# --- Room -----------------------------------------------------------------------------


def test_too_little_shared_memory_is_told_with_figures(source, folder, monkeypatch):
    """Pitfall: out of memory while loading, or a small /dev/shm, without figures."""
    monkeypatch.setattr(shared_table, "shared_room", lambda _: 100_000)
    with pytest.raises(MemoryError, match=r"0\.000 GB are free in .*--shm-size"):
        open_table(source)
    monkeypatch.undo()
    monkeypatch.setattr(host_table, "host_room", lambda: (5, "control group x"))
    with pytest.raises(MemoryError, match=r"limit: control group x"):
        open_table(source, directory=folder)
    assert not list(folder.iterdir())


def test_missing_directory_is_told(source, tmp_path):
    with pytest.raises(ValueError, match=r"no directory.*ENGRAM_JAX_SHARED_DIRECTORY"):
        open_table(source, directory=tmp_path / "none")


@pytest.fixture
def tiny_tmpfs(tmp_path):
    """A file system in memory with room for half a table."""
    path = tmp_path / "tiny"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=112k", "tmpfs", str(path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip(reason="mounting a file system is not allowed here")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_memory_that_runs_out_while_filling_is_an_error_not_a_signal(
    source, tiny_tmpfs, monkeypatch
):
    with pytest.raises(MemoryError, match="are free in"):
        open_table(source, directory=tiny_tmpfs)
    # Somebody else takes the room between the check and the filling.
    monkeypatch.setattr(shared_table, "_check_room", lambda *_: None)
    with pytest.raises(MemoryError, match="no memory for"):
        open_table(source, directory=tiny_tmpfs)
    assert not list(tiny_tmpfs.iterdir())


# --- Best effort ----------------------------------------------------------------------


def test_options_are_reported(source, folder):
    table = open_table(source, options=HostMemoryOptions(lock=True))
    report = table.report
    for value in (report.huge_pages, report.interleave, report.prefault, report.lock):
        assert value.split(":")[0].split(",")[0] in (
            "on",
            "not available",
            "not needed",
        )
    table.close()
    off = HostMemoryOptions(
        huge_pages=False, interleave=False, prefault=False, register=False
    )
    table = open_table(source, options=off)
    assert (
        str(table.report)
        == "huge_pages: off, interleave: off, prefault: off, lock: off, register: off"
    )
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    table.close()


class RefusingLibrary:
    """The C library of a process without permissions."""

    def madvise(self, *_):
        return 0

    def mlock(self, *_):
        ctypes.set_errno(errno.EPERM)
        return -1

    def syscall(self, *_):
        ctypes.set_errno(errno.EPERM)
        return -1


def test_no_permission_is_reported_not_fatal(source, folder, monkeypatch):
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda *_, **__: RefusingLibrary())
    nodes = folder.parent / "online"
    nodes.write_text("0-1,3\n")
    monkeypatch.setattr(host_memory, "_NODES", nodes)
    table = open_table(source, options=HostMemoryOptions(lock=True))
    assert "not permitted" in table.report.lock
    assert "not permitted" in table.report.interleave
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    table.close()


def test_kernels_without_populate(source, folder, monkeypatch):
    monkeypatch.setattr(host_memory, "_POPULATE_READ", 999)
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 999)
    table = open_table(source)
    assert "5.14" in table.report.prefault
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))
    table.close()


def test_progress_is_shown(source, folder, capsys):
    table = open_table(source, show_progress=True)
    assert "weight to" in capsys.readouterr().err.replace("\n", " ")
    table.close()
