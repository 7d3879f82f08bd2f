"""Dot-product attention: chooses an implementation, and computes dense attention.

    dense       all logits at once, [B, N, T, S]: JAX's function, or our own for soft caps, sinks and dropout
    blockwise   memory linear in the length; see `blockwise.py`
    cudnn       a fused kernel for NVIDIA GPUs, in bfloat16 or float16
    tokamax     fused kernels for NVIDIA GPUs, where cuDNN's kernel does not apply; see `tokamax_attention.py`
    splash      a fused kernel for TPUs; see `splash.py`
    auto        one of these, by platform, length and masks; `choose_attention` says which and why

B batch, T length of the queries, S length of the keys, N heads, K kv heads, G = N / K query heads for each kv head,
H dims per head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError, check_choice
from praxis_lite.common.jax_internals.splash import has_splash
from praxis_lite.layers.attention_spec import DEFAULT_SPEC, AttentionSpec, LogitBias, ProbabilityDropout, sort_arguments
from praxis_lite.layers.blocks import dropout_factors, group_sinks
from praxis_lite.layers.blockwise import RowSplit, blockwise_attention
from praxis_lite.layers.context_parallel import context_parallel_attention
from praxis_lite.layers.mask_checks import check_mask
from praxis_lite.layers.masks import (
  Array,
  AttentionMask,
  Band,
  has_array_mask,
  has_causal,
  make_mask,
  split_offsets,
  to_mask,
)
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.layers.sequence_parts import SequenceSplit
from praxis_lite.layers.splash import attend_by_splash, mask_obstacle
from praxis_lite.layers.tokamax_attention import attend_by_tokamax, why_no_attention_kernel
from praxis_lite.sharding.constraints import is_partly_mapped, unmapped_axes
from praxis_lite.sharding.mesh import ask_device, platform

Kernel = Literal['cudnn', 'tokamax', 'splash']
Chosen = Literal['dense', 'blockwise', Kernel]
# 'xla' is an older name of 'dense', which recorded configs may have.
IMPLEMENTATIONS = ('auto', 'dense', 'blockwise', 'cudnn', 'tokamax', 'splash', 'xla')
_MANY_LOGITS, _MANY_LOGITS_ON_CPU = 2048 * 2048, 1024 * 1024
# 'auto' chooses a fused kernel only if there are at least this many queries and at least this many keys.
_FUSED_FROM = 256
# If a kernel for GPUs needs the mask as an array, 'auto' chooses it only for at most this number of logits.
_MOST_MASKED = 8192 * 8192
_ONLY_FLOAT32 = ('TPU v2', 'TPU v3')  # Chips whose compiler has no products of bfloat16 in kernels.
_PARTLY_MAPPED = (
  "cannot be split by the compiler inside of a shard_map over other axes, such as a pipeline's batch_axes"
)
_NOT_SPLIT = 'needs the argument `split`, which says how the mesh splits rows and heads'


class AttentionCase(NamedTuple):
  """The properties of a call that decide how attention is computed."""

  platform: str  # 'cpu', 'gpu' or 'tpu'.
  dtype: jnp.dtype  # The dtype of the queries.
  query_len: int  # T.
  key_len: int  # S.
  dims_per_head: int  # H.
  causal: bool = False  # Whether the mask is causal.
  window: bool = False  # Whether the mask has a window.
  by_rows: bool = False  # Whether the mask also depends on rows, so that the fused kernel needs it as an array.
  arrays: bool = False  # Whether a mask or a bias is given as an array of queries and keys.
  split: bool = False  # Whether `context_axis` splits the sequence over a mesh axis.
  partly_mapped: bool = False  # Whether a `shard_map` maps some mesh axes, while others may split the arrays.
  logit_bias: bool = False  # Whether there is a bias that depends on positions.
  soft_cap: bool = False
  dropout: bool = False
  sinks: bool = False  # Whether each head has a logit without a key.
  only_float32: str = ''  # The kind of the devices, such as 'TPU v3', if their kernels have no bfloat16; otherwise ''.
  excludes_self: bool = False  # Whether limits of the mask exclude the index of the query itself.
  splash_obstacle: str = ''  # What in the mask prevents splash attention, as the end of a sentence.
  mesh_obstacle: str = ''  # What in the mesh prevents splash attention and tokamax's kernels, as the end of a sentence.

  @classmethod
  def make(
    cls,
    dtype: DTypeLike,
    lengths: tuple[int, int],
    dims_per_head: int,
    mask: AttentionMask,
    *,
    array_bias: bool = False,
    mesh_obstacle: str = '',
    **others: bool,
  ) -> AttentionCase:
    """Returns the case of a call with this mask, on this platform and in the ambient mesh.

    `lengths` are T and S. `array_bias` says whether there is a bias as an array. For `mesh_obstacle`, see
    `AttentionMesh.kernel_split`. `others` are further attributes of the case.
    """
    offsets, more = split_offsets(mask)
    return cls(
      platform(),
      jnp.dtype(dtype),
      *lengths,
      dims_per_head,
      causal=has_causal(mask),
      window=offsets.behind is not None or offsets.ahead not in (None, 0),
      by_rows=more is not None,
      arrays=array_bias or has_array_mask(mask),
      partly_mapped=is_partly_mapped(),
      only_float32=ask_device(_kind_without_bfloat16),
      excludes_self=min(limit for limit in (0, offsets.behind, offsets.ahead) if limit is not None) < 0,
      splash_obstacle=mask_obstacle(mask, *lengths),
      mesh_obstacle=mesh_obstacle,
      **others,
    )


class AttentionChoice(NamedTuple):
  """An implementation, and the reason for it."""

  name: Chosen
  reason: str


def choose_attention(implementation: str, case: AttentionCase, path: str = 'implementation') -> AttentionChoice:
  """Returns an implementation other than 'auto', and the reason. Messages begin with `path`.

  Raises:
    ConfigError: there is no such implementation, or it cannot compute this case.
  """
  check_choice(path, implementation, IMPLEMENTATIONS)
  if implementation in ('dense', 'xla'):
    return AttentionChoice('dense', f'{path} is {implementation!r}')
  if implementation == 'blockwise':
    if case.arrays:
      raise ConfigError(
        f"{path}: 'blockwise' makes the mask of a block from rules (causal, sliding_window, segment_ids, "
        "prefix_lengths), and this call gives a mask or a bias as an array; 'dense' and 'auto' take one"
      )
    return AttentionChoice('blockwise', f"{path} is 'blockwise'")
  if implementation in _OBSTACLES:
    kernel = cast(Kernel, implementation)
    if obstacle := _OBSTACLES[kernel](case):
      raise ConfigError(f"{path}: '{kernel}' {obstacle}; 'auto' chooses what is possible")
    slow = '; its kernels are interpreted on a CPU, which is slow' if case.platform == 'cpu' else ''
    return AttentionChoice(kernel, f"{path} is '{kernel}'{slow}")
  logits = f'{case.query_len:,} queries x {case.key_len:,} keys'
  if case.arrays:
    gathered = ', for which the split sequence is gathered' if case.split else ''
    return AttentionChoice('dense', f'a mask or a bias is given as an array{gathered}')
  is_long = case.split or min(case.query_len, case.key_len) >= _FUSED_FROM
  obstacles: list[str] = []
  for name in _KERNELS.get(case.platform, ()) if is_long and (case.platform == 'tpu' or not case.split) else ():
    obstacle = _OBSTACLES[name](case) or _obstacle_of_size(name, case)
    if not obstacle:
      others = f' ({"; ".join(obstacles)})' if obstacles else ''
      return AttentionChoice(name, f'{logits}, and the fused kernel takes this case{others}')
    obstacles.append(f'{_LIBRARY_KERNELS[name]} {obstacle}')
  without = ''.join(f'; {obstacle}' for obstacle in obstacles)
  if case.split:
    return AttentionChoice('blockwise', f'the sequence is split over a mesh axis{without}')
  if case.query_len * case.key_len < many_logits(case.platform):
    return AttentionChoice('dense', f'the logits of {logits} are small')
  return AttentionChoice('blockwise', f'the logits of {logits} are too large to hold{without}')


def many_logits(platform: str) -> int:
  """Returns the number of logits of a head from which on 'auto' prefers other methods to dense attention."""
  return _MANY_LOGITS_ON_CPU if platform == 'cpu' else _MANY_LOGITS


def _obstacle_of_size(kernel: Kernel, case: AttentionCase) -> str:
  """Returns why 'auto' does not choose a kernel that could compute a case; '' if there is no such reason."""
  as_array = case.logit_bias or (case.by_rows and case.query_len * case.key_len > _MOST_MASKED)
  return 'would need the mask or the bias as an array of this size' if as_array and kernel != 'splash' else ''


def has_kernels_in(dtype: DTypeLike) -> bool:
  """Whether kernels on the kind of TPU that the ambient mesh has can compute in this dtype."""
  return jnp.dtype(dtype) != jnp.bfloat16 or not ask_device(_kind_without_bfloat16)


def _cudnn_obstacle(case: AttentionCase) -> str:
  """Returns why cuDNN's fused kernel cannot compute a case, as the end of a sentence; '' if it can."""
  H, takes_array = case.dims_per_head, case.by_rows or case.logit_bias or case.arrays
  return _gpu_obstacle(case) or first_of(
    (H % 8 or H > 128, f'needs dims_per_head to be a multiple of 8 of at most 128, not {H}'),
    (case.partly_mapped, _PARTLY_MAPPED),
    (case.soft_cap, 'has no logit_soft_cap'),
    (case.dropout, 'has no dropout here'),
    (case.sinks, 'has no sinks'),
    (case.window and not case.causal, 'has a sliding_window only with causal attention'),
    (takes_array and (case.query_len % 2 or case.key_len % 2), 'takes a mask or a bias only for even lengths'),
  )


