"""What placements take against what is there: figures, refusals, one decision."""

from __future__ import annotations

import dataclasses
import functools
import logging
from pathlib import Path
from typing import get_args

import mesh_cases
import numpy as np
import pytest
from golden_checkpoint import TINY

from engram_jax import EngramConfig, checkpoint, load_engram, memory_plan, processes
from engram_jax.checkpoint_files import Placement, placement_bytes
from engram_jax.host_storage import MappedFileTable
from engram_jax.memory_plan import (
    MemoryPlan,
    MemoryRoom,
    choose_placement,
    host_room,
    plan_memory,
    shared_room,
)
from engram_jax.processes import processes_of_node

CONFIG = EngramConfig.from_pretrained(TINY)
TABLES = (2914 + 3746) * (64 + 2)
REST = placement_bytes(CONFIG, "mapped_file")["device"]
ROOM = MemoryRoom(
    host=10 * TABLES,
    host_limit="the machine",
    shared=10 * TABLES,
    shared_directory=Path("/tmp"),
    device=10 * TABLES,
    pinned=64 << 30,
    on_cpu=False,
)


def plan(placement, processes=1, **changes) -> MemoryPlan:
    room = dataclasses.replace(ROOM, **changes)
    return plan_memory(CONFIG, placement, processes=processes, room=room)


def test_bytes_per_process_and_per_node():
    taken = {
        name: (p.device - REST, p.process, p.node)
        for name in get_args(Placement)
        for p in [plan(name, processes=4)]
    }
    assert taken == {
        "device": (TABLES, 0, 0),
        "pinned_host": (0, TABLES, 4 * TABLES),
        "host": (0, TABLES, 4 * TABLES),
        "shared_host": (0, 0, TABLES),
        "mapped_file": (0, 0, 0),
    }
    on_cpu = plan("device", processes=2, on_cpu=True)
    assert (on_cpu.device, on_cpu.process) == (0, TABLES + REST)
    assert on_cpu.node == 2 * on_cpu.process


@pytest.mark.parametrize(
    ("placement", "changes", "message"),
    [
        (
            "device",
            {"device": REST + TABLES - 1},
            "device memory, but 0.001 GB are available",
        ),
        ("host", {"host": TABLES - 1}, "limit: the machine"),
        ("host", {"processes": 11}, "takes 0.005 GB of host memory, but 0.004 GB"),
        ("pinned_host", {"host": TABLES - 1}, "limit: the machine"),
        ("pinned_host", {"processes": 11}, "host memory"),
        ("pinned_host", {"pinned": TABLES - 1}, "Set XLA_PJRT_GPU_HOST_MEMORY"),
        ("shared_host", {"shared": TABLES - 1}, "are free in /tmp"),
        ("shared_host", {"host": TABLES - 1}, "host memory"),
        ("shared_host", {"shared_directory": Path("/no")}, "/no does not exist"),
    ],
)
def test_refusals_have_figures(placement, changes, message):
    """Pitfall: memory runs out while loading; the plan refuses it with figures."""
    found = plan(placement, **changes)
    assert len(found.problems) == 1
    assert message in found.problems[0]
    assert not plan("mapped_file", **changes).problems


def test_plan_says_what_one_copy_would_save():
    assert not plan("host").notes
    assert not plan("shared_host", processes=3).notes
    wanted = 'placement="shared_host" would take 0.001 GB less: one copy of the tables'
    assert plan("host", processes=3).notes == (f"{wanted} for the node's 3 processes.",)
    with pytest.raises(MemoryError, match=r"0\.004 GB less: one .* 11 processes"):
        choose_placement([plan("host", processes=11)])


def test_processes_of_a_mesh_count_together(v41_token_map, monkeypatch, caplog):
    """Pitfall: each of a node's processes alone would fit."""
    monkeypatch.setattr(checkpoint, "processes_of_node", lambda: 2)
    load = functools.partial(
        load_engram, TINY, tokenizer=v41_token_map, mesh=mesh_cases.mesh(1, 2)
    )
    with caplog.at_level(logging.INFO, "engram_jax"):
        load(placement="host")
    wanted = "would take 0.000 GB less: one copy of the tables for the node's 2 pro"
    assert wanted in caplog.text  # 439,560 bytes
    room = 2 * REST + TABLES  # less than two tables
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: room)
    with pytest.raises(
        MemoryError, match=r"takes 0\.002 GB of host memory.*2 processe"
    ):
        load(placement="host")
    stack = load(placement=("host", "mapped_file"))
    table = next(iter(stack.layers.values())).embedding
    assert isinstance(table.storage, MappedFileTable)


