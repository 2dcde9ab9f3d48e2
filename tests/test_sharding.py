"""Stacks on a mesh: the same outputs as on one device, inside a user's own model."""

from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hlo_collectives import counts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_cases import mesh, stack24
from small_stack import random_hidden, random_ids

from engram_jax import EngramSharding, pad_replicas
from engram_jax.mesh_stack import state_shardings

TOKENS = 13
BATCH = {
    "input_ids": random_ids(TOKENS),
    "positions": np.r_[0:6, 3:10].astype(np.int32),
    "query_start_loc": np.array([0, 6, 13], np.int32),
    "dead_mask": np.arange(TOKENS) % 5 == 3,
    "lookback_token_ids": np.array([[-1, -1, -1], [7, 8, 9]], np.int32),
}


def run_both(stack, hidden, batch):
    """Runs both layers with something in between, as a decoder would."""
    batch = stack.batch(**batch)
    hidden = stack(1, hidden, batch)
    return stack(3, jnp.tanh(hidden), batch)


model: Any = nnx.jit(run_both)


@pytest.fixture(scope="module")
def expected():
    return np.asarray(model(stack24(), random_hidden(TOKENS), BATCH))


def assert_one_rounding(actual, expected) -> None:
    """Holds where two bfloat16 arrays differ by at most one unit in the last place."""
    got, wanted = (np.asarray(a).view(np.int16).astype(int) for a in (actual, expected))
    assert np.abs(got - wanted).max(initial=0) <= 1


# --- A stack in a jitted model --------------------------------------------------------

STACKS = [
    ((1, 1), AxisType.Auto, {}, {}),
    ((3, 1), AxisType.Auto, {}, {"all-gather": 1}),
    ((3, 1), AxisType.Auto, {"shard_projection": True}, {"all-gather": 3}),
    ((1, 5), AxisType.Explicit, {}, {"all-to-all": 2}),
    (
        (1, 5),
        AxisType.Explicit,
        {"ids_exchange": "all_gather"},
        {"all-gather": 1, "all-to-all": 1},
    ),
    ((2, 2), AxisType.Explicit, {}, {"all-gather": 1, "all-to-all": 2}),
    (
        (2, 2),
        AxisType.Explicit,
        {"shard_projection": True},
        {"all-gather": 3, "all-to-all": 2},
    ),
    (
        (2, 2),
        AxisType.Explicit,
        {"sequence_parallel": True},
        {"all-to-all": 2},
    ),
    (
        (2, 2),
        AxisType.Auto,
        {"sequence_parallel": True, "shard_projection": True},
        {"all-gather": 1, "all-to-all": 4},
    ),
    (
        (2, 2),
        AxisType.Auto,
        {"cut": "rows", "shard_projection": False},
        {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1},
    ),
]


@pytest.mark.parametrize(
    ("shape", "kind", "choices", "collectives"),
    STACKS,
    ids=["-".join(map(str, (*s, k.name, *c.values()))) for s, k, c, _ in STACKS],
)
def test_a_model_gives_one_device_s_outputs(
    expected, shape, kind, choices, collectives
):
    """13 tokens of two requests with history and dead tokens, over odd meshes."""
    devices = mesh(shape[0], shape[1], kind)
    stack = stack24().shard(EngramSharding.on(devices, stack24().layout, **choices))
    graph, state = nnx.split(stack)

    def run(state, hidden, batch):
        return model(nnx.merge(graph, state), hidden, batch)

    replicated = NamedSharding(devices, P())
    arguments = jax.device_put((random_hidden(TOKENS), BATCH), replicated)
    with jax.set_mesh(devices):
        compiled = jax.jit(run).lower(state, *arguments).compile()
        output = compiled(state, *arguments)
    assert output.shape == expected.shape
    assert_one_rounding(output, expected)
    # The hidden states came replicated, so XLA may add what lays the output out again.
    found = counts(compiled.as_text())
    for name, count in collectives.items():
        assert found[name] >= count
    if not collectives:
        assert not found  # no collective for axes of size 1


