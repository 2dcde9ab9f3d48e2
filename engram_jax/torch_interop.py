"""PyTorch tensors and state dicts to and from JAX, through DLPack.

Memory is shared where the layout allows it: a tensor that shares memory with an array
must not be written to, since JAX takes its arrays to be constant. Importing this
module imports no PyTorch; its functions do (the ``torch`` extra).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from .checkpoint_files import expected_tensors, match_tensors, tensor_name
from .config import EngramConfig
from .embedding import ParallelEngramEmbedding
from .hash_state import NgramHashState
from .kernels import Backend
from .layer import Engram
from .layout import EngramLayout
from .safetensors_file import TensorInfo
from .stack import EngramStack
from .vocabulary import build_compressed_token_map

if TYPE_CHECKING:
    import torch

_INT32 = np.iinfo(np.int32)


def to_jax(tensor: "torch.Tensor", *, device: Any = None) -> Array:
    """Give a tensor to JAX, without a copy where its layout allows it.

    Float8 e4m3, bfloat16 and all other dtypes of 32 bits or less keep their dtype, but
    for E8M0: scales are bytes in this library, so they become uint8. A 64-bit dtype
    keeps its dtype where `jax_enable_x64` is on; where it is off, integers become int32
    if every value fits, and floats are refused, since JAX would narrow them silently.

    A copy is made of: a tensor with gaps or overlaps (a strided slice, an expanded
    one), a tensor on the CPU that is not aligned to 64 bytes, a 64-bit integer tensor
    that becomes int32, and of any that goes to another device. A transposed tensor is
    not copied.

    Args:
        tensor: dense, without gradient, on the CPU or on a GPU that JAX sees too.
        device: a device or sharding for the array; None leaves it where the tensor is.

    Returns:
        The array. Where nothing was copied it shares the tensor's memory and keeps it
        alive: the tensor must not be written to.

    Raises:
        TypeError: `tensor` is no dense torch tensor, or holds 64-bit floats that JAX
            would narrow.
        ValueError: the tensor requires a gradient, is on a device that JAX does not
            have, or holds an integer that does not fit int32.

    Example:
        >>> import torch
        >>> to_jax(torch.tensor([[1, 2]], dtype=torch.bfloat16))
        Array([[1, 2]], dtype=bfloat16)
        >>> to_jax(torch.tensor([7, 2**31]))
        Traceback (most recent call last):
        ValueError: The tensor holds 2147483648 at [1]; JAX without x64 has 32-bit \
