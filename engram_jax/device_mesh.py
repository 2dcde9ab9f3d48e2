"""A device mesh: its axes, and functions that run on all of its devices."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

Axes = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True)
class DeviceMesh:
    """Lay arrays out over a mesh and run functions on it, whatever kind its axes are.

    Attributes:
      mesh: The devices, with Auto or Explicit axes; an abstract mesh holds no arrays.
    """

    mesh: Any  # Mesh, or AbstractMesh to plan

    def size(self, axes: Sequence[str]) -> int:
        """Count the devices along mesh axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def named(self, spec: P, memory_kind: str | None = None) -> NamedSharding:
        """Put a partition spec on the mesh.

        Args:
          spec: The partition spec.
          memory_kind: As of `jax.sharding.NamedSharding`.

        Returns:
          The sharding, for `jax.device_put`, `jit` and `make_array_from_callback`.
        """
        return NamedSharding(self.mesh, spec, memory_kind=memory_kind)

    def reshard(self, x: Array, spec: P) -> Array:
        """Lay an array out by a spec, inside jit or not, on Auto and Explicit meshes.

        Args:
          x: The array.
          spec: Its partition spec; every sharded axis must divide.

        Returns:
          The same values.
        """
        mesh = self.context_mesh()
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
        if not explicit:
            return x  # shard_map reshards by itself, and XLA what follows
        # A spec may name Explicit axes only; Auto ones are the compiler's.
        entries = [(e,) if isinstance(e, str) else e or () for e in spec]
        named = [tuple(a for a in e if a in explicit) or None for e in entries]
        return jax.reshard(x, NamedSharding(mesh, P(*named)))

    def context_mesh(self) -> Any:
        """Give the mesh to trace for: that of `jax.set_mesh` if one is set, else ours.

        Raises:
          ValueError: The mesh that is set has other axes.
        """
        context = jax.sharding.get_abstract_mesh()
        if context.empty:
            return self.mesh
        if dict(context.shape) != dict(self.mesh.shape):
            raise ValueError(
                f"the mesh in use (jax.set_mesh) has axes {dict(context.shape)}; the "
                f"Engram tables lie on {dict(self.mesh.shape)}. Use one mesh for both"
            )
        return context

    def shard_map(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Run a function on every device with its shards, over all mesh axes.

        Args:
          body: The function of local arrays.
          in_specs: A partition spec, or a tree prefix of them, for each argument.
          out_specs: Those of the results.

        Returns:
          The function of whole arrays. Arguments are laid out by `in_specs` first.
        """

        def call(*arguments):
            arguments = tuple(
                jax.tree.map(
                    lambda spec, part: jax.tree.map(
                        lambda x: self.reshard(jnp.asarray(x), spec), part
                    ),
                    spec,
                    argument,
                    is_leaf=lambda node: isinstance(node, P),
                )
                for spec, argument in zip(in_specs, arguments, strict=True)
            )
            # Interpreted kernels run only without the check. Gradients are exact in
            # either case, since differentiation is outside of the map.
            mapped = jax.shard_map(
                body,
                mesh=self.context_mesh(),
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )
            # One program, where the caller has no jit: op by op, every one of them
            # would be compiled for the whole mesh.
            return jax.jit(mapped)(*arguments)

        return call


def axis_names(mesh: Mesh | AbstractMesh, axes: Axes, argument: str) -> tuple[str, ...]:
    """Check names of mesh axes, and leave out those of size 1.

    Args:
      mesh: The mesh.
      axes: A name, several, or None for none.
      argument: What the caller named them with, for the message.

    Returns:
      The names.

    Raises:
      ValueError: The mesh has no such axis.
    """
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    for name in names:
        if name not in mesh.shape:
            raise ValueError(
                f"the mesh has axes {dict(mesh.shape)} and none named {name!r}; name "
                f"the right one with {argument}=..., or {argument}=None for none"
            )
    return tuple(name for name in names if mesh.shape[name] > 1)
