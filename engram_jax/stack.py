"""All Engram layers of a model: one hash for every step, one state."""

import dataclasses
from collections.abc import Mapping
from typing import Any, overload

import jax
from flax import nnx
from jaxtyping import Array, Float, Int32

from .config import EngramConfig
from .hash_state import Bools, Ints, NgramHashState
from .layer import Engram
from .layout import EngramLayout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EngramBatch:
    """What every Engram layer needs of a batch besides the hidden states.

    A pytree: it passes through jit, scan and vmap.

    Attributes:
        hash_ids: rows of each token, int32 [T, L, C]; -1 for padding.
        token_mask: bool [T], False where the gate is shut.
    """

    # Not typed further: JAX builds pytrees of placeholders, too.
    hash_ids: Any
    token_mask: Any


class EngramStack(nnx.Module):
    """Hold the hash state and every Engram layer of a model.

    Hash once per step, then call the stack in each decoder layer that has an Engram,
    before its attention:

        batch = stack.batch(input_ids, positions, query_start_loc)
        ...
        hidden = stack(layer_id, hidden, batch)

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
            ValueError: a layer is missing, or one too many.
        """
        if tuple(layers) != config.layer_ids:
            raise ValueError(
                f"layers has {list(layers)}; the config's Engram layers are "
                f"{list(config.layer_ids)}, in this order"
            )
        self.config = config
        self.hash_state = hash_state
        self._layers = nnx.List(layers.values())

    @property
    def layers(self) -> dict[int, Engram]:
        """Give the Engram layers by decoder layer id."""
        return dict(zip(self.config.layer_ids, self._layers, strict=True))

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
        slot_cache: Int32[Array, " slots"],
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
        **history: Any,
    ) -> EngramBatch | tuple[EngramBatch, Int32[Array, " slots"]]:
        """Hash a ragged batch for all layers.

        Args:
            input_ids: raw token ids.
            positions: each token's place in its request.
            query_start_loc: where each request's tokens start, and the end of the last.
            dead_mask: True for tokens that take part in no n-gram; their gate is shut.
            slot_cache: compressed ids by slot.
            **history: the other arguments of `NgramHashState.__call__`.

        Returns:
            The batch; with a slot cache, that and the new cache.

        Raises:
            ValueError: as `NgramHashState.__call__`.
        """
        hashes = self.hash_state(
            input_ids,
            positions,
            query_start_loc,
            dead_mask=dead_mask,
            slot_cache=slot_cache,
            **history,
        )
        mask = self.hash_state.token_mask(input_ids, query_start_loc, dead_mask)
        if isinstance(hashes, tuple):
            hashes, slot_cache = hashes
            return EngramBatch(hashes, mask), slot_cache
        return EngramBatch(hashes, mask)

    def dummy_batch(self, num_tokens: int) -> EngramBatch:
        """Make the batch of a rank without tokens: hashes -1, every gate shut."""
        return EngramBatch(*self.hash_state.dummy_hashes(num_tokens))

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
        hash_ids = self.hash_ids(layer_id, batch)
        return self.layers[layer_id](hidden_states, hash_ids, batch.token_mask)

    def hash_ids(self, layer_id: int, batch: EngramBatch) -> Int32[Array, "T C"]:
        """Select one layer's rows of a batch.

        Args:
            layer_id: the decoder layer's number.
            batch: what `batch` gave.

        Returns:
            int32 [T, C].

        Raises:
            KeyError: the layer has no Engram.
        """
        if layer_id not in self.config.layer_ids:
            raise KeyError(
                f"layer {layer_id} has no Engram; layers {self.config.layer_ids} do"
            )
        return batch.hash_ids[:, self.config.layer_ids.index(layer_id)]
