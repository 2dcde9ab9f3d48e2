"""Times of V4.1's two layers on several GPUs, for `scripts/benchmark.py --mesh`.

Every form of exchange that the mesh allows, hash to output and rows alone, against one
GPU of the same machine in the same run: by the wall clock in an asynchronous loop and
waiting for every call, and each GPU's kernels by CUPTI. Results are compared with the
one GPU's before anything is timed. On CPUs sizes are small and nothing is judged.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import device_times
import jax
import jax.numpy as jnp
import mesh_stacks
import numpy as np
from benchmark_record import Result
from jax import lax
from jax.sharding import PartitionSpec as P
from measured_mesh import BATCHES, MeasuredMesh
from measured_programs import Program, compile_all, compile_step, measure_all, where

from engram_jax import EngramSharding, kernels, mxfp8
from engram_jax.exchange import fetch_rows
from engram_jax.shards import RowFormat

ONE = "one GPU"
PLAIN = "plain all_to_all of the bytes of: "
ADDING = "1 added to the hidden states of: "
"""What starting a program with a step's operands takes, whatever it runs."""


def step(bench: MeasuredMesh) -> Iterator[Result]:
    """Time hash to output: every form against one GPU."""
    for tokens in bench.sizes.tokens:
        forms = _forms(bench, tokens)
        if not bench.judges(tokens):
            forms = {n: form for n, form in forms.items() if "tokens and" not in n}
        print(f"T = {tokens} on {bench.label}: {'; '.join(forms)}", flush=True)
        programs = _step_programs(bench, forms, tokens)
        _check(bench, programs, forms, tokens)
        times = measure_all(programs, bench.counters)
        for name in programs:
            moved = bench.received(forms[name], tokens) if name in forms else None
            yield from bench.report("step", name, tokens, times[name], moved)
        yield from _judge_step(bench, times, forms, tokens)


def _forms(bench: MeasuredMesh, tokens: int) -> dict[str, EngramSharding]:
    """The forms worth measuring: through a collective, decoded rows are more bytes."""
    formats: tuple[RowFormat, ...] = ("packed",)
    if bench.judges(tokens):
        formats = ("packed", "bfloat16")
    return {
        name: form
        for name, form in bench.forms(formats, tokens).items()
        if form.row_format == "packed" or bench.exchange_of(form, tokens) == "peer_read"
    }


def _step_programs(bench: MeasuredMesh, forms, tokens) -> dict[str, Program]:
    jobs, rest = {}, {}
    started = (ONE, next(iter(forms))) if tokens == bench.sizes.few else ()
    for name, sharding in {ONE: None, **forms}.items():
        step = mesh_stacks.Step.of(
            bench.one if sharding is None else bench.stack(sharding)
        )
        if sharding is None:
            batches = [
                mesh_stacks.place_batch(None, bench.batches(tokens, turn)[:1])
                for turn in range(BATCHES)
            ]
        else:
            batches = bench.place(sharding, tokens)
        count = tokens * (1 if sharding is None else bench.replicas)
        hidden = bench.hidden(sharding, count)
        # A new operand for each run: the step takes its memory.
        again = functools.partial(jnp.copy, hidden)
        jobs[name] = functools.partial(
            compile_step, step, (step.leaves, hidden, batches[0]), hidden.sharding
        )
        rest[name] = step.leaves, batches, again
        if name in started:
            added = ADDING + name
            jobs[added] = functools.partial(
                compile_step,
                lambda leaves, hidden, batch: hidden + 1,
                (step.leaves, hidden, batches[0]),
                hidden.sharding,
                keep_unused=True,
            )
            rest[added] = rest[name]
    done = compile_all(jobs)
    return {name: Program(done[name], *rest[name]) for name in jobs}


def _check(bench: MeasuredMesh, programs: dict[str, Program], forms, tokens) -> None:
    """Refuse to time what differs from one GPU by more than roundings."""
    one, whole = programs[ONE], bench.hidden(None, tokens * bench.replicas)
    compare = jax.jit(functools.partial(_difference, bench.sizes.config.num_layers))
    results = {name: programs[name].first() for name in forms}
    for replica, batch in enumerate(bench.batches(tokens, 0)):
        part = slice(replica * tokens, (replica + 1) * tokens)
        before = whole[part]
        # A copy: the step takes its memory.
        placed = mesh_stacks.place_batch(None, [batch])
        wanted = one.call(one.leaves, jnp.copy(before), placed)
        for name, result in results.items():
            got = jax.device_put(result[part], wanted.sharding)
            largest, beyond = compare(got, wanted, before)
            if beyond:
                raise AssertionError(
                    f"{name}, T = {tokens}, replica {replica}: off from one GPU by up "
                    f"to {largest}; {beyond} elements by more than the roundings of "
                    "each layer"
                )


