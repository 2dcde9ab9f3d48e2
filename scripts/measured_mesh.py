"""The stacks, batches and results that `benchmark_mesh` measures on a mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import device_times
import jax
import mesh_stacks
import numpy as np
from benchmark_record import Result
from measured_programs import Times

from engram_jax import EngramLayout, EngramSharding, EngramStack, plan
from engram_jax.host_hash import HostHash
from engram_jax.shards import Exchange, RowFormat, exchanges_of

BATCHES = 4
"""Different ones in turns: a token's rows are never in the cache."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is measured: the model, and tokens of each replica.

    Attributes:
        config: with tables of which all fit one GPU.
        tokens: from few to many.
        few: of a decode step, judged.
        many: of a prefill, judged.
    """

    config: Any
    tokens: tuple[int, ...]
    few: int
    many: int


def sizes_here() -> Sizes:
    """Choose V4.1's widths on GPUs, small ones on CPUs."""
    if jax.default_backend() == "gpu":
        config = mesh_stacks.with_rows(mesh_stacks.V41, 32_000_000)
        return Sizes(config, (4096, 16, 512, 64, 1), 16, 4096)
    config = mesh_stacks.with_rows(mesh_stacks.SMALL, 24 * 3000)
    return Sizes(config, (32, 4, 1), 4, 32)


