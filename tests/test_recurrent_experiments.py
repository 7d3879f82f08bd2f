"""The experiments on counting sequences learn, in a shorter form, and are right on meshes."""

from __future__ import annotations

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.experiments import moe, recurrent
from praxis_lite.inputs import ArrayInput
from praxis_lite.instruments.verification import format_verification, verify
from praxis_lite.models import mamba2_lm
from praxis_lite.runs import run_train
from praxis_lite.runs.inference import decode_prompts
from praxis_lite.training.experiment import configure


@pytest.mark.slow
@pytest.mark.parametrize(
  'experiment',
  [
    *(getattr(recurrent, f'{name}Tiny') for name in ('Mamba2', 'Hybrid', 'Gru', 'Lstm', 'Delta', 'Ssm', 'Griffin')),
    moe.LatentTiny,
  ],
)
def test_it_learns_to_count_and_counts_on(experiment, tmp_path):
  """Rows count through 37 ids: a guess is log 37 = 3.6 nats."""
  config = configure(experiment)
  config.task.train.set(num_train_steps=100, save_interval_steps=100)
  metrics = run_train(config, tmp_path).metrics['eval/validation']
  assert metrics['loss'] < 0.6 and metrics['accuracy'] > 0.8
  prompts = [[(start + i) % 37 for i in range(8)] for start in (1, 33)]
  config.task.model.decoder_tpl.max_decode_steps = 4
  expected = [[(start + i) % 37 for i in range(8, 12)] for start in (1, 33)]
  assert decode_prompts(config, tmp_path, prompts) == expected


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Mamba2', 'Gru', 'Lstm', 'Delta', 'Ssm', 'Griffin'])
def test_it_remembers_an_id_that_no_convolution_or_window_sees(name, tmp_path):
  """Counting needs no state. Here each label is the first of 16 ids; the last one without it is log 5 = 1.6 nats."""
  first = np.repeat(np.arange(5, dtype=np.int32)[:, None], 16, axis=1)
  ids = np.where(np.arange(16) == 0, first, 36)
  arrays = {'ids': ids, 'labels': first, 'weights': np.ones(ids.shape, np.float32)}
  last = {**arrays, 'weights': np.float32(np.arange(16) == 15) * arrays['weights']}
  config = configure(getattr(recurrent, f'{name}Tiny'))
  train = Config(ArrayInput, name='train', arrays=arrays, batch_size=5, is_training=True)
  config.datasets = [train, train.clone(name='validation', arrays=last, is_training=False)]
  config.task.train.set(num_train_steps=100, save_interval_steps=100)
  assert run_train(config, tmp_path).metrics['eval/validation']['loss'] < 1


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Hybrid', 'Lstm', 'Delta', 'Ssm'])
def test_it_is_right_on_a_mesh_that_divides_nothing(name):
  config = configure(getattr(recurrent, f'{name}Tiny'))
  config.task.set(ici_mesh_shape=(2, 2, 2))
  found = verify(config.task, config.datasets[0].instantiate().batch_struct(), quick=True, search_seconds=0)
  assert found.is_right, format_verification(found)


@pytest.mark.parametrize('sizes, published', [((2048, 48), 1.34e9), ((2560, 64), 2.70e9)])
def test_published_sizes_have_as_many_weights(sizes, published):
  model_dims, num_layers = sizes
  text = str(mamba2_lm(vocab_size=50_288, model_dims=model_dims, num_layers=num_layers).instantiate())
  count = int(text.splitlines()[0].split(', ')[1].split()[0].replace(',', ''))
  assert count == pytest.approx(published, rel=0.005)


def test_a_misspelt_size_is_refused_by_the_function_that_was_called():
  with pytest.raises(TypeError, match=r"mamba2_lm\(\) got an unexpected keyword argument 'tie_embedding'"):
    mamba2_lm(vocab_size=37, model_dims=64, num_layers=1, tie_embedding=True)
