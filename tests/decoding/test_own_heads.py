"""Guesses by heads of the model itself, against passes over whole rows, and on a mesh."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import MultiTokenPrediction
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.models.decoding import Sampler, SpeculativeSampler
from praxis_lite.runs.prompts import task_with_sampler
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, P, M, K = 5, 5, 12, 2
PROMPTS = {
  'ids': np.random.default_rng(0).integers(0, V, (4, P)).astype(np.int32),
  'prompt_lengths': np.array([2, 5, 0, 1], np.int32),
}


def config(decoder=SpeculativeSampler, num_modules=K, **fields):
  model = transformer_lm(vocab_size=V, model_dims=12, num_layers=1, num_heads=3, hidden_dims=10)
  model.lm_tpl.mtp_tpl = Config(MultiTokenPrediction, num_modules=num_modules)
  own = {'own_heads': True, 'draft_tokens': K} if decoder is SpeculativeSampler else {}
  return model.set(decoder_tpl=Config(decoder, **{'max_decode_steps': M, 'stop_ids': (1,), **own, **fields}))


@functools.cache
def variables():
  return jax.tree.map(lambda w: 3 * w if w.ndim > 1 else w, drawn_variables(config().instantiate().abstract_init()))


def decode(model, more=None):
  model = model.instantiate()
  run = jax.jit(lambda v, b, key: model.apply(v, b, do_eval=True, method='decode', key=key)[0][1])
  return jax.tree.map(np.asarray, run(variables(), PROMPTS | (more or {}), jax.random.key(3)))


@functools.cache
def greedy():
  return decode(config(temperature=0.0, stop_ids=()))


def test_greedy_tokens_are_those_of_the_sampler():
  """Also if prompts are read in chunks, with limits of their own."""
  limits = {'max_tokens': np.array([M, 9, M, 3], np.int32)}
  for more, found in ((None, greedy()), (limits, decode(config(temperature=0.0), limits))):
    expected = decode(config(Sampler, temperature=0.0, **({} if more else {'stop_ids': ()})), more)
    np.testing.assert_array_equal(found['ids'], expected['ids'])
    np.testing.assert_array_equal(found['lengths'], expected['lengths'])
    np.testing.assert_allclose(found['log_probs'], expected['log_probs'], atol=1e-4)
  assert greedy()['num_drafted'].sum() > greedy()['num_accepted'].sum() > 0 == greedy()['num_passes'][2]


def test_guesses_are_those_of_passes_over_whole_rows():
  """The heads know nothing of guesses that were wrong: as many are accepted as if all was computed anew each time."""
  lm, own = config().instantiate().lm, jax.tree.map(jax.numpy.asarray, variables()['lm'])

  @jax.jit
  def guess(ids, number, place):
    embedded = own['embedding']['w'][ids]
    hidden = lm.final_norm.apply(own['final_norm'], lm.transformer.apply(own['transformer'], embedded)[0])[0]
    heads = [h[0, place] @ own['softmax']['w'] for h in lm.mtp.apply(own['mtp'], hidden, embedded)[0]]
    return jax.numpy.argmax(jax.numpy.stack(heads), axis=-1)[number]

  found = greedy()
  for row in (0, 1, 3):
    prompt = PROMPTS['ids'][row, : PROMPTS['prompt_lengths'][row]]
    ids = np.concatenate([prompt, found['ids'][row]])
    length, passes, accepted = len(prompt) + 1, 1, 0  # The first pass reads the prompt.
    while length < len(ids):
      draft = np.zeros((1, P + M + K), np.int32)
      draft[0, :length] = ids[:length]
      count = min(K, len(ids) - length - 1)
      for k in range(count):
        draft[0, length + k] = guess(draft, k, length - 2)
      right = draft[0, length : length + count] == ids[length : length + count]
      kept = int(np.cumprod(right).sum())
      length, passes, accepted = length + kept + 1, passes + 1, accepted + kept
    assert (passes, accepted) == (found['num_passes'][row], found['num_accepted'][row])


@pytest.mark.slow
def test_a_mesh_draws_like_one_device():
  axes = ('spare', 'replica', 'data', 'mdl')

  def on_mesh(shape):
    task = Config(SingleTask, model=set_sharding(config(temperature=1.0)), mesh_axis_names=axes, ici_mesh_shape=shape)
    task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
    batch = PROMPTS | {'weights': np.ones(4, np.float32)}
    partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
    out = partitioned.decode_step(partitioned.pad(variables()), jax.random.key(0), np.int32(0), batch)
    return jax.tree.map(lambda x: np.asarray(x)[:4], out.decoded)

  found, expected = on_mesh((2, 1, 3, 1)), on_mesh((1, 1, 1, 1))
  for name in ('ids', 'lengths', 'num_accepted', 'num_passes'):
    np.testing.assert_array_equal(found[name], expected[name])


def test_a_model_without_heads_or_with_too_few_is_refused():
  model = config(num_modules=1)
  with pytest.raises(ConfigError, match=r'decoder_tpl.draft_tokens: 2 is more than the 1 further tokens'):
    model.instantiate()
  model.lm_tpl.mtp_tpl = None
  with pytest.raises(ConfigError, match=r'decoder_tpl.own_heads: the model has no heads for further tokens; set '):
    model.instantiate()


def test_the_memory_of_the_heads_is_counted():
  with_heads, without = (config(d).instantiate().prompt_limits() for d in (SpeculativeSampler, Sampler))
  slots = 2 * 16 * 4  # Of rows, in float32.
  # What the softmax reads, and the caches of two modules.
  assert with_heads.state_bytes(2, 16) - without.state_bytes(2, 16) >= slots * (12 + 2 * 2 * 12)


def test_a_look_up_takes_the_place_of_own_heads():
  task = task_with_sampler(Config(SingleTask, model=config()), lookup=2)
  decoder = task.instantiate().model.decoder
  assert (decoder.lookup, decoder.own_heads) == (2, False)