def _difference(layers: int, got, wanted, before) -> tuple[jax.Array, jax.Array]:
    """The largest difference, and how many are more than roundings of each layer.

    A layer rounds the projected value, and its output: neighbours in bfloat16.
    """
    got, wanted, before = (x.astype(jnp.float32) for x in (got, wanted, before))
    difference = jnp.abs(got - wanted)
    rounding = 2.0**-7 * (jnp.abs(wanted) + jnp.abs(wanted - before))
    return difference.max(), jnp.sum(~(difference <= layers * rounding))


def _judge_step(bench: MeasuredMesh, times, forms, tokens) -> Iterator[Result]:
    def median(name, what="loop"):
        return statistics.median(getattr(times[name], what))

    best = min(forms, key=median)
    for parallel in sorted({form.sequence_parallel for form in forms.values()}):
        same = {n: f for n, f in forms.items() if f.sequence_parallel == parallel}
        default, fastest = next(iter(same)), min(same, key=median)
        slower = median(default) / median(fastest)
        print(
            f"T = {tokens}, sequence_parallel={parallel}: the default ({default}) "
            + (
                "is the fastest form"
                if default == fastest
                else f"takes {slower:.2f} of the fastest ({fastest})"
            ),
            flush=True,
        )
    tensor = bench.axes["tp"] > 1
    phase = {bench.sizes.few: "decode", bench.sizes.many: "prefill"}.get(tokens)
    name = f"step of the fastest form against one GPU, T = {tokens}"
    bound = None
    if tensor and phase:
        bound = {"decode": 1.15, "prefill": 0.62}[phase]
    more = {"tokens": tokens, "fastest": best, "where": where(times, best, ONE)}
    yield bench.ratio("step", name, median(best) / median(ONE), at_most=bound, **more)
    best = min(forms, key=lambda form: median(form, "call"))
    value = median(best, "call") / median(ONE, "call")
    bound = 1.15 if tensor and phase == "decode" else None
    yield bench.ratio("step", f"{name}, each waited for", value, at_most=bound)
    for line in more["where"]:
        print(line, flush=True)
    added = [f"{median(name):.1f} us for {name}" for name in times if ADDING in name]
    if added:
        print(f"starting any program: {', '.join(added)}", flush=True)


def rows(bench: MeasuredMesh) -> Iterator[Result]:
    """Time rows alone: every form, and a plain all_to_all of the same bytes."""
    for tokens in bench.sizes.tokens:
        forms = {
            name: form
            for name, form in _forms(bench, tokens).items()
            # Whether the projection is cut makes no difference to rows.
            if not form.shard_projection
        }
        for layers in (None, 0) if bench.judges(tokens) else (None,):
            yield from _rows_of(bench, forms, tokens, layers)


