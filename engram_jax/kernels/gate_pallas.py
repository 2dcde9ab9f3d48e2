"""The gate as a Mosaic GPU kernel.

One warpgroup works on one stream of one token at a time: it holds the stream, the key
and the folded weights ``q * k`` in registers, forms the three sums over E, and writes
``hidden + gate * value``. The M streams of a token run at the same time on neighbouring
CTAs, so that the value they share comes from memory once and then from the L2 cache:
(3 M + 1) E elements a token move, which is the least there is.

Few tokens: one CTA per token and stream, which reads memory straight into registers.
More: a CTA takes a few tokens of its stream through a ring of buffers that the copy
engine (TMA) fills while it works on the token before. Few enough that CTAs keep coming:
the card starts them in order, which keeps the streams of a token together (on an H200
at T = 4096, 128 us with 4 tokens a CTA, 138 with CTAs that stay for 62).

Why `_row_sums` is inline Mosaic code: `jnp.sum` reduces one array at a time, with two
barriers and a trip through shared memory each, and a lone token's time is little else.
In the interpreter, which cannot run such code, three plain sums stand in for it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector
from jaxlib.mlir.dialects import math as mlir_math

from . import block_sizes
from .mosaic_pallas import WARPGROUP, thread_index

_F32 = jnp.float32
_MAX_WIDTH = 16384  # E beyond which a thread's share of a row outgrows its registers
_WARPS = WARPGROUP // 32


def unsupported_reason(
    hidden: jax.Array,
    kv: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    eps: float = 0.0,
    clamp: float = 0.0,
    interpret: bool = False,
) -> str | None:
    """Say why `gate_pallas` cannot take these operands, or give None."""
    del q_weight, k_weight, token_mask, eps, clamp, interpret
    width = hidden.shape[2]
    if width > _MAX_WIDTH:
        return f"streams are {width} wide, more than {_MAX_WIDTH}"
    if max(hidden.size, kv.size) >= 2**31:
        return f"{hidden.shape[0]} tokens have more elements than 32 bits can count"
    return None


def _layout(shape: tuple[int, ...]) -> Any:
    """Spread a row [E/128, 128] over the warpgroup, in pieces of up to 16 bytes."""
    vector_size = math.gcd(shape[0], 8)
    return plgpu.Layout.WG_STRIDED(shape, vec_size=vector_size)


def _row_sums(shape: tuple[int, ...], interpret: Any) -> Callable[..., Any]:
    """Make (x, y, weights, scratch) -> the sums of x*x, y*y and x*y*weights.

    scratch is float32 [4, 4] in shared memory, one row a warp. Its readers are done
    with it once they have reached the barrier of the next call, so two of them must
    take turns.
    """
    if interpret:
        return lambda x, y, weights, scratch: (
            jnp.sum(x * x),
            jnp.sum(y * y),
            jnp.sum(x * y * weights),
        )
    row = _layout(shape)
    scalar = plgpu.ShapeDtypeStruct((), _F32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(
        arg_types=(row, row, row, plgpu.RefType()), return_type=(scalar,) * 3
    )
    def row_sums(ctx, x, y, weights, scratch):
        del ctx
        sums: list[ir.Value | None] = [None] * 3

        def add(i, a, b):
            total = sums[i]
            sums[i] = arith.mulf(a, b) if total is None else mlir_math.fma(a, b, total)

        for a, b, c in zip(
            x.registers.flat, y.registers.flat, weights.registers.flat, strict=True
        ):
            add(0, a, a)
            add(1, b, b)
            add(2, arith.mulf(a, b), c)
        f32 = ir.F32Type.get()
        lanes = [
            vector.reduction(f32, vector.CombiningKind.ADD, total) for total in sums
        ]
        for distance in (16, 8, 4, 2, 1):
            lanes = [arith.addf(v, mgpu_utils.shfl_bfly(v, distance)) for v in lanes]
        thread = thread_index()
        four = vector.from_elements(ir.VectorType.get((4,), f32), [*lanes, lanes[0]])
        index = functools.partial(arith.index_cast, ir.IndexType.get())
        zero = arith.constant(ir.IndexType.get(), 0)
        with mgpu_utils.when((thread % 32).compare("eq", 0).value):
            vector.store(four, scratch, [index((thread // 32).value), zero])
        mgpu.warpgroup_barrier()
        total = None
        for warp in range(_WARPS):
            at = arith.constant(ir.IndexType.get(), warp)
            part = vector.load(four.type, scratch, [at, zero])
            total = part if total is None else arith.addf(total, part)
        return tuple(
            mgpu.FragmentedArray.splat(vector.extract(total, [], [i]), ())
            for i in range(3)
        )

    return row_sums


def _finish(sums, hidden, value, is_open, *, width, eps, clamp):
    """Give the output row from a row's three sums; `hidden` keeps its dtype."""
    hidden_square, key_square, dot = sums
    norm = lax.rsqrt(hidden_square / width + eps) * lax.rsqrt(key_square / width + eps)
    dot = dot * norm * width**-0.5
    root = jnp.sqrt(jnp.maximum(jnp.abs(dot), clamp))
    gate = 1 / (1 + jnp.exp(jnp.where(dot < 0, root, -root)))
    out = (hidden.astype(_F32) + gate * value.astype(_F32)).astype(hidden.dtype)
    if is_open is None:
        return out
    # A choice, not a product: what a shut token's value holds must not matter.
    return jnp.where(lax.broadcast(is_open, out.shape), out, hidden)


