"""The kernels of splash attention for TPUs in JAX, forward and backward apart, with the tables of blocks given.

JAX's public function joins both passes in one differentiable function. Differentiating it in a `shard_map` would sum
gradients over mesh axes that hold copies. Here, each pass has its own `shard_map`.

T length of the queries, S length of the keys, N heads, K kv heads, H dims per head; I, J numbers of their blocks, W
largest number of blocks that a block meets.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.jax_internals import reading

_MODULE = 'jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel'
# The number of products of queries x keys x dims that each kernel computes.
_PRODUCTS = {'fwd': 2, 'dq': 3, 'dkv': 4}
_replacing = threading.RLock()


class BlockTable(NamedTuple):
  """Which blocks each block meets: int [1, I, W] for queries, or [1, W, J] for keys."""

  met: np.ndarray | jax.Array  # Indices of the blocks that it meets; an unused entry may have any index.
  used: np.ndarray | jax.Array  # 1 for used entries, 0 for others.


class SplashCall(NamedTuple):
  """Those arguments of the kernels that all rows share."""

  tables: tuple[BlockTable, BlockTable] | None  # For blocks of queries, and of keys; None if all blocks meet.
  pairs: float  # The number of pairs of blocks that meet, for estimates; a mean if the tables depend on the device.
  block_sizes: tuple[int, int]  # Lengths of a block of queries and of keys, multiples of 128 that divide T and S.
  # (position of queries, index of keys) -> bool, which masks inside of blocks; None masks nothing.
  mask_fn: Callable[[jax.Array, jax.Array], jax.Array] | None
  soft_cap: float | None  # See `Formula`.
  interpret: bool  # Whether to run the kernels as plain JAX operations.


class SplashArrays(NamedTuple):
  """The arrays of a row: queries [N, T, H], keys and values [K, S, H], and integers.

  `query_pos`, int32 [T], is passed to `mask_fn`; None without a `mask_fn`. `ids` are int32 [T] and [S]: a query
  attends only to keys with its id; None masks nothing. `sinks`, [N], are logits of keys with the value 0; None if there
  are none.
  """

  query: jax.Array
  key: jax.Array
  value: jax.Array
  query_pos: jax.Array | None = None
  ids: tuple[jax.Array, jax.Array] | None = None
  sinks: jax.Array | None = None


def has_splash() -> bool:
  """Whether this JAX has the kernels, in the form that this module calls."""
  try:
    parameters = inspect.signature(_kernels()._splash_attention_forward).parameters
    return {'sinks', 'segment_ids', 'mask_function'} <= {*parameters} and callable(_kernels()._splash_attention_bwd)
  except Exception:
    return False


def splash_forward(call: SplashCall, arrays: SplashArrays) -> tuple[jax.Array, jax.Array]:
  """Returns softmax(q . k) . v, [N, T, H], and lse, the logarithm of the softmax's denominator, float32 [N, T]."""
  with reading('splash attention'), _estimated_costs(call, arrays):
    kernels = _kernels()
    out, (lse,) = kernels._splash_attention_forward(
      _mask_info(call, arrays, 0),
      *arrays[:3],
      None if arrays.ids is None else kernels.SegmentIds(*arrays.ids),
      sinks=arrays.sinks,
      save_residuals=True,
      residual_checkpoint_name=None,
      **_static(call),
    )
  return out, lse


def splash_backward(
  call: SplashCall, arrays: SplashArrays, out: jax.Array, lse: jax.Array, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the gradients of queries, keys and values, from both results of `splash_forward` and the output's gradient.

  The sinks are not needed, because both results contain them.
  """
  with reading('splash attention'), _estimated_costs(call, arrays):
    kernels = _kernels()
    ids = None if arrays.ids is None else kernels.SegmentIds(*arrays.ids)
    infos = _mask_info(call, arrays, 0), _mask_info(call, arrays, 1)
    found = kernels._splash_attention_bwd(
      save_residuals=False,
      residual_checkpoint_name=None,
      res=(*arrays[:3], ids, None, out, lse, *infos),
      do=do,
      **_static(call),
    )
  return found[3:6]


def _kernels() -> Any:
  return importlib.import_module(_MODULE)


def _static(call: SplashCall) -> dict[str, Any]:
  bq, bs = call.block_sizes
  names = inspect.signature(_kernels().BlockSizes).parameters
  sizes = {name: bq if name.startswith('block_q') else bs for name in names if name.startswith('block_')}
  return {
    'mask_value': _kernels().DEFAULT_MASK_VALUE,
    'is_mqa': False,
    'block_sizes': _kernels().BlockSizes(**sizes),
    'mask_function': call.mask_fn,
    'attn_logits_soft_cap': call.soft_cap,
    'interpret': call.interpret,
  }


def _mask_info(call: SplashCall, arrays: SplashArrays, side: int) -> Any:
  """Returns the `MaskInfo` of JAX's kernels, with the table for blocks of queries (side 0) or of keys (side 1)."""
  table = None if call.tables is None else call.tables[side]
  return _kernels().mask_info_lib.MaskInfo(
    data_next=None if table is None else jnp.asarray(table.met),
    mask_next=None,
    block_mask=None if table is None else jnp.asarray(table.used),
    partial_mask_blocks=None,
    q_sequence=arrays.query_pos,
  )


@contextlib.contextmanager
def _estimated_costs(call: SplashCall, arrays: SplashArrays) -> Iterator[None]:
  """Inside the block, calls of kernels carry estimates of their cost, which JAX's own calls lack."""
  (N, T, H), S, (bq, bs) = arrays.query.shape, arrays.key.shape[1], call.block_sizes
  logits = int(N * call.pairs * bq * bs)
  itemsize = arrays.query.dtype.itemsize

  def pallas_call(pallas: Any, kernel: Any, *, name: str, **kwargs: Any) -> Any:
    phase = next(phase for phase in _PRODUCTS if f'_{phase}_' in f'{name}_')
    # Blocks of queries (or of keys, for dkv) stay on the chip; the blocks of the other side are read for each pair.
    stays, moves = (S, bq) if phase == 'dkv' else (T, bs)
    moved = int(itemsize * H * N * ((4 if phase == 'dkv' else 3) * stays + 2 * call.pairs * moves))
    estimate = pallas.CostEstimate(2 * _PRODUCTS[phase] * logits * H, transcendentals=logits, bytes_accessed=moved)
    return pallas.pallas_call(kernel, name=name, cost_estimate=estimate, **kwargs)

  with _replacing:
    pallas = _kernels().pl
    _kernels().pl = _Changed(pallas, functools.partial(pallas_call, pallas))
    try:
      yield
    finally:
      _kernels().pl = pallas


class _Changed:
  """A module with a replaced `pallas_call`; all other attributes come from the module itself."""

  def __init__(self, module: Any, pallas_call: Callable[..., Any]):
    self._module, self.pallas_call = module, pallas_call

  def __getattr__(self, name: str) -> Any:
    return getattr(self._module, name)
