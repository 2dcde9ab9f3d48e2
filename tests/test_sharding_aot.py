"""The sharded decode step compiled for four H200s, on a machine without a GPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hlo_collectives import counts
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from engram_jax import (
    Engram,
    EngramConfig,
    EngramLayout,
    EngramSharding,
    EngramStack,
    NgramHashState,
    ParallelEngramEmbedding,
)
from engram_jax.exchange import fetch_rows

TOKENS = 32  # 16 of each of two replicas
BLOCK_SIZE = 16


def h200s(tp: int, dp: int) -> jax.sharding.Mesh:
    """Makes a mesh of GPUs on paper; skips without CUDA's compiler."""
    target = Path(__file__).parent / "kernels" / "h200_target_config.txtpb"
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=target.read_text(), topology=f"1x1x{tp * dp}"
        )
    except Exception as error:  # the plugin's absence shows as one of several types
        reason = f"no CUDA compiler plugin (pip install jax-cuda12-plugin): {error}"
        pytest.skip(reason=reason)
    return topologies.make_mesh(
        topo=topology, mesh_shape=(tp, dp), axis_names=("tp", "dp")
    )


def as_on(mesh: jax.sharding.Mesh):
    """Makes JAX trace as on that mesh inside a ``with``."""
    kinds = (AxisType.Auto,) * 2
    h200 = AbstractDevice("NVIDIA H200", 132, "gpu")
    return use_abstract_mesh(
        AbstractMesh(
            tuple(mesh.shape.values()), ("tp", "dp"), kinds, abstract_device=h200
        )
    )


def struct(sharding, shape, dtype, spec=None) -> jax.ShapeDtypeStruct:
    """An operand on the mesh that exists on paper only."""
    place = sharding.named(P() if spec is None else spec)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)


