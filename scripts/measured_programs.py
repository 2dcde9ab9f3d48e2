"""Compiled programs timed together: by the wall clock, and each GPU's kernels."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import device_times
import jax

ROUNDS = 5
TRACED = 4
MOST_CALLS = 100
ROUND_SECONDS = 0.03


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled function with operands to rotate over.

    Attributes:
        call: of the leaves, what is carried, and one of the batches; or, where nothing
            is carried, of leaves and batch.
        leaves: the stack's arrays.
        batches: different ones of the same shapes.
        start: makes what is carried, or None.
    """

    call: Callable[..., Any]
    leaves: Any
    batches: list[Any]
    start: Callable[[], Any] | None = None

    def first(self) -> Any:
        """Run the first batch."""
        carry = () if self.start is None else (self.start(),)
        return jax.block_until_ready(self.call(self.leaves, *carry, self.batches[0]))

    def loop(self, count: int) -> tuple[float, float]:
        """Run calls without waiting; give seconds until enqueued, and until done."""
        carry = None if self.start is None else jax.block_until_ready(self.start())
        result = None
        # Steps in flight on few cores starve each other's collectives of threads.
        in_turn = jax.default_backend() == "cpu"
        begin = time.perf_counter()
        for i in range(count):
            batch = self.batches[i % len(self.batches)]
            if carry is None:
                result = self.call(self.leaves, batch)
            else:
                carry = self.call(self.leaves, carry, batch)
            if in_turn:
                jax.block_until_ready(result if carry is None else carry)
        enqueued = time.perf_counter() - begin
        jax.block_until_ready(result if carry is None else carry)
        return enqueued, time.perf_counter() - begin

    def calls(self, count: int) -> Iterator[Callable[[], Any]]:
        """Give single calls, each with its own batch, that give their result."""
        carry = [None if self.start is None else jax.block_until_ready(self.start())]

        def call(i):
            batch = self.batches[i % len(self.batches)]
            if carry[0] is None:
                return self.call(self.leaves, batch)
            carry[0] = self.call(self.leaves, carry[0], batch)
            return carry[0]

        for i in range(count):
            yield functools.partial(call, i)


@dataclasses.dataclass
class Times:
    """What one program took, in microseconds.

    Attributes:
        loop: a call of an asynchronous loop, of each round.
        call: a call that is waited for.
        enqueue: until a call of the loop returned.
        runs: what each GPU ran, or None.
        counted: bytes that each GPU took in over NVLink by the driver's counters.
    """

    loop: list[float] = dataclasses.field(default_factory=list)
    call: list[float] = dataclasses.field(default_factory=list)
    enqueue: list[float] = dataclasses.field(default_factory=list)
    runs: list[device_times.Run] | None = None
    counted: list[int] | None = None


def compile_all(jobs: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run independent compilations at once: a Mosaic kernel takes half a second."""
    begin = time.perf_counter()
    workers = min(8, len(os.sched_getaffinity(0)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        started = {name: pool.submit(job) for name, job in jobs.items()}
        done = {name: future.result() for name, future in started.items()}
    print(
        f"compiled {len(jobs)} programs in {time.perf_counter() - begin:.1f} s",
        flush=True,
    )
    return done


def measure_all(
    programs: dict[str, Program], counters: device_times.LinkCounters | None
) -> dict[str, Times]:
    """Measure programs in turns, and trace all of them under one profiler."""
    times = {name: Times() for name in programs}
    counts = {}
    for name, program in programs.items():
        program.loop(3)
        once = program.loop(3)[1] / 3
        counts[name] = max(4, min(MOST_CALLS, int(ROUND_SECONDS / once)))
    for _ in range(ROUNDS):
        for name, program in programs.items():
            enqueued, done = program.loop(counts[name])
            times[name].loop.append(1e6 * done / counts[name])
            times[name].enqueue.append(1e6 * enqueued / counts[name])
            for call in program.calls(max(4, counts[name] // 4)):
                begin = time.perf_counter()
                jax.block_until_ready(call())
                times[name].call.append(1e6 * (time.perf_counter() - begin))
    if counters is not None:
        for name, program in programs.items():
            count = counts[name]
            times[name].counted = counters.per_call(lambda: program.loop(count), count)  # noqa: B023
    calls = [call for p in programs.values() for call in p.calls(TRACED)]
    runs = device_times.trace(calls)
    if runs is not None:
        for i, name in enumerate(programs):
            times[name].runs = runs[i * TRACED : (i + 1) * TRACED]
    return times


def where(times: dict[str, Times], name: str, one: str) -> list[str]:
    """Say where a program's time goes, in words; beside it, where one GPU's does."""
    lines = []
    for who in (name, one):
        took = times[who]
        line = (
            f"{who}: {statistics.median(took.loop):.1f} us a step, "
            f"{statistics.median(took.enqueue):.1f} us to enqueue it, "
            f"{statistics.median(took.call):.1f} us waited for"
        )
        if took.runs:
            sums = device_times.median_of(took.runs, max)
            parts = list(device_times.by_name(took.runs).items())[:8]
            listed = ", ".join(f"{kernel} {us:g}" for kernel, us in parts)
            line += f"; kernels {sums:.1f} us on a GPU: {listed}"
        lines.append(line)
    return lines


def compile_step(
    function: Callable[..., Any],
    operands: tuple[Any, ...],
    out_sharding: Any = None,
    *,
    keep_unused: bool = False,
) -> Any:
    """Compile a function for operands as they lie.

    Args:
        function: to jit.
        operands: of the same shapes and places as in all calls.
        out_sharding: of the result, which then takes the second operand's memory; None
            donates nothing.
        keep_unused: whether operands that the function does not use are passed, too.

    Returns:
        The compiled function.
    """
    options: dict[str, Any] = {"keep_unused": keep_unused}
    if out_sharding is not None:
        options |= {"donate_argnums": 1, "out_shardings": out_sharding}
    return jax.jit(function, **options).lower(*operands).compile()
