"""Measures the library, appends the numbers with their origin, and judges them.

    python scripts/benchmark.py --device cpu
    python scripts/benchmark.py --device cpu --suites hash import
    python scripts/benchmark.py --device gpu --peers peers.json
    python scripts/benchmark.py --device host            tables in host memory
    python scripts/benchmark.py --mesh tp=2              several GPUs, and one of them
    python scripts/benchmark.py --device cpu --markdown      the last results as tables;
                                                 --output FILE --suites NAME .. of which

Results go to scripts/benchmark_results/<device>.jsonl, one line of JSON each, with
every sample, the commit, the machine and the versions. Exit code 1: a requirement does
not hold.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEVICES = {
    "cpu": "benchmark_cpu",
    "gpu": "benchmark_gpu",
    "host": "benchmark_host_tables",
}
"""The module of each device: it has `SUITES`, functions that yield results, by name."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Measure the library on a device.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=sorted(DEVICES), help="what to measure on")
    add(
        "--mesh",
        help="GPUs to measure on together, such as tp=2 or tp=2,dp=2; with --device "
        "cpu as many CPU devices, to try it",
    )
    add("--tokens", nargs="+", type=int, help="of each replica, with --mesh; none: all")
    add("--suites", nargs="+", metavar="SUITE", help="some of them; none: all")
    add(
        "--peers",
        type=Path,
        help="JSON of other implementations' times on this card, to compare with: "
        "{operation: {implementation: {tokens: microseconds}}}",
    )
    add("--output", type=Path, help="JSONL file; none: scripts/benchmark_results/..")
    add(
        "--markdown",
        action="store_true",
        help="measure nothing: print the last results",
    )
    options = parser.parse_args(arguments)
    if options.device is None and options.mesh is None:
        parser.error("give --device or --mesh: what to measure on")
    if options.mesh is not None and options.device not in (None, "cpu"):
        parser.error(f"--device {options.device} is one device; leave it out of --mesh")
    return options


def find_suites(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Gives the suites of what is measured on; starts no backend."""
    if options.mesh is None:
        return importlib.import_module(DEVICES[options.device]).SUITES
    import infer_mesh
    import jax

    axes = infer_mesh.parse_mesh(options.mesh, 1)
    count = math.prod(axes.values())
    # It counts where there is no GPU.
    if jax.config.jax_num_cpu_devices < count:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", count)
    return importlib.import_module("benchmark_mesh").suites(axes, options.tokens)


def main(arguments: list[str] | None = None) -> int:
    """Runs the suites; returns the exit code."""
    options = parse_arguments(arguments)
    import jax

    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    import benchmark_record
    from rich.console import Console

    if options.markdown:
        kind = jax.devices()[0].device_kind
        output = options.output or benchmark_record.results_file(kind)
        wanted = options.suites
        results = benchmark_record.latest(output)
        shown = [r for r in results if wanted is None or r.suite in wanted]
        print(benchmark_record.markdown(shown))
        return 0

    console = Console(highlight=False)
    try:
        suites = find_suites(options)
    except ValueError as error:  # of --mesh
        print(f"error: {error}", file=sys.stderr)
        return 2
    chosen = options.suites or list(suites)
    if unknown := [name for name in chosen if name not in suites]:
        print(
            f"error: no suite {', '.join(unknown)}; there are {', '.join(suites)}",
            file=sys.stderr,
        )
        return 2
    output = options.output or benchmark_record.results_file(
        jax.devices()[0].device_kind
    )
    origin = benchmark_record.provenance()
    measured = []

    def record(results):
        for result in results:
            measured.append(result)
            benchmark_record.append(output, [result], origin)
            verdict = {None: "", True: "[green]holds[/]", False: "[red]FAILS[/]"}
            required = f" ({result.required})" if result.required else ""
            console.print(
                f"{result.name}: {result.value:.4g} {result.unit}"
                f"{required} {verdict[result.holds]}",
                soft_wrap=True,
            )

    for name in chosen:
        with console.status(f"Measuring {name}"):
            record(suites[name]())
    if options.peers is not None:
        times = json.loads(options.peers.read_text(encoding="utf-8"))
        peers = importlib.import_module("benchmark_peers")
        record(peers.compare(list(measured), times))
    failed = any(result.holds is False for result in measured)
    console.print(f"Appended to {output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
