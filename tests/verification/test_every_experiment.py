"""Every registered experiment computes on its mesh, in small, what one device computes."""

from __future__ import annotations

import pytest

from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


@pytest.mark.slow
@pytest.mark.parametrize('name', registry.names_in_sources())
def test_it_is_right_on_its_mesh(name):
  config = configure(registry.get(f'praxis_lite.experiments.{name}'))
  found = verify(config, most_devices=8, search_seconds=0, quick=True)
  assert found.is_right and found.compared, format_verification(found)
