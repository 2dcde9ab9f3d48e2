"""The one place that decides which form of an operation runs, and says why."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
from jax.custom_batching import sequential_vmap

Backend = Literal["pallas", "xla", "pallas_interpret"]

_LOGGER = logging.getLogger("engram_jax")
_MIN_COMPUTE_CAPABILITY = 9.0


@functools.cache
def _log_once(message: str) -> None:
    _LOGGER.info(message)


def missing_gpu_reason() -> str | None:
    """Say why the device that code is traced for cannot run Mosaic GPU kernels.

    The device is that of the abstract mesh in use (ahead-of-time compilation), else
    `jax_default_device`, else JAX's first device.

    Returns:
        None on a GPU of compute capability 9.0 (Hopper) or newer, else the reason.
    """
    abstract_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract_device is not None:
        kind = abstract_device.device_kind
        return None if kind.startswith("NVIDIA") else f"{kind} is not an NVIDIA GPU"
    device = jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(device, str):
        device = jax.devices(device)[0]
    return device_reason(device)


def device_reason(device: Any) -> str | None:
    """Say why a device cannot run Mosaic GPU kernels.

    Args:
        device: a device of JAX.

    Returns:
        None on a GPU of compute capability 9.0 (Hopper) or newer, else the reason.
    """
    if device.platform not in ("gpu", "cuda"):
        return f"the device is a {device.platform.upper()}, not a GPU"
    capability = float(getattr(device, "compute_capability", 0.0))
    if capability < _MIN_COMPUTE_CAPABILITY:
        return (
            f"{device.device_kind} has compute capability {capability}; Mosaic GPU "
            f"needs {_MIN_COMPUTE_CAPABILITY} or newer"
        )
    return None


def resolve_backend(
    operation: str,
    backend: Backend | None,
    unsupported_reason: Callable[[bool], str | None],
) -> Backend:
    """Choose the form of an operation that runs.

    Args:
        operation: the operation's name, for messages.
        backend: None chooses "pallas" where the device and the kernel allow it, else
            "xla", and logs the reason once. Any other choice runs or raises.
        unsupported_reason: says why the kernel cannot take these operands, or None;
            called with True it says so of the kernel interpreted on a CPU. It is not
            called, and Pallas not imported, where the XLA form runs anyway.

    Returns:
        "pallas", "xla" or "pallas_interpret".

    Raises:
        ValueError: `backend` is none of these.
        NotImplementedError: an explicit kernel choice cannot run here.

    Example:
        >>> resolve_backend("gate", "xla", lambda interpret: None)
        'xla'
    """
    if backend == "xla":
        return "xla"
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(
            f"backend is {backend!r}; it must be None or one of "
            f"{', '.join(map(repr, get_args(Backend)))}"
        )
    if backend == "pallas_interpret":
        reason = unsupported_reason(True)
    else:
        reason = missing_gpu_reason() or unsupported_reason(False)
    if backend is None:
        chosen: Backend = "xla" if reason else "pallas"
        _log_once(f"{operation}: {chosen}" + (f" ({reason})" if reason else ""))
        return chosen
    if reason:
        raise NotImplementedError(
            f"{operation} cannot run with backend={backend!r}: {reason}. "
            'Use backend="xla", or None to choose automatically.'
        )
    return backend


def kernel_with_xla_gradient(
    kernel: Callable[..., Any], xla_form: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a kernel so that it can be differentiated and batched.

    The forward pass runs `kernel`; the backward pass differentiates `xla_form` at the
    same operands, which are all that is saved. A batch axis runs as a sequential loop.

    Args:
        kernel: a function of arrays (or None) that returns one array.
        xla_form: the same function in XLA operations.

    Returns:
        A function with the signature of `kernel`.
    """
    batched = sequential_vmap(kernel)

    @jax.custom_vjp
    def call(*operands):
        return batched(*operands)

    def forward(*operands):
        return batched(*operands), operands

    def backward(operands, cotangent):
        return jax.vjp(xla_form, *operands)[1](cotangent)

    call.defvjp(forward, backward)
    return call
