"""What ran on each GPU and for how long, and the bytes that came over NVLink.

`jax.experimental.mosaic.gpu.profiler` gives kernel times without saying of which GPU;
JAX's own profiler has the timeline of every one of them (CUPTI underneath, too).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

APART_SECONDS = 0.02
"""Pause between two calls in a trace; within a call nothing stands still so long."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One kernel, copy or fill on a GPU, in microseconds."""

    name: str
    start: float
    us: float


@dataclasses.dataclass(frozen=True)
class Run:
    """What one call ran on each GPU.

    Attributes:
        devices: each GPU's events, in the order in which they began.
    """

    devices: tuple[tuple[Event, ...], ...]

    @property
    def sums(self) -> list[float]:
        """Add up each GPU's events, in microseconds."""
        return [sum(event.us for event in events) for events in self.devices]

    @property
    def spans(self) -> list[float]:
        """Measure from each GPU's first event's start to its last one's end."""
        return [
            max(e.start + e.us for e in events) - min(e.start for e in events)
            for events in self.devices
        ]


def short_name(name: str) -> str:
    """Cut a kernel's arguments and numbers off its name."""
    name = re.sub(r"^void ", "", name).split("(")[0].split("<")[0]
    return re.sub(r"[._]\d+$", "", name)


def by_name(runs: Iterable[Run]) -> dict[str, float]:
    """Say where the time goes: microseconds of each kernel on a GPU, largest first.

    Args:
        runs: calls of one function.

    Returns:
        The mean over calls and GPUs, by short name.
    """
    total: dict[str, float] = defaultdict(float)
    parts = 0
    for run in runs:
        for events in run.devices:
            parts += 1
            for event in events:
                total[short_name(event.name)] += event.us
    ordered = sorted(total.items(), key=lambda item: -item[1])
    return {name: round(us / parts, 2) for name, us in ordered}


def trace(calls: Sequence[Callable[[], Any]]) -> list[Run] | None:
    """Run calls one after the other under the profiler.

    Args:
        calls: each runs something and gives its result; compiled before, so that a call
            does nothing else.

    Returns:
        What each ran; None where there is no GPU, or its timelines do not fit the
        calls, which is said.
    """
    if jax.default_backend() != "gpu":
        return None
    timelines = _profile(calls)
    runs = split_runs(timelines, len(calls))
    if runs is None:
        counts = [len(timeline) for timeline in timelines]
        print(
            f"the profiler's timelines do not fit {len(calls)} calls: {counts} events; "
            "no kernel times",
            flush=True,
        )
    return runs


def _profile(calls: Sequence[Callable[[], Any]]) -> list[list[Event]]:
    """Every GPU's events of all calls."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    options.enable_hlo_proto = False  # large, and nobody reads it here
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for call in calls:
                jax.block_until_ready(call())
                time.sleep(APART_SECONDS)
        finally:
            jax.profiler.stop_trace()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return read_timelines(files[0]) if files else []


def read_timelines(path: Path) -> list[list[Event]]:
    """Read every GPU's events of a profile, in the GPUs' order."""
    found: dict[int, list[Event]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        match = re.fullmatch(r"/device:GPU:(\d+)", plane.name)
        if match is None:
            continue
        events = [
            Event(event.name, event.start_ns / 1e3, event.duration_ns / 1e3)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
        found[int(match[1])] = sorted(events, key=lambda event: event.start)
    return [found[device] for device in sorted(found) if found[device]]


def split_runs(timelines: list[list[Event]], count: int) -> list[Run] | None:
    """Cut the GPUs' timelines where all of them stood still.

    Args:
        timelines: each GPU's events by their start.
        count: of the calls that made them.

    Returns:
        A run for each call; None if there are more or fewer stretches than calls.
    """
    marked = sorted(
        ((event, device) for device, line in enumerate(timelines) for event in line),
        key=lambda pair: pair[0].start,
    )
    stretches: list[list[tuple[Event, int]]] = []
    end = -float("inf")
    for event, device in marked:
        if event.start - end > 1e6 * APART_SECONDS / 2:
            stretches.append([])
        stretches[-1].append((event, device))
        end = max(end, event.start + event.us)
    if not marked or len(stretches) != count:
        return None
    runs = []
    for stretch in stretches:
        devices = [
            tuple(event for event, at in stretch if at == device)
            for device in range(len(timelines))
        ]
        runs.append(Run(tuple(events for events in devices if events)))
    return runs


def median_of(runs: Iterable[Run], choose: Callable[[list[float]], float]) -> float:
    """Give the median over runs of one of the GPUs' sums.

    Args:
        runs: calls of one function.
        choose: `max` for the slowest GPU, `min` for one that waits for no other: a
            collective's time on a GPU holds its waiting for the others.

    Returns:
        Microseconds.
    """
    return statistics.median(choose(run.sums) for run in runs)


class LinkCounters:
    """Read the bytes that each GPU took in over NVLink, where the driver counts them.

    Attributes:
        reason: why there are none, or "".
    """

    def __init__(self, devices: int):
        """Connect to the driver.

        Args:
            devices: of the mesh; they are the machine's first ones.
        """
        self.reason = ""
        try:
            self._nvml: Any = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handles = [
                self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(devices)
            ]
            self._read()
        except Exception as error:  # of several kinds; the plan's figures stand in
            self.reason = f"no NVLink counters ({type(error).__name__}: {error})"

    def _read(self) -> list[int]:
        field = self._nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
        received = []
        for handle in self._handles:
            (value,) = self._nvml.nvmlDeviceGetFieldValues(
                handle, [(field, 0xFFFFFFFF)]
            )
            if value.nvmlReturn:
                raise OSError(f"NVML answers {value.nvmlReturn} for the NVLink field")
            received.append(1024 * int(value.value.ullVal))
        return received

    def per_call(self, run: Callable[[], Any], calls: int) -> list[int] | None:
        """Count what each GPU takes in while something runs.

        Args:
            run: makes the calls, and waits for them.
            calls: how many they are.

        Returns:
            Bytes of each GPU and call, or None without counters.
        """
        if self.reason:
            run()
            return None
        before = self._read()
        run()
        after = self._read()
        return [(b - a) // calls for a, b in zip(before, after, strict=True)]
