"""Hashes of whole sequences: golden data, edges, transformations, refusals.

Each fault that users of other implementations met has its test, named in words here
and, for chunks, streams and slots, in test_hash_streams.py.
"""

from __future__ import annotations

import itertools
import math
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy_reference as reference
import pytest
from flax import nnx
from hash_cases import decode, oracle, reference_layout, small_state, tokens

from engram_jax import EngramConfig, EngramLayout, NgramHashState


def make_layout(arrays: dict[str, np.ndarray], vocab_size: int) -> EngramLayout:
    """Makes a layout from golden arrays."""
    _, sizes, heads = arrays["primes"].shape
    return EngramLayout(
        layer_ids=tuple(int(i) for i in arrays["layer_ids"]),
        primes=arrays["primes"],
        offsets=arrays["offsets"],
        multipliers=arrays["multipliers"],
        num_rows=tuple(int(rows) for rows in arrays["primes"].sum(axis=(1, 2))),
        pad_token_id=int(arrays["pad_token_id"]),
        compressed_vocab_size=vocab_size,
        max_ngram_size=sizes + 1,
        n_heads=heads,
    )


@pytest.fixture(scope="module")
def state() -> NgramHashState:
    """Small, with prime buckets."""
    return small_state()


# --- Golden data ----------------------------------------------------------------------


def test_hand_made_vector_pairs_multiplier_0_with_the_current_token():
    """Pitfall: multipliers applied oldest token first, in code and oracle alike."""
    layout = EngramLayout(
        layer_ids=(0,),
        primes=np.array([[[101], [103]]]),
        offsets=np.array([[0, 101]]),
        multipliers=np.array([[3, 5, 7]]),
        num_rows=(204,),
        pad_token_id=99,
        compressed_vocab_size=100,
        max_ngram_size=3,
        n_heads=1,
    )
    rows = NgramHashState(layout, np.arange(100)).hash_sequence([7, 9, 11])
    np.testing.assert_array_equal(rows[:, 0], [[1, 124], [56, 136], [12, 162]])


def golden_layouts() -> list[str]:
    """Names the layouts of the golden data by their sizes."""
    return [
        "n2h1v7L1C11",
        "n3h3v64L2C40",
        "n4h6v101L3C1000",
        "n4h8v16000L2C99092",
        "n5h5v33L2C99092",
    ]


def test_the_golden_layouts_are_all_tested(golden):
    """A new layout in the data needs its name in the list."""
    prefixes = {key.split("__")[0] for key in golden("hash_small")}
    assert prefixes == set(golden_layouts())


@pytest.mark.parametrize("name", golden_layouts())
@pytest.mark.parametrize("x64", [False, True])
def test_golden_hashes_of_small_layouts(golden, name, x64):
    """Exact 64-bit hashes without jax_enable_x64, and the same ids with it."""
    data = golden("hash_small")
    arrays = {
        key.split("__")[1]: value
        for key, value in data.items()
        if key.startswith(f"{name}__")
    }
    vocab_size = int(re.findall(r"C(\d+)", name)[0])
    with jax.enable_x64(x64):
        state = NgramHashState(make_layout(arrays, vocab_size), arrays["token_map"])
        assert state.pad_id == arrays["pad_compressed_id"]
        rows = jax.jit(state.hash_sequence)(arrays["ids"], arrays["dead"])
    chex.assert_type(rows, jnp.int32)
    np.testing.assert_array_equal(rows, arrays["expected"])


@pytest.mark.parametrize("dead", [False, True])
def test_golden_hashes_of_v41(golden, v41, v41_token_map, dead):
    """Pitfall: small layouts hide faults; these are the published primes and map."""
    data = golden("hash_v41")
    layout = EngramLayout.from_config(EngramConfig.from_dict(v41["config"]))
    state = NgramHashState(layout, v41_token_map)
    rows = state.hash_sequence(data["ids"], data["dead"] if dead else None)
    expected = data["expected" if dead else "expected_no_dead"]
    np.testing.assert_array_equal(rows, expected)