def test_processes_of_one_machine_are_counted(monkeypatch, tmp_path):
    assert processes_of_node() == 1
    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    monkeypatch.setattr(
        processes.multihost_utils,
        "process_allgather",
        lambda own: np.stack([own, own, own[::-1]]),
    )
    assert processes_of_node() == 2
    monkeypatch.setattr(processes, "_BOOT_ID", tmp_path / "none")
    assert processes_of_node() == 2


def test_own_memory_needs_no_shared_memory():
    """Pitfall: a container's /dev/shm has 64 MB."""
    plans = [plan(name, shared=64) for name in ("shared_host", "host", "mapped_file")]
    assert choose_placement(plans).placement == "host"


def test_a_table_that_is_shared_already_needs_no_room():
    room = dataclasses.replace(ROOM, shared=0, host=0)
    found = plan_memory(CONFIG, "shared_host", already_shared=TABLES, room=room)
    assert not found.problems


def test_first_placement_that_fits_is_chosen():
    plans = [
        plan("device", device=0),
        plan("shared_host", shared=0),
        plan("mapped_file"),
    ]
    assert choose_placement(plans).placement == "mapped_file"
    assert choose_placement([plan("device"), *plans]).placement == "device"
    with pytest.raises(MemoryError, match=r"device memory.*shared.*mapped_file"):
        choose_placement(plans[:2])


def test_all_processes_choose_alike(monkeypatch):
    """Pitfall: one node's /dev/shm is full, the other's is not."""
    monkeypatch.setattr(memory_plan.jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        memory_plan.multihost_utils,
        "process_allgather",
        lambda own: np.stack([own, np.array([0, 1], own.dtype)]),
    )
    plans = [plan("shared_host"), plan("mapped_file")]
    assert choose_placement(plans, together=True).placement == "mapped_file"
    assert choose_placement(plans).placement == "shared_host"
    monkeypatch.setattr(
        memory_plan.multihost_utils,
        "process_allgather",
        lambda own: np.stack([own, 0 * own]),
    )
    with pytest.raises(MemoryError, match="another process"):
        choose_placement(plans[:1], together=True)


def test_load_engram_falls_back_where_told_so(v41_token_map, monkeypatch):
    monkeypatch.setattr(checkpoint, "available_host_memory", lambda: REST + 9)
    stack = load_engram(
        TINY,
        tokenizer=v41_token_map,
        placement=("device", "shared_host", "mapped_file"),
    )
    table = next(iter(stack.layers.values())).embedding
    assert isinstance(table.storage, MappedFileTable)
    with pytest.raises(ValueError, match="must be one of"):
        load_engram(TINY, tokenizer=v41_token_map, placement=())


# --- Limits ---------------------------------------------------------------------------


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def limits(tmp_path):
    """Files that look like the kernel's, and what `host_room` makes of them."""
    meminfo = write(tmp_path / "meminfo", "MemTotal: 9 kB\nMemAvailable: 1000 kB\n")
    own = tmp_path / "own"

    def room():
        return host_room(meminfo, own, tmp_path / "groups")

    return tmp_path, room


def test_limits_of_unified_control_groups_count_also_those_above(limits):
    root, room = limits
    write(root / "own", "0::/outer/inner\n")
    assert room() == (1_024_000, "the machine")
    write(root / "groups/outer/inner/memory.max", "max\n")
    write(root / "groups/outer/inner/memory.current", "1000\n")
    assert room() == (1_024_000, "the machine")
    write(root / "groups/outer/memory.max", "600000\n")
    write(root / "groups/outer/memory.current", "200000\n")
    bytes_, limit = room()
    assert (bytes_, limit.endswith("groups/outer")) == (400_000, True)
    # Page cache can be dropped.
    write(root / "groups/outer/memory.stat", "anon 5\ninactive_file 50000\n")
    assert room()[0] == 450_000


def test_limits_of_separate_control_groups(limits):
    root, room = limits
    write(root / "own", "9:cpu:/x\n4:memory:/job\n0::/\n")
    write(root / "groups/memory/job/memory.limit_in_bytes", "300000\n")
    write(root / "groups/memory/job/memory.usage_in_bytes", "100000\n")
    assert room()[0] == 200_000
    write(root / "groups/memory/memory.limit_in_bytes", "100\n")
    write(root / "groups/memory/memory.usage_in_bytes", "200\n")
    assert room()[0] == 0  # over the limit


def test_this_machine():
    room = MemoryRoom.measure()
    assert 1 << 20 < room.host < 1 << 50
    assert room.on_cpu
    assert shared_room(Path("/no/such/directory")) == 0
