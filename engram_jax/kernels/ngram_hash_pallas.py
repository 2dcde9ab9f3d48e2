"""N-gram hash from raw token ids to table rows, as one Mosaic GPU kernel.

A block of threads takes a few tokens. First each thread finds what one token reads one
place back: the compressed id from the batch, the lookback window or the slot cache, or
that the window ends there. Then, through shared memory, each thread hashes a few
columns of one token. 64-bit products need no x64 mode inside inline code, and the
remainder by a prime is two multiplications by constants of the layout.

Why inline Mosaic code: Pallas has no per-thread gather (token map, request of a token),
and a kernel without it would leave them to separate kernels that cost more than the
hash. The interpreter does not run such code; the arithmetic is tested apart from it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from engram_jax.layout import EngramLayout

from .ids import narrow_ids
from .mosaic_pallas import (
    WARPGROUP,
    Predicate,
    Word,
    address,
    load,
    read_shared,
    reciprocal,
    remainder,
    store,
    thread_index,
    wait_for_threads,
    write_shared,
)

INTERPRET_REASON = "it reads memory per thread, which the interpreter cannot do"

_DEAD, _UNKNOWN, _NO_REQUEST = -1, -2, -2

Refs = Mapping[str, Any]  # references by name


@dataclasses.dataclass(frozen=True)
class Batch:
    """The static part of a ragged batch: sizes, and what a pad reads as."""

    tokens: int
    requests: int
    vocab: int
    depth: int  # n
    pad_id: int
    slots: int = 0
    blocks: int = 0
    block_size: int = 1


def batch_operands(
    input_ids: jax.Array,
    positions: jax.Array,
    query_start_loc: jax.Array,
    token_map: jax.Array,
    dead_mask: jax.Array | None = None,
    lookback_token_ids: jax.Array | None = None,
    lookback_dead_mask: jax.Array | None = None,
    slot_cache: jax.Array | None = None,
    block_table: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Name the operands of `ngram_hash` that are given, as the kernels read them."""
    operands = {
        "ids": narrow_ids(input_ids),
        "positions": positions.astype(jnp.int32),
        "starts": query_start_loc.astype(jnp.int32),
        "token_map": token_map,
    }
    if dead_mask is not None:
        operands["dead"] = dead_mask
    if lookback_token_ids is not None:
        operands["lookback"] = narrow_ids(lookback_token_ids)
        if lookback_dead_mask is not None:
            operands["lookback_dead"] = lookback_dead_mask
    # Nothing can be known from a cache without slots or blocks.
    if slot_cache is None or block_table is None:
        return operands
    if slot_cache.size and block_table.size:
        operands["slot_cache"] = slot_cache
        operands["block_table"] = block_table.astype(jnp.int32)
    return operands


def batch_sizes(
    operands: Mapping[str, jax.Array],
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None,
) -> Batch:
    """Read the static part of a batch off its operands."""
    cached = "slot_cache" in operands
    return Batch(
        tokens=operands["ids"].shape[0],
        requests=operands["starts"].shape[0] - 1,
        vocab=operands["token_map"].shape[0],
        depth=layout.max_ngram_size,
        pad_id=pad_id,
        slots=operands["slot_cache"].shape[0] if cached else 0,
        blocks=operands["block_table"].shape[1] if cached else 0,
        block_size=block_size or 1,
    )


def layout_constants(layout: EngramLayout) -> dict[str, np.ndarray]:
    """Give a layout's numbers as the kernels read them, 64-bit ones as two words.

    `columns` int32 [L * C, 4]: `reciprocal` of the prime (low, high), prime, offset.
    `multipliers` int32 [L * n, 2]: low, high.
    """
    primes = layout.primes.reshape(-1)
    factors = [reciprocal(int(prime)) for prime in primes]
    columns = np.empty((primes.size, 4), np.int32)
    columns[:, :2] = np.array(factors, np.uint64)[:, None].view(np.int32)
    columns[:, 2], columns[:, 3] = primes, layout.offsets.reshape(-1)
    multipliers = layout.multipliers.reshape(-1, 1).view(np.int32)
    return {"columns": columns, "multipliers": np.ascontiguousarray(multipliers)}


def layout_reason(layout: EngramLayout, pad_id: int) -> str | None:
    """Say why the kernels cannot hash with a layout, or give None."""
    largest = max(layout.compressed_vocab_size - 1, pad_id)
    if layout.multipliers.min() < 0 or int(layout.multipliers.max()) * largest >= 2**63:
        return "a compressed id times a multiplier does not stay below 2**63"
    return None  # a layout's primes are below 2**31, since its rows are


