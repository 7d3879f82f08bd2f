"""Batches are padded with examples of no weight and put on the mesh."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.errors import DataError
from praxis_lite.sharding import (
  create_device_mesh,
  get_input_partition_specs,
  pad_batch,
  padded_batch_shape,
  put_on_mesh,
)


def make_batch(size: int) -> dict[str, Any]:
  return {'ids': np.ones((size, 3), np.int32), 'nested': {'image': np.ones((size, 2, 2), np.float32)}}


@pytest.mark.parametrize(('size', 'padded'), [(1, 8), (5, 8), (8, 8), (12, 16)])
def test_padding_examples_are_zero_and_weigh_zero(size: int, padded: int) -> None:
  batch = pad_batch(make_batch(size), 8)
  assert batch['weights'].tolist() == [1.0] * size + [0.0] * (padded - size)
  assert batch['ids'].shape == (padded, 3) and batch['ids'].sum() == 3 * size
  assert batch['nested']['image'].shape == (padded, 2, 2)
  structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(size))
  assert padded_batch_shape(structs, 8) == jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def test_weights_that_are_there_are_kept() -> None:
  batch = pad_batch({'weights': np.full((3, 2), 0.5, np.float32)}, 4)
  assert batch['weights'].tolist() == [[0.5, 0.5]] * 3 + [[0.0, 0.0]]


@pytest.mark.parametrize(
  ('batch', 'message'),
  [
    ({}, 'no arrays'),
    ({'a': np.ones(3), 'b': {'c': np.ones(4)}}, "'b.c' has 4 examples, and 'a' has 3"),
    ({'a': np.ones(())}, "'a' is a scalar"),
  ],
)
def test_inconsistent_batches_name_the_leaf(batch: dict[str, Any], message: str) -> None:
  with pytest.raises(DataError, match=message):
    pad_batch(batch, 8)


def test_batch_is_put_on_every_device() -> None:
  mesh = create_device_mesh((1, 2, 4))
  batch = pad_batch(make_batch(5), mesh.size)
  placed = put_on_mesh(batch, mesh, get_input_partition_specs(mesh.axis_names, batch))
  assert {s.data.shape for s in placed['ids'].addressable_shards} == {(1, 3)}
  np.testing.assert_array_equal(placed['ids'], batch['ids'])
  by_prefix = put_on_mesh(batch, mesh, P(mesh.axis_names))
  assert by_prefix['nested']['image'].sharding.is_equivalent_to(placed['nested']['image'].sharding, 3)
  np.testing.assert_array_equal(put_on_mesh(batch, None, None)['ids'], batch['ids'])