def _tokamax_obstacle(case: AttentionCase) -> str:
  """Returns why the kernels of tokamax cannot compute a case, as the end of a sentence; '' if they can."""
  obstacle = _gpu_obstacle(case) or first_of(
    (case.arrays or case.logit_bias, 'takes no bias, and no mask as an array'),
    (case.dropout, 'has no gradients with dropout'),
    (case.excludes_self, "has no mask that excludes a query's own index"),
  )
  return (
    obstacle
    or case.mesh_obstacle
    or why_no_attention_kernel(case.dims_per_head, soft_cap=case.soft_cap, window=case.window)
  )


def _gpu_obstacle(case: AttentionCase) -> str:
  """Returns why no fused kernel for GPUs can compute a case, as the end of a sentence; '' if one may."""
  return first_of(
    (case.platform != 'gpu', f'needs an NVIDIA GPU, and the platform is {case.platform!r}'),
    (
      case.dtype not in (jnp.bfloat16, jnp.float16),
      f'computes in bfloat16 or float16, not in {jnp.dtype(case.dtype).name}',
    ),
  )


def first_of(*obstacles: tuple[object, str]) -> str:
  """Returns the text of the first of these (condition, text) pairs whose condition holds; '' if none holds."""
  return next((text for is_there, text in obstacles if is_there), '')


