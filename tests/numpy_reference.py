"""States what Engram computes, in plain loops over Python integers and float64.

An oracle for the tests: written from the definition of each operation alone, slow, and
independent of JAX and of the package under test. Numbers in a narrow format are bit
patterns here: bfloat16 as uint16, e4m3 and E8M0 as uint8.

Shapes use the letters of the README: T tokens, R requests, L layers, n the largest
n-gram size, H heads, C = (n - 1) * H columns, D row width, M streams, E hidden size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

BLOCK = 32
UNKNOWN = -1
UNWRITTEN = -2
DEAD = -1


# --- Layout ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where each hash column's rows lie, and what multiplies each token."""

    primes: np.ndarray  # int64 [L, n-1, H]
    offsets: np.ndarray  # int64 [L, C]
    multipliers: np.ndarray  # int64 [L, n]

    @property
    def max_ngram_size(self) -> int:
        """The largest n-gram size n."""
        return self.multipliers.shape[1]


def is_prime(number: int) -> bool:
    """Divides by everything up to the square root."""
    return number > 1 and all(
        number % divisor for divisor in range(2, math.isqrt(number) + 1)
    )


def make_layout(
    layer_ids: list[int], n: int, heads: int, vocab_base: int, vocab_size: int
) -> Layout:
    """Takes primes in order, each once, restarting at ``vocab_base`` for each size."""
    seen: set[int] = set()
    primes = np.zeros((len(layer_ids), n - 1, heads), np.int64)
    for layer in range(len(layer_ids)):
        for size in range(n - 1):
            candidate = vocab_base - 1
            for head in range(heads):
                candidate += 1
                while candidate in seen or not is_prime(candidate):
                    candidate += 1
                seen.add(candidate)
                primes[layer, size, head] = candidate
    flat = primes.reshape(len(layer_ids), -1)
    offsets = np.cumsum(flat, axis=1) - flat
    bound = max(1, (2**63 - 1) // vocab_size // 2)
    multipliers = np.stack(
        [
            2 * np.random.default_rng(10007 * i).integers(0, bound, n, np.int64) + 1
            for i in layer_ids
        ]
    )
    return Layout(primes, offsets, multipliers)


# --- Hash -----------------------------------------------------------------------------


def hash_window(window: list[int], layout: Layout) -> np.ndarray:
    """Hashes compressed ids, the current token first: int32 [L, C]."""
    layers, sizes, heads = layout.primes.shape
    rows = np.zeros((layers, sizes * heads), np.int32)
    for layer in range(layers):
        rolling = window[0] * int(layout.multipliers[layer, 0])
        for size in range(sizes):
            rolling ^= window[size + 1] * int(layout.multipliers[layer, size + 1])
            for head in range(heads):
                column = size * heads + head
                prime = int(layout.primes[layer, size, head])
                offset = int(layout.offsets[layer, column])
                rows[layer, column] = rolling % prime + offset
    return rows


def compress(token_id: int, token_map: np.ndarray, dead: bool) -> int:
    """Gives a token's compressed id, or DEAD for a dead or impossible one."""
    if dead or not 0 <= token_id < len(token_map):
        return DEAD
    return int(token_map[token_id])


def write_slots(
    slot_cache: np.ndarray,
    input_ids: np.ndarray,
    query_start_loc: np.ndarray,
    token_map: np.ndarray,
    slot_mapping: np.ndarray,
    dead_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Writes the batch's compressed ids into their slots; padding writes nothing."""
    cache = np.array(slot_cache)
    for token in range(int(query_start_loc[-1])):
        slot = int(slot_mapping[token])
        if slot >= 0:
            dead = dead_mask is not None and bool(dead_mask[token])
            cache[slot] = compress(int(input_ids[token]), token_map, dead)
    return cache


def hash_batch(
    input_ids: np.ndarray,
    positions: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    layout: Layout,
    token_map: np.ndarray,
    pad_id: int,
    dead_mask: np.ndarray | None = None,
    lookback_token_ids: np.ndarray | None = None,
    lookback_dead_mask: np.ndarray | None = None,
    slot_cache: np.ndarray | None = None,
    block_table: np.ndarray | None = None,
    block_size: int = 0,
) -> np.ndarray:
    """Hashes a ragged batch: int32 [T, L, C]; padding tokens give -1.

    ``slot_cache`` is the cache after the batch's own writes.
    """
    layers, sizes, heads = layout.primes.shape
    out = np.full((len(input_ids), layers, sizes * heads), -1, np.int32)

    def read(request: int, token: int, back: int) -> int:
        """Gives a compressed id, DEAD, or UNWRITTEN for an unknown place."""
        start = int(query_start_loc[request])
        if token - back >= start:
            dead = dead_mask is not None and bool(dead_mask[token - back])
            return compress(int(input_ids[token - back]), token_map, dead)
        before = start - (token - back) - 1
        if lookback_dead_mask is not None and lookback_dead_mask[request, before]:
            return DEAD
        if lookback_token_ids is not None:
            token_id = int(lookback_token_ids[request, before])
            if token_id != UNKNOWN:
                return compress(token_id, token_map, False)
        if slot_cache is not None:
            assert block_table is not None
            place = int(positions[token]) - back
            block, within = divmod(place, block_size)
            if block < block_table.shape[1] and block_table[request, block] >= 0:
                return int(
                    slot_cache[int(block_table[request, block]) * block_size + within]
                )
        return UNWRITTEN

    for request in range(len(query_start_loc) - 1):
        for token in range(
            int(query_start_loc[request]), int(query_start_loc[request + 1])
        ):
            window = []
            stopped = False
            for back in range(layout.max_ngram_size):
                if int(positions[token]) - back < 0:
                    stopped = True
                value = DEAD if stopped else read(request, token, back)
                if value == DEAD:
                    stopped = True
                window.append(pad_id if value < 0 else value)
            out[token] = hash_window(window, layout)
    return out


def hash_sequence(
    input_ids: np.ndarray,
    *,
    layout: Layout,
    token_map: np.ndarray,
    pad_id: int,
    dead_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Hashes one whole request from position 0: int32 [S, L, C]."""
    length = len(input_ids)
    return hash_batch(
        input_ids,
        np.arange(length),
        np.array([0, length]),
        layout=layout,
        token_map=token_map,
        pad_id=pad_id,
        dead_mask=dead_mask,
    )


def advance_lookback(
    lookback_token_ids: np.ndarray,
    lookback_dead_mask: np.ndarray,
    input_ids: np.ndarray,
    query_start_loc: np.ndarray,
    *,
    vocab_size: int,
    dead_mask: np.ndarray | None = None,
    num_accepted: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Gives each request's window after its chunk, or after its accepted tokens.

    A token that is none stays dead: its id would read as unknown otherwise.
    """

    def is_dead(token: int) -> bool:
        masked = dead_mask is not None and bool(dead_mask[token])
        return masked or not 0 <= int(input_ids[token]) < vocab_size

    ids, dead = np.array(lookback_token_ids), np.array(lookback_dead_mask)
    for request in range(len(query_start_loc) - 1):
        start, end = int(query_start_loc[request]), int(query_start_loc[request + 1])
        if num_accepted is not None:
            end = start + int(num_accepted[request])
        newest_first = [
            (int(input_ids[t]), is_dead(t)) for t in reversed(range(start, end))
        ]
        newest_first += zip(
            lookback_token_ids[request], lookback_dead_mask[request], strict=True
        )
        for place in range(ids.shape[1]):
            ids[request, place], dead[request, place] = newest_first[place]
    return ids, dead


# --- Numbers --------------------------------------------------------------------------


def e4m3_to_float(code: int) -> float:
    """Decodes float8_e4m3fn: no infinity, 0x7f and 0xff are NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e8m0_to_float(code: int) -> float:
    """Decodes a scale byte: 2^(byte - 127), and 255 is NaN."""
    return math.nan if code == 255 else 2.0 ** (code - 127)


E4M3 = np.array([e4m3_to_float(code) for code in range(256)])
E8M0 = np.array([e8m0_to_float(code) for code in range(256)])


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Rounds float64 to float32 and that to bfloat16, both to nearest even: uint16."""
    with np.errstate(over="ignore", invalid="ignore"):
        single = np.asarray(values, np.float64).astype(np.float32)
    bits = single.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits >> 16) | 0x40
    return np.where(np.isnan(single), nan, rounded).astype(np.uint16)


def bf16_to_float(bits: np.ndarray) -> np.ndarray:
    """Decodes bfloat16 bit patterns to float64."""
    wide = np.asarray(bits, np.uint16).astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):
        return wide.view(np.float32).astype(np.float64)


def dequantize(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Multiplies e4m3 bytes [.., D] by their E8M0 bytes [.., D/32], in float64."""
    return E4M3[values] * np.repeat(E8M0[scale], BLOCK, axis=-1)


def lookup(
    weight: np.ndarray,
    scale: np.ndarray,
    ids: np.ndarray,
    row_start: int = 0,
    row_end: int | None = None,
) -> np.ndarray:
    """Reads rows as bfloat16 bits [.., D]; an id of another shard reads as zeros."""
    end = row_start + len(weight) if row_end is None else row_end
    out = np.zeros((*ids.shape, weight.shape[1]), np.uint16)
    for place in np.ndindex(ids.shape):
        row = int(ids[place])
        if row_start <= row < end:
            local = row - row_start
            out[place] = bf16_bits(dequantize(weight[local], scale[local]))
    return out


def lookup_packed(
    weight: np.ndarray,
    scale: np.ndarray,
    ids: np.ndarray,
    row_start: int = 0,
    row_end: int | None = None,
) -> np.ndarray:
    """Reads rows as bytes, values then scales: uint8 [.., D + D/32]."""
    end = row_start + len(weight) if row_end is None else row_end
    width = weight.shape[1] + scale.shape[1]
    out = np.zeros((*ids.shape, width), np.uint8)
    for place in np.ndindex(ids.shape):
        row = int(ids[place])
        if row_start <= row < end:
            out[place] = np.concatenate(
                [weight[row - row_start], scale[row - row_start]]
            )
    return out


def quantize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises blocks of 32 numbers to e4m3 bytes and one E8M0 byte each.

    The scale is the smallest power of two that brings the block's largest magnitude to
    448 or less; values round to nearest even.
    """
    finite = [code for code in range(128) if not math.isnan(E4M3[code])]
    codes = np.zeros(values.shape, np.uint8)
    scales = np.zeros((*values.shape[:-1], values.shape[-1] // BLOCK), np.uint8)
    for place in np.ndindex(scales.shape):
        columns = slice(place[-1] * BLOCK, (place[-1] + 1) * BLOCK)
        block = np.asarray(values[(*place[:-1], columns)], np.float64)
        largest = float(np.max(np.abs(block)))
        if not math.isfinite(largest):
            scales[place] = 255
            codes[(*place[:-1], columns)] = 0x7F
            continue
        exponent = -127
        if largest == 0:
            exponent = 0
        else:
            while largest / 2.0**exponent > 448:
                exponent += 1
        scales[place] = exponent + 127
        for index, number in enumerate(block):
            magnitude = abs(number) / 2.0**exponent
            code = min(finite, key=lambda c: (abs(E4M3[c] - magnitude), c & 1))
            negative = math.copysign(1, number) < 0
            codes[(*place[:-1], columns.start + index)] = code | (0x80 * negative)
    return codes, scales


def f8_128x4(scales: np.ndarray) -> np.ndarray:
    """Lays scales [rows, groups] out for a scaled matrix unit: uint8, flat."""
    rows, groups = scales.shape
    wide = -(-groups // 4)
    out = np.zeros(-(-rows // 128) * wide * 512, np.uint8)
    for r in range(rows):
        for g in range(groups):
            tile = (r // 128 * wide + g // 4) * 512
            out[tile + r % 32 * 16 + r % 128 // 32 * 4 + g % 4] = scales[r, g]
    return out


# --- Projection and gate --------------------------------------------------------------


def wkv(rows: np.ndarray, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Projects float64 rows [T, C*D] by e4m3 bytes with a scale per 32x32 block."""
    blocks = np.repeat(np.repeat(E8M0[scale], BLOCK, axis=0), BLOCK, axis=1)
    matrix = E4M3[weight] * blocks[: weight.shape[0], : weight.shape[1]]
    return rows @ matrix.T


def gate_values(
    hidden: np.ndarray,
    kv: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    *,
    eps: float,
    clamp: float = 1e-6,
) -> np.ndarray:
    """Computes the gates [T, M] in float64."""
    tokens, streams, width = hidden.shape
    out = np.zeros((tokens, streams))
    for t in range(tokens):
        for m in range(streams):
            h, key = hidden[t, m], kv[t, m * width : (m + 1) * width]
            r_h = 1 / math.sqrt(float(np.mean(h * h)) + eps)
            r_k = 1 / math.sqrt(float(np.mean(key * key)) + eps)
            dot = float(np.sum(h * q_weight[m] * k_weight[m] * key))
            dot = dot * r_h * r_k / math.sqrt(width)
            slope = math.copysign(math.sqrt(max(abs(dot), clamp)), dot)
            shut = math.exp(-abs(slope))  # of the sign that cannot overflow
            out[t, m] = (1 if slope > 0 else shut) / (1 + shut)
    return out


def gate(
    hidden: np.ndarray,
    kv: np.ndarray,
    q_weight: np.ndarray,
    k_weight: np.ndarray,
    *,
    eps: float,
    clamp: float = 1e-6,
    token_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Adds the gated value to each stream [T, M, E] in float64."""
    gates = gate_values(hidden, kv, q_weight, k_weight, eps=eps, clamp=clamp)
    value = kv[:, None, -hidden.shape[-1] :]
    out = hidden + gates[..., None] * value
    if token_mask is not None:
        out = np.where(token_mask[:, None, None], out, hidden)
    return out
