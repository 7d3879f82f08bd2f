"""Split mappings resolve to full-rank specs, and wrong ones say what is wrong."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding import (
  complete_spec,
  get_input_partition_specs,
  infer_partition_spec_based_on_rank_fn,
  shard_on_batch_dim_partition_spec,
  to_partition_spec,
)

AXES = ('replica', 'data', 'mdl')


@pytest.mark.parametrize(
  ('mapping', 'spec'),
  [
    ((0, 2), P('replica', 'mdl')),
    ((1, -1), P('data', None)),
    ((1, None), P('data', None)),
    ((('replica', 'data'), 'mdl'), P(('replica', 'data'), 'mdl')),
    (((0, 'data'), 2), P(('replica', 'data'), 'mdl')),
    (['mdl', None], P('mdl', None)),
    ((np.int64(1),), P('data')),
    (((), ('mdl',)), P(None, 'mdl')),
    ((), P()),
    (None, P()),
  ],
)
def test_mapping_resolves_names_indices_and_tuples(mapping: Any, spec: P) -> None:
  assert tuple(to_partition_spec(mapping, AXES)) == tuple(spec)


def test_no_mapping_has_the_rank_of_the_tensor() -> None:
  assert tuple(to_partition_spec(None, AXES, rank=3)) == (None, None, None)


def test_unknown_axis_names_the_field_the_axes_and_the_nearest() -> None:
  with pytest.raises(ShardingError) as error:
    to_partition_spec(('model', None), AXES, path='lm.softmax.weight_split_dims_mapping.wt')
  assert str(error.value) == (
    "lm.softmax.weight_split_dims_mapping.wt: axis 'model' is not a mesh axis; "
    "mesh_axis_names = ('replica', 'data', 'mdl'). Did you mean 'mdl'?"
  )


@pytest.mark.parametrize(
  ('mapping', 'rank', 'message'),
  [
    (('mdl', 'mdl'), None, "'mdl' occurs twice"),
    ((('data', 1), None), None, "'data' occurs twice"),
    (('mdl',), 2, '1 entry, but the tensor has 2 dimensions'),
    (('mdl', None, None), 2, '3 entries'),
    ((3,), None, 'axis 3 is out of range'),
    ((-2,), None, 'out of range'),
    ((1.5,), None, 'is not a mesh axis name'),
    ('mdl', None, 'is not a split mapping'),
  ],
)
def test_invalid_mappings_are_refused(mapping: Any, rank: int | None, message: str) -> None:
  with pytest.raises(ShardingError, match=message):
    to_partition_spec(mapping, AXES, rank=rank)


def test_specs_are_completed_but_never_cut() -> None:
  assert tuple(complete_spec(P('mdl'), 3)) == ('mdl', None, None)
  assert tuple(complete_spec(None, 2)) == (None, None)
  with pytest.raises(ShardingError, match='2 entries, but the tensor has 1'):
    complete_spec(P('mdl', None), 1)


def test_inputs_enter_split_over_all_axes_on_the_batch() -> None:
  batch = {'ids': np.zeros((8, 3)), 'scalar': np.zeros(())}
  assert get_input_partition_specs(AXES, batch) == {'ids': P(AXES, None), 'scalar': P()}
  assert shard_on_batch_dim_partition_spec(('data',), np.zeros(4)) == P('data')


def test_inputs_are_mapped_by_rank() -> None:
  mappings = {'map_1d': None, 'map_2d': (('replica', 'data'), None)}
  assert infer_partition_spec_based_on_rank_fn(mappings, AXES, np.zeros((4, 4))) == P(('replica', 'data'), None)
  assert infer_partition_spec_based_on_rank_fn(mappings, AXES, np.zeros(4)) is None
  assert infer_partition_spec_based_on_rank_fn(None, AXES, np.zeros(4)) is None
  with pytest.raises(ValueError, match='map_3d'):
    infer_partition_spec_based_on_rank_fn(mappings, AXES, jax.ShapeDtypeStruct((2, 2, 2), np.float32))