def _load_row(ref, shape):
    return plgpu.load(ref, layout=_layout(shape))


def _split(cta, streams):
    """Give a CTA's token (or group of tokens) and its stream, which runs fastest."""
    return lax.div(cta, jnp.int32(streams)), lax.rem(cta, jnp.int32(streams))


def _weights(q_ref, k_ref, stream, shape):
    q = _load_row(q_ref.at[stream], shape).astype(_F32)
    return q * _load_row(k_ref.at[stream], shape).astype(_F32)


def _one_each(out_type, masked, interpret, **static):
    """Build the kernel with one CTA per token and stream."""
    tokens, streams, *shape = out_type.shape
    shape = tuple(shape)
    row_sums = _row_sums(shape, interpret)

    def gate_one_each(hidden_ref, kv_ref, q_ref, k_ref, *refs):
        mask_ref, out_ref, scratch = refs if masked else (None, *refs)
        token, stream = _split(lax.axis_index("cta"), streams)
        hidden = _load_row(hidden_ref.at[token, stream], shape)
        key = _load_row(kv_ref.at[token, stream], shape)
        value = _load_row(kv_ref.at[token, streams], shape)
        weights = _weights(q_ref, k_ref, stream, shape)
        is_open = None if mask_ref is None else mask_ref[token]
        sums = row_sums(hidden.astype(_F32), key.astype(_F32), weights, scratch)
        out_ref[token, stream] = _finish(sums, hidden, value, is_open, **static)

    return plgpu.kernel(
        gate_one_each,
        out_type=out_type,
        grid=(tokens * streams,),
        grid_names=("cta",),
        scratch_types=[plgpu.SMEM((_WARPS, 4), _F32)],
        interpret=interpret,
    )


