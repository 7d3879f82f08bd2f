"""A run computes with the defaults of the code that recorded it, and says which of them today's code has changed."""

from __future__ import annotations

import json
import sys
import types

import pytest
from tiny_runs import tiny_run

import praxis_lite
from praxis_lite.common.config.overrides import apply_overrides
from praxis_lite.common.config.text import to_text, to_text_of_changes
from praxis_lite.common.config.trusted import UntrustedError
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError
from praxis_lite.runs import run_train
from praxis_lite.runs.records.record import read_record, write_record

SOURCE = """
import dataclasses, enum
from functools import partial
import jax
from praxis_lite import Config, Layer, template
from praxis_lite.sharding.weights import WeightHParams
from tiny_runs import TinyModel

class Kind(enum.Enum):
  A = 1
  B = 2

def half(x): return x / 2
def twice(x): return x * 2

class Norm(Layer):
  epsilon: float = 1e-6
  scale: float = 1.0

class Other(Layer):
  epsilon: float = 1e-6

class Net(TinyModel):
  gain: float = 1.0
  width: int = 3
  name_of_it: str = 'a'
  kind: Kind = Kind.A
  act: object = half
  part: object = partial(half, 1)
  limit: float = float('inf')
  sizes: tuple = (1, (2, 3))
  dtype: object = 'float32'
  norm_tpl: Config = template(Norm, epsilon=1e-5)
  layers: list = dataclasses.field(default_factory=lambda: [Config(Norm), Config(Norm, scale=2.0)])
  table: dict = dataclasses.field(default_factory=lambda: {'a': 1, 'b': 2})
  nothing: int | None = None

  def setup(self):
    super().setup()
    self.create_variable('u', WeightHParams((self.width,)))

  def compute_predictions(self, batch):
    return self.gain * super().compute_predictions(batch)
"""


@pytest.fixture
def code(monkeypatch):
  """Executes the module of a user, with replaced texts."""

  def execute(*changes):
    source = SOURCE
    for old, new in changes:
      assert source.count(old) == 1, old
      source = source.replace(old, new)
    module = types.ModuleType('code_of_a_user')
    monkeypatch.setitem(sys.modules, 'code_of_a_user', module)
    exec(source, vars(module))
    return module

  return execute


def config_of(module, **fields):
  config = tiny_run(num_train_steps=2)
  config.task.model = praxis_lite.Config(module.Net, **fields)
  return config


def lines_of(directory, *overrides, trusted=('code_of_a_user',)):
  record = read_record(directory, trusted=trusted)
  apply_overrides(record.config.roots(), overrides)
  return record.config.task.model, record.other_defaults.describe(record.config.roots())


def test_the_same_code_reads_the_same_config_and_says_nothing(code, tmp_path):
  config = config_of(code(), gain=2.0)
  config.task.model.norm_tpl.scale = 3.0
  write_record(tmp_path, config)
  model, lines = lines_of(tmp_path)
  assert model == config.task.model and lines == []
  assert model.__arguments__.keys() == config.task.model.__arguments__.keys()  # Defaults are not set on it.
  assert to_text_of_changes(model) == to_text_of_changes(config.task.model)


EPSILONS = 'layers[0].epsilon = 1e-06 (now 0.001), task.model.layers[1].epsilon = 1e-06 (now 0.001)'
CHANGES = [
  ('gain: float = 1.0', 'gain: float = 3.0', 'gain = 1.0 (now 3.0)'),
  ('width: int = 3', 'width: int = 4', 'width = 3 (now 4)'),
  ("name_of_it: str = 'a'", "name_of_it: str = 'b'", "name_of_it = 'a' (now 'b')"),
  ('kind: Kind = Kind.A', 'kind: Kind = Kind.B', 'kind = Kind.A (now Kind.B)'),
  ('act: object = half', 'act: object = twice', 'act = code_of_a_user.half (now code_of_a_user.twice)'),
  ('partial(half, 1)', 'min(1, 2)', 'part = partial(code_of_a_user.half, 1) (now 1)'),
  ("limit: float = float('inf')", 'limit: float = 9.0', 'limit = inf (now 9.0)'),
  ('(1, (2, 3))', '(1, (2, 4))', 'sizes = (1, (2, 3)) (now (1, (2, 4)))'),
  ("dtype: object = 'float32'", 'dtype: object = jax.numpy.float32', "dtype = 'float32' (now float32)"),
  ('template(Norm, epsilon=1e-5)', 'template(Norm, epsilon=1e-4)', 'norm_tpl.epsilon = 1e-05 (now 0.0001)'),
  ('class Norm(Layer):\n  epsilon: float = 1e-6', 'class Norm(Layer):\n  epsilon: float = 1e-3', EPSILONS),
  ('template(Norm,', 'template(Other,', 'norm_tpl = code_of_a_user.Norm (now code_of_a_user.Other)'),
  ('Config(Norm, scale=2.0)', 'Config(Norm, scale=4.0)', 'layers[1].scale = 2.0 (now 4.0)'),
  ("'b': 2", "'b': 7", 'table.b = 2 (now 7)'),
  ('nothing: int | None = None', 'nothing: int | None = 8', 'nothing = None (now 8)'),
  ('nothing: int | None = None', 'nothing: object = template(Norm)', 'nothing = None (now code_of_a_user.Norm)'),
]  # fmt: skip


