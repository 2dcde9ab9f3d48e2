"""Runs programs at the same time, and none for longer than a limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import engram_jax

TESTS = Path(__file__).parent


def run_together(
    programs: list[list[str]], environment: dict[str, str], seconds: float = 90
) -> list[tuple[int | None, str]]:
    """Runs Python programs; gives exit codes (None: it hung) and outputs."""
    paths = os.pathsep.join([str(Path(engram_jax.__file__).parents[1]), str(TESTS)])
    known = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"} | environment
    started = [
        subprocess.Popen(
            [sys.executable, *program],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=known,
        )
        for program in programs
    ]
    end, results = time.monotonic() + seconds, []
    for process in started:
        try:
            output, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            results.append((process.returncode, output))
        except subprocess.TimeoutExpired:
            process.kill()
            results.append((None, process.communicate()[0]))
    return results
