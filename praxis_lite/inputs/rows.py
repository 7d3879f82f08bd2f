"""Trees of numpy arrays whose dim 0 counts examples: checking, padding, joining.

Every batch carries `weights`, [B] or [B, T] float32. A row of padding has weight zero and zeros everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from praxis_lite.errors import DataError

Rows = dict[str, Any]
Struct = dict[str, Any]


def canonical_rows(rows: Any, where: str) -> Rows:
  """Returns `rows` as nested dicts of arrays in dtypes that JAX keeps, with `weights` added where there are none.

  64-bit values become 32-bit unless `jax_enable_x64` is set, so that the arrays match what a step was compiled for.

  Args:
    rows: a mapping, possibly nested, of array-likes with a common dim 0.
    where: what to call the rows in an error.

  Raises:
    DataError: not a mapping, no leading dimension, lengths that differ, strings or objects, integers that do not fit.
  """
  if not isinstance(rows, Mapping):
    raise DataError(f'{where}: expected a dict of arrays, got {type(rows).__name__}')
  if not rows:
    raise DataError(f'{where}: the dict of arrays is empty')
  out = {k: _canonical_entry(v, f'{where}[{k!r}]') for k, v in rows.items()}
  sizes = {jax.tree_util.keystr(path): len(x) for path, x in jax.tree_util.tree_leaves_with_path(out)}
  if len(set(sizes.values())) > 1:
    listing = ', '.join(f'{k}: {n}' for k, n in sizes.items())
    raise DataError(f'{where}: arrays need the same number of examples in dim 0, got {listing}')
  if 'weights' in out:
    out['weights'] = np.asarray(out['weights'], np.float32)
  else:
    out['weights'] = np.ones(next(iter(sizes.values())), np.float32)
  return out


def example_struct(rows: Rows) -> Struct:
  """Returns the shapes and dtypes of one example of `rows`."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)


def with_weights(struct: Struct) -> Struct:
  """Returns the struct of an example with dtypes that JAX keeps, and a scalar `weights` where there is none."""
  out = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jax.dtypes.canonicalize_dtype(s.dtype)), struct)
  weights = out.get('weights')
  out['weights'] = jax.ShapeDtypeStruct(() if weights is None else weights.shape, np.float32)
  return out


def pad_rows(rows: Rows | None, count: int, struct: Struct) -> Rows:
  """Returns `rows` with zeros appended up to `count` rows; all zeros where `rows` is None.

  Args:
    rows: at most `count` rows of the structure `struct`.
    count: rows of the result.
    struct: shapes and dtypes of one example.
  """

  if rows is None:
    return jax.tree.map(lambda s: np.zeros((count, *s.shape), s.dtype), struct)

  def pad(x: np.ndarray) -> np.ndarray:
    missing = count - len(x)
    return x if missing == 0 else np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])

  return jax.tree.map(pad, rows)


def concatenate_rows(parts: Sequence[Rows]) -> Rows | None:
  """Returns the rows of all parts, one after the other; None if there are no parts."""
  if len(parts) < 2:
    return parts[0] if parts else None
  return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def _canonical_entry(value: Any, where: str) -> Any:
  if isinstance(value, Mapping):
    return {k: _canonical_entry(v, f'{where}[{k!r}]') for k, v in value.items()}
  x = np.asarray(value)
  if x.dtype.kind in 'OUSMm' or x.dtype.names:
    raise DataError(f'{where}: arrays of {x.dtype} cannot go to a device; expected numbers or booleans')
  if x.ndim == 0:
    raise DataError(f'{where}: a scalar has no dim 0 to count examples by')
  dtype = jax.dtypes.canonicalize_dtype(x.dtype)
  if dtype == x.dtype:
    return x
  if x.dtype.kind in 'iu' and x.size:
    low, high, info = x.min(), x.max(), np.iinfo(dtype)
    if low < info.min or high > info.max:
      raise DataError(f'{where}: values from {low} to {high} do not fit in {dtype}, and jax_enable_x64 is off')
  return x.astype(dtype)
