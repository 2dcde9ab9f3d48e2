"""What the tests of tables in host memory share: files, rows, processes that load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from engram_jax.safetensors_file import SafetensorsWriter

ROWS, WIDTH = 3000, 64
IDS = np.array([[0, ROWS - 1, -1], [ROWS, 7, 7]], np.int32)


def write_table(path: Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Makes a file with "weight" and "scale"; gives their bytes."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 256, (ROWS, WIDTH), np.uint8)
    scales = rng.integers(0, 256, (ROWS, WIDTH // 32), np.uint8)
    tensors = {"scale": ("F8_E8M0", scales.shape), "weight": ("F8_E4M3", values.shape)}
    with SafetensorsWriter(path, tensors) as writer:
        writer.write("weight", values)
        writer.write("scale", scales)
    return values, scales


def expected(source: Path, ids) -> np.ndarray:
    """Reads rows of `write_table` by plain indexing."""
    values, scales = write_table(source.with_name("again.safetensors"))
    ids = np.asarray(ids)
    inside = (ids >= 0) & (ids < ROWS)
    rows = np.concatenate([values, scales], 1)[np.where(inside, ids, 0)]
    return np.where(inside[..., None], rows, 0)


# argv is the class, the source and a pause; prints "half" when half of it is there.
_SLOW = """
import sys, time
from engram_jax import host_table, shared_table
from engram_jax.safetensors_file import read_header
infos = read_header(sys.argv[2])
real, calls = host_table.read_rows, []
def slowly(info, start, stop):
    calls.append(info)
    if len(calls) == 8:
        print("half", flush=True)
        time.sleep(float(sys.argv[3]))
    return real(info, start, stop)
host_table.read_rows = slowly
host_table._CHUNK_BYTES = 400 * 66
host_table._THREADS = 1
table = getattr(shared_table, sys.argv[1], None) or getattr(host_table, sys.argv[1])
table = table(infos["weight"], infos["scale"])
print("filled" if getattr(table, "filled", True) else "shared", flush=True)
sys.stdin.readline()
"""


def start_filling(table: str, source: Path, pause: float) -> subprocess.Popen[str]:
    """Starts a process that loads a table slowly, and holds it until told to end."""
    return start_script(_SLOW, table, source, pause)


def start_script(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a process that is talked to by lines."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    """Waits for the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str], by: int | None = None) -> str:
    """Ends a process, by a signal or a line; gives its error output."""
    if by is not None:
        process.send_signal(by)
    _, errors = process.communicate("\n", timeout=60)
    return errors
