"""A second kind of model decodes with the same sampler: an encoder-decoder whose decoder is a recurrence.

B batch, S length of the source, P length of the given beginnings of the targets, D dims, V vocabulary.
"""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import REQUIRED, Config, SingleTask, WeightHParams, WeightInit, template
from praxis_lite.models import BaseModel, weighted_mean
from praxis_lite.models.decoding import Sampler, extend_one_by_one
from praxis_lite.training.partitioned_task import PartitionedTask

V, D = 11, 6
SOURCES = np.random.default_rng(0).integers(0, V, (6, 5)).astype(np.int32)
SOURCE_LENGTHS = np.array([5, 3, 1, 4, 5, 2], np.int32)
BEGINNINGS = np.random.default_rng(1).integers(0, V, (6, 4)).astype(np.int32)
BEGINNING_LENGTHS = np.array([1, 4, 2, 3, 1, 0], np.int32)
BATCH = {
  'source': SOURCES,
  'source_lengths': SOURCE_LENGTHS,
  'ids': BEGINNINGS,
  'prompt_lengths': BEGINNING_LENGTHS,
}


class Translator(BaseModel):
  """Keys and values of the source, and an LSTM cell that attends to them before each token."""

  vocab_size: int = REQUIRED
  dims: int = REQUIRED
  decoder_tpl: Config = template(Sampler)

  def setup(self):
    V, D, init = self.vocab_size, self.dims, WeightInit.Gaussian(0.8)
    for name, shape, split in (
      ('embedding', (V, D), ('mdl', 'data')),
      ('key', (D, D), ('data', 'mdl')),
      ('value', (D, D), ('data', 'mdl')),
      ('query', (D, D), ('data', 'mdl')),
      ('gates', (3 * D, 4 * D), ('data', 'mdl')),
      ('softmax', (D, V), ('data', 'mdl')),
    ):
      self.create_variable(name, WeightHParams(shape, init=init, tensor_split_dims_mapping=split))
    self.decoder = self.decoder_tpl.instantiate()

  def compute_predictions(self, batch):
    return self.theta.embedding[batch['ids']] @ self.theta.softmax

  def compute_loss(self, predictions, batch):
    return {'loss': weighted_mean(jnp.mean(predictions, axis=(1, 2)), batch['weights'])}, {}

  def decode(self, batch):
    lengths_B = batch['prompt_lengths']
    steps = TranslatorSteps(self.theta, batch)
    decoded = self.decoder.decode(steps, batch['ids'], lengths_B, self.next_prng_key())
    return decoded.metrics(lengths_B > 0), decoded._asdict()


class TranslatorSteps:
  """All that decoding needs to know of this kind of model. The state is of the recurrence and of the source."""

  max_positions = None

  def __init__(self, theta, batch):
    self.theta, self.batch = theta, batch

  def start(self, num_rows, num_slots):
    source_BSD = self.theta.embedding[self.batch['source']]
    return {
      'key': source_BSD @ self.theta.key,
      'value': source_BSD @ self.theta.value,
      'is_source': jnp.arange(source_BSD.shape[1]) < self.batch['source_lengths'][:, None],
      'hidden': jnp.zeros((num_rows, D)),
      'cell': jnp.zeros((num_rows, D)),
    }

  def extend(self, ids_BT, pos_BT, last_B, state):
    return extend_one_by_one(self.extend_one, ids_BT, pos_BT, last_B, state)

  def extend_one(self, ids_B, pos_B, state):
    query_BD = state['hidden'] @ self.theta.query
    logits_BS = jnp.where(state['is_source'], jnp.einsum('BD,BSD->BS', query_BD, state['key']), -jnp.inf)
    seen_BD = jnp.einsum('BS,BSD->BD', jax.nn.softmax(logits_BS), state['value'])
    inputs = jnp.concatenate([self.theta.embedding[ids_B], seen_BD, state['hidden']], axis=-1)
    take, keep, show, new = jnp.split(inputs @ self.theta.gates, 4, axis=-1)
    cell_BD = jax.nn.sigmoid(keep) * state['cell'] + jax.nn.sigmoid(take) * jnp.tanh(new)
    hidden_BD = jax.nn.sigmoid(show) * jnp.tanh(cell_BD)
    return hidden_BD @ self.theta.softmax, {**state, 'hidden': hidden_BD, 'cell': cell_BD}


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def logits_by_hand(weights, source, ids):
  """The logits after `ids` of one row, in NumPy and float64."""
  w = {name: np.asarray(x, np.float64) for name, x in weights.items()}
  key_SD, value_SD = w['embedding'][source] @ w['key'], w['embedding'][source] @ w['value']
  hidden = cell = np.zeros(D)
  for token in ids:
    scores = np.exp(key_SD @ (hidden @ w['query']))
    inputs = np.concatenate([w['embedding'][token], scores @ value_SD / scores.sum(), hidden])
    take, keep, show, new = np.split(inputs @ w['gates'], 4)
    cell = sigmoid(keep) * cell + sigmoid(take) * np.tanh(new)
    hidden = sigmoid(show) * np.tanh(cell)
  return hidden @ w['softmax']