def stack_on_paper(config, layout, sharding) -> EngramStack:
    """A stack whose arrays have shapes and places only, at V4.1's full sizes."""
    width, inputs = config.head_dim, config.n_hash_cols * config.head_dim
    outputs = sharding.padded_width((config.hc_mult + 1) * config.hidden_size)
    layers = {}
    # Shapes stand in for arrays; the checkers of types want arrays.
    table_of: Any = ParallelEngramEmbedding
    layer_of: Any = Engram
    for index, layer_id in enumerate(config.layer_ids):
        rows = sharding.shards.num_rows(index)
        table = table_of(
            struct(sharding, (rows, width), jnp.float8_e4m3fn, sharding.table),
            struct(sharding, (rows, width // 32), jnp.uint8, sharding.table),
            sharding=sharding,
            layer_index=index,
        )
        norm = struct(sharding, (config.hc_mult, config.hidden_size), jnp.bfloat16)
        place = sharding.projection
        layers[layer_id] = layer_of(
            table,
            struct(sharding, (outputs, inputs), jnp.float8_e4m3fn, place),
            struct(sharding, (outputs // 32, inputs // 32), jnp.uint8, place),
            norm,
            norm,
            eps=config.rms_norm_eps,
        )
    token_map = np.arange(config.vocab_size) % layout.compressed_vocab_size
    return EngramStack(config, NgramHashState(layout, token_map), layers)


def steps_of(hlo: str) -> list[str]:
    """What a device runs: each instruction but those that stand for memory."""
    found = re.findall(r" = (?:\(.*?\)|\S+) ([\w-]+)\(", hlo[hlo.index("ENTRY") :])
    passive = ("parameter", "constant", "bitcast", "get-tuple-element", "tuple")
    return [name for name in found if name not in passive]


def kernels_of(hlo: str) -> list[str]:
    return [line for line in hlo.splitlines() if 'target="mosaic_gpu' in line]


@pytest.mark.parametrize(
    ("shape", "choices", "by_replica", "others"),
    [
        ((2, 1), {}, False, []),
        ((2, 1), {"masks": False}, False, []),
        ((1, 2), {}, True, []),
        # The device's first token follows from its number.
        ((2, 1), {"sequence_parallel": True}, False, ["partition-id", "fusion"]),
        ((1, 2), {}, False, ["partition-id", "fusion"]),
    ],
    ids=["tp", "tp-without-masks", "dp-by-replica", "sp", "dp"],
)
def test_a_decode_step_is_one_kernel_and_two_a_layer(
    v41, library_errors, shape, choices, by_replica, others
):
    """As on one GPU: nothing else runs on any device, and windows move with it."""
    choices = dict(choices)
    masks = choices.pop("masks", True)
    config = EngramConfig.from_dict(v41["config"])
    layout = EngramLayout.from_config(config)
    sharding = EngramSharding.on(h200s(*shape), layout, **choices)
    graph, state = nnx.split(stack_on_paper(config, layout, sharding))
    state = jax.tree.map(
        lambda x: struct(sharding, x.shape, x.dtype) if isinstance(x, jax.Array) else x,
        state,
    )

    def step(state, hidden, batch):
        stack = nnx.merge(graph, state)
        make = stack.replica_batch if by_replica else stack.batch
        batch, windows = make(**batch, advance_lookback=True)
        for layer_id in config.layer_ids:
            hidden = stack(layer_id, hidden, batch)
        return hidden, windows[: 1 + masks]

    replicas, lookback = (shape[1],) if by_replica else (), layout.max_ngram_size - 1
    spec = sharding.replica if by_replica else None

    def array(dtype, *shape):
        return struct(sharding, (*replicas, *shape), dtype, spec)

    batch = {
        "input_ids": array(jnp.int32, 16),
        "positions": array(jnp.int32, 16),
        "query_start_loc": array(jnp.int32, 17),
        "lookback_token_ids": array(jnp.int32, 16, lookback),
    }
    if masks:
        batch["lookback_dead_mask"] = array(jnp.bool_, 16, lookback)
    shape = (16 * math.prod(replicas), config.hc_mult, config.hidden_size)
    hidden = struct(sharding, shape, jnp.bfloat16, sharding.tokens)
    with as_on(sharding.mesh):
        compiled = jax.jit(step, donate_argnums=1).lower(state, hidden, batch).compile()
    hlo = compiled.as_text() or ""
    assert len(kernels_of(hlo)) == 1 + 2 * config.num_layers
    assert steps_of(hlo) == others + ["custom-call"] * (1 + 2 * config.num_layers)


@pytest.mark.parametrize("exchange", [None, "collective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_decode_step_compiles_for_four_h200s(
    v41, library_errors, sequence_parallel, exchange
):
    config = EngramConfig.from_dict(v41["config"])
    layout = EngramLayout.from_config(config)
    sharding = EngramSharding.on(
        h200s(2, 2),
        layout,
        sequence_parallel=sequence_parallel,
        shard_projection=not sequence_parallel,
        exchange=exchange and "all_to_all",
    )
    graph, state = nnx.split(stack_on_paper(config, layout, sharding))
    state = jax.tree.map(
        lambda x: struct(sharding, x.shape, x.dtype) if isinstance(x, jax.Array) else x,
        state,
    )

    def step(state, hidden, cache, batch):
        stack = nnx.merge(graph, state)
        batch, cache = stack.batch(**batch, slot_cache=cache, block_size=BLOCK_SIZE)
        for layer_id in config.layer_ids:
            hidden = stack(layer_id, hidden, batch)
        return hidden, cache

    def ints(*shape):
        return struct(sharding, shape, jnp.int32)

    batch = {
        "input_ids": ints(TOKENS),
        "positions": ints(TOKENS),
        "query_start_loc": ints(TOKENS + 1),
        "slot_mapping": ints(TOKENS),
        "block_table": ints(TOKENS, 64),
    }
    shape = (TOKENS, config.hc_mult, config.hidden_size)
    hidden = struct(sharding, shape, jnp.bfloat16, sharding.tokens)
    with as_on(sharding.mesh):
        compiled = (
            jax.jit(step, donate_argnames=("hidden", "cache"))
            .lower(state, hidden, ints(TOKENS * 1024), batch)
            .compile()
        )
    hlo = compiled.as_text() or ""
    # A cut projection's columns are gathered: those of keys and values of both layers,
    # which XLA may gather together.
    found = counts(hlo)
    if exchange is None:
        # Hashes and rows by one kernel, and no collective for them.
        assert sharding.exchange_for(TOKENS) == "peer_read"
        assert found.keys() == (set() if sequence_parallel else {"all-gather"})
        assert found.get("all-gather", 0) in ({0} if sequence_parallel else {1, 2})
        assert len(kernels_of(hlo)) == 5
        assert "u32[5,8]" in hlo  # the addresses of four shards and the own
    else:
        # Ids over dp, rows of both layers back at once, and their columns over tp.
        assert found["all-to-all"] == 2
        assert found.keys() <= {"all-gather", "all-to-all"}
        assert found.get("all-gather", 0) in ({0} if sequence_parallel else {2, 3})
        lines = [x for x in hlo.splitlines() if re.search(r"= .* all-to-all\(", x)]
        ids, rows = sorted(lines, key=lambda line: "= u8[" in line)
        assert "= s32[" in ids
        assert "= u8[" in rows
    # The kernels run, and no table is copied: 50 GB are operands, little is temporary.
    assert "mosaic_gpu" in hlo
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.argument_size_in_bytes > 50e9
    assert memory.temp_size_in_bytes < 1e9


@pytest.mark.parametrize(
    ("shape", "choices"),
    [
        ((1, 2), {"exchange": "all_to_all"}),
        ((1, 2), {"exchange": "all_to_all", "ids_exchange": "all_gather"}),
        ((1, 2), {"exchange": "all_gather"}),
        ((2, 1), {"exchange": "all_gather"}),
        ((2, 1), {"exchange": "all_to_all", "sequence_parallel": True}),
    ],
    ids=[
        "dp-all_to_all",
        "dp-ids-gathered",
        "dp-all_gather",
        "tp-all_gather",
        "sp-all_to_all",
    ],
)
def test_a_collective_s_rows_are_moved_once_on_each_side(
    v41, library_errors, shape, choices
):
    """One kernel writes the rows of both layers; arrived, they are put in order once.

    Pitfall: XLA puts bytes of two layers together, or in a collective's order, at a
    third of the card's copy rate.
    """
    config = EngramConfig.from_dict(v41["config"])
    layout = EngramLayout.from_config(config)
    sharding = EngramSharding.on(h200s(*shape), layout, **choices)
    tables = [
        layer.embedding
        for layer in stack_on_paper(config, layout, sharding).layers.values()
    ]
    graph, state = nnx.split(nnx.List(tables))

    def fetch(state, ids):
        return fetch_rows(sharding, list(nnx.merge(graph, state)), ids)

    ids = struct(sharding, (4096, 2, config.n_hash_cols), jnp.int32, sharding.replica)
    with as_on(sharding.mesh):
        hlo = jax.jit(fetch).lower(state, ids).compile().as_text() or ""
    steps = [line for line in hlo[hlo.index("ENTRY") :].splitlines() if "= u8[" in line]
    named = [line.split("(")[0].split()[-1] for line in steps]
    moved = [
        name.removesuffix("-done")  # other work beside the collective makes it two
        for name in named
        if name not in ("bitcast", "parameter")
    ]
    collective = choices["exchange"].replace("_", "-")
    assert moved == ["custom-call", collective, "fusion"]
    # Every device reads its columns of the ids where they lie: beside its number and
    # its bounds (while the ids travel) nothing runs before the rows are read.
    before = steps_of(hlo)[: steps_of(hlo).index("custom-call")]
    own = ["partition-id", "fusion"]
    if "ids_exchange" in choices:
        assert before == ["all-gather-start", *own, "all-gather-done"]
    elif shape[1] > 1:
        # None has to know its number, since senders know whom they send to.
        assert before == ["fusion", "all-to-all"]
    else:
        assert before == own