def test_the_largest_products_are_exact():
    """The largest ids and multipliers below 2^63, and the primes around 2^24."""
    size = 99_092
    layout = EngramLayout(
        layer_ids=(0,),
        primes=np.array([[[16_777_213, 3], [16_777_259, 1_999_999_973]]]),
        offsets=np.array([[0, 100_000_000, 2, 0]]),
        multipliers=np.full((1, 3), (2**63 - 1) // size // 2 * 2 - 1),
        num_rows=(2_000_000_000,),
        pad_token_id=0,
        compressed_vocab_size=size,
        max_ngram_size=3,
        n_heads=2,
    )
    ids = np.r_[np.arange(size - 20, size), np.arange(20)].astype(np.int32)
    rows = NgramHashState(layout, np.arange(size)).hash_sequence(ids)
    expected = reference.hash_sequence(
        ids,
        layout=reference_layout(layout),
        token_map=np.arange(size),
        pad_id=0,
    )
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("prime", [2, 3, 4093, 4099, 65_537, 16_777_213, 1_999_999_973])
def test_remainders_next_to_a_multiple_of_the_prime(prime):
    """A rounded quotient is off by one exactly where the remainder is 0 or prime - 1.

    With pad id 0 a first token's hash is `id * multiplier`, and the multipliers here
    make that prime * k - 2, .., prime * k + 1, as large as it may be.
    """
    size = 99_092
    ids, multipliers, wanted = [], [], []
    cases = itertools.product((1, 7, size - 1), (-2, -1, 0, 1), range(8))
    for token, remainder, step in cases:
        if math.gcd(token, prime) > 1:
            continue
        residue = remainder * pow(token, -1, prime) % prime
        largest = (2**63 - 1) // size - 1009 * step
        ids.append(token)
        multipliers.append(largest - (largest - residue) % prime)
        wanted.append(remainder % prime)
    layout = EngramLayout(
        layer_ids=tuple(range(len(ids))),
        primes=np.full((len(ids), 1, 1), prime),
        offsets=np.zeros((len(ids), 1), np.int64),
        multipliers=np.stack([multipliers, np.ones(len(ids), np.int64)], axis=1),
        num_rows=(prime,) * len(ids),
        pad_token_id=0,
        compressed_vocab_size=size,
        max_ngram_size=2,
        n_heads=1,
    )
    rows = NgramHashState(layout, np.arange(size)).hash_sequence(np.array(ids)[:, None])
    got = np.asarray(rows)[np.arange(len(ids)), 0, np.arange(len(ids)), 0]
    np.testing.assert_array_equal(got, wanted)


# --- Edges ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 17])
def test_sequences_of_no_one_and_a_prime_number_of_tokens(state, length):
    """T = 0 gives an empty result of the right shape."""
    rows = state.hash_sequence(tokens(length))
    chex.assert_shape(rows, (length, 2, 9))
    chex.assert_type(rows, jnp.int32)
    np.testing.assert_array_equal(rows, oracle(tokens(length)))


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (3, 5)])
def test_batches_of_sequences(state, shape):
    """[B, S] equals B sequences, also where there are none or they are empty."""
    ids = tokens(shape[0] * shape[1]).reshape(shape)
    rows = state.hash_sequence(ids)
    chex.assert_shape(rows, (*shape, 2, 9))
    for got, sequence in zip(rows, ids, strict=True):
        np.testing.assert_array_equal(got, oracle(sequence))


def test_batches_without_tokens_or_requests(state):
    """An idle step has no tokens; all of a batch may be padding."""
    empty = np.zeros(0, np.int32)
    chex.assert_shape(state(empty, empty, np.array([0])), (0, 2, 9))
    chex.assert_shape(state(empty, empty, np.array([0, 0, 0])), (0, 2, 9))
    padding = state(np.full(4, -9), np.full(4, -9), np.array([0]))
    np.testing.assert_array_equal(padding, np.full((4, 2, 9), -1))
    padding = state(np.full(4, -9), np.full(4, -9), np.array([0, 0, 0]))
    np.testing.assert_array_equal(padding, np.full((4, 2, 9), -1))


def test_an_empty_request_between_others(state):
    """A request without tokens in this step moves nothing."""
    a, b = tokens(3, 1), tokens(2, 2)
    starts = np.array([0, 0, 3, 3, 5, 5])
    rows = state(np.r_[a, b], np.r_[np.arange(3), np.arange(2)], starts)
    np.testing.assert_array_equal(rows, np.r_[oracle(a), oracle(b)])
    window = np.arange(15).reshape(5, 3)
    ids, _ = state.advance_lookback(window, None, np.r_[a, b], starts)
    np.testing.assert_array_equal(ids[jnp.array([0, 2, 4])], window[[0, 2, 4]])
    np.testing.assert_array_equal(ids[1], a[::-1])
    np.testing.assert_array_equal(ids[3], [b[1], b[0], window[3, 0]])