def _kind_without_bfloat16(kind: str) -> str:
  return kind if kind.startswith(_ONLY_FLOAT32) else ''


def _splash_obstacle(case: AttentionCase) -> str:
  """Returns why splash attention cannot compute a case, as the end of a sentence; '' if it can."""
  in_bfloat16, dtype = case.dtype == jnp.bfloat16, jnp.dtype(case.dtype).name
  obstacle = first_of(
    (case.platform == 'gpu', "needs a TPU, and the platform is 'gpu'"),
    (not in_bfloat16 and case.dtype != jnp.float32, f'computes in bfloat16 or float32, not in {dtype}'),
    (in_bfloat16 and case.only_float32, f'computes in float32 on {case.only_float32}, not in bfloat16'),
    (case.arrays, 'takes no mask or bias as an array'),
    (case.logit_bias, 'has no bias that depends on positions'),
    (case.dropout, 'has no dropout'),
  )
  obstacle = obstacle or case.splash_obstacle or case.mesh_obstacle
  return obstacle or ('' if has_splash() else 'has an unknown interface in this release of JAX')


_OBSTACLES: dict[str, Callable[[AttentionCase], str]] = {
  'cudnn': _cudnn_obstacle,
  'tokamax': _tokamax_obstacle,
  'splash': _splash_obstacle,
}
# The fused kernels of each platform, in the order in which 'auto' considers them; and what messages call them.
_KERNELS: dict[str, tuple[Kernel, ...]] = {'gpu': ('cudnn', 'tokamax'), 'tpu': ('splash',)}
_LIBRARY_KERNELS = {'cudnn': "cuDNN's kernel", 'tokamax': "tokamax's", 'splash': 'the fused kernel'}


