"""The experiments of published families have exactly as many weights as the published models."""

from __future__ import annotations

import math

import jax
import pytest

from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

# Without what the experiments lack: the vision tower of Gemma 3, and the modules for further tokens of Qwen3-Next. That
# of DeepSeek-V3, the second number, shares the tables of tokens, which count once.
WEIGHTS = {
  'DeepSeekV3': 671_026_419_200 + 11_610_068_224,
  'Gemma3Of12B': 11_766_034_176,
  'GptOssOf20B': 20_914_757_184,
  'MistralOf7B': 7_241_732_096,
  'Olmo2Of7B': 7_298_617_344,
  'Phi4Of14B': 14_659_507_200,
  'Qwen3MoeOf30B': 30_532_122_624,
  'Qwen3NextOf80B': 79_674_391_296,
  'Qwen3Of8B': 8_190_735_360,
  'SmolLm3Of3B': 3_075_098_624,
}


@pytest.mark.parametrize('name', WEIGHTS)
def test_it_has_as_many_weights_as_published(name):
  model = configure(registry.get(f'families.{name}')).task.model.set(name='model').instantiate()
  weights = jax.tree.leaves(model.abstract_init())
  assert sum(math.prod(weight.full_shape) for weight in weights) == WEIGHTS[name]


def test_every_family_is_counted():
  assert {name.removeprefix('families.') for name in registry.names_in_sources() if name.startswith('families.')} == {
    *WEIGHTS
  }