def task_on(mesh_shape, **sampler):
  model = Config(Translator, vocab_size=V, dims=D)
  model.decoder_tpl.set(max_decode_steps=6, **sampler)
  task = Config(SingleTask, model=model, mesh_axis_names=('data', 'mdl'), ici_mesh_shape=mesh_shape).instantiate()
  batch = {**BATCH, 'weights': np.ones(6, np.float32)}
  return PartitionedTask(task, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)), batch


@functools.cache
def weights():
  return jax.tree.map(np.asarray, Config(Translator, vocab_size=V, dims=D).instantiate().init(jax.random.key(0)))


def decode(mesh_shape, **sampler):
  task, batch = task_on(mesh_shape, **sampler)
  mdl_vars = task.pad(weights())
  out = task.decode_step(mdl_vars, jax.random.key(5), np.int32(0), batch)
  return jax.tree.map(np.asarray, (out.decoded, out.metrics))


def check_row(decoded, row, expected_token=None):
  """Checks the tokens of a row against logits computed one token at a time; `expected_token` chooses each of them."""
  ids = list(BEGINNINGS[row, : BEGINNING_LENGTHS[row]])
  for token, log_prob in zip(decoded['ids'][row], decoded['log_probs'][row]):
    logits = logits_by_hand(weights(), SOURCES[row, : SOURCE_LENGTHS[row]], ids)
    np.testing.assert_allclose(log_prob, logits[token] - np.log(np.exp(logits).sum()), atol=1e-4)
    if expected_token is not None:
      assert token == expected_token(logits)
    ids.append(token)


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh_shape', [(1, 1), (2, 2)])
def test_greedy_tokens_are_those_of_logits_computed_token_by_token(mesh_shape):
  decoded, metrics = decode(mesh_shape, temperature=0.0)
  assert decoded['lengths'].tolist() == [6, 6, 6, 6, 6, 0]
  for row in range(5):
    check_row(decoded, row, np.argmax)
  assert metrics['decoded_length'] == (6, 5)
  assert len({tuple(ids) for ids in decoded['ids'][:5].tolist()}) > 1  # They do depend on the source.


@pytest.mark.slow
def test_sampled_tokens_have_the_log_probs_of_the_model_and_are_the_same_on_a_mesh():
  (one, _), (mesh, _) = (decode(shape, temperature=0.8, top_k=7) for shape in ((1, 1), (2, 2)))
  for row in range(5):
    check_row(one, row)
  np.testing.assert_array_equal(mesh['ids'], one['ids'])
  np.testing.assert_allclose(mesh['log_probs'], one['log_probs'], atol=1e-5)


def test_a_limited_context_starts_again_from_the_source():
  decoded, _ = decode((2, 2), temperature=0.0, max_context=3)
  for row in range(5):
    ids = list(BEGINNINGS[row, : BEGINNING_LENGTHS[row]])
    for token in decoded['ids'][row]:
      assert token == np.argmax(logits_by_hand(weights(), SOURCES[row, : SOURCE_LENGTHS[row]], ids[-3:]))
      ids.append(token)


def test_padding_inside_a_call_changes_no_state():
  theta = types.SimpleNamespace(**jax.tree.map(jnp.asarray, weights()))

  def extend(ids, pos, last):
    steps = TranslatorSteps(theta, BATCH)
    return steps.extend(jnp.array(ids), jnp.array(pos), jnp.array(last), steps.start(6, 9))

  short = extend([[3, 4]] * 6, [[0, 1]] * 6, [1] * 6)
  padded = extend([[3, 4, 9]] * 6, [[0, 1, -1]] * 6, [1] * 6)
  jax.tree.map(np.testing.assert_array_equal, padded, short)
