"""Meshes from ICI and DCN shapes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding import create_device_mesh


def ids(devices: np.ndarray) -> list[Any]:
  return np.vectorize(lambda d: d.id)(devices).tolist()


def test_mesh_has_auto_axes_and_takes_the_first_devices() -> None:
  mesh = create_device_mesh((1, 3, 2))
  assert dict(mesh.shape) == {'replica': 1, 'data': 3, 'mdl': 2}
  assert set(mesh.axis_types) == {AxisType.Auto}
  assert ids(mesh.devices) == [[[0, 1], [2, 3], [4, 5]]]


def test_slices_are_outermost_along_each_axis() -> None:
  mesh = create_device_mesh((2, 1), (1, 4), ('data', 'mdl'))
  assert ids(mesh.devices) == [[0, 2, 4, 6], [1, 3, 5, 7]]
  mesh = create_device_mesh((2, 2), (2, 1), ('data', 'mdl'))
  assert ids(mesh.devices) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
  ('kwargs', 'message'),
  [
    ({'ici_mesh_shape': (1, 4, 4)}, 'needs 16 devices, and there are 8; .*--devices=16'),
    ({'ici_mesh_shape': (1, 4, 1), 'dcn_mesh_shape': (1, 1, 4)}, 'needs 16 devices'),
    ({'ici_mesh_shape': (1, 4)}, '2 sizes, .* 3 names'),
    ({'ici_mesh_shape': (1, 4, 1), 'dcn_mesh_shape': (1,)}, 'dcn_mesh_shape'),
    ({'ici_mesh_shape': (1, 0, 1)}, "'data' must be a positive integer"),
    ({'ici_mesh_shape': (1, 2.0, 1)}, 'positive integer'),
    ({'ici_mesh_shape': (1, 1), 'mesh_axis_names': ('a', 'a')}, 'twice'),
  ],
)
def test_impossible_meshes_are_refused(kwargs: dict[str, Any], message: str) -> None:
  with pytest.raises(ShardingError, match=message):
    create_device_mesh(**kwargs)


def test_devices_can_be_given() -> None:
  assert ids(create_device_mesh((2,), None, ('data',), jax.devices()[4:]).devices) == [4, 5]
