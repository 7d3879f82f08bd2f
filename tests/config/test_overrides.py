"""Editing configs by path: what is accepted, how values are read, and what is refused."""

from __future__ import annotations

import dataclasses
import enum
import os
import pathlib
import subprocess
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax
import optax
import pytest
from jax.typing import DTypeLike

from praxis_lite.common.config import REQUIRED, Config, Configurable, template
from praxis_lite.common.config.overrides import apply_overrides, get_by_path, set_by_path
from praxis_lite.common.config.text import to_text
from praxis_lite.common.config.values import fit
from praxis_lite.common.errors import ConfigError, UnknownFieldError
from praxis_lite.sharding.weights import WeightInit

if typing.TYPE_CHECKING:
  from nowhere import Unresolvable


class Split(Configurable):
  wt: Sequence[Any] | None = None


class WideSplit(Split):
  bias: Sequence[Any] | None = None


class Norm(Configurable):
  epsilon: float = 1e-6
  scale: bool = True
  split: Config = template(Split)


class GroupNorm(Configurable):
  epsilon: float = 1e-3
  groups: int = 4
  split: Config = template(WideSplit)


class Colour(enum.Enum):
  RED = 1
  BLUE = 2


class Model(Configurable):
  num_layers: int = REQUIRED
  rate: float = 0.0
  name: str = 'model'
  title: str | None = None
  flag: bool = False
  dtype: DTypeLike | None = None
  init: WeightInit | None = WeightInit('gaussian', 0.02)
  no_init: WeightInit | None = None
  colour: Colour = Colour.RED
  kind: Literal['none', 'full'] = 'none'
  shape: tuple[int, ...] | None = None
  pair: tuple[str, int] = ('a', 1)
  weights: list[float] | None = None
  wt: Sequence[Any] | None = None
  anything: Any = None
  odd: Unresolvable | None = None
  activation: Callable[..., Any] = jax.nn.relu
  named_activation: str | Callable[..., Any] = 'relu'
  norm_tpl: Config = template(Norm)
  maybe_tpl: Config | None = None
  untyped: Any = template(Norm)
  layers: tuple[Config, ...] = ()
  inputs_split_mapping: dict[str, Any] | None = None
  counts: dict[str, int] = dataclasses.field(default_factory=lambda: {'a': 1})


class Task(Configurable):
  model: Any = REQUIRED
  optimizer: Config = template(optax.adamw, learning_rate=0.1, b1=0.8)


def roots() -> dict[str, Any]:
  layers = (Config(Norm), Config(Norm))
  return {
    'task': Config(Task, model=Config(Model, num_layers=2, layers=layers)),
    'datasets': [Config(Norm), Config(Norm)],
    'decode_datasets': [],
  }


def after(*overrides: str) -> Any:
  return apply_overrides(roots(), overrides)