def dot_product_attention(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  mask: AttentionMask | Array | None = None,
  *,
  spec: AttentionSpec = DEFAULT_SPEC,
  bias: jax.Array | LogitBias | None = None,
  dropout: ProbabilityDropout | None = None,
  sinks: jax.Array | None = None,
  split: RowSplit | SequenceSplit | None = None,
  **older: Any,
) -> jax.Array:
  """Returns softmax(scale * query . key) . value per head, [B, T, N, H]; the softmax is in float32.

  Args:
    query_BTNH: queries.
    key_BSKH, value_BSKH: query head n uses kv head n // (N / K).
    mask: which keys a query attends to: a mask, such as `Causal() & SlidingWindow(512)`, or bool that broadcasts to
      [B, N, T, S]; None means all. If all keys of a query are masked, its result is finite but otherwise undefined.
    spec: how attention is computed.
    bias: added to the logits: an array that broadcasts to [B, N, T, S], or a function of positions; None adds nothing.
    dropout: dropout of probabilities; None disables it. All implementations drop the same probabilities.
    sinks: [N], a logit of each head that takes part in the softmax of all its queries and has no value (GPT-OSS), so
      the other probabilities sum to less than 1; scale, soft cap and bias do not apply to it. None disables them.
    split: how the ambient mesh splits the arrays, for blockwise attention and the kernels of splash attention and
      tokamax; None leaves it to the compiler, which cannot split these kernels.
    **older: arguments of earlier versions: `causal`, `window`, `prefix_lengths`, `segment_ids`, `kv_segment_ids`, and
      the fields of `spec`.

  Raises:
    ConfigError: the implementation cannot compute this case, or the mask does not fit; see `check_mask`.
  """
  mask = to_mask(mask)
  if older:
    rules = ('causal', 'window', 'prefix_lengths', 'segment_ids', 'kv_segment_ids')
    mask = make_mask(*(older.pop(name, default) for name, default in zip(rules, (False, *(None,) * 4)))) & mask
    spec = dataclasses.replace(spec, **older)
  heads, (T, S) = (query_BTNH, key_BSKH, value_BSKH), (query_BTNH.shape[1], key_BSKH.shape[1])
  check_mask(mask, query_BTNH.shape[0], T, S)
  case = AttentionCase.make(
    query_BTNH.dtype,
    (T, S),
    query_BTNH.shape[3],
    mask,
    array_bias=not isinstance(bias, LogitBias | None),
    logit_bias=isinstance(bias, LogitBias),
    soft_cap=spec.logit_soft_cap is not None,
    dropout=dropout is not None,
    sinks=sinks is not None,
    mesh_obstacle='' if split is not None or not unmapped_axes() else _NOT_SPLIT,
  )
  name, _ = choose_attention(spec.implementation, case)
  if isinstance(split, SequenceSplit) and name in ('blockwise', 'splash'):
    assert isinstance(bias, LogitBias | None)
    spec = dataclasses.replace(spec, implementation=name)
    return context_parallel_attention(*heads, mask, split=split, spec=spec, bias=bias, dropout=dropout, sinks=sinks)
  if name in ('splash', 'tokamax'):
    assert not isinstance(split, SequenceSplit)
    if split is not None:
      heads = query_BTNH, split.repeat_kv_heads(key_BSKH), split.repeat_kv_heads(value_BSKH)
    formula, arrays, integers = sort_arguments(heads, mask, None, None, spec, sinks)
    if name == 'tokamax':
      return attend_by_tokamax(formula, split, arrays, integers)
    return attend_by_splash(formula, spec.block_size, split, arrays, integers)
  if name == 'blockwise':
    assert isinstance(bias, LogitBias | None) and not isinstance(split, SequenceSplit)
    return blockwise_attention(*heads, mask, spec=spec, bias=bias, dropout=dropout, sinks=sinks, split=split)
  bias_BNTS = bias.to_array(T, S) if isinstance(bias, LogitBias) else bias
  if spec.logit_soft_cap is not None or dropout is not None or sinks is not None:
    return _attend_densely(*heads, mask.to_array(T, S), bias_BNTS, dropout, sinks, spec)
  offsets, others = split_offsets(mask)
  # JAX 0.8 computes windows wrongly in dense attention, and the fused kernel supports only causal windows.
  takes_window = offsets.behind is None or (name == 'cudnn' and offsets.ahead == 0)
  if not takes_window or offsets.ahead not in (None, 0):
    offsets, others = Band(), mask
  return jax.nn.dot_product_attention(
    *heads,
    bias=bias_BNTS,
    mask=None if others is None else others.to_array(T, S),
    is_causal=offsets.ahead == 0,
    local_window_size=None if offsets.behind is None else (offsets.behind, 0),
    scale=spec.scale,
    implementation='cudnn' if name == 'cudnn' else 'xla',
  )