def _ring(out_type, kv_dtype, masked, sizes, interpret, **static):
    """Build the kernel in which a CTA takes every `groups`-th token of a stream."""
    tokens, streams, *shape = out_type.shape
    shape = tuple(shape)
    stages = sizes.stages
    groups = -(-tokens // sizes.tokens)
    row_sums = _row_sums(shape, interpret)

    def gate_ring(hidden_ref, kv_ref, q_ref, k_ref, *refs):
        mask_ref, *refs = refs if masked else (None, *refs)
        out_ref, hidden_ring, kv_ring, scratch, filled = refs
        group, stream = _split(lax.axis_index("cta"), streams)
        rounds = lax.div(tokens - group + groups - 1, groups)

        def fetch(i):
            slot, token = lax.rem(i, stages), group + i * groups
            for source, target in (
                (hidden_ref.at[token, stream], hidden_ring.at[slot]),
                (kv_ref.at[token, stream], kv_ring.at[slot, 0]),
                (kv_ref.at[token, streams], kv_ring.at[slot, 1]),
            ):
                plgpu.copy_gmem_to_smem(source, target, filled.at[slot])

        for i in range(stages):
            pl.when(i < rounds)(functools.partial(fetch, jnp.int32(i)))
        weights = _weights(q_ref, k_ref, stream, shape)

        @pl.loop(0, rounds)
        def _(i):
            slot, token = lax.rem(i, stages), group + i * groups
            is_open = None if mask_ref is None else mask_ref[token]
            plgpu.barrier_wait(filled.at[slot])
            hidden = _load_row(hidden_ring.at[slot], shape)
            key = _load_row(kv_ring.at[slot, 0], shape)
            value = _load_row(kv_ring.at[slot, 1], shape)
            x, y = hidden.astype(_F32), key.astype(_F32)
            sums = row_sums(x, y, weights, scratch.at[lax.rem(i, 2)])
            # All threads have read the slot: `copy_gmem_to_smem` starts with a barrier.
            pl.when(i + stages < rounds)(functools.partial(fetch, i + stages))
            out_ref[token, stream] = _finish(sums, hidden, value, is_open, **static)

    return plgpu.kernel(
        gate_ring,
        out_type=out_type,
        grid=(groups * streams,),
        grid_names=("cta",),
        scratch_types=[
            plgpu.SMEM((stages, *shape), out_type.dtype),
            plgpu.SMEM((stages, 2, *shape), kv_dtype),
            plgpu.SMEM((2, _WARPS, 4), _F32),
            plgpu.Barrier(num_barriers=stages, num_arrivals=3),
        ],
        interpret=interpret,
    )


@functools.partial(jax.jit, static_argnames=("eps", "clamp", "interpret", "sizes"))
def gate_pallas(
    hidden: jax.Array,
    kv: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array,
    token_mask: jax.Array | None = None,
    *,
    eps: float,
    clamp: float,
    interpret: bool = False,
    sizes: block_sizes.GateSizes | None = None,
) -> jax.Array:
    """Compute ``hidden + gate * value``; `kernels.gate` says how.

    Args:
      hidden: [T, M, E], E at most 16,384. A multiple of 128 is taken as it is, any
        other E is padded, which copies `hidden` and `kv`.
      kv: [T, (M+1)*E].
      q_weight: [M, E].
      k_weight: [M, E].
      token_mask: bool [T] or None.
      eps: Added to the mean squares.
      clamp: The least |dot| whose root is taken.
      interpret: Run in Pallas' GPU interpreter, on a CPU.
      sizes: Block sizes that override the tuned ones.

    Returns:
      [T, M, E] in the dtype of `hidden`.
    """
    reason = unsupported_reason(hidden, kv, q_weight, k_weight)
    if reason is not None:
        raise NotImplementedError(f"gate_pallas: {reason}")
    tokens, streams, width = hidden.shape
    if hidden.size == 0:
        return hidden

    def in_rows(array, *leading):
        array = array.reshape(*leading, width)
        padding = [(0, 0)] * len(leading) + [(0, -width % WARPGROUP)]
        return jnp.pad(array, padding).reshape(*leading, -1, WARPGROUP)

    operands = [
        in_rows(hidden, tokens, streams),
        in_rows(kv, tokens, streams + 1),
        in_rows(q_weight, streams),
        in_rows(k_weight, streams),
    ]
    if token_mask is not None:
        operands.append(token_mask)
    out_type = jax.ShapeDtypeStruct(operands[0].shape, hidden.dtype)
    if sizes is None:
        row_bytes = width * (hidden.dtype.itemsize + 2 * kv.dtype.itemsize)
        sizes = block_sizes.gate_sizes(tokens, streams, width, row_bytes)
    static = {
        "masked": token_mask is not None,
        "interpret": plgpu.InterpretGPUParams() if interpret else False,
        "width": width,
        "eps": eps,
        "clamp": clamp,
    }
    with jax.enable_x64(False):  # indices in the kernel are 32 bits wide
        if sizes.stages == 0:
            kernel = _one_each(out_type, **static)
        else:
            kernel = _ring(out_type, kv.dtype, sizes=sizes, **static)
        out = kernel(*operands)
    return out.reshape(tokens, streams, -1)[..., :width]
