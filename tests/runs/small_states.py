"""A small train state with dimensions that do not divide, on any number of devices."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from praxis_lite.sharding.padding import padded_shape
from praxis_lite.training.state import TrainState

TRUE_SHAPES = {'lm': {'w': (10, 7), 'b': (5,)}, 'scale': ()}
SPECS = {'lm': {'w': PartitionSpec('data', None), 'b': PartitionSpec('data')}, 'scale': PartitionSpec()}


class Layout(NamedTuple):
  """Padded shapes with shardings, and true shapes, of the same state."""

  shapes: TrainState
  true_shapes: TrainState


def layout_on(
  num_devices: int, *, with_key: bool = False, with_ema: bool = False, dtype=jnp.float32, rows: int = 10
) -> Layout:
  mesh = jax.make_mesh((num_devices,), ('data',), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])

  def tree(padded: bool):
    def struct(shape, spec):
      if not padded:
        return jax.ShapeDtypeStruct(shape, dtype)
      return jax.ShapeDtypeStruct(padded_shape(shape, spec, mesh), dtype, sharding=NamedSharding(mesh, spec))

    shapes = {**TRUE_SHAPES, 'lm': {**TRUE_SHAPES['lm'], 'w': (rows, 7)}}
    return jax.tree.map(struct, shapes, SPECS, is_leaf=lambda x: isinstance(x, tuple))

  def state(padded: bool) -> TrainState:
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh) if padded else None)
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicated(mesh) if padded else None)
    adam = optax.ScaleByAdamState(count=step, mu=tree(padded), nu=tree(padded))
    opt_states = (adam, optax.EmptyState(), *([key] if with_key else []))
    return TrainState(step, tree(padded), opt_states, tree(padded) if with_ema else None)

  return Layout(state(True), state(False))


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def random_state(layout: Layout, seed: int = 0, step: int = 0) -> TrainState:
  """Random numbers of the true shapes, padded with zeros and put on the mesh."""
  rng = np.random.default_rng(seed)

  def make(padded, true):
    if jnp.issubdtype(true.dtype, jax.dtypes.prng_key):
      return jax.device_put(jax.random.key(seed), padded.sharding)
    value = np.full(true.shape, step) if true.dtype == jnp.int32 else rng.standard_normal(true.shape)
    amounts = [(0, p - t) for p, t in zip(padded.shape, true.shape)]
    return jax.device_put(np.pad(value, amounts) if amounts else value, padded.sharding).astype(true.dtype)

  return jax.tree.map(make, *layout)


def true_values(state: TrainState, layout: Layout) -> list[np.ndarray]:
  """The arrays of a state without padding, after checking that the padding is zero."""
  values = []
  for x, true in zip(jax.tree.leaves(state), jax.tree.leaves(layout.true_shapes)):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      values.append(np.asarray(jax.random.key_data(x)))
      continue
    whole = np.array(x)
    inside = tuple(slice(d) for d in true.shape)
    values.append(whole[inside].copy())
    whole[inside] = 0
    assert not whole.any()
  return values


def assert_same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
  assert len(a) == len(b)
  for x, y in zip(a, b):
    np.testing.assert_array_equal(x, y)
