"""Runs with weights in few bits: made from a run, evaluated, exported, fine-tuned."""

from __future__ import annotations

import contextlib
import re

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite import Layer, WeightHParams
from praxis_lite.bridges.hf import export_run
from praxis_lite.bridges.hf.files import read_folder
from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.streamed import PART_BYTES, StreamedArray, boxes, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import CheckpointError, ConfigError, UserError
from praxis_lite.common.trees import leaves, leaves_by_path, merge, nest, node_at, select
from praxis_lite.experiments.lm import SyntheticLmTiny
from praxis_lite.instruments.explain.explanation import format_counts
from praxis_lite.instruments.explain.report import parameter_table
from praxis_lite.layers import Embedding, Linear, Lora, MoeFeedForward, QuantizedWeights
from praxis_lite.models import add_adapters, dequantize_variables, quantize_variables, quantize_weights, transformer_lm
from praxis_lite.models.adapters import adapter_paths
from praxis_lite.runs import open_run, run_train
from praxis_lite.runs.quantized import describe_unquantized, quantize_run
from praxis_lite.runs.quantized_arrays import dequantize_streamed, quantize_streamed
from praxis_lite.runs.records.record import read_record
from praxis_lite.runs.shared_scales import fold_input_scales
from praxis_lite.training import train_adapters, train_rewards
from praxis_lite.training.experiment import configure
from praxis_lite.training.state import TrainState


class InMemory(StreamedArray):
  def __init__(self, array):
    self.array, self.shape, self.dtype = array, array.shape, array.dtype

  def read(self, box):
    return np.array(self.array[box])


def in_parts(array, part_bytes):
  """The whole array, read in parts."""
  whole = np.zeros(array.shape, array.dtype)
  for box in boxes(whole_box(array.shape), array.part_shape(array.shape, part_bytes)):
    whole[box] = array.read(box)
  return whole


def lm(**fields):
  sizes = {'vocab_size': 7, 'model_dims': 18, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 5}
  return transformer_lm(**sizes, **fields)


RULES = (
  Config(QuantizedWeights, layers=r'.*\.(query|ff)', format='int4', group_size=4, symmetric=False),
  Config(QuantizedWeights, format='nf4', scale_dtype='bfloat16'),
)


SMALL_FLOATS = (
  Config(QuantizedWeights, layers=r'.*\.(query|ff)', format='nvfp4'),
  Config(QuantizedWeights, format='mxfp8'),
)


@pytest.mark.slow_cases
@pytest.mark.parametrize('rules, part_bytes', [(RULES, PART_BYTES), (RULES, 200), (SMALL_FLOATS, 200)])
def test_weights_are_converted_part_by_part(rules, part_bytes):
  experts = Config(MoeFeedForward, num_experts=3)
  plain, model = lm(experts=experts).instantiate(), quantize_weights(lm(experts=experts), *rules).instantiate()
  variables = drawn_variables(plain.abstract_init())
  streamed = quantize_streamed(model, _in_memory(variables))
  expected = quantize_variables(model, variables)
  for path, array in leaves_by_path(expected).items():
    found = leaves(streamed)[path]
    np.testing.assert_array_equal(in_parts(found, part_bytes), array)
  back = leaves(dequantize_streamed(model, _in_memory(expected)))
  for path, array in leaves_by_path(dequantize_variables(model, expected)).items():
    np.testing.assert_allclose(in_parts(back[path], part_bytes), array, atol=1e-6)


def _in_memory(tree):
  return {k: _in_memory(v) if isinstance(v, dict) else InMemory(np.asarray(v)) for k, v in tree.items()}


def test_scales_of_inputs_move_into_norms_with_biases():
  rule = Config(QuantizedWeights, layers=r'.*\.(query|key|value|up)', input_scale=True)
  gpt2 = lm(style='gpt2', max_len=8)
  model = quantize_weights(gpt2.clone(), rule).instantiate()
  variables = quantize_variables(model, drawn_variables(gpt2.instantiate().abstract_init()))
  for path, s in leaves_by_path(variables).items():
    if path[-1].endswith('input_scale'):
      node_at(variables, path[:-1])[path[-1]] = 1 + np.arange(36, dtype=np.float32).reshape(s.shape) / 20
  folded = leaves(fold_input_scales(model, _in_memory(variables)))
  folded = nest({path: x.read(whole_box(x.shape)) for path, x in folded.items()})
  assert all(np.all(x == 1) for path, x in leaves(folded).items() if path[-1].endswith('input_scale'))
  ids = np.arange(10).reshape(2, 5) % 7
  logits = [jax.jit(lambda v: model.lm.apply(v, ids, method='logits')[0])(v['lm']) for v in (folded, variables)]
  np.testing.assert_allclose(*logits, atol=2e-5)
  one_of_two = rule.clone(layers=r'.*\.(query|key)')
  model = quantize_weights(gpt2.clone(), one_of_two).instantiate()
  variables = quantize_variables(model, drawn_variables(gpt2.instantiate().abstract_init()))
  with pytest.raises(ConfigError, match=r'attention\.query\.w, .*key\.w: the scales of their inputs cannot be moved'):
    fold_input_scales(model, _in_memory(variables))