def test_explicit_shardings_and_donated_hidden_states(expected):
    """`state_shardings` says how to lay out the module's arrays in the user's jit."""
    devices = mesh(2, 2)
    sharding = EngramSharding.on(devices, stack24().layout, shard_projection=True)
    graph, state = nnx.split(stack24().shard(sharding))
    places = state_shardings(sharding, nnx.merge(graph, state))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x.sharding, state), places)
    by_token = NamedSharding(devices, P())
    run = jax.jit(
        lambda state, hidden: model(nnx.merge(graph, state), hidden, BATCH),
        in_shardings=(places, by_token),
        out_shardings=by_token,
        donate_argnums=1,
    )
    assert_one_rounding(run(state, random_hidden(TOKENS)), expected)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_hidden_states_stay_where_their_tokens_are(kind):
    """No collective but the exchange where tokens divide and lie over the data axis."""
    devices = mesh(1, 4, kind)
    one = stack24()
    stack = one.shard(EngramSharding.on(devices, one.layout))
    batch = {name: x for name, x in BATCH.items() if name != "dead_mask"} | {
        "input_ids": random_ids(16),
        "positions": np.r_[0:6, 3:13].astype(np.int32),
        "query_start_loc": np.array([0, 6, 16], np.int32),
    }
    hidden = random_hidden(16)
    placed = jax.device_put(hidden, NamedSharding(devices, P("dp")))
    graph, state = nnx.split(stack)

    def run(state, hidden):
        return model(nnx.merge(graph, state), hidden, batch)

    with jax.set_mesh(devices):
        compiled = jax.jit(run).lower(state, placed).compile()
        output = compiled(state, placed)
    assert output.sharding.is_equivalent_to(NamedSharding(devices, P("dp")), 3)
    assert counts(compiled.as_text()) == {"all-to-all": 2}
    assert_one_rounding(output, model(one, hidden, batch))


@pytest.mark.parametrize("second", [AxisType.Auto, AxisType.Explicit])
def test_a_users_other_axes_stay_as_they_are(second):
    """Hidden states cut by width over an axis of the user's come back so; with x64."""
    kinds = (AxisType.Explicit, second, AxisType.Explicit)
    devices = jax.make_mesh((2, 2, 2), ("width", "tp", "dp"), kinds)
    one = stack24()
    stack = one.shard(EngramSharding.on(devices, one.layout, shard_projection=True))
    batch = {
        "input_ids": random_ids(8),
        "positions": np.arange(8, dtype=np.int32),
        "query_start_loc": np.array([0, 8], np.int32),
    }
    place = NamedSharding(devices, P("dp", None, "width"))
    hidden = jax.device_put(random_hidden(8), place)
    graph, state = nnx.split(stack)
    with jax.enable_x64(True), jax.set_mesh(devices):
        run = jax.jit(lambda state, *args: model(nnx.merge(graph, state), *args))
        output = run(state, hidden, batch)
    assert output.sharding.is_equivalent_to(place, 3)
    assert output.dtype == jnp.bfloat16
    assert_one_rounding(output, model(one, random_hidden(8), batch))


def test_layers_work_alone_and_eagerly(expected):
    """Without `batch`, a layer fetches its own rows; gates can be looked at."""
    one = stack24()
    stack = one.shard(EngramSharding.on(mesh(2, 2), one.layout, shard_projection=True))
    batch = one.batch(**BATCH)
    hidden, ids = random_hidden(TOKENS), one.hash_ids(1, batch)
    for name in ("__call__", "gate_values"):
        results = [
            nnx.jit(lambda layer, *a, name=name: getattr(layer, name)(*a))(
                layer, hidden, ids, batch.token_mask
            )
            for layer in (one.layers[1], stack.layers[1])
        ]
        chex.assert_trees_all_close(*results, rtol=2**-7)
    eager = stack.batch(**BATCH)
    np.testing.assert_array_equal(eager.hash_ids, batch.hash_ids)
    np.testing.assert_array_equal(eager.token_mask, batch.token_mask)


def test_batches_of_no_tokens(expected):
    stack = stack24().shard(
        EngramSharding.on(mesh(2, 2), stack24().layout, shard_projection=True)
    )
    output = stack(1, random_hidden(0), stack.dummy_batch(0))
    assert output.shape == (0, 2, 48)


