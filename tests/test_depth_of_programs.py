"""The programs of published sizes do not grow with their depth, so neither do the times to trace and compile them."""

from __future__ import annotations

import functools

import jax
import pytest

from praxis_lite.common.jax_internals.programs import inner_programs
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

_OF_LAYERS = {
  'recurrent.Mamba2Of1B': 'model',
  'recurrent.RecurrentGemma2B': 'model',
  'recurrent.DeltaNetOf1B': 'model',
  'recurrent.S4dOf223M': 'model',
  'recurrent.LstmOf66M': 'model',
  'speech.ConformerL': 'model.encoder_tpl',
  'speech.ConformerTransducerL': 'model.encoder_tpl',
  'speech.WhisperSmall': 'model',
  'vision.VitL16': 'model.network_tpl',
  'vision.MaeL16': 'model.network_tpl',
  'vision.SiglipB16': 'model.image_tpl',
  'generative.DitXl': 'model.network_tpl',
  'families.Gemma3Of12B': 'model',
  'families.SmolLm3Of3B': 'model',
  'families.GptOssOf20B': 'model',
  'families.Qwen3NextOf80B': 'model',
  'families.DeepSeekV3': 'model',
}
_SHAPES = {
  'ids': ((2, 16), 'int32'),
  'labels': ((2, 16), 'int32'),
  'audio': ((2, 480_000), 'float32'),
  'image': ((2, 224, 224, 3), 'float32'),
}


def size_of_program(jaxpr):
  return len(jaxpr.eqns) + sum(size_of_program(inner) for e in jaxpr.eqns for inner in inner_programs(e))


def size_at(name, more_layers):
  task = configure(registry.get(f'praxis_lite.experiments.{name}')).task
  layers = functools.reduce(getattr, _OF_LAYERS[name].split('.'), task)
  layers.num_layers += more_layers
  model = task.model.set(name='model').instantiate()
  shapes = dict(_SHAPES)
  if name == 'generative.DitXl':
    shapes |= {'image': ((2, 32, 32, 4), 'float32'), 'label': ((2,), 'int32')}
  elif name.startswith('vision'):
    shapes |= {'label': ((2,), 'int32'), 'ids': ((2, 64), 'int32')}
  elif name.startswith(('recurrent', 'families')):
    shapes['weights'] = ((2, 16), 'float32')
  batch = {key: jax.ShapeDtypeStruct(*shape) for key, shape in shapes.items()}
  if 'weights' not in batch:
    batch['weights'] = jax.ShapeDtypeStruct((2,), 'float32')
  variables = jax.tree.map(lambda w: w.as_struct(), model.abstract_init())
  key = jax.random.key(0)
  return size_of_program(jax.make_jaxpr(lambda v, b: model.apply(v, b, key=key))(variables, batch).jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize('name', _OF_LAYERS)
def test_a_deeper_model_has_a_program_of_the_same_size(name):
  assert size_at(name, 24) == size_at(name, 0)