def _rows_of(bench: MeasuredMesh, forms, tokens, layer) -> Iterator[Result]:
    suite = "rows" if layer is None else "rows of one layer"
    ids, wanted = _row_operands(bench, tokens, layer)
    jobs, rest = {}, {}
    for name, sharding in forms.items():
        step = mesh_stacks.Step.of(bench.stack(sharding))
        placed = [jax.device_put(x, sharding.named(sharding.replica)) for x in ids]
        function = functools.partial(_fetch, step, layer)
        jobs[name] = functools.partial(
            compile_step, function, (step.leaves, placed[0]), None
        )
        rest[name] = step.leaves, placed
    plain = _plain_all_to_all(bench, forms, tokens, 1 if layer == 0 else None)
    for name, (function, operand) in plain.items():
        jobs[name] = functools.partial(compile_step, function, (None, operand), None)
        rest[name] = None, [operand]
    done = compile_all(jobs)
    programs = {name: Program(done[name], *rest[name]) for name in jobs}
    for name in forms:
        got = programs[name].first()[: len(wanted)]
        if not _rows_equal(jax.device_put(got, wanted.sharding), wanted):
            raise AssertionError(f"{name}, T = {tokens}: rows differ from one GPU's")
    times = measure_all(programs, bench.counters)
    for name in programs:
        moved = None
        if name in forms:
            share = 1 if layer is None else bench.sizes.config.num_layers
            moved = bench.received(forms[name], tokens)
            moved = {what: moved.get(what, 0) // share for what in ("ids", "rows")}
        yield from bench.report(suite, name, tokens, times[name], moved)
    yield from _judge_rows(bench, suite, forms, times, tokens, layer)


def _row_operands(bench: MeasuredMesh, tokens, layer):
    """Ids of all replicas' tokens, and the first ones' rows as one GPU has them."""
    ids = []
    for turn in range(BATCHES):
        hashed = [bench.host_hash(batch)[0] for batch in bench.batches(tokens, turn)]
        ids.append(np.concatenate(hashed))
    chosen = slice(None) if layer is None else slice(layer, layer + 1)
    ids = [x[:, chosen] for x in ids]
    tables = [one.embedding for one in bench.one.layers.values()][chosen]
    rows = [
        _read(table.weight[...], table.scale[...], jnp.asarray(ids[0][:, i]))
        for i, table in enumerate(tables)
    ]
    return ids, jnp.stack(rows, axis=1)


@jax.jit
def _read(weight: jax.Array, scale: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows by the form that defines the operation."""
    return kernels.lookup_packed(weight, scale, ids, backend="xla")


def _plain_all_to_all(bench: MeasuredMesh, forms, tokens, layers):
    """For each packed all_to_all: one of the same bytes, and nothing else."""
    config, found = bench.sizes.config, {}
    layers = layers or config.num_layers
    width = config.head_dim + config.head_dim // mxfp8.BLOCK
    for name, form in forms.items():
        axes = tuple(a for a in form.row_token_axes if a in form.table_axes)
        how = bench.exchange_of(form, tokens), form.row_format
        if not axes or how != ("all_to_all", "packed"):
            continue
        serving = form.size([a for a in form.data_axes if a in form.table_axes])
        shape = (tokens * serving, layers, form.shards.columns, width)
        place = form.named(P(form.table_axes))
        trade = functools.partial(
            lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
        )
        if shape[0] % form.size(axes):
            continue
        operand = jax.jit(
            lambda shape=shape, form=form: jnp.ones(
                (form.size(form.table_axes) * shape[0], *shape[1:]), jnp.uint8
            ),
            out_shardings=place,
        )()
        spec = P(form.table_axes)

        def plain(_, x, trade=trade, spec=spec):
            return jax.shard_map(trade, mesh=bench.mesh, in_specs=spec, out_specs=spec)(
                x
            )

        found[PLAIN + name] = plain, operand
    return found


def _judge_rows(
    bench: MeasuredMesh, suite, forms, times, tokens, layer
) -> Iterator[Result]:
    many = tokens == bench.sizes.many
    for name in times:
        fetched = name.removeprefix(PLAIN)
        if fetched == name:
            continue
        ratios = [
            plain / whole
            for plain, whole in zip(times[name].loop, times[fetched].loop, strict=True)
        ]
        bound = 0.6 if many and layer is None and bench.replicas > 1 else None
        title = f"rate of {suite} ({fetched}) against a plain all_to_all"
        more: dict[str, Any] = {"rounds": ratios}
        if times[name].runs and times[fetched].runs:
            more["kernels"] = device_times.median_of(
                times[name].runs, min
            ) / device_times.median_of(times[fetched].runs, min)
        yield bench.ratio(
            suite,
            f"{title}, T = {tokens}",
            statistics.median(ratios),
            at_least=bound,
            **more,
        )
    if layer is None:
        return
    for name, form in forms.items():
        runs = times[name].runs
        # Each GPU reads the rows of all of a replica's tokens, half of them remote.
        whole = not form.sequence_parallel
        peers = bench.exchange_of(form, tokens) == "peer_read"
        if not peers or not runs:
            continue
        us = device_times.median_of(runs, max)
        judged = whole and form.row_format == "packed" and bench.judged
        bound = {bench.sizes.many: 70.0, bench.sizes.few: 6.0}.get(tokens)
        yield Result(
            bench.suite(suite),
            f"kernels of {suite} ({name}), {bench.label}, T = {tokens}",
            us,
            "us",
            at_most=bound if judged else None,
        )
        packed = name.replace("bfloat16", "packed")
        for exchange in ("all_to_all", "all_gather"):
            traded = times.get(packed.replace("peer_read", exchange))
            if traded is not None and traded.runs:
                against = exchange == "all_to_all" and many and judged
                yield bench.ratio(
                    suite,
                    f"kernels of {suite} ({name}) against {exchange}, T = {tokens}",
                    us / device_times.median_of(traded.runs, min),
                    at_most=0.6 if against else None,
                )


def _fetch(step: mesh_stacks.Step, layer: int | None, leaves, ids) -> jax.Array:
    stack = step.merge(leaves)
    tables = [one.embedding for one in stack.layers.values()]
    assert stack.sharding is not None
    if layer is None:
        return fetch_rows(stack.sharding, tables, ids)
    return fetch_rows(stack.sharding, [tables[layer]], ids, [layer])


@jax.jit
def _rows_equal(got: jax.Array, packed: jax.Array) -> jax.Array:
    """Tell whether rows, packed or decoded, are the packed ones bit for bit."""
    if got.dtype == jnp.uint8:
        return jnp.array_equal(got, packed)
    wanted = mxfp8.dequantize(*mxfp8.unpack(packed))
    got_bits, bits = (lax.bitcast_convert_type(x, jnp.uint16) for x in (got, wanted))
    return jnp.array_equal(got_bits, bits)


def suites(
    axes: dict[str, int], tokens: list[int] | None = None
) -> dict[str, Callable[[], Iterator[Result]]]:
    """Give the suites of a mesh by name.

    Args:
        axes: sizes of "tp" and "dp".
        tokens: of each replica; None for all.

    Returns:
        Functions that yield results.
    """
    bench = MeasuredMesh(axes, tokens)
    return {
        bench.suite("step"): functools.partial(step, bench),
        bench.suite("rows"): functools.partial(rows, bench),
    }
