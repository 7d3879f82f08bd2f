"""Models with adapters: a step changes only adapters, and on a mesh it is that of one device."""

from __future__ import annotations

import functools
import re

import jax
import numpy as np
import optax
import pytest
from drawn_state import drawn_state

from praxis_lite.common.config import Config
from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.layers import Dora, Ia3, Lora, MoeFeedForward
from praxis_lite.layers.quantized_weights import QuantizedWeights
from praxis_lite.models import (
  ADAPTER_VARIABLES,
  image_classifier,
  quantize_weights,
  set_pipeline,
  set_sharding,
  transformer_lm,
)
from praxis_lite.training import train_adapters
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

AXES = ('stage', 'replica', 'data', 'mdl')
B, T, V = 6, 5, 37


def of_text():
  ids = np.random.default_rng(0).integers(0, V, (B, T + 1)).astype(np.int32)
  weights = np.ones((B, T), np.float32)
  weights[1, 3:] = weights[4] = 0
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def of_images():
  rng = np.random.default_rng(0)
  return {
    'image': rng.standard_normal((B, 4, 4, 1)).astype(np.float32),
    'label': rng.integers(0, 5, B).astype(np.int32),
    'weights': np.array([1, 1, 0, 1, 1, 1], np.float32),
  }


def lm(experts=None, **fields):
  """Vocabulary 37, D 18, 3 heads, F 15, ranks 3 and 2: meshes have to pad almost everything."""
  sizes = {'vocab_size': V, 'model_dims': 18, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 15}
  return transformer_lm(**sizes, experts=experts, **fields).set(packed=False)


def lm_with_heads_together():
  model = lm()
  model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.combine_qkv = True
  return model


def quantized(make, *rules):
  return quantize_weights(make(), *rules)


def vit():
  return image_classifier(
    num_classes=5, image_size=4, patch_size=2, channels=1, model_dims=18, num_layers=2, num_heads=3, hidden_dims=15
  )


EXPERTS = Config(MoeFeedForward, num_experts=5, num_shared_experts=1)
EMBEDDING = Config(Lora, layers=r'lm\.embedding', rank=2)
INT4 = Config(QuantizedWeights, format='int4', group_size=4)
WHOLE_OUTPUTS = Config(
  QuantizedWeights, layers=(r'.*\.(query|value|out)', r'.*\.(gate|down)'), format='int4', input_scale=True
)
FIXED_RANGES = Config(QuantizedWeights, layers=r'.*\.(key|up)', input_range=True)
OTHERS = (
  Config(QuantizedWeights, layers=r'.*\.ff', format='nf4', group_size=8, scale_dtype='bfloat16'),
  Config(QuantizedWeights, layers=r'.*\.(query|out)', symmetric=False),
  Config(QuantizedWeights, layers=r'.*\.key', format='mxfp8'),
  Config(QuantizedWeights, layers=r'.*\.value', format='nvfp4'),
)
TWO_OF_FOUR = Config(QuantizedWeights, format='float', kept=(2, 4), trained=True)
ONE_SHOT = Config(QuantizedWeights, format='int4', kept=(2, 4), trained=True, num_shots=1)
# Builds a model, the arguments of set_sharding, the adapters, and the batch.
CASES = {
  'lm': (lm, {}, (EMBEDDING, Config(Lora, rank=3)), of_text),
  'heads together': (
    lm_with_heads_together,
    {},
    (Config(Lora, rank=3, rank_stabilized=True),),
    of_text,
  ),
  'experts': (functools.partial(lm, EXPERTS), {'expert_axis': 'data'}, (Config(Lora, rank=3),), of_text),
  'vit': (vit, {}, (Config(Lora, rank=3),), of_images),
  'dora': (lm, {}, (Config(Dora, rank=3),), of_text),
  'ia3': (functools.partial(lm, use_bias=True), {}, (Config(Ia3),), of_text),
  'int4': (functools.partial(quantized, lm, INT4), {}, (Config(Lora, rank=3),), of_text),
  'integers': (
    functools.partial(quantized, functools.partial(lm, matmul='int8'), WHOLE_OUTPUTS, FIXED_RANGES),
    {},
    (Config(Lora, rank=3),),
    of_text,
  ),
  'experts in nf4': (
    functools.partial(quantized, functools.partial(lm, EXPERTS), *OTHERS),
    {'expert_axis': 'data'},
    (Config(Lora, rank=3),),
    of_text,
  ),
  'two of four': (
    functools.partial(quantized, functools.partial(lm, EXPERTS), TWO_OF_FOUR),
    {'expert_axis': 'data'},
    (),
    of_text,
  ),
  'one shot': (
    functools.partial(quantized, functools.partial(lm, EXPERTS), ONE_SHOT),
    {'expert_axis': 'data'},
    (),
    of_text,
  ),
}


