"""Decodes in several processes, one GPU each, and compares with one process.

    python scripts/decode_processes.py                       two processes, 1,000 steps
    python scripts/decode_processes.py --kill-at 100         one is killed on the way
    python scripts/decode_processes.py --device cpu          the same on CPU devices

Each step's tokens follow from every bit of the step before, so that a single wrong bit
changes all that comes after. Exit code 1: the processes disagree with each other or
with one process; or the end of one did not end the others with an error in time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import infer_mesh

HEARTBEAT_SECONDS = 10
NOTICE_SECONDS = 3 * HEARTBEAT_SECONDS
"""How long the others may take to end, once one is gone."""
TOKENS = 16
REPORT_EVERY = 100


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Decode in several processes and compare with one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=int, default=2, help="processes, one device each")
    add("--steps", type=int, default=1000, help="decode steps")
    add("--kill-at", type=int, help="step at which a process is killed; none: none is")
    add("--kill", type=int, help="which; none: the last")
    add("--device", choices=("cpu",), help="CPU devices; none: what JAX finds")
    add("--seconds", type=float, default=300, help="allowed for each of the runs")
    add("--process-id", type=int, help=argparse.SUPPRESS)
    add("--coordinator", help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error("--processes must be at least 1")
    if options.kill is None:
        options.kill = options.processes - 1
    if options.kill_at is not None and options.processes < 2:
        parser.error("--kill-at needs other processes, to notice it")
    if not 0 <= options.kill < options.processes:
        parser.error(f"--kill must be within 0..{options.processes - 1}")
    return options


# --- One process ----------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Decodes as one process of the job, and writes what came out."""
    import jax

    here = options.processes if options.coordinator is None else 1
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", here)
    from engram_jax import processes

    if options.coordinator is not None:
        processes.initialize(
            options.coordinator,
            options.processes,
            options.process_id,
            heartbeat_seconds=HEARTBEAT_SECONDS,
        )
    found = jax.device_count()
    if found < options.processes:
        raise ValueError(f"{options.processes} devices are needed; {found} are here")
    rank = options.process_id or 0
    with processes.agreement("decode"):
        seen, times = decode(options, rank, jax.devices()[: options.processes])
    result = {
        "digest": seen,
        "devices": jax.local_device_count(),
        "platform": jax.default_backend(),
        "median_us": 1e6 * sorted(times)[len(times) // 2],
        "longest_us": 1e6 * max(times[1:], default=0.0),
    }
    options.result.write_text(json.dumps(result), encoding="utf-8")


def decode(
    options: argparse.Namespace, rank: int, devices: list[Any]
) -> tuple[str, list[float]]:
    """Runs the steps; gives a digest of all tokens, and each step's seconds."""
    begin = time.perf_counter()
    step, carry = make_decoding(devices)
    seen, times = hashlib.sha256(), []
    for number in range(options.steps):
        if options.kill_at == number and rank == options.kill:
            print(f"process {rank} kills itself at step {number}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.perf_counter()
        carry, ids = step(carry, number)
        seen.update(ids.tobytes())
        times.append(time.perf_counter() - started)
        if number == 0:
            took = time.perf_counter() - begin
            print(f"process {rank}: first step after {took:.1f} s", flush=True)
        if (number + 1) % REPORT_EVERY == 0:
            print(f"process {rank}: {number + 1} steps", flush=True)
    return seen.hexdigest(), times


def make_decoding(devices: list[Any]):
    """Makes a decode step over devices of any number of processes.

    Args:
        devices: the tensor axis; the tables are cut over it by heads.

    Returns:
        A function of what is carried and the step's number, that gives the new carry
        and the next tokens' ids, and the first carry.
    """
    import jax
    import jax.numpy as jnp
    import mesh_stacks
    import numpy as np
    from jax import lax
    from jax.sharding import PartitionSpec as P

    from engram_jax import EngramLayout, EngramSharding

    gpu = devices[0].platform == "gpu"
    sizes, rows = (mesh_stacks.V41, 2_000_000) if gpu else (mesh_stacks.SMALL, 72_000)
    config = mesh_stacks.with_rows(sizes, rows)
    layout = EngramLayout.from_config(config)
    mesh = jax.make_mesh(
        (len(devices), 1),
        ("tp", "dp"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=devices,
    )
    sharding = EngramSharding.on(mesh, layout)
    stack = mesh_stacks.make_stack(config, layout, sharding)
    parts = mesh_stacks.Step.of(stack)
    everywhere = sharding.named(P())
    shape = (TOKENS, config.hc_mult, config.hidden_size)

    def step(leaves, carry, number):
        stack = parts.merge(leaves)
        ids, window, dead = carry
        starts = np.arange(TOKENS + 1, dtype=np.int32)
        place = jnp.full(TOKENS, number + 100, jnp.int32)
        batch = stack.batch(
            ids, place, starts, lookback_token_ids=window, lookback_dead_mask=dead
        )
        column = lax.broadcasted_iota(jnp.uint32, shape, 1) * shape[2]
        column += lax.broadcasted_iota(jnp.uint32, shape, 2)
        row = ids.astype(jnp.uint32)[:, None, None]
        drawn = mesh_stacks.mixed_bytes(jnp, 98, row, column, 0, 255)
        hidden = (drawn.astype(jnp.float32) / 64 - 2).astype(jnp.bfloat16)
        for layer_id in config.layer_ids:
            hidden = stack(layer_id, hidden, batch)
        bits = lax.bitcast_convert_type(hidden, jnp.uint16).astype(jnp.uint32)
        # A sum of integers is the same in any order.
        mixed = jnp.sum(bits * (2 * column + 1) * jnp.uint32(2654435761), (1, 2))
        following = ((mixed >> 8) % config.vocab_size).astype(jnp.int32)
        window, dead = stack.hash_state.advance_lookback(window, dead, ids, starts)
        return following, window, dead

    compiled = jax.jit(step, donate_argnums=1, out_shardings=everywhere)
    depth = config.max_ngram_size - 1
    first = np.arange(TOKENS, dtype=np.int32) * 7 + 3
    carry = tuple(
        jax.make_array_from_callback(x.shape, everywhere, lambda index, x=x: x[index])
        for x in (
            first,
            np.full((TOKENS, depth), -1, np.int32),
            np.zeros((TOKENS, depth), bool),
        )
    )

    def run(carry, number):
        carry = compiled(parts.leaves, carry, np.int32(number))
        return carry, np.asarray(carry[0].addressable_data(0))

    return run, carry


# --- The job --------------------------------------------------------------------------


def start(
    options: argparse.Namespace, folder: Path, processes: int
) -> tuple[list[subprocess.Popen], list[Path]]:
    """Starts the job's processes; each writes its output to a file of its own."""
    given = ["--processes", str(options.processes), "--steps", str(options.steps)]
    if options.device:
        given += ["--device", options.device]
    if options.kill_at is not None and processes > 1:
        given += ["--kill-at", str(options.kill_at), "--kill", str(options.kill)]
    address, started, outputs = infer_mesh.free_address(), [], []
    for rank in range(processes):
        own = ["--process-id", str(rank)]
        gpus = {}
        if processes > 1:
            own += ["--coordinator", address]
            shares = argparse.Namespace(mesh=f"tp={processes}", processes=processes)
            gpus = infer_mesh.own_gpus(shares, rank)
        outputs.append(folder / f"output.{processes}.{rank}")
        own += ["--result", str(folder / f"result.{processes}.{rank}")]
        with outputs[-1].open("w") as output:
            command = [sys.executable, "-u", __file__, *given, *own]
            # The environment goes along whole: NCCL's settings with it.
            child = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | gpus,
            )
        started.append(child)
    return started, outputs


def wait(started: list[subprocess.Popen], seconds: float) -> list[float | None]:
    """Waits for all to end, each for so long; says when each did."""
    ended: list[float | None] = [None] * len(started)
    limit = time.monotonic() + seconds
    while None in ended and time.monotonic() < limit:
        for rank, process in enumerate(started):
            if ended[rank] is None and process.poll() is not None:
                ended[rank] = time.monotonic()
        time.sleep(0.05)
    return ended


def run_job(
    options: argparse.Namespace, folder: Path, processes: int
) -> tuple[list[int | None], list[float | None], list[str]]:
    """Runs the job; gives exit codes (None: it hung), ends and outputs, by rank."""
    started, outputs = start(options, folder, processes)
    try:
        ended = wait(started, options.seconds)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, ended, [path.read_text(errors="replace") for path in outputs]


def compare(options: argparse.Namespace, folder: Path) -> int:
    """Runs several processes, then one with all devices; tells whether they agree."""
    results = []
    for processes in (options.processes, 1):
        begin = time.monotonic()
        codes, _, outputs = run_job(options, folder, processes)
        for rank, code in enumerate(codes):
            if code != 0:
                ended = f"ended with {code}"
                how = f"hung: {options.seconds} s" if code is None else ended
                print(f"process {rank} of {processes} {how}\n{_tail(outputs[rank])}")
                return 1
        for rank in range(processes):
            text = (folder / f"result.{processes}.{rank}").read_text(encoding="utf-8")
            results.append(json.loads(text))
            print(
                f"process {rank} of {processes}, {results[-1]['devices']} device(s) of "
                f"{results[-1]['platform']}: {options.steps} steps of {TOKENS} tokens, "
                f"median {results[-1]['median_us']:.0f} us, longest "
                f"{results[-1]['longest_us']:.0f} us, digest "
                f"{results[-1]['digest'][:16]}",
                flush=True,
            )
        print(f"  in {time.monotonic() - begin:.1f} s", flush=True)
    same = len({result["digest"] for result in results}) == 1
    print("all tokens agree" if same else "TOKENS DIFFER", flush=True)
    return 0 if same else 1


def kill(options: argparse.Namespace, folder: Path) -> int:
    """Runs several processes of which one is killed; judges how the others end."""
    codes, ended, outputs = run_job(options, folder, options.processes)
    at = ended[options.kill]
    if codes[options.kill] != -signal.SIGKILL or at is None:
        print(f"process {options.kill} was not killed: {codes[options.kill]}")
        print(_tail(outputs[options.kill]))
        return 1
    failed = False
    for rank, (code, end) in enumerate(zip(codes, ended, strict=True)):
        if rank == options.kill:
            continue
        after = None if end is None else end - at
        good = code not in (None, 0) and after is not None and after < NOTICE_SECONDS
        named = _noticed(outputs[rank])
        failed |= not (good and named)
        waited = "did not end" if after is None else f"ended after {after:.1f} s"
        print(
            f"process {options.kill} was killed; process {rank} {waited}, code {code}"
        )
        print(f"  and said: {named or 'nothing of it'}", flush=True)
        if not (good and named):
            print(_tail(outputs[rank]))
    return 1 if failed else 0


def _noticed(output: str) -> str:
    """The line in which a process says that another one is gone."""
    signs = ("another process", "another task died", "stopped sending heartbeats")
    lines = [line for line in output.splitlines() if any(s in line for s in signs)]
    return lines[-1][:400] if lines else ""


def _tail(output: str) -> str:
    return "\n".join("    " + line for line in output.splitlines()[-25:])


def main(arguments: list[str] | None = None) -> int:
    """Runs the job, or is a part of it; returns the exit code."""
    options = parse_arguments(arguments)
    if options.process_id is not None:
        work(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        judge = compare if options.kill_at is None else kill
        return judge(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
