"""config.json of a Hugging Face checkpoint: values by name, with transformers' defaults for missing ones."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from praxis_lite.bridges.hf.files import other_format
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.files import parse_json, read_plain, unless_empty
from praxis_lite.layers.activations import ACTIVATIONS
from praxis_lite.layers.partial_rotary import PartialRotaryPositions
from praxis_lite.layers.positions import (
  LinearRotaryScaling,
  Llama3RotaryScaling,
  LongRotaryScaling,
  RotaryPositions,
  YarnRotaryScaling,
)
from praxis_lite.runs.records.id2label import read_id2label

CONFIG_FILE = 'config.json'
MOST_LAYERS = 10_000  # More than this is a mistake in config.json.
# Our own field of config.json: whether contexts may be longer than that of the original training (LongRoPE).
IS_LONG = 'has_long_contexts'
_YARN_FIELDS = ('beta_fast', 'beta_slow', 'attention_factor', 'truncate')
# Activation functions by their names in config.json. If a function has several names, the first is written.
_ACTIVATIONS = {
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu',
  'gelu_pytorch_tanh': 'gelu_tanh',
  'gelu_new': 'gelu_tanh',
  'gelu_fast': 'gelu_tanh',
  'quick_gelu': 'gelu_sigmoid',
  'relu': 'relu',
  'relu6': 'relu6',
  'sigmoid': 'sigmoid',
  'tanh': 'tanh',
}


class HfConfig:
  """A read-only view of config.json.

  Args:
    values: the content of the file.
    where: the name of the file, for error messages.
    defaults: values of fields that the file may leave out.
  """

  def __init__(self, values: Mapping[str, Any], where: str = CONFIG_FILE, defaults: Mapping[str, Any] | None = None):
    self.values, self.where, self._defaults = values, where, defaults or {}

  def replace_defaults(self, defaults: Mapping[str, Any]) -> HfConfig:
    """Returns the same values, with other defaults."""
    return HfConfig(self.values, self.where, defaults)

  def __getitem__(self, name: str) -> Any:
    """Returns a value; raises ConfigError if it is missing and has no default."""
    if name in self.values:
      return self.values[name]
    if name in self._defaults:
      return self._defaults[name]
    raise ConfigError(f'{self.where}: {name} is missing')

  def size(self, name: str, most: int = 2**31 - 1, least: int = 1) -> int:
    """Returns the value of a field; raises ConfigError unless it is an integer from `least` to `most`."""
    value = self[name]
    if type(value) is not int or value < least:
      raise ConfigError(f'{self.where}: {name} = {value!r}; expected an integer of at least {least}')
    if value > most:
      raise ConfigError(f'{self.where}: {name} = {value}; expected at most {most:,}')
    return value

  def check_ids(self, names: str, *ids: object) -> None:
    """Raises ConfigError, which says `names`, unless all `ids` are integers from 0 to vocab_size - 1."""
    for value in ids:
      if type(value) is not int or not 0 <= value < self.size('vocab_size'):
        most = self.size('vocab_size')
        raise ConfigError(f'{self.where}: {names} gives {value!r}; expected an id below vocab_size = {most}')

  def number(self, name: str, of: Mapping[str, Any] | None = None) -> float:
    """Returns the field `name` of `of`, by default of config.json; raises ConfigError if it is not a finite number."""
    value = self[name] if of is None else of[name]
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
      raise ConfigError(f'{self.where}: {name} = {value!r}; expected a number')
    return float(value)

  def must_be(self, name: str, *accepted: object) -> None:
    """Raises ConfigError if config.json has the field, with a value that is not in `accepted`."""
    value = self.values.get(name, accepted[0])
    if value not in accepted:
      shown = ' or '.join(json.dumps(a) for a in accepted)
      raise ConfigError(f'{self.where}: {name} = {json.dumps(value)} is not supported; only {shown} is')

  def activation(self, name: str) -> str:
    """Returns an activation function, by its name in `layers/activations.py`; raises ConfigError if it is not known."""
    value = self[name]
    if not isinstance(value, str) or value not in _ACTIVATIONS:
      raise ConfigError(f'{self.where}: {name} = {value!r} is not supported; known: {", ".join(_ACTIVATIONS)}')
    return _ACTIVATIONS[value]

  def rotary(self, share: float | None = None) -> Config[RotaryPositions]:
    """Returns the rotary positions, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4).

    If `rope_parameters` has one entry for each kind of layer, this uses the entry for full attention.

    Args:
      share: the share of the dims of a head that are rotated, for files that do not say; None if the family always
        rotates all dims.
    """
    given = self._rope_parameters('full_attention')
    field = 'rope_parameters' if given else 'rope_scaling'
    scaling = self.values.get('rope_scaling') or self._defaults.get('rope_scaling')
    return self._rotary(field, given or self._object(field, scaling), 'rope_theta', share)

  def local_rotary(self) -> Config[RotaryPositions]:
    """Returns the rotary positions of layers with a sliding window, in families that have different ones (Gemma 3)."""
    return self._rotary('rope_parameters', self._rope_parameters('sliding_attention'), 'rope_local_base_freq')

  def _rope_parameters(self, kind: str) -> dict[str, Any]:
    given = self._object('rope_parameters', self.values.get('rope_parameters'))
    return self._object(f'rope_parameters.{kind}', given[kind]) if kind in given else given

  def _object(self, field: str, value: object) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
      raise ConfigError(f'{self.where}: {field} = {value!r}; expected a JSON object')
    return value or {}

  def _rotary(
    self, field: str, rope: dict[str, Any], base_field: str, default_share: float | None = None
  ) -> Config[RotaryPositions]:
    """Returns rotary positions; in files of transformers 4, the field `base_field` has the base of the wavelengths."""
    base = rope.get('rope_theta', self.values.get(base_field, self._defaults.get(base_field, 10_000.0)))
    kind = rope.get('rope_type', rope.get('type', 'default'))
    share = rope.get('partial_rotary_factor', self.values.get('partial_rotary_factor', default_share or 1.0))
    if default_share is None and share != 1.0:
      raise ConfigError(f'{self.where}: partial_rotary_factor other than 1 is not supported')
    rotary: Config[Any] = Config(RotaryPositions)
    if default_share is not None:
      name = 'partial_rotary_factor'
      rotary = Config(PartialRotaryPositions, share=self.number(name, {name: share}))
    rotary.max_timescale = self.number('rope_theta', {'rope_theta': base})
    try:
      if kind == 'linear':
        rotary.scaling_tpl = Config(LinearRotaryScaling, factor=self.number('factor', rope))
      elif kind == 'llama3':
        rotary.scaling_tpl = Config(
          Llama3RotaryScaling,
          factor=self.number('factor', rope),
          original_max_len=int(self.number('original_max_position_embeddings', rope)),
          low_freq_factor=self.number('low_freq_factor', rope),
          high_freq_factor=self.number('high_freq_factor', rope),
        )
      elif kind == 'yarn':
        length = rope.get('original_max_position_embeddings') or self['max_position_embeddings']
        length = int(self.number('original_max_position_embeddings', {'original_max_position_embeddings': length}))
        rotary.scaling_tpl = Config(YarnRotaryScaling, factor=self.number('factor', rope), original_max_len=length)
        rotary.scaling_tpl.set(**self._yarn_fields(rope))
      elif kind in ('longrope', 'su'):
        rotary.scaling_tpl = self._long_scaling(rope)
      elif kind != 'default':
        raise ConfigError(
          f'{self.where}: {field} of type {kind!r} is not supported; only default, linear, llama3, yarn and longrope '
          'are'
        )
    except KeyError as missing:
      raise ConfigError(f'{self.where}: {field} of type {kind!r} lacks {missing}') from None
    return rotary

  def _long_scaling(self, rope: dict[str, Any]) -> Config[LongRotaryScaling]:
    """Returns the scaling of LongRoPE."""
    field = 'original_max_position_embeddings'
    length = self.number(field, {field: rope.get(field) or self[field]})
    factor = rope.get('factor') or self.number('max_position_embeddings') / length
    scaling = Config(LongRotaryScaling, factor=self.number('factor', {'factor': factor}), original_max_len=int(length))
    for name in ('short_factor', 'long_factor'):
      if not isinstance(rope[name], list):
        raise ConfigError(f'{self.where}: {name} = {rope[name]!r}; expected a list of numbers')
      setattr(scaling, f'{name}s', tuple(self.number(name, {name: value}) for value in rope[name]))
    if rope.get('attention_factor') is not None:
      scaling.attention_factor = self.number('attention_factor', rope)
    return scaling.set(is_long=bool(self.values.get(IS_LONG, False)))

  def _yarn_fields(self, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `YarnRotaryScaling` that are optional in config.json."""
    given = [name for name in _YARN_FIELDS if rope.get(name) is not None]
    fields = {name: bool(rope[name]) if name == 'truncate' else self.number(name, rope) for name in given}
    if 'attention_factor' not in fields and rope.get('mscale') and rope.get('mscale_all_dim'):
      factor = self.number('factor', rope)
      of_queries, of_all = (
        YarnRotaryScaling.log_magnitude(factor, self.number(m, rope)) for m in ('mscale', 'mscale_all_dim')
      )
      if not of_all:
        raise ConfigError(f'{self.where}: mscale_all_dim = {rope["mscale_all_dim"]!r} is not supported')
      fields['attention_factor'] = of_queries / of_all
    return fields


