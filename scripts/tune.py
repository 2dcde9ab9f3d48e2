"""Measure block sizes of the GPU kernels and write the tuned table of this GPU.

    python scripts/tune.py [--out FILE] [--operations gate wkv]

Every candidate is checked against the XLA form, then timed: CUPTI kernel time of all
that a call launches, the median of several, each after a read that empties the L2
cache; but for the gate of few tokens, whose operands the projection has just left
there. For each number of tokens the fastest is kept; the table also says up to how many
tokens the FP8 projection beats the library's bfloat16 product. Takes about two minutes.
"""

import argparse
import datetime
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import profiler
from v41 import V41_CONFIG

from engram_jax import EngramConfig, kernels
from engram_jax.kernels import gate_pallas, wkv_pallas
from engram_jax.kernels.block_sizes import GateSizes, WkvSizes

CONFIG = EngramConfig.from_dict(V41_CONFIG)
STREAMS, WIDTH = CONFIG.hc_mult, CONFIG.hidden_size
OUTPUTS, INPUTS = (STREAMS + 1) * WIDTH, CONFIG.n_hash_cols * CONFIG.head_dim
TUNED = Path(__file__).parent.parent / "engram_jax" / "kernels" / "tuned"
GATE_TOKENS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WKV_TOKENS = (1, 8, 16, 32, 64, 96, 128)
CROSSOVER_TOKENS = (32, 64, 96, 128, 192, 256)
FEW_TOKENS = 16
REPETITIONS = 9


@functools.cache
def _cache_filler() -> jax.Array:
    """256 MB, several times the L2 cache."""
    return jnp.ones((1 << 26,), jnp.float32)


@functools.cache
def _filling_kernels() -> frozenset[str]:
    _, run = profiler.measure(jax.jit(jnp.sum), aggregate=False)(_cache_filler())
    assert run, "CUPTI reported no kernel"
    return frozenset(name for name, _ in run)


def run_timed(
    function: Callable[..., jax.Array], *operands: jax.Array, cold: bool = True
) -> tuple[jax.Array, float]:
    """Give a call's result, and its kernel time in microseconds, cache cold or warm."""

    @jax.jit
    def program(filler, first, *rest):
        # Reads only: lines that were written would have to go back to memory, later.
        filled = jnp.sum(filler) if cold else 0.0
        filled, first = lax.optimization_barrier((filled, first))
        return function(first, *rest), filled

    measure = profiler.measure(program, aggregate=False, iterations=REPETITIONS)
    (result, _), runs = measure(_cache_filler(), *operands)
    assert runs, "CUPTI reported no kernel"
    filling = _filling_kernels()
    return result, statistics.median(
        1e3 * sum(ms for name, ms in run if name not in filling) for run in runs
    )


def _check(actual: jax.Array, expected: jax.Array) -> None:
    """Compare with the XLA form; a kernel that is wrong is not worth timing."""
    np.testing.assert_allclose(
        np.asarray(actual, np.float32),
        np.asarray(expected, np.float32),
        rtol=2.0**-6,
        atol=2.0**-6 * float(jnp.abs(expected.astype(jnp.float32)).mean()),
    )


