"""The plan of a mesh: what a run allocates, and what its compiled program moves."""

from __future__ import annotations

import json

import jax
import pytest
from flax import nnx
from hlo_collectives import collectives, total_received
from jax.sharding import NamedSharding
from mesh_cases import mesh, stack24
from small_stack import random_hidden

from engram_jax import EngramConfig, EngramSharding
from engram_jax.__main__ import main
from engram_jax.plan import make_plan, transfers


@pytest.fixture(scope="module")
def config(v41) -> EngramConfig:
    return EngramConfig.from_dict(v41["config"])


CASES = [
    ((1, 1), {}),
    ((4, 1), {}),
    ((4, 1), {"shard_projection": True}),
    ((1, 4), {}),
    ((2, 2), {"exchange": "all_gather"}),
    ((2, 3), {}),
    ((2, 3), {"ids_exchange": "all_gather"}),
    ((2, 2), {"sequence_parallel": True}),
    ((2, 2), {"sequence_parallel": True, "shard_projection": True}),
    ((2, 2), {"cut": "rows", "shard_projection": True}),
    ((4, 1), {"cut": "rows", "exchange": "all_reduce"}),
    ((2, 2), {"spread": False}),
]


@pytest.mark.parametrize(
    ("shape", "choices"),
    CASES,
    ids=["-".join(map(str, (*s, *c.values()))) for s, c in CASES],
)
def test_figures_are_those_of_a_run(shape, choices):
    """Bytes on every device as allocated, collectives as in the compiled program."""
    (tp, dp), tokens = shape, 6
    config, devices = stack24().config, mesh(tp, dp)
    sharding = EngramSharding.on(devices, stack24().layout, **choices)
    graph, state = nnx.split(stack24().shard(sharding))
    plan = make_plan(config, tp=tp, dp=dp, tokens=tokens, **choices)
    for device in devices.devices.flat:
        held = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(state)
            for shard in leaf.addressable_shards
            if shard.device == device
        )
        assert held == plan.device_bytes["device"]

    def step(state, ids, positions, starts, hidden):
        stack = nnx.merge(graph, state)
        batch = stack.batch(ids, positions, starts)
        return stack(3, stack(1, hidden, batch), batch)

    total = tokens * dp
    ids = jax.ShapeDtypeStruct((total,), "int32")
    starts = jax.ShapeDtypeStruct((2,), "int32")
    hidden = jax.ShapeDtypeStruct(
        random_hidden(total).shape,
        "bfloat16",
        sharding=NamedSharding(devices, sharding.tokens),
    )
    hlo = jax.jit(step).lower(state, ids, ids, starts, hidden).compile().as_text()
    moves = transfers(sharding, config, tokens)
    expected = [
        (move.collective, move.devices, move.result_bytes)
        for move in moves
        for _ in range(move.times)
    ]
    assert sorted(collectives(hlo)) == sorted(expected)
    (chosen,) = [choice for choice in plan.choices if choice.chosen]
    assert chosen.bytes_per_step == total_received(hlo)
    assert chosen.bytes_per_token == chosen.bytes_per_step / tokens


@pytest.mark.parametrize(
    ("tp", "dp"), [(1, 1), (2, 1), (8, 1), (8, 2), (8, 4), (4, 64), (8, 512), (1, 4096)]
)
def test_plans_go_up_to_4096_devices(config, tp, dp):
    plan = make_plan(config, tp=tp, dp=dp, tokens=32, devices_per_process=8)
    rows = 384_006_168 + 384_016_682
    assert plan.devices == tp * dp == plan.shards
    assert plan.table_bytes * plan.shards >= rows * 264
    assert plan.table_bytes * plan.shards <= rows * 264 * 1.34
    assert plan.device_bytes["process"] == 8 * plan.device_bytes["device"]
    assert plan.cut == ("heads" if tp * dp <= 24 else "rows")
    assert [choice.chosen for choice in plan.choices].count(True) == 1
    if tp * dp == 1:
        assert not any(choice.bytes_per_step for choice in plan.choices)


def test_packed_rows_are_the_least_and_264_bytes_each(config):
    """One replica of 4 gets 18 of 24 columns from the others, for both layers."""
    plan = make_plan(config, dp=4, tokens=16)
    collectives = [c for c in plan.choices if c.exchange != "peer_read"]
    best = min(collectives, key=lambda choice: choice.bytes_per_step)
    assert best.chosen
    assert (best.exchange, best.row_format) == ("all_to_all", "packed")
    ids, rows = best.transfers
    assert rows.received == 16 * 2 * 18 * 264
    assert ids.received == 3 * 16 * 2 * 6 * 4  # of this device's columns


