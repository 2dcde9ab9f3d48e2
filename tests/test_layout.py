"""Primes, offsets and multipliers, against published values and plain loops."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engram_jax.config import EngramConfig
from engram_jax.layout import (
    EngramLayout,
    compute_hash_multipliers,
    find_next_prime,
)

GOLDEN = Path(__file__).parent / "golden"
V41 = json.loads((GOLDEN / "v41.json").read_text())


def make_config(**changes: Any) -> EngramConfig:
    fields: dict[str, Any] = {
        "layer_ids": (1, 3),
        "num_embeddings": (10_000, 10_000),
        "max_ngram_size": 3,
        "vocab_base": 7,
        "n_heads": 2,
        "head_dim": 32,
        "pad_token_id": 2,
        "hidden_size": 64,
        "hc_mult": 2,
        "rms_norm_eps": 1e-20,
        "vocab_size": 100_000,
        "compressed_vocab_size": 90,
    }
    return EngramConfig(**fields | changes)


def primes_by_sieve(limit: int) -> list[int]:
    composite = np.zeros(limit, bool)
    for number in range(2, int(limit**0.5) + 1):
        composite[number * number :: number] = True
    return [int(p) for p in np.flatnonzero(~composite) if p > 1]


def test_v41_layout_equals_the_published_one():
    layout = EngramLayout.from_config(EngramConfig.from_dict(V41["config"]))
    assert layout.primes.tolist() == V41["primes"]
    assert layout.offsets.tolist() == V41["offsets"]
    assert layout.multipliers.tolist() == V41["multipliers"]
    # The last primes sum exactly to the two published row counts.
    assert layout.num_rows == tuple(V41["config"]["engram_num_embeddings"])
    assert layout.primes[0, 0, 0] == 16_000_057
    assert (layout.n_hash_cols, layout.num_layers) == (24, 2)
    assert layout.primes.dtype == layout.offsets.dtype == np.int64
    assert layout.multipliers.dtype == np.int64


SMALL_LAYOUTS = {
    "n2h1v7L1C11": (2, 1, 7, 11),
    "n3h3v64L2C40": (3, 3, 64, 40),
    "n4h6v101L3C1000": (4, 6, 101, 1000),
    "n5h5v33L2C99092": (5, 5, 33, 99_092),
    "n4h8v16000L2C99092": (4, 8, 16_000, 99_092),
}


@pytest.mark.parametrize("name", SMALL_LAYOUTS)
def test_small_layouts_equal_the_golden_data(name):
    n, heads, base, size = SMALL_LAYOUTS[name]
    with np.load(GOLDEN / "hash_small.npz") as data:
        golden = {
            key: data[f"{name}__{key}"]
            for key in ("layer_ids", "primes", "offsets", "multipliers")
        }
    ids = tuple(int(i) for i in golden["layer_ids"])
    config = make_config(
        layer_ids=ids,
        num_embeddings=(10**7,) * len(ids),
        max_ngram_size=n,
        n_heads=heads,
        vocab_base=base,
        compressed_vocab_size=size,
    )
    layout = EngramLayout.from_config(config)
    for key in ("primes", "offsets", "multipliers"):
        np.testing.assert_array_equal(getattr(layout, key), golden[key], err_msg=key)


@settings(deadline=None, max_examples=40)
@given(
    base=st.integers(1, 3000),
    n=st.integers(2, 5),
    heads=st.integers(1, 9),
    num_layers=st.integers(1, 4),
)
def test_layout_follows_its_definition(base, n, heads, num_layers):
    config = make_config(
        layer_ids=tuple(range(num_layers)),
        num_embeddings=(2**31 - 1,) * num_layers,
        max_ngram_size=n,
        n_heads=heads,
        vocab_base=base,
    )
    layout = EngramLayout.from_config(config)
    # The search restarts at the base and skips taken primes, which takes the primes
    # from the base up one after another.
    expected = [p for p in primes_by_sieve(12_000) if p >= base]
    count = num_layers * (n - 1) * heads
    assert layout.primes.ravel().tolist() == expected[:count]
    for layer in range(num_layers):
        columns = layout.primes[layer].ravel().tolist()
        ends = np.cumsum(columns)
        assert layout.num_rows[layer] == ends[-1]
        np.testing.assert_array_equal(layout.offsets[layer][1:], ends[:-1])
        assert layout.offsets[layer][0] == 0


@given(st.integers(-5, 5000), st.sets(st.sampled_from(primes_by_sieve(5100))))
def test_find_next_prime_skips_what_was_seen(start, seen):
    before = set(seen)
    found = find_next_prime(start, seen)
    assert seen == before
    wanted = next(p for p in primes_by_sieve(6000) if p > start and p not in seen)
    assert found == wanted


@pytest.mark.parametrize(
    ("start", "prime"),
    [
        (2**31 - 2, 2**31 - 1),
        (3_215_031_751 - 1, 3_215_031_767),  # a strong pseudoprime to 2, 3, 5 and 7
        (15_999_999, 16_000_057),
        (2**61 - 2, 2**61 - 1),
    ],
)
def test_find_next_prime_of_large_numbers(start, prime):
    assert find_next_prime(start, set()) == prime


def test_multipliers_follow_their_definition():
    got = compute_hash_multipliers([0, 1, 14], 4, 99_092)
    bound = (2**63 - 1) // 99_092 // 2
    for row, layer_id in zip(got, (0, 1, 14), strict=True):
        rng = np.random.default_rng(10007 * layer_id)
        values = rng.integers(0, bound, size=4, dtype=np.int64)
        assert row.tolist() == [2 * int(v) + 1 for v in values]


@given(st.integers(1, 2**40), st.integers(0, 100), st.integers(1, 6))
def test_multipliers_are_odd_and_products_stay_below_2_to_the_63(size, layer_id, n):
    multipliers = compute_hash_multipliers([layer_id], n, size)
    assert (multipliers % 2 == 1).all()
    assert all((size - 1) * int(m) < 2**63 for m in multipliers.ravel())


def test_multipliers_depend_on_layer_number_and_compressed_size():
    a = compute_hash_multipliers([1, 14], 4, 99_092)
    assert not np.array_equal(a[0], a[1])
    assert not np.array_equal(a, compute_hash_multipliers([1, 14], 4, 99_091))
    np.testing.assert_array_equal(a[1:], compute_hash_multipliers([14], 4, 99_092))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([1], 3, 0), "compressed_vocab_size"),
        (([1], 3, -1), "compressed_vocab_size"),
        (([1], 3, 2**63), "compressed_vocab_size"),
        (([1], 0, 9), "max_ngram_size"),
        (([1, -2], 3, 9), "layer_ids"),
    ],
)
def test_multipliers_refuse_bad_arguments(arguments, named):
    with pytest.raises(ValueError, match=named):
        compute_hash_multipliers(*arguments)


def test_table_with_fewer_rows_than_the_primes_sum_is_refused():
    """Pitfall: a table smaller than its hashes reach, read out of range."""
    rows = EngramLayout.from_config(make_config()).num_rows
    EngramLayout.from_config(make_config(num_embeddings=rows))
    for layer in (0, 1):
        short = list(rows)
        short[layer] -= 1
        with pytest.raises(
            ValueError,
            match=rf"layer {(1, 3)[layer]} {short[layer]} rows.*{rows[layer]}",
        ):
            EngramLayout.from_config(make_config(num_embeddings=tuple(short)))


def test_table_with_padding_rows_is_accepted():
    layout = EngramLayout.from_config(make_config())
    assert max(layout.num_rows) < 10_000


def test_absurd_head_count_is_refused_at_once():
    with pytest.raises(ValueError, match="engram_n_heads"):
        EngramLayout.from_config(make_config(n_heads=2**40))


def test_compressed_size_must_be_known_and_agree():
    """Pitfall: multipliers derive from K, so a map of another size moves every row."""
    with pytest.raises(ValueError, match="engram_compressed_vocab_size"):
        EngramLayout.from_config(make_config(compressed_vocab_size=None))
    given_later = EngramLayout.from_config(make_config(compressed_vocab_size=None), 90)
    stated = EngramLayout.from_config(make_config(), 90)
    np.testing.assert_array_equal(given_later.multipliers, stated.multipliers)
    with pytest.raises(ValueError, match=r"size is 100001; .* vocab_size = 100000"):
        EngramLayout.from_config(make_config(compressed_vocab_size=None), 100_001)
    with pytest.raises(ValueError, match=r"97812.*90"):
        EngramLayout.from_config(make_config(), 97_812)


def test_layout_is_a_static_argument_and_read_only():
    """Pitfall: a frozen dataclass of arrays that compares by value cannot be hashed."""
    layout = EngramLayout.from_config(make_config())
    assert hash(layout) == hash(layout)
    assert layout != EngramLayout.from_config(make_config())
    traces = []

    @jax.jit
    def rows(x):
        traces.append(None)
        return x + layout.num_rows[0]

    columns = jax.jit(lambda x, lay: x * lay.n_hash_cols, static_argnums=1)
    assert int(columns(2, layout)) == 8
    assert int(rows(1)) == layout.num_rows[0] + 1
    with pytest.raises(ValueError, match="read-only"):
        layout.primes[0, 0, 0] = 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.n_heads = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_hand_made_layout_is_possible_and_checked():
    fields: dict[str, Any] = {
        "layer_ids": (0,),
        "primes": np.array([[[101], [103]]]),
        "offsets": np.array([[0, 101]]),
        "multipliers": np.array([[3, 5, 7]]),
        "num_rows": (204,),
        "pad_token_id": 99,
        "compressed_vocab_size": 100,
        "max_ngram_size": 3,
        "n_heads": 1,
    }
    assert EngramLayout(**fields).n_hash_cols == 2
    for name, value in (
        ("primes", np.array([[101, 103]])),
        ("offsets", np.array([[0, 101, 204]])),
        ("multipliers", np.array([[3, 5]])),
        ("primes", np.array([[[101], [0]]])),
        ("offsets", np.array([[0, 102]])),
        ("offsets", np.array([[-1, 101]])),
    ):
        changed: dict[str, Any] = fields | {name: value}
        with pytest.raises(ValueError, match=name):
            EngramLayout(**changed)