@pytest.mark.parametrize(
  ('field', 'text', 'value'),
  [
    ('num_layers', '6', 6),
    ('num_layers', '1_000', 1000),
    ('num_layers', ' -3 ', -3),
    ('num_layers', '1e5', 100_000),
    ('rate', '1', 1.0),
    ('rate', '1e-3', 1e-3),
    ('rate', 'inf', float('inf')),
    ('name', 'abc', 'abc'),
    ('name', "'a b'", 'a b'),
    ('name', '123', '123'),
    ('name', 'none', 'none'),
    ('name', 'a=b', 'a=b'),
    ('name', 'runs/1,2', 'runs/1,2'),
    ('name', '', ''),
    ('title', 'none', None),
    ('title', 'None', None),
    ('title', '[1]', '[1]'),
    ('flag', 'true', True),
    ('flag', 'False', False),
    ('dtype', 'bfloat16', 'bfloat16'),
    ('dtype', 'none', None),
    ('init', "WeightInit('xavier')", WeightInit('xavier')),
    ('init', 'WeightInit.Gaussian(scale=0.5)', WeightInit('gaussian', 0.5)),
    ('no_init', 'WeightInit(constant, -1.0)', WeightInit('constant', -1.0)),
    ('init', 'none', None),
    ('init.scale', '0.5', WeightInit('gaussian', 0.5)),
    ('colour', 'BLUE', Colour.BLUE),
    ('colour', 'Colour.BLUE', Colour.BLUE),
    ('colour', '2', Colour.BLUE),
    ('kind', 'full', 'full'),
    ('kind', 'none', 'none'),
    ('shape', '(1, 16, 4)', (1, 16, 4)),
    ('shape', '1,16,4', (1, 16, 4)),
    ('shape', '[1, 16]', (1, 16)),
    ('shape', '()', ()),
    ('pair', '(b, 2)', ('b', 2)),
    ('pair[1]', '5', ('a', 5)),
    ('weights', '(1, 2.5)', [1.0, 2.5]),
    ('wt', '((replica, data), None, -1)', (('replica', 'data'), None, -1)),
    ('anything', 'data,mdl', ('data', 'mdl')),
    ('anything', '{a: [1, True]}', {'a': [1, True]}),
    ('anything', 'some.name', 'some.name'),
    ('anything', '2024-01-01', '2024-01-01'),
    ('anything', '...', '...'),
    ('anything', '[1, 2j]', [1, 2j]),
    ('anything', 'f(1)', 'f(1)'),
    ('anything', '-data', '-data'),
    ('anything', '(-inf, +1)', (float('-inf'), 1)),
    ('odd', '3', 3),
    ('activation', 'jax.nn.gelu', jax.nn.gelu),
    ('activation', 'jax.nn:gelu', jax.nn.gelu),
    ('named_activation', 'gelu', 'gelu'),
    ('named_activation', 'jax.nn.gelu', jax.nn.gelu),
    ('inputs_split_mapping.map_2d', '(data, None)', {'map_2d': ('data', None)}),
    ('counts.b', '2', {'a': 1, 'b': 2}),
    ("counts['a b']", '2', {'a': 1, 'a b': 2}),
  ],
)
def test_value_is_read_by_the_annotation(field, text, value):
  model = after(f'task.model.{field}={text}')['task'].model
  found = getattr(model, field.split('.')[0].split('[')[0])
  assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
  ('override', 'message'),
  [
    ('task.model.num_layers=six', "task.model.num_layers: expected int, got 'six' (str)"),
    ('task.model.num_layers=6.0', 'task.model.num_layers: expected int, got 6.0 (float)'),
    ('task.model.num_layers=1e-3', 'task.model.num_layers: expected int, got 0.001 (float)'),
    (
      'task.model.num_layers=1,2',
      'task.model.num_layers: expected int, got (1, 2) (tuple); `praxis-lite sweep` tries several values',
    ),
    (
      'task.model.shape=4',
      'task.model.shape: expected tuple[int, ...] | None, got 4 (int); a tuple of one is written (4,)',
    ),
    ('task.model.num_layers=True', 'task.model.num_layers: expected int, got True (bool)'),
    ('task.model.num_layers=none', 'task.model.num_layers: expected int, got None'),
    ('task.model.rate=fast', "task.model.rate: expected float, got 'fast' (str)"),
    ('task.model.flag=1', 'task.model.flag: expected bool, got 1 (int)'),
    ('task.model.dtype=bf16', "task.model.dtype: expected the name of a dtype, such as bfloat16, got 'bf16'"),
    ('task.model.dtype=float33', 'task.model.dtype: expected the name of a dtype, such as float32, bfloat16'),
    ('task.model.init=gaussian', "task.model.init: expected WeightInit | None, got 'gaussian' (str)"),
    ("task.model.init=WeightInit('gaus')", "task.model.init: unknown initializer 'gaus'"),
    ('task.model.init=WeightInit.Gausian()', "task.model.init: WeightInit has no 'Gausian'. Did you mean 'Gaussian'?"),
    ('task.model.init=WeightInit(1, 2, 3)', 'task.model.init: WeightInit.__init__() takes'),
    ('task.model.init.scale=big', "task.model.init.scale: expected float, got 'big' (str)"),
    ('task.model.init.method=magic', "task.model.init.method: unknown initializer 'magic'"),
    ('task.model.colour=GREEN', "task.model.colour: expected one of RED, BLUE, got 'GREEN' (str)"),
    ('task.model.kind=half', "task.model.kind: expected one of 'none', 'full', got 'half' (str)"),
    ('task.model.shape=(1, x)', "task.model.shape: expected tuple[int, ...] | None, got (1, 'x') (tuple)"),
    ('task.model.pair=(a, 1, 2)', "task.model.pair: expected tuple[str, int], got ('a', 1, 2) (tuple)"),
    ('task.model.pair[1]=b', "task.model.pair[1]: expected int, got 'b' (str)"),
    ('task.model.wt=data', "task.model.wt: expected Sequence[Any] | None, got 'data' (str)"),
    ('task.model.counts.a=x', "task.model.counts.a: expected int, got 'x' (str)"),
    ('task.model.activation=7', 'task.model.activation: expected a function or class, got 7 (int)'),
    ('task.model.activation=jax.nn.gelo', "task.model.activation: jax.nn has no 'gelo'. Did you mean 'gelu'?"),
    ('task.model.activation=jax.version.__version__', 'task.model.activation: expected a function or class, got '),
    ('task.model.norm_tpl=3', 'task.model.norm_tpl: expected the name of a class or function, such as package.module'),
    (
      'task.model.norm_tpl=Model',
      'task.model.norm_tpl: expected the name of a class or function, such as package.module.Class, '
      f"got 'Model' (str). Did you mean {__name__}.Model?",
    ),
    ('task.model.norm_tpl=none', 'task.model.norm_tpl: expected the name of a class or function'),
    ('task.model.norm_tpl=nowhere.Norm', "task.model.norm_tpl: there is no module 'nowhere'"),
    ('task.model=7', 'task.model: expected the name of a class or function'),
    ('datasets=[1]', 'datasets: expected list[Config], got [1] (list)'),
  ],
)
def test_wrong_value_is_refused_with_its_path(override, message):
  root = roots()
  before = to_text(root)
  with pytest.raises(ConfigError) as error:
    apply_overrides(root, [override])
  assert str(error.value).startswith(message)
  assert to_text(root) == before


