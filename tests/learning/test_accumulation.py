"""Gradients over microbatches are those of the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.testing import collectives
from praxis_lite.training.microbatches import LossOutput, value_and_grad

ROWS, DIMS = 12, 3


def batch_of(weights: Any, seed: int = 0) -> dict[str, jax.Array]:
  x = jax.random.normal(jax.random.key(seed), (ROWS, DIMS))
  return {'x': x, 'y': jnp.sin(x.sum(1)), 'weights': jnp.asarray(weights, jnp.float32)}


def weighted_loss(params: Any, others: Any, key: Any, batch: Any) -> tuple[jax.Array, LossOutput]:
  """A mean by weight that is NaN where nothing weighs anything, and a metric that stays by layer."""
  x, weights = batch['x'], batch['weights']
  prediction = jnp.tanh(x @ params['w']) @ params['v']
  errors = (prediction - batch['y']) ** 2
  total = weights.sum()
  by_dim = (x**2 * weights[:, None]).sum(0) / total
  positive = jnp.where(errors > 0.1, weights, 0.0).sum()
  metrics = {
    'loss': ((errors * weights).sum() / total, total),
    'by_dim': (by_dim, total),
    'errors_of_large': ((jnp.where(errors > 0.1, weights, 0.0) * errors).sum() / positive, positive),
  }
  updates = {'seen': others['seen'] + total} if others else {}
  return metrics['loss'][0], LossOutput(total, metrics, {'errors': errors}, {}, updates)


def params_of(seed: int = 1) -> dict[str, jax.Array]:
  w, v = jax.random.split(jax.random.key(seed))
  return {'w': jax.random.normal(w, (DIMS, 4)), 'v': jax.random.normal(v, (4,))}


@functools.cache
def compiled(k: int) -> Any:
  return jax.jit(lambda p, o, b: value_and_grad(weighted_loss, p, o, jax.random.key(0), b, k))


def run(k: int, weights: Any, others: Any = None) -> Any:
  return compiled(k)(params_of(), others or {}, batch_of(weights))


@settings(max_examples=12, deadline=None)
@given(
  st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=ROWS, max_size=ROWS).filter(any),
  st.sampled_from([2, 3, 4]),
)
def test_unequal_weights_give_loss_gradient_and_metrics_of_the_whole_batch(weights: list[float], k: int) -> None:
  loss, whole, gradients = run(1, weights)
  loss_k, parts, gradients_k = run(k, weights)
  np.testing.assert_allclose(loss_k, loss, rtol=1e-5)
  assert float(parts.weight) == sum(weights)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), gradients_k, gradients)
  np.testing.assert_allclose(parts.per_example['errors'], whole.per_example['errors'], rtol=1e-5)
  for name, (value, weight) in whole.metrics.items():
    np.testing.assert_allclose(parts.metrics[name][1], weight, rtol=1e-6)
    if float(weight):
      np.testing.assert_allclose(parts.metrics[name][0], value, rtol=1e-5, err_msg=name)


def test_a_mean_of_means_would_not_do() -> None:
  """The weights of the test above really are unequal over microbatches: averaging gradients plainly is wrong."""
  weights = [3.0, 0.5] * (ROWS // 2)
  _, _, gradients = run(1, weights)
  batch = batch_of(weights)
  halves = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
  grads = [jax.grad(lambda p, b: weighted_loss(p, {}, None, b)[0])(params_of(), half) for half in halves]
  plain = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
  assert not np.allclose(plain['w'], gradients['w'], rtol=1e-2)


def test_a_batch_of_padding_alone_has_no_gradient() -> None:
  loss, out, gradients = run(3, [0.0] * ROWS)
  assert float(loss) == 0.0
  assert float(out.weight) == 0.0
  assert all(float(jnp.abs(g).max()) == 0.0 for g in jax.tree.leaves(gradients))
  assert all(np.all(np.isfinite(value)) for value, _ in out.metrics.values())


def test_variables_that_layers_update_go_from_microbatch_to_microbatch() -> None:
  weights = np.arange(ROWS)
  _, out, _ = run(4, weights, {'seen': jnp.float32(10), 'frozen': {'w': jnp.ones(2)}})
  assert float(out.updates['seen']) == 10 + weights.sum()


def test_rows_that_a_batch_does_not_divide_into_are_refused() -> None:
  with pytest.raises(ConfigError, match=r'num_microbatches: a batch of 12 does not divide into 5 microbatches'):
    run(5, [1.0] * ROWS)


def test_each_microbatch_draws_by_itself_and_one_does_not_loop() -> None:
  def noisy(params: Any, others: Any, key: Any, batch: Any) -> tuple[jax.Array, LossOutput]:
    noise = jax.random.normal(key, (batch['x'].shape[0],))
    return params['v'].sum(), LossOutput(jnp.float32(1), {}, {'noise': noise}, {}, {})

  def noise_of(k: int) -> np.ndarray:
    _, out, _ = value_and_grad(noisy, params_of(), {}, jax.random.key(0), batch_of([1.0] * ROWS), k)
    return np.asarray(out.per_example['noise'])

  assert len(np.unique(noise_of(3))) == ROWS
  one = jax.make_jaxpr(lambda p: value_and_grad(noisy, p, {}, jax.random.key(0), batch_of([1.0] * ROWS), 1))
  assert 'scan' not in str(one(params_of()))


def test_a_microbatch_waits_for_the_one_before_it() -> None:
  """Without a barrier around all that an iteration reads, XLA merges iterations and stores activations of both."""
  jaxpr = jax.make_jaxpr(lambda p, b: value_and_grad(weighted_loss, p, {}, jax.random.key(0), b, 2))(
    params_of(), batch_of([1.0] * ROWS)
  )
  (loop,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == 'scan']
  body, constants = loop.params['jaxpr'].jaxpr, loop.params['num_consts']
  barrier = body.eqns[0]
  assert barrier.primitive.name == 'optimization_barrier'
  assert {*body.invars[constants:]} <= {*barrier.invars}


def test_low_precision_gradients_are_summed_in_float32() -> None:
  """256 microbatches of gradient 1: bfloat16 stops counting at 256."""
  batch = {'x': jnp.ones((1024, 1))}

  def loss(params: Any, others: Any, key: Any, batch: Any) -> tuple[jax.Array, LossOutput]:
    mean = jnp.mean(batch['x'] * params['w'].astype(jnp.float32))
    return mean, LossOutput(jnp.float32(1), {}, {}, {}, {})

  _, _, gradients = value_and_grad(loss, {'w': jnp.ones((1,), jnp.bfloat16)}, {}, jax.random.key(0), batch, 512)
  assert gradients['w'].dtype == jnp.bfloat16
  assert float(gradients['w'][0]) == 1.0


def test_cutting_a_batch_that_is_split_over_devices_moves_no_rows() -> None:
  mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(4), ('data',))
  rows = NamedSharding(mesh, P('data'))
  batch = {'x': jnp.ones((16, DIMS)), 'y': jnp.ones(16), 'weights': jnp.ones(16)}

  def step(params: Any, batch: Any) -> Any:
    return value_and_grad(weighted_loss, params, {}, jax.random.key(0), batch, 2)[2]

  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch)
  program = jax.jit(step, out_shardings=NamedSharding(mesh, P())).lower(params_of(), shapes).compile()
  assert {kind for kind, found in collectives(program).items() if found.count} == {'all-reduce'}


def test_gradients_of_microbatches_tell_their_noise() -> None:
  """Rows whose gradients are G plus noise of a known variance; microbatches of weight 0 and of unequal weights."""
  rows, dims, spread = 4096, 8, 3.0
  noise = spread * jax.random.normal(jax.random.key(0), (rows, dims))
  weights = jnp.where(jnp.arange(rows) % 8 == 7, 0.0, 1.0 + (jnp.arange(rows) % 8 == 0))

  def loss(params: Any, others: Any, key: Any, batch: Any) -> tuple[jax.Array, LossOutput]:
    total = batch['weights'].sum()
    mean = (batch['weights'] * ((0.5 + batch['noise']) @ params)).sum() / total
    return mean, LossOutput(total, {'loss': (mean, total)}, {}, {}, {})

  batch = {'noise': noise, 'weights': weights}
  _, out, gradient = jax.jit(lambda p, b: value_and_grad(loss, p, {}, jax.random.key(0), b, 512, reports_noise=True))(
    jnp.zeros(dims), batch
  )
  signal, variance = (out.metrics[f'grad_noise/{name}'] for name in ('signal', 'variance'))
  # A row of weight 2 counts as much as two rows with the same noise, which vary more together.
  assert float(signal[0]) == pytest.approx(dims * 0.25, rel=0.15) and float(signal[1]) == 1.0
  assert float(variance[0]) == pytest.approx(dims * spread**2, rel=0.25)
  assert float(jnp.sum(gradient**2)) > 0
