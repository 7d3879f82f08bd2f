"""`verify` of a model with adapters: the evaluation with merged weights on the mesh is that with adapters."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.trees import map_with_path
from praxis_lite.experiments.lm import SyntheticLoraTiny
from praxis_lite.experiments.preferences import SortedTiny
from praxis_lite.instruments.verification import verify  # noqa: F401
from praxis_lite.instruments.verification.shrink import small_task
from praxis_lite.layers import Lora, QuantizedWeights
from praxis_lite.models import merge_adapters, quantize_weights
from praxis_lite.training import train_adapters
from praxis_lite.training.experiment import configure

module = sys.modules['praxis_lite.instruments.verification.verify']


def comparison(change=lambda task: task, config=None):
  config = config or configure(SyntheticLoraTiny)
  change(config.task)
  return module._Comparison(small_task(config.task, config.datasets[0].instantiate().batch_struct()), lambda line: None)


@pytest.mark.slow
def test_merged_weights_compute_the_same_and_wrong_ones_are_found(monkeypatch):
  right = comparison()
  right.compare_merged(5)
  assert right.compared == ['evaluation of 5 rows with merged adapters'] and not right.differences

  def doubled(model, variables):
    merged = merge_adapters(model, variables)
    return map_with_path(lambda path, x: 2 * np.asarray(x) if path[-2:] == ('query', 'w') else x, merged)

  monkeypatch.setattr(module, 'merge_adapters', doubled)
  wrong = comparison()
  wrong.compare_merged(5)
  assert wrong.differences and wrong.differences[0].name.what == 'loss' and wrong.failed is None


@pytest.mark.slow
def test_weights_in_few_bits_are_merged_too():
  found = comparison(lambda task: quantize_weights(task.model, Config(QuantizedWeights, format='int4', group_size=4)))
  found.compare_merged(5)
  assert found.compared and not found.differences


@pytest.mark.slow
def test_models_whose_results_change_when_they_are_merged_are_left_out():
  preferred = configure(SortedTiny)
  train_adapters(preferred.task, Config(Lora, rank=2))
  found = (
    comparison(config=preferred),
    comparison(lambda task: task.model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl.proj_tpl.set(matmul='int8')),
  )
  for each, why in zip(found, ('another reference', 'products round')):
    each.compare_merged(5)
    assert not each.compared and why in each.not_compared[0]
