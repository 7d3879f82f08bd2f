"""Constraints act on the ambient mesh, are no-ops without one, and refuse what the mesh does not have."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ShardingError
from praxis_lite.layers.base import Layer
from praxis_lite.models import ClassificationModel
from praxis_lite.partitioning import partition_spmd_model
from praxis_lite.sharding import (
  create_device_mesh,
  global_mesh_defined,
  reshard_input_based_on_rank_fn,
  with_logical_constraint,
  with_sharding_constraint,
)
from praxis_lite.training.task import SingleTask


@pytest.fixture
def mesh() -> Mesh:
  return create_device_mesh((1, 2, 4))


def part_shapes(x: jax.Array) -> set[tuple[int, ...]]:
  return {shard.data.shape for shard in x.addressable_shards}


def test_without_a_mesh_nothing_happens() -> None:
  x = jnp.ones((5, 3))
  assert not global_mesh_defined()
  assert with_sharding_constraint(x, P('nonsense')) is x
  assert with_sharding_constraint(x, None) is x


def test_on_one_device_a_constraint_is_checked_and_not_traced() -> None:
  with jax.sharding.use_abstract_mesh(create_device_mesh((1, 1, 1)).abstract_mesh):
    assert not jax.make_jaxpr(lambda x: with_sharding_constraint(x, P('mdl')))(jnp.ones((5, 3))).eqns
    with pytest.raises(ShardingError, match='nonsense'):
      jax.make_jaxpr(lambda x: with_sharding_constraint(x, P('nonsense')))(jnp.ones((5, 3)))


def test_constraint_splits_over_the_ambient_mesh(mesh: Mesh) -> None:
  with jax.set_mesh(mesh):
    assert global_mesh_defined()
    y = jax.jit(lambda x: with_sharding_constraint(x, P('mdl')))(jnp.ones((8, 3)))
    z = with_sharding_constraint(jnp.ones((8, 3)), P('mdl'))
  assert part_shapes(y) == part_shapes(z) == {(2, 3)}


def test_uneven_dimensions_are_really_constrained_inside_a_step(mesh: Mesh) -> None:
  def step(x: jax.Array) -> jax.Array:
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return with_sharding_constraint(x, P('mdl', None)) * 2

  x = jnp.arange(15.0).reshape(5, 3)
  np.testing.assert_array_equal(jax.jit(step)(x), x * 2)
  assert '[{"mdl"}, {}]' in jax.jit(step).lower(x).as_text()


def test_uneven_array_outside_jit_keeps_its_values(mesh: Mesh) -> None:
  with jax.set_mesh(mesh):
    np.testing.assert_array_equal(with_sharding_constraint(jnp.arange(5), P('mdl')), jnp.arange(5))


def test_a_named_sharding_brings_its_mesh(mesh: Mesh) -> None:
  y = with_sharding_constraint(jnp.ones((8, 3)), NamedSharding(mesh, P('data', None)))
  assert part_shapes(y) == {(4, 3)}


def test_manual_axes_are_left_to_shard_map(mesh: Mesh) -> None:
  def body(x: jax.Array) -> jax.Array:
    return with_sharding_constraint(x, P('data', 'mdl'))

  x = jnp.ones((4, 8))
  for manual in ({'data'}, {'replica', 'data', 'mdl'}):
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P('data'), out_specs=P('data'), axis_names=manual)
    np.testing.assert_array_equal(jax.jit(mapped)(x), x)
  partly = jax.shard_map(body, mesh=mesh, in_specs=P('data'), out_specs=P('data'), axis_names={'data'})
  assert '"mdl"' in jax.jit(partly).lower(x).as_text().split('sharding_constraint')[1]


@pytest.mark.parametrize(
  ('spec', 'message'),
  [
    (P('model'), "'model' of .* is not an axis of the mesh"),
    (P('mdl', 'mdl'), 'twice'),
    (P(None, None, 'mdl'), '3 entries'),
  ],
)
def test_specs_that_do_not_fit_are_refused(mesh: Mesh, spec: P, message: str) -> None:
  with jax.set_mesh(mesh), pytest.raises(ShardingError, match=message):
    with_sharding_constraint(jnp.ones((8, 8)), spec)


def test_inputs_are_resharded_by_rank(mesh: Mesh) -> None:
  batch = {'ids': jnp.ones((8, 4)), 'weights': jnp.ones(8), 'step': jnp.ones(())}
  mappings = {'map_1d': None, 'map_2d': ('data', 'mdl')}
  with jax.set_mesh(mesh):
    out = jax.jit(lambda b: reshard_input_based_on_rank_fn(mappings, mesh.axis_names, b))(batch)
    with pytest.raises(ValueError, match='map_2d'):
      reshard_input_based_on_rank_fn({'map_1d': None}, mesh.axis_names, batch)
  assert part_shapes(out['ids']) == {(4, 1)}


class Named(Layer):
  """A network of a user, with constraints by logical names in its own code."""

  output_dims: int = 8

  def __call__(self, x_BD: jax.Array, weights_B: jax.Array) -> jax.Array:
    x_BD = with_logical_constraint(jnp.tanh(x_BD), ('batch', 'mlp'))
    return with_logical_constraint(x_BD * 2, ('batch', P.UNCONSTRAINED))


def test_constraints_by_logical_names_act_in_a_users_layer_under_partition_spmd_model() -> None:
  model = Config(ClassificationModel, num_classes=4, network_tpl=Config(Named))
  batch = {
    'image': jax.ShapeDtypeStruct((8, 8), jnp.float32),
    'label': jax.ShapeDtypeStruct((8,), jnp.int32),
    'weights': jax.ShapeDtypeStruct((8,), jnp.float32),
  }

  def lowered(rules: Any) -> str:
    mesh = {'mesh_axis_names': ('data', 'mdl'), 'ici_mesh_shape': (2, 4)}
    task = Config(SingleTask, model=model, logical_axis_rules=rules, **mesh)
    step = partition_spmd_model(task, jax.random.key(0), batch).train_step
    return step.jitted.lower(*step.arguments).as_text()

  text = lowered((('batch', 'data'), ('mlp', 'mdl')))
  assert '[{"data"}, {"mdl"}]' in text and '[{"data"}, {?}]' in text
  other = lowered((('batch', 'mdl'), ('mlp', None)))
  assert '[{"mdl"}, {}]' in other and '[{"mdl"}, {?}]' in other
  assert '{?}]' not in lowered(None)
