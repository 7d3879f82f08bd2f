"""The experiments with images learn, in a shorter form than in their guide."""

from __future__ import annotations

import numpy as np
import pytest

from praxis_lite.experiments.digits import digits
from praxis_lite.experiments.vision import (
  DigitsConvNeXt,
  DigitsMae,
  DigitsResNet,
  DigitsTowers,
  DigitsVit,
  digit_names,
  shifted_digits,
)
from praxis_lite.runs import open_run, run_train
from praxis_lite.training.experiment import configure


def test_shifted_digits_are_the_digits_moved_by_a_pixel():
  whole, moved = digits('validation'), shifted_digits('validation', reach=1)
  assert len(moved['image']) == 9 * len(whole['image'])
  images = moved['image'].reshape(9, *whole['image'].shape)
  np.testing.assert_array_equal(images[4], whole['image'])
  np.testing.assert_array_equal(images[3][:, :, 1:], whole['image'][:, :, :-1])
  assert not images[3][:, :, 0].any()
  np.testing.assert_array_equal(images[7][:, :-1], whole['image'][:, 1:])
  np.testing.assert_array_equal(moved['label'][-360:], whole['label'])


@pytest.mark.slow
def test_a_vision_transformer_learns_digits(tmp_path):
  """In 250 steps; guessing is right about one in ten."""
  config = configure(DigitsVit)
  config.task.train.set(num_train_steps=250, eval_interval_steps=250, save_interval_steps=250)
  metrics = run_train(config, tmp_path / 'run').metrics['eval/validation']
  assert metrics['accuracy'] > 0.8
  loaded = open_run(tmp_path / 'run').load()
  data = digits('validation')
  found = loaded.predict({'image': data['image'][:50]})['prediction']
  assert (found == data['label'][:50]).mean() > 0.7


@pytest.mark.slow
@pytest.mark.parametrize('experiment', [DigitsResNet, DigitsConvNeXt])
def test_a_network_of_convolutions_learns_digits(experiment, tmp_path):
  """In 150 steps; guessing is right about one in ten."""
  config = configure(experiment)
  config.task.train.set(num_train_steps=150, eval_interval_steps=150, save_interval_steps=150)
  assert run_train(config, tmp_path / 'run').metrics['eval/validation']['accuracy'] > 0.9


@pytest.mark.slow
def test_a_masked_autoencoder_learns_to_predict_hidden_patches(tmp_path):
  """In 500 steps, better than the mean of each pixel."""
  config = configure(DigitsMae)
  config.task.train.set(num_train_steps=500, eval_interval_steps=500, save_interval_steps=500)
  loss = run_train(config, tmp_path / 'run').metrics['eval/validation']['loss']
  assert loss < 0.9 * digits('validation')['image'].var(axis=0).mean()


@pytest.mark.slow
def test_two_towers_learn_which_name_belongs_to_a_digit(tmp_path):
  """In 250 steps; guessing is right about one in ten."""
  config = configure(DigitsTowers)
  config.task.train.set(num_train_steps=250, eval_interval_steps=250, save_interval_steps=250)
  assert run_train(config, tmp_path / 'run').metrics['eval/validation']['accuracy'] > 0.6
  loaded = open_run(tmp_path / 'run').load()
  names = loaded.predict(digit_names())['text_embedding']
  images = loaded.predict({'image': digits('validation')['image']})['image_embedding']
  assert ((images @ names.T).argmax(1) == digits('validation')['label']).mean() > 0.6