def test_slot_caches_and_decode_steps(expected):
    """A donated cache through a jitted step gives the hashes of one pass."""
    one = stack24()
    stack = one.shard(EngramSharding.on(mesh(2, 2), one.layout))
    ids = random_ids(6)
    whole = one.batch(ids, np.arange(6), [0, 6])

    def step(stack, token, position, cache):
        batch, cache = stack.batch(
            token,
            position,
            np.array([0, 1]),
            slot_cache=cache,
            slot_mapping=position,
            block_table=np.zeros((1, 1), np.int32),
            block_size=8,
        )
        return batch.hash_ids, batch.rows, cache

    traced_once = chex.assert_max_traces(step, 1)
    run: Any = nnx.jit(traced_once, donate_argnames="cache")
    cache = stack.init_slot_cache(8)
    for place in range(6):
        where = np.array([place], np.int32)
        hashes, rows, cache = run(stack, ids[place : place + 1], where, cache)
        np.testing.assert_array_equal(hashes[0], whole.hash_ids[place])
        table = one.layers[3].embedding
        np.testing.assert_array_equal(
            rows[0, 1], table.lookup_packed(whole.hash_ids[place, 1])
        )


def test_scan_over_microbatches_under_checkpoint(expected):
    """The exchange runs in a loop body, is recomputed, and is differentiated."""
    one = stack24()
    stacks = (
        one,
        one.shard(EngramSharding.on(mesh(2, 2), one.layout, shard_projection=True)),
    )
    ids = random_ids(12).reshape(3, 4)
    hidden = random_hidden(12, dtype=jnp.float32).reshape(3, 4, 2, 48)
    place, starts = np.arange(4, dtype=np.int32), np.array([0, 4], np.int32)

    def gradient(stack):
        graph, state = nnx.split(stack)

        @jax.checkpoint
        def layers(state, hidden, ids):
            stack = nnx.merge(graph, state)
            batch = stack.batch(ids, place, starts)
            return stack(3, stack(1, hidden, batch), batch)

        def loss(hidden, state):
            def body(total, part):
                return total + jnp.square(layers(state, *part)).sum(), None

            return jax.lax.scan(body, jnp.float32(0), (hidden, ids))[0]

        return jax.jit(jax.grad(loss))(hidden, state)

    whole, spread = map(gradient, stacks)
    np.testing.assert_allclose(spread, whole, atol=2**-7 * np.abs(whole).max())


# --- Replicas with batches of their own -----------------------------------------------


def test_replicas_hash_their_own_batches_and_one_may_be_empty(expected):
    """Pitfall: a rank without tokens skips a collective. 5, 0, 1 share 6 slots."""
    one = stack24()
    stack = one.shard(EngramSharding.on(mesh(2, 3), one.layout, shard_projection=True))
    own = [
        {
            "input_ids": random_ids(length, seed=length),
            "positions": np.arange(length, dtype=np.int32) + 2,
            "query_start_loc": np.array([0, length], np.int32),
            "lookback_token_ids": np.array([[3, 4, -1]], np.int32),
        }
        for length in (5, 1)
    ]
    padded = pad_replicas([own[0], None, own[1]], slot=6)
    hidden = random_hidden(18)

    @nnx.jit
    def run(stack, hidden, padded):
        batch = stack.replica_batch(**padded)
        return stack(3, hidden, batch), batch.token_mask

    output, mask = run(stack, hidden, padded)
    assert np.asarray(mask).tolist() == [1] * 5 + [0] * 7 + [1] + [0] * 5
    single = nnx.jit(lambda s, h, b: s(3, h, s.batch(**b)))
    assert_one_rounding(output[:5], single(one, hidden[:5], own[0]))
    np.testing.assert_array_equal(output[5:12], hidden[5:12])
    assert_one_rounding(output[12:13], single(one, hidden[12:13], own[1]))
    caches = stack.init_slot_cache(8, replicas=True)
    del padded["lookback_token_ids"]
    _, caches = stack.replica_batch(
        **padded,
        slot_cache=caches,
        slot_mapping=np.tile(np.arange(6, dtype=np.int32), (3, 1)),
        block_table=np.zeros((3, 1, 1), np.int32),
        block_size=8,
    )
    assert caches.shape == (3, 8)
    assert (np.asarray(caches) != -2).sum(axis=1).tolist() == [5, 0, 1]