integers, -2147483648 to 2147483647, and a wider value would name another token or row.
    """
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        found = getattr(tensor, "layout", type(tensor).__name__)
        raise TypeError(f"to_jax takes a dense torch.Tensor; this is a {found}.")
    if tensor.requires_grad:
        raise ValueError(
            "The tensor requires a gradient, which would end at JAX; pass "
            "tensor.detach()."
        )
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.view(torch.uint8)
    if not jax.config.read("jax_enable_x64"):
        tensor = _narrow(tensor)
    if not _is_compact(tensor):
        tensor = tensor.contiguous()
    # Conjugated and negated tensors are views that DLPack would not carry over.
    tensor = tensor.resolve_conj().resolve_neg()
    try:
        array = jax.dlpack.from_dlpack(tensor)
    except (RuntimeError, ValueError, BufferError) as error:
        raise ValueError(
            f"JAX cannot take a {tensor.dtype} tensor on {tensor.device} (JAX's "
            f"platforms are {_platforms()}): {error}. Move it with tensor.cpu(), or "
            "install JAX for that device."
        ) from error
    return array if device is None else jax.device_put(array, device)


def to_torch(array: Array) -> "torch.Tensor":
    """Give an array to PyTorch without a copy.

    Float8 e4m3, E8M0 and bfloat16 keep their dtypes. Scale bytes stay uint8: view them
    with ``tensor.view(torch.float8_e8m0fnu)``, or use `state_dict`, which does.

    Args:
        array: a JAX array on one device, outside jit.

    Returns:
        A tensor on the array's device that shares its memory: it must not be written
        to, since JAX takes the array to be constant.

    Raises:
        TypeError: `array` is no JAX array, is traced, or has a dtype that PyTorch does
            not have.
        ValueError: the array is spread over several devices.

    Example:
        >>> to_torch(jnp.ones((1, 2), jnp.bfloat16))
        tensor([[1., 1.]], dtype=torch.bfloat16)
    """
    import torch

    if isinstance(array, Tracer):
        raise TypeError(
            "The array is being traced (inside jit, grad or vmap); PyTorch needs "
            "values. Call to_torch outside, or use jax.pure_callback."
        )
    if not isinstance(array, jax.Array):
        raise TypeError(
            f"to_torch takes a JAX array; this is a {type(array).__name__}."
        )
    if len(array.devices()) > 1:
        raise ValueError(
            f"The array is spread over {len(array.devices())} devices; PyTorch tensors "
            "live on one. Gather it first: jax.device_put(array, jax.devices()[0])."
        )
    try:
        return torch.from_dlpack(array)
    except (RuntimeError, ValueError, BufferError, TypeError) as error:
        raise TypeError(
            f"PyTorch cannot take a {array.dtype} array on {array.devices()}: {error}."
        ) from error


def load_state_dict(
    state_dict: "Mapping[str, torch.Tensor]",
    config: EngramConfig,
    tokenizer: Any,
    *,
    backend: Backend | None = None,
) -> EngramStack:
    """Make an `EngramStack` of a PyTorch state dict with the published names.

    Names may carry a prefix that ends before ``layers.``, the same for all. Tensors of
    other parts of the model are left alone; every one named ``layers.<i>.engram.*`` is
    accounted for, exactly once. Tables on the CPU are not copied where they are
    aligned to 64 bytes and JAX runs on the CPU.

    Args:
        state_dict: tensors by name.
        config: the model's sizes.
        tokenizer: what `build_compressed_token_map` takes, or a token map: an integer
            array [V].
        backend: of all operations: None, "pallas", "xla" or "pallas_interpret".

    Returns:
        The stack, on JAX's default device.

    Raises:
        ValueError: a tensor is missing, is of no layer of the config, has the wrong
            dtype or shape, or prefixes differ; or the token map does not fit the
            config.

    Example::

        stack = load_state_dict(model.state_dict(), config, "tokenizer.json")
    """
    infos = {name: _as_info(name, tensor) for name, tensor in state_dict.items()}
    prefix, problems = match_tensors(config, infos)
    if problems:
        raise ValueError(
            "The state dict does not fit the config: " + " ".join(problems)
        )
    device = jnp.zeros(()).sharding

    def array(layer_id: int, part: str) -> Array:
        # Parameters come with a gradient; a stack starts from their values.
        tensor = state_dict[tensor_name(prefix, layer_id, part)].detach()
        return to_jax(tensor, device=device)

    token_map, size = _token_map(tokenizer)
    hash_state = NgramHashState(
        EngramLayout.from_config(config, size), token_map, backend=backend
    )
    layers = {}
    for layer_id in config.layer_ids:
        layers[layer_id] = Engram(
            ParallelEngramEmbedding(
                array(layer_id, "embed.weight"),
                array(layer_id, "embed.scale"),
                backend=backend,
            ),
            array(layer_id, "wkv.weight"),
            array(layer_id, "wkv.scale"),
            array(layer_id, "q_weight"),
            array(layer_id, "k_weight"),
            eps=config.rms_norm_eps,
            backend=backend,
        )
    return EngramStack(config, hash_state, layers)


def state_dict(stack: EngramStack, *, prefix: str = "") -> "dict[str, torch.Tensor]":
    """Give a stack's tensors to PyTorch, under the published names and dtypes.

    Args:
        stack: with its tables on the device.
        prefix: what precedes ``layers.`` in each name, such as ``"model."``.

    Returns:
        Tensors by name, which share the arrays' memory.

    Raises:
        ValueError: a layer's table is outside device memory, or a layer was changed
            for training so that a tensor has another dtype than the published one.

    Example::

        model.load_state_dict(state_dict(stack), strict=False)
    """
    import torch

    if prefix and not prefix.endswith("."):
        raise ValueError(f'prefix is {prefix!r}; it must end with ".", or be empty')
    result = {}
    for layer_id, parts in expected_tensors(stack.config).items():
        for part, (wanted, _) in parts.items():
            name = tensor_name(prefix, layer_id, part)
            variable = _PARTS[part](stack.layers[layer_id])
            if variable is None:
                raise ValueError(
                    f"{name} is not on the device in its FP8 form: the table is in "
                    "host memory or in a file (load it with placement='device'), or "
                    "the tensor was made a float one for training (quantize it first)."
                )
            tensor = to_torch(variable[...])
            if wanted == "F8_E8M0":
                tensor = tensor.view(torch.float8_e8m0fnu)
            if (found := _as_info(name, tensor).dtype) != wanted:
                raise ValueError(
                    f"{name} is {found} in the stack; its published dtype is {wanted}: "
                    "quantize or cast it first."
                )
            result[name] = tensor
    return result


_PARTS = {
    "embed.weight": lambda layer: layer.embedding.weight,
    "embed.scale": lambda layer: layer.embedding.scale,
    "wkv.weight": lambda layer: layer.wkv_weight,
    "wkv.scale": lambda layer: layer.wkv_scale,
    "q_weight": lambda layer: layer.q_weight,
    "k_weight": lambda layer: layer.k_weight,
}
"""Where a layer keeps each published tensor."""


def _as_info(name: str, tensor: "torch.Tensor") -> TensorInfo:
    """Describe a tensor as a checkpoint's header would."""
    import torch

    dtypes = {
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0",
        torch.bfloat16: "BF16",
    }
    dtype = dtypes.get(tensor.dtype, str(tensor.dtype))
    return TensorInfo(
        name, Path("state_dict"), dtype, tuple(tensor.shape), 0, tensor.nbytes
    )


