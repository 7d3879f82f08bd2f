"""The parts of a run that are built before training; errors name the path of the field."""

from __future__ import annotations

import re

import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import SyntheticLMInput
from praxis_lite.runs.records.run_inputs import build_datasets


@pytest.mark.parametrize('name', ['', 'validation'])
@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    ({'seq_len': 'x'}, r"datasets[1].seq_len: expected int, got 'x' (str)"),
    ({'seq_len': 0}, r'datasets[1].seq_len'),
    ({}, r'datasets[1].seq_len: a value is required but not set'),
  ],
)
def test_a_wrong_field_of_an_input_is_named_by_its_path(name, fields, message):
  good = Config(SyntheticLMInput, batch_size=4, seq_len=8, vocab_size=11, is_training=True)
  bad = Config(SyntheticLMInput, name=name, batch_size=4, vocab_size=11, **fields)
  with pytest.raises(ConfigError, match=rf'^{re.escape(message)}'):
    build_datasets([good, bad])


def test_a_field_that_the_users_code_left_out_is_proposed_in_python():
  input_p = Config(SyntheticLMInput, batch_size=4, vocab_size=11, is_training=True)
  with pytest.raises(ConfigError) as caught:
    build_datasets([input_p])
  told, _, line = str(caught.value).partition(' (tests/runs/test_run_config.py:')
  assert told.endswith("as in Config(SyntheticLMInput, seq_len=...), or by --set 'datasets[0].seq_len=...'")
  assert line.removesuffix(')').isdigit()
