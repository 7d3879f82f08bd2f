"""The names of other libraries: each stands for a name that is there, and errors suggest it."""

import pytest

from praxis_lite.cli.main import COMMANDS
from praxis_lite.common.config.text import to_text
from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.other_names import OUR_NAMES
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


def test_every_name_of_ours_is_a_flag_a_field_or_a_mesh_axis():
  config = configure(registry.get('lm.SyntheticLmTiny'))
  fields = {part for line in to_text(config.roots()).splitlines() for part in line.partition(' = ')[0].split('.')}
  flags = {flag for command in COMMANDS.values() for flag in command.flags}
  known = fields | flags | set(config.task.mesh_axis_names)
  assert {name for names in OUR_NAMES.values() for name in names} <= known


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
