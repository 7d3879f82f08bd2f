"""Products on a mesh of four axes, which eight devices cannot have."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from praxis_lite.partitioning.guards import guard

mesh = jax.make_mesh((2, 2, 2, 2), ('a', 'b', 'c', 'd'), axis_types=(jax.sharding.AxisType.Auto,) * 4)
rng = np.random.default_rng(0)
u, rows, v, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((8, 6), (8, 5), (6, 8), (4, 2, 6, 4)))

def gradient(on_mesh):
  def at(x, *spec):
    return jax.lax.with_sharding_constraint(x, jax.NamedSharding(mesh, jax.P(*spec))) if on_mesh else x

  def loss(w, u, rows, v, begin):
    updated = jax.lax.dynamic_update_slice_in_dim(u, at(rows, 'a'), begin, 1)
    x = (u @ at(v, None, 'c')).reshape(8, 2, 4)
    y = jnp.tanh(jnp.einsum('hge,egfj->jfh', x, at(w, 'd', None, 'c', 'b')))
    return jnp.sum(y * (jnp.arange(y.size).reshape(y.shape) % 5 - 2)) , (jnp.roll(updated, 1, axis=1), y)

  args = (w, u, rows, v, 1)
  lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(*args)
  guard(lowered)
  return lowered.compile()(*args)[1]

np.testing.assert_allclose(gradient(True), gradient(False), rtol=1e-3, atol=1e-3)
"""


@pytest.mark.slow
def test_gradient_of_a_product_of_which_one_operand_is_gathered():
  env = os.environ | {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': '--xla_force_host_platform_device_count=16'}
  done = subprocess.run([sys.executable, '-c', PROGRAM], env=env, capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