@pytest.mark.parametrize(
  ('path', 'parts'),
  [
    ('task.model.num_layer', ["task.model (Model) has no field 'num_layer'. Did you mean 'num_layers'?", 'rate, name']),
    ('task.model.norms.epsilon', ["task.model (Model) has no field 'norms'."]),
    ('task.model.norm.eps', ["task.model.norm_tpl (Norm) has no field 'eps'", 'epsilon, scale, split']),
    ('task.model.init.scal', ["task.model.init (WeightInit) has no field 'scal'. Did you mean 'scale'?"]),
    ('task.optimizer.b3', ["task.optimizer (adamw) has no field 'b3'", 'learning_rate, b1']),
    ('tsk.model', ["no entry 'tsk'. ", 'Its entries: task, datasets, decode_datasets.', ' Did you mean ']),
    ('datasets[2].epsilon', ['datasets has no entry [2]; its entries are [0] to [1]']),
    ('decode_datasets[0].epsilon', ['decode_datasets has no entry [0]; it is empty']),
    ('datasets.epsilon', ["datasets is a list, so it has no 'epsilon'; write datasets[0]"]),
    ('task.model.rate.x', ["task.model.rate is 0.0 (float), so it has no 'x'; set task.model.rate itself"]),
    ('task.model.no_init.scale', ["task.model.no_init is None, so it has no 'scale'"]),
    ('task.model.counts.b.c', ["task.model.counts has no entry 'b'. Its entries: a."]),
    ('task.model.layers[0][1]', ['task.model.layers[0] (Norm) has no field [1]']),
  ],
)
def test_unknown_path_names_how_far_it_leads_and_what_is_there(path, parts):
  for attempt in (lambda: after(f'{path}=1'), lambda: get_by_path(roots(), path)):
    with pytest.raises(UnknownFieldError) as error:
      attempt()
    for part in parts:
      assert part in str(error.value)


def test_path_below_a_required_field():
  with pytest.raises(UnknownFieldError, match='model is REQUIRED and not set'):
    apply_overrides(Config(Task), ['model.num_layers=1'])


@pytest.mark.parametrize(
  'text', ['task.model.num_layers', '=3', '', 'task..model=1', '.task=1', 'task.model[=1', 'a b=1']
)
def test_text_that_is_no_override(text):
  with pytest.raises(ConfigError, match='is not an override; write path=value'):
    after(text)


@pytest.mark.parametrize('path', ['', 'a..b', 'a=b', 'a[b]', 'a.'])
def test_text_that_is_no_path(path):
  with pytest.raises(ConfigError, match='is not a path'):
    get_by_path(roots(), path)


def test_the_last_override_of_a_path_wins():
  assert after('task.model.num_layers=3', 'task.model.num_layers=4')['task'].model.num_layers == 4


def test_overrides_apply_to_a_single_config_without_a_name():
  assert apply_overrides(Config(Model), ['num_layers=3', 'norm.epsilon=1']).norm_tpl.epsilon == 1.0


