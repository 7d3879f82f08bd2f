"""Text dumps and diffs of configs."""

from __future__ import annotations

import dataclasses
import enum
import functools
import pathlib
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import REQUIRED, Config, Configurable, template
from praxis_lite.common.config.text import diff, diff_texts, format_value, to_text, to_text_of_changes
from praxis_lite.sharding.weights import WeightHParamsCollection, WeightInit


class Norm(Configurable):
  epsilon: float = 1e-6
  scale: bool = True


class Other(Configurable):
  epsilon: float = 1e-6
  groups: int = 4


class Block(Configurable):
  dims: int = REQUIRED
  activation: object = jax.nn.gelu
  init: WeightInit | None = WeightInit('gaussian', 0.02)
  norm_tpl: Config = template(Norm)
  inputs_split_mapping: dict | None = None
  layers: list = dataclasses.field(default_factory=list)


class Colour(enum.Enum):
  RED = 1


@dataclasses.dataclass(frozen=True)
class Many:
  a: int = 1
  b: int = 2
  c: int = 3
  d: int = 4


def test_dump_has_a_line_for_every_field_and_config():
  config = Config(Block, inputs_split_mapping={'map_2d': ('data', None), 'map_1d': ('data',)}, layers=[Config(Norm)])
  assert (
    to_text(config, 'task')
    == textwrap.dedent("""
      task: test_config_text.Block
      task.dims = REQUIRED
      task.activation = jax.nn.gelu
      task.init = WeightInit('gaussian', 0.02)
      task.norm_tpl: test_config_text.Norm
      task.norm_tpl.epsilon = 1e-06
      task.norm_tpl.scale = True
      task.inputs_split_mapping.map_1d = ('data',)
      task.inputs_split_mapping.map_2d = ('data', None)
      task.layers[0]: test_config_text.Norm
      task.layers[0].epsilon = 1e-06
      task.layers[0].scale = True
    """).strip()
  )


def test_dump_of_named_roots_and_of_one_without_a_name():
  roots = {'task': Config(Norm), 'datasets': [Config(Norm)], 'decode_datasets': []}
  lines = to_text(roots).split('\n')
  assert [line for line in lines if not line.endswith(('1e-06', 'True'))] == [
    'task: test_config_text.Norm',
    'datasets[0]: test_config_text.Norm',
    'decode_datasets = []',
  ]
  assert to_text(Config(Norm)).split('\n') == ['test_config_text.Norm', 'epsilon = 1e-06', 'scale = True']


def test_dump_expands_configs_wherever_they_are():
  nested = {'a b': [(1, Config(Norm))], 3: {'x': Config(Norm)}}
  paths = [line.split(': ')[0] for line in to_text(Config(Block, layers=nested)).split('\n') if ': ' in line]
  assert "layers['a b'][0][1]" in paths
  assert 'layers[3].x' in paths


@pytest.mark.parametrize(
  ('value', 'text'),
  [
    (jnp.bfloat16, 'bfloat16'),
    (np.float32, 'float32'),
    (np.dtype('int8'), 'int8'),
    (jnp.dtype('bfloat16'), 'bfloat16'),
    ('float32', "'float32'"),
    (float, 'float'),
    (optax.adamw, 'optax.adamw'),
    (jax.nn.relu, 'jax.nn.relu'),
    (WeightInit.Gaussian, 'praxis_lite.sharding.weights.WeightInit.Gaussian'),
    (Norm, 'test_config_text.Norm'),
    (Colour.RED, 'Colour.RED'),
    (WeightHParamsCollection.KEEP_FLOAT32, 'WeightHParamsCollection.KEEP_FLOAT32'),
    (WeightInit('constant'), "WeightInit('constant', 1.0)"),
    (Many(), 'Many(a=1, b=2, c=3, d=4)'),
    (functools.partial(jax.nn.gelu, approximate=True), 'partial(jax.nn.gelu, approximate=True)'),
    (frozenset({'b', 'a'}), "frozenset('a', 'b')"),
    ({'b': 1, 'a': (1,)}, "{'a': (1,), 'b': 1}"),
    (pathlib.Path('a') / 'b', "Path('a/b')"),
    (float('nan'), 'nan'),
    (-0.0, '-0.0'),
    (np.arange(3, dtype=np.int32), 'array([0, 1, 2], int32)'),
    (REQUIRED, 'REQUIRED'),
    ('two\nlines', r"'two\nlines'"),
  ],
)
def test_values_are_compact(value, text):
  assert format_value(value) == text


