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
_ORIGINAL_LENGTH = 'original_max_position_embeddings'
_LLAMA3_FIELDS = ('low_freq_factor', 'high_freq_factor')
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
    """Raises ConfigError unless all `ids` are integers from 0 to vocab_size - 1; the message calls them `names`."""
    for value in ids:
      if type(value) is not int or not 0 <= value < self.size('vocab_size'):
        most = self.size('vocab_size')
        raise ConfigError(f'{self.where}: {names} gives {value!r}; expected an id below vocab_size = {most}')

  def has_architecture(self, name: str) -> bool:
    """Whether `architectures` lists this one."""
    architectures = self.values.get('architectures')
    return isinstance(architectures, list | tuple) and name in architectures

  def number(self, name: str) -> float:
    """Returns the value of a field; raises ConfigError if it is not a finite number."""
    return self.check_number(name, self[name])

  def check_number(self, name: str, value: Any) -> float:
    """Returns `value`, which is in the field `name`; raises ConfigError if it is not a finite number."""
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
    """Returns the rotary positions of layers with a sliding window, if they differ from those of others (Gemma 3)."""
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
      rotary = Config(PartialRotaryPositions, share=self.check_number('partial_rotary_factor', share))
    rotary.max_timescale = self.check_number('rope_theta', base)

    def number(name: str) -> float:
      return self.check_number(name, rope[name])

    try:
      if kind == 'linear':
        rotary.scaling_tpl = Config(LinearRotaryScaling, factor=number('factor'))
      elif kind == 'llama3':
        bounds = {name: number(name) for name in _LLAMA3_FIELDS}
        rotary.scaling_tpl = Config(Llama3RotaryScaling, factor=number('factor'), **bounds)
        rotary.scaling_tpl.original_max_len = int(number(_ORIGINAL_LENGTH))
      elif kind == 'yarn':
        length = self.check_number(_ORIGINAL_LENGTH, rope.get(_ORIGINAL_LENGTH) or self['max_position_embeddings'])
        rotary.scaling_tpl = Config(YarnRotaryScaling, factor=number('factor'), original_max_len=int(length))
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
    length = self.check_number(_ORIGINAL_LENGTH, rope.get(_ORIGINAL_LENGTH) or self[_ORIGINAL_LENGTH])
    factor = self.check_number('factor', rope.get('factor') or self.number('max_position_embeddings') / length)
    scaling = Config(LongRotaryScaling, factor=factor, original_max_len=int(length))
    for name in ('short_factor', 'long_factor'):
      if not isinstance(rope[name], list):
        raise ConfigError(f'{self.where}: {name} = {rope[name]!r}; expected a list of numbers')
      setattr(scaling, f'{name}s', tuple(self.check_number(name, value) for value in rope[name]))
    if rope.get('attention_factor') is not None:
      scaling.attention_factor = self.check_number('attention_factor', rope['attention_factor'])
    return scaling.set(is_long=bool(self.values.get(IS_LONG, False)))

  def _yarn_fields(self, rope: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of `YarnRotaryScaling` that are optional in config.json."""
    given = [name for name in _YARN_FIELDS if rope.get(name) is not None]
    fields = {name: bool(rope[name]) if name == 'truncate' else self.check_number(name, rope[name]) for name in given}
    if 'attention_factor' not in fields and rope.get('mscale') and rope.get('mscale_all_dim'):
      factor, *slopes = (self.check_number(name, rope[name]) for name in ('factor', 'mscale', 'mscale_all_dim'))
      of_queries, of_all = (YarnRotaryScaling.log_magnitude(factor, slope) for slope in slopes)
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
  """Returns the fields of config.json for rotary positions, in the form of transformers 4; version 5 reads it too."""
  scaling = rotary.scaling
  values: dict[str, object] = {'rope_theta': rotary.max_timescale}
  if isinstance(rotary, PartialRotaryPositions):
    values['partial_rotary_factor'] = rotary.share
  if scaling is None:
    return values
  scaled: dict[str, object] = {'rope_type': 'linear', 'factor': scaling.factor}
  if isinstance(scaling, Llama3RotaryScaling | YarnRotaryScaling | LongRotaryScaling):
    scaled[_ORIGINAL_LENGTH] = scaling.original_max_len
  if isinstance(scaling, Llama3RotaryScaling):
    scaled |= {'rope_type': 'llama3', **{name: getattr(scaling, name) for name in _LLAMA3_FIELDS}}
  elif isinstance(scaling, YarnRotaryScaling):
    scaled |= {'rope_type': 'yarn', **{name: getattr(scaling, name) for name in _YARN_FIELDS}}
  elif isinstance(scaling, LongRotaryScaling):
    factors = {'short_factor': [*scaling.short_factors], 'long_factor': [*scaling.long_factors]}
    magnitude = {} if scaling.attention_factor is None else {'attention_factor': scaling.attention_factor}
    scaled |= {'rope_type': 'longrope', **factors, **magnitude}
    values[_ORIGINAL_LENGTH] = scaling.original_max_len
    values['max_position_embeddings'] = round(scaling.factor * scaling.original_max_len)
    values |= {IS_LONG: True} if scaling.is_long else {}
  return values | {'rope_scaling': scaled}


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