def test_every_place_is_reached():
  root = after(
    'datasets[1].epsilon=2',
    'datasets[-2].epsilon=3',
    'task.model.layers[1].epsilon=4',
    'task.model.layers.0.epsilon=5',
    'task.model.norm.split.wt=(data,)',
    'task.optimizer.weight_decay=0.5',
  )
  assert [d.epsilon for d in root['datasets']] == [3.0, 2.0]
  assert isinstance(root['task'].model.layers, tuple)
  assert [layer.epsilon for layer in root['task'].model.layers] == [5.0, 4.0]
  assert root['task'].model.norm_tpl.split.wt == ('data',)
  assert root['task'].optimizer.weight_decay == 0.5


def test_a_star_is_every_entry():
  root = after('datasets[*].epsilon=2', 'task.model.layers[*].split.wt=(data,)', 'task.model.pair[0]=*')
  assert [d.epsilon for d in root['datasets']] == [2.0, 2.0]
  assert [layer.split.wt for layer in root['task'].model.layers] == [('data',), ('data',)]
  assert root['task'].model.pair == ('*', 1)
  with pytest.raises(UnknownFieldError, match=r'decode_datasets\[\*\]: it is empty'):
    after('decode_datasets[*].epsilon=2')
  with pytest.raises(UnknownFieldError, match=r'datasets\[\*\]: the 2 entries must be read one by one'):
    get_by_path(root, 'datasets[*].epsilon')


def test_dump_lines_are_overrides():
  source = roots()['task'].model.set(rate=0.5, shape=(1, 2), wt=('data', None), init=WeightInit('xavier'), title='a b')
  target = Config(Model, layers=(Config(Norm), Config(Norm)))
  lines = [line for line in to_text(source).split('\n') if ' = ' in line]
  assert to_text(apply_overrides(target, lines)) == to_text(source)


def test_lists_of_the_caller_are_changed_in_place():
  root = roots()
  datasets = root['datasets']
  apply_overrides(root, ['datasets[0]=test_overrides.GroupNorm'])
  assert datasets[0].groups == 4
  apply_overrides(root, ['datasets=[]'])
  assert datasets == []


def test_defaults_of_a_class_are_not_changed():
  def function(values=[1, 2], mapping={'a': 1}):  # noqa: B006
    return values, mapping

  config = apply_overrides(Config(function), ['values[0]=5', 'mapping.a=5'])
  assert config.instantiate() == ([5, 2], {'a': 5})
  assert function() == ([1, 2], {'a': 1})


def test_another_class_keeps_the_fields_that_both_have_and_were_set():
  root = roots()
  root['task'].model.norm_tpl.set(epsilon=0.5, scale=False)
  root['task'].model.norm_tpl.split.wt = ('data',)
  norm = apply_overrides(root, ['task.model.norm=test_overrides.GroupNorm'])['task'].model.norm_tpl
  assert norm == Config(GroupNorm, epsilon=0.5, split=Config(WideSplit, wt=('data',)))


def test_another_class_has_its_own_defaults_where_nothing_was_set():
  norm = after('task.model.norm_tpl=test_overrides:GroupNorm')['task'].model.norm_tpl
  assert norm == Config(GroupNorm)


def test_another_function_keeps_shared_arguments():
  optimizer = after('task.optimizer=optax.lion', 'task.optimizer.b2=0.9')['task'].optimizer
  assert optimizer == Config(optax.lion, learning_rate=0.1, b1=0.8, b2=0.9)


def test_a_config_can_be_put_where_none_is():
  root = after('task.model.maybe=test_overrides.Norm', 'task.model.maybe.epsilon=1', 'task.model.untyped=none')
  assert root['task'].model.maybe_tpl == Config(Norm, epsilon=1.0)
  assert root['task'].model.untyped is None


def test_import_error_in_the_module_of_a_value(tmp_path, monkeypatch):
  (tmp_path / 'broken_layers.py').write_text('x = 1\nimport does_not_exist\n')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(
    ConfigError, match=r'norm_tpl: cannot import broken_layers: .*does_not_exist.*broken_layers.py:2\)'
  ):
    after('task.model.norm=broken_layers.Norm')


class Built(Configurable):
  """Its field is annotated with what it builds of its config, as SingleTask.model is."""

  split: Split = template(Split)


