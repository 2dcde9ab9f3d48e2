"""Tables of rows that token ids select, wherever the table lives."""

import logging
from typing import Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, BFloat16, Float, Float8e4m3fn, Int32, Integer, UInt8

from . import kernels, mxfp8
from .constant import Constant
from .exchange import fetch_rows, unpad_tokens
from .host_storage import PinnedHostTable
from .host_table import RecordTable
from .peer_read import check_addresses, record_addresses, table_reason
from .sharding import EngramSharding
from .shards import PEER_READ_NEEDS

_LOGGER = logging.getLogger("engram_jax")


@runtime_checkable
class RowStorage(Protocol):
    """A table outside device memory: what `host_storage` offers."""

    num_rows: int
    head_dim: int

    def lookup_packed(self, ids: Int32[Array, "..."]) -> UInt8[Array, "... P"]:
        """Read rows as bytes, inside jit or not; an id outside reads as zeros."""
        ...

    def stored_rows(
        self, part: Literal["weight", "scale"], start: int, stop: int
    ) -> UInt8[np.ndarray, "..."]:
        """Return the bytes of consecutive rows, to save them."""
        ...


class ParallelEngramEmbedding(nnx.Module):
    """Hold one layer's table: FP8 rows on the device, on the host or in a file.

    An FP8 table is a `Constant`, which no optimizer touches. A float table (for
    training) is an `nnx.Param`, and its gradient a scatter-add of its rows.

    Attributes:
        weight: [R, D] rows on the device, or None where `storage` has them.
        scale: [R, D/32] E8M0 bytes, or None.
        storage: a table outside device memory, or None.
        sharding: how the table lies on a mesh, or None on one device.
        layer_index: which of the layers' tables this is, from 0; on a mesh only.
        addresses: where the table's shards lie, for devices that read their peers'
            memory: uint32 [devices, S + 1, 8], or None. Of this process, and of no use
            in a saved state.
    """

    def __init__(
        self,
        weight: (
            Float8e4m3fn[Array, "R D"]
            | UInt8[Array, "R D"]
            | Float[Array, "R D"]
            | None
        ),
        scale: UInt8[Array, "R G"] | None = None,
        *,
        storage: RowStorage | None = None,
        row_start: int = 0,
        backend: kernels.Backend | None = None,
        sharding: EngramSharding | None = None,
        layer_index: int = 0,
    ):
        """Take a table on the device, or one that is stored elsewhere.

        Args:
            weight: e4m3 values or their bytes; without scales, float rows to train.
                None where `storage` has the rows.
            scale: E8M0 bytes.
            storage: a table outside device memory.
            row_start: the id of the table's row 0: a shard's first row.
            backend: of the lookup: None, "pallas", "xla" or "pallas_interpret".
            sharding: how the table lies on a mesh; weight and scale are then what
                `EngramSharding.place_table` gives.
            layer_index: which of the layers' tables this is, from 0; on a mesh only.

        Raises:
            ValueError: there is no table, or there are two; or rows are to come by
                "peer_read", and this table's cannot.
        """
        if (weight is None) == (storage is None):
            raise ValueError(
                "a table is either weight (on the device) or storage (elsewhere); "
                f"{'neither' if weight is None else 'both'} was given"
            )
        self.weight: Any
        self.scale: Any
        if storage is not None:
            self.weight = nnx.data(None)
            self.scale = nnx.data(None)
        elif scale is None:
            self.weight = nnx.data(nnx.Param(weight))
            self.scale = nnx.data(None)
        else:
            self.weight = nnx.data(Constant(weight))
            self.scale = nnx.data(Constant(mxfp8.scale_bytes(scale)))
        if isinstance(storage, RecordTable):
            storage.register()
        self.storage = storage
        self.row_start = row_start
        self.backend: kernels.Backend | None = backend
        self.sharding = sharding
        self.layer_index = layer_index
        self.addresses: Any = nnx.data(None)
        self.record_addresses()

    @classmethod
    def from_storage(cls, storage: RowStorage) -> "ParallelEngramEmbedding":
        """Take a table outside device memory.

        Args:
            storage: a `MappedFileTable`, `PinnedHostTable`, `HostTable` or
                `SharedHostTable`.

        Returns:
            The embedding; its rows are those that a device table would give.
        """
        return cls(None, storage=storage)

    @property
    def num_rows(self) -> int:
        """Count the table's rows, R."""
        return (
            self.storage.num_rows if self.storage is not None else self.weight.shape[0]
        )

    @property
    def head_dim(self) -> int:
        """Give the width of a row, D."""
        return (
            self.storage.head_dim if self.storage is not None else self.weight.shape[1]
        )

    def __call__(
        self, ids: Integer[Array, "..."]
    ) -> BFloat16[Array, "... D"] | Float[Array, "... D"]:
        """Read rows, dequantised.

        Args:
            ids: integers of any shape; one outside the table reads as zeros.

        Returns:
            bfloat16 [..., D]; of a float table, its dtype.

        Example:
            >>> import jax.numpy as jnp
            >>> table = jnp.ones((4, 32), jnp.float8_e4m3fn)
            >>> embedding = ParallelEngramEmbedding(table, jnp.full((4, 1), 128,
            ...                                                     jnp.uint8))
            >>> embedding(jnp.array([3, -1]))[:, 0]
            Array([2, 0], dtype=bfloat16)
        """
        if self.sharding is not None:
            rows = self._fetch(ids)
            packed = rows.dtype == jnp.uint8
            return mxfp8.dequantize(*mxfp8.unpack(rows)) if packed else rows
        if self.storage is not None:
            return mxfp8.dequantize(*mxfp8.unpack(self.lookup_packed(ids)))
        return kernels.lookup(
            self.weight[...],
            None if self.scale is None else self.scale[...],
            ids,
            row_start=self.row_start,
            backend=self.backend,
        )

    def lookup_packed(self, ids: Integer[Array, "..."]) -> UInt8[Array, "... P"]:
        """Read rows as they are stored: D value bytes, then D/32 scale bytes.

        Args:
            ids: integers of any shape; one outside the table reads as zero bytes.

        Returns:
            uint8 [..., D + D/32].

        Raises:
            TypeError: the table is a float table.
        """
        if self.storage is None and self.scale is None:
            raise TypeError("a float table has no packed rows")
        if self.sharding is not None:
            if self.sharding.row_format != "packed":
                raise TypeError(
                    "rows travel as bfloat16 on this mesh; packed rows need "
                    "EngramSharding.on(..., row_format='packed')"
                )
            return self._fetch(ids)
        if self.storage is not None:
            return self.storage.lookup_packed(kernels.narrow_ids(ids))
        return kernels.lookup_packed(
            self.weight[...],
            self.scale[...],
            ids,
            row_start=self.row_start,
            backend=self.backend,
        )

    def record_addresses(self) -> None:
        """Write down where the shards lie, for devices that read their peers' memory.

        The constructor does it. Call it again after putting another table in place of
        this one, outside of jit; a step that is traced takes the addresses along.

        Raises:
            ValueError: rows are to come by "peer_read", and this table's cannot.
            RuntimeError: a process cannot open another's memory.
        """
        if self.sharding is None or not self.sharding.reads_peers:
            return
        weight, scale = (
            # Not part[...], which a shape that stands in for an array does not have.
            None if part is None else part.get_value()
            for part in (self.weight, self.scale)
        )
        reason = table_reason(weight, scale, self.backend)
        if reason is None:
            known = record_addresses(self.sharding, self.layer_index, weight, scale)
            self.addresses = nnx.data(Constant(known))
            return
        if self.sharding.exchange == "peer_read":
            raise ValueError(
                f"exchange='peer_read' cannot read the table of layer index "
                f"{self.layer_index}: {reason}; {PEER_READ_NEEDS}. exchange=None takes "
                "a collective where one is needed"
            )
        text = "table of layer index %d: rows come by %s, not by peer_read (%s)"
        _LOGGER.info(text, self.layer_index, self.sharding.exchange, reason)
        self.addresses = nnx.data(None)

    def check_addresses(self) -> None:
        """Refuse a table that does not lie where its addresses were recorded.

        Fetching rows outside of jit does it. Inside, where arrays have no address yet,
        each device compares its own shard's only, and rows are NaN where they differ.

        Raises:
            ValueError: the table was replaced, copied or restored since; call
                `record_addresses`.
        """
        if self.addresses is not None:
            parts = (self.weight[...], self.scale[...], self.addresses[...])
            check_addresses(self.layer_index, *parts)

    def shard(
        self, sharding: EngramSharding, layer_index: int
    ) -> "ParallelEngramEmbedding":
        """Put a table of one device on a mesh.

        Args:
            sharding: how it shall lie.
            layer_index: which of the layers' tables this is, from 0.

        Returns:
            A new embedding. A table in pinned host memory is cut, too; one in a file
            or in shared memory stays where it is, and each device reads its shard's
            rows of it.

        Raises:
            ValueError: the table is already a shard.
        """
        if self.sharding is not None or self.row_start:
            raise ValueError("the table is a shard already; shard the whole one")
        pinned = isinstance(self.storage, PinnedHostTable)
        holder: Any = self.storage if pinned else self

        def place(part):
            if part is None:
                return None
            known = np.asarray(part[...])
            return sharding.place_table(
                layer_index,
                lambda start, end: known[start:end],
                known.shape[1],
                known.dtype,
                memory_kind="pinned_host" if pinned else None,
            )

        outside = self.storage is not None and not pinned
        return ParallelEngramEmbedding(
            None if outside else place(holder.weight),
            None if outside else place(holder.scale),
            storage=self.storage if outside else None,
            backend=self.backend,
            sharding=sharding,
            layer_index=layer_index,
        )

    def _fetch(self, ids):
        """Rows of ids [T, C] from the shards that hold them."""
        assert self.sharding is not None
        if ids.ndim != 2:
            raise ValueError(
                f"ids have shape {ids.shape}; on a mesh they must be [T, C], since "
                "shards hold whole columns"
            )
        narrow = kernels.narrow_ids(ids)[:, None]
        rows = fetch_rows(self.sharding, [self], narrow, [self.layer_index])
        return unpad_tokens(self.sharding, rows, ids.shape[0])[:, 0]
