"""Compiles programs for a Hopper GPU on a machine without one.

Needs the packages jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 (no
driver, no GPU). What the GPU's compiler would refuse fails here: too much shared
memory, assembly errors, layouts that do not fit.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import pytest
from jax.experimental import topologies
from jax.sharding import (
    AbstractDevice,
    AbstractMesh,
    AxisType,
    NamedSharding,
    PartitionSpec,
    use_abstract_mesh,
)

_TARGET = Path(__file__).with_name("h200_target_config.txtpb")


@functools.cache
def hopper_mesh(devices: int = 1) -> jax.sharding.Mesh:
    """A mesh of H200s that exist on paper only; skips the test where CUDA is absent."""
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            target_config=_TARGET.read_text(),
            topology=f"1x1x{devices}",
        )
    except Exception as error:  # the plugin's absence shows as one of several types
        reason = f"no CUDA compiler plugin (pip install jax-cuda12-plugin): {error}"
        pytest.skip(reason=reason)
    return topologies.make_mesh(
        topo=topology, mesh_shape=(devices,), axis_names=("device",)
    )


def abstract_hopper(devices: int = 1):
    """Makes JAX trace as on H200s inside a ``with``."""
    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    return use_abstract_mesh(
        AbstractMesh((devices,), ("device",), (AxisType.Auto,), abstract_device=device)
    )


def operand(shape, dtype, *, memory_kind: str | None = None) -> jax.ShapeDtypeStruct:
    """An operand that lies on the first of those H200s."""
    sharding = NamedSharding(hopper_mesh(), PartitionSpec(), memory_kind=memory_kind)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def compile_for_hopper(
    function, *operands, devices: int = 1, **named
) -> jax.stages.Compiled:
    """Compiles ``jit(function)`` for sm_90a; raises what the GPU's compiler raises."""
    with abstract_hopper(devices):
        return jax.jit(function).lower(*operands, **named).compile()


def text_of(compiled: jax.stages.Compiled) -> str:
    """The optimised program as XLA prints it."""
    return compiled.as_text() or ""


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Device memory that the program takes beside its operands and results."""
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes
