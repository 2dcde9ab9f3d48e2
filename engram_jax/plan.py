"""Say what a mesh would hold and exchange: ``python -m engram_jax plan CONFIG``."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal, get_args

from jax.sharding import AbstractMesh, AxisType

from .checkpoint_files import Placement
from .config import QUANT_BLOCK, EngramConfig
from .layout import EngramLayout
from .sharding import DATA_AXIS, TENSOR_AXIS, EngramSharding
from .shards import (
    PEER_READ_NEEDS,
    PEER_READ_UP_TO,
    Cut,
    Exchange,
    IdsExchange,
    RowFormat,
    exchanges_of,
)

_ID_BYTES = 4
_KV_BYTES = 2

Collective = Literal[
    "all-gather", "all-to-all", "all-reduce", "reduce-scatter", "peer-read"
]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Describe one collective of a step, as it stands in the compiled program.

    Attributes:
      what: "ids", "rows" or "kv" (the projection's outputs).
      collective: Its name in HLO; or "peer-read", a kernel that reads other GPUs'
        memory.
      devices: Devices that take part in one group.
      result_bytes: Bytes of its result on one device; those that a peer read reads of
        the tables, whichever form the rows then have.
      times: How often a step runs it: once, or once a layer.
    """

    what: str
    collective: Collective
    devices: int
    result_bytes: int
    times: int = 1

    @property
    def received(self) -> int:
        """Count the bytes that one device takes in each step.

        Collectives by ring algorithms; of a peer read, an even share from each device,
        as a cut by heads has it where it divides, and a cut by rows on average.
        """
        others, size = self.devices - 1, self.result_bytes
        each = {
            "all-gather": size * others // self.devices,
            "all-to-all": size * others // self.devices,
            "peer-read": size * others // self.devices,
            "reduce-scatter": size * others,
            "all-reduce": 2 * size * others // self.devices,
        }[self.collective]
        return each * self.times


