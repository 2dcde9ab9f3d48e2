"""Tables in a process's own memory: rows, what it takes, faults while loading."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import os
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import mesh_cases
import ml_dtypes
import numpy as np
import prefetch_cases
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
    start_script,
    write_table,
)

from engram_jax import EngramPrefetch, host_memory, host_table, load_engram
from engram_jax.embedding import RowStorage
from engram_jax.host_memory import HostMemoryOptions
from engram_jax.host_table import HostTable
from engram_jax.safetensors_file import SafetensorsWriter, read_header


@pytest.fixture
def source(tmp_path) -> Path:
    write_table(tmp_path / "table.safetensors")
    return tmp_path / "table.safetensors"


@pytest.fixture
def large(tmp_path) -> Path:
    """A table of 264 MB, all zeros."""
    path = tmp_path / "large.safetensors"
    rows = 1_000_000
    tensors = {"weight": ("F8_E4M3", (rows, 256)), "scale": ("F8_E8M0", (rows, 8))}
    with SafetensorsWriter(path, tensors, sparse=True):
        pass
    return path


def open_table(source: Path, **options) -> HostTable:
    infos = read_header(source)
    return HostTable(infos["weight"], infos["scale"], **options)


def memory() -> int:
    """Counts the bytes of this process's own memory that are present."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("Pss_Anon:"))
    return int(line.split()[1]) * 1024


# --- Rows -----------------------------------------------------------------------------


def test_rows_equal_plain_indexing(source, monkeypatch):
    monkeypatch.setattr(host_table, "_CHUNK_BYTES", 70 * 66)  # more pieces than threads
    monkeypatch.setattr(host_table.os, "sched_getaffinity", lambda _: range(8))
    table = open_table(source)
    assert isinstance(table, RowStorage)
    assert (table.num_rows, table.head_dim) == (ROWS, WIDTH)
    wanted = expected(source, IDS)
    np.testing.assert_array_equal(table.gather(IDS), wanted)
    jitted = jax.jit(table.lookup_packed)(jnp.asarray(IDS))
    np.testing.assert_array_equal(jitted, wanted)
    everything = np.arange(ROWS)
    np.testing.assert_array_equal(
        table.gather(everything), expected(source, everything)
    )
    some = table.gather(range(5, 9))
    stored = table.stored_rows("weight", 5, 9), table.stored_rows("scale", 5, 9)
    np.testing.assert_array_equal(np.concatenate(stored, axis=1), some)
    with pytest.raises(ValueError, match="read-only"):
        stored[0][...] = 0


@pytest.mark.parametrize("dtype", ["i2", ">i4", "i8", ">i8"])
def test_ids_have_any_signed_dtype(source, dtype):
    ids = IDS.astype(dtype)
    np.testing.assert_array_equal(open_table(source).gather(ids), expected(source, IDS))


@pytest.mark.parametrize("dtype", ["u2", ">u4", "u8"])
def test_ids_have_any_unsigned_dtype(source, dtype):
    ids = np.abs(IDS).astype(dtype)
    wanted = expected(source, np.abs(IDS))
    np.testing.assert_array_equal(open_table(source).gather(ids), wanted)


def test_closed_table_refuses_and_others_go_on(source):
    table, other = open_table(source), open_table(source)
    stored = table.stored_rows("weight", 0, 3)
    table.close()
    table.close()
    for read in (
        lambda: table.gather(IDS),
        lambda: table.stored_rows("scale", 0, 1),
        lambda: jax.jit(table.lookup_packed)(jnp.asarray(IDS)).block_until_ready(),
    ):
        with pytest.raises(Exception, match="was closed; load it again"):
            read()
    wanted = expected(source, np.arange(3))
    np.testing.assert_array_equal(stored, wanted[:, :WIDTH])  # its memory is kept
    np.testing.assert_array_equal(other.gather(np.arange(3)), wanted)


