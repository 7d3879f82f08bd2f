"""Pictures of arrays over a mesh: which device holds which part is as JAX has it."""

from __future__ import annotations

import io
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from praxis_lite.common.errors import ShardingError
from praxis_lite.instruments.explain import draw_sharding, visualize_sharding
from praxis_lite.instruments.explain.visualize import device_grid
from praxis_lite.sharding.padding import padded_shape

ENTRIES = [None, 'a', 'b', 'c', ('a', 'b'), ('c', 'a'), ('b', 'c', 'a')]


def specs_of_rank(rank: int) -> list[P]:
  """All specs that name no axis twice."""

  def valid(entries: Any) -> bool:
    axes = [a for e in entries if e is not None for a in ((e,) if isinstance(e, str) else e)]
    return len(axes) == len(set(axes))

  return [P(*entries) for entries in itertools.product(ENTRIES, repeat=rank) if valid(entries)]


@settings(max_examples=60, deadline=None)
@given(
  rank=st.integers(1, 4),
  mesh_shape=st.sampled_from([(2, 2, 2), (1, 2, 4), (4, 1, 2), (8, 1, 1)]),
  data=st.data(),
)
def test_devices_hold_the_parts_that_jax_gives_them(rank: int, mesh_shape: tuple[int, ...], data: Any) -> None:
  spec = data.draw(st.sampled_from(specs_of_rank(rank)))
  shape = tuple(data.draw(st.integers(1, 9)) for _ in range(rank))
  devices = np.array(jax.devices()).reshape(mesh_shape)
  mesh = Mesh(devices, ('a', 'b', 'c'), axis_types=(AxisType.Auto,) * 3)
  padded = padded_shape(shape, spec, mesh)
  grid = device_grid(spec, mesh)
  local = [d // n for d, n in zip(padded, grid.shape)]
  flat = list(devices.flat)
  wanted = {flat.index(d): s for d, s in NamedSharding(mesh, spec).devices_indices_map(padded).items()}
  for index in np.ndindex(grid.shape[:-1]):
    for device in grid[index]:
      starts = tuple(s.start or 0 for s in wanted[int(device)])
      assert starts == tuple(i * n for i, n in zip(index, local))
  assert sorted(grid.flat) == list(range(8))
  draw_sharding(shape, spec, mesh)


def test_a_matrix_with_padding() -> None:
  assert draw_sharding((5, 6), P('data', 'mdl'), {'data': 2, 'mdl': 2}) == (
    'shape 5 x 6, split (data, mdl), mesh data 2 x mdl 2 = 4 devices\n'
    'each device holds 3 x 3\n'
    '\n'
    '          0:3        3:6\n'
    '         +----------+----------+\n'
    '    0:3  | 0        | 1        |\n'
    '         +----------+----------+\n'
    '    3:5  | 2        | 3        |\n'
    '  pad 1  |..........|..........|\n'
    '         +----------+----------+'
  )


def test_a_vector_whose_last_part_is_padding_in_part_and_whose_copies_are_listed() -> None:
  text = draw_sharding((10,), P('data'), {'data': 4, 'mdl': 2})
  assert 'each device holds 3, each part on 2 devices' in text
  assert '| 0,1      | 2,3      | 4,5      | 6,7......|' in text
  assert 'padding of columns: 2 in 9:10' in text


def test_a_part_that_is_nothing_but_padding() -> None:
  text = draw_sharding((2, 3), P('data', None), {'data': 4})
  assert text.count('  padding  |..........|') == 2


@pytest.mark.parametrize(('shape', 'spec', 'pictures'), [((2, 4, 4), P('a'), 2), ((2, 2, 4, 4), P('a', 'b'), 4)])
def test_dimensions_before_the_last_two_give_a_picture_for_each_part(shape: Any, spec: P, pictures: int) -> None:
  assert draw_sharding(shape, spec, {'a': 2, 'b': 2}).count(', ...]') == pictures


def test_of_many_parts_the_first_and_the_last_are_drawn() -> None:
  text = draw_sharding((64,), P('data'), {'data': 64}, max_parts=4)
  assert '...' in text
  assert '| 0        | 1        | 2        |     | 63       |' in text


def test_it_prints_to_a_file() -> None:
  out = io.StringIO()
  visualize_sharding((4,), P('data'), {'data': 2}, file=out)
  assert out.getvalue() == draw_sharding((4,), P('data'), {'data': 2}) + '\n'


@pytest.mark.parametrize(
  ('shape', 'spec', 'message'),
  [
    ((), P(), 'arrays of 1 to 4 dimensions'),
    ((1,) * 5, P(), 'arrays of 1 to 4 dimensions'),
    ((4,), P('model'), "axis 'model' is not an axis of the mesh"),
    ((4, 4), P('data', 'data'), "mesh axis 'data' occurs twice"),
    ((4,), P('data', None), 'has 2 entries, but the tensor has 1 dimension'),
  ],
)
def test_what_cannot_be_drawn_is_an_error(shape: Any, spec: P, message: str) -> None:
  with pytest.raises(ShardingError, match=message):
    draw_sharding(shape, spec, {'data': 2})
