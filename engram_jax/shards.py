"""Which rows of a table each shard holds, and how they reach the tokens."""

import dataclasses
import math
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from .layout import EngramLayout

Cut = Literal["heads", "rows"]
Exchange = Literal[
    "all_gather", "all_to_all", "all_reduce", "reduce_scatter", "peer_read"
]
RowFormat = Literal["packed", "bfloat16"]
IdsExchange = Literal["all_gather", "all_to_all"]

_EXCHANGES_OF_CUT: dict[str, tuple[Exchange, ...]] = {
    "heads": ("all_gather", "all_to_all", "peer_read"),
    "rows": ("all_reduce", "reduce_scatter", "peer_read"),
}
# Up to this many tokens of a device, rows are read from the peers' memory where that is
# possible. The most that was measured, on two H200s: two layers' rows of so many tokens
# of each take 760 us, and 1,185 us by the packed all_to_all. Below, too, it is faster.
PEER_READ_UP_TO = 32_768
PEER_READ_NEEDS = (
    "it needs FP8 tables in the memory of GPUs (Hopper or newer) of one host that "
    "reach each other"
)
# More idle memory than this in a column cut is worth a line in the reason.
_WORTH_SAYING = 1.02


@dataclasses.dataclass(frozen=True, eq=False)
class TableShards:
    """Say which rows each of S shards holds, for every Engram layer.

    `cut="heads"`: shard s holds the columns [s * columns, (s + 1) * columns), so it
    answers for them alone and for all tokens; the last shards may hold fewer or none.
    `cut="rows"`: shard s holds rows [s * ceil(R / S), (s + 1) * ceil(R / S)) and
    answers for the ids among them, of any column.

    A device array holds S * rows_per_shard rows: every shard has room for the largest
    one, and rows beyond its own are padding that no id reaches.

    Attributes:
      cut: "heads" or "rows".
      num_shards: S.
      n_hash_cols: C.
      columns: Hash columns that each shard looks up: ceil(C / S), or C.
      row_start: First row of each shard, int64 [L, S].
      row_end: One past its last row, int64 [L, S].
      rows_per_shard: Rows that every shard has room for, by layer.
      reason: Why the tables are cut so.
    """

    cut: Cut
    num_shards: int
    n_hash_cols: int
    columns: int
    row_start: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    row_end: npt.NDArray[np.int64] = dataclasses.field(repr=False)
    rows_per_shard: tuple[int, ...]
    reason: str = dataclasses.field(repr=False)

    @classmethod
    def choose(
        cls, layout: EngramLayout, num_shards: int, cut: Cut | None = None
    ) -> "TableShards":
        """Cut the tables, by whole columns where there are enough of them.

        A column cut moves each row once; a row cut must add up the answers of all
        shards. So columns are kept together up to S = C.

        Args:
          layout: Rows and columns of each layer.
          num_shards: S, at least 1.
          cut: "heads" or "rows"; None chooses.

        Returns:
          The shards.

        Raises:
          ValueError: The cut leaves shards that can hold nothing: more shards than
            columns (heads) or than rows (rows).

        Example:
          >>> from engram_jax import EngramLayout
          >>> layout = EngramLayout(
          ...     layer_ids=(0,), primes=np.array([[[101], [103]]]),
          ...     offsets=np.array([[0, 101]]), multipliers=np.array([[3, 5, 7]]),
          ...     num_rows=(204,), pad_token_id=99, compressed_vocab_size=100,
          ...     max_ngram_size=3, n_heads=1)
          >>> TableShards.choose(layout, 2).row_start.tolist()
          [[0, 101]]
          >>> TableShards.choose(layout, 3).cut
          'rows'
        """
        if num_shards < 1:
            raise ValueError(f"num_shards is {num_shards}; it must be at least 1")
        if cut not in (None, "heads", "rows"):
            raise ValueError(
                f"cut is {cut!r}; it must be None, 'heads' (whole hash columns) or "
                "'rows' (equal row ranges)"
            )
        columns, asked = layout.n_hash_cols, cut is not None
        if cut is None:
            cut = "heads" if num_shards <= columns else "rows"
        if cut == "heads":
            return cls._by_heads(layout, num_shards, asked)
        return cls._by_rows(layout, num_shards, asked)

    @classmethod
    def _by_heads(cls, layout, num_shards, asked):
        total = layout.n_hash_cols
        if num_shards > total:
            raise ValueError(
                f"{num_shards} shards cannot each hold a whole hash column: there are "
                f"{total}, so {num_shards - total} devices would have no rows. Use "
                "cut='rows', or fewer shards"
            )
        columns = -(-total // num_shards)
        ends = np.append(layout.offsets, np.array(layout.num_rows)[:, None], axis=1)
        first = np.minimum(np.arange(num_shards) * columns, total)
        start = ends[:, first]
        end = ends[:, np.minimum(first + columns, total)]
        rows = tuple(int(n) for n in (end - start).max(axis=1))
        reason = "as asked" if asked else f"{num_shards} shards for {total} columns"
        idle = num_shards * max(rows) / max(sum(r) for r in (end - start))
        if idle > _WORTH_SAYING:
            reason += (
                f"; {columns} columns a shard leave {idle - 1:.0%} of the memory idle, "
                f"which cut='rows' would not, at more bytes exchanged"
            )
        return cls("heads", num_shards, total, columns, start, end, rows, reason)

    @classmethod
    def _by_rows(cls, layout, num_shards, asked):
        total = np.array(layout.num_rows, np.int64)
        rows = -(-total // num_shards)
        start = np.minimum(rows[:, None] * np.arange(num_shards), total[:, None])
        end = np.minimum(start + rows[:, None], total[:, None])
        if (end <= start).any():
            layer = layout.layer_ids[int(np.argwhere(end <= start)[0][0])]
            index = layout.layer_ids.index(layer)
            raise ValueError(
                f"{num_shards} shards are too many for layer {layer}'s {total[index]} "
                f"rows: with {rows[index]} rows a shard, devices would have no rows. "
                f"Use at most {_most_shards(int(total.min()))} shards"
            )
        reason = (
            "as asked"
            if asked
            else f"{num_shards} shards are more than the {layout.n_hash_cols} columns"
        )
        columns = layout.n_hash_cols
        rows = tuple(int(n) for n in rows)
        return cls("rows", num_shards, columns, columns, start, end, rows, reason)

    def num_rows(self, layer: int) -> int:
        """Count the rows of a layer's device array, padding included.

        Args:
          layer: The layer's index, from 0.

        Returns:
          S * rows_per_shard.
        """
        return self.num_shards * self.rows_per_shard[layer]

    @property
    def num_layers(self) -> int:
        """Count the Engram layers, L."""
        return len(self.rows_per_shard)


def _most_shards(rows: int) -> int:
    """The largest count up to sqrt(rows) always works: each range is not empty."""
    return math.isqrt(rows)


def exchanges_of(cut: Cut) -> tuple[Exchange, ...]:
    """List the forms of exchange that suit a cut."""
    return _EXCHANGES_OF_CUT[cut]


def choose_exchange(
    cut: Cut, split: bool, exchange: Exchange | None, peer_reason: str | None
) -> tuple[Exchange, str]:
    """Choose how rows come back to the tokens' devices.

    Args:
      cut: How the tables are cut.
      split: Whether tokens lie over axes that the tables are cut over, too.
      exchange: What the user asks for; None chooses a collective.
      peer_reason: Why devices cannot read their peers' memory, or None.

    Returns:
      The exchange, and why.

    Raises:
      ValueError: It does not suit the cut, or these devices.
    """
    allowed = _EXCHANGES_OF_CUT[cut]
    if exchange is not None:
        if exchange not in allowed:
            raise ValueError(
                f"exchange is {exchange!r}; tables cut by {cut} take "
                f"{' or '.join(map(repr, allowed))}, or None to choose"
            )
        if exchange == "peer_read" and peer_reason is not None:
            raise ValueError(
                f"exchange='peer_read' cannot run on this mesh: {peer_reason}; "
                f"{PEER_READ_NEEDS}. None chooses what can run"
            )
        return exchange, "as asked"
    if cut == "heads":
        if split:
            return "all_to_all", "each device needs its own tokens' rows only"
        return "all_gather", "every device needs the rows of the same tokens"
    if split:
        return "reduce_scatter", "each device needs its own tokens' rows only"
    return "all_reduce", "every device needs the rows of the same tokens"


def choose_peer_read(
    num_shards: int, exchange: Exchange | None, peer_reason: str | None
) -> tuple[int, str]:
    """Choose up to how many tokens rows are read from the peers' memory.

    Args:
      num_shards: S.
      exchange: What the user asks for; None chooses.
      peer_reason: Why devices cannot read their peers' memory, or None.

    Returns:
      Tokens of a device up to which "peer_read" takes the place of the collective, and
      why.
    """
    if exchange is not None:
        return 0, f"exchange is {exchange!r} as asked"
    if num_shards == 1:
        return 0, "every device holds all rows"
    if peer_reason is not None:
        return 0, peer_reason
    return PEER_READ_UP_TO, (
        f"up to {PEER_READ_UP_TO} tokens of a device, where it measured faster"
    )


def choose_projection(cut: bool | None, tensor: bool) -> tuple[bool, str]:
    """Choose whether the projection is cut over the tensor axis.

    Args:
      cut: What the user asks for; None chooses.
      tensor: Whether there is such an axis.

    Returns:
      Whether it is cut, and why.
    """
    if not tensor:
        return False, "there is no tensor axis to cut it over"
    if cut is not None:
        return cut, "as asked"
    return False, (
        "whole on every device, which is faster but for thousands of tokens without "
        "sequence parallelism: two layers took 168 us on two H200s for 16 tokens, and "
        "352 cut; 501 and 560 for 512; 3,682 and 3,203 for 4,096"
    )


def choose_ids_exchange(
    cut: Cut, replicas: int, exchange: IdsExchange | None
) -> tuple[IdsExchange, str]:
    """Choose how ids of all replicas come to the shards.

    Args:
      cut: How the tables are cut.
      replicas: How many share the tables.
      exchange: What the user asks for; None chooses.

    Returns:
      The exchange, and why.

    Raises:
      ValueError: It is unknown, or does not suit the cut.
    """
    if exchange is not None:
        if exchange not in get_args(IdsExchange):
            raise ValueError(
                f"ids_exchange is {exchange!r}; it must be None, 'all_gather' or "
                "'all_to_all'"
            )
        if exchange == "all_to_all" and cut == "rows":
            raise ValueError(
                "ids_exchange='all_to_all' sends each shard its columns' ids; a row "
                "shard needs the ids of all columns: use 'all_gather'"
            )
        return exchange, "as asked"
    if cut == "rows":
        return "all_gather", "a row shard needs the ids of all columns"
    if replicas == 1:
        return "all_gather", "one replica has all the ids that a shard serves"
    return "all_to_all", (
        "fewer bytes than all ids gathered, and one operation fewer: on two H200s the "
        "packed rows of two layers came at 67 % of a plain all_to_all's rate, and at "
        "65 % with ids gathered; those of one layer at 72 % and 65 %"
    )