def unsupported_reason(
    input_ids,
    positions,
    query_start_loc,
    token_map,
    dead_mask=None,
    lookback_token_ids=None,
    lookback_dead_mask=None,
    slot_cache=None,
    block_table=None,
    *,
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None = None,
    interpret: bool = False,
) -> str | None:
    """Say why `ngram_hash_pallas` cannot take these operands, or give None."""
    del positions, query_start_loc, token_map, dead_mask
    del lookback_token_ids, lookback_dead_mask, slot_cache, block_table, block_size
    if interpret:
        return INTERPRET_REASON
    if input_ids.size * layout.num_layers * layout.n_hash_cols >= 2**31:
        return f"{input_ids.size} tokens have more rows than 32 bits can count"
    return layout_reason(layout, pad_id)


# ---- inside the kernel ---------------------------------------------------------------


def read(
    refs: Refs,
    name: str,
    index: Word,
    only_if: Predicate | None = None,
    *,
    width: int = 32,
) -> Word:
    """Read an operand's element by its index, zero where `only_if` is false."""
    where = address(refs[name]) + index.widen() * (width // 8)
    return load(where, width=width, only_if=only_if)[0]


def _find_request(
    refs: Refs, batch: Batch, token: Word
) -> tuple[Word, Word, Predicate]:
    """Find a token's request, its place in the chunk, and whether it has a request.

    The request's number is the count of requests that end at or before the token.
    Eight-way search: three dependent reads for 512 requests where halving takes nine.
    """
    request, step = Word.of(0), 1
    start = read(refs, "starts", request)
    while step * 8 <= batch.requests:
        step *= 8
    while step:
        ends = [request + step * i for i in range(1, 8)]
        if step * 8 > batch.requests:  # the first round, which begins at request 0
            ends = ends[: batch.requests // step]
        exist = [end.compare("ule", batch.requests) for end in ends]
        found = [
            read(refs, "starts", *probe) for probe in zip(ends, exist, strict=True)
        ]
        for end, exists, value in zip(ends, exist, found, strict=True):
            passed = exists & value.compare("sle", token)
            request, start = passed.select(end, request), passed.select(value, start)
        step //= 8
    owned = request.compare("ult", batch.requests) & token.compare("sge", start)
    return request, token - start, owned


def read_byte(refs: Refs, name: str, index: Word, only_if: Predicate) -> Word:
    """Read a mask's byte; an absent mask is all zeros."""
    if name not in refs:
        return Word.of(0)
    return read(refs, name, index, only_if, width=8)


def _cached(
    refs: Refs, batch: Batch, request: Word, position: Word, wanted: Predicate
) -> Word:
    """Read what the slot cache holds of an earlier position."""
    column = position // batch.block_size
    wanted &= position.compare("sge", 0) & column.compare("ult", batch.blocks)
    block = read(refs, "block_table", request * batch.blocks + column, wanted)
    # As unsigned numbers, negative blocks are too large as well.
    wanted &= block.compare("ule", (batch.slots - 1) // batch.block_size)
    slot = block * batch.block_size + position % batch.block_size
    wanted &= slot.compare("ult", batch.slots)
    return wanted.select(read(refs, "slot_cache", slot, wanted), _UNKNOWN)


def read_back(
    refs: Refs, batch: Batch, token: Word, places: Sequence[Word]
) -> tuple[list[Word], Predicate]:
    """Read the compressed ids that stand some places before a token.

    Args:
      refs: The operands' references by name.
      batch: Static sizes.
      token: The token's number in the batch, below `batch.tokens`.
      places: How far back each is, 0 to n - 1.

    Returns:
      For each place a compressed id, that of the pad where it is unknown, or -1 where
      the window ends: at a dead token, or before the request's first. And whether the
      token belongs to a request; where not, the ids mean nothing.
    """
    # Read level by level, each level for all places before any of the next: a thread
    # waits once for each of batch and request, lookback window, token map.
    position, zero = read(refs, "positions", token), Word.of(0)
    ids, marks = [], []
    for back in places:
        before = token - back
        there = before.compare("sge", 0)
        ids.append(read(refs, "ids", before, there))
        marks.append(read_byte(refs, "dead", before, there))
    request, place, owned = _find_request(refs, batch, token)
    earlier = [owned & back.compare("sgt", place) for back in places]
    for i, back in enumerate(places):
        id_, mark = Word.of(-1), zero
        if "lookback" in refs:
            index = request * (batch.depth - 1) + (back - place - 1)  # 0: the nearest
            id_ = read(refs, "lookback", index, earlier[i])
            mark = read_byte(refs, "lookback_dead", index, earlier[i])
        ids[i] = earlier[i].select(id_, ids[i])
        marks[i] = earlier[i].select(mark, marks[i])
    values = []
    for back, id_, mark, past in zip(places, ids, marks, earlier, strict=True):
        alive = mark.compare("eq", 0)
        is_token = alive & id_.compare("ult", batch.vocab)
        unknown = past & alive & id_.compare("eq", -1)
        value = is_token.select(read(refs, "token_map", id_, is_token), _DEAD)
        at = position - back
        if "slot_cache" in refs:
            value = unknown.select(_cached(refs, batch, request, at, unknown), value)
            unknown = value.compare("slt", _DEAD)
        value = unknown.select(Word.of(batch.pad_id), value)
        outside = at.compare("slt", 0) & back.compare("ne", 0)
        values.append(outside.select(Word.of(_DEAD), value))
    return values, owned


def close_window(values: list[Word], pad_id: int) -> list[Word]:
    """Let everything from the first -1 on read as the pad."""
    closed = None
    ids = []
    for value in values:
        ends = value.compare("slt", 0)
        closed = ends if closed is None else closed | ends
        ids.append(closed.select(Word.of(pad_id), value))
    return ids


def read_multipliers(refs: Refs, batch: Batch, layer: Word) -> list[Word]:
    """Read a layer's multipliers, in 64 bits."""
    first = address(refs["multipliers"]) + (layer * (8 * batch.depth)).widen()
    return [load(first + 8 * s, width=64)[0] for s in range(batch.depth)]


def roll(ids: list[Word], multipliers: list[Word], size_index: Word) -> Word:
    """XOR the products of the first ``size_index + 2`` ids and multipliers."""
    rolling = ids[0].widen() * multipliers[0]
    for back, (id_, multiplier) in enumerate(zip(ids, multipliers, strict=True)):
        if back == 0:
            continue
        product = id_.widen() * multiplier
        if back > 1:
            product = size_index.compare("uge", back - 1).select(product, 0)
        rolling = rolling ^ product
    return rolling


def read_column(refs: Refs, column: Word) -> Any:
    """Read a column's reciprocal (64 bits), prime and offset; layers follow on."""
    words = load(address(refs["columns"]) + column.widen() * 16, 4)
    return words[0].widen() | (words[1].widen() << 32), words[2], words[3]


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a block of threads shares out tokens and columns."""

    tokens: int
    columns: int  # L * C
    columns_per_thread: int
    tokens_per_thread: int

    @property
    def groups(self) -> int:  # threads that a token takes
        return self.columns // self.columns_per_thread

    @property
    def groups_per_block(self) -> int:
        return min(self.groups, WARPGROUP)

    @property
    def lanes(self) -> int:  # tokens that a block hashes at a time
        return WARPGROUP // self.groups_per_block

    @property
    def tokens_per_block(self) -> int:
        return self.lanes * self.tokens_per_thread

    @property
    def grid(self) -> tuple[int, int]:
        return (
            -(-self.tokens // self.tokens_per_block),
            -(-self.groups // WARPGROUP),
        )


# With more tokens per thread the columns' constants are read less often, which pays
# once the card is full: 16,384 tokens of V4.1's two layers take 5.2 us with one token
# per thread, 3.4 with three; 4,096 take 2.7 and 2.4.
_MANY_TOKENS, _TOKENS_PER_THREAD = 4096, 3


def _plan(tokens: int, layout: EngramLayout, tokens_per_thread: int | None) -> _Plan:
    columns_per_thread = 4 if layout.n_heads % 4 == 0 else 2 - layout.n_heads % 2
    if tokens_per_thread is None:
        tokens_per_thread = _TOKENS_PER_THREAD if tokens >= _MANY_TOKENS else 1
    columns = layout.num_layers * layout.n_hash_cols
    return _Plan(tokens, columns, columns_per_thread, tokens_per_thread)


def _hash_block(
    refs: Refs,
    window: Any,
    block: tuple[Word, Word],
    batch: Batch,
    layout: EngramLayout,
    plan: _Plan,
) -> None:
    thread, depth = thread_index(), batch.depth
    first_token = block[0] * plan.tokens_per_block

    # This thread's columns are the same for all its tokens. Their constants are read
    # before anything waits.
    lane = thread // plan.groups_per_block
    group = block[1] * WARPGROUP + thread % plan.groups_per_block
    working = lane.compare("ult", plan.lanes) & group.compare("ult", plan.groups)
    column = working.select(group, 0) * plan.columns_per_thread
    size_index = column % layout.n_hash_cols // layout.n_heads
    multipliers = read_multipliers(refs, batch, column // layout.n_hash_cols)
    columns = [read_column(refs, column + i) for i in range(plan.columns_per_thread)]

    for start in range(0, plan.tokens_per_block * depth, WARPGROUP):
        entry = (thread + start).minimum(plan.tokens_per_block * depth - 1)
        token = (first_token + entry // depth).minimum(batch.tokens - 1)
        back = entry % depth
        (value,), owned = read_back(refs, batch, token, [back])
        lost = ~owned & back.compare("eq", 0)
        value = lost.select(Word.of(_NO_REQUEST), value)
        write_shared(window, entry, value)
    wait_for_threads()

    for i in range(plan.tokens_per_thread):
        local = working.select(lane, 0) + i * plan.lanes
        values = [read_shared(window, local * depth + back) for back in range(depth)]
        rolling = roll(close_window(values, batch.pad_id), multipliers, size_index)
        lost = values[0].compare("eq", _NO_REQUEST)
        rows = [
            lost.select(Word.of(-1), remainder(rolling, factor, prime) + offset)
            for factor, prime, offset in columns
        ]
        token = first_token + local
        where = address(refs["out"]) + (token * plan.columns + column).widen() * 4
        store(where, rows, only_if=working & token.compare("ult", batch.tokens))


def ngram_hash_pallas(
    input_ids: jax.Array,
    positions: jax.Array,
    query_start_loc: jax.Array,
    token_map: jax.Array,
    dead_mask: jax.Array | None = None,
    lookback_token_ids: jax.Array | None = None,
    lookback_dead_mask: jax.Array | None = None,
    slot_cache: jax.Array | None = None,
    block_table: jax.Array | None = None,
    *,
    layout: EngramLayout,
    pad_id: int,
    block_size: int | None = None,
    interpret: bool = False,
    tokens_per_thread: int | None = None,
) -> jax.Array:
    """Hash every token's n-grams to table rows; `kernels.ngram_hash` says how.

    Args:
      input_ids: int32 [T].
      positions: int32 [T].
      query_start_loc: int32 [R + 1], not decreasing.
      token_map: int32 [V].
      dead_mask: bool [T].
      lookback_token_ids: int32 [R, n - 1].
      lookback_dead_mask: bool [R, n - 1].
      slot_cache: int32 [slots], written already.
      block_table: int32 [R, blocks].
      layout: Primes, offsets and multipliers.
      pad_id: The compressed pad id.
      block_size: Positions in a block.
      interpret: Must be False; see `INTERPRET_REASON`.
      tokens_per_thread: Tokens that a thread hashes one after the other.

    Returns:
      int32 [T, L, C]; -1 for tokens of no request.
    """
    given = (input_ids, positions, query_start_loc, token_map, dead_mask)
    given += (lookback_token_ids, lookback_dead_mask, slot_cache, block_table)
    static: dict[str, Any] = {"layout": layout, "pad_id": pad_id}
    reason = unsupported_reason(*given, **static, interpret=interpret)
    if reason is not None:
        raise NotImplementedError(f"ngram_hash_pallas: {reason}")
    out_type = jax.ShapeDtypeStruct(
        (input_ids.shape[0], layout.num_layers, layout.n_hash_cols), jnp.int32
    )
    if out_type.size == 0 or query_start_loc.shape[0] < 2:
        return jnp.full(out_type.shape, -1, jnp.int32)
    operands = batch_operands(*given)
    batch = batch_sizes(operands, layout, pad_id, block_size)
    plan = _plan(batch.tokens, layout, tokens_per_thread)
    operands |= layout_constants(layout)

    @plgpu.inline_mgpu(
        arg_types=(
            *(plgpu.RefType(),) * (len(operands) + 2),
            *(plgpu.Layout.WG_SPLAT,) * 2,
        ),
    )
    def hash_block(ctx, *arguments):
        del ctx
        *buffers, out, window, tokens, columns = arguments
        refs = dict(zip(operands, buffers, strict=True)) | {"out": out}
        block = Word(tokens.registers.item()), Word(columns.registers.item())
        _hash_block(refs, window, block, batch, layout, plan)

    def ngram_hash(*buffers):
        hash_block(*buffers, lax.axis_index("tokens"), lax.axis_index("columns"))

    return plgpu.kernel(
        ngram_hash,
        out_type=out_type,
        grid=plan.grid[::-1],  # CUDA's limit is far higher for the last
        grid_names=("columns", "tokens"),
        scratch_types=[plgpu.SMEM((plan.tokens_per_block * batch.depth,), jnp.int32)],
    )(*operands.values())