def test_a_field_annotated_with_a_class_takes_configs_of_it():
  config = Config(Built)
  set_by_path(config, 'split', Config(WideSplit, wt=('data',)))
  assert config.split == Config(WideSplit, wt=('data',))
  apply_overrides(config, [f'split={__name__}.Split', 'split.wt=(data,)'])
  assert config.split == Config(Split, wt=('data',))
  with pytest.raises(ConfigError, match='split: expected the config of a Split, got'):
    set_by_path(config, 'split', Config(Norm))


def test_set_by_path_takes_python_values():
  root = roots()
  set_by_path(root, 'task.model.shape', [1, 2])
  set_by_path(root, 'task.model.norm', Config(GroupNorm))
  set_by_path(root, 'task.model.maybe', Norm)
  set_by_path(root, 'task.model.num_layers', REQUIRED)
  set_by_path(root, 'task.model.name', '123')
  model = root['task'].model
  assert (model.shape, model.norm_tpl, model.maybe_tpl) == ((1, 2), Config(GroupNorm), Config(Norm))
  assert model.num_layers is REQUIRED and model.name == '123'
  with pytest.raises(ConfigError, match=r'num_layers: expected int, got .6. \(str\)'):
    set_by_path(root, 'task.model.num_layers', '6')
  with pytest.raises(ConfigError, match=r'norm_tpl: expected the name'):
    set_by_path(root, 'task.model.norm', 3)


def test_get_by_path_reads_defaults_too():
  root = roots()
  assert get_by_path(root, 'task.model.rate') == 0.0
  assert get_by_path(root, 'task.model.init.scale') == 0.02
  assert get_by_path(root, 'task.model.pair[1]') == 1
  assert get_by_path(root, 'task.model.num_layers') == 2
  assert get_by_path(root, 'datasets[0]') is root['datasets'][0]
  assert get_by_path(Config(Task), 'model') is REQUIRED


def test_a_root_cannot_be_replaced():
  with pytest.raises(ConfigError, match='task cannot be replaced as a whole'):
    after('task=test_overrides.Task')


def no_argument() -> int:
  return 0


@pytest.mark.parametrize(
  ('hint', 'fitting', 'others'),
  [
    (Literal['a', 1], ['a', 1], ['b', True, 1.0]),
    (Callable[..., Any], [len, dict, no_argument], [3, 'len', None]),
    (Callable[[], int], [no_argument, dict], [lambda x: x, 3]),
    (Callable[[int, int], int], [max, lambda x, y: x, lambda *x: x], [no_argument, lambda x: x, lambda x, y, *, z: x]),
    (Sequence[int], [(1, 2), [1], range(3), ()], [1, 'ab', (1, 'a'), [None], [True]]),
    (Sequence[str | None], [('a', None)], [('a', 1), None]),
    (Sequence[tuple[str, int]], [[('a', 1)]], [[('a',)], [('a', 'b')], [1]]),
    (Sequence[tuple[int, ...]], [[(), (1, 2)]], [[(1, 'a')]]),
    (Collection[str], [{'a'}, ('a',)], [{1}, 'a']),
    (Mapping[str, Sequence[int]], [{'a': (1,)}, {}], [{1: (1,)}, {'a': (None,)}, [('a', (1,))]]),
    (type[Configurable], [Norm], [Colour, Norm(), 3]),
    (type, [Norm, Colour], ['Norm']),
    (os.PathLike[str], [pathlib.Path('a')], ['a']),
    (complex, [1j, 2, 1.5], ['1', None]),
    (typing.TypeVar('T'), [1, 'a', None], []),
  ],
)
def test_values_are_checked_by_the_annotation_of_their_field(hint, fitting, others, monkeypatch):
  monkeypatch.setitem(sys.modules, 'typeguard', None)  # Other packages pin versions of it.
  for value in fitting:
    assert fit(value, hint, None) == value
  for value in others:
    with pytest.raises(ConfigError, match=r'^expected '):
      fit(value, hint, None)


def test_importing_imports_nothing_heavy():
  program = 'import sys, praxis_lite.common.config.overrides; print([m for m in ("jax", "numpy") if m in sys.modules])'
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == '[]'


def test_none_drops_an_entry_of_a_list_of_configs_once_all_overrides_are_applied():
  datasets = [Config(Norm, epsilon=float(i)) for i in range(4)]
  apply_overrides({'datasets': datasets}, ['datasets[0]=None', 'datasets[2]=None', 'datasets[3].scale=False'])
  assert [(d.epsilon, d.scale) for d in datasets] == [(1.0, True), (3.0, False)]
