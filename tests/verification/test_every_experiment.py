"""Every registered experiment computes on its mesh, in small, what one device computes."""

from __future__ import annotations

import pytest

from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

# The sizes of these divide each other so often that their small forms keep 0.4 billion weights: too many for a test.
# The same layers are compared on meshes in `moe.LatentTiny`, `recurrent.DeltaTiny`, and the tests of the layers.
TOO_LARGE = {'families.DeepSeekV3', 'families.Qwen3NextOf80B'}


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in registry.names_in_sources() if name not in TOO_LARGE])
def test_it_is_right_on_its_mesh(name):
  config = configure(registry.get(f'praxis_lite.experiments.{name}'))
  found = verify(config, most_devices=8, search_seconds=0, quick=True)
  assert found.is_right and found.compared, format_verification(found)
