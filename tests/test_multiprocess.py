"""Two processes with gloo: the same numbers as one, and errors on which both agree."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_checkpoint import TINY, TOKENIZER, copy_tiny

import engram_jax
from engram_jax import EngramSharding, build_compressed_token_map, load_engram
from engram_jax.processes import agreement

WORKER = Path(__file__).with_name("multiprocess_worker.py")
LIMIT_SECONDS = 60


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def start_together(job: dict) -> list[tuple[int, str]]:
    """Runs two workers; gives each one's exit code and output."""
    address = free_address()
    package = str(Path(engram_jax.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": package, "JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            [sys.executable, str(WORKER), address, "2", str(rank), json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    end = time.monotonic() + LIMIT_SECONDS
    try:
        return [
            (process.returncode, output)
            for process in started
            for output in [process.communicate(timeout=end - time.monotonic())[0]]
        ]
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture(scope="module")
def token_map(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("map") / "map.npy"
    np.save(path, build_compressed_token_map(TOKENIZER)[0])
    return path


@pytest.fixture
def job(tmp_path, token_map, golden) -> dict:
    expected = golden("tiny_checkpoint_expected")
    batch = tmp_path / "batch.npz"
    np.savez(
        batch, ids=expected["ids"], dead=expected["dead"], hidden=expected["hidden"]
    )
    return {
        "checkpoint": [str(TINY)] * 2,
        "token_map": str(token_map),
        "batch": str(batch),
        "result": str(tmp_path / "result"),
        "mesh": [2, 2],
        "cut_projection": False,
        "fault": "",
    }


@pytest.mark.parametrize(
    ("shape", "cut_projection"), [((2, 2), True), ((2, 2), False), ((1, 4), False)]
)
def test_two_processes_agree_with_one_and_read_their_own_rows(
    job, golden, shape, cut_projection
):
    job["mesh"], job["cut_projection"] = shape, cut_projection
    for code, output in start_together(job):
        assert code == 0, output
    stack = load_engram(TINY, tokenizer=np.load(job["token_map"]))
    batch = golden("tiny_checkpoint_expected")
    tokens = len(batch["ids"])
    hidden = jnp.asarray(batch["hidden"].view(jnp.bfloat16))

    @jax.jit
    def run(hidden):
        one = stack.batch(
            batch["ids"], np.arange(tokens), [0, tokens], dead_mask=batch["dead"]
        )
        return [stack(layer, hidden, one) for layer in stack.layers], one.hash_ids

    outputs, hashes = run(hidden)
    wanted = np.stack([np.asarray(x).view(np.int16) for x in outputs]).astype(int)
    layout = stack.layout
    devices = jax.make_mesh(
        shape,
        ("tp", "dp"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    shards = EngramSharding.on(devices, layout).shards
    seen = {}
    for rank in range(2):
        with np.load(f"{job['result']}.{rank}.npz") as result:
            np.testing.assert_array_equal(result["hashes"], hashes)
            for index, layer in enumerate(stack.layers.values()):
                rows = layer.embedding.lookup_packed(hashes[:, index])
                np.testing.assert_array_equal(result["rows"][:tokens, index], rows)
            got = result["outputs"].view(np.int16).astype(int)
            assert np.abs(got - wanted).max() <= 1  # one bfloat16 rounding
            assert result["bytes_held"] == 2 * shards.rows_per_shard[0] * 64
            for name, start, stop in json.loads(str(result["rows_read"])):
                seen.setdefault(name, []).append((start, stop))
    # Each row of every table was read by one process, once.
    assert len(seen) == 4
    for name, ranges in seen.items():
        index = 0 if "layers.1." in name else 1
        ends = [0, *(stop for _, stop in sorted(ranges))]
        assert [start for start, _ in sorted(ranges)] == ends[:-1]
        assert ends[-1] == layout.num_rows[index]


def test_a_missing_file_in_one_process_is_every_process_error(job, tmp_path):
    damaged = copy_tiny(tmp_path / "damaged")
    missing = "model-00002-of-00002.safetensors"
    (damaged / missing).unlink()
    job["checkpoint"][1] = str(damaged)
    started = time.monotonic()
    results = start_together(job)
    assert time.monotonic() - started < LIMIT_SECONDS
    for code, output in results:
        assert code not in (0, None)
        assert "load_engram failed in 1 of 2 processes; none goes on." in output
        line = next(x for x in output.splitlines() if x.startswith("  process 1: "))
        assert "FileNotFoundError" in line
        assert missing in line
        assert "  process 0: " not in output


def test_short_memory_in_one_process_is_every_process_error(job):
    job["fault"] = "memory"
    for code, output in start_together(job):
        assert code not in (0, None)
        assert "load_engram failed in 2 of 2 processes; none goes on." in output
        reasons = [x for x in output.splitlines() if x.startswith("  process ")]
        assert "MemoryError: The tables do not fit in another process" in reasons[0]
        assert "MemoryError: This process's shards take" in reasons[1]


def test_a_killed_process_is_noticed_and_named(job):
    job["fault"] = "killed"
    started = time.monotonic()
    (code, output), (killed, _) = start_together(job)
    assert time.monotonic() - started < LIMIT_SECONDS
    assert killed < 0
    assert code not in (0, None)
    assert "load_engram: another process of the 2 ended" in output
    assert "this is process 0" in output


def test_one_process_needs_no_agreement():
    """The error is its own, as it was raised."""
    with pytest.raises(KeyError), agreement("read"):
        raise KeyError("a")
    with agreement("read"):
        pass


def test_messages_are_the_same_everywhere(monkeypatch):
    """Reasons by rank, cut to what travels; each process keeps its own as the cause."""
    from engram_jax import processes

    gathered = iter([["", ""], ["", "OSError: no room"]])
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_gather", lambda message, what: next(gathered))
    expected = pytest.raises(RuntimeError, match="process 1: OSError: no room")
    with expected as raised, agreement("load"):
        pass
    assert raised.value.__cause__ is None
    gathered = iter([["", ""], ["KeyboardInterrupt: ", ""]])
    with pytest.raises(KeyboardInterrupt), agreement("load"):
        raise KeyboardInterrupt
