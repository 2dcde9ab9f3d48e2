"""Which rows a shard holds, the choices of a sharding, and what it refuses."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from mesh_cases import abstract_mesh, mesh, stack24
from small_stack import make_stack

import engram_jax
from engram_jax import EngramLayout, EngramSharding
from engram_jax.shards import TableShards

# --- Which rows a shard holds ---------------------------------------------------------


def v41_layout(v41) -> EngramLayout:
    return EngramLayout.from_config(engram_jax.EngramConfig.from_dict(v41["config"]))


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 7, 8, 16, 24, 25, 32, 4096])
def test_shards_cover_every_row_once(v41, shards):
    layout = v41_layout(v41)
    cut = TableShards.choose(layout, shards)
    for layer, rows in enumerate(layout.num_rows):
        assert cut.row_start[layer, 0] == 0
        assert cut.row_end[layer, -1] == rows
        np.testing.assert_array_equal(cut.row_start[layer, 1:], cut.row_end[layer, :-1])
        held = (cut.row_end - cut.row_start)[layer]
        assert cut.rows_per_shard[layer] == held.max()
        if cut.cut == "heads":
            firsts = np.append(layout.offsets[layer], rows)
            assert set(cut.row_start[layer].tolist()) <= set(firsts.tolist())
    assert ("columns" in cut.reason) == (shards <= 25 or cut.cut == "rows")
    assert ("idle" in cut.reason) == (shards in (5, 7, 16))


def test_shards_that_would_hold_nothing_are_refused(v41, library_errors):
    layout = v41_layout(v41)
    with pytest.raises(
        ValueError, match=r"1 devices would have no rows. Use cut='rows'"
    ):
        TableShards.choose(layout, 25, "heads")
    small = stack24().layout
    with pytest.raises(ValueError, match="too many for layer 1's 1774 rows"):
        TableShards.choose(small, 1773)
    with pytest.raises(ValueError, match="cut is 'columns'"):
        TableShards.choose(small, 2, "columns")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_shards is 0"):
        TableShards.choose(small, 0)
    one_head = make_stack(n_heads=1, max_ngram_size=2, vocab_base=101).layout
    assert TableShards.choose(one_head, 4).cut == "rows"


def test_shard_numbers_are_tensor_major():
    """Shard = tp_rank * dp_size + dp_rank, also where the mesh has dp first."""
    devices = jax.make_mesh((3, 2), ("dp", "tp"), (AxisType.Auto,) * 2)
    sharding = EngramSharding.on(devices, stack24().layout)
    table = stack24().layers[1].embedding.shard(sharding, 0).weight[...]
    rows = sharding.shards.rows_per_shard[0]
    by_device = {
        s.device: (s.index[0].start or 0) // rows for s in table.addressable_shards
    }
    for dp in range(3):
        for tp in range(2):
            assert by_device[devices.devices[dp, tp]] == tp * 3 + dp


def test_partition_specs_go_by_shape_letters():
    layout = stack24().layout
    sharding = EngramSharding.on(abstract_mesh(2, 4), layout)
    assert sharding.spec("T M E") == P("dp", None, None)
    assert sharding.spec("R D") == P(("tp", "dp"), None)
    assert sharding.spec("N CD") == P()
    cut = EngramSharding.on(abstract_mesh(2, 4), layout, shard_projection=True)
    assert cut.spec("N CD") == P("tp", None)
    assert sharding.spec("M E") == P()
    sequence = EngramSharding.on(abstract_mesh(2, 4), layout, sequence_parallel=True)
    assert sequence.spec("T M E") == P(("dp", "tp"), None, None)
    assert sequence.spec("N CD") == P()
    alone = EngramSharding.on(abstract_mesh(2, 1), layout)
    assert alone.spec("T M E") == P()


@pytest.mark.parametrize("data_first", [False, True])
def test_each_process_reads_its_own_rows_only(data_first):
    devices = mesh(2, 3)
    if data_first:
        devices = jax.make_mesh(
            (3, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:6]
        )
    sharding = EngramSharding.on(devices, stack24().layout)
    seen = []

    def read(start, end):
        seen.append((start, end))
        return np.zeros((end - start, 32), np.uint8)

    table = sharding.place_table(0, read, 32, np.uint8)
    chex.assert_shape(table, (sharding.shards.num_rows(0), 32))
    assert sorted(seen) == list(sharding.owned_rows(0))
    assert sum(end - start for start, end in seen) == stack24().layout.num_rows[0]
    seen.clear()
    copied = EngramSharding.on(devices, stack24().layout, spread=False)
    copied.place_table(0, read, 32, np.uint8)
    assert seen == list(copied.owned_rows(0))  # once, although three replicas hold it
    assert len(seen) == 2


# --- Choices and refusals -------------------------------------------------------------


def test_choices_give_their_reasons():
    layout = stack24().layout

    def choose(tp, dp, **choices):
        sharding = EngramSharding.on(abstract_mesh(tp, dp), layout, **choices)
        assert {name for name, _ in sharding.reasons} == {
            "cut",
            "exchange",
            "peer_read",
            "ids_exchange",
            "shard_projection",
        }
        assert hash(sharding) == hash(dataclasses.replace(sharding))
        return sharding.shards.cut, sharding.exchange, sharding.ids_exchange

    assert choose(8, 1) == ("heads", "all_gather", "all_gather")
    assert choose(1, 2) == ("heads", "all_to_all", "all_to_all")
    assert choose(2, 4) == ("heads", "all_to_all", "all_to_all")
    gathered = choose(2, 4, ids_exchange="all_gather")
    assert gathered == ("heads", "all_to_all", "all_gather")
    assert choose(32, 1) == ("rows", "all_reduce", "all_gather")
    assert choose(8, 4) == ("rows", "reduce_scatter", "all_gather")
    assert choose(2, 4, spread=False) == ("heads", "all_gather", "all_gather")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"tensor_axis": "model"}, "none named 'model'; name the right one"),
        ({"data_axis": "tp"}, "'tp' is named as tensor_axis and as data_axis"),
        ({"exchange": "all_reduce"}, "cut by heads take 'all_gather' or 'all_to_all'"),
        ({"cut": "rows", "exchange": "all_to_all"}, "take 'all_reduce' or"),
        ({"cut": "rows", "ids_exchange": "all_to_all"}, "needs the ids of all columns"),
        ({"ids_exchange": "none"}, "ids_exchange is 'none'"),
        ({"row_format": "float32"}, "row_format is 'float32'"),
        ({"cut": "blocks"}, "cut is 'blocks'"),
    ],
)
def test_choices_that_cannot_work_are_refused(choices, message, library_errors):
    with pytest.raises(ValueError, match=message):
        EngramSharding.on(abstract_mesh(2, 2), stack24().layout, **choices)


def test_tables_that_no_device_could_hold_are_refused(v41):
    sharding = EngramSharding.on(abstract_mesh(2), v41_layout(v41))
    needed = sharding.check_memory(264, limit=200 << 30)
    assert needed == 264 * sum(sharding.shards.rows_per_shard)
    with pytest.raises(ValueError, match=r"take 101,379,7.* About 3 devices would do"):
        sharding.check_memory(264, limit=80 << 30)


def test_stacks_are_put_on_a_mesh_once():
    one = stack24()
    sharding = EngramSharding.on(mesh(2, 1), one.layout)
    stack = one.shard(sharding)
    with pytest.raises(ValueError, match="lies on a mesh already"):
        stack.shard(sharding)
    other = EngramSharding.on(mesh(2, 1), one.layout, spread=False, cut="rows")
    layers = {1: stack.layers[1], 3: one.layers[3].shard(other, 1)}
    with pytest.raises(ValueError, match="in different ways"):
        engram_jax.EngramStack(one.config, one.hash_state, layers)
