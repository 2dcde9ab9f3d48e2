"""Two GPUs against one: rows bit for bit, outputs to a rounding, gradients.

The same forms as `scripts/benchmark.py --mesh` measures, at V4.1's widths.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import mesh_stacks
import numpy as np
import pytest
from flax import nnx
from measured_mesh import MeasuredMesh, Sizes
from measured_programs import compile_all, compile_step

import engram_jax
from engram_jax import EngramLayout, EngramSharding, mxfp8
from engram_jax.exchange import fetch_rows

pytestmark = pytest.mark.gpu

AXES = ({"tp": 2, "dp": 1}, {"tp": 1, "dp": 2})
SIZES = Sizes(mesh_stacks.with_rows(mesh_stacks.V41, 24 * 40_000), (300,), 5, 300)


@pytest.fixture(autouse=True)
def two_gpus():
    found = jax.devices()
    if len(found) < 2:
        pytest.skip(reason=f"needs 2 GPUs; 1 is here ({found[0].device_kind})")


@pytest.fixture(scope="module", params=AXES, ids=["tp=2", "dp=2"])
def bench(request):
    """Stacks on one GPU and on both; made once, as tests share them."""
    return MeasuredMesh(request.param, sizes=SIZES)


def layer_outputs(step, leaves, hidden, batch):
    """Each layer's output for the same hidden states."""
    stack, made = step.merge(leaves), step.make_batch(leaves, batch)
    return [stack(layer_id, hidden, made) for layer_id in stack.config.layer_ids]


def run_all(programs):
    """Compiles functions of operands at once, and gives their results by name."""
    jobs = {name: functools.partial(compile_step, *p) for name, p in programs.items()}
    return {
        name: [np.asarray(x) for x in compiled(*programs[name][1])]
        for name, compiled in compile_all(jobs).items()
    }


@pytest.mark.parametrize("tokens", [1, 301])
def test_rows_are_one_gpu_s_bit_for_bit(bench, tokens):
    config, layout = bench.sizes.config, bench.layout
    rng = np.random.default_rng(tokens)
    primes = layout.primes.reshape(layout.offsets.shape)
    shape = (tokens * bench.replicas, *primes.shape)
    ids = (layout.offsets + rng.integers(0, primes, shape)).astype(np.int32)
    ids[0] = layout.offsets + primes - 1  # the last row of each column
    wanted = np.stack(
        [mesh_stacks.known_rows(i, ids[:, i], config.head_dim) for i in range(2)], 1
    )
    dead = rng.random(ids.shape) < 0.1
    ids[dead], wanted[dead] = -1, 0
    decoded = mxfp8.dequantize(*mxfp8.unpack(jnp.asarray(wanted)))
    forms = {
        name: form
        for name, form in bench.forms(("packed", "bfloat16"), tokens).items()
        # Whether the projection is cut makes no difference to rows.
        if not form.shard_projection
    }
    assert len(forms) >= 4
    programs = {}
    for name, form in forms.items():
        step = mesh_stacks.Step.of(bench.stack(form, expanded=False))
        placed = jax.device_put(ids, form.named(form.replica))
        fetch = functools.partial(fetch_with, step)
        programs[name] = fetch, (step.leaves, placed)
    for name, (rows,) in run_all(programs).items():
        got = rows[: len(ids)]
        if forms[name].row_format == "packed":
            np.testing.assert_array_equal(got, wanted, err_msg=name)
        else:
            bits = np.asarray(decoded).view(np.uint16)
            np.testing.assert_array_equal(got.view(np.uint16), bits, err_msg=name)


def fetch_with(step, leaves, ids):
    stack = step.merge(leaves)
    tables = [layer.embedding for layer in stack.layers.values()]
    return [fetch_rows(stack.sharding, tables, ids)]