def test_reading_while_another_thread_closes_gives_rows_or_the_error(source):
    table = open_table(source)
    ids = np.arange(ROWS)
    wanted = expected(source, ids)
    wrong, refused = [], threading.Event()

    def read():
        while not refused.is_set():
            try:
                if (table.gather(ids) != wanted).any():
                    wrong.append(1)
            except ValueError:
                refused.set()

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    table.close()
    for thread in threads:
        thread.join(30)
    assert refused.is_set()
    assert not wrong


def test_load_engram_gives_the_golden_rows(v41_token_map, caplog):
    with caplog.at_level(logging.INFO, "engram_jax"):
        stack = load_engram(
            TINY,
            tokenizer=v41_token_map,
            placement="host",
            host_memory=HostMemoryOptions(huge_pages=False),
        )
    assert "tables in placement 'host'" in caplog.text
    assert "in this process's memory: 0.000 GB (huge_pages: off, " in caplog.text
    batch, _, wanted = golden_batch(stack)
    for index, (layer_id, layer) in enumerate(stack.layers.items()):
        assert isinstance(layer.embedding.storage, HostTable)
        rows = np.asarray(jax.jit(layer.embedding)(batch.hash_ids[:, index]))
        np.testing.assert_array_equal(
            rows.astype(np.float32),
            wanted[f"rows_{layer_id}"].view(ml_dtypes.bfloat16).astype(np.float32),
        )


def test_load_engram_on_a_mesh(v41_token_map):
    mesh = mesh_cases.mesh(2, 2)
    load = functools.partial(load_engram, TINY, tokenizer=v41_token_map, mesh=mesh)
    own = load(placement="host")
    ids = jnp.arange(13)
    batch = own.batch(ids, ids, jnp.array([0, 13]))
    wanted = load().batch(ids, ids, jnp.array([0, 13]))
    np.testing.assert_array_equal(batch.rows, wanted.rows)
    with EngramPrefetch(own, threads=1) as prefetch:
        tokens = {"input_ids": np.arange(13), "positions": np.arange(13)}
        fetched = prefetch.start(**tokens, query_start_loc=[0, 13]).result()
        for index in range(2):
            np.testing.assert_array_equal(
                fetched.rows[index].packed(), wanted.rows[:, index]
            )


def test_prefetched_rows_are_those_of_the_direct_lookup(v41_token_map):
    stack = load_engram(TINY, tokenizer=v41_token_map, placement="host")
    with EngramPrefetch(stack, threads=2) as prefetch:
        for seed in range(3):
            batch = prefetch_cases.random_batch(40, seed)
            fetched = prefetch.start(**batch).result()
            direct = stack.batch(**batch)
            for index, layer in enumerate(stack.layers.values()):
                np.testing.assert_array_equal(
                    fetched.rows[index].packed(),
                    layer.embedding.lookup_packed(direct.hash_ids[:, index]),
                )


# --- Memory ---------------------------------------------------------------------------

MEASURE = """
import sys, pathlib
from engram_jax.host_table import HostTable
from engram_jax.safetensors_file import read_header
def memory():
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = {x.split()[0]: int(x.split()[1]) * 1024 for x in lines[1:]}
    return sizes["Pss_Anon:"], sizes["Pss_Shmem:"], sizes["Pss:"]
infos = read_header(sys.argv[1])
before = memory()
table = HostTable(infos["weight"], infos["scale"])
opened = memory()
table.close()
closed = memory()
print(*(x - y for x, y in zip(opened + closed, before + before)))
"""


def test_memory_grows_by_one_table_and_is_given_back(large):
    process = start_script(MEASURE, large)
    anon, shmem, whole, *closed = map(int, line_of(process).split())
    assert not end(process).count("Traceback")
    table, slack = 1_000_000 * 264, 3 << 20  # Python's own, pages of 2 MB at the ends
    assert table <= anon < 1.02 * table + slack
    assert shmem == 0
    assert whole < 1.02 * table + slack
    assert max(closed) < 0.02 * table + slack


def test_table_that_does_not_fit_is_refused_before_anything_is_taken(
    source, monkeypatch
):
    monkeypatch.setattr(host_table, "HostMapping", None)
    monkeypatch.setattr(host_table, "host_room", lambda: (5, "control group x"))
    with pytest.raises(MemoryError, match=r"0\.000 GB are available \(limit: control"):
        open_table(source)


