"""The hash on the CPU, for batches whose rows are fetched before their step."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from flax import nnx

from .arguments import as_array, check_values
from .batching import pad_batch
from .hash_state import NgramHashState

_CHECKED = (
    "input_ids",
    "positions",
    "query_start_loc",
    "dead_mask",
    "lookback_token_ids",
    "lookback_dead_mask",
)


class HostHash:
    """Hash batches on the CPU, apart from whatever the accelerator is doing.

    A call on the accelerator would only end after all that was dispatched before. The
    ids are the same, bit for bit.

    Args:
        hash_state: whose layout and token map to use.
    """

    def __init__(self, hash_state: NgramHashState) -> None:
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError:  # JAX was told to start no CPU backend
            self._device = jax.local_devices()[0]
        token_map = np.asarray(hash_state.token_map[...])
        with jax.default_device(self._device):
            state = NgramHashState(hash_state.layout, token_map, backend="xla")
        self._state = state
        self._seen: set[Any] = set()
        graph, self._variables = nnx.split(state)

        def one(variables, arrays):
            local = nnx.merge(graph, variables)
            mask = local.token_mask(
                arrays["input_ids"], arrays["query_start_loc"], arrays.get("dead_mask")
            )
            return local(**arrays), mask

        self._one = one
        self._run = jax.jit(one)
        self._run_replicas = jax.jit(jax.vmap(one, in_axes=(None, 0)))

    def __call__(
        self, arguments: Mapping[str, Any]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Hash a batch.

        Args:
            arguments: those of `EngramStack.batch`; or of `replica_batch`, each with a
                leading axis of replicas.

        Returns:
            Rows of each token [T, L, C], replicas one after the other, and the token
            mask [T].

        Raises:
            TypeError: a dtype is wrong, or an argument unknown.
            ValueError: shapes do not fit each other, or values are out of range.
        """
        arrays = {
            name: np.asarray(as_array(values))
            for name, values in arguments.items()
            if values is not None
        }
        replicas = arrays["input_ids"].ndim == 2 if "input_ids" in arrays else False
        with jax.default_device(self._device):
            for batch in _each(arrays) if replicas else (arrays,):
                self._check(batch)
            arrays = {name: narrow(array) for name, array in arrays.items()}
            if replicas:
                hashes, mask = self._run_replicas(self._variables, arrays)
            else:
                count = len(arrays["input_ids"])
                # Else every T would be compiled for.
                padded = pad_batch(**arrays)  # pyright: ignore[reportArgumentType]
                hashes, mask = self._run(self._variables, padded)
                hashes, mask = hashes[:count], mask[:count]
        hashes, mask = np.asarray(hashes), np.asarray(mask)
        return hashes.reshape(-1, *hashes.shape[-2:]), mask.reshape(-1)

    def _check(self, arrays) -> None:
        shapes = {
            name: jax.ShapeDtypeStruct(array.shape, narrow(array).dtype)
            for name, array in arrays.items()
        }
        key = tuple((name, x.shape, x.dtype) for name, x in sorted(shapes.items()))
        if key not in self._seen:
            jax.eval_shape(lambda known: self._state(**known), shapes)
            self._seen.add(key)
        check_values(self._state.vocab_size, *(arrays.get(name) for name in _CHECKED))


def _each(arrays):
    for replica in range(len(arrays["input_ids"])):
        yield {name: array[replica] for name, array in arrays.items()}


def narrow(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Bring integers to int32 in NumPy; one that does not fit becomes -1.

    Args:
        array: of any dtype; what are no integers stays as it is.

    Returns:
        The same, with integers as int32.
    """
    if array.dtype.kind not in "iu" or array.dtype == np.int32:
        return array
    fits = (array >= -1) & (array <= np.iinfo(np.int32).max)
    # Not `where`: an unsigned dtype has no -1.
    narrowed = array.astype(np.int32)
    narrowed[~fits] = -1
    return narrowed