def test_large_arrays_are_told_apart_without_being_printed():
  zeros, ones = np.zeros((100, 100), np.float32), np.ones((100, 100), np.float32)
  assert format_value(zeros).startswith('array(float32[100, 100], crc32=')
  assert format_value(zeros) != format_value(ones)


def test_objects_have_no_address():
  assert format_value(object()) == '<object object>'


def test_dump_is_the_same_whatever_the_hash_seed():
  program = (
    'from praxis_lite.common.config import Config; from praxis_lite.common.config.text import to_text;'
    "print(to_text(Config(dict, a={'x', 'y', 'z', 'w'}, b={'q': 1, 'p': 2})))"
  )
  runs = {
    subprocess.run(
      [sys.executable, '-c', program], env={'PYTHONHASHSEED': seed, 'PYTHONPATH': '.'}, capture_output=True, check=True
    ).stdout
    for seed in ('1', '2', '3')
  }
  assert len(runs) == 1


def test_equal_configs_have_no_differences():
  assert diff(Config(Block), Config(Block).clone()) == []


def test_differences_are_changed_added_and_removed_lines():
  old = Config(Block, dims=4, inputs_split_mapping={'map_1d': None, 'map_2d': None})
  new = old.clone(dims=8, norm_tpl=Config(Other), inputs_split_mapping={'map_2d': None, 'map_3d': None})
  assert diff(old, new, 'task') == [
    'task.dims: 4 -> 8',
    'task.norm_tpl: test_config_text.Norm -> test_config_text.Other',
    '+ task.norm_tpl.groups = 4',
    '- task.norm_tpl.scale = True',
    '- task.inputs_split_mapping.map_1d = None',
    '+ task.inputs_split_mapping.map_3d = None',
  ]
  assert diff(Config(Norm), Config(Other))[0] == '(root): test_config_text.Norm -> test_config_text.Other'


def test_difference_between_a_config_and_none():
  assert diff(Config(Block), Config(Block, norm_tpl=None)) == [
    'norm_tpl: test_config_text.Norm -> None',
    '- norm_tpl.epsilon = 1e-06',
    '- norm_tpl.scale = True',
  ]


def test_list_that_grows():
  old, new = Config(Block, layers=[Config(Norm)]), Config(Block, layers=[Config(Norm), Config(Norm, epsilon=2.0)])
  assert diff(old, new) == [
    '+ layers[1]: test_config_text.Norm',
    '+ layers[1].epsilon = 2.0',
    '+ layers[1].scale = True',
  ]


def test_changes_only():
  class Outer(Configurable):
    name: str = 'a'
    block_tpl: Config = template(Block, norm_tpl=Config(Norm, epsilon=1.0))
    other_tpl: Config = template(Norm)

  assert to_text_of_changes(Config(Outer), 'x').splitlines() == [f'x: {__name__}.{Outer.__qualname__}']
  config = Config(Outer, other_tpl=Config(Other, groups=2), name='a')
  config.block_tpl.norm_tpl.scale = False
  config.block_tpl.dims = 3
  config.block_tpl.layers = [Config(Norm), Config(Norm, epsilon=2.0)]
  assert to_text_of_changes({'x': config}).splitlines() == [
    f'x: {__name__}.{Outer.__qualname__}',
    'x.block_tpl.dims = 3',
    'x.block_tpl.norm_tpl.scale = False',
    f'x.block_tpl.layers[0]: {__name__}.Norm',
    f'x.block_tpl.layers[1]: {__name__}.Norm',
    'x.block_tpl.layers[1].epsilon = 2.0',
    f'x.other_tpl: {__name__}.Other',
    'x.other_tpl.groups = 2',
  ]
  assert set(to_text_of_changes({'x': config}).splitlines()) <= set(to_text({'x': config}).splitlines())


def test_a_diff_of_texts_is_that_of_the_configs():
  configs = [
    {'x': Config(Block, dims=1), 'y': []},
    {'x': Config(Block, dims=2, norm_tpl=Config(Other)), 'y': [Config(Norm)]},
    {'x': Config(Block, dims=2, init=None, inputs_split_mapping={'a': 1, 'b: c = d': (1, 'x = y')})},
  ]
  for old in configs:
    for new in configs:
      assert diff_texts(to_text(old), to_text(new)) == diff(old, new)
