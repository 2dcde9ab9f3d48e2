"""All Engram layers of a model: one hash for every step, one state."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int32

from . import kernels
from .arguments import Bools, Ints
from .config import EngramConfig
from .exchange import fetch_rows
from .hash_state import NgramHashState
from .layer import Engram
from .layout import EngramLayout
from .mesh_stack import advance_lookback as advance_windows
from .mesh_stack import hash_on_mesh
from .one_kernel import operands_for_one_kernel, tables_for_one_kernel
from .sharding import EngramSharding
from .staged_rows import StagedRows

_Lookback = tuple[Int32[Array, "R n_minus_1"], Bool[Array, "R n_minus_1"]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngramBatch:
    """What every Engram layer needs of a batch besides the hidden states.

    A pytree: it passes through jit, scan and vmap.

    Attributes:
        hash_ids: rows of each token, int32 [T, L, C]; -1 for padding.
        token_mask: bool [T], False where the gate is shut.
        rows: on a mesh, the rows of all layers, fetched by one exchange:
            [T padded, L, C, D + D/32] bytes, or D floats. Else a tuple of each layer's:
            where one kernel reads all of them (few tokens, on a GPU or from its
            peers), or where `EngramPrefetch` fetched them (`StagedRows`). None, also in
            the tuple: the layer reads its own.
    """

    # Not typed further: JAX builds pytrees of placeholders, too.
    hash_ids: Any
    token_mask: Any
    rows: Any = None


class EngramStack(nnx.Module):
    """Hold the hash state and every Engram layer of a model.

    Hash once per step, then call the stack in each decoder layer that has an Engram,
    before its attention:

        batch = stack.batch(input_ids, positions, query_start_loc)
        ...
        hidden = stack(layer_id, hidden, batch)

    Under `nnx.jit` pass `graph=False`, or use `jax.jit` with `nnx.split` and
    `nnx.merge`: by default `nnx.jit` returns every variable of a module, so that each
    call copies the tables.

    Attributes:
        config: the model's sizes.
        layout: primes, offsets and multipliers.
        hash_state: token ids to rows.
        layers: `Engram` by decoder layer id.
    """

    def __init__(
        self,
        config: EngramConfig,
        hash_state: NgramHashState,
        layers: Mapping[int, Engram],
    ):
        """Put the parts together.

        Args:
            config: the model's sizes.
            hash_state: made from the layout of that config.
            layers: one `Engram` for each of `config.layer_ids`.

        Raises:
            ValueError: a layer is missing, or one too many; or config, layout and
                layers do not fit each other.
        """
        if tuple(layers) != config.layer_ids:
            raise ValueError(
                f"layers has {list(layers)}; the config's Engram layers are "
                f"{list(config.layer_ids)}, in this order"
            )
        _check_parts(config, hash_state.layout, layers)
        self.config = config
        self.hash_state = hash_state
        self._layers = nnx.List(layers.values())
        shardings = {layer.sharding for layer in layers.values()}
        if len(shardings) > 1:
            raise ValueError(
                "the layers lie on the mesh in different ways; one exchange for all of "
                "them needs one EngramSharding"
            )

    @property
    def layers(self) -> dict[int, Engram]:
        """Give the Engram layers by decoder layer id."""
        return dict(zip(self.config.layer_ids, self._layers, strict=True))

    @property
    def sharding(self) -> EngramSharding | None:
        """Say how the stack lies on a mesh; None on one device."""
        return self._layers[0].sharding

    @property
    def layout(self) -> EngramLayout:
        """Give primes, offsets and multipliers."""
        return self.hash_state.layout

    @overload
    def batch(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        slot_cache: None = None,
        advance_lookback: Literal[False] = False,
        **history: Any,
    ) -> EngramBatch: ...

    @overload
    def batch(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        slot_cache: None = None,
        advance_lookback: Literal[True],
        **history: Any,
    ) -> tuple[EngramBatch, _Lookback]: ...

    @overload
    def batch(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        slot_cache: Int32[Array, " slots"],
        advance_lookback: Literal[False] = False,
        **history: Any,
    ) -> tuple[EngramBatch, Int32[Array, " slots"]]: ...

    def batch(
        self,
        input_ids: Ints,
        positions: Ints,
        query_start_loc: Ints,
        *,
        dead_mask: Bools | None = None,
        slot_cache: Int32[Array, " slots"] | None = None,
        advance_lookback: bool = False,
        **history: Any,
    ) -> EngramBatch | tuple[EngramBatch, Any]:
        """Hash a ragged batch for all layers; on a mesh, fetch their rows too.

        On a mesh the batch is that of all replicas together: every device hashes it,
        and tokens are cut over the data axis in order. `replica_batch` takes a batch
        from each replica instead.

        Args:
            input_ids: raw token ids.
            positions: each token's place in its request.
            query_start_loc: where each request's tokens start, and the end of the last.
            dead_mask: True for tokens that take part in no n-gram; their gate is shut.
            slot_cache: compressed ids by slot.
            advance_lookback: whether to give the lookback windows after the batch, too,
                as `NgramHashState.advance_lookback` moves them when all tokens are
                kept. A decode step on a GPU then does so without a kernel of its own.
            **history: the other arguments of `NgramHashState.__call__`.

        Returns:
            The batch. With a slot cache, that and the new cache; with
            `advance_lookback`, that and the new windows with their dead mask, int32
            and bool [R, n-1]. Where no token is ever dead the mask may be dropped, and
            inside jit costs nothing then.

        Raises:
            ValueError: as `NgramHashState.__call__`; or windows shall advance and
                there are none, or a slot cache remembers in their place.

        Example:
            A decode step of one token a request; see README.md for a whole loop:

                batch, (window, _) = stack.batch(
                    tokens, positions, np.arange(len(tokens) + 1),
                    lookback_token_ids=window, advance_lookback=True)
        """
        arguments: dict[str, Any] = {
            "input_ids": input_ids,
            "positions": positions,
            "query_start_loc": query_start_loc,
            "dead_mask": dead_mask,
            "slot_cache": slot_cache,
            **history,
        }
        if advance_lookback:
            _check_advances(arguments)
        if self.sharding is not None:
            hashed = hash_on_mesh(
                self.sharding,
                self.hash_state,
                arguments,
                advance=advance_lookback,
                tables=self._tables_for_one_kernel(),
            )
            return self._fetch(self.sharding, *hashed)
        operands = self.hash_state.operands(**arguments)
        # Where the fused kernel runs nothing reads these, and jit leaves them out.
        hashes = kernels.ngram_hash(**operands, backend=self.hash_state.backend)
        tables = operands_for_one_kernel(self._tables_for_one_kernel())
        lookback = None
        if tables is not None and kernels.reads_at_once(
            tables["weights"],
            operands["input_ids"].shape[0],
            layout=self.layout,
            pad_id=self.hash_state.pad_id,
            as_records="addresses" in tables,
            backend=self.hash_state.backend,
        ):
            rows, mask, lookback = kernels.ngram_rows(
                **tables, **operands, advance_lookback=advance_lookback
            )
        else:
            rows = None
            mask = self.hash_state.token_mask(input_ids, query_start_loc, dead_mask)
        batch = EngramBatch(hashes, mask, rows)
        if advance_lookback:
            return batch, advance_windows(self.hash_state, operands, lookback)
        return batch if slot_cache is None else (batch, operands["slot_cache"])

    def _tables_for_one_kernel(self):
        """The tables, if the kernel that hashes may read their rows; else none."""
        whole = self.sharding is None
        return tables_for_one_kernel(self._layers, self.hash_state, whole=whole)

    def replica_batch(self, *, advance_lookback: bool = False, **arguments: Any) -> Any:
        """Hash each replica's own batch on its devices, and fetch the rows of all.

        Args:
            advance_lookback: as of `batch`.
            **arguments: the others of `batch`, each with a leading axis of replicas, as
                `pad_replicas` makes them; it pads all to one slot. `block_size` has
                none, and `init_slot_cache` makes `slot_cache`.

        Returns:
            The `EngramBatch` of all replicas' tokens in order, T = replicas * slot;
            with slot caches, that and the new ones; with `advance_lookback`, that and
            the new windows with their dead mask [replicas, R, n-1].

        Raises:
            ValueError: the stack lies on one device, or as `batch`.
        """
        if self.sharding is None:
            raise ValueError(
                "replica_batch needs a stack on a mesh (EngramStack.shard, or "
                "load_engram with mesh=...); on one device use batch"
            )
        if advance_lookback:
            _check_advances(arguments)
        hashed = hash_on_mesh(
            self.sharding,
            self.hash_state,
            arguments,
            by_replica=True,
            advance=advance_lookback,
            tables=self._tables_for_one_kernel(),
        )
        return self._fetch(self.sharding, *hashed)

    def _fetch(
        self, sharding, hashes, mask, slot_cache=None, rows=None, lookback=None
    ) -> Any:
        if rows is None:
            tables = [layer.embedding for layer in self._layers]
            wanted = hashes
            if any(layer.wkv_scale is None for layer in self._layers):
                # As in `Engram.__call__`: no gradient from rows that nobody uses.
                wanted = jnp.where(mask[:, None, None], hashes, -1)
            rows = fetch_rows(sharding, tables, wanted)
        batch = EngramBatch(hashes, mask, rows)
        remembered = slot_cache if lookback is None else lookback
        return batch if remembered is None else (batch, remembered)

    def init_slot_cache(
        self, num_slots: int, *, replicas: bool = False
    ) -> Int32[Array, "*N slots"]:
        """Make an empty slot cache that lies where a step leaves it.

        On a mesh, one that lies elsewhere would compile the second step anew.

        Args:
            num_slots: slots, of each replica.
            replicas: whether it is for `replica_batch`: one cache for each replica of
                the mesh's data axis.

        Returns:
            int32 [slots], or [replicas, slots], all -2: unknown.
        """
        cache = self.hash_state.init_slot_cache(num_slots)
        sharding = self.sharding
        if sharding is None:
            return cache[None] if replicas else cache
        known = np.asarray(cache)
        if not replicas:
            return sharding.place(known, P())
        count = sharding.size(sharding.data_axes)
        return sharding.place(np.tile(known, (count, 1)), sharding.replica)

    def dummy_batch(self, num_tokens: int) -> EngramBatch:
        """Make the batch of a rank without tokens: hashes -1, every gate shut."""
        hashes, mask = self.hash_state.dummy_hashes(num_tokens)
        if self.sharding is not None:
            return self._fetch(self.sharding, hashes, mask)
        return EngramBatch(hashes, mask)

    def expand_projections(self) -> None:
        """Keep a bfloat16 copy of every FP8 projection: `Engram.expand_projection`."""
        for layer in self._layers:
            layer.expand_projection()

    def shard(self, sharding: EngramSharding) -> "EngramStack":
        """Put a stack of one device on a mesh.

        For stacks that fit one device; `load_engram` with a mesh reads each process's
        own rows from the checkpoint instead.

        Args:
            sharding: how it shall lie.

        Returns:
            A new stack, with the same results.

        Raises:
            ValueError: the stack lies on a mesh already.
        """
        if self.sharding is not None:
            raise ValueError("the stack lies on a mesh already; shard the original")
        hash_state = NgramHashState(
            self.layout,
            np.asarray(self.hash_state.token_map[...]),
            backend=self.hash_state.backend,
        )
        hash_state.token_map[...] = sharding.place(hash_state.token_map[...], P())
        return EngramStack(
            self.config,
            hash_state,
            {
                layer_id: layer.shard(sharding, index)
                for index, (layer_id, layer) in enumerate(self.layers.items())
            },
        )

    def __call__(
        self, layer_id: int, hidden_states: Float[Array, "T M E"], batch: EngramBatch
    ) -> Float[Array, "T M E"]:
        """Run one layer's Engram.

        Args:
            layer_id: the decoder layer's number.
            hidden_states: the residual streams, before the layer's attention.
            batch: what `batch` gave for these tokens.

        Returns:
            [T, M, E] in the dtype of `hidden_states`.

        Raises:
            KeyError: the layer has no Engram.
        """
        self._check_layer(layer_id)
        layer = self.layers[layer_id]
        index = self.config.layer_ids.index(layer_id)
        rows = batch.rows
        if rows is not None:
            rows = rows[index] if isinstance(rows, tuple) else rows[:, index]
        if rows is None:
            hash_ids = self.hash_ids(layer_id, batch)
            return layer(hidden_states, hash_ids, batch.token_mask)
        if isinstance(rows, StagedRows):
            rows = rows.packed()
            if layer.wkv_scale is None and batch.token_mask is not None:
                # As in `Engram.__call__`: a shut token's NaN would reach the gradient.
                padding = (0, rows.shape[0] - batch.token_mask.shape[0])
                shut = jnp.pad(~batch.token_mask, padding)[:, None, None]
                rows = jnp.where(shut, jnp.uint8(0), rows)
        return layer.gate(hidden_states, layer.project(rows), batch.token_mask)

    def hash_ids(self, layer_id: int, batch: EngramBatch) -> Int32[Array, "T C"]:
        """Select one layer's rows of a batch.

        Args:
            layer_id: the decoder layer's number.
            batch: what `batch` gave.

        Returns:
            int32 [T, C].

        Raises:
            KeyError: the layer has no Engram.
            ValueError: the batch was prefetched, and has rows instead.
        """
        self._check_layer(layer_id)
        if batch.hash_ids is None:
            raise ValueError(
                "this batch has no hash_ids, since EngramPrefetch fetched all of its "
                "rows; EngramStack.batch gives them"
            )
        return batch.hash_ids[:, self.config.layer_ids.index(layer_id)]

    def _check_layer(self, layer_id: int) -> None:
        if layer_id not in self.config.layer_ids:
            raise KeyError(
                f"layer {layer_id} has no Engram; layers {self.config.layer_ids} do"
            )


def _check_advances(arguments) -> None:
    """Refuse to advance windows that are not there, or that nothing needs."""
    if arguments.get("slot_cache") is not None:
        raise ValueError(
            "advance_lookback is True and a slot_cache is given, which remembers the "
            "earlier tokens already; leave out one of the two"
        )
    if arguments.get("lookback_token_ids") is None:
        raise ValueError(
            "advance_lookback is True, but lookback_token_ids is missing; "
            "hash_state.init_lookback makes windows for requests at their first token"
        )


def _check_parts(config, layout, layers) -> None:
    """Refuse parts that would read other rows than the model's, or zeros."""
    for name in ("layer_ids", "max_ngram_size", "n_heads", "pad_token_id"):
        if getattr(layout, name) != getattr(config, name):
            raise ValueError(
                f"{name} is {getattr(layout, name)} in the layout of hash_state and "
                f"{getattr(config, name)} in the config; make both from one config"
            )
    for layer_id, needed in zip(config.layer_ids, layout.num_rows, strict=True):
        layer = layers[layer_id]
        found = (layer.n_hash_cols, layer.embedding.head_dim, *layer.q_weight.shape)
        wanted = (
            config.n_hash_cols,
            config.head_dim,
            config.hc_mult,
            config.hidden_size,
        )
        if found != wanted:
            raise ValueError(
                f"layer {layer_id} has (columns, row width, streams, stream width) = "
                f"{found}; the config has {wanted}"
            )
        # On a mesh a table's shards were made from the layout.
        rows = layer.embedding.num_rows
        if layer.sharding is None and rows < needed:
            raise ValueError(
                f"the table of layer {layer_id} has {rows} rows; its hashes address "
                f"{needed}, and those beyond would read as zeros"
            )