@pytest.mark.slow
def test_a_run_is_quantized_evaluated_exported_and_fine_tuned(tmp_path):
  config = configure(SyntheticLmTiny)
  config.task.train.set(num_train_steps=2, save_interval_steps=2, log_interval_steps=2)
  run_train(config, tmp_path / 'base')
  lines = quantize_run(config, tmp_path / 'base', tmp_path / 'int8', Config(QuantizedWeights))
  assert re.fullmatch(r'[0-9.]+ KiB of variables became [0-9.]+ KiB', lines[0])
  base, model = open_run(tmp_path / 'base').load(), open_run(tmp_path / 'int8').load()
  stored = model.variables['lm']['transformer']['layers']['attention']['query']
  assert stored['w'].dtype == np.int8 and model.step == 2
  np.testing.assert_allclose(model.evaluate('validation')['loss'], base.evaluate('validation')['loss'], rtol=2e-3)

  recorded = read_record(tmp_path / 'int8').config
  export_run(recorded, tmp_path / 'int8', tmp_path / 'exported')
  theirs = read_folder(tmp_path / 'exported')['model.layers.1.self_attn.q_proj.weight'].read_all()
  plain = dequantize_variables(model.layer, model.variables)['lm']['transformer']['layers']['attention']['query']['w']
  np.testing.assert_allclose(theirs, np.asarray(plain[1]).reshape(18, 18).T, atol=1e-6)

  with pytest.raises(ConfigError, match='has rules for its weights already'):
    quantize_run(recorded, tmp_path / 'int8', tmp_path / 'again', Config(QuantizedWeights))
  with pytest.raises(UserError, match='has checkpoints already'):
    quantize_run(config, tmp_path / 'base', tmp_path / 'int8', Config(QuantizedWeights))

  train_adapters(recorded.task, Config(Lora, rank=2))
  recorded.task.train.init_from.path = str(tmp_path / 'int8')
  recorded.task.ici_mesh_shape = (1, 3, 1)
  run_train(recorded, tmp_path / 'qlora')
  after = leaves(open_run(tmp_path / 'qlora').load().variables)
  for path, value in leaves(model.variables).items():
    np.testing.assert_array_equal(after[path], value)

  unlike = configure(SyntheticLmTiny)
  quantize_weights(unlike.task.model, Config(QuantizedWeights))
  unlike.task.train.init_from.path = str(tmp_path / 'base')
  with pytest.raises(CheckpointError, match='praxis-lite quantize'):
    run_train(unlike, tmp_path / 'unlike')


def test_matrices_of_own_layers_are_named():
  """Not vectors, not what is quantized, and not the embeddings and the softmax of the package."""

  class Own(Layer):
    def setup(self):
      for name in ('a', 'b', 'c', 'd'):
        self.create_variable(name, WeightHParams((2, 3)))
      self.create_variable('vector', WeightHParams((3,)))
      self.create_child('linear', Config(Linear, input_dims=2, output_dims=3))
      self.create_child('embedding', Config(Embedding, num_classes=2, input_dims=3))

  (line,) = describe_unquantized(Config(Own).instantiate())
  assert line.startswith('not quantized: a, b, c and 1 more, which layers of your own declare; ')
  assert describe_unquantized(quantize_weights(lm(), Config(QuantizedWeights, format='int4')).instantiate()) == []


def test_a_run_without_rules_for_training_needs_a_format(tmp_path):
  with pytest.raises(ConfigError, match='name a format, as in --format=int4'):
    quantize_run(configure(SyntheticLmTiny), tmp_path / 'base', tmp_path / 'int8')


@pytest.mark.slow
def test_a_run_with_moving_averages_is_quantized_and_loaded(tmp_path):
  config = configure(SyntheticLmTiny)
  config.task.train.learner.ema_decay = 0.9
  task = config.task.instantiate()
  variables = drawn_variables(task.model.abstract_init())
  averages = drawn_variables(task.model.abstract_init(), seed=1)
  with contextlib.closing(Checkpointer(tmp_path / 'base')) as checkpointer:
    state = TrainState(np.int32(3), variables, None, averages)
    checkpointer.save(3, state, jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), state), None)
  quantize_run(config, tmp_path / 'base', tmp_path / 'int8', Config(QuantizedWeights))
  model = open_run(tmp_path / 'int8').load()
  for path, expected in leaves(quantize_variables(model.layer, averages)).items():
    np.testing.assert_array_equal(leaves(model.variables)[path], expected)


