"""Heads for further tokens: their losses by hand, on meshes, and what they leave as it is."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType
from padded_layers import place_variables, step_on_mesh

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import MultiTokenPrediction
from praxis_lite.models import set_sharding, transformer_lm

B, T, V, D = 3, 7, 11, 6
WEIGHTS = np.array([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 0.5, 1, 0, 0], [1, 1, 0, 1, 1, 1, 0]], np.float32)
SEGMENTS = np.array([[1] * 7, [1] * 5 + [0] * 2, [1, 1, 1, 2, 2, 2, 0]], np.int32)
POSITIONS = np.array([[*range(7)], [*range(7)], [0, 1, 2, 0, 1, 2, 0]], np.int32)


def config(num_modules=2, mtp=True, **fields):
  model = transformer_lm(vocab_size=V, model_dims=D, num_layers=2, num_heads=3, hidden_dims=5, **fields)
  if mtp:
    model.lm_tpl.mtp_tpl = Config(MultiTokenPrediction, num_modules=num_modules)
  return set_sharding(model)


def batch():
  tokens = np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
  arrays = {'ids': tokens[:, :-1], 'labels': np.where(WEIGHTS > 0, tokens[:, 1:], -100), 'weights': WEIGHTS}
  return {**arrays, 'segment_ids': SEGMENTS, 'segment_pos': POSITIONS}


@functools.cache
def variables():
  return drawn_variables(config().instantiate().abstract_init())


def step(model, variables, batch):
  """Returns ((losses of the heads, loss), gradients of all)."""

  def total(variables):
    (metrics, _), side = model.apply(variables, batch)
    loss = metrics['loss'][0]
    return loss + sum(w * x for x, w in side.aux_losses.values()), (side.aux_losses, loss)

  (_, found), grads = jax.value_and_grad(total, has_aux=True)(variables)
  return found, grads


@functools.cache
def on_one_device():
  return jax.jit(functools.partial(step, config().instantiate()))(variables(), batch())


def head(model, number, hidden, ids):
  """The logits of a module for one segment, [T, V], in the words of the formula, and what the next one reads."""
  mtp = model.lm.mtp.modules[number]
  own = variables()['lm']['mtp'][f'modules_{number}']

  def norm(name, x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * own[name]['scale']

  both = np.concatenate(
    [norm('embedding_norm', variables()['lm']['embedding']['w'][ids]), norm('hidden_norm', hidden)], 1
  )
  y = jax.jit(mtp.block.apply)(own['block'], (both @ own['join']['w'])[None])[0][0]
  hidden = norm('norm', np.asarray(y))
  return hidden @ variables()['lm']['softmax']['w'], hidden


def test_losses_are_those_of_each_segment_by_hand():
  """Head k reads the true token k places later and predicts the one after; none crosses segments."""
  model, data = config().instantiate(), batch()
  sums = np.zeros(2)
  for row in range(B):
    for segment in {*SEGMENTS[row]} - {0}:
      (at,) = np.nonzero(SEGMENTS[row] == segment)
      ids, labels, weights = (data[name][row, at] for name in ('ids', 'labels', 'weights'))
      hidden = encode(model, ids)
      for k in (1, 2):
        logits, hidden = head(model, k - 1, hidden[: len(ids) - k], ids[k:])
        for place in range(len(ids) - k):
          if weights[place + k]:
            xent = np.logaddexp.reduce(logits[place]) - logits[place, labels[place + k]]
            sums[k - 1] += weights[place + k] * xent
  (losses, _), _ = on_one_device()
  assert [*losses] == ['lm.mtp/loss_1', 'lm.mtp/loss_2']
  np.testing.assert_allclose([x for x, _ in losses.values()], sums / WEIGHTS.sum(), rtol=2e-5)
  np.testing.assert_allclose([w for _, w in losses.values()], 0.15)


def encode(model, ids):
  """What the softmax reads in one segment, [T, D]."""
  stacked = variables()['lm']
  x = stacked['embedding']['w'][ids][None]
  y = np.asarray(jax.jit(model.lm.transformer.apply)(stacked['transformer'], x)[0][0])
  return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * stacked['final_norm']['scale']


def test_the_loss_of_the_model_and_evaluation_do_not_change():
  plain = config(mtp=False).instantiate()
  weights = {'lm': {name: x for name, x in variables()['lm'].items() if name != 'mtp'}}
  (expected, _), _ = jax.jit(functools.partial(plain.apply, do_eval=True))(weights, batch())
  (_, loss), _ = on_one_device()
  np.testing.assert_allclose(loss, expected['loss'][0], rtol=1e-6)
  (found, _), side = jax.jit(functools.partial(config().instantiate().apply, do_eval=True))(variables(), batch())
  np.testing.assert_array_equal(found['loss'][0], expected['loss'][0])
  assert not side.aux_losses


@pytest.mark.parametrize('shape', [(3, 2, 1), pytest.param((2, 1, 3), marks=pytest.mark.slow)], ids=str)
def test_losses_and_gradients_on_a_mesh_are_those_of_one_device(shape):
  axes = ('replica', 'data', 'mdl')
  model = config().set(mesh_axis_names=axes).instantiate()
  mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[: int(np.prod(shape))])
  found = step_on_mesh(step, model, variables(), mesh)(place_variables(model, variables(), mesh), batch())
  for actual, expected in zip(jax.tree.leaves(found), jax.tree.leaves(on_one_device()), strict=True):
    np.testing.assert_allclose(actual, expected, atol=2e-5 * (1e-2 + np.abs(expected).max()))


def test_rows_shorter_than_the_heads_reach_have_no_loss():
  data = {name: x[:, :1] for name, x in batch().items()}
  (losses, _), grads = jax.jit(functools.partial(step, config().instantiate()))(variables(), data)
  assert all(x == 0 for x, _ in losses.values())
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.parametrize('fields', [{'num_modules': 0}, {'loss_weight': -1.0}], ids=str)
def test_what_is_out_of_range_is_refused(fields):
  model = config()
  model.lm_tpl.mtp_tpl.set(**fields)
  with pytest.raises(ConfigError, match=rf'lm.mtp.{next(iter(fields))}: expected at least'):
    model.instantiate()


def test_heads_add_no_z_loss():
  plain, own = config(mtp=False), config()
  for model in (plain, own):
    model.lm_tpl.softmax_tpl.z_loss_weight = 0.01
  _, of_own = jax.jit(own.instantiate().apply)(variables(), batch())
  _, of_plain = jax.jit(plain.instantiate().apply)(
    {'lm': {n: w for n, w in variables()['lm'].items() if n != 'mtp'}}, batch()
  )
  (value, weight), (expected, one) = (side.aux_losses['lm.softmax/z_loss'] for side in (of_own, of_plain))
  assert weight == one == 0.01
  np.testing.assert_allclose(value, expected, rtol=1e-5)
