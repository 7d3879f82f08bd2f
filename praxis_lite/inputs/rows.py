"""Rows of examples: dicts (possibly nested) of numpy arrays with examples in dimension 0; and their structs.

Every batch has a leaf `weights`, [B] or [B, T] float32. A row of padding has weight zero and zeros everywhere else.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from praxis_lite.common.config import Config, Configurable, config_values, target
from praxis_lite.common.errors import ConfigError, DataError, UserError

Rows = dict[str, Any]  # np.ndarray [n, ...], or nested
Struct = dict[str, Any]  # jax.ShapeDtypeStruct of one example, or nested


def canonical_rows(rows: object, where: str) -> Rows:
  """Returns `rows` as nested dicts of arrays with dtypes that JAX does not change; adds `weights` of 1 if missing.

  `rows` is a mapping, possibly nested, of array-likes with a common dimension 0. Error messages begin with `where`.
  64-bit values become 32-bit unless `jax_enable_x64` is set, so that the arrays match what a step was compiled for.
  Raises DataError if `rows` is not a mapping or is empty, if an entry is a scalar or is not numeric, if lengths differ,
  or if values do not fit into 32 bits.
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
  given = out.get('weights', np.ones(next(iter(sizes.values())), np.float32))
  out['weights'] = weights = fit_dtype(np.asarray(given), np.float32, f"{where}['weights']")
  if not (weights >= 0).all():
    wrong = weights[~(weights >= 0)][0]
    meaning = 'they say how much each row or token counts in means; an entry that is something else needs another name'
    raise DataError(f"{where}['weights']: expected numbers of at least 0, got {wrong:g}: {meaning}")
  return out


_NO_NUMBERS = {'U': 'text', 'S': 'bytes', 'O': 'Python objects, such as None,'}


def _canonical_entry(value: object, where: str) -> Rows | np.ndarray:
  if isinstance(value, Mapping):
    return {k: _canonical_entry(v, f'{where}[{k!r}]') for k, v in value.items()}
  try:
    x = np.asarray(value)
  except (ValueError, TypeError, OverflowError) as error:  # For example lists of unequal lengths.
    raise DataError(f'{where}: cannot be made an array: {error}') from None
  if x.dtype.kind in 'OUSMm' or x.dtype.names:
    raise DataError(
      f'{where}: arrays of {_NO_NUMBERS.get(x.dtype.kind, x.dtype)} cannot go to a device; expected numbers or booleans'
    )
  if x.ndim == 0:
    raise DataError(f'{where}: a scalar has no dim 0 to count examples by')
  dtype = jax.dtypes.canonicalize_dtype(x.dtype)
  return x if dtype == x.dtype else fit_dtype(x, dtype, where, ', and jax_enable_x64 is off')


def fit_dtype(values: np.ndarray, dtype: DTypeLike, where: str, reason: str = '') -> np.ndarray:
  """Converts numbers to another dtype, which must be able to hold them. Floats are rounded; inf and NaN stay.

  `where` is the name of the values in errors, and `reason` is the end of the message. Raises DataError if an integer is
  outside of the dtype's range, a finite number would become infinite, or floats would become integers or booleans.
  """
  to = np.dtype(dtype)
  if values.dtype == to or np.can_cast(values.dtype, to):
    return values.astype(to, copy=False)
  is_integer = bool(jnp.issubdtype(to, jnp.integer)) or to == np.bool_
  if is_integer and values.dtype.kind not in 'biu':
    raise DataError(f'{where}: {values.dtype} values cannot become {to}')
  if is_integer:
    least, most = (0, 1) if to == np.bool_ else (int(jnp.iinfo(to).min), int(jnp.iinfo(to).max))
    is_wrong = (values < least) | (values > most) if values.size else np.zeros(0, bool)
    out = values if is_wrong.any() else values.astype(to)
    holds = f'{least} to {most}'
  else:
    with np.errstate(over='ignore', invalid='ignore'):
      out = values.astype(to)
    is_wrong = ~np.isfinite(out)
    if is_wrong.any():
      is_wrong &= np.isfinite(values)
    holds = f'{-float(jnp.finfo(to).max):.4g} to {float(jnp.finfo(to).max):.4g}' if is_wrong.any() else ''
  if is_wrong.any():
    wrong = values[is_wrong]
    raise DataError(f'{where}: values from {wrong.min()} to {wrong.max()} do not fit in {to} ({holds}){reason}')
  return out


def pad_rows(rows: Rows | None, count: int, struct: Struct) -> Rows:
  """Returns `rows`, of structure `struct`, with rows of zeros added up to `count`; None stands for no rows."""
  if rows is None:
    return jax.tree.map(lambda s: np.zeros((count, *s.shape), s.dtype), struct)
  if len(rows['weights']) == count:
    return rows
  return jax.tree.map(lambda x: np.concatenate([x, np.zeros((count - len(x), *x.shape[1:]), x.dtype)]), rows)