@pytest.mark.parametrize("tokens", [5, 320])
def test_outputs_are_within_a_rounding_of_one_gpu_s(bench, tokens):
    config, count = bench.sizes.config, tokens * bench.replicas
    before, batches = mesh_stacks.make_hidden(config, count), bench.batches(tokens, 0)
    programs = {}
    for replica, batch in enumerate(batches):
        step = mesh_stacks.Step.of(bench.one)
        mine = before[replica * tokens : (replica + 1) * tokens]
        operands = step.leaves, mine, mesh_stacks.place_batch(None, [batch])
        programs[replica] = functools.partial(layer_outputs, step), operands
    for name, form in bench.forms(("packed",), tokens).items():
        step = mesh_stacks.Step.of(bench.stack(form))
        hidden = mesh_stacks.make_hidden(config, count, form)
        operands = step.leaves, hidden, mesh_stacks.place_batch(form, batches)
        programs[name] = functools.partial(layer_outputs, step), operands
    outputs = run_all(programs)
    alone = [outputs.pop(replica) for replica in range(bench.replicas)]
    before = np.asarray(before, np.float32)
    for layer in range(config.num_layers):
        whole = np.concatenate([x[layer].astype(np.float32) for x in alone])
        added = np.abs(whole - before)
        assert added.max() > 0.1
        # The product's sums may end in a neighbour of the value, since the library adds
        # in another order at another size; and the output is rounded once.
        bound = 2.0**-7 * (np.abs(whole) + added)
        for name, got in outputs.items():
            wrong = np.abs(got[layer].astype(np.float32) - whole) > bound
            assert not wrong.any(), (name, layer, int(wrong.sum()))


TRAINED = [
    ((2, 1), {}),
    ((2, 1), {"shard_projection": True}),
    ((2, 1), {"sequence_parallel": True}),
    ((2, 1), {"sequence_parallel": True, "shard_projection": True}),
    ((1, 2), {}),
    ((2, 1), {"cut": "rows"}),
]


@functools.cache
def float_stack() -> engram_jax.EngramStack:
    """One GPU's stack with float tables and projections, to train."""
    config = mesh_stacks.with_rows(mesh_stacks.SMALL, 24 * 1200)
    layout = EngramLayout.from_config(config)
    stack = mesh_stacks.make_stack(config, layout)
    for layer in stack.layers.values():
        table = layer.embedding
        rows = mxfp8.dequantize(table.weight[...], table.scale[...])
        layer.embedding = engram_jax.ParallelEngramEmbedding(rows.astype(jnp.float32))
    return stack


def gradients(stack, tokens) -> dict[str, np.ndarray]:
    """Differentiates by tables, projections, norms and hidden states."""
    for layer in stack.layers.values():
        layer.dequantize_projection(jnp.float32)
    graph, params, rest = nnx.split(stack, nnx.Param, ...)
    config = stack.config
    hidden = mesh_stacks.make_hidden(config, tokens).astype(jnp.float32)
    hidden = np.asarray(hidden)
    batch = mesh_stacks.make_batch(config, tokens, 0)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradient(params, hidden, batch):
        merged = nnx.merge(graph, params, rest)
        made = merged.batch(**batch)
        for layer_id in config.layer_ids:
            hidden = merged(layer_id, hidden, made)
        return jnp.square(hidden).mean()

    by_params, by_hidden = gradient(params, hidden, batch)
    found = {"hidden": np.asarray(by_hidden)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(by_params):
        found[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return found


@functools.cache
def one_gpu_s_gradients() -> dict[str, np.ndarray]:
    return gradients(nnx.clone(float_stack()), 24)


@pytest.mark.parametrize(("shape", "choices"), TRAINED)
def test_gradients_are_one_gpu_s(shape, choices):
    one, wanted = float_stack(), one_gpu_s_gradients()
    mesh = jax.make_mesh(
        shape,
        ("tp", "dp"),
        (jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:2],
    )
    sharding = EngramSharding.on(mesh, one.layout, **choices)
    got = gradients(one.shard(sharding), 24)
    assert got.keys() == wanted.keys()
    tables = [name for name in got if "embedding" in name]
    assert len(tables) == 2
    for layer, name in enumerate(sorted(tables)):
        shards = sharding.shards
        parts = got[name].reshape(shards.num_shards, -1, got[name].shape[1])
        sizes = shards.row_end[layer] - shards.row_start[layer]
        got[name] = np.concatenate(
            [part[:size] for part, size in zip(parts, sizes, strict=True)]
        )
    for name, whole in wanted.items():
        mine = got[name][: len(whole)]
        assert np.abs(whole).max() > 0, name
        limit = 2.0**-7 * np.abs(whole).max()
        np.testing.assert_allclose(mine, whole, atol=limit, rtol=0, err_msg=name)
