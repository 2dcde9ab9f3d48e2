"""Sizes that steer the GPU kernels: explicit before tuned before heuristic.

`tuned/<device>.json` holds what `scripts/tune.py` measured on that kind of GPU, with
its provenance. An entry answers for the shape it was measured at; other shapes and
other GPUs get a heuristic that follows from the same reasoning (shared memory, and all
CTAs resident at once).
"""

import dataclasses
import functools
import json
from importlib import resources
from typing import Any

import jax

_SMEM = 227 * 1024  # bytes of shared memory that the CTAs of one Hopper SM share
_SMEM_PER_CTA = 1024  # of which the system keeps this much for each
_SMS = 132


@dataclasses.dataclass(frozen=True)
class GateSizes:
    """How `gate_pallas` deals tokens to CTAs."""

    stages: int
    """Tokens whose rows a CTA has in flight; 0 is no ring and one token a CTA."""
    tokens: int = 1
    """Tokens of a CTA."""


@dataclasses.dataclass(frozen=True)
class WkvSizes:
    """How `wkv_pallas` cuts the product."""

    columns: int
    """Columns of the weight in one step of the ring, a multiple of 128."""
    chunk: int
    """Columns that are decoded at a time, a multiple of 64 that divides `columns`."""
    stages: int
    """Steps in flight."""
    tokens: int
    """Tokens of a CTA, a multiple of 8 up to 128."""
    ctas: int = 0
    """CTAs that the weight's rows are dealt to; 0 is one per multiprocessor."""


def _device() -> tuple[str, int | None]:
    """Give the kind, as JAX spells it, and the size of the device traced for."""
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return abstract.device_kind, abstract.num_cores
    device = jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return device.device_kind, getattr(device, "core_count", None)


def multiprocessors() -> int:
    """Count the multiprocessors of the device traced for; an H200's if unknown."""
    return _device()[1] or _SMS


@functools.cache
def tuned_table(kind: str) -> dict[str, Any]:
    """Read the tuned table of one kind of device; empty where there is none.

    Args:
        kind: as JAX spells it, "NVIDIA H200".

    Returns:
        The parsed JSON: "provenance", "wkv_kernel_up_to_tokens", and for each operation
        a list of entries with "shape", "max_tokens", "sizes" and the time in "us".
    """
    name = kind.lower().replace(" ", "_") + ".json"
    file = resources.files(__package__) / "tuned" / name
    return json.loads(file.read_text()) if file.is_file() else {}


def _tuned(operation: str, shape: tuple[int, ...], tokens: int) -> dict | None:
    """Give the sizes of the first entry that covers this many tokens."""
    for entry in tuned_table(_device()[0]).get(operation, ()):
        covers = entry["max_tokens"] is None or tokens <= entry["max_tokens"]
        if covers and tuple(entry["shape"]) == shape:
            return entry["sizes"]
    return None


def gate_sizes(tokens: int, streams: int, width: int, row_bytes: int) -> GateSizes:
    """Choose the sizes of `gate_pallas`.

    Args:
        tokens: T.
        streams: M.
        width: E.
        row_bytes: bytes of a stream, its key and the value together.

    Returns:
        The tuned sizes, or else: one CTA per token and stream while there are few;
        then CTAs that are all resident at once, up to eight tokens each; then four
        tokens each, which keeps the streams of a token together.
    """
    tuned = _tuned("gate", (streams, width), tokens)
    if tuned is not None:
        return GateSizes(**tuned)
    ring_bytes = 2 * row_bytes + 2 * _SMEM_PER_CTA
    if tokens * streams <= multiprocessors() or ring_bytes > _SMEM:
        return GateSizes(stages=0)
    at_once = multiprocessors() * min(2, _SMEM // ring_bytes)
    each = -(-tokens * streams // at_once)
    return GateSizes(stages=2, tokens=each if each <= 8 else 4)


def wkv_sizes(tokens: int, out_width: int, in_width: int) -> WkvSizes:
    """Choose the sizes of `wkv_pallas`.

    Args:
        tokens: T.
        out_width: N.
        in_width: K, C*D.

    Returns:
        The tuned sizes, or else the ones that suit V4.1's shape.
    """
    tuned = _tuned("wkv", (out_width, in_width), tokens)
    if tuned is not None:
        return WkvSizes(**tuned)
    padded = min(-(-max(tokens, 1) // 8) * 8, 64)
    if padded <= 16:
        return WkvSizes(256, 128, 3, padded)
    return WkvSizes(256, 128, 2, padded)


def wkv_prefers_library(tokens: int, *, expanded: bool = True) -> bool:
    """Say whether a bfloat16 product by the library beats `wkv_pallas` at this T.

    The kernel is bound by reading the weight's bytes up to its crossover; from there on
    arithmetic decides, and the library does that better, at the price of a bfloat16
    copy of the weight. Where that copy is made for this product alone, making it takes
    longer than the product, and the crossover lies higher.

    Args:
        tokens: T.
        expanded: whether the copy is there already.
    """
    default = {"expanded": 64, "not_expanded": 192}
    crossover = tuned_table(_device()[0]).get("wkv_kernel_up_to_tokens", default)
    return tokens > crossover["expanded" if expanded else "not_expanded"]
