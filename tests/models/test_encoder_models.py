"""Masked language models and classifiers of texts: losses, metrics, padding, and their steps on any mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, loss_and_gradients, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.inputs import ArrayInput, LabelledTextInput
from praxis_lite.layers import Embedding
from praxis_lite.models import encoder_decoder, masked_language_model, sequence_classifier, set_sharding
from praxis_lite.models.labels import check_ids_in_tables

pytestmark = pytest.mark.usefixtures('shared_programs')

V, B, T, D, CLASSES = 13, 5, 9, 12, 3
SIZES = {'vocab_size': V, 'model_dims': D, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 10, 'max_len': T}
MOST = 3  # Places to predict in a row.


def config(kind='tied', **fields):
  sizes = {**SIZES, 'style': 'pre_norm' if kind == 'pre_norm' else 'bert', **fields}
  if kind in ('first', 'mean'):
    return sequence_classifier(num_classes=CLASSES, pooling=kind, **sizes)
  return masked_language_model(tie_embeddings=kind != 'untied', **sizes).set(max_places=MOST if kind == 'few' else None)


def is_masked(kind):
  return kind not in ('first', 'mean')


@functools.cache
def make(kind='tied'):
  """A model, and variables that are not nearly constant functions."""
  model = config(kind).instantiate()
  return model, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def batch_of(kind='tied'):
  """Packed rows with masked places, padding, and a row of padding; or texts, one of each weight."""
  rng = np.random.default_rng(0)
  segments = np.array([[1, 1, 2, 2, 2, 2, 3, 3, 0], [1] * 9, [0] * 9, [1, 1, 1, 2, 2, 2, 0, 0, 0], [1] * 8 + [0]])
  types = rng.integers(0, 2, (B, T))
  batch = {'ids': rng.integers(0, V, (B, T)), 'segment_ids': segments, 'token_type_ids': types}
  if is_masked(kind):
    batch['labels'] = rng.integers(0, V, (B, T))
    batch['segment_pos'] = np.array([[i - list(row).index(s) for i, s in enumerate(row)] for row in segments])
  else:
    batch['segment_ids'] = (segments > 0).astype(int)
    batch['label'] = rng.integers(0, CLASSES, B)
  batch = {name: x.astype(np.int32) for name, x in batch.items()}
  weights = ((rng.random((B, T)) < 0.4) & (segments > 0)).astype(np.float32)
  weights[1, 0] = 0.5
  return batch | {'weights': weights if is_masked(kind) else np.array([1, 0.5, 0, 2, 1], np.float32)}


def log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


# ------------------------------------------------------------------ losses


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', ['tied', 'untied'])
def test_the_loss_is_the_mean_cross_entropy_at_masked_places(kind):
  model, variables = make(kind)
  batch = batch_of()
  (metrics, outputs), _ = model.apply(variables, batch, do_eval=True)
  log_probs = log_softmax(model.apply(variables, batch, method='predict')[0]['logits'])
  losses = -np.take_along_axis(log_probs, batch['labels'][..., None], -1)[..., 0]
  weights = batch['weights']
  np.testing.assert_allclose(metrics['loss'], ((losses * weights).sum() / weights.sum(), weights.sum()), rtol=1e-5)
  correct = log_probs.argmax(-1) == batch['labels']
  np.testing.assert_allclose(metrics['accuracy'], ((correct * weights).sum() / weights.sum(), weights.sum()), rtol=1e-5)
  np.testing.assert_allclose(outputs['weights'], weights.sum(1), rtol=1e-6)
  rows = weights.sum(1) > 0
  np.testing.assert_allclose(outputs['loss'][rows], ((losses * weights).sum(1)[rows] / weights.sum(1)[rows]), rtol=1e-5)


@pytest.mark.slow
def test_labels_of_other_places_and_ids_of_padding_may_be_anything():
  model, variables = make()
  known = batch_of()
  expected = loss_and_gradients(model, variables, known)
  for filler in (-100, 1000):
    other = {**known, 'labels': np.where(known['weights'] > 0, known['labels'], filler).astype(np.int32)}
    other['ids'] = np.where(known['segment_ids'] > 0, known['ids'], filler).astype(np.int32)
    assert_close(loss_and_gradients(model, variables, other), expected, 1e-7)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize('kind', ['first', 'mean', 'tied'])
def test_negative_ids_in_rows_of_weight_zero_change_nothing(kind):
  """Neither with segment ids, all of which say that there are tokens, nor without."""
  model, variables = make(kind)
  batch = batch_of(kind)
  assert not batch['weights'][2].any()
  batch['segment_ids'][2] = 1
  for known in (batch, {name: x for name, x in batch.items() if not name.startswith('segment')}):
    expected = loss_and_gradients(model, variables, known)
    spoiled = {name: x.copy() for name, x in known.items()}
    for name in {'ids', 'token_type_ids', 'labels', 'label'} & set(known):
      spoiled[name][2] = -3
    assert_close(loss_and_gradients(model, variables, spoiled), expected, 1e-7)


def test_logits_in_chunks_have_the_same_loss_and_gradients():
  p = config()
  p.encoder_tpl.embedding_tpl.chunk_size = 4
  model, variables = make()
  assert_close(
    loss_and_gradients(p.instantiate(), variables, batch_of()), loss_and_gradients(model, variables, batch_of())
  )


@pytest.mark.slow
def test_a_head_on_the_places_to_predict_alone_has_the_same_loss_and_gradients():
  model, variables = make()
  batch = batch_of()
  count = (batch['weights'] > 0).sum(1)
  assert count.max() == MOST and count.min() == 0
  for places in (MOST, T, 99):
    few = config().set(max_places=places).instantiate()
    assert_close(loss_and_gradients(few, variables, batch), loss_and_gradients(model, variables, batch))
  (metrics, outputs), _ = config('few').instantiate().apply(variables, batch, do_eval=True)
  (expected, of_all), _ = model.apply(variables, batch, do_eval=True)
  assert float(metrics.pop('left_out')[0]) == 0
  assert_close((metrics, outputs), (expected, of_all))
  # Further places do not count.
  first = {**batch, 'weights': np.where(np.cumsum(batch['weights'] > 0, axis=1) > 2, 0, batch['weights'])}
  two = config().set(max_places=2).instantiate()
  assert_close(loss_and_gradients(two, variables, batch), loss_and_gradients(model, variables, first))
  (metrics, _), _ = two.apply(variables, batch, do_eval=True)
  left = 1 - first['weights'].sum() / batch['weights'].sum()
  np.testing.assert_allclose(metrics['left_out'], (left, batch['weights'].sum()), rtol=1e-6)
  rows = ArrayInput(name='text', arrays={'ids': np.zeros((2, 3), np.int32)}, batch_size=2)
  with pytest.raises(ConfigError, match=rf'text: a row has {MOST} places to predict, and task\.model\.max_places is 2'):
    two.check_input(rows, batch)
  two.check_input(rows, first)
  with pytest.raises(ConfigError, match=r'max_places: expected at least 1, got 0'):
    config().set(max_places=0).instantiate()


@pytest.mark.slow
def test_packed_segments_train_like_segments_apart():
  model, variables = make()
  packed = batch_of()
  pairs = [(b, s) for b in range(B) for s in range(1, packed['segment_ids'][b].max() + 1)]
  apart = {name: np.zeros((len(pairs), T), x.dtype) for name, x in packed.items() if name != 'segment_pos'}
  for row, (b, s) in enumerate(pairs):
    of = packed['segment_ids'][b] == s
    for name in apart:
      apart[name][row, : of.sum()] = packed[name][b, of]
  alone = config().set(packed=False).instantiate()
  assert_close(loss_and_gradients(alone, variables, apart), loss_and_gradients(model, variables, packed))


@pytest.mark.parametrize('kind', ['first', 'mean'])
def test_a_classifier_is_its_formula(kind):
  model, variables = make(kind)
  batch = batch_of(kind)
  (metrics, outputs), _ = model.apply(variables, batch, do_eval=True)
  arguments = {'segment_ids': batch['segment_ids'], 'token_type_ids': batch['token_type_ids']}
  states = np.asarray(model.encoder.apply(variables['encoder'], batch['ids'], **arguments)[0])
  is_token = batch['segment_ids'] > 0
  mean = (states * is_token[..., None]).sum(1) / np.maximum(is_token.sum(1), 1)[:, None]
  pooled = states[:, 0] if kind == 'first' else mean
  of = variables['pooler']['linear']
  logits = np.tanh(pooled @ of['w'] + of['b']) @ variables['softmax']['w'] + variables['softmax']['b']
  log_probs, rows, weights = log_softmax(logits), np.arange(B), batch['weights']
  losses = -log_probs[rows, batch['label']]
  real = weights > 0
  np.testing.assert_allclose(metrics['loss'], ((losses * weights).sum() / weights.sum(), weights.sum()), rtol=1e-5)
  correct = log_probs.argmax(-1) == batch['label']
  np.testing.assert_allclose(metrics['accuracy'][0], (correct * weights).sum() / weights.sum(), rtol=1e-5)
  np.testing.assert_allclose(np.asarray(outputs['loss'])[real], losses[real], rtol=1e-4)
  without_labels = {name: x for name, x in batch.items() if name != 'label'}
  predictions, _ = model.apply(variables, without_labels, method='predict')
  np.testing.assert_allclose(np.asarray(predictions['probabilities'])[real], np.exp(log_probs)[real], atol=1e-5)
  np.testing.assert_array_equal(predictions['prediction'], np.asarray(outputs['prediction']))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['tied', 'mean'])
def test_rows_without_weight_and_text_do_not_count(kind):
  model, variables = make(kind)
  batch = batch_of(kind)
  for b in (batch, {name: np.delete(x, 2, axis=0) for name, x in batch.items()}):
    loss, gradients = loss_and_gradients(model, variables, b)
    if b is batch:
      expected = loss, gradients
      assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))
  assert_close((loss, gradients), expected)
  empty = {name: np.zeros_like(x) for name, x in batch.items()}
  loss, gradients = loss_and_gradients(model, variables, empty)
  assert loss == 0 and not any(g.any() for g in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_without_segments_and_types_all_are_tokens_of_type_0():
  for kind in ('tied', 'mean'):
    model, variables = make(kind)
    batch = batch_of(kind) | {'segment_ids': np.ones((B, T), np.int32), 'token_type_ids': np.zeros((B, T), np.int32)}
    batch.pop('segment_pos', None)
    short = {name: x for name, x in batch.items() if name not in ('segment_ids', 'token_type_ids')}
    assert_close(loss_and_gradients(model, variables, short), loss_and_gradients(model, variables, batch))


def test_a_classifier_begins_with_the_encoder_of_a_masked_model():
  """Their variables have the same paths and shapes, but for the bias of the softmax."""
  masked, classifier = (leaves_by_path(make(kind)[0].abstract_init()['encoder']) for kind in ('tied', 'first'))
  extra = masked.keys() - classifier.keys()
  assert [path_name(path) for path in extra] == ['embedding.b'] and classifier.keys() <= masked.keys()
  assert all(masked[path].full_shape == w.full_shape for path, w in classifier.items())


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['first'])
def test_dropout_is_for_training_only(kind):
  model, variables = config(kind, dropout=0.5).instantiate(), make(kind)[1]
  batch = batch_of(kind)
  first, other = (
    loss_and_gradients(model, variables, batch, key=jax.random.key(seed), do_eval=False)[0] for seed in (0, 1)
  )
  assert abs(first - other) > 1e-3
  expected = loss_and_gradients(make(kind)[0], variables, batch, do_eval=True)[0]
  np.testing.assert_allclose(loss_and_gradients(model, variables, batch, do_eval=True)[0], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['tied', 'mean'])
def test_bfloat16_computes_near_float32_from_float32_weights(kind):
  variables = drawn_variables(make(kind)[0].abstract_init())
  half = config(kind).set(fprop_dtype=jnp.bfloat16).instantiate()
  assert {w.dtype for w in jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0)))} == {jnp.dtype('float32')}
  batch = batch_of(kind)
  expected = loss_and_gradients(make(kind)[0], variables, batch)[0]
  found, gradients = loss_and_gradients(half, variables, batch)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0.02)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


# ------------------------------------------------------------------ meshes


def after_a_step(kind, mesh=None, split=None, **fields):
  """The loss, and the variables after a step of SGD with rate 1, so all gradients."""
  model = set_sharding(config(kind, remat='full' if mesh else 'none'), **split or {})
  return take_a_step(model, batch_of(kind), mesh, **fields)


@functools.cache
def on_one_device(kind):
  return after_a_step(kind)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, mesh, fields',
  [
    ('tied', (1, 2, 2, 2), {}),
    ('tied', (2, 1, 3, 1), {}),  # An axis that nothing uses.
    ('tied', (1, 1, 2, 3), {'split': {'context_axis': 'mdl', 'mdl_axis': None}}),
    ('tied', (1, 1, 3, 1), {'partitioning': 'shard_map'}),
    ('untied', (1, 1, 2, 3), {}),
    ('pre_norm', (2, 1, 2, 2), {}),
    ('first', (1, 2, 2, 2), {}),
    ('few', (1, 2, 2, 2), {}),
    ('few', (1, 1, 3, 1), {'partitioning': 'shard_map'}),
    ('mean', (2, 2, 2, 1), {}),
  ],
  ids=str,
)
def test_a_step_on_a_mesh_that_divides_nothing_is_that_of_one_device(kind, mesh, fields):
  (loss, variables), (expected, one) = after_a_step(kind, mesh, **fields), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  for path, value in one.items():
    np.testing.assert_allclose(
      variables[path], value, rtol=0, atol=1e-5 * (1 + np.abs(value).max()), err_msg=path_name(path)
    )


@pytest.mark.parametrize('kind', ['tied', 'first'])
def test_tables_and_heads_are_split(kind):
  p = set_sharding(config(kind))
  tree = {
    path_name(path): w.full_split_dims_mapping for path, w in leaves_by_path(p.instantiate().abstract_init()).items()
  }
  assert tree['encoder.embedding.w'] == ('mdl', 'data')
  assert tree['encoder.transformer.layers.attention.query.w'] == (None, 'data', 'mdl', None)
  assert tree['encoder.transformer.layers.ff.up.w'] == (None, 'data', 'mdl')
  head = 'transform' if kind == 'tied' else 'pooler'
  assert tree[f'{head}.linear.w'] == ('data', 'mdl')
  if kind == 'first':
    assert tree['softmax.w'] == ('data', 'mdl')
  else:
    assert tree['encoder.embedding.b'] == ('mdl',)


# ------------------------------------------------------------------ mistakes


def test_mistakes_are_named():
  model, variables = make()
  batch = batch_of()
  rows = ArrayInput(name='text', arrays={'ids': np.zeros((2, 3), np.int32)}, batch_size=2)
  model.check_input(rows, batch)
  where = batch['segment_ids'] == 1
  for name, bad, most in (('ids', V, V - 1), ('ids', -1, V - 1), ('token_type_ids', 2, 1)):
    other = {**batch, name: np.where(where, bad, batch[name])}
    with pytest.raises(
      ConfigError, match=rf"text: found {bad} in '{name}', .*all must be from 0 to {most}, or be padd"
    ):
      model.check_input(rows, other)
    model.check_input(rows, {**batch, name: np.where(batch['segment_ids'] == 0, bad, batch[name])})
  without_types = config(num_token_types=0).instantiate()
  with pytest.raises(
    ConfigError, match=r"found 1 in 'token_type_ids', but .*token_type_tpl is None, so the number of typ"
  ):
    without_types.check_input(rows, batch)
  large = Config(LabelledTextInput, name='text', examples=[('a', 1)], seq_len=3, batch_size=1).instantiate()
  row = large.get_next()
  for one in (model, make('first')[0]):
    with pytest.raises(
      ConfigError, match=r'text: its ids go up to 255, but .*vocab_size is 13; it must be at least 256'
    ):
      one.check_input(large, row)
  masked_wrong = {**batch, 'labels': np.where(batch['weights'] > 0, V, batch['labels'])}
  with pytest.raises(ConfigError, match=rf"found {V} in 'labels', but task\.model\.encoder\.vocab_size is {V}"):
    model.check_input(rows, masked_wrong)
  ids = np.arange(B * T).reshape(B, T) % V
  next_tokens = {**batch, 'ids': ids, 'labels': np.roll(ids, -1, axis=1), 'weights': np.ones((B, T), np.float32)}
  with pytest.raises(ConfigError, match=r'text: each of its labels is the next token of the row, which a MaskedLang'):
    model.check_input(rows, next_tokens)
  model.check_input(rows, {**next_tokens, 'labels': ids})
  one = np.zeros((B, T), np.int32)
  model.check_input(rows, {**next_tokens, 'ids': one, 'labels': one})  # Made-up rows of one id.
  with pytest.raises(ConfigError, match=r'masked language model needs a weight for each token, \[5, 9\]'):
    model.apply(variables, {**batch, 'weights': np.ones(B, np.float32)})
  with pytest.raises(
    ConfigError, match=r'softmax_tpl: None shares the table of the embedding, but a Embedding has non'
  ):
    p = config()
    p.encoder_tpl.embedding_tpl = Config(Embedding)
    p.instantiate()
  with pytest.raises(ConfigError, match=r"pooling: expected 'first' or 'mean', got 'last'"):
    config('first').set(pooling='last').instantiate()
  classifier, _ = make('first')
  texts = batch_of('first')
  with pytest.raises(ConfigError, match=r"found 3 in 'label', but task\.model\.num_classes is 3"):
    classifier.check_input(rows, {**texts, 'label': np.full(B, 3, np.int32)})
  with pytest.raises(ConfigError, match=r"found 13 in 'ids'"):
    classifier.check_input(rows, {**texts, 'ids': np.full((B, T), V, np.int32)})


def test_types_of_tokens_that_the_table_lacks_are_found_in_rows_for_predictions():
  limits, batch = make('first')[0].id_limits(), batch_of('first')
  check_ids_in_tables(limits, batch)
  batch['token_type_ids'][0, -1] = 9  # Padding.
  check_ids_in_tables(limits, batch)
  batch['token_type_ids'][1, 0] = 2
  with pytest.raises(DataError, match=r'^token_type_ids 2: the model has types of tokens 0 to 1$'):
    check_ids_in_tables(limits, batch)
  assert not config(num_token_types=0).instantiate().id_limits()
  sources = encoder_decoder(vocab_size=V, model_dims=4, num_layers=1, num_heads=1).instantiate().id_limits()
  with pytest.raises(DataError, match=f'^source_ids {V}: the vocabulary of the model has ids 0 to {V - 1}$'):
    check_ids_in_tables(sources, {'source_ids': np.array([[1, V]]), 'weights': np.ones(1)})
