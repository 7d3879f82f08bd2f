"""Beam search with transformers: every kind of state is reordered, encoder-decoders are searched, and on any mesh."""

from __future__ import annotations

import functools
import itertools
from typing import ClassVar

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.layers import CrossAttention, PipelinedTransformer, StackedTransformer
from praxis_lite.models import encoder_decoder, set_pipeline, set_sharding, transformer_lm
from praxis_lite.models.decoding import BeamSearch, FlatBeamSearch, beam_rows
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

AXES = ('spare', 'replica', 'data', 'mdl')
MESHES = [(1, 2, 2, 2), (2, 1, 3, 1)]
V, M, ALPHA, STOP = 4, 3, 0.6, 1
PROMPTS = {
  'ids': np.random.default_rng(0).integers(0, V, (4, 5)).astype(np.int32),
  'prompt_lengths': np.array([2, 5, 0, 1], np.int32),
}


def config(beam_size=V**M, num_best=8, num_layers=2, max_decode_steps=M, **fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_heads': 3, 'hidden_dims': 10, 'num_layers': num_layers}
  model = transformer_lm(**sizes, **fields)
  search = {'beam_size': beam_size, 'num_best': num_best, 'max_decode_steps': max_decode_steps}
  model.decoder_tpl = Config(BeamSearch, length_penalty=ALPHA, stop_ids=(STOP,), **search)
  return model


def windows(**fields):
  model = config(num_layers=6, **fields)
  model.lm_tpl.transformer_tpl.sliding_windows = (3, None)
  return model


def make(model):
  model = model.instantiate()
  return model, jax.tree.map(lambda w: 5 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def decode(model, variables, batch):
  run = jax.jit(lambda v, b: model.apply(v, b, do_eval=True, method='decode')[0])
  return jax.tree.map(np.asarray, run(variables, batch))


def log_probs_of(model, variables, rows, prefix=None):
  """Log-probabilities [rows, T, V] of one pass over rows of tokens."""
  batch = {'ids': np.array(rows, np.int32), 'weights': np.ones(np.shape(rows), np.float32)}
  if prefix is not None:
    batch['prefix_lengths'] = np.full(len(rows), prefix, np.int32)
  return log_softmax(_predict(model)(variables, batch))


@functools.cache
def _predict(model):
  return jax.jit(lambda v, b: model.apply(v, b, do_eval=True, method='predict')[0]['logits'])


def log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def best_by_hand(log_probs, prompt_length):
  """The best complete continuations of a prompt, given the log-probabilities of all that have M tokens."""
  found = {}
  for ids, log_probs_TV in zip(itertools.product(range(V), repeat=M), log_probs):
    length = ids.index(STOP) + 1 if STOP in ids else M
    total = sum(log_probs_TV[prompt_length - 1 + i, ids[i]] for i in range(length))
    found[ids[:length]] = total / ((5 + length) / 6) ** ALPHA
  return sorted(found.items(), key=lambda pair: -pair[1])


KINDS = {
  'each layer has a state': config,
  'a loop over layers': lambda: config(num_layers=6),
  'rings and all in a loop': windows,
  'stages of a pipeline': lambda: set_pipeline(config(num_layers=4), num_stages=2, num_microbatches=2, stage_axis=None),
  'a prefix-LM': lambda: config().set(model_type='prefix'),
}


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', KINDS)
def test_the_search_is_exhaustive(kind):
  model, variables = make(KINDS[kind]())
  metrics, decoded = decode(model, variables, PROMPTS)
  assert metrics['decoded_length'][1] == 3
  every = list(itertools.product(range(V), repeat=M))
  for row, length in enumerate(PROMPTS['prompt_lengths']):
    if not length:
      assert not decoded['lengths'][row] and not decoded['beam_lengths'][row].any()
      continue
    prompt = tuple(PROMPTS['ids'][row, :length])
    # One width for all prompts, so that one program computes them.
    rows = [(*prompt, *ids[:-1], *[0] * (5 - length)) for ids in every]
    prefix = length if kind == 'a prefix-LM' else None
    expected = best_by_hand(log_probs_of(model, variables, rows, prefix), length)[:8]
    for n, (ids, score) in enumerate(expected):
      assert tuple(decoded['beam_ids'][row, n, : decoded['beam_lengths'][row, n]]) == ids
      np.testing.assert_allclose(decoded['beam_scores'][row, n], score, atol=1e-4)


@pytest.mark.slow
def test_pages_of_caches_are_reordered_as_whole_states_are(monkeypatch):
  """Some layers have rings, and others several pages; prompts are of different lengths."""
  fields = {'beam_size': 3, 'num_best': 3, 'max_decode_steps': 92}
  model, variables = make(windows(**fields))
  _, found = decode(model, variables, PROMPTS)
  monkeypatch.setattr(beam_rows, '_find_pages', lambda state: ())
  _, expected = decode(make(windows(**fields))[0], variables, PROMPTS)
  np.testing.assert_array_equal(found['beam_ids'], expected['beam_ids'])
  np.testing.assert_allclose(found['beam_log_probs'], expected['beam_log_probs'], atol=1e-5)
  for row, length in enumerate(PROMPTS['prompt_lengths'][:2]):
    n = int(found['beam_lengths'][row].argmax())
    ids = found['beam_ids'][row, n, : found['beam_lengths'][row, n]]
    whole = [*PROMPTS['ids'][row, :length], *ids]
    padded = [whole + [0] * (97 - len(whole))]
    log_probs = log_probs_of(model, variables, padded)[0, length - 1 : len(whole) - 1]
    found_log_probs = found['beam_log_probs'][row, n, : len(ids)]
    np.testing.assert_allclose(found_log_probs, log_probs[np.arange(len(ids)), ids], atol=1e-4)


@pytest.mark.slow
def test_bfloat16_and_a_short_context_search_like_rows_alone():
  fields = {'beam_size': 3, 'num_best': 2, 'max_decode_steps': 9}
  model = config(**fields, fprop_dtype='bfloat16')
  model.decoder_tpl.max_context = 4
  model, variables = make(model)
  _, decoded = decode(model, variables, PROMPTS)
  assert decoded['beam_scores'].dtype == np.float32 and np.isfinite(decoded['beam_scores'][[0, 1, 3]]).all()
  for row in (0, 1):
    _, alone = decode(model, variables, {name: x[row : row + 1] for name, x in PROMPTS.items()})
    np.testing.assert_array_equal(alone['beam_ids'][0], decoded['beam_ids'][row])


def on_mesh(model, mesh, batch, variables, **fields):
  task = Config(SingleTask, model=set_sharding(model), mesh_axis_names=AXES, ici_mesh_shape=mesh, **fields)
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  batch = batch | {'weights': np.ones(4, np.float32)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  out = partitioned.decode_step(partitioned.pad(variables), jax.random.key(0), np.int32(0), batch)
  return jax.tree.map(lambda x: np.asarray(x)[:4], out.decoded)


def check_same(found, expected):
  np.testing.assert_array_equal(found['beam_ids'], expected['beam_ids'])
  np.testing.assert_allclose(found['beam_scores'], expected['beam_scores'], atol=1e-4)
  np.testing.assert_allclose(found['beam_log_probs'], expected['beam_log_probs'], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_a_mesh_searches_like_one_device(mesh):
  fields = {'beam_size': 3, 'num_best': 3, 'max_decode_steps': 6}
  model, variables = make(windows(**fields))
  check_same(on_mesh(windows(**fields), mesh, PROMPTS, variables), decode(model, variables, PROMPTS)[1])


@pytest.mark.slow
@pytest.mark.parametrize('partitioning', ['auto', 'shard_map'])
def test_int8_caches_and_groups_are_searched_on_a_mesh_as_on_one_device(partitioning):
  def quantized():
    model = config(beam_size=4, num_best=3, max_decode_steps=5)
    model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.cache_dtype = 'int8'
    model.decoder_tpl.set(num_groups=2, diversity_penalty=0.7)
    return model

  model, variables = make(quantized())
  _, expected = decode(model, variables, PROMPTS)
  # The log-probabilities are those of the model without a cache, up to the rounding of int8.
  ids, length = expected['beam_ids'][1, 0], expected['beam_lengths'][1, 0]
  whole = [*PROMPTS['ids'][1], *ids[:length]]
  log_probs = log_probs_of(model, variables, [whole])[0, 4:-1]
  found = expected['beam_log_probs'][1, 0, :length]
  np.testing.assert_allclose(found, log_probs[np.arange(length), ids[:length]], atol=0.3)
  assert np.abs(found - log_probs[np.arange(length), ids[:length]]).max() > 1e-6
  check_same(on_mesh(quantized(), MESHES[1], PROMPTS, variables, partitioning=partitioning), expected)


def translator():
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 2, 'num_encoder_layers': 1, 'num_heads': 3}
  model = encoder_decoder(**sizes, hidden_dims=10, num_buckets=8, max_distance=6, start_id=0, style='t5')
  search = {'beam_size': V**M, 'num_best': 8, 'length_penalty': ALPHA, 'stop_ids': (STOP,)}
  model.decoder_tpl = Config(BeamSearch, max_decode_steps=M, **search)
  return model


@pytest.mark.slow
def test_an_encoder_decoder_is_searched_exhaustively_on_one_device_and_on_a_mesh():
  model, variables = make(translator())
  sources = {'source_ids': np.random.default_rng(1).integers(0, V, (4, 6)).astype(np.int32)}
  sources['source_lengths'] = np.array([6, 0, 3, 1], np.int32)
  _, decoded = decode(model, variables, sources)
  assert not decoded['beam_lengths'][1].any()
  every = list(itertools.product(range(V), repeat=M))
  for row in (0, 2, 3):
    batch = {name: np.repeat(x[row : row + 1], len(every), axis=0) for name, x in sources.items()}
    batch |= {'ids': np.array([(0, *ids[:-1]) for ids in every], np.int32), 'weights': np.ones((64, M), np.float32)}
    for n, (ids, score) in enumerate(best_by_hand(log_softmax(_predict(model)(variables, batch)), 1)[:8]):
      assert tuple(decoded['beam_ids'][row, n, : decoded['beam_lengths'][row, n]]) == ids
      np.testing.assert_allclose(decoded['beam_scores'][row, n], score, atol=1e-4)
  check_same(on_mesh(translator(), MESHES[1], sources, variables), decoded)


BETA = 0.7


class RecordingAttention(CrossAttention):
  """Keeps the probabilities of each call, [B, T, S], as means over heads; computed here, not by the layer."""

  recorded: ClassVar[list[np.ndarray]] = []

  def __call__(self, x_BTD, kv_BSD, *, kv_segment_ids=None, **others):
    jax.debug.callback(self._record, self.query(x_BTD), self.key(kv_BSD), kv_segment_ids, self.theta.sinks)
    return super().__call__(x_BTD, kv_BSD, kv_segment_ids=kv_segment_ids, **others)

  def _record(self, query_BTNH, key_BSNH, kv_segment_ids, sinks_N):
    query_BTNH, key_BSNH = np.asarray(query_BTNH, np.float64), np.asarray(key_BSNH, np.float64)
    weights = np.exp(np.einsum('btnh,bsnh->bnts', query_BTNH, key_BSNH) * query_BTNH.shape[3] ** -0.5)
    weights *= (np.asarray(kv_segment_ids) != 0)[:, None, None, :]
    sums = weights.sum(-1, keepdims=True) + np.exp(np.asarray(sinks_N))[:, None, None]
    self.recorded.append((weights / sums).mean(1))


def covering_translator(kind, decoder_tpl=None, attention=CrossAttention):
  """A translator whose search has a penalty for what it does not cover."""
  loop, layers = kind == 'loop', 6 if kind == 'loop' else 2
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': layers, 'num_encoder_layers': 1, 'num_heads': 3}
  model = encoder_decoder(**sizes, hidden_dims=10, num_buckets=8, max_distance=6, start_id=0, style='t5')
  if not loop:
    model.lm_tpl.decoder_tpl = Config(StackedTransformer, layers_tpl=model.lm_tpl.decoder_tpl.layers_tpl)
    block = model.lm_tpl.decoder_tpl.layers_tpl
    block.cross_attention_tpl = Config(attention, use_sinks=True)
  search = {'beam_size': V**M, 'num_best': 8, 'length_penalty': ALPHA, 'stop_ids': (STOP,)}
  model.decoder_tpl = decoder_tpl or Config(BeamSearch, max_decode_steps=M, coverage_penalty=BETA, **search)
  return model


SOURCES = {'source_ids': np.random.default_rng(1).integers(0, V, (4, 6)).astype(np.int32)}
SOURCES['source_lengths'] = np.array([6, 0, 3, 1], np.int32)


def best_with_coverage(variables, given=()):
  """The best complete targets of each source with its given beginning, and their scores, by the formula of GNMT."""
  model = covering_translator('stack', attention=RecordingAttention).instantiate()
  every, found = list(itertools.product(range(V), repeat=M)), {}
  for row in (0, 2, 3):
    batch = {name: np.repeat(x[row : row + 1], len(every), axis=0) for name, x in SOURCES.items()}
    ids = np.array([(0, *given, *ids[:-1]) for ids in every], np.int32)
    batch |= {'ids': ids, 'weights': np.ones(ids.shape, np.float32)}
    RecordingAttention.recorded.clear()
    log_probs = log_softmax(_predict(model)(variables, batch))
    jax.effects_barrier()
    assert len(RecordingAttention.recorded) == 2
    probs_BTS = np.mean(RecordingAttention.recorded, axis=0)[..., : SOURCES['source_lengths'][row]]
    scores = {}
    for n, tokens in enumerate(every):
      length = tokens.index(STOP) + 1 if STOP in tokens else M
      total = sum(log_probs[n, len(given) + i, tokens[i]] for i in range(length))
      covered = np.minimum(probs_BTS[n, : len(given) + length].sum(0), 1.0)
      scores[tokens[:length]] = total / ((5 + length) / 6) ** ALPHA + BETA * np.log(covered).sum()
    found[row] = sorted(scores.items(), key=lambda pair: -pair[1])
  return found


def check_scores(decoded, expected):
  for row, pairs in expected.items():
    for n, (ids, score) in enumerate(pairs[:8]):
      assert tuple(decoded['beam_ids'][row, n, : decoded['beam_lengths'][row, n]]) == ids
      np.testing.assert_allclose(decoded['beam_scores'][row, n], score, atol=1e-4)


@pytest.mark.slow
def test_a_coverage_penalty_is_that_of_gnmt_by_exhaustive_search():
  model, variables = make(covering_translator('stack'))
  _, decoded = decode(model, variables, SOURCES)
  assert not decoded['beam_lengths'][1].any()  # A row without a source.
  check_scores(decoded, best_with_coverage(variables))


@pytest.mark.slow
def test_a_given_beginning_covers_too():
  model, variables = make(covering_translator('stack'))
  given = {'ids': np.full((4, 2), 2, np.int32), 'prompt_lengths': np.full(4, 2, np.int32)}
  check_scores(decode(model, variables, SOURCES | given)[1], best_with_coverage(variables, (2, 2)))


@pytest.mark.slow
@pytest.mark.parametrize('flat', [False, True])
def test_coverage_goes_with_beams_in_a_loop_over_layers_in_stages_and_on_meshes(flat):
  def few(**fields):
    search = {'beam_size': 3, 'num_best': 3, 'max_decode_steps': 6, 'stop_ids': (STOP,), 'coverage_penalty': BETA}
    return covering_translator('loop', Config(FlatBeamSearch if flat else BeamSearch, **search | fields))

  model, variables = make(few())
  expected = decode(model, variables, SOURCES)[1]
  without = decode(few(coverage_penalty=0.0).instantiate(), variables, SOURCES)[1]
  assert not np.allclose(without['beam_scores'][0], expected['beam_scores'][0], atol=0.1)
  for mesh in MESHES:
    check_same(on_mesh(few(), mesh, SOURCES, variables), expected)
  staged = few()
  layers = staged.lm_tpl.decoder_tpl.layers_tpl
  staged.lm_tpl.decoder_tpl = Config(PipelinedTransformer, layers_tpl=layers, num_stages=2, num_microbatches=2)
  check_same(decode(staged.instantiate(), variables, SOURCES)[1], expected)
