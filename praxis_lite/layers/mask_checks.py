"""Checks a mask before attention uses it: the shapes of its arrays, and what methods of a user's own classes return.

Attention in blocks cuts arrays and broadcasts results. With arrays of another length, or results without a dimension
for the keys, it would silently compute other results than dense attention.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, first_line
from praxis_lite.common.mistakes import is_about_arrays
from praxis_lite.layers.masks import ArrayMask, AttentionMask, BlockRanges, FunctionMask, Known, mask_leaves

# The numbers of queries and keys with which `allows` is tried. They differ, so that the shape of a result shows which
# dimension is which.
_QUERIES, _KEYS = 5, 3


def check_mask(mask: AttentionMask, batch: int, query_len: int, key_len: int) -> None:
  """Raises ConfigError if an array of a mask does not fit B rows of T queries and S keys, or a method returns no mask.

  The parts of a composed mask are checked one by one.
  """
  for leaf in mask_leaves(mask):
    _check_arrays(leaf, {'query': (batch, query_len), 'key': (batch, key_len), 'row': (batch,)})
    if isinstance(leaf, FunctionMask) or not type(leaf).__module__.startswith('praxis_lite.'):
      _try_methods(leaf, batch)


def _check_arrays(leaf: AttentionMask, expected: dict[str, tuple[int, ...]]) -> None:
  if isinstance(leaf, ArrayMask):  # It may broadcast, and may have a dimension for heads.
    return
  for name, kind, array in _arrays(leaf):
    wanted = expected[kind]
    fits = array.ndim >= len(wanted) and array.shape[0] in (1, wanted[0]) and array.shape[1 : len(wanted)] == wanted[1:]
    if not fits:
      size = {'query': f', {wanted[-1]} queries, ...]', 'key': f', {wanted[-1]} keys, ...]', 'row': ', ...]'}[kind]
      raise ConfigError(
        f'{type(leaf).__name__}.{name}: expected an array of shape [{wanted[0]} rows or 1{size}, got {array.shape}'
      )


def _try_methods(leaf: AttentionMask, batch: int) -> None:
  """Calls `allows` and `some_allowed` with abstract arrays of small shapes."""
  name = type(leaf).__name__
  results: list[Any] = []

  def cut(*blocks: int) -> AttentionMask:
    def to(length: int) -> Callable[[jax.Array], jax.ShapeDtypeStruct]:
      return lambda x: jax.ShapeDtypeStruct((*blocks, x.shape[0], length, *x.shape[2:]), x.dtype)

    return leaf.map_arrays(query=to(_QUERIES), key=to(_KEYS), row=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))

  def call(part: AttentionMask, of_blocks: AttentionMask) -> None:
    results.append(part.allows(jnp.arange(_QUERIES), jnp.arange(_KEYS)))
    low = np.zeros(1, np.int32)
    at = BlockRanges(low[:, None], low[:, None] + _QUERIES - 1, low, low + _KEYS - 1, all_rows=False)
    results.append(of_blocks.some_allowed(at))

  try:
    jax.eval_shape(call, cut(), cut(1))
  except (TypeError, ValueError) as error:
    if not is_about_arrays(error):
      raise
    advice = ''
    if any(_arrays(leaf)) or re.search('shape|broadcast', str(error)):
      advice = '; an array that is read by queries and by keys needs two fields, a query_array() and a key_array()'
    raise ConfigError(
      f'{name}.allows fails for {_QUERIES} queries and {_KEYS} keys, as blocks may have them: '
      f'{first_line(error)}{advice}'
    ) from None
  allowed, known = results
  if allowed is not None:
    dtype, shape = getattr(allowed, 'dtype', None), getattr(allowed, 'shape', None)
    if shape is None or dtype is None or np.dtype(dtype) != np.bool_:
      raise ConfigError(f'{name}.allows: expected it to return an array of bool, got {dtype or type(allowed).__name__}')
    if not _broadcasts(shape, (batch, _QUERIES, _KEYS)):
      raise ConfigError(
        f'{name}.allows: for B = {batch} rows, T = {_QUERIES} queries and S = {_KEYS} keys, expected a result that '
        f'broadcasts to [B, T, S], got the shape {shape}; query_T[..., :, None] and key_S[..., None, :] '
        'broadcast so, and an array of both queries and keys needs two fields, a query_array() and a key_array()'
      )
  if not isinstance(known, Known):
    raise ConfigError(f'{name}.some_allowed: expected it to return a Known, got {type(known).__name__}')


def _arrays(leaf: AttentionMask) -> Iterator[tuple[str, str, jax.Array]]:
  """Yields the name, the kind and the value of each array."""
  for field in dataclasses.fields(leaf):
    kind, value = field.metadata.get('per'), getattr(leaf, field.name)
    if kind is not None and value is not None:
      yield field.name, kind, value


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
  return len(shape) <= len(wanted) and all(size in (1, w) for size, w in zip(shape[::-1], wanted[::-1]))