def fastest(
    tokens, candidates, function, operands, expected, *, cold: bool = True
) -> dict[str, Any] | None:
    """Time each candidate; give the best as an entry of the table."""
    best = None
    for sizes in candidates:
        call = functools.partial(function, sizes=sizes)
        try:
            out, us = run_timed(call, *operands, cold=cold)
            _check(out, expected)
        except (AssertionError, ValueError, NotImplementedError) as error:
            print(f"  {sizes}: refused: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"  T={tokens} {us:8.2f} us  {sizes}", flush=True)
        if best is None or us < best["us"]:
            best = {"max_tokens": tokens, "sizes": asdict(sizes), "us": round(us, 2)}
    return best


def gate_operands(tokens: int) -> list[jax.Array]:
    """Draw hidden, kv, q_weight and k_weight."""
    shapes = (tokens, STREAMS, WIDTH), (tokens, OUTPUTS), *((STREAMS, WIDTH),) * 2
    keys = jax.random.split(jax.random.key(tokens), 4)
    return [
        jax.random.normal(key, shape, jnp.bfloat16)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def tune_gate() -> Iterator[dict[str, Any]]:
    """Tune the gate at V4.1's shape."""
    options = {"eps": CONFIG.rms_norm_eps, "clamp": 1e-6}
    function = functools.partial(gate_pallas.gate_pallas, **options)
    for tokens in GATE_TOKENS:
        operands = gate_operands(tokens)
        expected = jax.jit(functools.partial(kernels.gate, **options, backend="xla"))
        candidates = [GateSizes(stages=0)] if tokens * STREAMS <= 1024 else []
        candidates += [
            GateSizes(stages=2, tokens=each)
            for each in (1, 2, 4, 8)
            if each == 1 or tokens * STREAMS // each >= 128
        ]
        entry = fastest(
            tokens,
            candidates,
            function,
            operands,
            expected(*operands),
            cold=tokens > FEW_TOKENS,
        )
        if entry is not None:
            yield {"shape": [STREAMS, WIDTH], **entry}


@functools.cache
def wkv_weight() -> tuple[jax.Array, jax.Array]:
    """Draw e4m3 values (no NaN) and scales."""
    values, scales = jax.random.split(jax.random.key(0))
    values = jax.random.bits(values, (OUTPUTS, INPUTS), jnp.uint8)
    values = jnp.where((values & 0x7F) == 0x7F, values ^ 1, values)
    scale = jax.random.randint(scales, (OUTPUTS // 32, INPUTS // 32), 118, 130)
    values = lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    return values, scale.astype(jnp.uint8)


def wkv_rows(tokens: int) -> jax.Array:
    """Draw rows."""
    return jax.random.normal(jax.random.key(tokens), (tokens, INPUTS), jnp.bfloat16)


def tune_wkv() -> Iterator[dict[str, Any]]:
    """Tune the projection at V4.1's shape."""
    expected = jax.jit(functools.partial(kernels.wkv, backend="xla"))
    for tokens in WKV_TOKENS:
        operands = wkv_rows(tokens), *wkv_weight()
        tile = -(-tokens // 8) * 8
        candidates = [
            # With steps of 128 columns it took twice as long at every T.
            WkvSizes(256, 128, stages, tile, ctas)
            # As many steps of the ring as shared memory holds.
            for stages in [min(3, 222_000 // (256 * (256 + 2 * tile)))]
            # One CTA per multiprocessor, or as few as leave no warpgroup idle.
            for ctas in (0, OUTPUTS // 256)
            if stages > 1
        ]
        entry = fastest(
            tokens, candidates, wkv_pallas.wkv_pallas, operands, expected(*operands)
        )
        if entry is not None:
            yield {"shape": [OUTPUTS, INPUTS], **entry}


def find_crossover(entries: list[dict[str, Any]]) -> dict[str, int]:
    """Find the most tokens at which the kernel beats each library form."""
    weight, scale = wkv_weight()
    expanded = jax.jit(kernels.dequantize_weight)(weight, scale)
    up_to = {"expanded": 0, "not_expanded": 0}
    for tokens in CROSSOVER_TOKENS:
        rows = wkv_rows(tokens)
        sizes = next((e["sizes"] for e in entries if tokens <= e["max_tokens"]), None)
        sizes = WkvSizes(**sizes) if sizes else None
        call = functools.partial(wkv_pallas.wkv_pallas, sizes=sizes)
        _, us = run_timed(call, rows, weight, scale)
        xla = functools.partial(kernels.wkv, backend="xla")
        with_copy = functools.partial(xla, scale=None)
        for name, library in (
            ("expanded", run_timed(with_copy, rows, expanded)[1]),
            ("not_expanded", run_timed(xla, rows, weight, scale)[1]),
        ):
            print(f"  T={tokens} {us:8.2f} us, library {name} {library:8.2f} us")
            if us <= library:
                up_to[name] = tokens
    return up_to


def main() -> int:
    """Tune and write the table; keep what it had of other operations."""
    parser = argparse.ArgumentParser(description=__doc__)
    device = jax.devices()[0]
    name = device.device_kind.lower().replace(" ", "_") + ".json"
    parser.add_argument("--out", type=Path, default=TUNED / name)
    parser.add_argument("--operations", nargs="+", default=["gate", "wkv"])
    args = parser.parse_args()
    if device.platform != "gpu":
        print(f"tune.py needs a GPU; JAX found a {device.platform}", file=sys.stderr)
        return 1
    known = next((file for file in (args.out, TUNED / name) if file.exists()), None)
    table = json.loads(known.read_text()) if known else {}
    table["provenance"] = {
        "device": device.device_kind,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "jax": jax.__version__,
        "platform": device.client.platform_version.splitlines()[0],
        "method": f"scripts/tune.py: median of {REPETITIONS} CUPTI kernel times, each "
        "after a read that empties the L2 cache, but for the gate of up to "
        f"{FEW_TOKENS} tokens; all that a call launches",
    }
    if "gate" in args.operations:
        table["gate"] = list(tune_gate())
    if "wkv" in args.operations:
        table["wkv"] = list(tune_wkv())
        table["wkv_kernel_up_to_tokens"] = find_crossover(table["wkv"])
    if table.get("gate"):
        table["gate"][-1]["max_tokens"] = None  # the last sizes hold from there on
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(table, indent=1) + "\n")
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
