"""One Engram layer: rows to keys and value, gated into the residual streams."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Bool, Float, Int32, UInt8

from . import kernels, mxfp8
from .constant import Constant
from .embedding import ParallelEngramEmbedding


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
        streams, width = q_weight.shape
        if wkv_weight.shape[0] != (streams + 1) * width or (
            wkv_weight.shape[1] % embedding.head_dim
        ):
            raise ValueError(
                f"wkv_weight has shape {wkv_weight.shape}; q_weight of shape "
                f"{q_weight.shape} and rows of {embedding.head_dim} values need "
                f"[{(streams + 1) * width}, a multiple of {embedding.head_dim}]"
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
        self.q_weight = nnx.Param(q_weight)
        self.k_weight = nnx.Param(k_weight)
        self.eps = float(eps)
        self.backend: kernels.Backend | None = backend

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
        return self.gate(hidden_states, self.project(self.rows(hash_ids)), token_mask)

    def rows(
        self, hash_ids: Int32[Array, "T C"]
    ) -> Float[Array, "T C D"] | UInt8[Array, "T C P"]:
        """Read each token's rows, in a form that `project` takes.

        Args:
            hash_ids: rows of each token.

        Returns:
            bfloat16 [T, C, D] from device memory (a float table's dtype, if it is
            one); from elsewhere the stored bytes, uint8 [T, C, D + D/32].
        """
        if self.embedding.storage is not None:
            return self.embedding.lookup_packed(hash_ids)
        return self.embedding(hash_ids)

    def project(
        self, rows: Float[Array, "T C D"] | UInt8[Array, "T C P"]
    ) -> BFloat16[Array, "T N"]:
        """Project rows to M keys and one value: `kernels.wkv`.

        Args:
            rows: each token's rows.

        Returns:
            bfloat16 [T, (M+1)*E].
        """
        scale = None if self.wkv_scale is None else self.wkv_scale[...]
        return kernels.wkv(rows, self.wkv_weight[...], scale, backend=self.backend)

    def gate(
        self,
        hidden_states: Float[Array, "T M E"],
        kv: BFloat16[Array, "T N"],
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
        return kernels.gate(
            hidden_states,
            kv,
            self.q_weight[...],
            self.k_weight[...],
            token_mask=token_mask,
            eps=self.eps,
            backend=self.backend,
        )

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
        gates = kernels.gate_values(
            hidden_states,
            self.project(self.rows(hash_ids)),
            self.q_weight[...],
            self.k_weight[...],
            eps=self.eps,
        )
        return gates if token_mask is None else jnp.where(token_mask[:, None], gates, 0)

    def dequantize_projection(self, dtype=jnp.float32) -> None:
        """Replace the FP8 projection by a float one that can be trained.

        Outputs stay as they are until it is trained, since e4m3 times a power of two
        is exact in bfloat16. An already float projection is cast.

        Args:
            dtype: float32 or bfloat16.
        """
        weight = self.wkv_weight[...]
        if self.wkv_scale is not None:
            weight = kernels.dequantize_weight(weight, self.wkv_scale[...])
        self.wkv_weight = nnx.data(nnx.Param(weight.astype(dtype)))
        self.wkv_scale = nnx.data(None)

    def quantize_projection(self) -> None:
        """Replace a float projection by an FP8 one: `kernels.quantize_weight`."""
        if self.wkv_scale is None:
            weight, scale = kernels.quantize_weight(self.wkv_weight[...])
            self.wkv_weight = nnx.data(Constant(weight))
            self.wkv_scale = nnx.data(Constant(scale))

    def _check_ids(self, hidden_states, hash_ids) -> None:
        wanted = (hidden_states.shape[0], self.n_hash_cols)
        if hash_ids.shape != wanted:
            raise ValueError(
                f"hash_ids has shape {hash_ids.shape}; hidden_states of shape "
                f"{hidden_states.shape} and {self.n_hash_cols} hash columns need "
                f"{wanted} [T, C]: one layer's rows (EngramBatch.hash_ids has all)"
            )