def test_replica_batches_that_do_not_fit_are_refused():
    one = stack24()
    stack = one.shard(EngramSharding.on(mesh(1, 2), one.layout))
    batch: dict[str, Any] = {
        "input_ids": [1] * 9,
        "positions": list(range(9)),
        "query_start_loc": [0, 9],
    }
    with pytest.raises(ValueError, match=r"replica 1 has 9 tokens; the slot .* has 8"):
        pad_replicas([None, batch], slot=8)
    with pytest.raises(ValueError, match="replica 0 has 1 requests"):
        pad_replicas([batch, None], requests=0)
    with pytest.raises(ValueError, match="first axis must be the 2 replicas"):
        stack.replica_batch(**pad_replicas([batch, None, None]))
    with pytest.raises(ValueError, match="on one device use batch"):
        one.replica_batch(**pad_replicas([batch]))
    wrong = dict(batch, input_ids=[1] * 8 + [4_000_000_000])
    with pytest.raises(ValueError, match="token ids must be within"):
        stack.replica_batch(**pad_replicas([batch, wrong]))
    with pytest.raises(ValueError, match="token ids must be within"):
        stack.batch(**wrong)


# --- Training on a mesh ---------------------------------------------------------------

TRAINED = [
    ((1, 2), {}),
    ((2, 2), {}),
    ((2, 2), {"shard_projection": True}),
    ((2, 2), {"sequence_parallel": True}),
    ((4, 1), {"cut": "rows", "shard_projection": True}),
    ((2, 4), {"sequence_parallel": True, "shard_projection": True}),
]


def stack_gradients(stack, hidden) -> list[np.ndarray]:
    """Differentiates by every parameter and by the hidden states."""
    for layer in stack.layers.values():
        layer.dequantize_projection(jnp.float32)
    graph, params, rest = nnx.split(stack, nnx.Param, ...)

    def loss(params, hidden):
        merged = nnx.merge(graph, params, rest)
        batch = merged.batch(**BATCH)
        hidden = merged(3, merged(1, hidden, batch), batch)
        return jnp.square(hidden).mean()

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, hidden)
    # Without the rows that pad a projection's shards.
    return [np.asarray(x)[: 3 * 48] for x in jax.tree.leaves(gradients)]


@pytest.fixture(scope="module")
def one_device_gradients() -> list[np.ndarray]:
    hidden = random_hidden(TOKENS, dtype=jnp.float32)
    return stack_gradients(nnx.clone(stack24()), hidden)


@pytest.mark.parametrize(
    ("shape", "choices"),
    TRAINED,
    ids=["-".join(map(str, (*s, *c.values()))) for s, c in TRAINED],
)
def test_gradients_of_a_stack_are_one_device_s(one_device_gradients, shape, choices):
    """Pitfall: gradients counted twice. Packed rows are constants, weights are not."""
    hidden = random_hidden(TOKENS, dtype=jnp.float32)
    sharding = EngramSharding.on(mesh(*shape), stack24().layout, **choices)
    got = stack_gradients(stack24().shard(sharding), hidden)
    for mine, whole in zip(got, one_device_gradients, strict=True):
        assert np.abs(whole).max() > 0
        np.testing.assert_allclose(mine, whole, atol=2.0**-7 * np.abs(whole).max())


def test_projection_and_gate_train_on_a_mesh_while_the_table_stays():
    one = stack24()
    stack = one.shard(EngramSharding.on(mesh(2, 2), one.layout, shard_projection=True))
    for layer in stack.layers.values():
        layer.dequantize_projection()
    optimizer = nnx.Optimizer(stack, optax.adam(1e-2), wrt=nnx.Param)
    hidden = random_hidden(TOKENS, dtype=jnp.float32)

    @nnx.jit
    def step(stack, optimizer):
        def loss(stack):
            batch = stack.batch(**BATCH)
            return jnp.square(stack(1, hidden, batch) - 1).mean()

        value, grads = nnx.value_and_grad(loss)(stack)
        optimizer.update(stack, grads)
        return value

    before = np.asarray(stack.layers[1].embedding.weight[...]).view(np.uint8)
    losses = [float(step(stack, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]
    after = np.asarray(stack.layers[1].embedding.weight[...]).view(np.uint8)
    np.testing.assert_array_equal(before, after)
    stack.layers[1].quantize_projection()
    assert stack.layers[1].wkv_scale is not None
