"""A mixer on a mesh and on one device: a loss, and its gradients by all weights and by the input."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh


def squares(y):
  return jnp.sum(y**2)


def on_mesh_and_alone(build, config, mesh, x, segment_ids=None, objective=squares, **split):
  """Returns (loss, (gradients of weights, of x)) on a mesh, without padding, and the same on one device.

  Args:
    build: config -> (layer, variables).
    config: of a mixer; its mappings are set.
    mesh: the sizes of the axes by their names.
    x, segment_ids: see `Mixer`.
    objective: the loss of the result.
    **split: arguments of `Mixer.set_split`.
  """
  kind = type(config.clone().instantiate())
  kind.set_split(config, **{'batch': None, 'length': None, 'data': None, 'mdl': None, **split})
  layer, variables = build(config.set(mesh_axis_names=tuple(mesh)))

  def step(layer, variables, x):
    loss = lambda v, x: objective(layer.apply(v, x, segment_ids=segment_ids)[0])  # noqa: E731
    return jax.value_and_grad(loss, argnums=(0, 1))(variables, x)

  expected = jax.jit(lambda v: step(layer, v, x))(variables)
  devices = jax.make_mesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))
  loss, (weights, of_x) = step_on_mesh(step, layer, variables, devices)(place_variables(layer, variables, devices), x)
  weights = jax.tree.map(lambda a, e: a[tuple(map(slice, e.shape))], weights, expected[1][0])
  return (loss, (weights, of_x)), expected
