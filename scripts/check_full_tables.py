"""Fills GPUs with V4.1's whole tables, 203 GB, and checks rows of every shard.

    python scripts/check_full_tables.py --mesh tp=2
    python scripts/check_full_tables.py --mesh tp=2 --device cpu --rows 72000

Rows are made on the devices, each shard on its own, as a function of row and column;
the same function in NumPy says what any of them must be. Nothing is loaded and no shard
is copied. Exit code 1: a row is wrong, or filling took memory beside the tables.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import infer_mesh

TOKENS = 512
SLACK = 1.02
"""Memory at its highest while filling, of the tables' own."""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Fill GPUs with V4.1's whole tables and check their rows.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--mesh", default="tp=2", help="devices, such as tp=2 or tp=2,dp=2")
    add("--rows", type=int, help="of each table; none: the published ones")
    add("--device", choices=("cpu",), help="CPU devices; none: what JAX finds")
    add("--output", type=Path, help="JSONL file; none: scripts/benchmark_results/..")
    return parser.parse_args(arguments)


def edge_ids(sharding: Any, layout: Any, tokens: int) -> Any:
    """Make ids of every column: its ends, offsets that overflow 32 bits, and others.

    Args:
        sharding: how the tables are cut.
        layout: the columns.
        tokens: how many ids of each column; at least 10.

    Returns:
        int32 [T, L, C].
    """
    import numpy as np

    rng = np.random.default_rng(0)
    primes = layout.primes.reshape(layout.offsets.shape)
    ids = layout.offsets + rng.integers(0, primes, (tokens, *primes.shape))
    ends = layout.offsets + primes
    # The first and last rows of each column are those of each shard and table, too.
    first = layout.offsets
    ids[0], ids[1], ids[2], ids[3] = first, first + 1, ends - 2, ends - 1
    # From these rows of a shard on, the offset of a byte needs more than 32 bits: of
    # values, signed and unsigned, and of scales.
    places = [(1 << bit) - back for bit in (23, 24, 28) for back in (0, 1)]
    for token, place in enumerate(places, 4):
        for layer, starts in enumerate(sharding.shards.row_start):
            wanted = starts[:, None] + place
            inside = (wanted >= layout.offsets[layer]) & (wanted < ends[layer])
            for shard, column in zip(*np.nonzero(inside), strict=True):
                ids[token, layer, column] = starts[shard] + place
    return ids.astype(np.int32)


def main(arguments: list[str] | None = None) -> int:
    """Fills and checks; returns the exit code."""
    options = parse_arguments(arguments)
    # The pool takes three quarters of a GPU unless told; the tables take 101 GB of 141.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    import jax

    try:
        axes = infer_mesh.parse_mesh(options.mesh, 1)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    count = math.prod(axes.values())
    if jax.config.jax_num_cpu_devices < count:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_num_cpu_devices", count)
    if len(jax.devices()) < count:
        found = f"{len(jax.devices())} are here ({jax.devices()[0].device_kind})"
        print(
            f"error: --mesh {options.mesh} needs {count} devices; {found}",
            file=sys.stderr,
        )
        return 2
    return check(options, axes)


