"""JSON of configs: what is written is read back exactly, and what cannot be is refused with its path."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import pathlib
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from praxis_lite.common.config import REQUIRED, Config, Configurable, target, template
from praxis_lite.common.config.json import from_json, to_json
from praxis_lite.common.errors import ConfigError
from praxis_lite.sharding.weights import WeightHParamsCollection, WeightInit


class Norm(Configurable):
  epsilon: float = 1e-6


class Block(Configurable):
  dims: int = REQUIRED
  anything: object = None
  norm_tpl: Config = template(Norm)


class Access(enum.Flag):
  READ = 1
  WRITE = 2


class Point(typing.NamedTuple):
  x: int
  y: object


@dataclasses.dataclass(frozen=True)
class Span:
  start: int
  end: object = None
  length: int = dataclasses.field(init=False, default=0)


def variadic(first, /, *rest, **others):
  return first, rest, others


def closure():
  def inner():
    return None

  return inner


def same(a: object, b: object) -> bool:
  """Equality that tells 1 from 1.0 and from True, 0.0 from -0.0, lists from tuples, and takes nan for itself."""
  if type(a) is not type(b):
    return False
  if isinstance(a, Config):
    return target(a) is target(b) and same(dict(a.__arguments__), dict(b.__arguments__))
  if isinstance(a, dict):
    return len(a) == len(b) and all(same(k, j) and same(v, w) for (k, v), (j, w) in zip(a.items(), b.items()))
  if isinstance(a, (list, tuple)):
    return len(a) == len(b) and all(map(same, a, b))
  if isinstance(a, float):
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
  if isinstance(a, (np.ndarray, np.generic)):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
  if isinstance(a, functools.partial):
    return a.func is b.func and same(a.args, b.args) and same(a.keywords, b.keywords)
  return a == b


LEAVES = st.one_of(
  st.none(),
  st.booleans(),
  st.integers(),
  st.floats(),
  st.text(st.characters()),
  st.binary(max_size=8),
  st.builds(WeightInit, st.sampled_from(['gaussian', 'xavier']), st.floats(allow_nan=False)),
  st.sampled_from(
    [
      REQUIRED,
      jnp.bfloat16,
      np.float32,
      np.dtype('int8'),
      np.dtype('>f4'),
      jnp.dtype('bfloat16'),
      np.float32(1.5),
      np.bool_(True),
      np.arange(6, dtype=np.int16).reshape(2, 3),
      np.zeros((0, 2)),
      np.asarray(['a', 'bc']),
      np.asarray([1.5, -2], jnp.bfloat16),
      jax.nn.relu,
      optax.adamw,
      WeightInit,
      WeightInit.Gaussian,
      int,
      len,
      WeightHParamsCollection.KEEP_FLOAT32,
      Access.READ,
      Access.READ | Access.WRITE,
      frozenset(WeightHParamsCollection),
      {1, 2},
      Point(1, (2, [3])),
      Span(1, ('a', None)),
      pathlib.Path('a/b'),
      functools.partial(jax.nn.gelu, approximate=True),
    ]
  ),
)
KEYS = st.one_of(
  st.text(max_size=5), st.sampled_from(['$config', '$dict', '$']), st.integers(), st.tuples(st.integers())
)


def containers(values):
  return st.one_of(
    st.lists(values, max_size=3),
    st.lists(values, max_size=3).map(tuple),
    st.dictionaries(KEYS, values, max_size=3),
    st.builds(lambda v: Config(Block, anything=v), values),
    st.builds(lambda v: Config(dict, a=v), values),
    st.builds(lambda v, w: Config(variadic, v, [w], other=w), values, values),
  )


TRUSTED = ['test_config_json']

# Drawn from a function, because Hypothesis would print the whole strategy otherwise.
VALUES = st.deferred(lambda: st.recursive(LEAVES, containers, max_leaves=8))


@settings(max_examples=300, deadline=None, database=None)
@given(VALUES)
def test_round_trip_is_exact(value):
  text = to_json(value)
  json.loads(text, parse_constant=lambda name: pytest.fail(f'{name} is no JSON'))
  assert same(from_json(text, TRUSTED), value)


@settings(max_examples=50, deadline=None, database=None)
@given(VALUES)
def test_sorting_the_keys_of_the_text_changes_no_value(value):
  by_key = json.dumps(json.loads(to_json(value)), sort_keys=True)
  assert json.loads(to_json(from_json(by_key, TRUSTED))) == json.loads(to_json(value))


def test_text_is_readable():
  config = {'task': Config(Block, dims=4, anything=(1, math.inf))}
  assert json.loads(to_json(config)) == {
    'task': {
      '$config': 'test_config_json:Block',
      'dims': 4,
      'anything': {'$tuple': [1, {'$float': 'inf'}]},
      'norm_tpl': {'$config': 'test_config_json:Norm'},
    }
  }


def test_fields_that_are_not_set_are_not_written():
  assert 'epsilon' not in to_json(Config(Norm))
  assert 'epsilon' in to_json(Config(Norm, epsilon=1e-6))


def test_exported_functions_are_written_by_their_public_name():
  assert json.loads(to_json(jax.nn.gelu)) == {'$ref': 'jax.nn:gelu'}


@pytest.mark.parametrize(
  ('value', 'message'),
  [
    (lambda x: x, 'a lambda has no name'),
    ([{'k': lambda x: x}], 'a lambda has no name'),
    (closure(), 'defined inside a function'),
    (object(), 'a value of type object cannot be written'),
    (np.asarray([object()]), 'ndarray cannot be written'),
    (WeightInit('xavier').__eq__, 'cannot be written'),
    (Norm(), 'a value of type Norm cannot be written'),
  ],
)
def test_what_cannot_be_read_back_is_refused(value, message):
  with pytest.raises(ConfigError, match=rf'^task\.anything\S*: .*{message}'):
    to_json({'task': Config(Block, anything=value)})


def test_refusal_names_the_path():
  with pytest.raises(ConfigError, match=r'^datasets\[1\]\.anything\.k\[0\]: '):
    to_json({'datasets': [Config(Norm), Config(Block, anything={'k': (lambda x: x,)})]})


@pytest.mark.parametrize(
  ('encoded', 'message'),
  [
    ({'$config': 'nowhere:Block'}, "^task: cannot import 'nowhere:Block': there is no module 'nowhere'"),
    ({'$config': 'test_config_json:Blok'}, "^task: cannot import .* has no 'Blok'. Did you mean 'Block'"),
    ({'$config': 'test_config_json:Block', 'dim': 1}, "^task: Block has no field 'dim'. Did you mean 'dims'"),
    ({'$config': 'test_config_json:Block', 'dims': {'$ref': 'json:nil'}}, "^task.dims: cannot import 'json:nil'"),
    ({'$object': 'praxis_lite.sharding.weights:WeightInit', 'method': 'magic'}, "^task: unknown initializer 'magic'"),
    ({'$object': 'praxis_lite.sharding.weights:WeightInit', 'metod': 'magic'}, '^task: cannot be read .*metod'),
    ({'$enum': ['praxis_lite.sharding.weights:WeightHParamsCollection', 'NONE']}, '^task: cannot be read .*NONE'),
    ({'$dtype': 'flot32'}, '^task: cannot be read .*flot32'),
    ({'$mystery': 1}, "^task: unknown entry '\\$mystery'; known: "),
  ],
)
def test_what_cannot_be_read_is_refused_with_its_path(encoded, message):
  with pytest.raises(ConfigError, match=message):
    from_json(json.dumps({'task': encoded}), ['nowhere', 'test_config_json', 'json'])


def test_text_that_is_no_json():
  with pytest.raises(ConfigError, match=r'^config: not JSON: .*line 1'):
    from_json('{')
