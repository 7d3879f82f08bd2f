"""By formulas, dense models of published sizes send what their layouts need, and no more."""

import pytest

from praxis_lite.instruments.plan import plan
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from tools.least_bytes import TOPOLOGIES, least_bytes


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', ['lm_sizes.Llama1B', 'lm_sizes.Llama8B'])
def test_a_step_sends_the_least(name):
  config = configure(registry.get(name))
  found, data = plan(config, None, TOPOLOGIES[name], compile=False), config.datasets[0]
  least = least_bytes(config.task, data.batch_size, data.seq_len, found.mesh, found)
  is_exchanged = name == 'lm_sizes.Llama1B'  # In the other, the table is fewer bytes than the vectors.
  assert (bool(least['lookups']), bool(least['tensor parallel'])) == (is_exchanged, not is_exchanged)
  assert 1 <= found.cost.communicated_bytes / sum(least.values()) < 1.001
