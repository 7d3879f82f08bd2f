"""What a pipeline of transformer blocks communicates on a mesh of stages, from the compiled program; and its values."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from padded_layers import place_on
from side_inputs import D as side_dims, Divides, gradients

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.programs import scan_sizes
from praxis_lite.instruments.plan.hlo import KINDS
from praxis_lite.instruments.testing import assert_collectives, collectives
from praxis_lite.layers import MoeFeedForward, Pipelined, PipelinedTransformer, TransformerBlock, pipeline
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.layers.repeat import Repeat
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.padding import slice_to

AXES = ('stage', 'data')
B, T, D = 16, 8, 16
NONE = dict.fromkeys(KINDS, 0)


@pytest.fixture(autouse=True)
def bubbles_are_nan(monkeypatch):
  monkeypatch.setattr(pipeline, 'BUBBLE', float('nan'))


def build(L, S, M, R, weight_axes=None, stage_axis='stage', **fields):
  block = Config(TransformerBlock, input_dims=D, hidden_dims=24, num_heads=2)
  rows = ('data', None, None)
  block.activation_split_dims_mapping.out = rows
  block.attention_tpl.set(causal=True)
  block.attention_tpl.activation_split_dims_mapping.set(blnh=(*rows, None), blkh=(*rows, None), out=rows)
  block.ff_tpl.activation_split_dims_mapping.set(hidden=rows, out=rows)
  if weight_axes is not None:
    block.attention_tpl.weight_split_dims_mapping.wt = (weight_axes[0], None, None)
    block.ff_tpl.weight_split_dims_mapping.wt = weight_axes
  config = Config(PipelinedTransformer, layers_tpl=block, num_layers=L, num_stages=S, num_microbatches=M)
  config.set(circular_repeat=R, mesh_axis_names=AXES, **fields)
  config.weight_split_dims_mapping.stages = stage_axis and (stage_axis,)
  return config.instantiate()


def shards(x):
  return jax.tree.map(lambda v: v.sharding, x)


# On 4 stages x 2: layers, stages, microbatches, rounds.
CASES = [(7, 4, 8, 1), (8, 4, 4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize('L, S, M, R', CASES)
def test_one_permute_a_tick_and_one_sum_at_the_end(L, S, M, R):
  layer = build(L, S, M, R)
  variables = drawn_variables(layer.abstract_init())
  mesh = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
  x = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)
  segment_ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (B, T)).cumsum(axis=1) // 2 + 1, jnp.int32)
  segment_pos = jnp.tile(jnp.arange(T), (B, 1))
  side = {'segment_ids': segment_ids, 'segment_pos': segment_pos}

  def forward(padded, x, side):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return layer.apply(slice_to(padded, variables), x, **side)[0]

  def loss(variables, x, side):
    y, _ = layer.apply(variables, x, **side)
    return jnp.sum(jnp.sin(y)), y

  def on_mesh_loss(padded, x, side):
    return jnp.sum(jnp.sin(forward(padded, x, side)))

  padded = jax.tree.map(place_on(mesh), layer.abstract_init(), variables)
  rows = NamedSharding(mesh, PartitionSpec('data'))
  arguments = padded, jax.device_put(x, rows), jax.device_put(side, rows)

  ticks = layer.schedule(B).num_ticks
  compiled = GuardedJit(forward, out_shardings=rows).lower(*arguments).compile()
  assert_collectives(compiled, {**NONE, 'collective-permute': ticks, 'all-reduce': 1})
  microbatch = B // M // 2 * T * D * 4  # On each device.
  assert collectives(compiled)['collective-permute'].bytes == ticks * microbatch
  expected, y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables, x, side)
  np.testing.assert_allclose(compiled(*arguments), y, rtol=1e-5, atol=1e-5)

  # Backward, as often; and gradients are summed over 'data', for which there is no way but in each tick.
  gradient = jax.grad(on_mesh_loss, argnums=(0, 1))
  backward = GuardedJit(gradient, out_shardings=(shards(padded), rows)).lower(*arguments).compile()
  assert_collectives(backward, {'collective-permute': 2 * ticks, 'all-gather': 0, 'all-to-all': 0})
  of_variables, of_x = jax.device_get(backward(*arguments))
  got = slice_to(of_variables, variables), of_x
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got, expected)


@pytest.mark.slow
@pytest.mark.parametrize('R', [1, 2])
def test_weights_are_gathered_once(R):
  """In bfloat16, once in the forward and once in the backward pass, whatever the number of ticks."""
  mesh = jax.make_mesh((2, 3), AXES, axis_types=(AxisType.Auto,) * 2)
  x, gathered = np.random.default_rng(1).standard_normal((6, T, D)).astype(np.float32), {}
  for axes in (None, 'data'):
    layer = build(4, 2, 3, R, gather_axes=axes, weight_axes=('data', None), fprop_dtype=jnp.bfloat16)
    variables = drawn_variables(layer.abstract_init())

    def loss(variables, x, layer=layer):
      return jnp.sum(jnp.sin(layer.apply(variables, x)[0]), dtype=jnp.float32)

    def on_mesh(padded, x, variables=variables, loss=loss):
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return loss(slice_to(padded, variables), x)

    padded = jax.tree.map(place_on(mesh), layer.abstract_init(), variables)
    x_on_mesh = jax.device_put(x, NamedSharding(mesh, PartitionSpec('data')))
    compiled = GuardedJit(jax.grad(on_mesh), out_shardings=shards(padded)).lower(padded, x_on_mesh).compile()
    gathered[axes] = collectives(compiled)['all-gather']
    got, expected = slice_to(jax.device_get(compiled(padded, x_on_mesh)), variables), jax.grad(loss)(variables, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-2 * np.abs(b).max()), got, expected)
  ticks = layer.schedule(6).num_ticks
  assert gathered['data'].count < len(jax.tree.leaves(variables)) * 2
  assert gathered['data'].bytes * ticks / 3 < gathered[None].bytes


@pytest.mark.parametrize('stage_axis', ['stage', None])
def test_weights_without_a_declared_split_are_gathered_too(stage_axis):
  layer = build(4, 2, 3, 1, gather_axes='data', stage_axis=stage_axis)
  seen = {}
  mesh = jax.make_mesh((2, 3), AXES, axis_types=(AxisType.Auto,) * 2)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    surroundings = Surroundings(listener=lambda c: seen.setdefault(c.field, []).append(c.placement))
    variables, x = layer.abstract_init(), jax.ShapeDtypeStruct((6, T, D), jnp.float32)
    shapes = jax.tree.map(lambda w: w.as_struct(), variables)
    jax.eval_shape(lambda v, x: layer.apply(v, x, surroundings=surroundings), shapes, x)
  _, gathered = seen['layers.ff.up.w (in stages)']
  assert tuple(gathered.spec) == (stage_axis, None, None, None, None)


def test_weights_are_cast_once_before_the_loop():
  layer = build(4, 2, 3, 1, fprop_dtype=jnp.bfloat16)
  variables = drawn_variables(layer.abstract_init())
  loop = next(e for e in jax.make_jaxpr(layer.apply)(variables, jnp.ones((6, T, D))).eqns if e.primitive.name == 'scan')
  read = [str(v.aval.dtype) for v in loop.invars[: scan_sizes(loop).consts] if v.aval.ndim > 4]
  assert read and set(read) == {'bfloat16'}


def test_axes_of_the_stages_are_not_gathered():
  with pytest.raises(ConfigError, match=r"PipelinedTransformer\.gather_axes: 'stage' splits the stages"):
    build(4, 2, 3, 1, gather_axes='stage')


@pytest.mark.slow
def test_gradients_are_summed_once_where_devices_run_their_own_rows():
  layer = build(7, 4, 4, 1, batch_axes='data')
  variables, mesh = drawn_variables(layer.abstract_init()), jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
  x = np.random.default_rng(1).standard_normal((15, T, D)).astype(np.float32)  # Some rows fill up the last microbatch.
  segment_ids = jnp.asarray(np.random.default_rng(0).integers(0, 2, (15, T)).cumsum(axis=1) // 2 + 1, jnp.int32)

  def loss(variables, x):
    y, _ = layer.apply(variables, x, segment_ids=segment_ids, segment_pos=jnp.arange(T)[None])
    return jnp.sum(jnp.sin(y))

  def on_mesh(padded, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return loss(slice_to(padded, variables), x)

  padded = jax.tree.map(place_on(mesh), layer.abstract_init(), variables)
  x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
  compiled = GuardedJit(jax.grad(on_mesh), out_shardings=shards(padded)).lower(padded, x).compile()
  weights = sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(padded)) // 4
  assert weights <= collectives(compiled)['all-reduce'].bytes < 2 * weights
  got, expected = slice_to(jax.device_get(compiled(padded, x)), variables), jax.jit(jax.grad(loss))(variables, x)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), got, expected)


def experts_in_stages(batch_axes=None):
  """Returns (layer, variables, x, what is compared on a mesh and on one device)."""
  experts = Config(MoeFeedForward, input_dims=8, hidden_dims=12, num_experts=3, expert_axis='expert')
  experts.activation_split_dims_mapping.out = (('data', 'expert'), None, None)
  experts.router_tpl.set(load_balance_loss_weight=0.1, bias_update_rate=0.1)
  config = Config(Pipelined, layers_tpl=experts, num_layers=3, num_stages=2, num_microbatches=2)
  config.weight_split_dims_mapping.stages = ('stage',)
  layer = config.set(mesh_axis_names=('stage', 'data', 'expert'), batch_axes=batch_axes).instantiate()
  variables = drawn_variables(layer.abstract_init())
  x = np.random.default_rng(1).standard_normal((8, 4, 8)).astype(np.float32)

  def loss(variables, x):
    y, side = layer.apply(variables, x, key=jax.random.key(3))
    summaries = {name: summary.value for name, summary in side.summaries.items()}
    aux = sum(value * weight for value, weight in side.aux_losses.values())
    return jnp.sum(jnp.sin(y)) + aux, (side.updates, summaries)

  return layer, variables, x, loss


@pytest.fixture(scope='module')
def experts_on_one_device():
  _, variables, x, loss = experts_in_stages()
  return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(variables, x))


@pytest.mark.slow
@pytest.mark.parametrize('sizes, batch_axes', [((2, 2, 2), None), ((2, 2, 2), 'data'), ((2, 1, 3), None)])
def test_experts_in_stages_are_those_of_one_device(sizes, batch_axes, experts_on_one_device):
  """Tokens are exchanged by a `shard_map` inside of a stage, which may itself be in one over rows.

  Products of the experts of a stage are mapped over the axis of stages.
  """
  layer, variables, x, loss = experts_in_stages(batch_axes)
  mesh = jax.make_mesh(sizes, layer.mesh_axis_names, axis_types=(AxisType.Auto,) * 3)
  padded = jax.tree.map(place_on(mesh), layer.abstract_init(), variables)

  def on_mesh(padded, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return loss(slice_to(padded, variables), x)

  step = GuardedJit(jax.value_and_grad(on_mesh, has_aux=True), out_shardings=(None, shards(padded)))
  values, gradients = jax.device_get(step(padded, x))
  got, expected = (values, slice_to(gradients, variables)), experts_on_one_device
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max()), got, expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'sizes, names, L, S, R, batch_axes, kinds',
  [
    ((2,), ('stage',), 5, 2, 1, None, 1),
    ((3, 2), ('stage', 'unused'), 10, 3, 2, None, 1),
    ((2, 2), ('stage', 'data'), 5, 2, 1, 'data', 1),
    ((3, 2), ('stage', 'unused'), 14, 3, 2, None, 2),
    ((2, 3), ('stage', 'data'), 12, 2, 1, 'data', 3),
  ],
)
def test_bubbles_and_filler_rows_do_not_reach_gradients(sizes, names, L, S, R, batch_axes, kinds):
  """Of weights, of what goes through, and of side inputs of all kinds; 7 rows fill 4 microbatches, or 8 parts.

  Patterns of several layers have a first one, too, and some are left over.
  """
  rows, layers = 7, Config(Divides, dims=side_dims)
  pattern = {'num_layers': L, 'layers_tpl': layers}
  if kinds > 1:
    pattern.update(layers_tpl=tuple(layers.clone() for _ in range(kinds)), first_tpl=(layers.clone(),))

  def stack(variables):
    def in_rounds(name, v):
      return v.reshape(R, -1, *v.shape[1:]) if R > 1 and name.startswith('layers') else v

    return {name: jax.tree.map(lambda v, name=name: in_rounds(name, v), below) for name, below in variables.items()}

  layer, of_sequence, given = gradients(Repeat, rows, **pattern)
  variables = drawn_variables(layer.abstract_init())
  split = Config(Pipelined).weight_split_dims_mapping.clone(stages=('stage',))
  fields = {'num_stages': S, 'num_microbatches': 4, 'circular_repeat': R, 'batch_axes': batch_axes}
  fields |= {**pattern, 'mesh_axis_names': names, 'weight_split_dims_mapping': split}
  _, of_pipeline, _ = gradients(Pipelined, rows, stack, **fields)
  mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))

  def on_mesh(*arguments):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return of_pipeline(*arguments)

  whole = NamedSharding(mesh, PartitionSpec())
  got = GuardedJit(on_mesh, out_shardings=whole)(*jax.device_put((variables, *given), whole))
  expected = jax.jit(of_sequence)(variables, *given)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), jax.device_get(got), expected)
