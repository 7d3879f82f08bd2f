"""Encoder-decoders: what the loss is, what packing and padding may change, how targets are decoded, on any mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from encoder_decoder_cases import B, S, T, V, config, packed_batch
from model_steps import AXES, assert_close, loss_and_gradients, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import path_name
from praxis_lite.inputs import ArrayInput, CharTokenizer, SourceTargetInput
from praxis_lite.models import encoder_decoder, set_sharding
from praxis_lite.models.labels import check_ids_in_tables
from praxis_lite.runs.export import ExportSettings, check_export, export_model
from praxis_lite.runs.exported import load_for_jax
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

STYLES = ('t5', 't5_v1_0', 'classical', 'bart')


@functools.cache
def make(style='t5'):
  """A model, and variables that are not nearly constant functions."""
  model = config(style).instantiate()
  return model, jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def apart(batch):
  """The pairs of packed rows, one in each row, as the model reads them without numbers of segments."""
  pairs = [(b, s) for b in range(B) for s in range(1, batch['segment_ids'][b].max() + 1)]
  out = {}
  for name in ('source_ids', 'ids', 'labels', 'weights'):
    segments = batch['source_segment_ids' if name == 'source_ids' else 'segment_ids']
    out[name] = np.zeros((len(pairs), segments.shape[1]), batch[name].dtype)
    for row, (b, s) in enumerate(pairs):
      values = batch[name][b, segments[b] == s]
      out[name][row, : len(values)] = values
  lengths = [np.sum(batch['source_segment_ids'][b] == s) for b, s in pairs]
  return out | {'source_lengths': np.array(lengths, np.int32)}


# ------------------------------------------------------------------ the loss


@pytest.mark.slow
@pytest.mark.parametrize('style', STYLES)
def test_packed_pairs_train_like_pairs_apart(style):
  model, variables = make(style)
  expected = loss_and_gradients(config(style).set(packed=False).instantiate(), variables, apart(packed_batch()))
  assert_close(loss_and_gradients(model, variables, packed_batch()), expected)


@pytest.mark.slow
def test_the_loss_is_the_mean_cross_entropy_of_the_labels_given_the_tokens_before_them():
  model, variables = make()
  batch = apart(packed_batch())
  (metrics, outputs), _ = model.apply(variables, batch, do_eval=True)
  logits = np.asarray(model.apply(variables, batch, do_eval=True, method='predict')[0]['logits'], np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  losses = -np.take_along_axis(log_probs, batch['labels'][..., None], -1)[..., 0]
  weights = batch['weights']
  np.testing.assert_allclose(metrics['loss'], ((losses * weights).sum() / weights.sum(), weights.sum()), rtol=1e-5)
  correct = logits.argmax(-1) == batch['labels']
  np.testing.assert_allclose(metrics['accuracy'][0], (correct * weights).sum() / weights.sum(), rtol=1e-6)
  assert outputs['loss'].shape == (len(weights),)
  scores, _ = model.apply(variables, batch, do_eval=True, method='score')
  np.testing.assert_allclose(scores['log_probs'], -losses, atol=1e-5)
  # A label depends on the tokens before it, not on later ones, and on all of the source.
  for name, at, changed in (('ids', 3, range(3, 5)), ('source_ids', 6, range(5))):
    other = {**batch, name: batch[name].copy()}
    other[name][3, at] = (other[name][3, at] + 1) % V
    new = np.asarray(model.apply(variables, other, do_eval=True, method='predict')[0]['logits'])
    differs = np.abs(new - logits)[3].max(-1) > 1e-6
    assert np.flatnonzero(differs[:5]).tolist() == list(changed)


@pytest.mark.slow
@pytest.mark.parametrize('padding', [-1, 1000])
def test_padding_may_be_any_id_on_both_sides(padding):
  model, variables = make()
  known = packed_batch()
  other = {**known}
  for name, segments in (('source_ids', 'source_segment_ids'), ('ids', 'segment_ids'), ('labels', 'segment_ids')):
    if padding < 0 or name == 'source_ids':
      other[name] = np.where(known[segments] == 0, padding, known[name]).astype(np.int32)
  assert_close(loss_and_gradients(model, variables, other), loss_and_gradients(model, variables, known), 1e-7)


@pytest.mark.slow
def test_dropout_is_for_training_only():
  model, variables = config(dropout=0.5).instantiate(), make()[1]
  batch = packed_batch()
  first, other = (
    loss_and_gradients(model, variables, batch, key=jax.random.key(seed), do_eval=False)[0] for seed in (0, 1)
  )
  assert abs(first - other) > 1e-3
  expected = loss_and_gradients(make()[0], variables, batch, do_eval=True)[0]
  np.testing.assert_allclose(loss_and_gradients(model, variables, batch, do_eval=True)[0], expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('style', STYLES[:3])
def test_bfloat16_computes_near_float32_from_float32_weights(style):
  variables = drawn_variables(make(style)[0].abstract_init())
  half = config(style, fprop_dtype=jnp.bfloat16).instantiate()
  assert {w.dtype for w in jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0)))} == {jnp.dtype('float32')}
  expected = loss_and_gradients(make(style)[0], variables, packed_batch())[0]
  found, gradients = loss_and_gradients(half, variables, packed_batch())
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, expected, rtol=0.02)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_logits_of_attention_vary_by_about_one_at_first():
  """T5 does not scale them, so its weights begin smaller."""
  model = encoder_decoder(vocab_size=V, model_dims=64, num_layers=1, num_heads=4, dims_per_head=32).instantiate()
  attention = model.init(jax.random.key(0))['lm']['encoder']['layers']['attention']
  x = np.random.default_rng(0).standard_normal((50, 64))
  query, key, value = (np.einsum('td,dnh->tnh', x, attention[name]['w'][0]) for name in ('query', 'key', 'value'))
  assert 0.8 < np.std(np.einsum('tnh,snh->nts', query, key)) < 1.25
  assert 0.8 < np.std(np.einsum('tnh,nhd->td', value, attention['out']['w'][0])) < 1.25


# ------------------------------------------------------------------ meshes


def after_a_step(style, mesh=None, **fields):
  """The loss, and the variables after a step of SGD with rate 1, so all gradients."""
  model = set_sharding(config(style, remat='full' if mesh else 'none'))
  return take_a_step(model, packed_batch(), mesh, **fields)


@functools.cache
def on_one_device(style):
  return after_a_step(style)


ON_MESHES = [
  ((1, 2, 2, 2), {}),
  ((2, 1, 2, 2), {}),  # An axis that nothing uses.
  ((2, 1, 3, 1), {}),
  ((1, 1, 2, 3), {}),
  ((1, 1, 3, 1), {'partitioning': 'shard_map'}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
  'style, mesh, fields',
  [(style, *case) for style in STYLES for case in (ON_MESHES if style != 'bart' else ON_MESHES[3:4])],
  ids=str,
)
def test_a_step_on_a_mesh_that_divides_nothing_is_that_of_one_device(style, mesh, fields):
  (loss, variables), (expected, one) = after_a_step(style, mesh, **fields), on_one_device(style)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  for path, value in one.items():
    np.testing.assert_allclose(
      variables[path], value, rtol=0, atol=1e-5 * (1 + np.abs(value).max()), err_msg=path_name(path)
    )


# ------------------------------------------------------------------ decoding


def sources():
  batch = apart(packed_batch())
  keep = {name: batch[name][:4] for name in ('source_ids', 'source_lengths')}
  return keep | {'source_lengths': np.where(np.arange(4) == 1, 0, keep['source_lengths']).astype(np.int32)}


def decode(model, variables, batch, seed=0):
  run = jax.jit(lambda v, b, key: model.apply(v, b, key=key, do_eval=True, method='decode')[0])
  return jax.tree.map(np.asarray, run(variables, batch, jax.random.key(seed)))


@functools.cache
def _predict(model):
  return jax.jit(lambda v, b: model.apply(v, b, do_eval=True, method='predict')[0]['logits'])


def check_row(model, variables, decoded, data, row, prompt=(), context=99, is_greedy=True):
  """Checks each token of a row against logits of one pass over those before it."""
  ids = [4, *prompt]
  for token, log_prob in zip(decoded['ids'][row], decoded['log_probs'][row]):
    seen = ids[-context:]
    one = {name: data[name][row : row + 1] for name in ('source_ids', 'source_lengths')}
    one |= {'ids': np.zeros((1, 16), np.int32), 'weights': np.ones((1, 16), np.float32)}
    one['ids'][0, : len(seen)] = seen
    logits = np.asarray(_predict(model)(variables, one), np.float64)[0, len(seen) - 1]
    log_probs = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(log_prob, log_probs[token], atol=1e-4)
    assert not is_greedy or token == logits.argmax()
    ids.append(token)


@pytest.mark.slow_cases
@pytest.mark.parametrize('style', STYLES)
def test_greedy_tokens_are_those_of_one_pass(style):
  model, variables = make(style)
  metrics, decoded = decode(model, variables, sources())
  assert decoded['lengths'].tolist() == [6, 0, 6, 6]
  assert not decoded['ids'][1].any() and metrics['decoded_length'] == (6, 3)
  for row in (0, 2, 3):
    check_row(model, variables, decoded, sources(), row)
  assert np.abs(np.diff(decoded['log_probs'][[0, 2, 3]], axis=0)).min() > 1e-5  # They depend on the source.


@pytest.mark.slow
def test_more_layers_than_are_decoded_one_by_one():
  """A loop over layers carries the caches of all, those of the sources too."""
  model = config(num_layers=6).instantiate()
  variables = jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))
  _, decoded = decode(model, variables, sources())
  for row in (0, 2, 3):
    check_row(model, variables, decoded, sources(), row)


@pytest.mark.slow
@pytest.mark.parametrize('fields', [{'temperature': 0.8, 'top_k': 7}, {'temperature': 1.5, 'top_p': 0.9}], ids=str)
def test_sampled_tokens_have_the_log_probs_of_the_model(fields):
  p = config()
  p.decoder_tpl.set(**fields)
  model, variables = p.instantiate(), make()[1]
  _, decoded = decode(model, variables, sources())
  for row in (0, 2, 3):
    check_row(model, variables, decoded, sources(), row, is_greedy=False)
  again, other = (decode(model, variables, sources(), seed)[1]['ids'] for seed in (0, 1))
  np.testing.assert_array_equal(again, decoded['ids'])
  assert not np.array_equal(other, again)


@pytest.mark.slow
def test_targets_continue_given_beginnings():
  model, variables = make()
  beginnings = np.array([[3, 5, 1], [1, 1, 1], [2, 0, 0], [7, 7, 0]], np.int32)
  lengths = np.array([3, 2, 0, 1], np.int32)
  _, decoded = decode(model, variables, sources() | {'ids': beginnings, 'prompt_lengths': lengths})
  assert decoded['lengths'].tolist() == [6, 0, 6, 6]
  for row in (0, 2, 3):
    check_row(model, variables, decoded, sources(), row, beginnings[row, : lengths[row]].tolist())


@pytest.mark.slow
def test_prompts_without_sources_are_the_sources():
  """So `decode` of a run writes a target for each prompt; padding of prompts may be any id."""
  model, variables = make()
  data = sources()
  past = np.arange(S) >= data['source_lengths'][:, None]
  prompts = np.where(past, 1000, data['source_ids']).astype(np.int32)
  _, expected = decode(model, variables, data)
  _, found = decode(model, variables, {'ids': prompts, 'prompt_lengths': data['source_lengths']})
  jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.slow
def test_prompts_end_as_sources_of_the_training_data_do():
  model, variables = config().set(source_end_id=9).instantiate(), make()[1]
  data = sources()
  ended = {'source_ids': np.pad(data['source_ids'], ((0, 0), (0, 1))), 'source_lengths': data['source_lengths'] + 1}
  ended['source_ids'][np.arange(4), data['source_lengths']] = 9
  ended['source_lengths'][1] = 0
  _, expected = decode(model, variables, ended)
  _, found = decode(model, variables, {'ids': data['source_ids'], 'prompt_lengths': data['source_lengths']})
  np.testing.assert_array_equal(found['ids'], expected['ids'])
  _, without = decode(make()[0], variables, {'ids': data['source_ids'], 'prompt_lengths': data['source_lengths']})
  assert np.abs(without['log_probs'] - found['log_probs']).max() > 1e-3
  assert model.score_limits().source_end_id == 9


@pytest.mark.slow
def test_a_limited_context_starts_again_from_the_source():
  p = config()
  p.decoder_tpl.max_context = 3
  model, variables = p.instantiate(), make()[1]
  _, decoded = decode(model, variables, sources())
  for row in (0, 2, 3):
    check_row(model, variables, decoded, sources(), row, context=3)


@pytest.mark.slow
def test_a_stop_token_ends_a_target_and_exact_matches_are_counted():
  model, variables = make()
  _, decoded = decode(model, variables, sources())
  stop = int(decoded['ids'][0, 2])
  p = config()
  p.decoder_tpl.stop_ids = (stop,)
  ends = [list(row).index(stop) + 1 if stop in row else 6 for row in decoded['ids']]
  batch = sources() | {'labels': np.zeros((4, T), np.int32), 'weights': np.zeros((4, T), np.float32)}
  for row in (0, 2, 3):
    batch['labels'][row, : ends[row]] = decoded['ids'][row, : ends[row]]
    batch['weights'][row, : ends[row]] = 1
  batch['labels'][2, 0] += 1  # Not the token that is decoded.
  batch['weights'][3, ends[3]] = 1  # A label more than what is decoded.
  metrics, found = decode(p.instantiate(), variables, batch)
  assert found['lengths'].tolist() == [ends[0], 0, ends[2], ends[3]]
  assert found['exact_match'].tolist() == [True, True, False, False]
  np.testing.assert_allclose(metrics['exact_match'], (1 / 3, 3), rtol=1e-6)


@pytest.mark.slow
def test_of_packed_rows_the_first_source_is_decoded():
  model, variables = make()
  batch = packed_batch()
  first = {'source_ids': batch['source_ids'], 'source_lengths': (batch['source_segment_ids'] == 1).sum(1)}
  _, expected = decode(model, variables, first)
  _, found = decode(model, variables, batch)
  np.testing.assert_array_equal(found['ids'], expected['ids'])


@pytest.mark.slow
def test_numbers_of_segments_are_ignored_if_rows_are_not_packed():
  model, variables, batch = config().set(packed=False).instantiate(), make()[1], sources()
  _, expected = decode(model, variables, batch)
  numbers = np.where(np.arange(S) < batch['source_lengths'][:, None], [[2], [1], [3], [1]], 0).astype(np.int32)
  numbers[0, :2] = 1  # One source all the same.
  segments = np.full((4, 6), 2, np.int32)
  weights = (np.arange(6) < expected['lengths'][:, None]).astype(np.float32)
  labels = {'labels': expected['ids'], 'weights': weights, 'segment_ids': segments}
  metrics, found = decode(
    model, variables, {'source_ids': batch['source_ids'], 'source_segment_ids': numbers, **labels}
  )
  np.testing.assert_array_equal(found['ids'], expected['ids'])
  np.testing.assert_allclose(metrics['exact_match'], (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 2, 2, 2), (2, 1, 3, 1)], ids=str)
def test_tokens_on_a_mesh_are_those_of_one_device(mesh):
  model = set_sharding(config())
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  batch = sources() | {'weights': np.ones(4, np.float32)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  variables = make()[1]
  out = partitioned.decode_step(partitioned.pad(variables), jax.random.key(0), np.int32(0), batch)
  _, expected = decode(make()[0], variables, sources())
  np.testing.assert_array_equal(np.asarray(out.decoded['ids'])[:4], expected['ids'])


# ------------------------------------------------------------------ mistakes


def test_mistakes_are_named():
  model, variables = make()
  batch = packed_batch()
  rows = ArrayInput(name='pairs', arrays={'ids': np.zeros((2, 3), np.int32)}, batch_size=2)
  with pytest.raises(ConfigError, match=r'pairs: an encoder-decoder needs source_ids, .* this one has ids, labels'):
    model.check_input(rows, {name: batch[name] for name in ('ids', 'labels', 'weights')})
  for bad in (-1, V):
    other = {**batch, 'source_ids': np.where(np.arange(S) == 1, bad, batch['source_ids'])}
    with pytest.raises(
      ConfigError, match=rf"pairs: found {bad} in 'source_ids', .* must be from 0 to 12, or be padding"
    ):
      model.check_input(rows, other)
  padded = {**batch, 'source_ids': np.where(batch['source_segment_ids'] == 0, -1, batch['source_ids'])}
  model.check_input(rows, padded)
  by_length = apart(batch)
  past = np.arange(S) >= by_length['source_lengths'][:, None]
  for value in (-1, V):
    filled = {**by_length, 'source_ids': np.where(past, value, by_length['source_ids'])}
    model.check_input(rows, filled)
    check_ids_in_tables(model.id_limits(), filled)
    bad = {**filled, 'source_ids': np.where(np.arange(S) == 0, value, filled['source_ids'])}
    with pytest.raises(ConfigError, match=rf"pairs: found {value} in 'source_ids'"):
      model.check_input(rows, bad)
    with pytest.raises(DataError, match=rf'^source_ids {value}: the vocabulary of the model has ids 0 to 12'):
      check_ids_in_tables(model.id_limits(), bad)
  pairs = Config(SourceTargetInput, name='pairs', pairs=[('a', 'b')], source_len=3, target_len=3, batch_size=1)
  pairs.tokenizer_tpl = Config(CharTokenizer, vocabulary='abcd')
  assert model.check_input(pairs.instantiate(), pairs.instantiate().get_next()) is None
  for fields, says in (
    ({'start_id': 3}, r'pairs: its targets begin after token 3 .* but task\.model\.start_id is 4'),
    ({'end_sources': True}, r'pairs: token 4 ends its sources, but task\.model\.source_end_id is None, .* to 4'),
  ):
    other = pairs.clone().set(**fields).instantiate()
    with pytest.raises(ConfigError, match=says):
      model.check_input(other, other.get_next())
  with pytest.raises(ConfigError, match='the batch has no source_ids'):
    model.apply(variables, {name: batch[name] for name in ('ids', 'labels', 'weights')})
  with pytest.raises(ConfigError, match=r"style: expected 't5', 't5_v1_0', 'classical' or 'bart', got 'bert'"):
    config('bert')


# ------------------------------------------------------------------ export


def check_export_of(model, directory, **fields):
  check_export(model, directory, ExportSettings('decode', ('stablehlo',), **fields))


@pytest.mark.slow
def test_exported_programs_decode_the_same_tokens(tmp_path):
  """For any number of rows, with an end of sources that is added."""
  model, variables = config().set(source_end_id=9).instantiate(), make()[1]
  settings = ExportSettings('decode', ('stablehlo',), prompt_length=S, max_tokens=6, platforms=('cpu',))
  programs = load_for_jax(
    export_model(model, jax.tree.map(np.asarray, variables), tmp_path / 'out', dict, settings, {})
  )
  assert 'positions` (1 for the first' in (tmp_path / 'out' / 'README.md').read_text()
  data = sources()
  _, expected = decode(model, variables, {'ids': data['source_ids'], 'prompt_lengths': data['source_lengths']})
  for rows in ([0, 2, 3], [3]):
    out = programs['prefill']({'ids': data['source_ids'][rows], 'lengths': data['source_lengths'][rows]})
    for i in range(6):
      tokens = np.asarray(out['logits']).argmax(-1).astype(np.int32)
      np.testing.assert_array_equal(tokens, expected['ids'][rows, i])
      caches = {name: x for name, x in out.items() if name != 'logits'}
      if i < 5:
        out = programs['decode_step']({'ids': tokens, 'positions': np.full(len(rows), i + 1, np.int32), **caches})


def test_sources_and_targets_that_are_too_long_are_not_exported(tmp_path):
  model = config('bart', max_len=8).set(source_end_id=9).instantiate()
  with pytest.raises(ConfigError, match=r'prompt_length: the sources of 8 tokens are longer .* at most 7'):
    check_export_of(model, tmp_path, prompt_length=8)
  with pytest.raises(ConfigError, match=r'max_tokens: targets of 9 tokens need as many positions, .* at most 8'):
    check_export_of(model, tmp_path, prompt_length=7, max_tokens=9)
  check_export_of(model, tmp_path, prompt_length=7)