def test_a_rank_without_tokens_still_joins_the_collectives(state):
    """Pitfall: it has hashes that are all dead, and a mask that shuts every gate."""
    hashes, mask = state.dummy_hashes(5)
    np.testing.assert_array_equal(hashes, np.full((5, 2, 9), -1))
    np.testing.assert_array_equal(mask, np.zeros(5, bool))
    chex.assert_type([hashes, mask], [jnp.int32, jnp.bool_])
    chex.assert_shape(state.dummy_hashes(0)[0], (0, 2, 9))


def test_ids_outside_of_the_vocabulary_never_read_as_another_token(state):
    """Refused where values are known, dead inside jit, and int64 is not truncated."""
    for wrong in (50, 2**32 + 3, -2, 2**31 - 1):
        ids = np.array([3, 4, 5, 6], np.int64)
        dead = np.array([False, False, True, False])
        ids[2] = wrong
        with pytest.raises(ValueError, match=rf"{wrong}.*0\.\.49"):
            state.hash_sequence(ids)
        with pytest.raises(ValueError, match=rf"{wrong}.*0\.\.49"):
            state.hash_sequence(ids.tolist())
        expected = oracle(np.array([3, 4, 5, 6]), dead)
        if abs(wrong) < 2**31:  # jit itself truncates what is wider, without x64
            narrow = jax.jit(state.hash_sequence)(ids.astype(np.int32))
            np.testing.assert_array_equal(narrow, expected)
        with jax.enable_x64(True):
            wide = jax.jit(state.hash_sequence)(jnp.asarray(ids))
        np.testing.assert_array_equal(wide, expected)


# --- Transformations ------------------------------------------------------------------


def test_jit_traces_once_for_one_shape(state):
    """A serving loop whose token count changes does not recompile: it pads."""

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(ids, positions, starts):
        return state(ids, positions, starts)

    for length in (8, 1, 0, 5):
        ids = np.r_[tokens(length), np.full(8 - length, -1)].astype(np.int32)
        positions = np.arange(8, dtype=np.int32)
        starts = np.array([0, length], np.int32)
        rows = step(ids, positions, starts)
        np.testing.assert_array_equal(rows, state(ids, positions, starts))


def test_vmap_and_checkpoint(state):
    """A mapped sequence equals the batch; rematerialised hashes are the same."""
    ids = tokens(12).reshape(3, 4)
    mapped = jax.vmap(jax.checkpoint(state.hash_sequence))(jnp.asarray(ids))
    np.testing.assert_array_equal(mapped, [oracle(sequence) for sequence in ids])


def test_scan_over_decode_steps(state):
    """The window is the carry of a loop, one token a step."""
    ids = tokens(9)

    @jax.jit
    def generate(ids):
        def step(carry, token):
            position, lookback = carry
            rows, lookback = decode(state, token[None], lookback, position)
            return (position + 1, lookback), rows[0]

        return jax.lax.scan(step, (jnp.int32(0), state.init_lookback(1)), ids)[1]

    np.testing.assert_array_equal(generate(jnp.asarray(ids)), oracle(ids))


def test_a_donated_slot_cache_is_updated_in_place(state):
    """No second cache is made, and the result is the same."""
    table = jnp.array([[0, 1, 2]])

    def step(cache, ids, positions, starts):
        return state(
            ids,
            positions,
            starts,
            slot_cache=cache,
            slot_mapping=positions,
            block_table=table,
            block_size=4,
        )

    donating = jax.jit(step, donate_argnums=0)
    cache = state.init_slot_cache(4096)
    ids = tokens(9)
    arguments = (jnp.asarray(ids[:1]), jnp.zeros(1, jnp.int32), jnp.array([0, 1]))
    memory = donating.lower(cache, *arguments).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= cache.nbytes
    rows = []
    for position in range(9):
        before = cache
        part, cache = donating(
            cache, ids[position : position + 1], np.array([position]), np.array([0, 1])
        )
        assert before.is_deleted()
        rows.append(part)
    np.testing.assert_array_equal(np.concatenate(rows), oracle(ids))


def test_the_module_works_under_nnx_jit_and_split(state):
    """It holds constants only, so both ways to jit a module give the same."""
    ids = tokens(6)

    @nnx.jit
    def with_nnx(state, ids):
        return state.hash_sequence(ids)

    graph, values = nnx.split(state)

    @jax.jit
    def with_split(values, ids):
        return nnx.merge(graph, values).hash_sequence(ids)

    np.testing.assert_array_equal(with_nnx(state, jnp.asarray(ids)), oracle(ids))
    np.testing.assert_array_equal(with_split(values, ids), oracle(ids))
    assert not jax.tree.leaves(nnx.state(state, nnx.Param)), "nothing here is trained"