def blank_rows(count: int, struct: Struct, pad_id: int) -> Rows:
  """Returns rows of zeros, in which all `ids`, `source_ids` and `labels` of tokens are padding."""

  def fill(path: Any, s: jax.ShapeDtypeStruct) -> np.ndarray:
    return np.full((count, *s.shape), pad_id if path[-1].key in ('ids', 'source_ids', 'labels') else 0, s.dtype)

  return jax.tree_util.tree_map_with_path(fill, struct)


def concatenate_rows(parts: Sequence[Rows]) -> Rows | None:
  """Returns the rows of all parts in order; None if there are no parts."""
  if len(parts) < 2:
    return parts[0] if parts else None
  return jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def to_batch_struct(struct: Struct, count: int) -> Struct:
  """Returns the struct of a batch of `count` examples, given the struct of one example."""
  return jax.tree.map(lambda s: jax.ShapeDtypeStruct((count, *s.shape), s.dtype), struct)


def add_weights(struct: Struct) -> Struct:
  """Returns the struct of an example in the dtypes of JAX, with float32 `weights`, a scalar if `struct` has none."""
  out = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jax.dtypes.canonicalize_dtype(s.dtype)), struct)
  weights = out.get('weights')
  out['weights'] = jax.ShapeDtypeStruct(() if weights is None else weights.shape, np.float32)
  return out


def token_struct(seq_len: int, *floats: str) -> Struct:
  """Returns the struct of a row of tokens, each array [T].

  `ids`, `labels`, `segment_ids` and `segment_pos` are int32; `weights` and the arrays named in `floats` are float32.
  """
  struct = {k: jax.ShapeDtypeStruct((seq_len,), np.int32) for k in ('ids', 'labels', 'segment_ids', 'segment_pos')}
  return struct | {k: jax.ShapeDtypeStruct((seq_len,), np.float32) for k in ('weights', *floats)}


def rows_of_tokens(tokens: np.ndarray) -> Rows:
  """Returns a batch for a language model from [B, T + 1] int32 tokens. Each row is one segment without padding."""
  shape = (len(tokens), tokens.shape[1] - 1)
  return {
    'ids': tokens[:, :-1],
    'labels': tokens[:, 1:],
    'weights': np.ones(shape, np.float32),
    'segment_ids': np.ones(shape, np.int32),
    'segment_pos': np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
  }


class Feature(Configurable):
  """Shape and dtype of one array of an example.

  Attributes:
    shape: the shape of one example, without the batch dimension; () is a scalar.
    dtype: name of a numeric or boolean numpy dtype.
  """

  shape: tuple[int, ...] = ()
  dtype: str = 'float32'

  def struct(self) -> jax.ShapeDtypeStruct:
    """Returns the shape, and the dtype in which JAX keeps the array."""
    return jax.ShapeDtypeStruct(tuple(self.shape), jax.dtypes.canonicalize_dtype(np.dtype(self.dtype)))


def build_features(features: object, where: str) -> dict[str, Feature]:
  """Returns built features by name; raises ConfigError for a wrong type, an unknown dtype or a negative size."""
  if not isinstance(features, dict) or not features:
    raise ConfigError(f'{where}: expected a dict of Feature configs by name, got {features!r}')
  built = {}
  for key, value in features.items():
    feature = value.instantiate() if isinstance(value, Config) else value
    if not isinstance(feature, Feature):
      raise ConfigError(f'{where}[{key!r}]: expected the config of a Feature, got {value!r}')
    if not _is_numeric(feature.dtype):
      raise ConfigError(f'{where}[{key!r}].dtype: {feature.dtype!r} is not a numeric dtype such as float32 or int32')
    if any(not isinstance(d, int) or d < 0 for d in feature.shape):
      raise ConfigError(f'{where}[{key!r}].shape: expected sizes that are not negative, got {feature.shape!r}')
    built[key] = feature
  return built


def _is_numeric(name: str) -> bool:
  try:
    dtype = np.dtype(name)
  except (TypeError, ValueError, SyntaxError):
    return False
  # jnp treats bfloat16 as a number; numpy does not.
  return dtype == np.bool_ or bool(jnp.issubdtype(dtype, np.number))


def resolve_source(source: object) -> object:
  """Instantiates a config, or calls a function without arguments; returns any other value unchanged."""
  try:
    if isinstance(source, Config):
      return source.instantiate()
    return source() if callable(source) else source
  except UserError:
    raise
  except Exception as error:  # Of the user's function, which knows neither its config nor, often, the file.
    if isinstance(source, Config):
      values = ', '.join(f'{name}={value!r}' for name, value in config_values(source).items())
      name = getattr(target(source), '__name__', 'a function')
      error.add_note(f'praxis_lite: in {name}({textwrap.shorten(values, 200)}), a function of the data')
    raise
