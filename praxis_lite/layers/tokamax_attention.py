"""Attention on NVIDIA GPUs by tokamax's kernels, where cuDNN's kernel does not apply. Logits are never in memory.

    Mosaic   for Hopper: forward and backward kernels, which support a soft cap. Not for Blackwell: with 128 dims per
             head or more, the backward kernels of tokamax 0.0.12 need more shared memory than the chip has
    Triton   for all other chips since Ampere: the backward kernel has no soft cap, and takes a window as an array
             [T, S]

The kernels do not support sinks. So sinks are added to the results of the forward kernel, and the backward kernels get
the sums that include them. Limits of offsets reach the kernels as a range of keys for each query, and the rest of a
mask as a bool array, [B or 1, 1, T, S]. Lengths are padded to whole blocks.

B batch, T length of the queries, S length of the keys, N heads, K kv heads, H dims per head.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import first_line
from praxis_lite.layers.attention_spec import Heads, Integers, Residuals
from praxis_lite.layers.block_arrays import block_indices
from praxis_lite.layers.block_pairs import count_pairs
from praxis_lite.layers.blocks import Formula, Sums, add_sinks, sum_sink_gradients
from praxis_lite.layers.blockwise import RowSplit, compute_context, compute_gradients
from praxis_lite.layers.gpu_capability import LARGE_SHARED_MEMORY, OLDEST_CAPABILITY, compute_capability
from praxis_lite.layers.masks import Band, OffsetMask, split_offsets
from praxis_lite.layers.tokamax_target import INSTALL, is_installed, tokamax_for_mesh
from praxis_lite.sharding.mesh import device_kind
from praxis_lite.sharding.padding import pad_to

# The most dims of a head, by whether the chip has at least 164 KiB of shared memory per multiprocessor.
_MOST_DIMS = {True: 256, False: 128}
ATTENTION_KERNEL = 'attention_kernel_'  # Prefix of the names of functions that call kernels; see `_jit_with_flops`.
_BLOCK = 128  # Lengths are padded to multiples of this, which all block lengths of the kernels divide.
_OPERATIONS = 'tokamax._src.ops.attention'
# Matrix products in a forward and in a backward pass; the latter computes the logits and their gradients twice.
_PRODUCTS, _BACKWARD_PRODUCTS = 2, 7


def why_no_attention_kernel(dims_per_head: int, *, soft_cap: bool, window: bool) -> str:
  """Returns why tokamax has no kernel for the chips of the ambient mesh, as the end of a sentence; '' if it has one."""
  if not is_installed():
    return f'is not installed: {INSTALL}'
  capability = compute_capability()
  if capability is None or capability < OLDEST_CAPABILITY:
    return 'takes GPUs of NVIDIA from Ampere on'
  if dims_per_head % 8 or dims_per_head > (most := _MOST_DIMS[capability in LARGE_SHARED_MEMORY]):
    return f'needs dims_per_head to be a multiple of 8 of at most {most} on this chip, not {dims_per_head}'
  if failure := _why_not_traced(device_kind(), capability):
    return f'does not fit this JAX, or lacks packages: {failure}'
  if not _has_mosaic(capability) and (soft_cap or window):
    what = 'logit_soft_cap' if soft_cap else 'windows without an array of all queries and keys'
    return f'has no gradients of {what} on chips other than Hopper'
  return ''


def kernel_flops(name: str) -> tuple[float, int] | None:
  """Reads a name from `_jit_with_flops`: returns the FLOPs of a call, and the number of calls; None for other names."""
  if not name.startswith(ATTENTION_KERNEL):
    return None
  flops, calls = name.removeprefix(ATTENTION_KERNEL).split('_')
  return float(flops), int(calls)


# ---------------------------------------------------------------- both passes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_by_tokamax(formula: Formula, split: RowSplit | None, heads: Heads, integers: Integers) -> jax.Array:
  """Returns attention [B, T, N, H]; its gradient is computed by a kernel too."""
  return _forward(formula, split, heads, integers)[0]


def _forward(formula: Formula, split: RowSplit | None, heads: Heads, integers: Integers) -> tuple[jax.Array, Residuals]:
  def local(heads: Heads, integers: Integers) -> tuple[jax.Array, jax.Array]:
    call = _Call.make(formula, heads, integers)
    T = heads.query.shape[1]
    # If rematerialization keeps the results, the backward pass does not need this call again, and JAX removes it.
    out_BTNH, stats = _jit_with_flops(call.forward, call.flops(_PRODUCTS, backward=False), 1)(*heads[:3])
    out_BTNH, stats = _add_sinks(heads.sinks, out_BTNH, stats)
    return out_BTNH[:, :T], stats

  return compute_context(local, split, heads, integers)


def _backward(formula: Formula, split: RowSplit | None, saved: Residuals, do_BTNH: jax.Array) -> tuple[Heads, None]:
  def local(heads: Heads, integers: Integers, out_BTNH: jax.Array, stats: jax.Array, do_BTNH: jax.Array) -> Heads:
    call = _Call.make(formula, heads, integers)
    calls = 2 if call.kernels.is_mosaic else 1
    run = _jit_with_flops(call.backward, call.flops(_BACKWARD_PRODUCTS, backward=True), calls)
    found = run(*heads[:3], out_BTNH, stats, do_BTNH)
    dq, dk, dv = (g[:, : x.shape[1]].astype(x.dtype) for g, x in zip(found, heads))
    lse_BNT = (stats[0] + jnp.log(stats[1]))[:, :, : heads.query.shape[1]]
    out_BNTH, do_BNTH = (jnp.swapaxes(x, 1, 2) for x in (out_BTNH, do_BTNH))
    dsinks = sum_sink_gradients(heads.sinks, out_BNTH, lse_BNT, do_BNTH, split.batch_axes if split else ())
    return Heads(dq, dk, dv, sinks=dsinks)

  return compute_gradients(local, split, saved, do_BTNH)


attend_by_tokamax.defvjp(_forward, _backward)


def _add_sinks(sinks: jax.Array | None, out_BTNH: jax.Array, stats: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns `out_BTNH` and `stats`, changed as if each head had one more key, with value 0 and logit `sinks`."""
  if sinks is None:
    return out_BTNH, stats
  top_BNT, total_BNT = stats
  sums = add_sinks(Sums(top_BNT, total_BNT, total_BNT[..., None]), sinks[:, None])
  kept_BTN = jnp.swapaxes(sums.o[..., 0] / sums.l, 1, 2)
  return (out_BTNH * kept_BTN[..., None]).astype(out_BTNH.dtype), jnp.stack([sums.m, sums.l])