def check_nothing_is_kept(large: Path, raised: type[BaseException], match: str) -> None:
    before = memory()
    with pytest.raises(raised, match=match) as caught:
        open_table(large)
    # While the traceback refers to everything.
    assert memory() - before < 20 << 20
    del caught


def test_memory_that_others_take_meanwhile_is_an_error_not_a_signal(large, monkeypatch):
    rooms = itertools.chain([1 << 40] * 6, itertools.repeat(1000))
    monkeypatch.setattr(host_table, "host_room", lambda: (next(rooms), "the machine"))
    check_nothing_is_kept(large, MemoryError, r"next piece .* 0\.017 GB .*machine")


class EmptyMemory:
    """The C library of a machine whose memory has run out."""

    def __init__(self, pieces: int):
        self.left = pieces

    def madvise(self, *_):
        self.left -= 1
        ctypes.set_errno(errno.ENOMEM)
        return -1 if self.left < 0 else 0


def test_kernel_that_has_no_memory_is_an_error_not_a_signal(large, monkeypatch):
    library = EmptyMemory(4)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda *_, **__: library)
    check_nothing_is_kept(large, MemoryError, "no memory for .* Cannot allocate")


# --- Faults ---------------------------------------------------------------------------


def test_interrupt_while_loading_gives_the_memory_back(source, large, monkeypatch):
    process = start_filling("HostTable", source, pause=1)
    assert line_of(process) == "half"
    assert "KeyboardInterrupt" in end(process, signal.SIGINT)
    assert process.returncode
    real, calls = host_table.read_rows, []

    def interrupted(info, start, stop):
        calls.append(start)
        if len(calls) > 9:
            raise KeyboardInterrupt("now")
        return real(info, start, stop)

    monkeypatch.setattr(host_table, "read_rows", interrupted)
    check_nothing_is_kept(large, KeyboardInterrupt, "now")
    assert len(calls) < 20  # no further pieces were begun


def test_source_that_changes_while_it_is_read_is_refused(source, monkeypatch):
    real = host_table.read_rows

    def read_and_touch(info, start, stop):
        os.utime(info.path)
        return real(info, start, stop)

    monkeypatch.setattr(host_table, "read_rows", read_and_touch)
    with pytest.raises(ValueError, match="changed while it was read"):
        open_table(source)


def test_source_that_is_cut_off_is_refused(source):
    infos = read_header(source)
    os.truncate(source, source.stat().st_size - 1)
    with pytest.raises(ValueError, match="cut off since it was opened"):
        HostTable(infos["weight"], infos["scale"])


def test_parts_that_do_not_fit_are_refused(source):
    infos = read_header(source)
    with pytest.raises(ValueError, match="weight is F8_E8M0"):
        HostTable(infos["scale"], infos["scale"])
    with pytest.raises(ValueError, match="needs F8_E8M0"):
        HostTable(infos["weight"], infos["weight"])


# --- Best effort ----------------------------------------------------------------------


def test_options_are_reported(source, large):
    report = open_table(large, options=HostMemoryOptions(lock=True)).report
    for value in (report.huge_pages, report.interleave, report.prefault, report.lock):
        assert value.split(":")[0].split(",")[0] in (
            "on",
            "not available",
            "not needed",
        )
    assert report.prefault == "on"
    off = HostMemoryOptions(
        huge_pages=False, interleave=False, prefault=False, register=False
    )
    table = open_table(source, options=off)
    assert (
        str(table.report)
        == "huge_pages: off, interleave: off, prefault: off, lock: off, register: off"
    )
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))


def test_kernels_without_populate(source, monkeypatch):
    monkeypatch.setattr(host_memory, "_POPULATE_WRITE", 999)
    table = open_table(source)
    assert table.report.prefault == "on"  # by filling it
    np.testing.assert_array_equal(table.gather(IDS), expected(source, IDS))


def test_progress_is_shown(source, capsys):
    open_table(source, show_progress=True)
    assert "weight to memory" in capsys.readouterr().err.replace("\n", " ")