def _attend_densely(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  value_BSKH: jax.Array,
  mask: Array | None,
  bias: jax.Array | None,
  dropout: ProbabilityDropout | None,
  sinks: jax.Array | None,
  spec: AttentionSpec,
) -> jax.Array:
  """Returns dense attention with soft cap, dropout and sinks, which `jax.nn.dot_product_attention` does not support."""
  (B, T, N, H), (_, S, K, _) = query_BTNH.shape, key_BSKH.shape
  probs_BKGTS = attention_probs(query_BTNH, key_BSKH, mask, bias, sinks, spec)
  if dropout is not None:
    seeds_BNT = jnp.moveaxis(dropout.seeds_BTN, 2, 1)
    probs_BKGTS *= group_heads(dropout_factors(seeds_BNT, jnp.arange(S), dropout.rate), K)
  return jnp.einsum('BKGTS,BSKH->BTKGH', probs_BKGTS.astype(value_BSKH.dtype), value_BSKH).reshape(B, T, N, H)


def attention_probs(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  mask: Array | None = None,
  bias: jax.Array | None = None,
  sinks: jax.Array | None = None,
  spec: AttentionSpec = DEFAULT_SPEC,
) -> jax.Array:
  """Returns the probabilities of dense attention, [B, K, G, T, S], in float32 or wider.

  Args:
    query_BTNH, key_BSKH, sinks, spec: see `dot_product_attention`.
    mask: bool with four dimensions that broadcast to [B, N, T, S]; None allows all positions.
    bias: added to the logits, with dimensions like those of `mask`; None adds nothing.
  """
  (B, T, N, H), K = query_BTNH.shape, key_BSKH.shape[2]
  query_BTKGH = query_BTNH.reshape(B, T, K, N // K, H)
  products_BKGTS = jnp.einsum(
    'BTKGH,BSKH->BKGTS', query_BTKGH, key_BSKH, preferred_element_type=sum_dtype(query_BTKGH, key_BSKH)
  )
  logits_BKGTS = spec.formula(H).to_logits(products_BKGTS)
  if bias is not None:
    logits_BKGTS += group_heads(bias, K)
  if mask is not None:
    logits_BKGTS = jnp.where(group_heads(mask, K), logits_BKGTS, 0.7 * jnp.finfo(jnp.float32).min)
  return _softmax_with_sinks(logits_BKGTS, sinks)


def attention_entropy(
  query_BTNH: jax.Array,
  key_BSKH: jax.Array,
  mask: AttentionMask,
  bias: jax.Array | LogitBias | None = None,
  sinks: jax.Array | None = None,
  spec: AttentionSpec = DEFAULT_SPEC,
) -> jax.Array:
  """Returns the entropy of the probabilities of each query, in nats, [B, T, N]; no gradient flows through it.

  It is computed densely, whatever computes attention. The probability of a sink counts as one more. The arguments are
  the same as for `dot_product_attention`.
  """
  query_BTNH, key_BSKH = jax.lax.stop_gradient((query_BTNH, key_BSKH))
  (B, T, N, _), S = query_BTNH.shape, key_BSKH.shape[1]
  bias_BNTS = bias.to_array(T, S) if isinstance(bias, LogitBias) else bias
  probs_BKGTS = attention_probs(query_BTNH, key_BSKH, to_mask(mask).to_array(T, S), bias_BNTS, sinks, spec)
  entropy_BKGT = -jnp.sum(jax.scipy.special.xlogy(probs_BKGTS, probs_BKGTS), axis=-1)
  if sinks is not None:
    rest_BKGT = jnp.maximum(1.0 - jnp.sum(probs_BKGTS, axis=-1), 0.0)
    entropy_BKGT -= jax.scipy.special.xlogy(rest_BKGT, rest_BKGT)
  return jnp.moveaxis(jax.lax.stop_gradient(entropy_BKGT).reshape(B, N, T), 1, 2)


def _softmax_with_sinks(logits_BKGTS: jax.Array, sinks_N: jax.Array | None) -> jax.Array:
  """Returns the probabilities of the keys, which sum to 1 for each query without a sink, and to less with one."""
  sinks_KG1 = group_sinks(sinks_N, logits_BKGTS.shape[1])
  if sinks_KG1 is None:
    return jax.nn.softmax(logits_BKGTS, axis=-1)
  sinks_KG11 = sinks_KG1[..., None].astype(logits_BKGTS.dtype)
  top = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits_BKGTS, axis=-1, keepdims=True), sinks_KG11))
  weights = jnp.exp(logits_BKGTS - top)
  return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks_KG11 - top))


def group_heads(x_BNTS: Array, num_kv_heads: int) -> Array:
  """Returns [B, K, G, T, S] for [B, N, T, S]. For a single head, returns [B, 1, 1, T, S], which broadcasts."""
  B, N, T, S = x_BNTS.shape
  return x_BNTS.reshape(B, *((num_kv_heads, N // num_kv_heads) if N > 1 else (1, 1)), T, S)
