"""The benchmark of host tables: its order, what it compares, and what it refuses."""

from __future__ import annotations

import functools

import benchmark_host_tables as host
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engram_jax.host_storage import PinnedHostTable

ROWS = 52_000


@pytest.fixture(scope="module")
def pinned():
    return host.make_pinned(ROWS)


@pytest.fixture
def reads_itself(monkeypatch):
    """Lets the device read pinned memory, as a Hopper GPU does."""
    monkeypatch.setattr(PinnedHostTable, "reads_on_device", True)


def test_the_direct_lookup_is_known_by_its_program(pinned, reads_itself):
    stack, direct = host.make_stack(pinned), host.direct_lookup(pinned)
    most = PinnedHostTable.direct_tokens
    assert host.chooses_direct(stack, direct, 1)
    assert host.chooses_direct(stack, direct, most)
    assert not host.chooses_direct(stack, direct, most + 1)  # gathered by the host


def test_another_program_is_not_the_direct_lookup(pinned, reads_itself):
    stack, direct = host.make_stack(pinned), host.direct_lookup(pinned)

    @jax.jit
    def and_more(state, hashes):
        return direct.func(state, hashes) + jnp.uint8(0)

    assert not host.chooses_direct(
        stack, functools.partial(and_more, direct.args[0]), 1
    )
    other = host.make_stack(host.make_records(ROWS)).layers[1].embedding
    assert not host.chooses_direct(stack, host.direct_lookup(other), 1)


def test_where_the_host_gathers_nothing_is_direct(pinned):
    stack, direct = host.make_stack(pinned), host.direct_lookup(pinned)
    assert not host.chooses_direct(stack, direct, 1)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Makes tables and rounds small."""
    monkeypatch.setattr(host, "CPU_ROWS", ROWS)
    monkeypatch.setattr(host, "MANY", 96)
    monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(host, "STEPS", 5)


def test_what_is_required_comes_first(capsys):
    names = [result.name for result in host.host_tables()]
    assert names[:3] == [
        "direct, T = 96",
        "as chosen, T = 96",
        "as chosen, T = 96, over direct",
    ]
    assert len(names) == len(set(names))
    assert {
        "as chosen, T = 1, over direct",
        "exposed split, 0 early copies, T = 96",
    } <= (set(names))
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "[pinned table",
        "[table of records",
        "[96 tokens",
        "[step beside rows of 16 tokens",
        "[step beside rows of 96 tokens",
        "[1 tokens",
        "[16 tokens",
        "[other forms",
    ]


def test_the_direct_lookup_is_not_measured_against_itself(reads_itself, capsys):
    names = [result.name for result in host.host_tables()]
    assert not [name for name in names if name.startswith("as chosen, T = 1")]
    said = capsys.readouterr().out
    for tokens in (1, 16):
        assert f"as chosen, T = {tokens}: the direct lookup" in said


def test_rows_of_another_batch_show_behind_a_step(pinned, monkeypatch):
    stack = host.make_stack(host.make_records(ROWS))
    assert not list(host.measure_step(stack, ROWS, 4))  # CPUs are not judged
    known = host.known_sum
    monkeypatch.setattr(host, "known_sum", lambda ids: known(ids) + np.uint32(1))
    with pytest.raises(AssertionError, match="rows of another batch"):
        list(host.measure_step(stack, ROWS, 4))


def test_sums_are_those_of_numpy():
    hashes = host.random_hashes(3, 64_000_000, 1)
    rows = np.concatenate(host.table_bytes(hashes.reshape(-1)), axis=1)
    wanted = rows.view(np.uint32).sum(dtype=np.uint32)
    assert int(host.known_sum(hashes)) == wanted
