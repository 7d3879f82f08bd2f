"""Two towers: embeddings against the towers alone, padding, steps on any mesh, and mistakes."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import ArrayInput
from praxis_lite.models import TwoTowerModel, set_pipeline, set_sharding, transformer_encoder, vision_transformer
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

B, T, V = 5, 4, 11
SEGMENTS = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0]], np.int32)


def config(kind='sigmoid', text_pooling='mean', num_layers=1):
  sizes = {'num_layers': num_layers, 'num_heads': 3, 'hidden_dims': 10}
  image = vision_transformer(image_size=(4, 6), patch_size=2, channels=1, model_dims=12, pooling='attention', **sizes)
  text = transformer_encoder(vocab_size=V, model_dims=9, max_len=T, style='pre_norm', num_token_types=0, **sizes)
  model = Config(TwoTowerModel, embedding_dims=7, image_tpl=image, text_tpl=text, text_pooling=text_pooling)
  model.loss_tpl.set(kind=kind, chunk_size=2, initial_bias=-1.0, initial_scale=3.0)
  return model


@functools.cache
def make(kind='sigmoid', text_pooling='mean'):
  model = config(kind, text_pooling).instantiate()
  return model, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def batch_of():
  rng = np.random.default_rng(0)
  image = rng.standard_normal((B, 4, 6, 1)).astype(np.float32)
  ids = rng.integers(0, V, (B, T)).astype(np.int32)
  return {'image': image, 'ids': ids, 'segment_ids': SEGMENTS, 'weights': np.array([1, 0.5, 0, 2, 1], np.float32)}


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.slow_cases
@pytest.mark.parametrize('text_pooling', ['mean', 'first', 'last'])
def test_embeddings_are_projected_features_of_the_towers_of_norm_1(text_pooling):
  model, variables = make(text_pooling=text_pooling)
  batch = batch_of()
  found, _ = model.apply(variables, batch, method='predict', do_eval=True)
  features, _ = model.image.apply(variables['image'], batch['image'], do_eval=True)
  expected = unit(np.asarray(features) @ variables['image_projection']['w'])
  np.testing.assert_allclose(found['image_embedding'], expected, atol=1e-5)
  states = np.asarray(model.text.apply(variables['text'], batch['ids'], segment_ids=SEGMENTS, do_eval=True)[0])
  lengths = SEGMENTS.sum(1)
  pooled = {
    'first': lambda x, n: x[0],
    'last': lambda x, n: x[n - 1],
    'mean': lambda x, n: x[:n].mean(0),
  }[text_pooling]
  rows = lengths > 0
  expected = unit(
    np.stack([pooled(x, n) for x, n in zip(states[rows], lengths[rows])]) @ variables['text_projection']['w']
  )
  np.testing.assert_allclose(np.asarray(found['text_embedding'])[rows], expected, atol=1e-5)
  for part, name in (('image', 'image_embedding'), ('ids', 'text_embedding')):
    alone = {k: x for k, x in batch.items() if k in (part, 'weights') or (part == 'ids' and k == 'segment_ids')}
    only, _ = model.apply(variables, alone, method='predict', do_eval=True)
    assert list(only) == [name]
    np.testing.assert_allclose(only[name], found[name], atol=1e-6)


@pytest.mark.parametrize('text_pooling', ['first', 'last', 'end', 'largest'])
def test_a_text_is_that_of_one_of_its_tokens_and_never_of_padding(text_pooling):
  """Padding, here before the text too, is the end token and the largest id."""
  p = config(text_pooling=text_pooling)
  p.end_id = 5
  model, variables = p.instantiate(), make()[1]
  ids = np.array([[3, 5, 8, 5], [3, 8, 2, 5], [5, 5, 2, 9], [7, 9, 9, 0]], np.int32)
  segments = np.array([[1, 1, 1, 1], [1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 0, 0]], np.int32)
  ids = np.where(segments == 0, 10, ids) if text_pooling == 'largest' else np.where(segments == 0, 5, ids)
  at = {'first': [0, 0, 2, 0], 'last': [3, 2, 2, 1], 'end': [1, 0, 2, 0], 'largest': [2, 1, 2, 1]}[text_pooling]
  batch = {'ids': ids, 'segment_ids': segments}
  found, _ = model.apply(variables, batch, method='predict', do_eval=True)
  states, _ = model.text.apply(variables['text'], ids, segment_ids=segments, do_eval=True)
  expected = unit(np.asarray(states)[np.arange(4), at] @ variables['text_projection']['w'])
  np.testing.assert_allclose(found['text_embedding'], expected, atol=1e-5)


@pytest.mark.slow
def test_a_row_of_padding_may_hold_anything_and_changes_nothing():
  model, variables = make('softmax')

  def run(batch):
    return jax.jit(jax.value_and_grad(lambda v: model.apply(v, batch, do_eval=True)[0][0]['loss'][0]))(variables)

  known = batch_of()
  bad = {name: x.copy() for name, x in known.items()}
  bad['image'][2], bad['ids'][2] = np.nan, -5
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), run(bad), run(known))
  without = {name: np.delete(x, 2, axis=0) for name, x in known.items()}
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), run(without), run(known))


def after_a_step(kind, mesh=None):
  """The loss, and the variables after a step of gradient descent at a rate of 1, so all gradients."""
  return take_a_step(set_sharding(config(kind)), batch_of(), mesh)


@functools.cache
def on_one_device(kind):
  return after_a_step(kind)


@pytest.mark.slow
@pytest.mark.parametrize('mesh, microbatches', [((2, 1, 2, 2), 2), ((3, 1, 1, 2), 3)])
def test_towers_in_stages_train_like_one_device(mesh, microbatches):
  """Three layers of each tower, and five rows, one of padding; the pairs of a batch are still compared with all."""
  one = take_a_step(config('softmax', num_layers=3), batch_of())
  staged = set_sharding(config('softmax', num_layers=3), batch_axes='data')
  set_pipeline(staged, num_stages=mesh[0], num_microbatches=microbatches, stage_axis='spare', batch_axes='data')
  loss, variables = take_a_step(staged, batch_of(), mesh, rows='data')
  np.testing.assert_allclose(loss, one[0], rtol=1e-5)
  assert_close(variables, one[1], 1e-5)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind, mesh', [('sigmoid', (2, 1, 3, 1)), ('softmax', (1, 2, 2, 2))])
def test_a_step_on_a_mesh_that_divides_nothing_is_that_of_one_device(kind, mesh):
  (loss, variables), (expected, one) = after_a_step(kind, mesh), on_one_device(kind)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert_close(variables, one, 1e-5)


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r"text_pooling.*'max'"):
    config(text_pooling='max').instantiate()
  model, variables = make()
  rows = ArrayInput(name='pairs', arrays={'ids': np.zeros((2, 3), np.int32)}, batch_size=2)
  batch = batch_of()
  model.check_input(rows, batch)
  with pytest.raises(ConfigError, match='pairs: a batch of pairs has image and ids; this one has ids, segment_ids'):
    model.check_input(rows, {name: x for name, x in batch.items() if name != 'image'})
  with pytest.raises(ConfigError, match=r"pairs: found 11 in 'ids', but task\.model\.text\.vocab_size is 11"):
    model.check_input(rows, {**batch, 'ids': np.full((B, T), V)})
  with pytest.raises(ConfigError, match='the batch has neither image nor ids, only weights'):
    model.apply(variables, {'weights': batch['weights']}, method='predict')
  task = Config(SingleTask, model=config(), mesh_axis_names=('data',), ici_mesh_shape=(2,), partitioning='shard_map')
  with pytest.raises(
    ConfigError, match="a contrastive loss compares all rows of a batch, and partitioning='shard_map'"
  ):
    PartitionedTask(task.instantiate(), jax.eval_shape(batch_of)).trace_train_step(None)