class MeasuredMesh:
    """Stacks on one GPU and on a mesh of them, and what is measured with them."""

    def __init__(
        self,
        axes: dict[str, int],
        tokens: list[int] | None = None,
        sizes: Sizes | None = None,
    ):
        """Choose the mesh; nothing starts a backend yet.

        Args:
            axes: sizes of "tp" and "dp".
            tokens: of each replica; None for all of the sizes.
            sizes: what is measured; None for `sizes_here`.
        """
        self.axes = axes
        self._tokens = tokens
        self._sizes = sizes
        self._hidden: dict[Any, jax.Array] = {}

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Give the sizes, with the tokens that were asked for."""
        sizes = self._sizes or sizes_here()
        asked = tuple(self._tokens or sizes.tokens)
        return dataclasses.replace(sizes, tokens=asked)

    @property
    def label(self) -> str:
        """Name the mesh, as on the command line."""
        named = [f"{name}={size}" for name, size in self.axes.items() if size > 1]
        return ",".join(named) or "tp=1"

    @property
    def judged(self) -> bool:
        """Tell whether the requirements are for this mesh: two GPUs."""
        return self.devices == 2 and jax.default_backend() == "gpu"

    def judges(self, tokens: int) -> bool:
        """Tell whether a requirement is for so many tokens: few, or many."""
        return tokens in (self.sizes.few, self.sizes.many)

    @property
    def devices(self) -> int:
        """Count the mesh's devices."""
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """Count the replicas: parts of the data axis."""
        return self.axes["dp"]

    @functools.cached_property
    def mesh(self) -> Any:
        """Make the mesh of the first devices."""
        found = jax.devices()
        if len(found) < self.devices:
            raise ValueError(
                f"--mesh {self.label} needs {self.devices} devices; {len(found)} are "
                f"here ({found[0].device_kind})"
            )
        kinds = (jax.sharding.AxisType.Auto,) * len(self.axes)
        return jax.make_mesh(
            tuple(self.axes.values()),
            tuple(self.axes),
            kinds,
            devices=found[: self.devices],
        )

    @functools.cached_property
    def layout(self) -> EngramLayout:
        """Give the rows of each column."""
        return EngramLayout.from_config(self.sizes.config)

    @functools.cached_property
    def one(self) -> EngramStack:
        """Make the whole tables on one GPU."""
        stack = mesh_stacks.make_stack(self.sizes.config, self.layout)
        stack.expand_projections()
        return stack

    @functools.cached_property
    def host_hash(self) -> HostHash:
        """Hash on the CPU: what no GPU had a hand in."""
        return HostHash(self.one.hash_state)

    def hidden(self, sharding: EngramSharding | None, tokens: int) -> jax.Array:
        """Make the hidden states of all replicas' tokens, once for each place."""
        key = tokens, None if sharding is None else sharding.tokens
        if key not in self._hidden:
            made = mesh_stacks.make_hidden(self.sizes.config, tokens, sharding)
            self._hidden[key] = made
        return self._hidden[key]

    @functools.cached_property
    def counters(self) -> device_times.LinkCounters | None:
        """Connect to the NVLink counters, and say so if there are none."""
        if jax.default_backend() != "gpu":
            return None
        counters = device_times.LinkCounters(self.devices)
        if counters.reason:
            print(counters.reason, flush=True)
        return counters

    @functools.cache  # noqa: B019  one object for the program's life
    def made(self, cut_projection: bool) -> EngramStack:
        """Make the stack on the mesh, tables once for all ways to project."""
        base = EngramSharding.on(
            self.mesh, self.layout, shard_projection=cut_projection
        )
        tables = None
        if not cut_projection and self.axes["tp"] > 1:
            other = self.made(cut_projection=True)
            tables = [
                (layer.embedding.weight[...], layer.embedding.scale[...])
                for layer in other.layers.values()
            ]
        return mesh_stacks.make_stack(
            self.sizes.config, self.layout, base, tables=tables
        )

    @functools.cache  # noqa: B019
    def _expanded(self, cut_projection: bool) -> EngramStack:
        stack = self.made(cut_projection)
        stack.expand_projections()
        return stack

    def stack(self, sharding: EngramSharding, *, expanded: bool = True) -> EngramStack:
        """Give the stack on the mesh with rows that travel so."""
        make = self._expanded if expanded else self.made
        return mesh_stacks.with_sharding(make(sharding.shard_projection), sharding)

    def forms(
        self, row_formats: tuple[RowFormat, ...], tokens: int
    ) -> dict[str, EngramSharding]:
        """List the ways to lie on the mesh, the library's own choices first.

        Forms that come out as the same collectives are listed once; those that these
        devices do not have are left out, and named.

        Args:
            row_formats: in which rows travel.
            tokens: of each replica.

        Returns:
            Shardings by name.
        """
        bases: dict[str, dict[str, Any]] = {"": {}}
        if self.axes["tp"] > 1:
            bases = {
                "projection whole": {},
                "projection cut": {"shard_projection": True},
                "tokens cut": {"sequence_parallel": True},
                "tokens and projection cut": {
                    "sequence_parallel": True,
                    "shard_projection": True,
                },
            }
        found: dict[str, EngramSharding] = {}
        seen = set()
        for base, choices in bases.items():
            for row_format in row_formats:
                for exchange in self._exchanges:
                    sharding = EngramSharding.on(
                        self.mesh,
                        self.layout,
                        exchange=exchange,
                        row_format=row_format,
                        **choices,
                    )
                    key = self._program_of(sharding, tokens)
                    if key not in seen:
                        seen.add(key)
                        parts = [base, self.exchange_of(sharding, tokens), row_format]
                        found[", ".join(filter(None, parts))] = sharding
        return found

    @functools.cached_property
    def _exchanges(self) -> list[Exchange | None]:
        """None for the library's choice, then every form that this mesh can run."""
        can: list[Exchange | None] = [None]
        for exchange in exchanges_of("heads"):
            try:
                EngramSharding.on(self.mesh, self.layout, exchange=exchange)
            except ValueError as error:
                print(f"left out: {error}", flush=True)
            else:
                can.append(exchange)
        return can

    def exchange_of(self, sharding: EngramSharding, tokens: int) -> Exchange:
        """Say how rows come for so many tokens of each replica."""
        return sharding.exchange_for(tokens * self.replicas)

    def _program_of(self, sharding: EngramSharding, tokens: int) -> Any:
        moves = tuple(plan.transfers(sharding, self.sizes.config, tokens))
        return (
            moves,
            sharding.row_format,
            sharding.token_axes,
            sharding.shard_projection,
        )

    def received(self, sharding: EngramSharding, tokens: int) -> dict[str, int]:
        """Compute what a device takes in over the links in one step, by what it is."""
        moved: dict[str, int] = {}
        for move in plan.transfers(sharding, self.sizes.config, tokens):
            moved[move.what] = moved.get(move.what, 0) + move.received
        return moved

    def place(self, sharding: EngramSharding, tokens: int) -> list[Any]:
        """Put the batches of all replicas on the mesh."""
        return [
            mesh_stacks.place_batch(sharding, self.batches(tokens, turn))
            for turn in range(BATCHES)
        ]

    def batches(self, tokens: int, turn: int) -> list[dict[str, np.ndarray]]:
        """Make the batch of each replica, other tokens in every turn."""
        config = self.sizes.config
        return [
            mesh_stacks.make_batch(config, tokens, turn * self.replicas + replica)
            for replica in range(self.replicas)
        ]

    def result(
        self, suite: str, what: str, variant: str, tokens: int, samples, **more
    ) -> Result:
        """Make a result of microseconds."""
        detail = {"operation": what, "variant": variant, "mesh": self.label}
        return Result(
            self.suite(suite),
            f"{what} ({variant}), {self.label}, T = {tokens}",
            statistics.median(samples),
            "us",
            tuple(samples),
            detail=detail | {"tokens": tokens, **more},
        )

    def suite(self, name: str) -> str:
        """Name a suite of this mesh."""
        return f"{self.label.replace('=', '').replace(',', '_')}_{name}"

    def report(
        self,
        suite: str,
        variant: str,
        tokens: int,
        times: Times,
        moved: dict[str, int] | None = None,
    ) -> Iterator[Result]:
        """Make the results of one program: loop, call and kernels."""
        make = functools.partial(self.result, suite)
        more: dict[str, Any] = {"enqueue_us": statistics.median(times.enqueue)}
        if moved is not None:
            more["bytes_received"] = moved
            more["bytes_received_from"] = "engram_jax.plan"
        if times.counted is not None:
            more["bytes_counted_by_driver"] = times.counted
        yield make(f"{suite} loop", variant, tokens, times.loop, **more)
        yield make(f"{suite} call", variant, tokens, times.call)
        if times.runs is not None:
            yield make(
                f"{suite} kernels",
                variant,
                tokens,
                [max(run.sums) for run in times.runs],
                each_gpu=[run.sums for run in times.runs],
                spans=[run.spans for run in times.runs],
                by_kernel=device_times.by_name(times.runs),
            )

    def ratio(
        self,
        suite: str,
        name: str,
        value: float,
        *,
        at_most=None,
        at_least=None,
        **more,
    ) -> Result:
        """Make a ratio; it is judged only where the requirement is for this mesh."""
        return Result(
            self.suite(suite),
            f"{name}, {self.label}",
            value,
            "x",
            at_most=at_most if self.judged else None,
            at_least=at_least if self.judged else None,
            detail={"mesh": self.label, **more},
        )
