"""A layer of ours as pure functions: the same numbers, trained parts apart, and inside of other transforms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from praxis_lite.bridges.foreign import PureLayer
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, merge
from praxis_lite.layers import BatchNorm, Dropout, Linear, MoeFeedForward, Sequential

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
CHAIN = Config(Sequential, layers_tpl=(
  Config(Linear, input_dims=6, output_dims=5), Config(BatchNorm, dims=5), Config(Dropout, rate=0.5),
))  # fmt: skip


def test_parameters_and_state_are_apart_and_results_are_those_of_the_layer():
  pure = PureLayer(CHAIN)
  params, state = pure.init(jax.random.key(0))
  variables = CHAIN.instantiate().init(jax.random.key(0))
  assert set(leaves(merge(params, state))) == set(leaves(variables))
  assert {path[-1] for path in leaves(state)} == {'moving_mean', 'moving_variance'}
  expected, side = CHAIN.instantiate().apply(variables, X, key=jax.random.key(1))
  outputs, new_state, aux_loss = jax.jit(pure.apply)(params, state, X, key=jax.random.key(1))
  np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
  assert jax.tree.structure(new_state) == jax.tree.structure(state) and aux_loss == 0
  np.testing.assert_allclose(new_state['layers_1']['moving_mean'], side.updates['layers_1']['moving_mean'], rtol=1e-5)
  evaluated = pure.apply(params, state, X, train=False)
  np.testing.assert_array_equal(evaluated.outputs, CHAIN.instantiate().apply(variables, X, do_eval=True)[0])
  for a, b in zip(jax.tree.leaves(evaluated.state), jax.tree.leaves(state)):
    np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_auxiliary_losses_are_returned_and_have_gradients():
  config = Config(MoeFeedForward, input_dims=6, hidden_dims=5, num_experts=3)
  config.router_tpl.z_loss_weight = 0.1
  pure, x = PureLayer(config.instantiate()), jnp.asarray(X[None])
  params, state = pure.init(jax.random.key(0))
  _, side = config.instantiate().apply(params, x, key=jax.random.key(1))
  expected = sum(value * weight for value, weight in side.aux_losses.values())
  out = pure.apply(params, state, x, key=jax.random.key(1))
  assert out.aux_loss == expected > 0
  grads = jax.grad(lambda p: pure.apply(p, state, x, key=jax.random.key(1)).aux_loss)(params)
  assert any(np.asarray(g).any() for g in jax.tree.leaves(grads))


def test_it_is_mapped_over_models():
  pure = PureLayer(Config(Linear, input_dims=6, output_dims=5))
  params, _ = jax.vmap(pure.init)(jax.random.split(jax.random.key(0), 3))
  y = jax.vmap(lambda p: pure.apply(p, {}, X).outputs)(params)
  assert y.shape == (3, 4, 5) and len(np.unique(np.asarray(y))) == 60


SPLIT = Config(Linear, input_dims=6, output_dims=4, mesh_axis_names=('data', 'mdl'))
SPLIT.weight_split_dims_mapping.wt = (None, 'mdl')
SPLIT.activation_split_dims_mapping.out = ('data', 'mdl')


def test_specs_split_parameters_and_the_mappings_of_activations_act_on_a_mesh():
  pure = PureLayer(SPLIT)
  params, state = pure.init(jax.random.key(0))
  specs, of_state = pure.specs()
  assert specs == {'w': P(None, 'mdl')} and of_state == state == {}
  mesh = jax.make_mesh((2, 2), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)
  split = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, specs)
  expected = pure.apply(params, {}, X).outputs
  with jax.set_mesh(mesh):
    outputs = jax.jit(lambda p: pure.apply(p, {}, X).outputs)(split)
  assert split['w'].sharding.shard_shape((6, 4)) == (6, 2) and outputs.sharding.shard_shape((4, 4)) == (2, 2)
  np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_a_mesh_of_explicit_axes_and_specs_without_axes_are_refused():
  pure = PureLayer(SPLIT)
  params, _ = pure.init(jax.random.key(0))
  mesh = jax.make_mesh((2, 2), ('data', 'mdl'), axis_types=(AxisType.Explicit,) * 2)
  with (
    jax.set_mesh(mesh),
    pytest.raises(ConfigError, match=r"axis 'data' of the mesh is Explicit.*AxisType.Auto,\) \* 2"),
  ):
    pure.apply(params, {}, X)
  with pytest.raises(ConfigError, match='mesh_axis_names: is not set'):
    PureLayer(CHAIN).specs()


def test_a_call_without_a_state_is_refused():
  pure = PureLayer(SPLIT)
  with pytest.raises(ConfigError, match=r'PureLayer\.apply: state is a \w+; expected a dict, as init returns it'):
    pure.apply(pure.init(jax.random.key(0))[0], X)


def test_what_is_no_layer_is_refused():
  with pytest.raises(ConfigError, match='PureLayer takes a layer or its config, not dict'):
    PureLayer(Config(dict))
