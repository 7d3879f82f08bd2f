"""Encoder-decoders and encoders in stages of pipelines, and with lengths that are split: the same as on one device."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state, drawn_variables
from encoder_decoder_cases import B, T, V, config, packed_batch

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.layers import BatchNorm, GatedDeltaNet, GroupNorm, LogMel, Mamba2, Recurrent
from praxis_lite.models import (
  DiffusionModel,
  conformer_ctc,
  diffusion_transformer,
  masked_language_model,
  recurrent_lm,
  resnet_classifier,
  set_pipeline,
  set_sharding,
)
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

ROWS = ('replica', 'data')


def after_a_step(model, batch, axes=('replica', 'data', 'mdl'), mesh=None, length=None):
  """The loss, and the variables after a step of SGD with rate 1, so all gradients."""
  task = Config(SingleTask, model=model, mesh_axis_names=axes, ici_mesh_shape=mesh)
  task.train.learner.set(optimizer=Config(optax.sgd), learning_rate=1.0)
  task.train.inputs_split_mapping = {'map_1d': (ROWS,), 'map_2d': (ROWS, length), 'map_4d': (ROWS, None, None, None)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  out = partitioned.train_step(drawn_state(partitioned), jax.random.key(1), batch)
  return float(out.weighted_loss), leaves_by_path(partitioned.unpad(out.state).mdl_vars)


@functools.cache
def on_one_device(style):
  return after_a_step(config(style), packed_batch())


def assert_same(found, expected):
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  for path, value in expected[1].items():
    np.testing.assert_allclose(
      found[1][path], value, rtol=0, atol=1e-5 * (1 + np.abs(value).max()), err_msg=path_name(path)
    )


# ------------------------------------------------------------------ stages

STAGES = [
  ('t5', (2, 1, 3, 1), {'num_microbatches': 2, 'batch_axes': 'data'}),
  ('t5', (2, 2, 1, 2), {'num_microbatches': 3, 'stage_remat': 'full'}),
  ('bart', (2, 1, 1, 3), {'microbatch_size': 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize('style, mesh, fields', STAGES, ids=str)
def test_encoder_and_decoder_in_stages_train_like_one_device(style, mesh, fields):
  """Three layers of the encoder in two stages, and five rows in microbatches that they do not fill."""
  model = set_pipeline(set_sharding(config(style)), num_stages=2, **fields)
  found = after_a_step(model, packed_batch(), ('stage', 'replica', 'data', 'mdl'), mesh)
  assert_same(found, on_one_device(style))


@pytest.mark.slow_cases
@pytest.mark.parametrize('rows', [1, 3])
def test_a_bias_in_stages_is_that_of_all_rows(rows):
  """Its table has as many buckets as the batch has rows, or the batch has one row."""
  model = config(num_buckets=6, num_encoder_layers=2)
  for stack in model.lm_tpl.encoder_tpl, model.lm_tpl.decoder_tpl:
    stack.layers_tpl.attention_tpl.set(implementation='blockwise', block_size=4)
  variables = drawn_variables(model.instantiate().abstract_init())
  batch = {name: np.concatenate([x[:3]] * 2)[: 2 * rows if rows > 1 else 1] for name, x in packed_batch().items()}
  staged = set_pipeline(model.clone(), num_stages=2, num_microbatches=2, stage_axis=None)
  one, two = (
    jax.jit(lambda v, m=m: m.apply(v, batch, method='predict')[0]['logits'])(variables)
    for m in (model.instantiate(), staged.instantiate())
  )
  np.testing.assert_allclose(one, two, atol=1e-5)


@pytest.mark.slow
def test_targets_decoded_in_stages_are_those_of_one_device():
  model = config(num_encoder_layers=2)
  variables = jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.instantiate().abstract_init()))
  batch = {'source_ids': packed_batch()['source_ids'], 'source_lengths': np.array([9, 0, 4, 1, 7], np.int32)}
  staged = set_pipeline(model.clone(), num_stages=2, num_microbatches=2, stage_axis=None)
  found, expected = (
    jax.jit(lambda v, m=m: m.apply(v, batch, do_eval=True, method='decode')[0][1])(variables)
    for m in (staged.instantiate(), model.instantiate())
  )
  np.testing.assert_array_equal(found['ids'], expected['ids'])
  np.testing.assert_allclose(found['log_probs'], expected['log_probs'], atol=1e-5)


def masked_batch():
  rng = np.random.default_rng(0)
  batch = {name: rng.integers(0, V, (B, T)).astype(np.int32) for name in ('ids', 'labels')}
  batch['segment_ids'] = packed_batch()['segment_ids']
  return batch | {'weights': (rng.random((B, T)) < 0.4) * (batch['segment_ids'] > 0).astype(np.float32)}


@pytest.mark.slow
def test_an_encoder_in_stages_trains_like_one_device():
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 3, 'num_heads': 3, 'hidden_dims': 10, 'max_len': T}
  expected = after_a_step(masked_language_model(**sizes), masked_batch())
  staged = set_pipeline(set_sharding(masked_language_model(**sizes)), num_stages=2, num_microbatches=3)
  assert_same(after_a_step(staged, masked_batch(), ('stage', *ROWS, 'mdl'), (2, 1, 3, 1)), expected)


RECURRENCES = {
  'mamba2': Config(Mamba2, num_heads=6, dims_per_head=4, state_dims=5, chunk_size=4),
  'delta': Config(GatedDeltaNet, num_heads=3, dims_per_head=4, key_dims=5, chunk_size=4),
  'lstm': Config(Recurrent),
}


@pytest.mark.slow
@pytest.mark.parametrize('kind', RECURRENCES)
def test_recurrences_in_stages_train_like_one_device(kind):
  """Three blocks in two stages, and rows of several segments in microbatches that they do not fill."""
  model = recurrent_lm(RECURRENCES[kind], vocab_size=V, model_dims=12, num_layers=3, hidden_dims=10)
  batch = masked_batch()
  expected = after_a_step(model, batch)
  staged = set_pipeline(set_sharding(model.clone()), num_stages=2, num_microbatches=2, batch_axes='data')
  assert_same(after_a_step(staged, batch, ('stage', *ROWS, 'mdl'), (2, 1, 3, 1)), expected)


def conformer(norm):
  """Three blocks; 90 samples are 21 frames of features, and 6 of the encoder, of which some are padding."""
  frontend = Config(LogMel, sample_rate=400, frame_length=10, frame_step=4, num_mels=6, normalize=True)
  sizes = {'model_dims': 12, 'num_layers': 3, 'num_heads': 3, 'hidden_dims': 14, 'kernel_size': 3, 'channels': 3}
  model = conformer_ctc(vocab_size=V, blank_id=V - 1, frontend=frontend, **sizes).set(augmenter_tpl=None)
  model.encoder_tpl.stack_tpl.layers_tpl.conv_tpl.norm_tpl = norm
  rng = np.random.default_rng(0)
  batch = {'audio': rng.standard_normal((B, 90)).astype(np.float32), 'labels': np.full((B, 2), V - 1, np.int32)}
  batch |= {
    'audio_lengths': np.array([90, 70, 55, 90, 40], np.int32),
    'weights': np.array([1, 0.5, 1, 0, 1], np.float32),
  }
  batch['labels'][:, 0] = [1, 0, 2, 3, 1]
  return model, batch


def dit():
  """Three blocks on six patches of images with classes."""
  sizes = {'image_channels': 1, 'model_dims': 12, 'num_layers': 3, 'num_heads': 3, 'num_classes': 3}
  model = Config(DiffusionModel, network_tpl=diffusion_transformer(**sizes), image_size=(4, 6), num_sampling_steps=3)
  images = np.random.default_rng(0).random((B, 4, 6, 1)).astype(np.float32)
  weights = np.array([1, 0.5, 1, 0, 1], np.float32)
  return model, {'image': images, 'label': np.array([0, 1, 2, 1, 0], np.int32), 'weights': weights}


SOUND_AND_IMAGES = {
  'conformer': lambda: conformer(Config(GroupNorm, num_groups=2)),
  'conformer_with_batch_norm': lambda: conformer(Config(BatchNorm)),
  'dit': dit,
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh, fields', [((2, 1, 3, 1), {'num_microbatches': 2}), ((3, 1, 1, 2), {'microbatch_size': 2})]
)
@pytest.mark.parametrize('kind', SOUND_AND_IMAGES)
def test_conformers_and_diffusion_transformers_in_stages_train_like_one_device(kind, mesh, fields):
  """Without stages; a norm over the batch is one over microbatches, so with it, with stages on one device."""
  model, batch = SOUND_AND_IMAGES[kind]()
  staged = set_pipeline(set_sharding(model.clone()), num_stages=mesh[0], **fields)
  alone = set_pipeline(model, num_stages=2, stage_axis=None, **fields) if 'batch_norm' in kind else model
  expected = after_a_step(alone, batch)
  assert expected[0] > 0
  assert_same(after_a_step(staged, batch, ('stage', *ROWS, 'mdl'), mesh), expected)


def test_stacks_that_cannot_be_stages_are_named():
  with pytest.raises(ConfigError, match='set_pipeline: ResNet has no stack of repeated blocks'):
    set_pipeline(resnet_classifier(num_classes=3), num_stages=2, num_microbatches=2)
  with pytest.raises(ConfigError, match='set_pipeline: encoder_tpl is the Config of StackedTransformer'):
    set_pipeline(config(repeat=False), num_stages=2, num_microbatches=2)
  few = set_pipeline(config(), num_stages=3, num_microbatches=2)
  with pytest.raises(ConfigError, match=r'lm\.decoder\.num_stages: 3 stages need at least 3 layers'):
    few.instantiate()


# ------------------------------------------------------------------ split lengths

SPLITS = [
  ('t5', (3, 1, 2, 1), 'ring'),
  ('t5', (2, 2, 1, 2), 'all_to_all'),
  ('classical', (2, 2, 1, 1), 'ring'),
]


@pytest.mark.slow
@pytest.mark.parametrize('style, mesh, method', SPLITS, ids=str)
def test_split_sources_and_targets_train_like_one_device(style, mesh, method):
  """Nine tokens of the sources and seven of the targets over two or three devices, in self- and cross attention."""
  model = set_sharding(config(style), context_axis='context')
  for stack in model.lm_tpl.encoder_tpl, model.lm_tpl.decoder_tpl:
    for field in ('attention_tpl', 'cross_attention_tpl'):
      if hasattr(stack.layers_tpl, field):
        getattr(stack.layers_tpl, field).context_method = method
  found = after_a_step(model, packed_batch(), ('context', *ROWS, 'mdl'), mesh, 'context')
  assert_same(found, on_one_device(style))