def test_rules_that_do_nothing():
  for rules, message in (
    ([Config(QuantizedWeights, layers=())], r'layers: \(\) names no layer; None selects all'),
    ([Config(QuantizedWeights), RULES[0]], r'quantized\[1\]: it does nothing'),
    ([Config(QuantizedWeights), Config(QuantizedWeights)], r'quantized\[1\]: it does nothing'),
    ([Config(QuantizedWeights, layers='(')], r"quantized\[0\].layers: '\(' is not a regular expression"),
  ):
    with pytest.raises(ConfigError, match=message):
      quantize_weights(lm(), *rules).instantiate()


def test_weights_in_few_bits_count_like_plain_ones():
  plain, model = (m.instantiate() for m in (lm(), quantize_weights(lm(), *RULES)))
  assert model.total_num_params == plain.total_num_params == plain.active_num_params == model.active_num_params
  assert str(model).splitlines()[0] == str(plain).splitlines()[0]
  config = configure(SyntheticLmTiny)
  texts = []
  for rules in ((), RULES[1:]):
    quantize_weights(config.task.model, *rules)
    task = config.task.instantiate()
    texts.append(format_counts(parameter_table(task, task.mesh_sizes())).partition(' parameters')[0])
  assert texts[0] == texts[1] and int(texts[0].replace(',', ''))


def test_the_head_of_a_reward_model_on_weights_in_few_bits_is_trained():
  config = configure(SyntheticLmTiny)
  quantize_weights(config.task.model, Config(QuantizedWeights))
  train_adapters(config.task, Config(Lora, rank=2))
  task = train_rewards(config.task).instantiate()
  weights, learner = leaves(task.model.abstract_init()), task.bind_learner()
  assert all(np.dtype(weights[path].dtype) == np.float32 for path in weights if path[0] == 'head')
  assert learner.is_trained(('head', 'w'))
  config.task.train.learner.bprop_variable_inclusion = r'lm\..*query\.w'
  with pytest.raises(ConfigError, match=r'names only variables that cannot be trained, such as lm\..*query\.w'):
    config.task.instantiate().bind_learner()


@pytest.mark.slow
def test_gradients_of_adapters_are_those_on_the_dequantized_weights():
  adapted = add_adapters(lm(), Config(Lora, rank=2))
  plain, model = adapted.clone().instantiate(), quantize_weights(adapted, *RULES).instantiate()
  drawn = drawn_variables(plain.abstract_init())
  few = quantize_variables(model, drawn)
  paths = adapter_paths(model)
  adapters = select(drawn, paths.__contains__)
  ids = np.arange(10, dtype=np.int32).reshape(2, 5) % 7
  batch = {'ids': ids, 'labels': ids[:, ::-1], 'weights': np.ones((2, 5), np.float32)}

  def gradients(layer, variables):
    def loss(trained):
      (metrics, _), _ = layer.apply(merge(variables, trained), batch)
      return metrics['loss'][0]

    return leaves(jax.jit(jax.grad(loss))(adapters))

  found, expected = gradients(model, few), gradients(plain, dequantize_variables(model, few))
  assert found.keys() == paths and max(np.abs(x).max() for x in expected.values()) > 1e-3
  for path, gradient in expected.items():
    np.testing.assert_allclose(found[path], gradient, atol=1e-5, rtol=1e-5, err_msg=str(path))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['float', 'int4'])
def test_a_run_with_masks_that_are_renewed_is_stored_with_its_zeros(name, tmp_path):
  config = configure(SyntheticLmTiny)
  config.task.train.set(num_train_steps=4, save_interval_steps=2, log_interval_steps=4)
  rule = Config(QuantizedWeights, format=name, kept=(2, 4), trained=True, num_shots=2, target_step=2)
  quantize_weights(config.task.model, rule)
  run_train(config, tmp_path / 'few')
  with pytest.raises(ConfigError, match=r'step 2: training chooses the kept weights of .* in step 2 .* a later one'):
    quantize_run(read_record(tmp_path / 'few').config, tmp_path / 'few', tmp_path / 'stored', step=2)
  quantize_run(read_record(tmp_path / 'few').config, tmp_path / 'few', tmp_path / 'stored')
  few, stored = open_run(tmp_path / 'few').load(), open_run(tmp_path / 'stored').load()
  np.testing.assert_allclose(stored.evaluate('validation')['loss'], few.evaluate('validation')['loss'], rtol=1e-5)
  query = few.variables['lm']['transformer']['layers']['attention']['query']
  assert np.any(query['w'][query['w_sparsity_mask'] == 0])
  export_run(read_record(tmp_path / 'few').config, tmp_path / 'few', tmp_path / 'exported')
  theirs = read_folder(tmp_path / 'exported')['model.layers.1.self_attn.q_proj.weight'].read_all()
  assert not np.any(theirs.T[np.asarray(query['w_sparsity_mask'][1]).reshape(18, 18) == 0])