def _jit_with_flops(fn: Callable[..., Any], flops: float, calls: int) -> Callable[..., Any]:
  """Returns `fn` jitted, under a name that tells the number of its kernel calls and the FLOPs of each."""

  def call(*arrays: jax.Array) -> Any:
    return fn(*arrays)

  call.__name__ = f'{ATTENTION_KERNEL}{round(flops / calls)}_{calls}'
  return jax.jit(call)


# ---------------------------------------------------------------- calls of kernels


class _Kernels(NamedTuple):
  """The kernels for a chip."""

  operation: Any  # tokamax's forward pass; its attribute `vjp` is the backward pass.
  mask: Callable[..., Any]
  is_mosaic: bool


class _Call(NamedTuple):
  """The static arguments and the mask of a call of the forward and backward kernels."""

  kernels: _Kernels
  formula: Formula
  lengths: tuple[int, int]  # T and S.
  size: int  # B N H.
  offsets: OffsetMask
  mask: jax.Array | None  # Bool [B or 1, 1, T, S].

  @classmethod
  def make(cls, formula: Formula, heads: Heads, integers: Integers) -> _Call:
    (B, T, N, H), S = heads.query.shape, heads.key.shape[1]
    offsets, others = split_offsets(integers.mask)
    mask = None if others is None else jnp.asarray(others.to_array(T, S))
    return cls(_kernels(), formula, (T, S), B * N * H, offsets, mask)

  def forward(self, *heads: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the output, [B, T, N, H], and the softmax's maxima and sums, [2, B, N, T]; T includes padding."""
    with tokamax_for_mesh():
      out, stats = self.kernels.operation(*map(_to_blocks, heads), **self._options(), return_residuals=True)
    return out, jnp.stack(stats)

  def backward(
    self, query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, stats: jax.Array, do: jax.Array
  ) -> tuple[jax.Array, ...]:
    """Returns the gradients of queries, keys and values, with lengths in whole blocks."""
    query, key, value, out, do = map(_to_blocks, (query, key, value, out, do))
    with tokamax_for_mesh():
      bound = self.kernels.operation.bind(query, key, value, **self._options())
      options = {name: value for name, value in bound.kwargs.items() if name != 'return_residuals'}
      found = self.kernels.operation.vjp(tuple(stats), out, do.astype(out.dtype), query, key, value, **options)
    return found['q'], found['k'], found['v']

  def flops(self, products: int, *, backward: bool) -> float:
    """Returns the FLOPs of `products` matrix products for all pairs of blocks that the kernels compute."""
    offsets = self.offsets
    if backward:  # The backward kernels skip only blocks that a causal mask makes empty.
      offsets = Band(None, 0) if offsets.ahead == 0 else Band()
    pairs = count_pairs(offsets, *(block_indices(length, _BLOCK) for length in self.lengths))
    return 2.0 * products * pairs * _BLOCK**2 * self.size

  def _options(self) -> dict[str, Any]:
    return {
      'logits_scale': float(self.formula.scale),
      'logits_soft_cap': self.formula.soft_cap,
      'mask': self._mask(),
    }

  def _mask(self) -> Any:
    """Returns tokamax's `Mask`. Queries of padding attend to some key, so that all results are finite."""
    (T, S), (behind, ahead) = self.lengths, (self.offsets.behind, self.offsets.ahead)
    index = jnp.arange(-(-T // _BLOCK) * _BLOCK, dtype=jnp.int32)
    # The kernels derive the end of a causal range from the indices, and need no array for it.
    is_causal = ahead == 0 and T == S
    end = None
    if not is_causal and (ahead is not None or S % _BLOCK):
      end = jnp.full_like(index, S) if ahead is None else jnp.minimum(index + ahead + 1, S)
    start = None if behind is None else jnp.clip(index - behind, 0, S - 1)
    mask = self.mask
    if mask is not None:
      mask = jnp.pad(mask, [(0, 0), (0, 0), (0, len(index) - T), (0, 0)], constant_values=True)
      mask = pad_to(mask, (*mask.shape[:3], -(-S // _BLOCK) * _BLOCK))
    return self.kernels.mask(mask, k_start=start, k_end=end, is_causal=is_causal)


def _to_blocks(x_BTNH: jax.Array) -> jax.Array:
  B, T, N, H = x_BTNH.shape
  return pad_to(x_BTNH, (B, -(-T // _BLOCK) * _BLOCK, N, H))


def _has_mosaic(capability: tuple[int, int] | None) -> bool:
  return capability is not None and capability[0] == 9


def _kernels() -> _Kernels:
  """Returns the kernels for the chips of the ambient mesh."""
  is_mosaic = _has_mosaic(compute_capability())
  file, name = ('pallas_mosaic_gpu', 'PallasMosaicGpu') if is_mosaic else ('pallas_triton', 'PallasTriton')
  with tokamax_for_mesh():
    operation = getattr(importlib.import_module(f'{_OPERATIONS}.{file}'), f'{name}FlashAttention')()
    return _Kernels(operation, importlib.import_module(f'{_OPERATIONS}.base').Mask, is_mosaic)


@functools.cache
def _why_not_traced(chip: str, capability: tuple[int, int]) -> str:
  """Returns why no call of the kernels can be traced for the chips of the ambient mesh; '' if one can."""
  del chip, capability  # These are only keys for `functools.cache`: tracing finds the chip through the ambient mesh.
  shape: Any = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
  heads = Heads(shape, shape, shape)
  formula = Formula(scale=1.0)

  def gradients(heads: Heads) -> Heads:
    out, pullback = jax.vjp(lambda heads: attend_by_tokamax(formula, None, heads, Integers(Band(None, 0))), heads)
    return pullback(out)[0]

  try:
    jax.eval_shape(gradients, heads)
  except Exception as error:  # A tokamax that does not fit this JAX, or that lacks packages, may raise anything.
    return first_line(error)
  return ''