def transfers(
    sharding: EngramSharding, config: EngramConfig, tokens: int
) -> list[Transfer]:
    """List the collectives of one step, from ids to gated streams.

    Args:
      sharding: How Engram lies on the mesh; FP8 tables.
      config: The model's sizes.
      tokens: The slot: tokens of each replica, padding included.

    Returns:
      The collectives in their order; none for axes of size 1.
    """
    layers, columns = config.num_layers, config.n_hash_cols
    replicas = sharding.size(sharding.data_axes)
    slot = sharding.pad_tokens(tokens * replicas) // replicas
    shards = sharding.shards
    serving = sharding.size([a for a in sharding.data_axes if a in sharding.table_axes])
    served = slot * serving
    result: list[Transfer] = []

    def add(what: str, collective: Collective, devices: int, size: int, times=1):
        if devices > 1 and size:
            result.append(Transfer(what, collective, devices, size, times))

    # Columns that travel are whole shards: those that are missing in the last, too.
    together = shards.num_shards * shards.columns
    by_peers = sharding.exchange_for(tokens * replicas) == "peer_read"
    if by_peers:
        pass  # a device looks up its own tokens' ids only
    elif shards.cut == "rows":
        add("ids", "all-gather", serving, served * layers * columns * _ID_BYTES)
    elif sharding.ids_exchange == "all_to_all":
        size = slot * layers * serving * shards.columns * _ID_BYTES
        add("ids", "all-to-all", serving, size)
    else:
        size = served * layers * serving * shards.columns * _ID_BYTES
        add("ids", "all-gather", serving, size)

    stored = config.head_dim + config.head_dim // QUANT_BLOCK
    row = stored if sharding.row_format == "packed" else config.head_dim * 2
    split = sharding.size(
        [a for a in sharding.row_token_axes if a in sharding.table_axes]
    )
    kept = shards.num_shards // split
    mine = served // split
    if by_peers:
        own = slot * replicas // sharding.size(sharding.row_token_axes)
        add("rows", "peer-read", shards.num_shards, own * layers * columns * stored)
    elif sharding.exchange == "all_gather":
        add("rows", "all-gather", shards.num_shards, served * layers * together * row)
    elif sharding.exchange == "all_to_all":
        add("rows", "all-to-all", split, served * layers * shards.columns * row)
        add("rows", "all-gather", kept, mine * layers * together * row)
    elif sharding.exchange == "all_reduce":
        add("rows", "all-reduce", shards.num_shards, served * layers * columns * row)
    else:
        add("rows", "reduce-scatter", split, mine * layers * columns * row)
        add("rows", "all-reduce", kept, mine * layers * columns * row)

    if sharding.shard_projection:
        ranks = sharding.size(sharding.tensor_axes)
        width = sharding.padded_width((config.hc_mult + 1) * config.hidden_size)
        size = slot * width * _KV_BYTES
        if sharding.sequence_parallel:
            add("kv", "all-to-all", ranks, size // ranks, layers)
        else:
            add("kv", "all-gather", ranks, size, layers)
    return result


@dataclasses.dataclass(frozen=True)
class Choice:
    """Hold what one form of exchange moves.

    Attributes:
      exchange: The form.
      row_format: What travels.
      chosen: Whether it is the one that runs.
      transfers: Its collectives.
      bytes_per_step: Bytes that one device takes in each step.
      bytes_per_token: The same for each token of a replica.
    """

    exchange: Exchange
    row_format: RowFormat
    chosen: bool
    transfers: tuple[Transfer, ...]
    bytes_per_step: int
    bytes_per_token: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold what a mesh would hold and exchange.

    Attributes:
      devices: Devices of the mesh.
      cut: "heads" or "rows".
      shards: Shards of each table.
      table_bytes: Bytes of the tables' shards on each device, wherever they live.
      weight_bytes: Bytes of all else on each device: projections, norm weights, map.
      device_bytes: Device memory taken on each "device", and by those of each
        "process" and "node".
      host_bytes: Host memory that tables take for each "process" and "node"; what a
        node's processes share is counted once, in "node".
      choices: The forms of exchange that suit the cut.
      reasons: Why things were chosen.
    """

    devices: int
    cut: Cut
    shards: int
    table_bytes: int
    weight_bytes: int
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    choices: tuple[Choice, ...]
    reasons: dict[str, str]


def make_plan(
    config: EngramConfig,
    *,
    tp: int = 1,
    dp: int = 1,
    tokens: int = 1,
    placement: Placement = "device",
    devices_per_process: int = 1,
    processes_per_node: int = 1,
    device_memory: int | None = None,
    **choices: Any,
) -> Plan:
    """Compute what each device, process and node would hold, and what would travel.

    Args:
      config: The model's sizes.
      tp: Tensor-parallel devices.
      dp: Replicas.
      tokens: Tokens of each replica in a step.
      placement: Where the tables shall live.
      devices_per_process: Devices that one process drives.
      processes_per_node: Processes on one node.
      device_memory: Bytes that a device may give to tables; None for any.
      **choices: What `EngramSharding.on` takes: spread, cut, exchange and so on.

    Returns:
      The plan.

    Raises:
      ValueError: A choice cannot work, or the tables are larger than device_memory.

    Example:
      >>> config = EngramConfig(
      ...     layer_ids=(1, 14), num_embeddings=(384006168, 384016682),
      ...     max_ngram_size=4, vocab_base=16000000, n_heads=8, head_dim=256,
      ...     pad_token_id=2, hidden_size=5120, hc_mult=4, rms_norm_eps=1e-20,
      ...     vocab_size=129280)
      >>> make_plan(config, tp=8).table_bytes // 10**9
      25
    """
    for name, number in (
        ("tp", tp),
        ("dp", dp),
        ("tokens", tokens),
        ("devices_per_process", devices_per_process),
        ("processes_per_node", processes_per_node),
    ):
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
    if placement not in get_args(Placement):
        raise ValueError(
            f"placement is {placement!r}; it must be one of {get_args(Placement)}"
        )
    # Multipliers depend on the compressed vocabulary, rows and columns do not.
    layout = EngramLayout.from_config(
        config, config.compressed_vocab_size or config.vocab_size
    )
    mesh = AbstractMesh((tp, dp), (TENSOR_AXIS, DATA_AXIS), (AxisType.Auto,) * 2)
    asked = choices.pop("exchange", None)
    by_peers = asked == "peer_read"  # devices on paper cannot, so it is put in later
    sharding = EngramSharding.on(
        mesh, layout, exchange=None if by_peers else asked, **choices
    )
    reasons = dict(sharding.reasons)
    if by_peers:
        sharding = dataclasses.replace(sharding, exchange="peer_read")
        reasons["exchange"] = f"as asked; {PEER_READ_NEEDS}"
        reasons["peer_read"] = "for any number of tokens, as asked"
    elif asked is None and sharding.table_axes:
        reasons["peer_read"] = (
            f"up to {PEER_READ_UP_TO} tokens of a device, where they can; "
            f"{PEER_READ_NEEDS}"
        )
    row = config.head_dim + config.head_dim // QUANT_BLOCK
    shard = sum(sharding.shards.rows_per_shard) * row
    if placement == "device":
        sharding.check_memory(row, limit=device_memory or 1 << 62)
    weights = _weight_bytes(sharding, config)
    forms = []
    for exchange in exchanges_of(sharding.shards.cut):
        for row_format in get_args(RowFormat):
            form = dataclasses.replace(
                sharding, exchange=exchange, row_format=row_format
            )
            moves = tuple(transfers(form, config, tokens))
            received = sum(move.received for move in moves)
            forms.append(
                Choice(
                    exchange,
                    row_format,
                    form == sharding,
                    moves,
                    received,
                    received / tokens,
                )
            )
    on_device = weights + (shard if placement == "device" else 0)
    per_node = devices_per_process * processes_per_node
    own = shard * devices_per_process if placement == "pinned_host" else 0
    # Whole tables: one of every process, or in shared memory one of every node.
    whole = sum(config.num_embeddings) * row
    if placement == "host":
        own = whole
    shared = whole if placement == "shared_host" else 0
    return Plan(
        devices=tp * dp,
        cut=sharding.shards.cut,
        shards=sharding.shards.num_shards,
        table_bytes=shard,
        weight_bytes=weights,
        device_bytes={
            "device": on_device,
            "process": on_device * devices_per_process,
            "node": on_device * per_node,
        },
        host_bytes={
            "process": own,
            "node": own * processes_per_node + shared,
        },
        choices=tuple(forms),
        reasons=reasons,
    )


def _weight_bytes(sharding: EngramSharding, config: EngramConfig) -> int:
    outputs = sharding.padded_width((config.hc_mult + 1) * config.hidden_size)
    inputs = config.n_hash_cols * config.head_dim
    blocks = -(-outputs // QUANT_BLOCK) * (inputs // QUANT_BLOCK)
    parts = sharding.size(sharding.tensor_axes) if sharding.shard_projection else 1
    projection = (outputs * inputs + blocks) // parts
    norms = 2 * config.hc_mult * config.hidden_size * 2  # bfloat16
    return config.num_layers * (projection + norms) + config.vocab_size * 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments.

    Args:
      parser: The command's own parser.
    """
    add = parser.add_argument
    add("config", type=Path, help="config.json, or the directory that holds it")
    add("--tp", type=int, default=1, help="tensor-parallel devices")
    add("--dp", type=int, default=1, help="replicas")
    add("--placement", default="device", choices=get_args(Placement))
    add("--tokens", type=int, default=1, help="tokens of each replica in a step")
    add("--devices-per-process", type=int, default=1)
    add("--processes-per-node", type=int, default=1)
    add("--device-memory", type=float, help="GB that a device may give to tables")
    add("--no-spread", action="store_true", help="a copy of the tables per replica")
    add("--cut", choices=get_args(Cut))
    add("--exchange", choices=get_args(Exchange))
    add("--row-format", default="packed", choices=get_args(RowFormat))
    add("--ids-exchange", choices=get_args(IdsExchange))
    add("--sequence-parallel", action="store_true")
    add("--cut-projection", action="store_true", help="wkv cut over the tensor axis")
    add("--json", action="store_true", help="for programs")


def run(options: argparse.Namespace) -> tuple[str, int]:
    """Plan what the arguments name.

    Args:
      options: The parsed arguments.

    Returns:
      The text to print, and the exit code: 1 where it cannot work, else 0.
    """
    try:
        plan = make_plan(
            EngramConfig.from_pretrained(options.config),
            tp=options.tp,
            dp=options.dp,
            tokens=options.tokens,
            placement=options.placement,
            devices_per_process=options.devices_per_process,
            processes_per_node=options.processes_per_node,
            device_memory=(
                None
                if options.device_memory is None
                else int(options.device_memory * 1e9)
            ),
            spread=not options.no_spread,
            cut=options.cut,
            exchange=options.exchange,
            row_format=options.row_format,
            ids_exchange=options.ids_exchange,
            sequence_parallel=options.sequence_parallel,
            shard_projection=options.cut_projection or None,
        )
    except (OSError, TypeError, ValueError) as error:
        return f"error: {error}", 1
    if options.json:
        return json.dumps(dataclasses.asdict(plan), indent=1), 0
    return "\n".join(_lines(plan, options.tokens)), 0


def _lines(plan: Plan, tokens: int) -> list[str]:
    lines = [
        f"{plan.devices} devices, tables cut by {plan.cut} into {plan.shards} shards "
        f"({plan.reasons['cut']})",
        "",
        f"shard of the tables {plan.table_bytes:>20,} bytes",
        f"all else            {plan.weight_bytes:>20,} bytes a device",
        "",
        f"{'bytes taken':<14}{'device memory':>20}{'host memory':>20}",
        *(
            f"{'per ' + where:<14}{taken:>20,}{plan.host_bytes.get(where, 0):>20,}"
            for where, taken in plan.device_bytes.items()
        ),
        "",
        f"Bytes that a device takes in, {tokens} tokens a step in each replica:",
        f"  {'':2}{'exchange':<16}{'rows as':<10}{'a step':>16}{'a token':>14}",
    ]
    for choice in plan.choices:
        lines.append(
            f"  {'->' if choice.chosen else '':2}{choice.exchange:<16}"
            f"{choice.row_format:<10}{choice.bytes_per_step:>16,}"
            f"{choice.bytes_per_token:>14,.1f}"
        )
    chosen = next(choice for choice in plan.choices if choice.chosen)
    lines += ["", f"Chosen (->): {plan.reasons['exchange']}."]
    lines.append(f"peer_read: {plan.reasons['peer_read']}.")
    lines.append(f"projection: {plan.reasons['shard_projection']}.")
    for move in chosen.transfers:
        times = "" if move.times == 1 else f", {move.times} times"
        lines.append(
            f"  {move.what:<5}{move.collective} over {move.devices} devices{times}: "
            f"{move.received:,} bytes"
        )
    if not chosen.transfers:
        lines.append("  nothing travels")
    elif any(move.what == "ids" for move in chosen.transfers):
        lines.append(f"  (ids: {plan.reasons['ids_exchange']})")
    return lines
