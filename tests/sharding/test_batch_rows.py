"""Rows of a batch enter a step with each process's own padding, and the step computes few other rows than examples."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from praxis_lite.instruments.testing import collectives
from praxis_lite.sharding import batch_rows as rows_module
from praxis_lite.sharding.batch import put_on_mesh
from praxis_lite.sharding.batch_rows import batch_rows, row_axes
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.sharding.mesh import bind_mesh, create_device_mesh
from praxis_lite.sharding.specs import get_input_partition_specs

SPLIT = {'ids': P('data', 'context'), 'weights': P('data')}
SPECS = [*SPLIT.values()]


def make_mesh(**sizes: int) -> Mesh:
  return create_device_mesh([*sizes.values()], mesh_axis_names=[*sizes])


def batch(size: int) -> dict[str, np.ndarray]:
  ids = 1 + np.arange(size * 45, dtype=np.int32).reshape(size, 45)
  return {'ids': ids, 'weights': np.linspace(0.5, 1, size, dtype=np.float32)}


@pytest.fixture
def processes_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
  """As if each two consecutive devices belonged to a process."""
  numbers = {device: i // 2 for i, device in enumerate(jax.devices())}
  monkeypatch.setattr(rows_module, 'processes_of', lambda mesh: np.vectorize(numbers.get)(mesh.devices))


def test_devices_that_share_sequences_share_rows() -> None:
  mesh = make_mesh(data=2, context=2, mdl=2)
  assert row_axes(mesh, [P('data'), None, P('data', None)]) == ('data', 'context', 'mdl')
  assert row_axes(mesh, SPECS) == ('data', 'mdl')
  rows = batch_rows(mesh, SPECS, batch(6), num_microbatches=2)
  assert (rows.axes, rows.entering, rows.computed, rows.apart) == (('data', 'mdl'), 8, 8, False)
  assert rows.examples.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.usefixtures('processes_of_two')
def test_what_enters_is_computed_where_processes_share_no_rows() -> None:
  rows = batch_rows(make_mesh(data=4, context=2), SPECS, batch(12))
  assert (rows.axes, rows.entering, rows.computed, rows.apart) == (('data',), 12, 12, False)
  rows = batch_rows(make_mesh(data=8), [], batch(12))
  assert (rows.entering, rows.computed, rows.apart) == (16, 16, False)
  assert rows.examples.tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14]  # Each process has 3 and fills up one.


@pytest.mark.usefixtures('processes_of_two')
@pytest.mark.parametrize(
  ('sizes', 'size', 'computed'),
  [({'data': 2, 'context': 2, 'mdl': 2}, 4, 4), ({'mdl': 1, 'context': 4, 'data': 2}, 12, 12), ({'context': 8}, 4, 4)],
)
def test_examples_of_each_process_are_taken_out_of_what_enters(sizes: dict[str, int], size: int, computed: int) -> None:
  mesh = make_mesh(**{'data': 1, **sizes} if 'data' not in sizes else sizes)
  whole = batch(size)
  rows = batch_rows(mesh, SPECS, whole)
  assert rows.apart and rows.entering == (16 if size == 12 else 8) and rows.computed == computed

  # Each process fills up the rows of its two devices, which are anywhere among all.
  order = mesh.devices.transpose([mesh.axis_names.index(axis) for axis in rows.axes]).ravel()
  owner = np.repeat([device.id // 2 for device in order], rows.entering // 8)
  entering = {name: np.zeros((rows.entering, *x.shape[1:]), x.dtype) for name, x in whole.items()}
  for process in range(4):
    own = np.flatnonzero(owner == process)[: size // 4]
    for name, x in whole.items():
      entering[name][own] = x[process * size // 4 :][: size // 4]
  placed = put_on_mesh(entering, mesh, get_input_partition_specs(rows.axes, entering))

  def step(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    taken = rows.take_rows(batch)
    split = {name: with_sharding_constraint(x, SPLIT[name]) for name, x in taken.items()}
    return {name: x * 2 for name, x in split.items()}

  compiled = jax.jit(bind_mesh(step, mesh)).lower(placed).compile()
  for name, x in compiled(placed).items():
    np.testing.assert_array_equal(x[:size], 2 * whole[name])
    assert x.shape[0] == computed
  assert collectives(compiled)['all-to-all'].count
