"""XLA flags of steps: which count, and what happens to those that XLA does not know."""

import jax
import jax.numpy as jnp
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models import BaseModel
from praxis_lite.sharding import xla_flags as module
from praxis_lite.sharding.xla_flags import XlaFlags, describe_flags, xla_flags
from praxis_lite.training.task import SingleTask

PIPELINED = 'xla_gpu_enable_pipelined_all_gather'


def test_the_variable_counts_before_the_field_and_this_before_the_defaults(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', f'--xla_gpu_autotune_level=1 --{PIPELINED}=false')
  monkeypatch.setattr(module, 'DEFAULTS', {'gpu': {PIPELINED: True, 'xla_a': 1, 'xla_b': 2, 'xla_c': 3}})
  given = {'xla_a': 5, 'xla_b': None, 'xla_gpu_autotune_level': 4}
  assert xla_flags('gpu', 8, given).all == {'xla_a': 5, 'xla_c': 3}
  assert xla_flags('gpu', 8, given, use_defaults=False).all == {'xla_a': 5}
  assert xla_flags('cpu', 8).all == xla_flags('gpu', 1).all == {}


def test_the_variable_may_be_the_name_of_a_file(monkeypatch, tmp_path):
  (tmp_path / 'flags').write_text('--xla_a=1\n--xla_b=2')
  monkeypatch.setenv('XLA_FLAGS', str(tmp_path / 'flags'))
  assert xla_flags('cpu', 8, {'xla_a': 5, 'xla_c': 6}).all == {'xla_c': 6}


def test_they_are_listed_by_platform(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  monkeypatch.setattr(module, 'DEFAULTS', {'gpu': {PIPELINED: True}})
  given = {'xla_gpu_autotune_level': 0}
  assert describe_flags(8, None, use_defaults=True) == [f'gpu: {PIPELINED}=true']
  assert describe_flags(8, given, use_defaults=True)[0] == f'gpu: {PIPELINED}=true, xla_gpu_autotune_level=0'
  assert describe_flags(1, None, use_defaults=True) == []


def test_defaults_that_xla_does_not_know_are_left_out_and_flags_of_the_config_refused():
  lowered = jax.jit(lambda x: x + 1).lower(jnp.zeros(2))
  known = {name: value for platform in module.DEFAULTS.values() for name, value in platform.items()}
  XlaFlags({**known, 'xla_of_tomorrow': True}).compile(lowered)
  with pytest.raises(ConfigError, match=r"task\.xla_flags: No such compile option: 'xla_of_tomorrow'"):
    XlaFlags(known, {'xla_of_tomorrow': 1}).compile(lowered)
  with pytest.raises(ConfigError, match=r'task\.xla_flags: While setting option .*not a valid bool'):
    XlaFlags({}, {'xla_gpu_enable_latency_hiding_scheduler': 'perhaps'}).compile(lowered)


@pytest.mark.parametrize(
  'given, message',
  [
    ('--xla_a=1', r'task\.xla_flags: expected a dict, such as'),
    ({'--xla_a': 1}, "expected names that begin with 'xla_', without '--', got '--xla_a'"),
    ({'xla_a': 1.5}, 'the value of xla_a is a bool, an int or a text, or None, got 1.5'),
  ],
)
def test_what_is_no_flag_is_refused_before_anything_is_compiled(given, message):
  with pytest.raises(ConfigError, match=message):
    Config(SingleTask, model=Config(BaseModel), xla_flags=given).instantiate()
