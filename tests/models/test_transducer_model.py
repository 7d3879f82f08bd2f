"""TransducerModel: its loss from its parts, greedy decoding step by step, padding, and steps on any mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, loss_and_gradients, take_a_step
from test_ctc_model import BLANK, LABELS, LENGTHS, WEIGHTS, N, V, batch_of

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import path_name
from praxis_lite.layers import LogMel, rnnt_loss
from praxis_lite.models import conformer_transducer, set_sharding

pytestmark = pytest.mark.usefixtures('shared_programs')


def config(**fields):
  frontend = Config(LogMel, sample_rate=400, frame_length=10, frame_step=4, num_mels=6, normalize=True)
  sizes = {'model_dims': 12, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 14, 'kernel_size': 3, 'channels': 3}
  symbols = {'vocab_size': V, 'blank_id': BLANK, 'space_id': 0}
  model = conformer_transducer(label_dims=7, joint_dims=9, frontend=frontend, **symbols, **sizes)
  model.augmenter_tpl, model.joint_tpl.chunk_size = None, 4
  return model.set(**fields)


@functools.cache
def make():
  model = config().instantiate()
  return model, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


@pytest.mark.slow
def test_loss_is_that_of_its_parts_and_decoding_is_greedy():
  model, variables = make()

  @jax.jit
  def run(batch):
    (metrics, by_row), _ = model.apply(variables, batch, do_eval=True)
    encoded, _ = model.apply(variables, batch, method='encode', do_eval=True)
    return metrics, by_row, encoded, model.apply(variables, batch, method='predict', do_eval=True)[0]

  metrics, by_row, (states, paddings), found = run(batch_of())
  frames = (np.asarray(paddings) == 0).sum(1)
  joint, network = variables['joint'], model.label_network

  @functools.cache
  def known_after(ids):
    return np.asarray(network.apply(variables['label_network'], jnp.array([ids], jnp.int32), do_eval=True)[0][0])

  def log_probs(state, ids):
    known = known_after(tuple(ids))
    hidden = state @ joint['encoder_proj']['w'] + joint['encoder_proj']['b'] + known @ joint['label_proj']['w']
    logits = np.tanh(hidden) @ joint['w'] + joint['b']
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

  losses = np.zeros(len(LABELS))
  for row in np.flatnonzero(WEIGHTS):
    said = [int(x) for x in LABELS[row] if x != BLANK]
    logs = np.stack([log_probs(state, said) for state in states[row, : frames[row]]])
    label = np.stack([*(logs[:, u, x] for u, x in enumerate(said)), 0 * logs[:, 0, 0]], axis=1)
    losses[row] = rnnt_loss(logs[None, ..., BLANK], label[None], frames[row : row + 1], np.array([len(said)]))[0]
    t, written, log_prob = 0, [], 0.0
    while t < frames[row]:
      logs = log_probs(states[row, t], written)[-1].copy()
      if len(written) == states.shape[1]:
        logs[np.arange(V) != BLANK] = -np.inf
      best = int(logs.argmax())
      log_prob += logs[best]
      t, written = (t + 1, written) if best == BLANK else (t, [*written, best])
    assert found['ids'][row, : found['lengths'][row]].tolist() == written
    assert float(found['log_prob'][row]) == pytest.approx(log_prob, abs=1e-3)
  np.testing.assert_allclose(by_row['loss'], losses, rtol=1e-4)
  np.testing.assert_allclose(metrics['loss'][0], (losses * WEIGHTS).sum() / WEIGHTS.sum(), rtol=1e-4)
  assert {'token_error_rate', 'word_error_rate', 'too_short'} <= metrics.keys()
  assert found['lengths'].max() > 1  # Otherwise this shows little.


@pytest.mark.slow
def test_padding_and_rows_without_weight_may_hold_anything():
  model, variables = make()
  run = functools.partial(loss_and_gradients, model, variables, do_eval=True)
  bad = batch_of()
  bad['audio'] = np.where(np.arange(N) < LENGTHS[:, None], bad['audio'], np.nan)
  bad['audio'][3], bad['labels'] = np.nan, np.where(np.arange(5)[:, None] == 3, -9, bad['labels'])
  assert_close(run(bad), run(batch_of()), 1e-5)


@functools.cache
def on_one_device():
  return take_a_step(set_sharding(config()), batch_of())


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(2, 1, 3, 1), (1, 2, 2, 2)])
def test_a_step_on_a_mesh_is_that_of_one_device(mesh):
  (loss, variables), (expected, one) = take_a_step(set_sharding(config()), batch_of(), mesh), on_one_device()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  for path, value in one.items():
    np.testing.assert_allclose(variables[path], value, atol=5e-5 * (1 + np.abs(value).max()), err_msg=path_name(path))


@pytest.mark.slow
def test_bfloat16_runs_and_initial_values_have_the_declared_shapes():
  model = config(fprop_dtype=jnp.bfloat16, max_labels=2).instantiate()
  variables = model.init(jax.random.key(0))
  declared = jax.tree.map(lambda w: (tuple(w.full_shape), jnp.dtype(w.dtype)), model.abstract_init())
  assert jax.tree.map(lambda x: (x.shape, x.dtype), variables) == declared
  loss, gradients = loss_and_gradients(model, variables, batch_of(), key=jax.random.key(1))
  assert loss.dtype == jnp.float32 and np.isfinite(loss)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
  found, _ = model.apply(variables, batch_of(), method='predict', do_eval=True)
  assert found['ids'].shape == (5, 2)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match='max_labels: expected at least 1'):
    config(max_labels=0).instantiate()
