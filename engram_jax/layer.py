"""One Engram layer: rows to keys and value, gated into the residual streams."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, BFloat16, Bool, Float, Int32, UInt8

from . import kernels, mesh_layer, mxfp8
from .constant import Constant
from .embedding import ParallelEngramEmbedding
from .exchange import fetch_rows
from .sharding import EngramSharding


class Engram(nnx.Module):
    """Read a token's rows, project them, and gate the value into each stream.

    `kv = wkv(concat(rows)); out_m = hidden_m + gate_m * value` (`kernels.wkv`,
    `kernels.gate`). In a decoder layer it comes before attention.

    `q_weight` and `k_weight` are `nnx.Param`; an FP8 projection is a `Constant` and a
    float one an `nnx.Param`: `dequantize_projection` turns the first into the second.

    Attributes:
        embedding: the layer's table.
        wkv_weight: [(M+1)*E, C*D].
        wkv_scale: E8M0 bytes [ceil((M+1)*E/32), C*D/32], or None.
        wkv_expanded: a bfloat16 copy of an FP8 projection, where `expand_projection`
            made one, or None.
        q_weight: [M, E].
        k_weight: [M, E].
        eps: added to the mean squares.
    """

    def __init__(
        self,
        embedding: ParallelEngramEmbedding,
        wkv_weight: Array,
        wkv_scale: UInt8[Array, "NB KB"] | None,
        q_weight: Float[Array, "M E"],
        k_weight: Float[Array, "M E"],
        *,
        eps: float,
        backend: kernels.Backend | None = None,
    ):
        """Take a layer's tensors.

        Args:
            embedding: the table.
            wkv_weight: e4m3 [(M+1)*E, C*D]; or bfloat16 or float32, to train.
            wkv_scale: E8M0 bytes, one per 32x32 block; None with a float weight.
            q_weight: [M, E], bfloat16 or float32.
            k_weight: [M, E].
            eps: `rms_norm_eps`.
            backend: of projection and gate: None, "pallas", "xla" or
                "pallas_interpret".

        Raises:
            ValueError: shapes do not fit each other.
        """
        if q_weight.ndim != 2:
            raise ValueError(f"q_weight has shape {q_weight.shape}; it must be [M, E]")
        streams, width = q_weight.shape
        outputs, sharding = (streams + 1) * width, embedding.sharding
        if sharding is not None:
            outputs = sharding.padded_width(outputs)
        if wkv_weight.shape[0] != outputs or wkv_weight.shape[1] % embedding.head_dim:
            raise ValueError(
                f"wkv_weight has shape {wkv_weight.shape}; q_weight of shape "
                f"{q_weight.shape} and rows of {embedding.head_dim} values need "
                f"[{outputs}, a multiple of {embedding.head_dim}]"
            )
        if k_weight.shape != q_weight.shape:
            raise ValueError(
                f"k_weight has shape {k_weight.shape}, q_weight {q_weight.shape}; "
                "they must be equal"
            )
        self.embedding = embedding
        if wkv_scale is None:
            self.wkv_weight = nnx.data(nnx.Param(wkv_weight))
            self.wkv_scale = nnx.data(None)
        else:
            self.wkv_weight = nnx.data(Constant(wkv_weight))
            self.wkv_scale = nnx.data(Constant(mxfp8.scale_bytes(wkv_scale)))
        self.wkv_expanded: Any = nnx.data(None)
        self.q_weight = nnx.Param(q_weight)
        self.k_weight = nnx.Param(k_weight)
        self.eps = float(eps)
        self.backend: kernels.Backend | None = backend

    @property
    def sharding(self) -> EngramSharding | None:
        """Say how the layer lies on a mesh; None on one device."""
        return self.embedding.sharding

    @property
    def n_hash_cols(self) -> int:
        """Count the rows that each token reads, C."""
        return self.wkv_weight.shape[1] // self.embedding.head_dim

    def __call__(
        self,
        hidden_states: Float[Array, "T M E"],
        hash_ids: Int32[Array, "T C"],
        token_mask: Bool[Array, " T"] | None = None,
    ) -> Float[Array, "T M E"]:
        """Add each token's memory to its residual streams.

        Args:
            hidden_states: the residual streams, bfloat16, float16 or float32.
            hash_ids: this layer's rows of each token, from `NgramHashState`; -1 reads
                as zeros.
            token_mask: False for tokens that pass through as they are, bit for bit:
                dead tokens and padding. None opens the gate for all.

        Returns:
            [T, M, E] in the dtype of `hidden_states`.

        Raises:
            ValueError: shapes do not fit each other.

        Example:
            >>> import jax
            >>> ones = jnp.ones((1, 32), jnp.bfloat16)
            >>> table = ParallelEngramEmbedding(
            ...     jnp.ones((4, 32), jnp.float8_e4m3fn), jnp.full((4, 1), 127,
            ...                                                    jnp.uint8))
            >>> engram = Engram(table, jnp.ones((64, 64), jnp.float8_e4m3fn),
            ...                 jnp.full((2, 2), 127, jnp.uint8), ones, ones, eps=1e-6)
            >>> engram(jnp.zeros((2, 1, 32)), jnp.array([[0, 1], [2, -1]])).shape
            (2, 1, 32)

        References:
            Conditional Memory via Scalable Lookup, arXiv 2601.07372.
        """
        self._check_ids(hidden_states, hash_ids)
        if self.wkv_scale is None and token_mask is not None:
            # The gradient of a weight sums over tokens: a NaN in a row that a shut
            # token reads would spread to it, as zero times NaN.
            hash_ids = jnp.where(token_mask[:, None], hash_ids, -1)
        return self.gate(hidden_states, self.project(self.rows(hash_ids)), token_mask)

    def rows(
        self, hash_ids: Int32[Array, "T C"]
    ) -> Float[Array, "S C D"] | UInt8[Array, "S C P"]:
        """Read each token's rows, in a form that `project` takes.

        Args:
            hash_ids: rows of each token.

        Returns:
            bfloat16 [T, C, D] from device memory (a float table's dtype, if it is
            one); from elsewhere the stored bytes, uint8 [T, C, D + D/32]. On a mesh, T
            is padded so that tokens split evenly over the devices.
        """
        if self.sharding is not None:
            table = self.embedding
            ids = kernels.narrow_ids(hash_ids)[:, None]
            return fetch_rows(self.sharding, [table], ids, [table.layer_index])[:, 0]
        if self.embedding.storage is not None:
            return self.embedding.lookup_packed(hash_ids)
        return self.embedding(hash_ids)

    def project(
        self, rows: Float[Array, "T ..."] | UInt8[Array, "T C P"] | kernels.OrderedRows
    ) -> BFloat16[Array, "T N"]:
        """Project rows to M keys and one value: `kernels.wkv`.

        Args:
            rows: each token's rows, as `rows` or `kernels.ngram_rows` give them.

        Returns:
            bfloat16 [T, (M+1)*E].
        """
        scale = None if self.wkv_scale is None else self.wkv_scale[...]
        expanded = None if self.wkv_expanded is None else self.wkv_expanded[...]
        options: Any = {"expanded": expanded, "backend": self.backend}
        weight = self.wkv_weight[...]
        if self.sharding is None:
            return kernels.wkv(rows, weight, scale, **options)
        streams, width = self.q_weight.shape
        return mesh_layer.project(
            self.sharding, rows, weight, scale, (streams + 1) * width, **options
        )

    def gate(
        self,
        hidden_states: Float[Array, "T M E"],
        kv: BFloat16[Array, "S N"],
        token_mask: Bool[Array, " T"] | None = None,
    ) -> Float[Array, "T M E"]:
        """Gate a projected value into the residual streams: `kernels.gate`.

        Args:
            hidden_states: the residual streams.
            kv: what `project` gave.
            token_mask: False shuts the gate.

        Returns:
            [T, M, E] in the dtype of `hidden_states`.
        """

        def gate(hidden, kv, q_weight, k_weight, token_mask):
            return kernels.gate(
                hidden,
                kv,
                q_weight,
                k_weight,
                token_mask=token_mask,
                eps=self.eps,
                backend=self.backend,
            )

        return self._by_token(gate, hidden_states, kv, token_mask)

    def gate_values(
        self,
        hidden_states: Float[Array, "T M E"],
        hash_ids: Int32[Array, "T C"],
        token_mask: Bool[Array, " T"] | None = None,
    ) -> Float[Array, "T M"]:
        """Compute the gates alone, to look at them.

        Args:
            hidden_states: the residual streams.
            hash_ids: this layer's rows of each token.
            token_mask: False for tokens whose gate is shut.

        Returns:
            float32 [T, M], 0 where the gate is shut.
        """
        self._check_ids(hidden_states, hash_ids)

        def gates(hidden, kv, q_weight, k_weight, token_mask):
            gates = kernels.gate_values(hidden, kv, q_weight, k_weight, eps=self.eps)
            if token_mask is None:
                return gates
            return jnp.where(token_mask[:, None], gates, 0)

        kv = self.project(self.rows(hash_ids))
        return self._by_token(gates, hidden_states, kv, token_mask)

    def shard(self, sharding: EngramSharding, layer_index: int) -> "Engram":
        """Put a layer of one device on a mesh.

        Args:
            sharding: how it shall lie.
            layer_index: which of the model's Engram layers it is, from 0.

        Returns:
            A new layer, with the same results.
        """
        outputs = sharding.padded_width(self.wkv_weight.shape[0])
        scale = self.wkv_scale
        return Engram(
            self.embedding.shard(sharding, layer_index),
            sharding.place(self.wkv_weight[...], sharding.projection, outputs),
            None
            if scale is None
            else sharding.place(
                scale[...], sharding.projection, outputs // mxfp8.BLOCK
            ),
            sharding.place(self.q_weight[...], P()),
            sharding.place(self.k_weight[...], P()),
            eps=self.eps,
            backend=self.backend,
        )

    def dequantize_projection(self, dtype=jnp.float32) -> None:
        """Replace the FP8 projection by a float one that can be trained.

        Outputs stay as they are until it is trained, since e4m3 times a power of two
        is exact in bfloat16. An already float projection is cast.

        Args:
            dtype: float32 or bfloat16.
        """
        weight = self.wkv_weight[...]
        if self.wkv_scale is not None:
            weight = self._by_output(kernels.dequantize_weight)(
                weight, self.wkv_scale[...]
            )
        self.wkv_weight = nnx.data(nnx.Param(weight.astype(dtype)))
        self.wkv_scale = nnx.data(None)
        self.wkv_expanded = nnx.data(None)

    def expand_projection(self) -> None:
        """Keep a bfloat16 copy of an FP8 projection, for many tokens at a time.

        From some 100 tokens on a GPU's library product is faster than the FP8 kernel.
        It multiplies this copy, or without one a copy that each call makes. The copy
        takes twice the bytes of the weight (315 MB a layer at V4.1's sizes); results
        are those without it.
        """
        if self.wkv_scale is not None and self.wkv_expanded is None:
            expand = self._by_output(kernels.dequantize_weight)
            expanded = expand(self.wkv_weight[...], self.wkv_scale[...])
            self.wkv_expanded = nnx.data(Constant(expanded))

    def quantize_projection(self) -> None:
        """Replace a float projection by an FP8 one: `kernels.quantize_weight`."""
        if self.wkv_scale is None:
            weight, scale = self._by_output(kernels.quantize_weight)(
                self.wkv_weight[...]
            )
            self.wkv_weight = nnx.data(Constant(weight))
            self.wkv_scale = nnx.data(Constant(scale))

    def _by_token(self, function, hidden_states, kv, token_mask):
        """Run a function of each token where the token lies."""
        weights = self.q_weight[...], self.k_weight[...]
        if self.sharding is None:
            return function(hidden_states, kv, *weights, token_mask)
        return mesh_layer.by_token(
            self.sharding, function, hidden_states, kv, *weights, token_mask
        )

    def _by_output(self, function):
        """Run a function of the projection where each part of it lies."""
        sharding = self.sharding
        if sharding is None:
            return function
        spec = sharding.projection
        return lambda *parts: sharding.shard_map(function, (spec,) * len(parts), spec)(
            *parts
        )

    def _check_ids(self, hidden_states, hash_ids) -> None:
        wanted = (hidden_states.shape[0], self.n_hash_cols)
        if hash_ids.shape != wanted:
            raise ValueError(
                f"hash_ids has shape {hash_ids.shape}; hidden_states of shape "
                f"{hidden_states.shape} and {self.n_hash_cols} hash columns need "
                f"{wanted} [T, C]: one layer's rows (EngramBatch.hash_ids has all)"
            )
