"""NVIDIA's compute-sanitizer finds no bad access and no race in any kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import small_launches

PROGRAM = Path(small_launches.__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", list(small_launches.LAUNCHES))
def test_small_launches_are_right(kernel):
    small_launches.LAUNCHES[kernel]()


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("kernel", list(small_launches.LAUNCHES))
def test_sanitizer_finds_nothing(kernel, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip(reason="compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    done = subprocess.run(
        [
            *(sanitizer, "--tool", tool, "--error-exitcode", "9"),
            *("--kernel-name", "kns=mosaic", sys.executable, PROGRAM, kernel),
        ],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{kernel}: right" in done.stdout
    assert "0 errors" in done.stdout
