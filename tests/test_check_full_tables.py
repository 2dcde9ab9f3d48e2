"""scripts/check_full_tables.py: it looks at every end, and sees what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import benchmark_record
import check_full_tables
import jax
import mesh_stacks
import numpy as np
import pytest
from mesh_cases import mesh

from engram_jax import EngramLayout, EngramSharding


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the script at a small size; returns exit code, output and result file."""

    def call(*arguments):
        path = tmp_path / "out.jsonl"
        given = ["--device", "cpu", "--rows", "72000", "--output", str(path)]
        code = check_full_tables.main([*given, *arguments])
        return code, capsys.readouterr().out, path

    return call


@pytest.mark.parametrize("axes", ["tp=2", "dp=2", "tp=2,dp=2"])
def test_right_tables_pass(run, axes):
    code, output, path = run("--mesh", axes)
    assert code == 0, output
    assert "WRONG" not in output
    (result,) = benchmark_record.latest(path)
    assert result.detail["wrong_rows"] == 0
    assert result.detail["bytes"] > sum(result.detail["rows"]) * 33
    assert result.detail["mesh"] == axes


def test_a_wrong_row_shows(run, monkeypatch):
    known = mesh_stacks.known_rows

    def one_off(layer, rows, width):
        found = known(layer, rows, width)
        found[rows == rows.max()] ^= layer  # the second layer's last row
        return found

    monkeypatch.setattr(mesh_stacks, "known_rows", one_off)
    code, output, path = run("--mesh", "tp=2")
    assert code == 1
    assert "WRONG" in output
    assert benchmark_record.latest(path)[0].detail["wrong_rows"] > 0


def test_memory_beside_the_tables_shows(run, monkeypatch):
    peaks = iter([{"in_use": 0, "peak": 0}] * 2 + [{"in_use": 0, "peak": 1 << 40}] * 2)
    monkeypatch.setattr(check_full_tables, "_memory", lambda device: next(peaks))
    code, output, _ = run("--mesh", "tp=2")
    assert code == 1
    assert "0 wrong" in output


def test_only_the_tables_count_as_their_memory(run, monkeypatch):
    """Pitfall: projections are 3 % of tables of 10 GB a GPU."""
    before = {array.unsafe_buffer_pointer() for array in local_arrays()}

    def memory(device):
        new = {
            array.unsafe_buffer_pointer(): array.nbytes
            for array in local_arrays()
            if array.device == device
        }
        held = sum(size for at, size in new.items() if at not in before)
        return {"in_use": held, "peak": held}

    monkeypatch.setattr(check_full_tables, "_memory", memory)
    code, output, path = run("--mesh", "tp=2")
    assert code == 0, output
    (result,) = benchmark_record.latest(path)
    assert result.detail["peak_of_tables"] == pytest.approx([1, 1], rel=0.01)


def local_arrays():
    """Lists the parts of all arrays there are, each on its device."""
    parts = [part for array in jax.live_arrays() for part in array.addressable_shards]
    return [part.data for part in parts]


@pytest.mark.parametrize("shards", [1, 2])
def test_the_ids_reach_every_end(shards):
    config = mesh_stacks.with_rows(mesh_stacks.V41, mesh_stacks.V41.num_embeddings[0])
    layout = EngramLayout.from_config(config)
    sharding = EngramSharding.on(mesh(shards, 1), layout)
    ids = check_full_tables.edge_ids(sharding, layout, 32)
    for layer in range(2):
        seen = set(ids[:, layer].reshape(-1).tolist())
        rows = sharding.shards.row_start[layer], sharding.shards.row_end[layer]
        for start, end in zip(*rows, strict=True):
            places = [start + (1 << bit) for bit in (23, 24, 28)]
            edges = {start, start + 1, end - 2, end - 1}
            edges |= {row - back for row in places if row < end for back in (0, 1)}
            assert edges <= seen
            assert (places[2] < end) == (shards == 1)  # scales of the whole table
        column = np.searchsorted(layout.offsets[layer], ids[:, layer], "right") - 1
        np.testing.assert_array_equal(column, np.arange(24)[None].repeat(32, 0))
        assert max(seen) == layout.num_rows[layer] - 1


def test_a_wrong_mesh_is_refused(monkeypatch, capsys):
    assert check_full_tables.main(["--mesh", "pp=2"]) == 2
    assert "tp=2,dp=4" in capsys.readouterr().err
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    assert check_full_tables.main(["--mesh", "tp=2"]) == 2
    assert "needs 2 devices; 1 are here" in capsys.readouterr().err


@pytest.mark.gpu
def test_rows_beyond_32_bits_of_offset_on_two_gpus(tmp_path):
    """In a process of its own: the highest use of memory is one of a process's life."""
    if len(jax.devices()) < 2:
        pytest.skip(reason=f"needs 2 GPUs; {len(jax.devices())} is here")
    path = tmp_path / "out.jsonl"
    given = ["--mesh", "tp=2", "--rows", "40000000", "--output", str(path)]
    done = subprocess.run(
        [sys.executable, check_full_tables.__file__, *given],
        capture_output=True,
        text=True,
        # Of memory that this process leaves free; the tables take 10.6 GB a GPU.
        env=os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.12"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = benchmark_record.latest(path)
    assert len(result.detail["peak_of_tables"]) == 2
