"""Draws a GPU's recorded times against the number of tokens, all sides in one picture.

    python scripts/plot_benchmark.py scripts/benchmark_results/nvidia_h200.jsonl

The picture lies beside the results, as .png.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from pathlib import Path

import benchmark_record

PANELS = ("hash", "lookup", "lookup_packed", "gate", "wkv", "lookup_host")
COLUMNS = 3
STYLES = {
    "pallas": {"color": "tab:blue", "linewidth": 2.5, "marker": "o"},
    "pallas, rows in cache": {"color": "tab:blue", "linestyle": ":", "marker": "."},
    "pallas, records": {"color": "tab:purple", "linewidth": 2.5, "marker": "o"},
    "pallas, records, rows in cache": {
        "color": "tab:purple",
        "linestyle": ":",
        "marker": ".",
    },
    "ordered": {"color": "tab:blue", "linewidth": 2.5, "marker": "o"},
    "auto": {"color": "tab:cyan", "marker": "s"},
    "xla": {"color": "tab:gray", "linestyle": "--"},
    "library": {"color": "tab:gray", "linestyle": "--"},
    "vllm": {"color": "tab:orange", "marker": "^"},
    "sglang": {"color": "tab:green", "marker": "v"},
    "cublas": {"color": "tab:red", "marker": "x"},
}
NAMES = {
    "pallas": "this library",
    "pallas, rows in cache": "this library, rows in cache",
    "pallas, records": "this library, records",
    "pallas, records, rows in cache": "this library, records in cache",
    "ordered": "this library, rows in order",
    "auto": "this library, with ordering",
    "xla": "XLA form",
    "library": "library product (XLA)",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "cublas": "cuBLAS bfloat16",
}


def draw(results: list[benchmark_record.Result], path: Path) -> None:
    """Draws one log-log panel for each operation and saves the picture whole.

    Args:
        results: with "operation", "variant" and "tokens" in their detail; others are
            left out.
        path: of the PNG.

    Raises:
        ValueError: there is nothing to draw.
    """
    times: dict[str, dict[str, dict[int, float]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for result in results:
        detail = result.detail
        if result.unit == "us" and detail.get("operation") in PANELS:
            sides = times[detail["operation"]]
            sides[detail["variant"]][detail["tokens"]] = result.value
    if not times:
        raise ValueError(
            "the results hold no kernel times; make them with "
            "scripts/benchmark.py --device gpu"
        )
    import matplotlib.pyplot as plt

    shown = [name for name in PANELS if name in times]
    columns, lines = min(COLUMNS, len(shown)), -(-len(shown) // COLUMNS)
    figure, axes = plt.subplots(
        lines,
        columns,
        figsize=(4.2 * columns, 3.6 * lines),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(shown) :]:
        axis.remove()
    for axis, name in zip(axes.flat, shown, strict=False):
        for variant, points in sorted(times[name].items()):
            tokens = sorted(points)
            axis.loglog(
                tokens,
                [points[t] for t in tokens],
                label=NAMES.get(variant, variant),
                **STYLES.get(variant, {}),
            )
        axis.set(title=name, xlabel="tokens")
        axis.grid(visible=True, which="major", alpha=0.3)
        axis.legend(fontsize="small")
    for axis in axes[:, 0]:
        axis.set_ylabel("kernel time, µs")
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=120)
    plt.close(figure)
    os.replace(partial, path)


def main(arguments: list[str] | None = None) -> None:
    """Reads the command line and draws."""
    parser = argparse.ArgumentParser(description="Plot recorded kernel times.")
    parser.add_argument("results", type=Path, help="a device's JSONL file")
    options = parser.parse_args(arguments)
    path = options.results.with_suffix(".png")
    draw(benchmark_record.latest(options.results), path)
    print(path)


if __name__ == "__main__":
    main()
