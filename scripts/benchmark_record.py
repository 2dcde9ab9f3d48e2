"""Benchmark results: what was measured, on what, and whether it is as required."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
RESULTS = PROJECT / "scripts" / "benchmark_results"


@dataclasses.dataclass(frozen=True)
class Result:
    """One measured number.

    Attributes:
        suite: which part of the benchmark.
        name: what was measured, in words.
        value: the number: of times, a median.
        unit: of the value, such as "ms", "us" or "x" for a ratio.
        samples: every single measurement.
        at_most: the largest value that is good enough, or None.
        at_least: the smallest value that is good enough, or None.
        detail: anything else that belongs to it, ready for JSON.
    """

    suite: str
    name: str
    value: float
    unit: str
    samples: tuple[float, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def required(self) -> str:
        """Says what is required, or nothing."""
        if self.at_most is not None:
            return f"at most {self.at_most:g} {self.unit}"
        if self.at_least is not None:
            return f"at least {self.at_least:g} {self.unit}"
        return ""

    @property
    def holds(self) -> bool | None:
        """Whether the value is as required; None where nothing is."""
        if self.at_most is None and self.at_least is None:
            return None
        # Written so that a NaN does not hold.
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


def seconds(function: Callable[[], Any]) -> float:
    """Measures one call by the wall clock."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure_in_turns(
    functions: dict[str, Callable[[], Any]], *, rounds: int, warm_up: int = 1
) -> dict[str, tuple[float, ...]]:
    """Measures functions in turns, so that a busy machine slows all of them alike.

    Args:
        functions: by name; each must wait for its result.
        rounds: how often each is measured.
        warm_up: rounds before that, which do not count.

    Returns:
        Seconds of each call by name.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(warm_up + rounds):
        for name, function in functions.items():
            took = seconds(function)
            if turn >= warm_up:
                samples[name].append(took)
    return {name: tuple(values) for name, values in samples.items()}


def median_ms(samples: Iterable[float]) -> float:
    """Gives the median of seconds in milliseconds."""
    return 1000 * statistics.median(samples)


def provenance() -> dict[str, Any]:
    """Says when, with what and on what the numbers were measured."""
    import jax

    device = jax.devices()[0]
    versions = {}
    for package in ("jax", "jaxlib", "flax", "numpy", "tokenizers"):
        versions[package] = importlib.metadata.version(package)
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain")),
        "device": device.device_kind,
        "devices": jax.device_count(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
        "x64": bool(jax.config.read("jax_enable_x64")),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=PROJECT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None  # not a git checkout
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.processor()


def results_file(device_kind: str) -> Path:
    """Names the file of a device's results."""
    slug = re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")
    return RESULTS / f"{slug}.jsonl"


def append(path: Path, results: Iterable[Result], origin: dict[str, Any]) -> None:
    """Appends one line of JSON for each result."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for result in results:
            line = dataclasses.asdict(result) | {"provenance": origin}
            file.write(json.dumps(line) + "\n")


def latest(path: Path) -> list[Result]:
    """Reads the last result of each name."""
    found: dict[tuple[str, str], Result] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        del fields["provenance"]
        result = Result(**fields | {"samples": tuple(fields["samples"])})
        found[result.suite, result.name] = result
    return list(found.values())


def markdown(results: Iterable[Result]) -> str:
    """Writes results as Markdown tables: kernel times by number of tokens, and others.

    Args:
        results: those with "operation", "variant" and "tokens" in their detail make a
            row for each operation and variant.

    Returns:
        The tables, an empty line between them.
    """
    times: dict[tuple[str, str], dict[int, float]] = {}
    others = ["| measured | value | required |", "| --- | ---: | --- |"]
    for result in results:
        detail = result.detail
        if result.unit == "us" and {"operation", "variant", "tokens"} <= detail.keys():
            operation = ", ".join(
                [detail["operation"], *filter(None, [detail.get("mesh")])]
            )
            row = times.setdefault((operation, detail["variant"]), {})
            row[detail["tokens"]] = result.value
            continue
        value = f"{result.value:.3g} {result.unit}"
        others.append(f"| {result.name} | {value} | {result.required} |")
    tables = []
    if times:
        tokens = sorted({t for row in times.values() for t in row if t})
        heads = "".join(f" T = {t} |" for t in tokens)
        table = [f"| µs | by |{heads}", "| --- | --- |" + " ---: |" * len(tokens)]
        for (operation, variant), row in sorted(
            times.items(), key=lambda entry: entry[0][0]
        ):
            cells = "".join(f" {_short(row[t]) if t in row else ''} |" for t in tokens)
            if any(t in row for t in tokens):
                table.append(f"| {operation} | {variant} |{cells}")
        tables.append("\n".join(table))
    if len(others) > 2:
        tables.append("\n".join(others))
    return "\n\n".join(tables)


def _short(us: float) -> str:
    return f"{us:.3g}" if us < 1000 else f"{us:.0f}"
