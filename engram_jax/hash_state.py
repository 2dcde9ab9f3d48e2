"""From the raw token ids of a batch, a chunk or a stream to table rows."""

from typing import Any, overload

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Int, Int32

from . import kernels
from .arguments import (
    Bools,
    Ints,
    as_array,
    as_mask,
    as_ragged,
    check_shape,
    check_slots,
    check_values,
)
from .constant import Constant
from .kernels.ids import narrow_ids
from .kernels.ngram_hash import UNKNOWN_SLOT, compressed_or_dead
from .layout import EngramLayout


class NgramHashState(nnx.Module):
    """Turn token ids into the table rows of their n-grams, for all Engram layers.

    The module holds constants only: primes, multipliers and the token map. What a
    stream remembers (a lookback window, a slot cache) is a value of the caller's,
    passed in and returned, so that streams never share state.

    Attributes:
        layout: primes, offsets and multipliers.
        token_map: compressed id of each raw token id, int32 [V].
        pad_id: the compressed pad id.
    """

    def __init__(
        self,
        layout: EngramLayout,
        token_map: Int[np.ndarray, " V"] | Int[Array, " V"],
        *,
        backend: kernels.Backend | None = None,
    ):
        """Check the map against the layout and put it on the device.

        Args:
            layout: primes, offsets and multipliers.
            token_map: compressed id of each raw id, [V], as
                `build_compressed_token_map` gives it.
            backend: of the hash: None, "pallas", "xla" or "pallas_interpret".

        Raises:
            ValueError: the map is not one-dimensional, holds a negative id, is of
                another size than the layout's compressed vocabulary, or does not
                cover the pad token.
        """
        ids = np.asarray(token_map)
        integers = ids.dtype.kind in "iu"
        if ids.ndim != 1 or ids.size == 0 or not integers or ids.min() < 0:
            least = f", from {ids.min()} up" if ids.size and integers else ""
            raise ValueError(
                f"token_map has shape {ids.shape} and dtype {ids.dtype}{least}; it "
                "must be integers [V] from 0 up"
            )
        size = int(ids.max()) + 1
        if size != layout.compressed_vocab_size:
            raise ValueError(
                f"token_map has {size} compressed ids, the layout "
                f"{layout.compressed_vocab_size}: it comes from another tokenizer. "
                "Multipliers derive from this size, so every row would be another"
            )
        if not 0 <= layout.pad_token_id < ids.size:
            raise ValueError(
                f"pad_token_id is {layout.pad_token_id}; token_map covers "
                f"0..{ids.size - 1}"
            )
        self.layout = layout
        self.token_map = Constant(jnp.asarray(ids, jnp.int32))
        self.pad_id = int(ids[layout.pad_token_id])
        self.backend: kernels.Backend | None = backend

    @property
    def vocab_size(self) -> int:
        """Count the raw token ids, V."""
        return self.token_map.shape[0]

    @property
    def lookback(self) -> int:
        """Count the tokens before a chunk that its hashes depend on, n - 1."""
        return self.layout.max_ngram_size - 1

    @overload
    def __call__(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        lookback_token_ids: Ints | None = None,
        lookback_dead_mask: Bools | None = None,
        slot_cache: None = None,
    ) -> Int32[Array, "T L C"]: ...

    @overload
    def __call__(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        lookback_token_ids: Ints | None = None,
        lookback_dead_mask: Bools | None = None,
        slot_cache: Int32[Array, " slots"],
        slot_mapping: Ints,
        block_table: Ints,
        block_size: int,
    ) -> tuple[Int32[Array, "T L C"], Int32[Array, " slots"]]: ...

    def __call__(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        lookback_token_ids: Ints | None = None,
        lookback_dead_mask: Bools | None = None,
        slot_cache: Int32[Array, " slots"] | None = None,
        slot_mapping: Ints | None = None,
        block_table: Ints | None = None,
        block_size: int | None = None,
    ) -> Int32[Array, "T L C"] | tuple[Int32[Array, "T L C"], Int32[Array, " slots"]]:
        """Hash a ragged batch of R requests' chunks.

        A place before a chunk is read from the lookback window, else from the slot
        cache, else as the pad id. The request's first token and a dead token end the
        window: all older places read as the pad id.

        Args:
            input_ids: raw token ids. -1, and inside jit any id outside the vocabulary,
                is a dead token. JAX itself narrows NumPy's int64 on the way into jit,
                unless x64 is on; `pad_batch` refuses ids that this would change.
            positions: each token's place in its request, from 0.
            query_start_loc: where each request's tokens start, and the end of the last;
                tokens past that are padding and may hold anything.
            dead_mask: True for tokens that take part in no n-gram (image spans).
            lookback_token_ids: raw ids just before each chunk, most recent first, -1
                where unknown. `init_lookback` and `advance_lookback` make them.
            lookback_dead_mask: which of these are dead.
            slot_cache: compressed ids by slot, from `init_slot_cache` or an earlier
                call; may be donated.
            slot_mapping: the slot that each token writes, -1 for none; all writes come
                before any read.
            block_table: the block of each request's positions; negative is unknown.
            block_size: positions in a block.

        Returns:
            int32 [T, L, C], -1 for padding; with a slot cache, that and the new cache.

        Raises:
            ValueError: shapes do not fit each other, or known values are out of range.
            TypeError: a dtype is wrong.

        Example:
            >>> from engram_jax import EngramLayout
            >>> layout = EngramLayout(
            ...     layer_ids=(0,), primes=np.array([[[101], [103]]]),
            ...     offsets=np.array([[0, 101]]), multipliers=np.array([[3, 5, 7]]),
            ...     num_rows=(204,), pad_token_id=99, compressed_vocab_size=100,
            ...     max_ngram_size=3, n_heads=1)
            >>> state = NgramHashState(layout, np.arange(100))
            >>> state([7, 9, 11], [0, 1, 2], [0, 3])[:, 0].tolist()
            [[1, 124], [56, 136], [12, 162]]
        """
        operands = self.operands(
            input_ids,
            positions,
            query_start_loc,
            dead_mask=dead_mask,
            lookback_token_ids=lookback_token_ids,
            lookback_dead_mask=lookback_dead_mask,
            slot_cache=slot_cache,
            slot_mapping=slot_mapping,
            block_table=block_table,
            block_size=block_size,
        )
        hashes = kernels.ngram_hash(**operands, backend=self.backend)
        return hashes if slot_cache is None else (hashes, operands["slot_cache"])

    def operands(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        lookback_token_ids: Ints | None = None,
        lookback_dead_mask: Bools | None = None,
        slot_cache: Int32[Array, " slots"] | None = None,
        slot_mapping: Ints | None = None,
        block_table: Ints | None = None,
        block_size: int | None = None,
    ) -> dict[str, Any]:
        """Check a batch and make what `kernels.ngram_hash` and `ngram_rows` take.

        Args:
            input_ids: these and all others are those of `__call__`.
            positions: each token's place in its request.
            query_start_loc: where each request's tokens start.
            dead_mask: tokens that take part in no n-gram.
            lookback_token_ids: raw ids just before each chunk.
            lookback_dead_mask: which of these are dead.
            slot_cache: compressed ids by slot.
            slot_mapping: the slot that each token writes.
            block_table: the block of each request's positions.
            block_size: positions in a block.

        Returns:
            The kernels' arguments by name; `slot_cache` has this batch's writes.

        Raises:
            ValueError: shapes do not fit each other, or known values are out of range.
            TypeError: a dtype is wrong.
        """
        given_ids, given_lookback = as_array(input_ids), as_array(lookback_token_ids)
        input_ids, query_start_loc = as_ragged(given_ids, query_start_loc)
        num_tokens, requests = input_ids.shape[0], query_start_loc.shape[0] - 1
        positions = narrow_ids(as_array(positions), "positions")
        check_shape("positions", positions, (num_tokens,))
        dead_mask = as_mask("dead_mask", dead_mask, (num_tokens,))
        window = (requests, self.lookback)
        if lookback_token_ids is not None:
            lookback_token_ids = self._as_window(given_lookback, requests)
        elif lookback_dead_mask is not None:
            raise ValueError("lookback_dead_mask needs lookback_token_ids")
        lookback_dead_mask = as_mask("lookback_dead_mask", lookback_dead_mask, window)
        check_values(
            self.vocab_size,
            given_ids,
            positions,
            query_start_loc,
            dead_mask,
            given_lookback,
            lookback_dead_mask,
        )
        if slot_cache is not None:
            if slot_mapping is None or block_table is None or block_size is None:
                raise ValueError(
                    "slot_cache needs slot_mapping, block_table and block_size"
                )
            if block_size < 1:
                raise ValueError(f"block_size is {block_size}; it must be at least 1")
            table = narrow_ids(as_array(block_table), "block_table")
            check_shape("block_table", table, (requests, None))
            given_mapping = as_array(slot_mapping)
            slot_mapping = narrow_ids(given_mapping, "slot_mapping")
            check_shape("slot_mapping", slot_mapping, (num_tokens,))
            check_slots(slot_cache, given_mapping, query_start_loc)
            slot_cache = self._write_slots(
                slot_cache, slot_mapping, input_ids, query_start_loc, dead_mask
            )
        elif any(x is not None for x in (slot_mapping, block_table, block_size)):
            raise ValueError(
                "slot_mapping, block_table and block_size need slot_cache; without it "
                "earlier tokens come from lookback_token_ids alone"
            )
        else:
            table = block_size = None
        return {
            "input_ids": input_ids,
            "positions": positions,
            "query_start_loc": query_start_loc,
            "token_map": self.token_map[...],
            "layout": self.layout,
            "pad_id": self.pad_id,
            "dead_mask": dead_mask,
            "lookback_token_ids": lookback_token_ids,
            "lookback_dead_mask": lookback_dead_mask,
            "slot_cache": slot_cache,
            "block_table": table,
            "block_size": block_size,
        }

    def hash_sequence(
        self,
        input_ids: Ints,
        dead_mask: Bools | None = None,
        segment_ids: Ints | None = None,
    ) -> Int32[Array, "*B S L C"]:
        """Hash whole sequences, each from its first token.

        Args:
            input_ids: raw token ids [S] or [B, S].
            dead_mask: True for tokens that take part in no n-gram.
            segment_ids: which document of a packed row each token is of; where the id
                changes, n-grams are cut like at the start of a sequence.

        Returns:
            int32 [S, L, C] or [B, S, L, C].

        Raises:
            ValueError: shapes do not fit each other, or known ids are out of range.

        Example:
            >>> from engram_jax import EngramLayout
            >>> layout = EngramLayout(
            ...     layer_ids=(0,), primes=np.array([[[101], [103]]]),
            ...     offsets=np.array([[0, 101]]), multipliers=np.array([[3, 5, 7]]),
            ...     num_rows=(204,), pad_token_id=99, compressed_vocab_size=100,
            ...     max_ngram_size=3, n_heads=1)
            >>> state = NgramHashState(layout, np.arange(100))
            >>> rows = state.hash_sequence(
            ...     [[7, 9, 7, 9]], segment_ids=[[0, 0, 1, 1]])
            >>> rows[0, :, 0].tolist()
            [[1, 124], [56, 136], [1, 124], [56, 136]]
        """
        given_ids = as_array(input_ids)
        input_ids = narrow_ids(given_ids, "input_ids")
        if input_ids.ndim not in (1, 2):
            raise ValueError(
                f"input_ids has shape {input_ids.shape}; it must be [S] or [B, S]"
            )
        shape = input_ids.shape
        length = shape[-1]
        place = jnp.arange(length, dtype=jnp.int32)
        positions = jnp.broadcast_to(place, shape)
        if segment_ids is not None:
            # Not narrowed: two wide ids would become one, and two documents, too.
            documents: Any = as_array(segment_ids)
            check_shape("segment_ids", documents, shape)
            starts = jnp.zeros(shape, jnp.int32)
            if length > 1:
                changes = documents[..., 1:] != documents[..., :-1]
                starts = starts.at[..., 1:].set(jnp.where(changes, place[1:], 0))
            positions -= lax.cummax(starts, axis=len(shape) - 1)
        dead_mask = as_mask("dead_mask", dead_mask, shape)
        hashes = self(
            given_ids.reshape(-1),
            positions.reshape(-1),
            # Every row is a request; the last offset also serves rows of length 0.
            np.arange(input_ids.size // max(length, 1) + 1, dtype=np.int32) * length,
            dead_mask=None if dead_mask is None else dead_mask.reshape(-1),
        )
        return hashes.reshape(*shape, *hashes.shape[1:])

    def token_mask(
        self,
        input_ids: Ints,
        query_start_loc: Ints,
        dead_mask: Bools | None = None,
    ) -> Bool[Array, " T"]:
        """Tell which tokens open the gate: tokens of a request that are not dead.

        Args:
            input_ids: raw token ids.
            query_start_loc: as of `__call__`.
            dead_mask: True for dead tokens.

        Returns:
            bool [T], False for dead tokens, ids outside the vocabulary and padding.
        """
        input_ids, query_start_loc = as_ragged(input_ids, query_start_loc)
        dead_mask = as_mask("dead_mask", dead_mask, input_ids.shape)
        token = jnp.arange(input_ids.shape[0])
        compressed = compressed_or_dead(input_ids, dead_mask, self.token_map[...])
        return (compressed >= 0) & (token < query_start_loc[-1])

    def dummy_hashes(
        self, num_tokens: int
    ) -> tuple[Int32[Array, "T L C"], Bool[Array, " T"]]:
        """Make what a rank without tokens passes on: it still joins the collectives.

        Args:
            num_tokens: T.

        Returns:
            Hashes that are all -1, int32 [T, L, C], and a token mask that is all
            False, bool [T].
        """
        shape = (num_tokens, self.layout.num_layers, self.layout.n_hash_cols)
        return jnp.full(shape, -1, jnp.int32), jnp.zeros(num_tokens, jnp.bool_)

    def init_slot_cache(self, num_slots: int) -> Int32[Array, " slots"]:
        """Make an empty slot cache: one slot per KV-cache slot, all unknown.

        Args:
            num_slots: the number of slots.

        Returns:
            int32 [num_slots], all -2.
        """
        return jnp.full(num_slots, UNKNOWN_SLOT, jnp.int32)

    def init_lookback(
        self, num_requests: int
    ) -> tuple[Int32[Array, "R n_minus_1"], Bool[Array, "R n_minus_1"]]:
        """Make empty lookback windows, for requests at their first token.

        Args:
            num_requests: R.

        Returns:
            Token ids that are all -1, int32 [R, n-1], and a dead mask that is all
            False.
        """
        shape = (num_requests, self.lookback)
        return jnp.full(shape, -1, jnp.int32), jnp.zeros(shape, jnp.bool_)

    def advance_lookback(
        self,
        lookback_token_ids: Ints,
        lookback_dead_mask: Bools | None,
        input_ids: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        num_accepted: Ints | None = None,
    ) -> tuple[Int32[Array, "R n_minus_1"], Bool[Array, "R n_minus_1"]]:
        """Move each request's window past its chunk, or past its accepted tokens.

        Args:
            lookback_token_ids: the windows before the chunk.
            lookback_dead_mask: which of their tokens are dead; None for none.
            input_ids: the chunk's raw token ids.
            query_start_loc: where each request's tokens start, and the end of the last.
            dead_mask: which of the chunk's tokens are dead.
            num_accepted: how many of its chunk's tokens each request keeps (speculative
                decoding); None keeps all. Values beyond the chunk keep all.

        Returns:
            The new windows and their dead mask.

        Raises:
            ValueError: shapes do not fit each other, or known values are out of range.

        Example:
            >>> from engram_jax import EngramLayout
            >>> layout = EngramLayout(
            ...     layer_ids=(0,), primes=np.array([[[101], [103]]]),
            ...     offsets=np.array([[0, 101]]), multipliers=np.array([[3, 5, 7]]),
            ...     num_rows=(204,), pad_token_id=99, compressed_vocab_size=100,
            ...     max_ngram_size=3, n_heads=1)
            >>> state = NgramHashState(layout, np.arange(100))
            >>> state.advance_lookback(*state.init_lookback(1), [7, 9, 11], [0, 3],
            ...                        num_accepted=[2])[0].tolist()
            [[9, 7]]
        """
        given_ids, given_windows = as_array(input_ids), as_array(lookback_token_ids)
        input_ids, starts = as_ragged(given_ids, query_start_loc)
        requests = starts.shape[0] - 1
        windows = self._as_window(given_windows, requests)
        dead = as_mask("lookback_dead_mask", lookback_dead_mask, windows.shape)
        dead = jnp.zeros(windows.shape, jnp.bool_) if dead is None else dead
        dead_mask = as_mask("dead_mask", dead_mask, input_ids.shape)
        check_values(
            self.vocab_size, given_ids, None, starts, dead_mask, given_windows, dead
        )
        if input_ids.shape[0] == 0 or requests == 0:
            return windows, dead
        accepted = starts[1:] - starts[:-1]
        if num_accepted is not None:
            wanted = narrow_ids(as_array(num_accepted), "num_accepted")
            check_shape("num_accepted", wanted, (requests,))
            accepted = jnp.clip(wanted, 0, accepted)
        # Column j of the new window is the token j places before the next one.
        place = accepted[:, None] - 1 - jnp.arange(self.lookback, dtype=jnp.int32)
        from_chunk = place >= 0
        token = jnp.where(from_chunk, starts[:-1, None] + place, 0)
        column = jnp.where(from_chunk, 0, -1 - place)
        chunk = compressed_or_dead(input_ids, dead_mask, self.token_map[...])
        old_ids = jnp.take_along_axis(windows, column, axis=1)
        old_dead = jnp.take_along_axis(dead, column, axis=1)
        return (
            jnp.where(from_chunk, input_ids[token], old_ids),
            jnp.where(from_chunk, (chunk < 0)[token], old_dead),
        )

    def _as_window(self, token_ids, requests):
        # Not -1 for an id that does not fit: that is an unknown token, not a dead one.
        token_ids = narrow_ids(token_ids, "lookback_token_ids", outside=-2)
        check_shape("lookback_token_ids", token_ids, (requests, self.lookback))
        return token_ids

    def _write_slots(self, slot_cache, slot_mapping, input_ids, starts, dead_mask):
        compressed = compressed_or_dead(input_ids, dead_mask, self.token_map[...])
        token = jnp.arange(input_ids.shape[0])
        writes = (slot_mapping >= 0) & (token < starts[-1])
        slot = jnp.where(writes, slot_mapping, slot_cache.shape[0])
        return slot_cache.at[slot].set(compressed, mode="drop")