def read_config(folder: str | os.PathLike[str]) -> HfConfig:
  """Returns config.json of a folder; raises ConfigError if it does not exist, or is not a JSON object."""
  path = os.path.join(folder, CONFIG_FILE)
  if not os.path.isdir(folder):
    raise ConfigError(
      f'{folder} is not a folder; expected that of a checkpoint, as made by `hf download NAME --local-dir DIR`'
      f'{other_format(os.fspath(folder)) if os.path.isfile(folder) else ""}'
    )
  if not os.path.isfile(path):
    found = other_format(os.fspath(folder)) or '; expected the folder of a Hugging Face checkpoint'
    raise ConfigError(f'{folder} has no {CONFIG_FILE}{found}')
  return HfConfig(read_json(path), path)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the JSON object in a file; raises ConfigError if the file contains something else."""
  try:
    values = parse_json(read_plain(path))
  except OSError as error:
    raise ConfigError(f'{path} cannot be read: {error.strerror or error}') from None
  except ValueError as error:
    raise ConfigError(f'{path} {unless_empty(path, f"is not JSON: {error}")}') from None
  if not isinstance(values, dict):
    raise ConfigError(f'{path}: expected a JSON object')
  return values


def rope_values(rotary: RotaryPositions) -> dict[str, object]:
  """Returns the fields of config.json for rotary positions, in the form of transformers 4, which 5 reads too."""
  scaling = rotary.scaling
  values: dict[str, object] = {'rope_theta': rotary.max_timescale}
  if isinstance(rotary, PartialRotaryPositions):
    values['partial_rotary_factor'] = rotary.share
  if isinstance(scaling, Llama3RotaryScaling):
    values['rope_scaling'] = {
      'rope_type': 'llama3',
      'factor': scaling.factor,
      'original_max_position_embeddings': scaling.original_max_len,
      'low_freq_factor': scaling.low_freq_factor,
      'high_freq_factor': scaling.high_freq_factor,
    }
  elif isinstance(scaling, YarnRotaryScaling):
    values['rope_scaling'] = {
      'rope_type': 'yarn',
      'factor': scaling.factor,
      'original_max_position_embeddings': scaling.original_max_len,
      **{name: getattr(scaling, name) for name in _YARN_FIELDS},
    }
  elif isinstance(scaling, LongRotaryScaling):
    values['rope_scaling'] = {
      'rope_type': 'longrope',
      'factor': scaling.factor,
      'original_max_position_embeddings': scaling.original_max_len,
      'short_factor': list(scaling.short_factors),
      'long_factor': list(scaling.long_factors),
      **({} if scaling.attention_factor is None else {'attention_factor': scaling.attention_factor}),
    }
    values['original_max_position_embeddings'] = scaling.original_max_len
    values['max_position_embeddings'] = round(scaling.factor * scaling.original_max_len)
    values |= {IS_LONG: True} if scaling.is_long else {}
  elif scaling is not None:
    values['rope_scaling'] = {'rope_type': 'linear', 'factor': scaling.factor}
  return values


def activation_name(ours: str, field: str) -> str:
  """Returns an activation function's name in config.json; raises ConfigError, which names `field`, if it has none."""
  for theirs, name in _ACTIVATIONS.items():
    if name == ours and ours in ACTIVATIONS:
      return theirs
  raise ConfigError(f'{field}: transformers has no activation function {ours!r}')


def count_classes(hf: HfConfig) -> int:
  """Returns the number of classes; raises ConfigError if it is 1, which means regression."""
  labels = read_id2label(hf.values)
  count = hf.size('num_labels') if labels is None else len(labels)
  if count < 2:
    raise ConfigError(f'{hf.where}: a head with {count} label computes a number, and only classes are supported')
  return count
