"""Divide Engram tables into prime-sized buckets and derive hash multipliers."""

import dataclasses
import operator
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from .config import MAX_TABLE_ROWS, EngramConfig

_SEED_PER_LAYER = 10007

# Testing these bases decides primality for every number below 3.3e24.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41)


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for small in _WITNESSES:
        if number % small == 0:
            return number == small
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        power = pow(witness, odd, number)
        if power in (1, number - 1):
            continue
        for _ in range(twos - 1):
            power = power * power % number
            if power == number - 1:
                break
        else:
            return False
    return True


def find_next_prime(start: int, seen: AbstractSet[int]) -> int:
    """Find the smallest prime above `start` that is not in `seen`.

    Args:
      start: Any integer; the search begins at ``start + 1``.
      seen: Primes to skip. It is not changed.

    Returns:
      The prime.

    Example:
      >>> find_next_prime(7, {11})
      13
    """
    candidate = max(int(start) + 1, 2)
    while candidate in seen or not _is_prime(candidate):
        candidate += 1
    return candidate


def compute_hash_multipliers(
    layer_ids: Sequence[int], max_ngram_size: int, compressed_vocab_size: int
) -> npt.NDArray[np.int64]:
    """Derive the odd hash multipliers of every layer.

    ``2 * default_rng(10007 * layer_id).integers(0, bound, size=n) + 1`` with
    ``bound = max(1, (2**63 - 1) // K // 2)``: a compressed id times a multiplier
    stays below 2**63. Multiplier 0 belongs to the current token, multiplier s to
    the token s places back.

    Args:
      layer_ids: Decoder layers' numbers (not their indices), at least 0.
      max_ngram_size: Largest n-gram size n, at least 1.
      compressed_vocab_size: Size K of the compressed vocabulary, at least 1.

    Returns:
      int64 array [L, n].

    Raises:
      ValueError: An argument is out of its range.

    Example:
      >>> compute_hash_multipliers([1], 2, 99092).tolist()
      [[76632096046245, 4839876093313]]
    """
    size, length = operator.index(compressed_vocab_size), operator.index(max_ngram_size)
    if not 1 <= size < 2**63:
        raise ValueError(
            f"compressed_vocab_size is {size}; it must be between 1 and 2**63 - 1."
        )
    if length < 1:
        raise ValueError(f"max_ngram_size is {length}; it must be at least 1.")
    if any(layer_id < 0 for layer_id in layer_ids):
        raise ValueError(
            f"layer_ids is {list(layer_ids)}; decoder layers are counted from 0."
        )
    bound = max(1, (2**63 - 1) // size // 2)
    multipliers = np.empty((len(layer_ids), length), np.int64)
    for row, layer_id in zip(multipliers, layer_ids, strict=True):
        generator = np.random.default_rng(_SEED_PER_LAYER * int(layer_id))
        row[:] = generator.integers(0, bound, size=length, dtype=np.int64) * 2 + 1
    return multipliers


# eq=False: equality and hash go by identity, so that a layout, although it holds
# arrays, can be a static argument of a jitted function.
@dataclasses.dataclass(frozen=True, eq=False)
class EngramLayout:
    """Hold which rows of a table each hash column owns, and the multipliers.

    Column ``j = (size - 2) * H + head`` of a layer owns the rows
    ``[offsets[j], offsets[j] + prime_j)``. Two layouts are equal only if they are
    the same object, which makes a layout a valid static argument under jit.

    Attributes:
      layer_ids: Decoder layers' numbers.
      primes: Bucket counts, int64 [L, n-1, H].
      offsets: First row of each column, int64 [L, C].
      multipliers: Hash multipliers, int64 [L, n]; see `compute_hash_multipliers`.
      num_rows: Rows that hashes can address, per layer: the sum of its primes.
      pad_token_id: Token that stands for places without one, in tokenizer ids.
      compressed_vocab_size: Size K of the compressed vocabulary.
      max_ngram_size: Largest n-gram size n.
      n_heads: Hash heads H per n-gram size.

    Raises:
      ValueError: The arrays' shapes or values do not fit each other.
    """

    layer_ids: tuple[int, ...]
    primes: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    multipliers: npt.NDArray[np.int64]
    num_rows: tuple[int, ...]
    pad_token_id: int
    compressed_vocab_size: int
    max_ngram_size: int
    n_heads: int

    def __post_init__(self) -> None:
        num_layers, sizes = len(self.layer_ids), self.max_ngram_size - 1
        for name, shape in (
            ("primes", (num_layers, sizes, self.n_heads)),
            ("offsets", (num_layers, sizes * self.n_heads)),
            ("multipliers", (num_layers, self.max_ngram_size)),
        ):
            # A read-only copy: the layout is shared, and jit may have baked it in.
            array = np.array(getattr(self, name), dtype=np.int64)
            if array.shape != shape:
                raise ValueError(
                    f"{name} has shape {array.shape}; {num_layers} layers, n-grams of "
                    f"up to {self.max_ngram_size} tokens and {self.n_heads} heads "
                    f"need {shape}."
                )
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if self.primes.size and self.primes.min() < 1:
            raise ValueError("primes must be positive: each is a column's row count.")
        ends = self.offsets + self.primes.reshape(self.offsets.shape)
        if self.offsets.size and (
            self.offsets.min() < 0
            or ends.max() > MAX_TABLE_ROWS
            or (ends.max(axis=1) > np.array(self.num_rows)).any()
        ):
            raise ValueError(
                f"offsets and primes reach rows outside tables of {self.num_rows} rows "
                f"(at most {MAX_TABLE_ROWS}, since row ids are int32)."
            )

    @property
    def n_hash_cols(self) -> int:
        """Count the hash columns of a token: one per n-gram size and head."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def num_layers(self) -> int:
        """Count the layers that have an Engram."""
        return len(self.layer_ids)

    @classmethod
    def from_config(
        cls, config: EngramConfig, compressed_vocab_size: int | None = None
    ) -> "EngramLayout":
        """Make the layout of a config and check that its tables are large enough.

        One increasing sequence of primes serves all layers: layer by layer and
        size by size, the search restarts at `config.vocab_base` and takes the next
        ``H`` primes that nobody has taken.

        Args:
          config: The model's sizes.
          compressed_vocab_size: Size of the token map (its largest compressed id
            plus one). Needed where the config does not state it; where it does,
            the two must agree.

        Returns:
          The layout.

        Raises:
          ValueError: The compressed vocabulary's size is unknown or contradicts
            the config, or a table has fewer rows than its primes' sum.

        Example:
          >>> config = EngramConfig(
          ...     layer_ids=(1,), num_embeddings=(60,), max_ngram_size=3, vocab_base=7,
          ...     n_heads=2, head_dim=32, pad_token_id=2, hidden_size=64, hc_mult=2,
          ...     rms_norm_eps=1e-20, vocab_size=100)
          >>> layout = EngramLayout.from_config(config, compressed_vocab_size=90)
          >>> layout.primes.tolist(), layout.num_rows
          ([[[7, 11], [13, 17]]], (48,))
        """
        stated = config.compressed_vocab_size
        size = stated if compressed_vocab_size is None else int(compressed_vocab_size)
        if size is None:
            raise ValueError(
                "The config does not state engram_compressed_vocab_size; pass "
                "compressed_vocab_size, the largest id of the token map plus one."
            )
        if stated is not None and size != stated:
            raise ValueError(
                f"compressed_vocab_size is {size}, but the config states "
                f"engram_compressed_vocab_size = {stated}: the token map comes from "
                "another tokenizer. Multipliers derive from this size, so every row "
                "would be another; use the tokenizer of the model."
            )
        if not 1 <= size <= config.vocab_size:
            raise ValueError(
                f"compressed_vocab_size is {size}; it must be between 1 and vocab_size "
                f"= {config.vocab_size}, since every compressed id stands for at least "
                "one token: the token map comes from another tokenizer."
            )
        # Every prime is at least the base, so this bounds the search below, too.
        least = config.n_hash_cols * max(config.vocab_base, 2)
        for layer_id, table_rows in zip(
            config.layer_ids, config.num_embeddings, strict=True
        ):
            if least > table_rows:
                raise ValueError(_too_small(config, layer_id, table_rows, least))
        seen: set[int] = set()
        primes = np.empty(
            (config.num_layers, config.max_ngram_size - 1, config.n_heads), np.int64
        )
        for layer, table_rows in enumerate(config.num_embeddings):
            needed = 0
            for ngram in range(config.max_ngram_size - 1):
                prime = config.vocab_base - 1
                for head in range(config.n_heads):
                    prime = find_next_prime(prime, seen)
                    seen.add(prime)
                    primes[layer, ngram, head] = prime
                    needed += prime
            if needed > table_rows:
                layer_id = config.layer_ids[layer]
                raise ValueError(_too_small(config, layer_id, table_rows, needed))
        flat = primes.reshape(config.num_layers, -1)
        return cls(
            layer_ids=config.layer_ids,
            primes=primes,
            offsets=np.cumsum(flat, axis=1) - flat,
            multipliers=compute_hash_multipliers(
                config.layer_ids, config.max_ngram_size, size
            ),
            num_rows=tuple(int(total) for total in flat.sum(axis=1)),
            pad_token_id=config.pad_token_id,
            compressed_vocab_size=size,
            max_ngram_size=config.max_ngram_size,
            n_heads=config.n_heads,
        )


def _too_small(
    config: EngramConfig, layer_id: int, table_rows: int, needed: int
) -> str:
    return (
        f"engram_num_embeddings gives layer {layer_id} {table_rows} rows, but its "
        f"{config.n_hash_cols} columns need at least {needed} (the sum of their "
        f"primes); the table is too small for engram_vocab_size = {config.vocab_base}, "
        f"engram_n_heads = {config.n_heads} and engram_max_ngram_size = "
        f"{config.max_ngram_size}."
    )
