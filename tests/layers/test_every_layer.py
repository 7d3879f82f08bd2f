"""What holds for every layer: each exported class is tested, and one without a config in `small_layers.py` fails."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh
from small_layers import AXES, CASES, Case

from praxis_lite import layers
from praxis_lite.common.config import target
from praxis_lite.common.errors import ShardingError
from praxis_lite.layers.base import Layer
from praxis_lite.sharding.weights import WeightHParams

# Classes that are not exported: bases of others, and parts of layers; and where they are tested.
NOT_EXPORTED = {
  'AttentionHeads': 'a base of attention layers',
  'GroupedMixer': 'a base of Mamba2 and GatedDeltaNet',
  'Mixer': 'a base of the layers that take the place of attention',
  'Norm': 'a base of the norms',
  'Quantizer': 'a base of the quantizers',
  'RnnCell': 'a base of the cells',
  'AdaptedLayer': 'a base of the layers with adapters',
  'ClassLogits': 'a base of FullSoftmax and SharedEmbeddingSoftmax',
  'TensorParallelLinear': 'in test_explicit_helpers.py: its mesh axes are explicit',
  'ConvResidual': 'in ImageEncoder and ImageDecoder',
  'LstmCellSimple': 'in test_recurrent.py',
  'CifgLstmCellSimple': 'in test_recurrent.py',
  'LayerNormalizedLstmCellSimple': 'in test_recurrent.py',
  'GruCell': 'in test_recurrent.py',
  'LoraLayer': 'in test_lora.py, around every kind of layer',
  'DoraLayer': 'in test_dora_and_ia3.py',
  'Ia3Layer': 'in test_dora_and_ia3.py',
}
EVERY_LAYER = sorted(
  name for name, value in vars(layers).items() if isinstance(value, type) and issubclass(value, Layer)
)
every_layer = pytest.mark.parametrize('name', EVERY_LAYER)


def case(name: str) -> Case:
  if name not in CASES:
    pytest.fail(f'the layer {name} is exported and not tested; add a small config of it to small_layers.py')
  return CASES[name]()


def is_float(x):
  return jnp.issubdtype(x.dtype, jnp.floating)


def objective(outputs):
  """A number that depends on each output differently."""
  floats = [y.astype(jnp.float32) for y in jax.tree.leaves(outputs) if is_float(y)]
  return sum(jnp.mean(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))) for y in floats)


def step(layer: Layer, variables, args):
  """Returns (outputs and updated variables, gradients of variables, gradients of float arguments)."""

  def loss(variables, floats):
    full = [f if f is not None else a for f, a in zip(floats, args)]
    outputs, side = layer.apply(variables, *full, key=jax.random.key(1))
    aux = sum(value * weight for value, weight in side.aux_losses.values())
    return objective(outputs) + aux, (outputs, side.updates)

  floats = [a if is_float(a) else None for a in args]
  (_, results), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(variables, floats)
  return results, *grads


@functools.cache
def on_one_device(name: str):
  """Returns (variables, arguments, the compiled step, its results)."""
  config, args, _ = case(name)
  layer, variables = config.instantiate(), drawn_variables(config.instantiate().abstract_init())
  jitted = jax.jit(lambda v, a: step(layer, v, a))
  return variables, args, jitted, jitted(variables, args)


def assert_close(actual, expected, tolerance):
  """Relative to the largest entry of each array."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
    a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
    np.testing.assert_allclose(a, e, rtol=0, atol=tolerance * (1e-3 + np.abs(e).max(initial=0)))


def test_every_class_is_exported_or_tested_elsewhere():
  """So that no layer of the package is left out of the tests below."""
  files = [f'{layers.__name__}.{found.name}' for found in pkgutil.iter_modules(layers.__path__) if not found.ispkg]
  modules = [importlib.import_module(name) for name in files]
  found = {
    name
    for module in modules
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, Layer) and value.__module__ == module.__name__
  }
  differ = {name for name in found if not name.startswith('_')} ^ {*EVERY_LAYER, *NOT_EXPORTED}
  assert not differ, f'export {sorted(differ)} from layers/__init__.py, or name the test of each in NOT_EXPORTED above'


@every_layer
def test_init_makes_what_is_declared(name):
  layer = case(name).config.instantiate()
  declared, variables = layer.abstract_init(), jax.eval_shape(layer.init, jax.random.key(0))
  assert jax.tree.structure(declared) == jax.tree.structure(variables)
  for weight, value in zip(jax.tree.leaves(declared), jax.tree.leaves(variables)):
    assert isinstance(weight, WeightHParams)
    assert value.shape == weight.full_shape
    assert value.dtype == jnp.dtype(weight.dtype) == jnp.float32
    assert len(weight.full_split_dims_mapping) == len(value.shape)


