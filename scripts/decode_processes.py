"""Decodes in several processes, one GPU each, and compares with one process.

    python scripts/decode_processes.py                       two processes, 1,000 steps
    python scripts/decode_processes.py --kill-at 100         one is killed on the way
    python scripts/decode_processes.py --device cpu          the same on CPU devices

Each step's tokens follow from every bit of the step before, so that a single wrong bit
changes all that comes after. Times are compared with those of one device; on GPUs they
are appended to scripts/benchmark_results. Exit code 1: the processes disagree with each
other or with one process; or the end of one did not end the others with an error in
time.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infer_mesh

HEARTBEAT_SECONDS = 10
NOTICE_SECONDS = 3 * HEARTBEAT_SECONDS
"""How long the others may take to end, once one is gone."""
TOKENS = 16
REPORT_EVERY = 100
ROUNDS, LOOP_STEPS = 7, 100
FORMS = ("collective", "peer_read")
"""The library's choice between processes; and rows from each other's memory."""
AT_MOST = 1.15
"""A step of two processes, of one device's."""


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
    add(
        "--forms",
        nargs="+",
        choices=FORMS,
        help="how rows reach the processes; none: all that can be",
    )
    add("--seconds", type=float, default=300, help="allowed for each of the runs")
    add("--output", type=Path, help="JSONL file; none: scripts/benchmark_results/..")
    add("--devices", type=int, help=argparse.SUPPRESS)
    add("--process-id", type=int, help=argparse.SUPPRESS)
    add("--coordinator", help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.processes < 2:
        parser.error("--processes must be at least 2")
    if options.devices is None:
        options.devices = options.processes
    if options.forms is None:
        options.forms = list(FORMS if own_gpus(options, 0) else FORMS[:1])
    if options.kill is None:
        options.kill = options.processes - 1
    if not 0 <= options.kill < options.processes:
        parser.error(f"--kill must be within 0..{options.processes - 1}")
    return options


def own_gpus(options: argparse.Namespace, rank: int) -> dict[str, str]:
    """Gives a process its GPU, if there are as many."""
    if options.device == "cpu":
        return {}
    count = options.processes
    shares = argparse.Namespace(mesh=f"tp={count}", processes=count)
    return infer_mesh.own_gpus(shares, rank)


# --- One process ----------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Decodes as one process of the job, and writes what came out."""
    import jax

    here = options.devices if options.coordinator is None else 1
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
    if found < options.devices:
        raise ValueError(f"{options.devices} devices are needed; {found} are here")
    rank = options.process_id or 0
    with processes.agreement("decode"):
        seen, calls, loops = decode(options, rank, jax.devices()[: options.devices])
    result = {
        "digest": seen,
        "devices": here,
        "platform": jax.default_backend(),
        "call_us": [1e6 * seconds for seconds in calls],
        "loop_us": [1e6 * seconds for seconds in loops],
    }
    options.result.write_text(json.dumps(result), encoding="utf-8")


def decode(
    options: argparse.Namespace, rank: int, devices: list[Any]
) -> tuple[str, list[float], list[float]]:
    """Runs the steps.

    Args:
        options: how many, and which process is killed when.
        rank: this process's number.
        devices: of all processes.

    Returns:
        A digest of all tokens; seconds of each step, its tokens read; and seconds of a
        step in loops that read no tokens.
    """
    import jax
    import numpy as np

    begin = time.perf_counter()
    step, carry = make_decoding(devices, options.forms[0])
    seen, times = hashlib.sha256(), []
    for number in range(options.steps):
        if options.kill_at == number and rank == options.kill:
            print(f"process {rank} kills itself at step {number}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.perf_counter()
        carry = step(carry)
        seen.update(np.asarray(carry[0].addressable_data(0)).tobytes())
        times.append(time.perf_counter() - started)
        if number == 0:
            took = time.perf_counter() - begin
            print(f"process {rank}: first step after {took:.1f} s", flush=True)
        if (number + 1) % REPORT_EVERY == 0:
            print(f"process {rank}: {number + 1} steps", flush=True)
    # Steps in flight on few cores starve each other's collectives of threads.
    wait_for_each = devices[0].platform == "cpu"
    loops = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(LOOP_STEPS):
            carry = step(carry)
            if wait_for_each:
                jax.block_until_ready(carry)
        jax.block_until_ready(carry)
        loops.append((time.perf_counter() - started) / LOOP_STEPS)
    return seen.hexdigest(), times[1:] or times, loops


def make_decoding(
    devices: list[Any], form: str
) -> tuple[Callable[[tuple[Any, ...]], tuple[Any, ...]], tuple[Any, ...]]:
    """Makes a decode step over devices of any number of processes.

    Args:
        devices: the tensor axis; the tables are cut over it by heads.
        form: one of `FORMS`.

    Returns:
        A function of what is carried that gives the new carry, and the first carry:
        the tokens' ids, their positions, and the windows before them.
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
    sharding, everywhere = None, jax.sharding.SingleDeviceSharding(devices[0])
    if len(devices) > 1:
        kinds = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((len(devices), 1), ("tp", "dp"), kinds, devices=devices)
        exchange = "peer_read" if form == "peer_read" else None
        sharding = EngramSharding.on(mesh, layout, exchange=exchange)
        everywhere = sharding.named(P())
    stack = mesh_stacks.make_stack(config, layout, sharding)
    parts = mesh_stacks.Step.of(stack)
    shape = (TOKENS, config.hc_mult, config.hidden_size)
    starts = np.arange(TOKENS + 1, dtype=np.int32)

    def step(leaves, carry):
        stack = parts.merge(leaves)
        ids, positions, window, dead = carry
        batch, (window, dead) = stack.batch(
            ids,
            positions,
            starts,
            lookback_token_ids=window,
            lookback_dead_mask=dead,
            advance_lookback=True,
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
        return following, positions + 1, window, dead

    compiled = jax.jit(step, donate_argnums=1, out_shardings=everywhere)
    depth = config.max_ngram_size - 1
    first = (
        np.arange(TOKENS, dtype=np.int32) * 7 + 3,
        np.full(TOKENS, 100, np.int32),
        np.full((TOKENS, depth), -1, np.int32),
        np.zeros((TOKENS, depth), bool),
    )
    carry = tuple(mesh_stacks.put(array, everywhere) for array in first)
    return functools.partial(compiled, parts.leaves), carry


# --- The job --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Job:
    """Some processes, the devices of all of them, and how rows reach them."""

    processes: int
    devices: int
    form: str = FORMS[0]

    @property
    def name(self) -> str:
        """Name it in results."""
        counted = (self.processes, "process", "es"), (self.devices, "device", "s")
        parts = [f"{n} {word}{many * (n > 1)}" for n, word, many in counted]
        return ", ".join(parts + [self.form] * (self.devices > 1))


def start(
    options: argparse.Namespace, folder: Path, job: Job
) -> tuple[list[subprocess.Popen], list[Path]]:
    """Starts the job's processes; each writes its output to a file of its own."""
    given = ["--processes", str(options.processes), "--steps", str(options.steps)]
    given += ["--devices", str(job.devices), "--forms", job.form]
    if options.device:
        given += ["--device", options.device]
    if options.kill_at is not None:
        given += ["--kill-at", str(options.kill_at), "--kill", str(options.kill)]
    address, started, outputs = infer_mesh.free_address(), [], []
    for rank in range(job.processes):
        own = ["--process-id", str(rank), "--result", str(_result(folder, job, rank))]
        gpus = {}
        if job.processes > 1:
            own += ["--coordinator", address]
            gpus = own_gpus(options, rank)
        outputs.append(folder / f"output of {job.name}.{rank}")
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


def _result(folder: Path, job: Job, rank: int) -> Path:
    return folder / f"{job.name}.{rank}.json"


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
    options: argparse.Namespace, folder: Path, job: Job
) -> tuple[list[int | None], list[float | None], list[str]]:
    """Runs the job; gives exit codes (None: it hung), ends and outputs, by rank."""
    started, outputs = start(options, folder, job)
    try:
        ended = wait(started, options.seconds)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return codes, ended, [path.read_text(errors="replace") for path in outputs]


def compare(options: argparse.Namespace, folder: Path) -> int:
    """Runs several processes, one with all devices, one with one; compares them."""
    count, found = options.processes, {}
    jobs = [Job(n, count, form) for n in (count, 1) for form in options.forms]
    jobs.append(Job(1, 1))
    for job in jobs:
        begin = time.monotonic()
        codes, _, outputs = run_job(options, folder, job)
        for rank, code in enumerate(codes):
            if code != 0:
                ended = f"ended with {code}"
                how = f"hung: {options.seconds} s" if code is None else ended
                print(f"{job.name}: process {rank} {how}\n{_tail(outputs[rank])}")
        if any(code != 0 for code in codes):
            continue
        found[job] = [
            json.loads(_result(folder, job, rank).read_text(encoding="utf-8"))
            for rank in range(job.processes)
        ]
        for rank, result in enumerate(found[job]):
            calls, loops = result["call_us"], result["loop_us"]
            print(
                f"{job.name}, process {rank} on {result['platform']}: {options.steps} "
                f"steps of {TOKENS} tokens, {statistics.median(calls):.0f} us each "
                f"with its tokens read (longest {max(calls):.0f}), "
                f"{statistics.median(loops):.0f} us in a loop; tokens "
                f"{result['digest'][:16]}",
                flush=True,
            )
        print(f"  in {time.monotonic() - begin:.1f} s", flush=True)
    record(options, found)
    return 0 if _agree(found) and len(found) == len(jobs) else 1


def _agree(found: dict[Job, list[dict[str, Any]]]) -> bool:
    """Tells whether all that must be are the same tokens, and says what differs."""
    digests = {job: {r["digest"] for r in results} for job, results in found.items()}
    right = bool(digests)
    # One process and several run the same program; other programs may round elsewhere.
    for form in dict.fromkeys(job.form for job in found if job.devices > 1):
        alike = {j: d for j, d in digests.items() if j.devices > 1 and j.form == form}
        if len(set().union(*alike.values())) > 1:
            print(f"TOKENS DIFFER: {', '.join(job.name for job in alike)}", flush=True)
            right = False
    if right:
        print("all tokens agree", flush=True)
    first = next(iter(digests.values()), None)
    for job, each in digests.items():
        if right and each != first:
            # Sums may end in a neighbour where they are added up in another order.
            print(f"{job.name}: other tokens, as a rounding grew", flush=True)
    return right


def record(options: argparse.Namespace, found: dict[Job, list[dict[str, Any]]]) -> None:
    """Compares times, and appends those of GPUs to the results.

    Args:
        options: where to.
        found: what each process of each job wrote.
    """
    import benchmark_record

    if options.device == "cpu":
        import jax

        jax.config.update("jax_platforms", "cpu")
    gpu = any(ranks[0]["platform"] == "gpu" for ranks in found.values())
    suite, results = f"processes{options.processes}_decode", []
    alone = Job(1, 1)
    for what in ("call", "loop"):
        times = {}
        for job, ranks in found.items():
            # Processes wait for each other: the slowest one is the job's time.
            samples = max((r[f"{what}_us"] for r in ranks), key=statistics.median)
            times[job] = statistics.median(samples)
            name = f"decode {what} ({job.name}), T = {TOKENS}"
            detail = {
                "operation": f"decode {what}",
                "variant": job.name,
                "tokens": TOKENS,
            }
            results.append(
                benchmark_record.Result(
                    suite, name, times[job], "us", tuple(samples[-200:]), detail=detail
                )
            )
        for job in found:
            if job == alone or alone not in found:
                continue
            ratio = benchmark_record.Result(
                suite,
                f"decode {what} of {job.name} against one device, T = {TOKENS}",
                times[job] / times[alone],
                "x",
                at_most=AT_MOST if gpu and job.devices == 2 else None,
            )
            verdict = {None: "", True: "holds", False: "FAILS"}[ratio.holds]
            print(f"{ratio.name}: {ratio.value:.3f} {verdict}", flush=True)
            results.append(ratio)
    if gpu or options.output:
        origin = benchmark_record.provenance()
        path = options.output or benchmark_record.results_file(origin["device"])
        benchmark_record.append(path, results, origin)
        print(f"appended to {path}", flush=True)


def kill(options: argparse.Namespace, folder: Path) -> int:
    """Runs several processes of which one is killed; judges how the others end."""
    job = Job(options.processes, options.processes, options.forms[0])
    codes, ended, outputs = run_job(options, folder, job)
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