def check(options: argparse.Namespace, axes: dict[str, int]) -> int:
    """Fills the mesh, and compares rows by every form of exchange."""
    import benchmark_record
    import jax
    import jax.numpy as jnp
    import mesh_stacks
    import numpy as np
    from measured_mesh import MeasuredMesh, Sizes

    from engram_jax.exchange import fetch_rows

    begin = time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - begin:6.1f} s  {text}", flush=True)

    config = mesh_stacks.V41
    if options.device == "cpu":
        config = mesh_stacks.SMALL
    if options.rows is not None:
        config = mesh_stacks.with_rows(config, options.rows)
    here = MeasuredMesh(axes, sizes=Sizes(config, (TOKENS,), TOKENS, TOKENS))
    layout, row = here.layout, config.head_dim + config.head_dim // 32
    forms = here.forms(("packed",), TOKENS // here.replicas)
    # Not every way to project: one is enough where rows are looked at.
    first = next(iter(forms.values()))
    forms = {
        name: form
        for name, form in forms.items()
        if form.shard_projection == first.shard_projection
    }
    on_each = first.check_memory(row)
    say(
        f"{sum(layout.num_rows):,} rows, {on_each / 1e9:.1f} GB on each of {here.label}"
    )
    before = [_memory(device) for device in here.mesh.devices.flat]
    # Before anything else is made, which would count as the tables' memory.
    tables = [
        mesh_stacks.make_table(config, layout, layer, first)
        for layer in range(config.num_layers)
    ]
    jax.block_until_ready(tables)
    filled = time.perf_counter() - begin
    held = sum(
        part.data.nbytes
        for arrays in tables
        for array in arrays
        for part in array.addressable_shards
    )
    say(f"filled: {held / 1e9:.1f} GB of tables on {here.devices} devices")
    peaks = [
        (stats["peak"] - start["in_use"]) / on_each
        for stats, start in zip(
            (_memory(device) for device in here.mesh.devices.flat), before, strict=True
        )
        if stats["peak"]
    ]
    if peaks:
        say(f"highest memory while filling: {max(peaks):.4f} of the tables' own")
    else:
        say(
            "these devices do not say what memory was taken: copies were not looked for"
        )
    stack = mesh_stacks.make_stack(config, layout, first, tables=tables)
    ids = edge_ids(first, layout, TOKENS)
    wanted = np.stack(
        [
            mesh_stacks.known_rows(layer, ids[:, layer], config.head_dim)
            for layer in range(config.num_layers)
        ],
        axis=1,
    )
    wrong = 0
    for name, form in forms.items():
        layers = mesh_stacks.with_sharding(stack, form).layers.values()
        parts = [layer.embedding for layer in layers]
        rows = fetch_rows(form, parts, jnp.asarray(ids))
        got = np.asarray(rows)[: len(wanted)]
        bad = np.argwhere((got != wanted).any(-1))
        wrong += len(bad)
        say(
            f"{name}: {wanted[..., 0].size:,} rows, "
            + ("all right" if not len(bad) else f"{len(bad)} WRONG, first {bad[0]}")
        )
    wrong += _check_text(here, stack, say)
    took = time.perf_counter() - begin
    copied = bool(peaks) and max(peaks) > SLACK
    detail = {
        "mesh": here.label,
        "rows": list(layout.num_rows),
        "bytes": held,
        "filled_seconds": filled,
        "peak_of_tables": peaks,
        "wrong_rows": wrong,
    }
    result = benchmark_record.Result(
        here.suite("full_tables"),
        f"fill {held / 1e9:.0f} GB of tables and check their rows, {here.label}",
        took,
        "s",
        detail=detail,
    )
    output = options.output or benchmark_record.results_file(
        jax.devices()[0].device_kind
    )
    benchmark_record.append(output, [result], benchmark_record.provenance())
    say("right" if not wrong and not copied else "WRONG")
    return 1 if wrong or copied else 0


def _check_text(here: Any, stack: Any, say: Any) -> int:
    """Compare the rows of tokens, through the hash; run both layers once."""
    import jax
    import mesh_stacks
    import numpy as np

    config, tokens = here.sizes.config, TOKENS
    step = mesh_stacks.Step.of(stack)
    batches = [mesh_stacks.make_batch(config, tokens, i) for i in range(here.replicas)]
    batch = mesh_stacks.place_batch(stack.sharding, batches)
    hidden = mesh_stacks.make_hidden(config, tokens * here.replicas, stack.sharding)

    @jax.jit
    def run(leaves, hidden, batch):
        made = step.make_batch(leaves, batch)
        return made.hash_ids, made.rows, step(leaves, hidden, batch)

    hashes, rows, output = run(step.leaves, hidden, batch)
    hashes, rows = np.asarray(hashes), np.asarray(rows)[: len(hashes)]
    wrong = 0
    for layer in range(config.num_layers):
        wanted = mesh_stacks.known_rows(layer, hashes[:, layer], config.head_dim)
        wrong += int((rows[:, layer] != wanted).any(-1).sum())
    finite = bool(np.isfinite(np.asarray(output, np.float32)).all())
    highest = [f"{hashes[:, i].max():,}" for i in range(config.num_layers)]
    say(
        f"{len(hashes)} tokens, rows up to {' and '.join(highest)}: "
        f"{wrong} wrong; outputs " + ("finite" if finite else "NOT FINITE")
    )
    return wrong + (not finite)


def _memory(device: Any) -> dict[str, int]:
    """Bytes in use now, and at most in this process's life."""
    stats = device.memory_stats() or {}
    return {
        "in_use": stats.get("bytes_in_use", 0),
        "peak": stats.get("peak_bytes_in_use", 0),
    }


if __name__ == "__main__":
    sys.exit(main())