@pytest.mark.parametrize(('old', 'new', 'line'), CHANGES, ids=[line.partition(' ')[0] for *_, line in CHANGES])
def test_a_default_that_changed_is_as_it_was_recorded_and_is_named(code, tmp_path, old, new, line):
  write_record(tmp_path, config_of(code()))
  before = to_text(read_record(tmp_path, trusted=['code_of_a_user']).config.roots())
  code((old, new))
  _, lines = lines_of(tmp_path)
  assert lines == [f'defaults in the code have changed; the recorded values are used: task.model.{line}']
  assert read_record(tmp_path, trusted=['code_of_a_user']).text == f'{before}\n'
  if 'Norm' not in line:
    assert to_text(read_record(tmp_path, trusted=['code_of_a_user']).config.roots()) == before


def test_what_the_user_has_set_is_no_default_that_changed(code, tmp_path):
  write_record(tmp_path, config_of(code(), gain=2.0, width=5))
  code(('gain: float = 1.0', 'gain: float = 3.0'), ('width: int = 3', 'width: int = 5'))
  model, lines = lines_of(tmp_path)
  assert (model.gain, model.width, lines) == (2.0, 5, [])


def test_an_override_of_a_changed_default_wins_and_is_not_named(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  code(('gain: float = 1.0', 'gain: float = 3.0'), ('width: int = 3', 'width: int = 4'))
  model, (line,) = lines_of(tmp_path, 'task.model.gain=7')
  assert (model.gain, model.width) == (7.0, 3) and line.endswith(': task.model.width = 3 (now 4)')


def test_another_class_does_not_get_the_recorded_defaults_of_the_first(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  config = read_record(tmp_path, trusted=['code_of_a_user']).config
  apply_overrides(config.roots(), ['task.train.learner.optimizer=optax.lion'])
  assert config.task.train.learner.optimizer == praxis_lite.Config(__import__('optax').lion)


def test_many_changed_defaults_are_few_words(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  code(*((old, new) for old, new, _ in CHANGES[:8]), ("name_of_it: str = 'b'", f"name_of_it: str = '{'b' * 500}'"))
  _, (line,) = lines_of(tmp_path)
  assert line.endswith('and 4 more') and len(line) < 400


def test_fields_that_are_gone_are_named_if_they_were_defaults_and_refused_if_they_were_set(code, tmp_path):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  write_record(tmp_path / 'a', config_of(code()))
  write_record(tmp_path / 'b', config_of(code(), name_of_it='mine'))
  code(
    ("name_of_it: str = 'a'", 'pass'),
    ('template(Norm, epsilon=1e-5)', 'template(Norm)'),
    ('epsilon: float = 1e-6\n  scale', 'scale'),
  )
  _, (line,) = lines_of(tmp_path / 'a')
  start, _, gone = line.partition(': ')
  assert start == 'the code no longer has fields that were recorded with their defaults'
  assert set(gone.split(', ')) == {
    "task.model.name_of_it = 'a'",
    'task.model.norm_tpl.epsilon = 1e-05',
    'task.model.layers[0].epsilon = 1e-06',
    'task.model.layers[1].epsilon = 1e-06',
  }
  with pytest.raises(ConfigError, match=r"run\.json: task\.model: Net has no field 'name_of_it'"):
    lines_of(tmp_path / 'b')


def test_new_fields_have_todays_default_which_is_named_if_it_does_something(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  code(
    (
      'gain: float = 1.0',
      'gain: float = 1.0\n  bias: float = 0.5\n  extra: object = None\n  more_tpl: Config = template(Other)',
    )
  )
  model, lines = lines_of(tmp_path)
  assert model.bias == 0.5
  assert lines == [
    'the code has new fields, with these defaults: task.model.bias = 0.5, task.model.more_tpl = code_of_a_user.Other'
  ]


def test_a_new_field_without_a_default_is_named_by_its_whole_path(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  code(
    ('epsilon: float = 1e-6\n  scale', 'tilt: float = praxis_lite.REQUIRED\n  epsilon: float = 1e-6\n  scale'),
    ('import jax', 'import jax, praxis_lite'),
  )
  _, (line,) = lines_of(tmp_path, 'task.model.layers=[]')
  assert line.startswith('the code has new fields without a default; ')
  assert line.endswith('give them by --set: task.model.norm_tpl.tilt')


def test_a_default_that_names_code_that_is_gone_or_is_not_trusted(code, tmp_path, monkeypatch):
  write_record(tmp_path, config_of(code()))
  code(
    ('def half(x): return x / 2\n', 'def third(x): return x / 3\n'),
    ('act: object = half', 'act: object = third'),
    ('partial(half, 1)', 'partial(third, 1)'),
  )
  model, (line,) = lines_of(tmp_path)
  assert model.act.__name__ == 'third'
  assert (
    "today's are used, because those recorded cannot be read: task.model.act = code_of_a_user.third (recorded" in line
  )
  # A default of a module that no record may name is no reason to refuse, as long as it is the same today.
  elsewhere = types.ModuleType('elsewhere')
  exec('def scaled(x): return x\ndef other(x): return x', vars(elsewhere))
  monkeypatch.setitem(sys.modules, 'elsewhere', elsewhere)
  imported = ('import dataclasses, enum', 'import elsewhere, dataclasses, enum')
  write_record(tmp_path, config_of(code(imported, ('act: object = half', 'act: object = elsewhere.scaled'))))
  assert lines_of(tmp_path)[1] == []
  code(imported, ('act: object = half', 'act: object = elsewhere.other'))
  with pytest.raises(UntrustedError, match=r'task\.model\.act: elsewhere'):
    lines_of(tmp_path)
  assert lines_of(tmp_path, trusted=['code_of_a_user', 'elsewhere'])[0].act is elsewhere.scaled


def test_defaults_that_cannot_be_written_and_secrets_are_left_to_the_code(code, tmp_path):
  secret = (
    'act: object = half',
    "act: object = lambda x: x\n  api_key: str = 'geheim'\n  url: str = 's3://u:geheim@b/c'",
  )
  write_record(tmp_path, config_of(code(secret)))
  assert not read_record(tmp_path).lost and 'geheim' not in (tmp_path / 'run.json').read_text()
  model, lines = lines_of(tmp_path)
  assert (model.api_key, lines) == ('geheim', [])
  code((secret[0], secret[1].replace('geheim', 'anderes')))
  model, lines = lines_of(tmp_path)
  assert (model.api_key, model.url, lines) == ('anderes', 's3://u:anderes@b/c', [])


def test_what_was_named_once_is_named_again_after_the_run_has_gone_on(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  code(('gain: float = 1.0', 'gain: float = 3.0'))
  assert write_record(tmp_path, read_record(tmp_path, trusted=['code_of_a_user']).config) == []
  model, (line,) = lines_of(tmp_path)
  assert model.gain == 1.0 and line.endswith('task.model.gain = 1.0 (now 3.0)')
  given = read_record(tmp_path, trusted=['code_of_a_user']).config
  given.task.model.gain = 2.0
  assert write_record(tmp_path, given)[1:] == ['  task.model.gain: 1.0 -> 2.0']
  model, lines = lines_of(tmp_path)
  assert (model.gain, lines) == (2.0, [])


# ---------------------------------------------------------------- records of the first versions


def make_old(directory):
  """Takes from a record what the first versions did not write."""

  def without_defaults(value):
    if isinstance(value, dict):
      return {k: without_defaults(v) for k, v in value.items() if k != '$defaults'}
    return [without_defaults(v) for v in value] if isinstance(value, list) else value

  record = without_defaults(json.loads((directory / 'run.json').read_text()))
  del record['edited']
  (directory / 'run.json').write_text(json.dumps(record))


def test_an_old_record_has_its_defaults_from_the_text_beside_it(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  make_old(tmp_path)
  assert lines_of(tmp_path)[1] == []
  code(
    ('gain: float = 1.0', 'gain: float = 3.0'),
    ('(1, (2, 3))', '()'),
    ('scale: float = 1.0', 'scale: float = 5.0'),
    ('kind: Kind = Kind.A', 'kind: Kind = Kind.B'),
  )
  model, (used, unused) = lines_of(tmp_path)
  assert (model.gain, model.sizes, model.norm_tpl.scale, model.layers[0].scale) == (1.0, (1, (2, 3)), 1.0, 1.0)
  assert (
    'the recorded values are used: task.model.gain = 1.0 (now 3.0), task.model.sizes = (1, (2, 3)) (now ())' in used
  )
  assert unused.endswith('cannot be read: task.model.kind = Kind.B (recorded Kind.A)')


def test_a_text_beside_an_old_record_names_no_code(code, tmp_path):
  write_record(tmp_path, config_of(code()))
  make_old(tmp_path)
  text = (tmp_path / 'config.txt').read_text()
  assert 'task.model.act = code_of_a_user.half\n' in text
  for value in ('os.system', "'os.system'", '__import__("os")', '(' * 9999, '*', '\x1b[2J'):
    (tmp_path / 'config.txt').write_text(text.replace('act = code_of_a_user.half', f'act = {value}'))
    model, lines = lines_of(tmp_path)
    assert model.act == 'os.system' if value.startswith("'") else model.act.__name__ == 'half'
    assert len(lines) == 1 and '\x1b' not in lines[0]
  (tmp_path / 'config.txt').unlink()
  assert lines_of(tmp_path)[1] == []


# ---------------------------------------------------------------- the run as a whole


def test_a_run_evaluates_and_goes_on_with_what_it_recorded(code, tmp_path, capsys):
  config = config_of(code())
  (loss,) = [m['loss'] for m in run_train(config, tmp_path).metrics.values()]
  code(('gain: float = 1.0', 'gain: float = 30.0'), ('width: int = 3', 'width: int = 4'))
  capsys.readouterr()
  run = praxis_lite.open_run(tmp_path, trusted='code_of_a_user')
  got = run.load().evaluate('valid')['loss']
  assert got == pytest.approx(loss, rel=1e-6)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.endswith(': task.model.gain = 1.0 (now 30.0), task.model.width = 3 (now 4)')

  longer = run.config
  longer.task.train.num_train_steps = 4
  run_train(longer, tmp_path)
  differs = capsys.readouterr().out.partition('the config differs from the recorded one:\n')[2]
  assert differs.startswith('  task.train.num_train_steps: 2 -> 4\n') and 'task.model' not in differs


def test_a_checkpoint_of_other_shapes_names_the_remedy_that_fits(code, tmp_path):
  run_train(config_of(code()), tmp_path)
  module = code(('width: int = 3', 'width: int = 4'))
  with pytest.raises(CheckpointError, match=r'task\.model\.width: 3 -> 4\. Start a new run in .*, leave out --exp'):
    run_train(config_of(module), tmp_path)  # As with --exp.
  read_record(tmp_path, trusted=['code_of_a_user']).config.task.instantiate()

  module = code(('width: int = 3', 'breadth: int = 4'), ('self.width,', 'self.breadth,'))
  with pytest.raises(CheckpointError) as refused:
    praxis_lite.open_run(tmp_path, trusted='code_of_a_user').load()
  assert 'The classes of the config have changed since it was recorded: ' in str(refused.value)
  assert '+ task.model.breadth = 4' in str(refused.value) and '- task.model.width = 3' in str(refused.value)
  assert 'by --set or in the config' in str(refused.value) and '--exp' not in str(refused.value)


def test_a_large_record_is_read(code, tmp_path):
  module = code()
  config = config_of(module)
  config.task.model.layers = [praxis_lite.Config(module.Norm, scale=float(i)) for i in range(300)]
  write_record(tmp_path, config)
  code(('epsilon: float = 1e-6\n  scale', 'epsilon: float = 2e-6\n  scale'))
  model, (line,) = lines_of(tmp_path)
  assert model.layers[7].epsilon == 1e-6 and line.endswith(', and 296 more')


@pytest.mark.parametrize(
  'defaults', [3, [], ['a'], 'text', None, {'gain': {'$config': 7}}, {'gain': {'$no': 1}}, {'': 1}, {'__class__': 1}]
)
@pytest.mark.parametrize('edited', [[], 3])
def test_defaults_that_no_code_wrote_are_a_config_error_or_are_left_out(code, tmp_path, defaults, edited):
  write_record(tmp_path, config_of(code()))
  record = json.loads((tmp_path / 'run.json').read_text())
  record['config']['task']['model']['$defaults'] = defaults
  record['edited'] = edited
  (tmp_path / 'run.json').write_text(json.dumps(record))
  try:
    lines_of(tmp_path)
  except UserError as error:
    assert str(error).count('\n') == 0
