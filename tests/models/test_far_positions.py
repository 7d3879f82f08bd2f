"""Positions beyond a table of learned positions, whose vectors would be NaN, are refused before any compilation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.inputs import (
  ArrayInput,
  CharTokenizer,
  MaskedTextInput,
  MixtureInput,
  SourceTargetInput,
  SpanCorruptionInput,
  TextInput,
)
from praxis_lite.instruments.explain import check
from praxis_lite.layers import LearnedPositions
from praxis_lite.models import DraftedModel, encoder_decoder, masked_language_model, sequence_classifier, transformer_lm
from praxis_lite.runs import run_train
from praxis_lite.runs.nonfinite import hints_in
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

MOST, LONG = 6, 9
SIZES = {'vocab_size': 300, 'model_dims': 4, 'num_layers': 1, 'num_heads': 1, 'max_len': MOST}


def models():
  lm = transformer_lm(**SIZES, style='gpt2')
  return {
    'lm': lm,
    'masked': masked_language_model(**SIZES),
    'bart': encoder_decoder(**SIZES, style='bart'),
    'drafted': Config(DraftedModel, model_tpl=lm, draft_tpl=lm.clone()),
  }


@functools.cache
def built(kind):
  return models()[kind].instantiate()


def packed_rows(longest, length=LONG, side=''):
  """Rows of several segments, of which one has `longest` tokens."""
  pos = np.array([[*range(length - longest), *range(longest)]] * 2, np.int32)
  ids = np.ones((2, length), np.int32)
  rows = {f'{side}ids': ids, f'{side}segment_ids': 1 + (np.arange(length) >= length - longest) * ids}
  return {**rows, f'{side}segment_pos': pos}


def batch_of(kind, longest, source=3):
  rows = packed_rows(longest)
  if kind == 'bart':
    rows |= packed_rows(source, side='source_')
  return {**rows, 'labels': rows['ids'], 'weights': np.ones(rows['ids'].shape, np.float32)}


FIELDS = {'lm': 'lm', 'masked': 'encoder', 'bart': 'lm', 'drafted': r'model\.lm'}


@pytest.mark.parametrize('kind', list(FIELDS))
def test_a_long_segment_is_refused_and_short_ones_in_a_long_row_are_not(kind):
  data = Config(ArrayInput, name='rows', arrays=batch_of(kind, MOST), batch_size=2).instantiate()
  built(kind).check_input(data, batch_of(kind, MOST))
  less = ', less first_position = 2,' if kind == 'bart' else ''
  told = rf"rows: .*task\.model\.{FIELDS[kind]}\.position_tpl\.max_len: \d{less} is less than .* in 'segment_pos'"
  with pytest.raises(ConfigError, match=rf'{told}, {MOST + 1}; set it to at least {MOST + 1 + 2 * (kind == "bart")}'):
    built(kind).check_input(data, batch_of(kind, MOST + 1))


def test_a_long_source_is_refused():
  data = Config(ArrayInput, arrays=batch_of('bart', 5), batch_size=2).instantiate()
  with pytest.raises(ConfigError, match=r"position_tpl\.max_len: .* 'source_segment_pos', 8; .* least 10"):
    built('bart').check_input(data, batch_of('bart', 5, source=8))


@pytest.mark.parametrize('kind', ['lm', 'masked', 'bart', 'classifier'])
def test_without_positions_the_length_of_the_row_counts(kind):
  model = sequence_classifier(num_classes=2, **SIZES) if kind == 'classifier' else models()[kind].set(packed=False)
  model = model.instantiate()
  assert kind == 'classifier' or not model.position_limits()
  batch = {**batch_of(kind, 2), 'label': np.zeros(2, np.int32)}
  if kind == 'classifier':
    batch['weights'] = np.ones(2, np.float32)
  variables = jax.eval_shape(model.init, jax.random.key(0))
  with pytest.raises(ConfigError, match=rf'position_tpl\.max_len: .* sequence length, {LONG}; set it to'):
    jax.eval_shape(model.apply, variables, batch)


def test_known_positions_are_refused_by_the_layer_and_others_are_nan():
  layer = Config(LearnedPositions, max_len=3, dims=2).instantiate()
  variables = drawn_variables(layer.abstract_init())
  with pytest.raises(
    ConfigError, match=r'LearnedPositions\.max_len: 3 is less than the number of positions in pos_BT, 4'
  ):
    layer.apply(variables, np.array([[0, 3]]))
  for fine in ([[0, 2, -1]], [[]]):
    assert jnp.isfinite(layer.apply(variables, np.array(fine, np.int32))[0]).all()
  traced = jax.jit(lambda pos: layer.apply(variables, pos)[0])(np.array([[2, 3]]))
  np.testing.assert_array_equal(np.isnan(traced).any(-1), [[False, True]])


# ---------------------------------------------------------------- what inputs know


@pytest.fixture
def texts(tmp_path):
  (tmp_path / 'text.txt').write_text('12345678\n' * 8 + 'a longer line\n')
  return str(tmp_path / 'text.txt')


def inputs_of(path):
  text = {'path': path, 'seq_len': 8, 'batch_size': 2}
  lines = {**text, 'document_separator': '\n'}
  pairs = [('ab', 'c'), ('a', 'b'), ('abcde', 'abcdefg')]
  return {
    'packed': Config(TextInput, **{**lines, 'seq_len': 20}, packing='packed'),
    'cut': Config(TextInput, **lines, packing='packed'),
    'concat': Config(TextInput, **text),
    'windows': Config(TextInput, **text, packing='windows', shuffle=True, num_epochs=1),
    'masked': Config(MaskedTextInput, **text),
    'masked packed': Config(MaskedTextInput, **lines, packing='packed'),
    'spans': Config(SpanCorruptionInput, **{**text, 'seq_len': 30}),
    'pairs': Config(SourceTargetInput, pairs=pairs, source_len=9, target_len=9, batch_size=2, packed=True),
    'mixture': Config(MixtureInput, inputs=[Config(TextInput, **text), Config(TextInput, **lines)], batch_size=2),
  }


@pytest.mark.parametrize('kind', list(inputs_of('')))
def test_the_longest_segment_is_the_longest_of_all_batches(kind, texts):
  data = inputs_of(texts)[kind].instantiate()
  found = data.longest_segments()
  batches = list(data)
  names = [name for name in batches[0] if name.endswith('segment_pos')]
  assert found == {name: 1 + max(int(batch[name].max()) for batch in batches) for name in names}


def test_a_segment_that_only_a_later_batch_has_is_refused(texts):
  data = inputs_of(texts)['packed'].set(name='lines', seq_len=14, batch_size=1).instantiate()
  batch = data.get_next()
  model = transformer_lm(**{**SIZES, 'max_len': 13}, style='gpt2').instantiate()
  assert int(batch['segment_pos'].max()) + 1 <= 13 < data.longest_segments()['segment_pos']
  with pytest.raises(ConfigError, match=r'^lines: task\.model\.lm\.position_tpl\.max_len: 13 is less than .*, 14'):
    model.check_input(data, batch)


# ---------------------------------------------------------------- runs


def task_of(kind, **settings):
  task = Config(SingleTask, model=models()[kind])
  task.train.set(num_train_steps=1, **settings)
  return task


@pytest.mark.slow
def test_training_evaluation_and_decoding_are_refused_before_they_begin(tmp_path):
  def pairs(source_len, **fields):
    pairs = [('a' * (source_len - 1), 'b')]
    return Config(SourceTargetInput, pairs=pairs, source_len=source_len, target_len=4, batch_size=1, **fields)

  short, long = pairs(MOST, is_training=True), pairs(LONG, name='long')
  for datasets, decoded, told in (
    ([pairs(LONG, is_training=True)], [], r'^datasets\[0\]: .*max_len: .*source_segment_pos'),
    ([short, long], [], r'^datasets\[1\]: long: .*max_len: .*source_segment_pos'),
    ([short], [long], r'^decode/long: .*max_len: .* sequence length, 9'),
  ):
    with pytest.raises(ConfigError, match=told):
      run_train(ExperimentConfig(task_of('bart', decode_interval_steps=1), datasets, decoded), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_check_warns_of_rows_longer_than_the_table():
  struct = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch_of('masked', 3))
  (found,) = [p for p in check(task_of('masked'), struct) if p.kind == 'rows longer than positions']
  assert (found.path, found.severity) == ('task.model.encoder.position_tpl.max_len', 'warning')
  assert f'segments of {MOST} tokens, and rows have {LONG}' in found.message and f'set it to {LONG}' in found.remedy


def test_a_trained_model_refuses_them_and_a_failed_step_names_them():
  task = task_of('lm').instantiate()
  tasks = TaskOnMesh(task, task.create_mesh(jax.devices()[:1]))
  model = TrainedModel(ExperimentConfig(task_of('lm'), [], []), tasks, {}, jnp.int32(0))
  for call in (model.predict, model.evaluate_examples):
    with pytest.raises(ConfigError, match=r"^lm\.position_tpl\.max_len: 6 is less than .*'segment_pos', 7"):
      call(batch_of('lm', MOST + 1))
  data = Config(ArrayInput, arrays=batch_of('lm', 2), batch_size=2).instantiate()
  hints = hints_in(batch_of('lm', MOST + 1), data, task.model)
  assert 'The last batch does not fit the model: ArrayInput: task.model.lm.position_tpl.max_len: 6' in hints.found


def test_tokens_of_characters_are_counted_not_bytes(tmp_path):
  (tmp_path / 'text.txt').write_text('ééé')
  path = str(tmp_path / 'text.txt')
  tokenizer = Config(CharTokenizer, path=path)
  data = Config(TextInput, path=path, seq_len=8, batch_size=1, packing='packed', tokenizer_tpl=tokenizer).instantiate()
  assert data.longest_segments() == {'segment_pos': 4}
