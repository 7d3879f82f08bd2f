"""The work that models require in a step, against counts by hand."""

from __future__ import annotations

import pytest

from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.experiments.seq2seq import DatesTiny
from praxis_lite.experiments.vision import DigitsTowers
from praxis_lite.instruments.plan.model_work import model_work
from praxis_lite.training import PartitionedTask
from praxis_lite.training.experiment import configure


def work_of(experiment):
  config = configure(experiment)
  struct = config.datasets[0].instantiate().batch_struct()
  config.task.ici_mesh_shape = (1,) * len(config.task.mesh_axis_names or (0,))
  return model_work(PartitionedTask(config.task.instantiate(), struct)), struct


def block_flops(dims, hidden, keys):
  """Of a token in a block of attention with as many keys, and of a feed-forward layer of two products."""
  return 2 * (4 * dims * dims + 2 * dims * hidden) + 4 * dims * keys


@pytest.mark.slow
def test_the_work_of_two_towers_is_on_images_too():
  found, struct = work_of(DigitsTowers)
  rows, length = struct['ids'].shape
  image = 16 * (2 * 4 * 64 + 2 * block_flops(64, 128, 16) + 4 * 64 * 64)  # Patches, blocks, and what is pooled.
  text = length * block_flops(64, 128, length)
  assert found.flops == pytest.approx(
    3 * rows * (image + text), rel=0.05
  )  # Besides the query that pools, and projections.
  assert found.causal_flops == found.flops
  assert (found.tokens, found.is_by_token) == (rows * length, False)


def test_the_work_of_an_encoder_decoder_is_on_sources_too():
  found, struct = work_of(DatesTiny)
  model = configure(DatesTiny).task.model
  (rows, targets), sources = struct['ids'].shape, struct['source_ids'].shape[1]
  dims, hidden, layers = model.model_dims, model.hidden_dims, model.num_layers
  # Gated feed-forward layers have a third product.
  encoder = sources * model.lm_tpl.num_encoder_layers * (block_flops(dims, hidden, sources) + 2 * dims * hidden)
  cross = targets * (4 * dims * dims + 4 * dims * sources) + sources * 4 * dims * dims
  decoder = layers * (targets * (block_flops(dims, hidden, targets) + 2 * dims * hidden) + cross)
  softmax = 2 * targets * dims * model.vocab_size
  assert found.flops == pytest.approx(3 * rows * (encoder + decoder + softmax), rel=1e-6)
  assert not found.is_by_token


def test_the_work_of_a_language_model_is_by_token():
  found, struct = work_of(SyntheticLmTiny)
  assert found.is_by_token and found.tokens == struct['ids'].size and found.causal_flops < found.flops
