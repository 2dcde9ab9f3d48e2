"""The sizes that the kernels take: explicit before tuned before heuristic."""

from __future__ import annotations

import json
import re
from importlib import resources

import jax
import pytest
from kernels import aot

from engram_jax.kernels import block_sizes
from engram_jax.kernels.block_sizes import GateSizes, WkvSizes

SMEM = 227 * 1024
TABLES = [
    file
    for file in (resources.files("engram_jax.kernels") / "tuned").iterdir()
    if file.name.endswith(".json")
]


@pytest.fixture
def table(monkeypatch):
    """Puts a table in place of the H200's."""

    def put(**contents):
        monkeypatch.setattr(block_sizes, "tuned_table", lambda kind: contents)

    return put


def wkv_bytes(sizes: WkvSizes, in_width: int) -> int:
    """Shared memory of a CTA with four warpgroups: the ring, ones, scales, barriers."""
    step = 256 * sizes.columns + 2 * sizes.tokens * sizes.columns
    return sizes.stages * step + 1024 + 4 * 2 * -(-in_width // 4096) * 128 + 1024


def test_tuned_sizes_hold_for_their_shape_and_up_to_their_tokens(table):
    entry = {"shape": [4, 5120], "sizes": {"stages": 3, "tokens": 5}}
    last = {"shape": [4, 5120], "sizes": {"stages": 2, "tokens": 9}}
    table(gate=[{**entry, "max_tokens": 16}, {**last, "max_tokens": None}])
    row_bytes = 6 * 5120
    assert block_sizes.gate_sizes(16, 4, 5120, row_bytes) == GateSizes(3, 5)
    assert block_sizes.gate_sizes(17, 4, 5120, row_bytes) == GateSizes(2, 9)
    assert block_sizes.gate_sizes(1, 2, 5120, row_bytes) == GateSizes(0)


def test_gate_heuristic_fits_the_card(table):
    table()
    for tokens in (1, 33, 64, 300, 1000, 5000):
        sizes = block_sizes.gate_sizes(tokens, 4, 5120, 6 * 5120)
        assert sizes.stages in (0, 2)
        assert 1 <= sizes.tokens <= 8
        # A row so wide that two tokens' rows outgrow shared memory: no ring.
        assert block_sizes.gate_sizes(tokens, 4, 16_384, 12 * 16_384).stages == 0


def test_wkv_heuristic_fits_shared_memory(table):
    table()
    for tokens in (1, 8, 9, 16, 17, 40, 64, 65, 1000):
        sizes = block_sizes.wkv_sizes(tokens, 25_600, 6144)
        assert sizes.columns % 128 == 0
        assert sizes.columns % sizes.chunk == 0
        assert sizes.chunk % 64 == 0
        assert sizes.tokens % 8 == 0
        assert sizes.tokens >= min(tokens, 64)
        assert wkv_bytes(sizes, 6144) <= SMEM


def test_library_takes_over_above_the_crossover(table):
    table(wkv_kernel_up_to_tokens={"expanded": 64, "not_expanded": 192})
    assert not block_sizes.wkv_prefers_library(64)
    assert block_sizes.wkv_prefers_library(65)
    assert not block_sizes.wkv_prefers_library(192, expanded=False)
    assert block_sizes.wkv_prefers_library(193, expanded=False)


def test_device_is_the_one_that_code_is_traced_for():
    assert block_sizes.multiprocessors() == 132  # a CPU has none; an H200's are taken
    assert block_sizes.tuned_table(jax.devices()[0].device_kind) == {}
    with aot.abstract_hopper():
        assert block_sizes.multiprocessors() == 132
        assert block_sizes._device()[0] == "NVIDIA H200"


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.name)
def test_committed_tables_are_whole(file):
    table = json.loads(file.read_text())
    assert {"device", "date", "jax", "method"} <= set(table["provenance"])
    kind = table["provenance"]["device"]
    assert file.name == kind.lower().replace(" ", "_") + ".json"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", table["provenance"]["date"])
    for operation, kind in (("gate", GateSizes), ("wkv", WkvSizes)):
        entries = table.get(operation, [])
        bounds = [entry["max_tokens"] or 2**31 for entry in entries]
        assert bounds == sorted(bounds)
        for entry in entries:
            sizes = kind(**entry["sizes"])
            if isinstance(sizes, WkvSizes):
                assert wkv_bytes(sizes, entry["shape"][1]) <= SMEM
                assert sizes.tokens % 8 == 0
