"""Runs scripts/infer.py over a mesh of devices, in one process or in several.

    python scripts/infer.py --mesh tp=2,dp=4         eight devices, one process
    python scripts/infer.py --processes 2            two processes on this machine
    python scripts/infer.py --mesh tp=8,dp=2 --processes 2 \
        --coordinator HOST:PORT --process-id 0       one of two hosts; the other has 1

On CPUs each process makes as many CPU devices as it needs.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

AXES = ("tp", "dp")
GRACE_SECONDS = 60
"""What the other processes get to end by themselves when one has failed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what says where the script runs."""
    add = parser.add_argument
    add("--mesh", help="devices to spread over, such as tp=2,dp=4; none: one device")
    add("--processes", type=int, default=1, help="processes of the job")
    add("--process-id", type=int, help="start only this one, from 0 (several hosts)")
    add("--coordinator", help="HOST:PORT of process 0 (several hosts)")


def parse_mesh(text: str | None, processes: int) -> dict[str, int]:
    """Reads "tp=2,dp=4"; without it, tables are spread over the processes."""
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    if text is None:
        return sizes | {"tp": processes}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)=(\d+)\s*", part)
        if match is None or match[1] not in AXES or int(match[2]) < 1:
            raise ValueError(
                f"--mesh is {text!r}; it must be sizes of tp (tensor) and dp (data), "
                "such as tp=2,dp=4"
            )
        sizes[match[1]] = int(match[2])
    return sizes


def check(options: argparse.Namespace) -> None:
    """Refuses a job that cannot be, before anything starts."""
    sizes = parse_mesh(options.mesh, options.processes)
    count = math.prod(sizes.values())
    if options.processes < 1 or count % options.processes:
        raise ValueError(
            f"--processes is {options.processes}; the {count} devices of the mesh must "
            "be divided evenly"
        )
    if (options.process_id is None) != (options.coordinator is None):
        raise ValueError(
            "--process-id and --coordinator go together: each host starts its own "
            "process. Without both, all processes start here"
        )
    if options.process_id is not None and not (
        0 <= options.process_id < options.processes
    ):
        raise ValueError(
            f"--process-id is {options.process_id}; it must be within "
            f"0..{options.processes - 1}"
        )


def is_launcher(options: argparse.Namespace) -> bool:
    """Tells whether this process only starts the others."""
    return options.processes > 1 and options.process_id is None


def launch(options: argparse.Namespace, arguments: list[str]) -> int:
    """Starts all processes on this machine; returns the exit code of the job.

    Only the first one's report is shown; errors of all are.
    """
    address = free_address()
    script = Path(__file__).with_name("infer.py")
    started = []
    try:
        for rank in range(options.processes):
            own = ["--coordinator", address, "--process-id", str(rank)]
            started.append(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments, *own],
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    env=os.environ | own_gpus(options, rank),
                )
            )
        return _wait(started)
    finally:
        for process in started:
            process.kill()
            process.wait()


def free_address() -> str:
    """Finds a port of this machine that nobody uses: HOST:PORT."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _wait(started: list[subprocess.Popen]) -> int:
    """Waits for all; once one has failed, the others get a while, then their end."""
    failed_at, codes = None, [None] * len(started)
    while None in codes:
        codes = [process.poll() for process in started]
        if any(codes):
            failed_at = failed_at or time.monotonic()
            if time.monotonic() - failed_at > GRACE_SECONDS:
                break
        time.sleep(0.05)
    return next((abs(code) for code in codes if code), 0)


def own_gpus(options: argparse.Namespace, rank: int) -> dict[str, str]:
    """Gives each process its share of this machine's GPUs, if there are any."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        names = [path.name.removeprefix("nvidia") for path in devices]
    else:
        names = [name for name in visible.split(",") if name]
    sizes = parse_mesh(options.mesh, options.processes)
    share = math.prod(sizes.values()) // options.processes
    if len(names) < share * options.processes:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[rank * share : (rank + 1) * share])}


def start(options: argparse.Namespace):
    """Joins the job and makes the mesh; returns None where one device will do.

    Called before anything starts a JAX backend.
    """
    import jax

    if options.mesh is None and options.processes == 1:
        return None
    sizes = parse_mesh(options.mesh, options.processes)
    count = math.prod(sizes.values())
    own = count // options.processes
    if jax.config.jax_num_cpu_devices != own:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", own)
    if options.processes > 1:
        from engram_jax import processes

        processes.initialize(options.coordinator, options.processes, options.process_id)
    found = jax.device_count()
    if found < count:
        raise ValueError(
            f"--mesh {options.mesh} needs {count} devices; {found} are here "
            f"({jax.devices()[0].device_kind})"
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        (jax.sharding.AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def to_host(array) -> np.ndarray:
    """Gives all of an array, also where other processes have parts of it."""
    if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
