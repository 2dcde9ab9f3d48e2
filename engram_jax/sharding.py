"""Engram on a device mesh: axes, partition specs, and arrays made shard by shard."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import numpy as np
from jax.sharding import (
    AbstractMesh,
    Mesh,
    SingleDeviceSharding,
)
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from . import mxfp8
from .device_mesh import Axes, DeviceMesh, axis_names
from .layout import EngramLayout
from .peer_read import mesh_reason
from .shards import (
    Cut,
    Exchange,
    IdsExchange,
    RowFormat,
    TableShards,
    choose_exchange,
    choose_ids_exchange,
    choose_peer_read,
    choose_projection,
)

_LOGGER = logging.getLogger("engram_jax")

TENSOR_AXIS = "tp"
DATA_AXIS = "dp"


@dataclasses.dataclass(frozen=True)
class EngramSharding(DeviceMesh):
    """Say how tables, projections and tokens lie on a mesh, and how rows travel.

    Shard number = tp_rank * dp_size + dp_rank: a gather over the data axis brings
    consecutive columns together, and one over the tensor axis completes the order.
    Tokens lie over the data axis; with `sequence_parallel` each replica's tokens lie
    over its tensor axis too. Axes of size 1 take part in nothing.

    `EngramSharding.on` chooses and checks; it is hashable, so that it can be a static
    argument of a jitted function.

    Attributes:
      mesh: The devices; only names and sizes of its axes matter for the result.
      shards: Rows of each shard, by layer.
      tensor_axes: Mesh axes of tensor parallelism, those of size 1 left out.
      data_axes: Mesh axes that tokens lie over, those of size 1 left out.
      table_axes: Mesh axes that tables are cut over, in the shards' order.
      exchange: How rows come back: "all_gather" (columns from all shards; where tokens
        are split over these shards, each then selects its own), "all_to_all" (each
        shard sends each replica its own tokens' columns), "all_reduce" or
        "reduce_scatter" (row shards: their answers are added up), or "peer_read" (GPUs
        of one host: each reads its tokens' rows from the memory of those that hold
        them, no collective).
      peer_read_up_to: Tokens of a device up to which rows come by "peer_read" and not
        by `exchange`; 0 for never. `exchange_for` decides.
      row_format: "packed" (D + D/32 bytes a row) or "bfloat16". A float table's rows
        travel in its own dtype.
      ids_exchange: How ids come to the shards over the data axis.
      sequence_parallel: Whether tokens lie over the tensor axis too.
      shard_projection: Whether `wkv` is cut by output columns over the tensor axis.
      reasons: Why each of these was chosen, by name.
    """

    shards: TableShards
    tensor_axes: tuple[str, ...]
    data_axes: tuple[str, ...]
    table_axes: tuple[str, ...]
    exchange: Exchange
    peer_read_up_to: int
    row_format: RowFormat
    ids_exchange: IdsExchange
    sequence_parallel: bool
    shard_projection: bool
    reasons: tuple[tuple[str, str], ...] = dataclasses.field(compare=False, repr=False)

    @classmethod
    def on(
        cls,
        mesh: Mesh | AbstractMesh,
        layout: EngramLayout,
        *,
        tensor_axis: Axes = TENSOR_AXIS,
        data_axis: Axes = DATA_AXIS,
        spread: bool = True,
        cut: Cut | None = None,
        exchange: Exchange | None = None,
        row_format: RowFormat = "packed",
        ids_exchange: IdsExchange | None = None,
        sequence_parallel: bool = False,
        shard_projection: bool | None = None,
    ) -> "EngramSharding":
        """Choose how Engram lies on a mesh; what is None is chosen, with a reason.

        Args:
          mesh: The devices, with Auto or Explicit axes. An abstract mesh will do to
            plan, but holds no arrays.
          layout: Rows and columns of each layer.
          tensor_axis: Name (or names) of the tensor-parallel mesh axis; None for none.
          data_axis: Name (or names) of the axis that tokens lie over; None for none.
          spread: Cut the tables over the data axis too. False keeps a copy for each
            replica, and nothing travels between replicas.
          cut: "heads" or "rows".
          exchange: One of the forms that suits the cut; None takes a collective, and
            "peer_read" for few tokens where the devices are GPUs of one process that
            reach each other. Where "peer_read" is asked for, they may belong to
            several processes of one host.
          row_format: "packed" or "bfloat16".
          ids_exchange: "all_gather" or "all_to_all" (columns of ids to their shard).
          sequence_parallel: Whether tokens lie over the tensor axis too.
          shard_projection: Whether `wkv` is cut by output columns over the tensor
            axis. None leaves it whole on every device, N * C * D bytes a layer (157 MB
            at V4.1's sizes, and twice that for `expand_projections`): keys and values
            that would have to be gathered are more bytes than the rows. True takes
            that much less memory, and less time for prefills of thousands of tokens
            where tokens are not cut over the tensor axis.

        Returns:
          The sharding.

        Raises:
          ValueError: The mesh lacks an axis, the shard count does not suit the cut, or
            a choice is unknown or contradicts another.

        Example:
          >>> from engram_jax import EngramLayout
          >>> from jax.sharding import AbstractMesh, AxisType
          >>> layout = EngramLayout(
          ...     layer_ids=(0,), primes=np.array([[[101], [103]]]),
          ...     offsets=np.array([[0, 101]]), multipliers=np.array([[3, 5, 7]]),
          ...     num_rows=(204,), pad_token_id=99, compressed_vocab_size=100,
          ...     max_ngram_size=3, n_heads=1)
          >>> mesh = AbstractMesh((1, 2), ("tp", "dp"), (AxisType.Auto,) * 2)
          >>> sharding = EngramSharding.on(mesh, layout)
          >>> sharding.shards.cut, sharding.exchange, sharding.spec("T M E")[0]
          ('heads', 'all_to_all', 'dp')
        """
        tensor = axis_names(mesh, tensor_axis, "tensor_axis")
        data = axis_names(mesh, data_axis, "data_axis")
        both = set(tensor) & set(data)
        if both:
            raise ValueError(
                f"mesh axis {sorted(both)[0]!r} is named as tensor_axis and as "
                "data_axis; an axis can be one of them"
            )
        table_axes = tensor + (data if spread else ())
        count = math.prod(mesh.shape[axis] for axis in table_axes)
        shards = TableShards.choose(layout, count, cut)
        split = bool(set(data) & set(table_axes)) or (
            sequence_parallel and bool(tensor)
        )
        across = exchange == "peer_read"
        peer_reason = mesh_reason(mesh, across_processes=across)
        up_to, why_peers = choose_peer_read(count, exchange, peer_reason)
        exchange, why = choose_exchange(shards.cut, split, exchange, peer_reason)
        replicas = math.prod(mesh.shape[a] for a in data if a in table_axes)
        ids_exchange, why_ids = choose_ids_exchange(shards.cut, replicas, ids_exchange)
        if row_format not in get_args(RowFormat):
            raise ValueError(
                f"row_format is {row_format!r}; it must be 'packed' (the stored bytes) "
                "or 'bfloat16'"
            )
        cut_wkv, why_wkv = choose_projection(shard_projection, bool(tensor))
        text = "tables cut by %s (%s), rows come by %s (%s); by peer_read %s (%s)"
        when = f"up to {up_to} tokens of a device" if up_to else "never"
        if exchange == "peer_read":
            when = "always"
        reasons = (shards.cut, shards.reason, exchange, why, when, why_peers)
        _LOGGER.info(text, *reasons)
        return cls(
            mesh=mesh,
            shards=shards,
            tensor_axes=tensor,
            data_axes=data,
            table_axes=table_axes,
            exchange=exchange,
            peer_read_up_to=up_to,
            row_format=row_format,
            ids_exchange=ids_exchange,
            sequence_parallel=sequence_parallel and bool(tensor),
            shard_projection=cut_wkv,
            reasons=(
                ("cut", shards.reason),
                ("exchange", why),
                ("peer_read", why_peers),
                ("ids_exchange", why_ids),
                ("shard_projection", why_wkv),
            ),
        )

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Name the mesh axes that tokens of the hidden states lie over."""
        return self.data_axes + (self.tensor_axes if self.sequence_parallel else ())

    @property
    def row_token_axes(self) -> tuple[str, ...]:
        """Name the mesh axes that tokens of the fetched rows lie over."""
        return self.data_axes if self.shard_projection else self.token_axes

    @property
    def reads_peers(self) -> bool:
        """Say whether rows may come by "peer_read", so that addresses are recorded."""
        return bool(self.table_axes) and (
            self.exchange == "peer_read" or self.peer_read_up_to > 0
        )

    def exchange_for(self, num_tokens: int) -> Exchange:
        """Give the form in which the rows of a step come, where tables allow it.

        Args:
          num_tokens: T, of all replicas together.

        Returns:
          `exchange`, or "peer_read" for as few tokens as `peer_read_up_to` says.
        """
        mine = self.own_tokens(num_tokens)
        return "peer_read" if mine <= self.peer_read_up_to else self.exchange

    def own_tokens(self, num_tokens: int) -> int:
        """Count the tokens whose rows come to one device, padding included.

        Args:
          num_tokens: T, of all replicas together.

        Returns:
          `pad_tokens` of them over the axes that rows are cut by tokens over.
        """
        return self.pad_tokens(num_tokens) // self.size(self.row_token_axes)

    def spec(self, letters: str) -> P:
        """Give the partition spec of an array by its shape letters.

        T lies over the token axes, R (rows of a table) over the table axes, N (outputs
        of the projection) over the tensor axis; all other letters are whole everywhere.

        Args:
          letters: As in the legend of shapes, such as "T M E" or "R D".

        Returns:
          The partition spec.
        """
        over = {
            "T": self.token_axes,
            "R": self.table_axes,
            "N": self.tensor_axes if self.shard_projection else (),
        }
        entries = [over.get(letter) or None for letter in letters.split()]
        return P(*entries) if any(entries) else P()

    @property
    def tokens(self) -> P:
        """Give the partition spec of anything by token: [T, ...]."""
        return self.spec("T")

    @property
    def replica(self) -> P:
        """Give the partition spec of what each replica has whole, such as its ids."""
        return P(self.data_axes) if self.data_axes else P()

    @property
    def rows(self) -> P:
        """Give the partition spec of fetched rows [T, L, C, W]."""
        return P(self.row_token_axes) if self.row_token_axes else P()

    @property
    def by_device(self) -> P:
        """Give the partition spec of what each device has for itself: [devices, ..]."""
        return P(tuple(self.mesh.axis_names))

    @property
    def table(self) -> P:
        """Give the partition spec of a table's values [R, D] and scales [R, D/32]."""
        return self.spec("R D")

    @property
    def projection(self) -> P:
        """Give the partition spec of wkv weight [N, C*D] and scale [N/32, C*D/32]."""
        return self.spec("N CD")

    def pad_tokens(self, num_tokens: int) -> int:
        """Round a token count up to one that splits evenly over the devices.

        Args:
          num_tokens: T, of all replicas together.

        Returns:
          The count that hashes, rows and hidden states are padded to inside.
        """
        pieces = self.size(self.token_axes)
        return -(-num_tokens // pieces) * pieces

    def padded_width(self, width: int) -> int:
        """Round a projection's output width up to whole blocks on every device.

        Args:
          width: N = (M + 1) * E.

        Returns:
          The width of the stored weight; columns past N are zeros, and dropped.
        """
        if not self.shard_projection:
            return width
        unit = mxfp8.BLOCK * self.size(self.tensor_axes)
        return -(-width // unit) * unit

    def owned_rows(self, layer: int) -> Iterator[tuple[int, int]]:
        """List the row ranges that this process's devices hold, each once.

        Args:
          layer: The layer's index, from 0.

        Yields:
          First row and one past the last, in the shards' order; empty shards are
          left out.
        """
        rows = self.shards.rows_per_shard[layer]
        total = self.shards.num_rows(layer)
        indices = self.named(self.table).addressable_devices_indices_map((total,))
        owned = {(index[0].start or 0) // rows for index in indices.values() if index}
        for shard in sorted(owned):
            start, end = self._range(layer, shard)
            if end > start:
                yield start, end

    def place_table(
        self,
        layer: int,
        read: Callable[[int, int], np.ndarray],
        width: int,
        dtype: Any,
        *,
        memory_kind: str | None = None,
    ) -> Array:
        """Make a table's device array of its shards, reading only this process's rows.

        A shard smaller than the largest is padded with zero bytes.

        Args:
          layer: The layer's index, from 0.
          read: Gives the table's rows [start, end); may be a view of a mapped file.
          width: Columns of the array: D of the values, D/32 of the scales.
          dtype: Of the array.
          memory_kind: As of `jax.sharding.NamedSharding`.

        Returns:
          [S * rows_per_shard, width], cut over `table_axes`.
        """
        rows = self.shards.rows_per_shard[layer]
        shape = (self.shards.num_rows(layer), width)
        place = self.named(self.table, memory_kind)
        holders: dict[int, list[Any]] = {}
        for device, index in place.addressable_devices_indices_map(shape).items():
            assert index is not None
            holders.setdefault((index[0].start or 0) // rows, []).append(device)
        parts = []
        for shard, devices in sorted(holders.items()):
            block = self._padded_shard(layer, shard, read, (rows, width), dtype)
            kinds = {"memory_kind": memory_kind} if memory_kind else {}
            parts += [
                jax.device_put(block, SingleDeviceSharding(device, **kinds))
                for device in devices
            ]
            # One shard at a time in host memory, and not a queue of them.
            jax.block_until_ready(parts[-len(devices) :])
        return jax.make_array_from_single_device_arrays(shape, place, parts)

    def _padded_shard(self, layer, shard, read, shape, dtype) -> np.ndarray:
        start, end = self._range(layer, shard)
        if end - start == shape[0]:
            return read(start, end)
        # Zero pages cost nothing until they are written, so padding is free.
        padded = np.zeros(shape, dtype)
        if end > start:
            padded[: end - start] = read(start, end)
        return padded

    def place(
        self, array: np.ndarray | Array, spec: P, pad_to: int | None = None
    ) -> Array:
        """Put an array, known whole in every process, on the mesh.

        Args:
          array: The values.
          spec: Its partition spec.
          pad_to: Pad the first axis with zero bytes to this length.

        Returns:
          The device array; each process puts only its own shards.
        """
        known = np.asarray(array)
        if pad_to is not None and pad_to > len(known):
            padded = np.zeros((pad_to, *known.shape[1:]), known.dtype)
            padded[: len(known)] = known
            known = padded
        return jax.make_array_from_callback(
            known.shape, self.named(spec), lambda index: known[index], known.dtype
        )

    def check_memory(
        self, bytes_per_row: int, limit: int | None = None, what: str = "device"
    ) -> int:
        """Refuse tables that no device could hold, before anything is allocated.

        Args:
          bytes_per_row: Bytes of a row, D + D/32 for FP8.
          limit: Bytes that each device may give to tables; None asks the devices,
            and checks nothing where they do not say (CPUs).
          what: Whose memory it is, for the message.

        Returns:
          The bytes that each device gives to the tables of all layers.

        Raises:
          ValueError: They are more than the limit.
        """
        needed = sum(self.shards.rows_per_shard) * bytes_per_row
        if limit is None:
            limits = [
                (device.memory_stats() or {}).get("bytes_limit")
                for device in self.mesh.local_devices
            ]
            limit = min((known for known in limits if known), default=None)
        if limit is not None and needed > limit:
            enough = -(-needed * self.shards.num_shards // limit)
            raise ValueError(
                f"the Engram tables take {needed:,} bytes on each {what} over "
                f"{self.shards.num_shards} shards, and it has {limit:,}. About "
                f"{enough} devices would do (a larger tensor axis, or spread=True over "
                "the data axis), or a placement in host memory or a mapped file"
            )
        return needed

    def _range(self, layer: int, shard: int) -> tuple[int, int]:
        return (
            int(self.shards.row_start[layer, shard]),
            int(self.shards.row_end[layer, shard]),
        )
