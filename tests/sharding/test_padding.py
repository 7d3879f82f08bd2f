"""Uneven dimensions are padded to what their mesh axes divide, at the end, with zeros, and cut off again."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding import local_shape, num_parts, pad_amounts, pad_to, padded_shape, slice_to

SIZES = {'replica': 1, 'data': 2, 'mdl': 4}


@pytest.mark.parametrize(
  ('size', 'entry', 'padding'),
  [(10, 'mdl', 2), (5, 'mdl', 3), (6, ('data', 'mdl'), 2), (10, ('data', 'mdl'), 6), (0, 'mdl', 0), (8, 'mdl', 0)],
)
def test_padding_of_one_dimension(size: int, entry: Any, padding: int) -> None:
  assert pad_amounts((size,), P(entry), SIZES) == (padding,)


def test_only_split_dimensions_are_padded() -> None:
  assert padded_shape((5, 6), P('mdl'), SIZES) == (8, 6)
  assert local_shape((5, 6), P('mdl'), SIZES) == (2, 6)


def test_unknown_axis_is_named() -> None:
  with pytest.raises(ShardingError, match=r"'model' is not an axis of the mesh .* Did you mean 'mdl'"):
    num_parts('model', SIZES)


def test_arrays_that_do_not_fit_are_refused() -> None:
  with pytest.raises(ShardingError, match='cannot be padded'):
    pad_to(jnp.ones((3, 3)), (2, 4))
  with pytest.raises(ShardingError, match='cannot be sliced'):
    slice_to(jnp.ones(3), (4,))


dims = st.integers(0, 9)
entries = st.sampled_from([None, 'data', 'mdl', ('data', 'mdl'), ('replica', 'mdl')])


@settings(max_examples=40, deadline=None)
@given(
  shape=st.lists(dims, min_size=1, max_size=3), data=st.data(), dtype=st.sampled_from(['float32', 'int32', 'bool'])
)
def test_slicing_undoes_padding_and_the_padding_is_zero(shape: list[int], data: st.DataObject, dtype: str) -> None:
  axis = data.draw(st.integers(0, len(shape) - 1))
  spec = P(*(None,) * axis, data.draw(entries))
  x = np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)
  target = padded_shape(shape, spec, SIZES)
  padded = pad_to({'x': x}, {'x': target})['x']
  assert padded.shape == target and padded.dtype == x.dtype
  assert target[axis] % num_parts(spec[axis], SIZES) == 0 and target[axis] - shape[axis] < num_parts(spec[axis], SIZES)
  assert isinstance(padded, np.ndarray)
  on_device = pad_to(jnp.asarray(x), target)
  assert isinstance(on_device, jax.Array)
  np.testing.assert_array_equal(on_device, padded)
  np.testing.assert_array_equal(slice_to(on_device, tuple(shape)), x)
  np.testing.assert_array_equal(slice_to(padded, tuple(shape)), x)
  assert np.count_nonzero(padded) == np.count_nonzero(x)
  assert local_shape(shape, spec, SIZES) == tuple(t // num_parts(e, SIZES) for t, e in zip(target, (*spec, None, None)))


def test_trees_are_padded_by_structs_under_jit() -> None:
  tree = {'w': jnp.ones((5, 2)), 'b': (jnp.ones(3),)}
  structs = {'w': jax.ShapeDtypeStruct((8, 2), jnp.float32), 'b': (jax.ShapeDtypeStruct((4,), jnp.float32),)}
  padded = jax.jit(lambda t: pad_to(t, structs))(tree)
  assert jax.tree.map(jnp.shape, padded) == {'w': (8, 2), 'b': ((4,),)}
  assert padded['w'].sum() == 10