@pytest.mark.parametrize(
    ("choices", "tokens_of_a_device"),
    [
        ({"dp": 4}, 16),  # its own replica's
        ({"tp": 4}, 16),  # all ranks read all of them
        ({"tp": 4, "sequence_parallel": True}, 4),
        ({"tp": 2, "dp": 2, "cut": "rows"}, 16),
        ({"tp": 4, "dp": 2, "spread": False}, 16),
    ],
)
def test_peer_reads_are_264_bytes_a_remote_row_and_nothing_else(
    config, choices, tokens_of_a_device
):
    """As 256 and 8 bytes of the tables, in whichever form rows are then wanted."""
    plan = make_plan(config, tokens=16, exchange="peer_read", **choices)
    both = [choice for choice in plan.choices if choice.exchange == "peer_read"]
    assert [choice.chosen for choice in both] == [True, False]
    for choice in both:
        rows, *others = choice.transfers
        assert rows.received == tokens_of_a_device * 2 * 18 * 264
        assert {move.what for move in others} <= {"kv"}
    assert "as asked; it needs FP8 tables" in plan.reasons["exchange"]
    chosen = make_plan(config, tokens=16, **choices)
    assert not any(c.chosen for c in chosen.choices if c.exchange == "peer_read")
    assert "up to 32768 tokens of a device" in chosen.reasons["peer_read"]


def test_placements_take_what_they_say(config):
    size = make_plan(config, tp=8).table_bytes

    def taken(placement):
        plan = make_plan(
            config,
            tp=8,
            placement=placement,
            devices_per_process=2,
            processes_per_node=4,
        )
        assert plan.table_bytes == size
        return plan.device_bytes["device"] - plan.weight_bytes, plan.host_bytes

    assert taken("device") == (size, {"process": 0, "node": 0})
    assert taken("pinned_host") == (0, {"process": 2 * size, "node": 8 * size})
    whole = sum(config.num_embeddings) * (config.head_dim + config.head_dim // 32)
    assert taken("host") == (0, {"process": whole, "node": 4 * whole})
    assert taken("shared_host") == (0, {"process": 0, "node": whole})
    assert taken("mapped_file") == (0, {"process": 0, "node": 0})


def test_command_prints_text_and_json(v41, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(v41["config"]))
    assert (
        main(["plan", str(tmp_path), "--tp", "2", "--dp", "4", "--tokens", "64"]) == 0
    )
    text = capsys.readouterr().out
    assert "8 devices, tables cut by heads into 8 shards (8 shards for 24" in text
    assert "->all_to_all      packed" in text
    assert "Chosen (->): each device needs its own tokens' rows only." in text
    assert "ids  all-to-all over 4 devices: 4,608 bytes" in text
    assert "peer_read: up to 32768 tokens of a device, where they can" in text
    peers = ["--tp", "2", "--dp", "4", "--exchange", "peer_read"]
    assert main(["plan", str(path), *peers]) == 0
    text = capsys.readouterr().out
    assert "->peer_read       packed" in text
    assert "rows peer-read over 8 devices: 11,088 bytes" in text
    assert main(["plan", str(path), "--json", "--sequence-parallel", "--tp", "8"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["shards"] == 8
    assert plan["reasons"]["exchange"]
    whole = ["plan", str(path), "--tp", "2", "--ids-exchange", "all_gather"]
    assert main(whole) == 0
    text = capsys.readouterr().out
    assert "kv " not in text
    assert "projection: whole on every device, which is faster but" in text
    assert main([*whole, "--cut-projection"]) == 0
    text = capsys.readouterr().out
    assert "kv   all-gather over 2 devices" in text
    assert "projection: as asked" in text
    assert main(["plan", str(path)]) == 0
    assert "nothing travels" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "0"], "tp is 0; it must be at least 1"),
        (["--tp", "25", "--cut", "heads"], "1 devices would have no rows"),
        (["--device-memory", "80"], "About 3 devices would do"),
        (["--tp", "2", "--exchange", "all_reduce"], "cut by heads take"),
    ],
)
def test_plans_that_cannot_work_say_why(
    v41, tmp_path, capsys, library_errors, arguments, message
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(v41["config"]))
    assert main(["plan", str(path), *arguments]) == 1
    assert message in capsys.readouterr().out
    assert main(["plan", str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().out
    with pytest.raises(ValueError, match="placement is 'disk'"):
        make_plan(EngramConfig.from_dict(v41["config"]), placement="disk")  # pyright: ignore[reportArgumentType]
