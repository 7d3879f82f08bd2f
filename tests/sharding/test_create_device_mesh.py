"""Meshes from ICI and DCN shapes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding import create_device_mesh
from praxis_lite.sharding.mesh import fill_mesh_shape


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


FILLED = {
  'all devices': ((-1, 1), None, (8, 1)),
  'the rest': ((2, -1), None, (2, 4)),
  'nothing is left': ((8, -1), None, (8, 1)),
  'within a slice': ((-1, 2), (2, 1), (2, 2)),
  'no -1': ((2, 1), None, (2, 1)),
}


@pytest.mark.parametrize(('ici', 'dcn', 'filled'), FILLED.values(), ids=FILLED)
def test_a_size_of_minus_one_is_the_rest_of_the_devices(ici, dcn, filled):
  names = ('data', 'mdl')
  assert fill_mesh_shape(ici, dcn, names, 8) == fill_mesh_shape(ici, dcn, names) == filled
  whole = tuple(n * d for n, d in zip(filled, dcn or (1, 1)))
  assert tuple(create_device_mesh(ici, dcn, names).shape.values()) == whole


@pytest.mark.parametrize(
  ('ici', 'message'),
  [
    ((-1, -1), r'ici_mesh_shape = \(-1, -1\): only one size may be -1, for the rest of the devices'),
    ((-1, 3), r'ici_mesh_shape = \(-1, 3\): there are 8 devices, not a multiple of 3, the product of the other sizes'),
    ((-1, 16), r'ici_mesh_shape = \(-1, 16\): there are 8 devices, not a multiple of 16'),
    ((-1, 0), r"ici_mesh_shape = .*: the size of 'mdl' must be a positive integer"),
    ((-2, 1), r"ici_mesh_shape = .*: the size of 'data' must be a positive integer"),
  ],
)
def test_a_rest_that_is_none_is_refused(ici, message):
  with pytest.raises(ShardingError, match=message):
    create_device_mesh(ici, None, ('data', 'mdl'))
