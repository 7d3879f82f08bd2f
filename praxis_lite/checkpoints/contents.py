"""The records of a checkpoint: shape and dtype of its arrays by name, and whether a model can be restored from them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from praxis_lite.checkpoints.failures import unreadable
from praxis_lite.checkpoints.orbax.on_disk import record_file
from praxis_lite.common.errors import CheckpointError, first_lines
from praxis_lite.common.files import parse_json, plain_dtype, read_plain
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.sharding.layout import is_prng_key

ArrayRecord = dict[str, Any]  # {'shape': [...], 'dtype': 'float32'}
_SHOWN = 3
_FORMAT = 2  # Format 1 had no checksums.


class OtherModelError(CheckpointError):
  """A checkpoint does not have the arrays of the task.

  Attributes:
    difference: a text that names the checkpoint and the arrays that differ.
    only_learner: whether only the learner's arrays differ, and the model's variables are the same.
  """

  def __init__(self, difference: str, remedy: str, only_learner: bool):
    super().__init__(f'{difference}. {remedy}')
    self.difference = difference
    self.only_learner = only_learner


def add_checksum(record: dict[str, Any]) -> dict[str, Any]:
  """Returns a record for JSON with its format and a checksum of the whole record."""
  record = {**record, 'format': _FORMAT}
  return {**record, 'checksum': _checksum(record)}


def remove_checksum(record: dict[str, Any], what: str) -> dict[str, Any]:
  """Returns a record without its checksum; raises ValueError if the checksum does not match."""
  content = {name: value for name, value in record.items() if name != 'checksum'}
  if record.get('checksum') != _checksum(content):
    raise ValueError(f'the checksum of {what} differs')
  return content


def read_checkpoint_record(folder: Path, item: str) -> dict[str, Any]:
  """Returns a record of the checkpoint in `folder`: 'about' or 'inputs'. Records of format 1 have no checksum.

  Raises:
    DamagedError: the record has changed since it was written.
    CheckpointError: the record cannot be read.
  """
  try:
    return parse_record(read_plain(record_file(folder, item)), item)
  except (OSError, ValueError, AttributeError) as error:
    raise unreadable(folder, error) from error


def parse_record(data: bytes, item: str) -> dict[str, Any]:
  """Returns a record, given the bytes of its file; raises ValueError or AttributeError if they have been changed."""
  record = parse_json(data)
  is_old = 'checksum' not in record and record.get('format', 1) == 1
  content = record if is_old else remove_checksum(record, item)
  _check_content(content, item)
  return content


def _check_content(record: dict[str, Any], item: str) -> None:
  """Raises ValueError if a record lacks what readers need; anyone can write a record with a valid checksum."""
  if item == 'inputs' and 'input_state' not in record:
    raise ValueError('it has no input_state')
  if item != 'about':
    return
  variables = record.get('variables')
  if not isinstance(variables, dict):
    raise ValueError('it does not list the variables')
  for name, entry in variables.items():
    shape, dtype = (entry.get('shape'), entry.get('dtype')) if isinstance(entry, dict) else (None, None)
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 2**63 for n in shape) or not _is_dtype(dtype):
      raise ValueError(f'its entry for {name} is not valid')


def _is_dtype(name: object) -> bool:
  with contextlib.suppress(ValueError):
    return isinstance(name, str) and (name.startswith('key<') or plain_dtype(name) is not None)
  return False


def _checksum(record: dict[str, Any]) -> str:
  text = json.dumps(json.loads(json.dumps(record)), sort_keys=True)  # Makes keys strings, as they are after reading.
  return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def array_records(shapes: object) -> dict[str, ArrayRecord]:
  """Returns the shape and dtype of each array of a tree by name, for JSON."""
  return {
    path_name(path): {'shape': list(leaf.shape), 'dtype': str(leaf.dtype)}
    for path, leaf in leaves_by_path(shapes).items()
  }


def check_same_model(saved: dict[str, ArrayRecord], wanted: dict[str, ArrayRecord], where: str) -> None:
  """Checks that a checkpoint has the arrays to restore, by comparing true shapes and dtypes.

  Parts of the state (`mdl_vars`, `opt_states`, `ema_vars`) that are not restored are not compared. Float dtypes may
  differ: the values are cast.

  Raises:
    OtherModelError: an array is missing, unexpected, or has another shape or kind; the message names the first ones.
  """
  parts = {name.partition('.')[0] for name in wanted}
  saved = {name: record for name, record in saved.items() if name.partition('.')[0] in parts}
  names = sorted(saved.keys() | wanted.keys())
  different = {n: text for n in names if (text := _difference(saved.get(n), wanted.get(n)))}
  if not different:
    return
  only_learner = not any(name.startswith('mdl_vars') for name in different)
  whose, remedy = ('another learner', 'task.train.learner') if only_learner else ('another model', 'task.model')
  shown = first_lines([f'{name} is {text}' for name, text in different.items()], _SHOWN)
  raise OtherModelError(
    f'{where} is a checkpoint of {whose}: {"; ".join(shown)}',
    f'Set {remedy} back to what it was trained with, or start a new run in another --job_log_dir.',
    only_learner,
  )


def _difference(saved: ArrayRecord | None, wanted: ArrayRecord | None) -> str:
  if saved and wanted and saved['shape'] == wanted['shape'] and castable(saved['dtype'], wanted['dtype']):
    return ''
  there, here = (f'{record["dtype"]}{record["shape"]}' if record else 'missing' for record in (saved, wanted))
  return f'{there} in the checkpoint and {here} in the task'


def castable(*dtypes: str) -> bool:
  """Whether two dtypes are equal, or both are floating-point dtypes, so that values can be cast."""
  if dtypes[0] == dtypes[1]:
    return True
  return all(not dtype.startswith('key<') and jnp.issubdtype(jnp.dtype(dtype), jnp.floating) for dtype in dtypes)


# -------------------------------------------------------------------- PRNG keys, stored as the integers in them


def to_stored(x: jax.Array) -> jax.Array:
  return jax.random.key_data(x) if is_prng_key(x) else x


def stored_shape(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  data = jax.eval_shape(to_stored, x)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def to_leaf(shape: jax.ShapeDtypeStruct, x: jax.Array) -> jax.Array:
  if not is_prng_key(shape):
    return x
  impls: list[Any] = []
  jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), shape)
  return jax.random.wrap_key_data(x, impl=impls[0])