def after_a_step(name, mesh=None, stages=1, **fields):
  """Returns the loss, and all variables before and after a step of SGD with rate 1, so all gradients."""
  make, splits, adapters, make_batch = CASES[name]
  model, batch = set_sharding(make(), **splits), make_batch()
  if stages > 1:
    set_pipeline(model, num_stages=stages, num_microbatches=2)
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  task.train.learner.set(optimizer=Config(optax.sgd, momentum=0.9), learning_rate=1.0)
  if adapters:
    train_adapters(task, *adapters)
  rows = ('replica', 'data')
  task.train.inputs_split_mapping = {'map_1d': (rows,), 'map_2d': (rows, None), 'map_4d': (rows, None, None, None)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  state = drawn_state(partitioned)
  before = leaves_by_path(jax.tree.map(np.array, partitioned.unpad(state).mdl_vars))
  slots = [leaf.shape for leaf in jax.tree.leaves(partitioned.unpadded_state_shapes.opt_states) if leaf.ndim]
  out = partitioned.train_step(state, jax.random.key(1), batch)
  after = leaves_by_path(jax.tree.map(np.array, partitioned.unpad(out.state).mdl_vars))
  return float(out.weighted_loss), before, after, slots


on_one_device = functools.cache(after_a_step)


def is_adapter(path):
  return re.fullmatch(ADAPTER_VARIABLES, path_name(path)) is not None


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name in CASES if name not in ('two of four', 'one shot')])
def test_a_step_changes_every_adapter_and_no_bit_of_the_rest(name):
  _, before, after, slots = on_one_device(name)
  assert 0 < sum(map(is_adapter, before)) < len(before)
  for path, value in before.items():
    changed = np.any(after[path] != value)
    assert changed == is_adapter(path), path_name(path)
  assert sorted(slots) == sorted(value.shape for path, value in before.items() if is_adapter(path))


MESHES = [
  *(('lm', mesh) for mesh in [(1, 2, 2, 2), (2, 1, 3, 1), (1, 1, 1, 3)]),
  *(('heads together', mesh) for mesh in [(1, 2, 2, 2), (1, 1, 3, 1)]),
  *(('experts', mesh) for mesh in [(1, 2, 2, 2), (2, 1, 3, 1), (1, 1, 1, 3)]),
  *(('vit', mesh) for mesh in [(1, 2, 2, 2), (1, 1, 3, 1)]),
  *((name, mesh) for name in ('dora', 'ia3') for mesh in [(1, 2, 2, 2), (2, 1, 3, 1)]),
  *(
    (name, mesh)
    for name in ('int4', 'integers', 'experts in nf4', 'two of four', 'one shot')
    for mesh in [(1, 2, 2, 2), (2, 1, 3, 1), (1, 1, 1, 3)]
  ),
]


def assert_same_step(found, expected):
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  for path, before in expected[1].items():
    np.testing.assert_array_equal(found[1][path], before)
    change = expected[2][path] - before
    limit = 2e-5 * np.abs(change).max() + 1e-7
    np.testing.assert_allclose(found[2][path] - before, change, rtol=0, atol=limit, err_msg=path_name(path))


@pytest.mark.slow_cases
@pytest.mark.parametrize('name, mesh', MESHES)
def test_a_step_on_a_mesh_is_that_of_one_device(name, mesh):
  assert_same_step(after_a_step(name, mesh), on_one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, mesh',
  [
    *(('lm', (2, 1, 2, 2)), ('lm', (2, 1, 3, 1)), ('experts', (2, 1, 2, 1))),
    *(('int4', (2, 1, 3, 1)), ('integers', (2, 1, 3, 1)), ('experts in nf4', (2, 1, 2, 1))),
    ('one shot', (2, 1, 2, 1)),
  ],
)
def test_in_a_pipeline(name, mesh):
  assert_same_step(after_a_step(name, mesh, stages=2), on_one_device(name))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['lm', 'experts', 'dora', 'ia3', 'int4', 'integers', 'experts in nf4', 'two of four'])
def test_explicit_collectives(name):
  assert_same_step(after_a_step(name, (1, 1, 3, 1), partitioning='shard_map'), on_one_device(name))