def _token_map(tokenizer: Any) -> tuple[np.ndarray, int]:
    if isinstance(tokenizer, np.ndarray | jax.Array):
        token_map = np.asarray(tokenizer)
        return token_map, int(token_map.max(initial=-1)) + 1
    return build_compressed_token_map(tokenizer)


def _narrow(tensor: "torch.Tensor") -> "torch.Tensor":
    """Bring 64-bit integers to int32 and refuse what would lose something."""
    import torch

    if tensor.dtype in (torch.float64, torch.complex128):
        raise TypeError(
            f"The tensor has dtype {tensor.dtype}, which JAX without x64 would narrow; "
            "cast it with tensor.float(), or turn jax_enable_x64 on."
        )
    if tensor.dtype not in (torch.int64, torch.uint64):
        return tensor
    # The bits of uint64 values from 2**63 up read as negative int64 ones.
    lowest = _INT32.min if tensor.dtype == torch.int64 else 0
    signed = tensor.view(torch.int64)
    wrong = (signed < lowest) | (signed > _INT32.max)
    if wrong.any():
        place = [int(axis) for axis in wrong.nonzero()[0]]
        value = int(tensor[tuple(place)].item())
        raise ValueError(
            f"The tensor holds {value} at {place}; JAX without x64 has 32-bit "
            f"integers, {_INT32.min} to {_INT32.max}, and a wider value would name "
            "another token or row."
        )
    return signed.to(torch.int32)


def _is_compact(tensor: "torch.Tensor") -> bool:
    """Whether the elements fill their memory once, in any order of the axes."""
    expected = 1
    axes = [(s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1]
    for stride, size in sorted(axes):
        if stride != expected:
            return False
        expected *= size
    return True


def _platforms() -> str:
    return ", ".join(sorted({device.platform for device in jax.devices()}))
