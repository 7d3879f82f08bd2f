"""The decoding loop on a model small enough to be continued by hand."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import BeamSearch, Bucket, Draws, Sampler, buckets, chunk_of

V, P = 7, 4
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
PROMPTS = np.array([[1, 2, 3, 4], [5, 6, 0, 0], [3, 0, 0, 0]], np.int32)
LENGTHS = np.array([4, 2, 1], np.int32)


def logits_after(ids):
  """Logits that depend on every token and its position."""
  return sum(np.cos(position + 1.0) * TABLE[token] for position, token in enumerate(ids))


class RunningSum:
  """The same as the steps of a model whose state is a running sum."""

  def __init__(self, max_positions=None):
    self.max_positions = max_positions

  def start(self, num_rows, num_slots):
    return jnp.zeros((num_rows, 1, V))

  def extend(self, ids_BT, pos_BT, last_B, state):
    contribution = jnp.where(
      (pos_BT >= 0)[..., None], jnp.cos(pos_BT + 1.0)[..., None] * jnp.asarray(TABLE)[ids_BT], 0.0
    )
    sums_BTV = state + jnp.cumsum(contribution, axis=1)
    logits_BV = jnp.take_along_axis(sums_BTV, last_B[:, None, None], axis=1)[:, 0]
    return logits_BV, sums_BTV[:, -1:]


def decode(prompts=PROMPTS, lengths=LENGTHS, seed=0, context=None, max_tokens=None, chunk=None, **fields):
  run = _decode(context, chunk, **fields)
  return jax.tree.map(np.asarray, run(prompts, lengths, jax.random.key(seed), max_tokens))


@functools.cache
def _decode(context, chunk, **fields):
  sampler = Config(Sampler, **{'max_decode_steps': 6, **fields}).instantiate()

  def run(prompts, lengths, key, max_tokens):
    return sampler.decode(RunningSum(context), prompts, lengths, key, max_tokens, chunk)

  return jax.jit(run)


def greedy_by_hand(prompt, steps, context=99, penalty=1.0, ngram=None):
  ids = list(prompt)
  for _ in range(steps):
    logits = logits_after(ids[-context:])
    logits = np.where(np.isin(np.arange(V), ids), np.where(logits > 0, logits / penalty, logits * penalty), logits)
    groups = {tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)} if ngram else ()
    allowed = [t for t in range(V) if (*ids[len(ids) - ngram + 1 :], t) not in groups] if ngram else range(V)
    ids.append(int(max(allowed, key=lambda t: logits[t])))
  return ids[len(prompt) :]


def test_greedy_is_the_argmax_after_each_prefix():
  decoded = decode(temperature=0.0)
  for row, length in enumerate(LENGTHS):
    assert decoded.ids[row].tolist() == greedy_by_hand(PROMPTS[row, :length], 6)
  np.testing.assert_array_equal(decoded.lengths, [6, 6, 6])


def test_a_row_ends_with_its_stop_token_and_the_others_go_on():
  by_hand = [greedy_by_hand(PROMPTS[row, :length], 6) for row, length in enumerate(LENGTHS)]
  stop = by_hand[0][2]
  decoded = decode(temperature=0.0, stop_ids=(stop,))
  for row, expected in enumerate(by_hand):
    length = expected.index(stop) + 1 if stop in expected else 6
    assert decoded.lengths[row] == length
    assert decoded.ids[row].tolist() == expected[:length] + [0] * (6 - length)
    assert np.all(decoded.log_probs[row, length:] == 0)
  assert decoded.lengths[0] <= 3


def test_the_loop_ends_when_all_rows_have():
  steps = []

  class Counting(RunningSum):
    def extend(self, *args):
      jax.debug.callback(lambda: steps.append(1))
      return super().extend(*args)

  sampler = Config(Sampler, max_decode_steps=50, temperature=0.0, stop_ids=tuple(range(V))).instantiate()
  jax.block_until_ready(sampler.decode(Counting(), PROMPTS, LENGTHS, jax.random.key(0)))
  jax.effects_barrier()
  assert len(steps) == 1


def test_log_probs_are_the_models_whatever_the_temperature():
  decoded = decode(temperature=0.3, top_k=3)
  for row, length in enumerate(LENGTHS):
    ids = list(PROMPTS[row, :length])
    for token, log_prob in zip(decoded.ids[row], decoded.log_probs[row]):
      logits = logits_after(ids).astype(np.float64)
      np.testing.assert_allclose(log_prob, logits[token] - np.log(np.exp(logits).sum()), atol=1e-5)
      ids.append(token)


def test_rows_do_not_depend_on_rows_after_them_nor_on_padding():
  all_rows = decode()
  np.testing.assert_array_equal(decode(PROMPTS[:2], LENGTHS[:2]).ids, all_rows.ids[:2])
  garbage = np.where(np.arange(P) < LENGTHS[:, None], PROMPTS, 6)
  np.testing.assert_array_equal(decode(garbage).ids, all_rows.ids)
  assert not np.array_equal(decode(seed=1).ids, all_rows.ids)


def test_rows_of_length_zero_yield_nothing_and_keep_no_one_waiting():
  decoded = decode(lengths=np.array([4, 0, 0], np.int32), stop_ids=(1, 2))
  np.testing.assert_array_equal(decoded.lengths[1:], [0, 0])
  assert not decoded.ids[1:].any()


@pytest.mark.slow_cases
@pytest.mark.parametrize('context', [8, 6])
@pytest.mark.parametrize('chunk', [2, None])
def test_wide_arrays_and_chunks_change_nothing(context, chunk):
  """Prompts in an array much wider than they are, up to more tokens than the model sees at once."""
  wide = np.pad(PROMPTS, ((0, 0), (0, 29)), constant_values=6)
  limits = np.array([7, 3, 5], np.int32)
  decoded = decode(wide, context=context, chunk=chunk, max_tokens=limits, max_decode_steps=32, temperature=0.0)
  np.testing.assert_array_equal(decoded.lengths, limits)
  for row, (length, limit) in enumerate(zip(LENGTHS, limits)):
    assert decoded.ids[row, :limit].tolist() == greedy_by_hand(PROMPTS[row, :length], limit, context)
    assert not decoded.ids[row, limit:].any()
  sampled = decode(wide, context=context, chunk=chunk, max_tokens=limits, max_decode_steps=32)
  np.testing.assert_array_equal(sampled.ids[1, :3], decode(context=context).ids[1, :3])


@pytest.mark.slow_cases
@pytest.mark.parametrize('penalty, ngram', [(1.7, None), (1.0, 2), (1.3, 3)])
@pytest.mark.parametrize('context', [None, 5])
def test_repetitions_of_prompt_and_continuation_are_penalized_and_excluded(penalty, ngram, context):
  """Also those of tokens that the model does not see any more."""
  fields = {'repetition_penalty': penalty, 'no_repeat_ngram_size': ngram, 'temperature': 0.0, 'max_decode_steps': 16}
  decoded, plain = decode(context=context, **fields), decode(context=context, temperature=0.0, max_decode_steps=16)
  assert not np.array_equal(decoded.ids, plain.ids)
  for row, length in enumerate(LENGTHS):
    expected = greedy_by_hand(PROMPTS[row, :length], 16, context or 99, penalty, ngram)
    assert decoded.ids[row].tolist() == expected
    ids = [*PROMPTS[row, :length], *expected]
    logits = logits_after(ids[:-1][-(context or 99) :]).astype(np.float64)  # The log-probability is the model's own.
    np.testing.assert_allclose(decoded.log_probs[row, -1], logits[ids[-1]] - np.log(np.exp(logits).sum()), atol=1e-4)


def ban_odd_after_even(logits_BV, ids_BL, lengths_B):
  last_B1 = jnp.take_along_axis(ids_BL, lengths_B[:, None] - 1, axis=1)
  return jnp.where((last_B1 % 2 == 0) & (jnp.arange(V) % 2 == 1), -jnp.inf, logits_BV)


@pytest.mark.parametrize('cls', [Sampler, BeamSearch])
def test_processors_of_the_user_apply_after_the_others(cls):
  fields = {'logit_processors': (ban_odd_after_even,), 'presence_penalty': 0.8, 'min_decode_steps': 3}
  own = {'temperature': 0.0} if cls is Sampler else {'beam_size': 1, 'length_penalty': 0.0}
  decoder = Config(cls, max_decode_steps=9, stop_ids=(0, 3), **fields, **own).instantiate()
  decoded = jax.jit(lambda: decoder.decode(RunningSum(), PROMPTS, LENGTHS, None))()
  for row, length in enumerate(LENGTHS):
    ids, new = list(PROMPTS[row, :length]), []
    while len(new) < 9 and not (new and new[-1] in (0, 3)):
      logits = logits_after(ids) - 0.8 * np.isin(np.arange(V), new)
      if len(new) < 3:
        logits[[0, 3]] = -np.inf
      if ids[-1] % 2 == 0:
        logits[1::2] = -np.inf
      ids.append(int(np.argmax(logits)))
      new.append(ids[-1])
    assert decoded.ids[row, : decoded.lengths[row]].tolist() == new


@pytest.mark.slow
def test_segments_count_only_tokens_of_the_continuation():
  """The last tokens of a prompt may be those of an earlier call."""
  decoder = Config(Sampler, max_decode_steps=6, temperature=0.0, frequency_penalty=0.9).instantiate()
  whole = decoder.decode(RunningSum(), PROMPTS[:1], LENGTHS[:1], None)
  longer = np.concatenate([PROMPTS[:1], whole.ids[:, :2]], axis=1)
  drawn = Draws(num_drawn_B=np.array([2]))
  rest = decoder.decode(RunningSum(), longer, LENGTHS[:1] + 2, None, draws=drawn)
  np.testing.assert_array_equal(rest.ids[:, :4], whole.ids[:, 2:])


@pytest.mark.parametrize(
  'wrong, told', [(lambda *_: None, 'got None'), (lambda x, *_: x[:, 1:], r'got shape \(3, 6\)')]
)
def test_what_a_processor_returns_is_checked(wrong, told):
  decoder = Config(Sampler, temperature=0.0, logit_processors=(wrong,)).instantiate()
  with pytest.raises(ConfigError, match=rf'Sampler.logit_processors\[0\]: expected logits of shape \(3, 7\).*{told}'):
    jax.eval_shape(lambda: decoder.decode(RunningSum(), PROMPTS, LENGTHS, None))


def test_no_repeat_ngram_size_of_zero_allows_repetitions():
  fields = {'temperature': 0.0, 'max_decode_steps': 16}
  np.testing.assert_array_equal(decode(no_repeat_ngram_size=0, **fields).ids, decode(**fields).ids)


def test_a_row_may_ask_for_no_token():
  np.testing.assert_array_equal(decode(max_tokens=np.array([0, 2, 9], np.int32)).lengths, [0, 2, 6])


def test_many_lengths_share_a_bucket():
  assert {Bucket.choose(p, m, None) for p in range(1, 30) for m in range(1, 100)} == {Bucket(256, 512)}
  # With a context, one bucket serves longer texts too.
  assert {Bucket.choose(p, 220, 256) for p in range(1, 500)} == {Bucket(256, 512)}
  for lengths in ((1, 1), (100, 29), (100, 30), (500, 1), (1, 513), (4000, 100)):
    for context in (None, 96, 1000, 4096):
      slots, width = Bucket.choose(*lengths, context)
      assert width >= max(lengths) and slots >= min(sum(lengths) - 1, context or 9999) and slots <= (context or 9999)
      assert slots % chunk_of(slots) == 0 and (chunk_of(slots) <= 256 or slots == 1000)
  assert [chunk_of(slots) for slots in (128, 1024, 8192, 257)] == [32, 64, 256, 257]


def test_accelerators_read_more_of_a_prompt_at_once_if_there_are_few(monkeypatch):
  monkeypatch.setattr(buckets, 'platform', lambda: 'gpu')
  assert [chunk_of(slots) for slots in (96, 256, 2048, 8192, 257)] == [96, 128, 512, 1024, 257]
  assert [chunk_of(8192, rows) for rows in (1, 2, 4, 16, 64, 4096)] == [1024, 1024, 512, 128, 128, 128]


@pytest.mark.parametrize(
  'fields',
  [
    *({'max_decode_steps': 0}, {'temperature': -1.0}, {'top_k': -1}, {'top_p': 0.0}, {'top_p': 1.5}, {'min_p': 1.5}),
    *({'min_p': -0.1}, {'repetition_penalty': 0.0}, {'repetition_penalty': float('nan')}, {'no_repeat_ngram_size': -1}),
    *(
      {'typical_p': 0.0},
      {'top_n_sigma': 0.0},
      {'presence_penalty': float('inf')},
      {'frequency_penalty': float('nan')},
    ),
    *({'min_decode_steps': -1}, {'logit_processors': (3,)}),
  ],
)
def test_impossible_hyperparameters_are_named(fields):
  (field,) = fields
  with pytest.raises(ConfigError, match=f'Sampler.{field}: expected'):
    Config(Sampler, **fields).instantiate()