@pytest.mark.slow_cases
@every_layer
def test_gradients_are_finite_also_of_zeros(name):
  variables, args, jitted, results = on_one_device(name)
  zeros = tuple(np.zeros_like(a) if is_float(a) and a.ndim > 1 else a for a in args)
  for leaf in jax.tree.leaves((results, jitted(variables, zeros))):
    assert np.isfinite(leaf).all()


@every_layer
def test_every_weight_has_a_gradient(name):
  variables, _, _, (_, grads, _) = on_one_device(name)
  weights = case(name).config.instantiate().abstract_init()
  for weight, grad in zip(jax.tree.leaves(weights), jax.tree.leaves(grads)):
    assert np.asarray(grad).any() == weight.trainable, weight
  assert jax.tree.structure(grads) == jax.tree.structure(variables)


@pytest.mark.slow_cases
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.float64], ids=lambda dtype: dtype.__name__)
@every_layer
def test_with_x64_enabled(name, dtype):
  """Outputs, updates and gradients have the dtypes of the layer and of its variables, whatever JAX's default is."""
  config, args, _ = case(name)
  declared = drawn_variables(config.instantiate().abstract_init())
  with jax.enable_x64():
    layer = config.set(dtype=dtype, fprop_dtype=dtype).instantiate()
    of_layer = jax.tree.map(lambda x: x.dtype, jax.eval_shape(layer.init, jax.random.key(0)))
    variables = jax.tree.map(np.asarray, declared, of_layer)
    args = tuple(np.asarray(x, dtype) if is_float(x) else x for x in args)
    (outputs, updates), of_variables, of_args = jax.eval_shape(functools.partial(step, layer), variables, args)
    assert jax.tree.map(lambda x: x.dtype, of_variables) == of_layer
    assert all(x.dtype == dtype for x in jax.tree.leaves((outputs, of_args)) if is_float(x))
    for path, update in jax.tree.leaves_with_path(updates):
      assert update.dtype in (dtype, jnp.float32) or not is_float(update), path


@pytest.mark.slow
@every_layer
def test_bfloat16_with_float32_weights(name):
  variables, args, _, ((expected, _), _, _) = on_one_device(name)
  layer = case(name).config.set(fprop_dtype=jnp.bfloat16).instantiate()
  args = tuple(a.astype(jnp.bfloat16) if is_float(a) else a for a in args)
  (_, updates), grads, _ = jax.eval_shape(functools.partial(step, layer), variables, args)
  outputs, _ = jax.jit(lambda v, a: layer.apply(v, *a, key=jax.random.key(1)))(variables, args)
  outputs, expected = ([y for y in jax.tree.leaves(tree) if is_float(y)] for tree in (outputs, expected))
  for y in outputs:
    assert y.dtype == (jnp.float32 if case(name).float32_out else jnp.bfloat16)
  assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((variables, updates, grads)))
  assert_close(outputs, expected, 0.04)


@pytest.mark.slow
@every_layer
def test_uneven_splits_over_a_mesh_equal_one_device(name):
  variables, args, _, expected = on_one_device(name)
  config = case(name).config
  layer = config.set(mesh_axis_names=AXES).instantiate()
  mesh = jax.make_mesh((2, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3)

  padded = place_variables(layer, variables, mesh)
  if any(x.ndim for x in jax.tree.leaves(padded)):  # Single numbers are not split.
    split = [x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(padded)]
    assert any(split)
  assert_close(step_on_mesh(step, layer, variables, mesh)(padded, args), expected, 1e-5)


def abstract_call(config, args, method):
  layer = config.instantiate()
  key = jax.random.key(0)
  return jax.eval_shape(lambda v: layer.apply(v, *args, key=key, method=method), layer.init(key))


@pytest.mark.slow_cases
@every_layer
def test_no_split_mapping_is_left_unread(name):
  """A mapping of a rank that no tensor has is refused, so the layer reads it; it has none that it cannot use."""
  config = case(name).config
  for group in ('weight_split_dims_mapping', 'activation_split_dims_mapping'):
    for field in dataclasses.fields(target(getattr(config, group))):
      broken, args, _ = case(name)
      setattr(getattr(broken, group), field.name, (None,) * 9)
      method, args = ('emb_lookup', args[1:]) if field.name == 'emb' else ('__call__', args)
      with pytest.raises(ShardingError, match='9 entries'):
        abstract_call(broken.set(mesh_axis_names=AXES), args, method)
