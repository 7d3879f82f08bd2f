"""Counts in messages: one of a thing is singular."""

from __future__ import annotations

import pytest

from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.common.figures import number_of
from praxis_lite.sharding.mesh import mesh_sizes


@pytest.mark.parametrize(
  ('count', 'noun', 'text'),
  [
    (1, 'device', '1 device'),
    (0, 'device', '0 devices'),
    (4096, 'token', '4,096 tokens'),
    (2, 'entry', '2 entries'),
    (2, 'axis', '2 axes'),
    (2, 'batch', '2 batches'),
    (2, 'class', '2 classes'),
    (2, 'key', '2 keys'),
    (1, 'bad record', '1 bad record'),
    (2, 'bad record', '2 bad records'),
  ],
)
def test_a_count_with_its_noun(count, noun, text):
  assert number_of(count, noun) == text


def test_a_mesh_of_one_size_is_told_in_the_singular():
  with pytest.raises((ConfigError, ShardingError), match=r'\(1,\) has 1 size, but mesh_axis_names = .* has 2 names'):
    mesh_sizes((1,), None, ('data', 'mdl'))
