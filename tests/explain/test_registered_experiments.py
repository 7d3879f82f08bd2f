"""What explain and check say of each registered experiment is so."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding

from praxis_lite.instruments.explain import check, explain_task, report
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import ExperimentConfig, configure

registry.load_all()
NAMES = [name for name in registry.names() if name.startswith('praxis_lite.experiments.')]


@pytest.fixture(scope='module', params=NAMES)
def config(request: pytest.FixtureRequest) -> Iterator[ExperimentConfig]:
  """An experiment, whose state is laid out and whose step is traced once for explain and check."""
  known: dict[str, Any] = {}

  def once(name: str) -> Any:
    compute = getattr(report, name)
    return lambda *arguments: known[name] if name in known else known.setdefault(name, compute(*arguments))

  with pytest.MonkeyPatch.context() as patched:
    checking = importlib.import_module('praxis_lite.instruments.explain.check')
    for name in ('state_layout', 'trace_task'):
      patched.setattr(checking, name, shared := once(name))
      patched.setattr(report, name, shared)
    yield configure(registry.get(request.param))


@pytest.mark.slow_cases
def test_every_array_is_explained_as_jax_would_place_it(config: ExperimentConfig) -> None:
  found = explain_task(config)
  task = config.task.instantiate()
  weights = jax.tree.leaves(task.model.abstract_init())
  assert [e.shape for e in found.variables] == [w.full_shape for w in weights]
  assert found.activations and found.inputs
  mesh = abstract_mesh(found.mesh_sizes)
  for e in found.arrays():
    assert found.find(e.path) is e
    assert NamedSharding(mesh, e.spec).shard_shape(e.padded_shape) == e.local_shape
    assert all(d.source for d in e.dims)
    copies = e.bytes_per_device * e.num_devices / max(e.bytes + e.wasted_bytes, 1)
    assert copies == e.replication or not e.bytes
    assert all(d.padding >= 0 for d in e.dims)
    assert str(e).startswith(e.path)


@pytest.mark.slow_cases
def test_what_check_finds_is_so(config: ExperimentConfig) -> None:
  found = explain_task(config)
  for problem in check(config):
    assert problem.kind == 'padding', str(problem)
    assert problem.path == 'inputs'
    rows = found.inputs[0].dims[0]
    devices = found.inputs[0].num_devices
    batch_sizes = {d.batch_size for d in config.datasets}
    assert rows.size in batch_sizes
    assert rows.size % devices and rows.padding / rows.padded > 0.1
    assert f'{rows.size} examples are computed as {rows.padded}' in problem.message
