"""Variables that belong to a model but that no optimizer updates."""

from typing import Any

from flax import nnx


class Constant(nnx.Variable[Any]):
    """Hold a token map, a hash table's FP8 rows, or an FP8 weight.

    `nnx.grad` and `nnx.Optimizer` act on `nnx.Param`; a `Constant` stays as it is.

    Example:
      >>> import jax.numpy as jnp
      >>> isinstance(Constant(jnp.zeros(2)), nnx.Param)
      False
    """