def test_x64_gives_equal_ids(state):
    """Users' other code keeps its defaults, and either mode hashes alike."""
    ids, starts = tokens(9), np.array([0, 4, 9])
    positions = np.r_[np.arange(4), np.arange(5)]
    lookback = tokens(6, 1).reshape(2, 3)
    call = {"lookback_token_ids": lookback, "dead_mask": ids % 5 == 0}
    rows = state(ids, positions, starts, **call)
    with jax.enable_x64(True):
        wide = state(ids, positions, starts, **call)
        wide_window = state.advance_lookback(lookback, None, ids, starts)
    chex.assert_type([rows, wide, wide_window[0]], jnp.int32)
    np.testing.assert_array_equal(rows, wide)


# --- Refusals -------------------------------------------------------------------------


def test_a_token_map_of_another_size_is_refused(state):
    """Pitfall: another tokenizer gives other rows and no error."""
    for token_map in (np.arange(50) % 39, np.arange(50) % 41):
        with pytest.raises(ValueError, match=r"compressed ids.*40"):
            NgramHashState(state.layout, token_map)
    with pytest.raises(ValueError, match="token_map"):
        NgramHashState(state.layout, np.arange(50) % 40 - 1)
    with pytest.raises(ValueError, match="token_map"):
        NgramHashState(state.layout, np.zeros(0, np.int32))


IDS, POSITIONS, STARTS = np.arange(5), np.arange(5), np.array([0, 2, 5])


@pytest.mark.usefixtures("library_errors")
@pytest.mark.parametrize(
    ("arguments", "extra", "error", "message"),
    [
        ((IDS[None], POSITIONS, STARTS), {}, ValueError, "input_ids"),
        ((IDS * 1.0, POSITIONS, STARTS), {}, TypeError, "input_ids"),
        ((IDS, POSITIONS[:4], STARTS), {}, ValueError, "positions"),
        ((IDS, POSITIONS - 1, STARTS), {}, ValueError, "positions"),
        ((IDS, POSITIONS, STARTS[:0]), {}, ValueError, "query_start_loc"),
        ((IDS, POSITIONS, np.array([1, 5])), {}, ValueError, "query_start_loc"),
        ((IDS, POSITIONS, np.array([0, 6])), {}, ValueError, "query_start_loc"),
        ((IDS, POSITIONS, np.array([0, 4, 3])), {}, ValueError, "query_start_loc"),
        (
            (IDS, POSITIONS, STARTS),
            {"dead_mask": np.zeros(4, bool)},
            ValueError,
            "dead_mask",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {"dead_mask": np.zeros(5, np.int32)},
            TypeError,
            "dead_mask",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {"lookback_token_ids": np.zeros((2, 4), int)},
            ValueError,
            "lookback_token_ids",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {"lookback_token_ids": np.full((2, 3), 50)},
            ValueError,
            "lookback_token_ids",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {"lookback_dead_mask": np.zeros((2, 3), bool)},
            ValueError,
            "lookback_token_ids",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {"slot_cache": jnp.zeros(4, jnp.int32)},
            ValueError,
            "block_table",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {
                "slot_cache": jnp.zeros(4, jnp.int32),
                "slot_mapping": IDS,
                "block_table": np.zeros((3, 1), int),
                "block_size": 4,
            },
            ValueError,
            "block_table",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {
                "slot_cache": jnp.zeros(4, jnp.int32),
                "slot_mapping": IDS[:4],
                "block_table": np.zeros((2, 1), int),
                "block_size": 4,
            },
            ValueError,
            "slot_mapping",
        ),
        (
            (IDS, POSITIONS, STARTS),
            {
                "slot_cache": jnp.zeros(4, jnp.int32),
                "slot_mapping": IDS,
                "block_table": np.zeros((2, 1), int),
                "block_size": 0,
            },
            ValueError,
            "block_size",
        ),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(
    state, arguments, extra, error, message
):
    """One error that says what was given and what fits."""
    with pytest.raises(error, match=message):
        state(*arguments, **extra)


@pytest.mark.usefixtures("library_errors")
@pytest.mark.parametrize("partial", ["slot_mapping", "block_table", "block_size"])
def test_parts_of_the_slot_cache_without_it_are_refused(state, partial):
    """A forgotten slot_cache would silently hash without history."""
    given = {"slot_mapping": IDS, "block_table": np.zeros((2, 1), int), "block_size": 4}
    with pytest.raises(ValueError, match="slot_cache"):
        state(IDS, POSITIONS, STARTS, **{partial: given[partial]})
