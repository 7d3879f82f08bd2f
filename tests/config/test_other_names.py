"""The names of other libraries: each stands for a name that is there, and errors suggest it."""

import pathlib
import re

import pytest

from praxis_lite.cli.main import COMMANDS
from praxis_lite.common.config.overrides import get_by_path
from praxis_lite.common.config.text import to_text
from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.other_names import FIELD_PATHS, OUR_NAMES, field_path
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

GUIDE = pathlib.Path(__file__).parents[2] / 'docs' / 'from-pytorch.md'


@pytest.fixture(scope='module')
def config():
  return configure(registry.get('lm.SyntheticLmTiny'))


@pytest.fixture(scope='module')
def known(config):
  fields = {part for line in to_text(config.roots()).splitlines() for part in line.partition(' = ')[0].split('.')}
  flags = {flag for command in COMMANDS.values() for flag in command.flags}
  return fields | flags | set(config.task.mesh_axis_names)


def test_every_name_of_ours_is_a_flag_a_field_or_a_mesh_axis(known):
  assert {name for names in OUR_NAMES.values() for name in names} <= known


def test_a_field_that_is_taken_for_a_flag_is_suggested_by_its_path(config):
  for path in FIELD_PATHS.values():
    get_by_path(config.roots(), path.replace('[*]', '[0]'))
  assert field_path('lr') == 'task.train.learner.learning_rate' and field_path('batch_size') == 'datasets[*].batch_size'
  assert field_path('epochs') == 'task.train.num_train_steps' and field_path('resume') == ''


def test_names_in_the_tables_for_users_of_pytorch_are_there(config, known):
  """Paths of fields and commands in the first table; names in the first column of the second one."""
  first, second = re.findall(r'^\|---.*\n((?:\|.*\n)+)', GUIDE.read_text(), re.MULTILINE)[:2]
  paths = re.findall(r'`(task|train|learner)\.([\w.]+)', first)
  short = {'task': 'task', 'train': 'task.train', 'learner': 'task.train.learner'}
  for head, rest in paths:
    get_by_path(config.roots(), f'{short[head]}.{rest}')
  commands = {*re.findall(r'`praxis-lite ([\w-]+)', first)}
  names = {name for row in second.splitlines() for name in re.findall(r'`(\w+)`', row.split(' | ')[0])}
  assert len(paths) > 9 and {'decode', 'import-hf'} <= commands <= COMMANDS.keys()
  assert {'ici_mesh_shape', 'mdl', 'fprop_dtype', 'job_log_dir'} <= names <= known | {'_tpl'}


def test_the_name_of_another_library_is_closer_than_one_that_is_spelled_alike():
  assert did_you_mean('hidden_size', ['hidden_dims', 'model_dims']) == " Did you mean 'model_dims'?"
  assert did_you_mean('hidden_size', ['hidden_dims']) == " Did you mean 'hidden_dims'?"
  assert did_you_mean('max_length', ['batch_size', 'seq_len']) == " Did you mean 'seq_len'?"
  assert did_you_mean('NUM_LAYERS', ['num_layers']) == " Did you mean 'num_layers'?"
  assert did_you_mean('lr', ['batch_size']) == ''


def test_a_field_set_in_python_has_the_suggestion_too():
  config = configure(registry.get('lm.SyntheticLmTiny'))
  with pytest.raises(ConfigError, match=r'Did you mean .learning_rate.\?'):
    config.task.train.learner.lr = 1e-3


@pytest.mark.parametrize(
  ('theirs', 'ours'),
  [('eos_id', 'stop_ids'), ('seqlen', 'max_decode_steps'), ('num_beams', 'beam_size'), ('k', 'top_k')],
)
def test_names_of_decoders_in_pax_and_transformers(known, theirs, ours):
  assert did_you_mean(theirs, known) == f" Did you mean '{ours}'?"
