"""Products in 8 bits against those in float32: their errors are those of the formats, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.devices import abstract_device
from praxis_lite.layers import Linear
from praxis_lite.layers.fp8 import fp8_tensordot
from praxis_lite.models import transformer_lm

SHAPES = ((64, 32, 4), (32, 4, 48), (64, 48))
X, W, G = (jax.random.normal(key, shape) for key, shape in zip(jax.random.split(jax.random.key(0), 3), SHAPES))


def relative_error(got, expected):
  """The size of the difference, as a share of the size of what is expected."""
  return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))


def products(multiply, dtype=jnp.float32):
  def all_three(x, w, g):
    y, transpose = jax.vjp(multiply, x, w)
    return y, *transpose(g)

  return jax.jit(all_three)(*(array.astype(dtype) for array in (X, W, G)))


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_a_product_and_its_gradients_are_off_by_a_few_percent(dtype):
  """Measured: 3.7 % forward; 6.1 % of the gradients, whose cotangent has one bit less."""
  exact = products(lambda x, w: jnp.tensordot(x, w, axes=2))
  for got, expected, most in zip(products(lambda x, w: fp8_tensordot(x, w, 2), dtype), exact, (0.05, 0.07, 0.07)):
    assert (got.shape, got.dtype) == (expected.shape, dtype) and 0.01 < relative_error(got, expected) < most


@pytest.mark.parametrize('factor', [1e-20, 1.0, 1e15])
def test_scales_follow_the_size_of_the_arrays(factor):
  exact = jnp.tensordot(X, W, axes=2)
  assert relative_error(fp8_tensordot(factor * X, W, 2) / factor, exact) < 0.05
  assert not jnp.any(fp8_tensordot(0 * X, W, 2))
  assert jnp.all(jnp.isfinite(fp8_tensordot(1e-37 * X, W, 2)))  # Their scale is less than any normal number.
  assert jnp.all(jnp.isnan(fp8_tensordot(X.at[0, 0, 0].set(jnp.nan), W, 2)[0]))  # So that the step is skipped.


def test_values_that_the_format_has_are_exact():
  x, w = jnp.array([[448.0, -2.0, 0.5]]), jnp.array([[1.0], [448.0], [-16.0]])
  np.testing.assert_array_equal(fp8_tensordot(x, w, 1), x @ w)


def test_a_model_says_which_of_its_products_are_in_8_bits():
  model = transformer_lm(vocab_size=16, model_dims=8, num_layers=1, num_heads=2, matmul='fp8').instantiate()
  kinds = {
    layer.path_name.rpartition('.')[2]: layer.matmul for layer in model.descendants() if hasattr(layer, 'matmul')
  }
  assert kinds == dict.fromkeys(('query', 'key', 'value', 'out', 'gate', 'up', 'down'), 'fp8')


def test_an_older_gpu_and_another_word_are_refused():
  layer = Config(Linear, input_dims=32, output_dims=8, matmul='fp8').instantiate()
  variables = layer.init(jax.random.key(0))
  for kind, is_refused in (('NVIDIA A100-SXM4-80GB', True), ('NVIDIA H100 80GB HBM3', False)):
    mesh = AbstractMesh((1,), ('data',), (AxisType.Auto,), abstract_device=abstract_device(kind, 'gpu'))
    with jax.sharding.use_abstract_mesh(mesh):
      if is_refused:
        with pytest.raises(ConfigError, match=r"Linear\.matmul: 'fp8' needs a GPU of compute capability 8\.9 or more"):
          jax.eval_shape(layer.apply, variables, jnp.ones((4, 32)))
      else:
        jax.eval_shape(layer.apply, variables, jnp.ones((4, 32)))
  with pytest.raises(ConfigError, match="'fp8'"):
    Config(Linear, input_dims=32, output_dims=8, matmul='f8').instantiate()
