"""Speculative decoding on models small enough to enumerate: exact in distribution, and token by token if it can be."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import Draws, Sampler, SpeculativeSampler, speculative_sampler
from praxis_lite.models.decoding.drafting import LookupDrafter, OpenRows
from praxis_lite.models.decoding.verifying import reject_drafts

V, P = 5, 4
PROMPTS = np.array([[1, 2, 3, 4], [2, 1, 0, 0], [3, 0, 0, 0], [1, 2, 1, 0]], np.int32)
LENGTHS = np.array([4, 2, 0, 3], np.int32)  # Row 2 is padding.
LIMITS = np.array([9, 5, 9, 2], np.int32)


class Tokens:
  """A model whose logits depend on the last two tokens of a row and their positions; its state is the tokens."""

  can_go_back, max_positions = True, None

  def __init__(self, seed, size=V, sharpness=1.5):
    rng = np.random.default_rng(seed)
    self.last, self.before = (sharpness * rng.normal(size=(size, size)).astype(np.float32) for _ in range(2))

  def start(self, num_rows, num_slots):
    return jnp.full((num_rows, num_slots), -1, jnp.int32)

  def extend(self, ids_BT, pos_BT, last_B, state):
    row_B1 = jnp.arange(len(ids_BT))[:, None]
    state = state.at[row_B1, jnp.where(pos_BT >= 0, pos_BT, state.shape[1])].set(ids_BT, mode='drop')
    place_BN = jnp.take_along_axis(pos_BT, last_B.reshape(len(ids_BT), -1), axis=1)
    last_BN = jnp.take_along_axis(state, place_BN, axis=1, mode='clip')
    before_BN = jnp.take_along_axis(state, jnp.maximum(place_BN - 1, 0), axis=1, mode='clip')
    turn_BN = jnp.cos(place_BN)[..., None]
    logits_BNV = jnp.asarray(self.last)[last_BN] + turn_BN * jnp.asarray(self.before)[before_BN]
    return (logits_BNV if last_B.ndim == 2 else logits_BNV[:, 0]), state

  def logits(self, ids):
    """The logits after these tokens, by hand."""
    return self.last[ids[-1]] + np.cos(len(ids) - 1) * self.before[ids[-2] if len(ids) > 1 else ids[-1]]


def decode(
  cls, *, draft=None, seed=0, chunk=None, prompts=PROMPTS, lengths=LENGTHS, limits=LIMITS, draws=None, **fields
):
  decoder = Config(cls, **{'max_decode_steps': 9, **fields}).instantiate()
  more = () if draft is None else (draft,)

  def run(key):
    return decoder.decode(Tokens(0), prompts, lengths, key, limits, chunk, draws, *more)

  return jax.tree.map(np.asarray, jax.jit(run)(jax.random.key(seed)))


def ban_repeats_of_three(logits_BV, ids_BL, lengths_B):
  """Depends on the order of the tokens before."""
  third_B1 = jnp.take_along_axis(ids_BL, lengths_B[:, None] - 3, axis=1, mode='clip')
  return jnp.where((jnp.arange(logits_BV.shape[1]) == third_B1) & (lengths_B > 5)[:, None], -jnp.inf, logits_BV)


SETTINGS = {
  'as they are': {},
  'candidates': {'top_k': 3, 'top_p': 0.9, 'min_p': 0.05, 'temperature': 0.7},
  'stops': {'stop_ids': (0, 3)},
  'history': {
    'repetition_penalty': 1.5,
    'presence_penalty': 0.5,
    'frequency_penalty': 0.3,
    'no_repeat_ngram_size': 3,
    'min_decode_steps': 3,
    'stop_ids': (2,),
    'logit_processors': (ban_repeats_of_three,),
  },
}


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'settings, lookup, draft_tokens, chunk', [*((name, 3, 4, None) for name in SETTINGS), ('history', 1, 1, 2)]
)
def test_with_a_look_up_the_tokens_are_those_of_the_sampler(settings, lookup, draft_tokens, chunk):
  """Also drawn ones. Rows accept different numbers, end at stop tokens and limits, and one is padding."""
  fields = SETTINGS[settings]
  plain = decode(Sampler, **fields)
  found = decode(SpeculativeSampler, lookup=lookup, draft_tokens=draft_tokens, chunk=chunk, **fields)
  check_same(found, plain)
  assert found.num_drafted[2] == found.num_passes[2] == 0 == found.lengths[2]
  assert found.num_accepted.sum() <= found.num_drafted.sum() <= draft_tokens * found.num_passes.sum()
  if settings == 'as they are':
    assert found.num_accepted[0] > 0 and found.num_passes[0] < found.lengths[0]


def check_same(found, plain):
  np.testing.assert_array_equal(found.ids, plain.ids)
  np.testing.assert_array_equal(found.lengths, plain.lengths)
  np.testing.assert_allclose(found.log_probs, plain.log_probs, atol=1e-5)
  # Each pass of a row adds the accepted tokens and one of the model, except if a row ends within a draft.
  np.testing.assert_array_less(found.lengths - 1, found.num_passes + found.num_accepted)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'settings, draft_seed, draft_tokens', [('as they are', 1, 1), ('stops', 1, 6), ('history', 0, 3)]
)
def test_greedy_tokens_with_a_draft_model_are_those_of_the_sampler(settings, draft_seed, draft_tokens):
  fields = {**SETTINGS[settings], 'temperature': 0.0}
  found = decode(SpeculativeSampler, draft=Tokens(draft_seed), draft_tokens=draft_tokens, **fields)
  check_same(found, decode(Sampler, **fields))
  if draft_seed == 0:  # The draft model is the model.
    rows = [0, 1, 3]
    np.testing.assert_array_equal(found.num_passes[rows], 1 + -(-(found.lengths[rows] - 1) // (draft_tokens + 1)))


# ---------------------------------------------------------------- the distribution

SMALL, M, ROWS = 3, 4, 10_000
FIELDS = {'max_decode_steps': M, 'draft_tokens': 2, 'temperature': 0.8, 'repetition_penalty': 1.3}


def probabilities(model, prompt, **settings):
  """Of each continuation of M tokens, by the product of the probabilities of its tokens."""
  found = {}
  for ids in itertools.product(range(SMALL), repeat=M):
    row, log_prob = list(prompt), 0.0
    for token in ids:
      logits = model.logits(row).astype(np.float64)
      penalized = np.where(logits > 0, logits / 1.3, logits * 1.3)
      logits = np.where(np.isin(np.arange(SMALL), row), penalized, logits) / 0.8
      if settings.get('top_k'):
        logits[np.argsort(-logits)[settings['top_k'] :]] = -np.inf
      log_prob += logits[token] - np.log(np.exp(logits).sum())
      row.append(token)
    found[ids] = np.exp(log_prob)
  return found


class Heads:
  """Heads of a model that guess by the last token that they read, each in its own way."""

  num_heads = 2

  def start(self, num_rows, num_slots):
    return jnp.zeros(num_rows)

  def read_hidden(self, model_state, place_BT):
    return jnp.take_along_axis(model_state, place_BT, axis=1, mode='clip')[..., None]

  def extend(self, number, hidden_BTD, ids_BT, pos_BT, last_B, state):
    ids_B = jnp.take_along_axis(ids_BT, last_B[:, None], axis=1)[:, 0]
    return jnp.asarray(Tokens(7 + number, SMALL, 1.0).last)[ids_B], hidden_BTD, state


def chi_square(own_heads=False, **settings):
  """Compares counts of continuations with their probabilities; returns the statistic over its expected value."""
  prompt, model = [1, 2], Tokens(0, SMALL, 1.0)
  draft = {'heads': Heads()} if own_heads else {'draft_steps': Tokens(7, SMALL, 1.0)}
  decoder = Config(SpeculativeSampler, **FIELDS, own_heads=own_heads, **settings).instantiate()
  prompts, lengths = np.tile(np.array([prompt], np.int32), (ROWS, 1)), np.full(ROWS, 2, np.int32)
  decoded = jax.jit(lambda key: decoder.decode(model, prompts, lengths, key, **draft))(jax.random.key(3))
  cells = np.asarray(decoded.ids) @ SMALL ** np.arange(M)[::-1]
  expected = ROWS * np.array(list(probabilities(model, prompt, **settings).values()))
  counts = np.bincount(cells, minlength=SMALL**M)
  assert not counts[expected == 0].any()
  accepted = np.asarray(decoded.num_accepted).sum() / np.asarray(decoded.num_drafted).sum()
  assert 0.2 < accepted < 0.9  # Drafts are accepted and rejected.
  is_common = expected >= 5
  rest = (counts[~is_common].sum() - expected[~is_common].sum()) ** 2 / max(expected[~is_common].sum(), 1.0)
  return (((counts - expected)[is_common] ** 2 / expected[is_common]).sum() + rest) / is_common.sum()


@pytest.mark.slow_cases
@pytest.mark.parametrize('settings', [{}, {'top_k': 2}, {'own_heads': True}], ids=str)
def test_drawn_tokens_have_the_joint_distribution_of_the_model(settings):
  assert chi_square(**settings) < 1.8  # Of 81 degrees of freedom, 1.8 has a probability below 1e-4.


def draw_from_p_after_a_rejection(logits_BNV, draft, uniform_BN, keys_BN):
  """The mistake of leaving out the residual: accepted tokens are right, the token after a rejected one is not."""
  _, accepted_B = reject_drafts(logits_BNV, draft, uniform_BN, keys_BN)
  own_BN = jax.vmap(jax.vmap(jax.random.categorical))(keys_BN, logits_BNV).astype(jnp.int32)
  kept_BN = jnp.pad(draft.ids, ((0, 0), (0, 1)))
  return speculative_sampler.Verified(
    jnp.where(jnp.arange(kept_BN.shape[1]) < accepted_B[:, None], kept_BN, own_BN), accepted_B
  )


@pytest.mark.slow
def test_the_comparison_of_distributions_sees_a_wrong_residual(monkeypatch):
  monkeypatch.setattr(speculative_sampler, 'reject_drafts', draw_from_p_after_a_rejection)
  assert chi_square() > 4


@pytest.mark.slow
def test_rows_with_a_draft_model_depend_on_their_seed_and_number_only():
  draft = functools.partial(decode, SpeculativeSampler, draft=Tokens(1), temperature=1.0)
  all_rows = draft()
  last = draft(prompts=PROMPTS[3:], lengths=LENGTHS[3:], limits=LIMITS[3:], draws=Draws(row_B=np.array([3], np.int32)))
  np.testing.assert_array_equal(last.ids, all_rows.ids[3:])


# ---------------------------------------------------------------- look-up


def guesses(row, size=3, num_tokens=4, most=9, width=16, source=None):
  ids = np.pad(np.array([row], np.int32), ((0, 0), (0, width - len(row))), constant_values=row[-1])
  rows = OpenRows(jnp.array(ids), jnp.array([len(row)]), jnp.array([0]), jnp.array([most]))
  before = None if source is None else jnp.array([source], jnp.int32)
  draft, _ = LookupDrafter(size, num_tokens, before).propose(rows, (), ())
  return draft.ids[0, : int(draft.counts[0])].tolist()


def test_a_look_up_finds_the_longest_and_then_the_last_group():
  assert guesses([1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3]) == [7, 8, 2, 3]  # Three tokens are longer than two.
  assert guesses([1, 2, 3, 7, 8, 2, 3, 9, 1, 2, 3], size=2) == [9, 1, 2, 3]  # The last one of two.
  assert guesses([5, 1, 6, 1]) == [6, 1, 6, 1]  # A draft beyond the end of the row repeats.
  assert guesses([4, 4, 4]) == [4, 4, 4, 4]
  assert guesses([1, 2, 3]) == guesses([7]) == []  # Tokens after the end of a row are not looked at.
  assert guesses([5, 1, 6, 1], most=1) == [6] and guesses([5, 1, 6, 1], most=0) == []


def test_a_look_up_searches_a_source_too():
  source = [1, 2, 3, 7, 8, 9, -1, -1]
  assert guesses([0, 2, 3], source=source) == [7, 8, 9]  # Up to the end of the source.
  assert guesses([0, 9], source=source) == []
  assert guesses([0, 9], source=[4, 9]) == [0, 9, 0, 9]  # A source without padding ends where the row begins.
  assert guesses([2, 3, 5, 2, 3], size=2, source=source) == [5, 2, 3, 5]  # The last one, which is in the row.
  assert guesses([5, 2, 6, 3, 2], source=source, most=2) == [6, 3]
  assert guesses([4], source=[-1, -1]) == []


# ---------------------------------------------------------------- what is refused


class OneWay(Tokens):
  can_go_back = False


@pytest.mark.parametrize(
  'fields, steps, draft, told',
  [
    ({}, Tokens(0), None, r'SpeculativeSampler.lookup: got None; expected a number, such as 3, or a draft model'),
    ({'lookup': 2}, Tokens(0), Tokens(1), r'SpeculativeSampler.lookup: got 2; a draft model needs None'),
    ({'lookup': 2}, OneWay(0), None, r'SpeculativeSampler: the steps of this model cannot go back to an earlier token'),
    ({}, Tokens(0), OneWay(1), r'SpeculativeSampler: the steps of this model cannot go back to an earlier token'),
    (
      {'own_heads': True},
      Tokens(0),
      None,
      r'SpeculativeSampler.own_heads: got True; this model has no heads that guess',
    ),
    ({'own_heads': True}, Tokens(0), Tokens(1), r'SpeculativeSampler.own_heads: got True; this model has no heads'),
    ({'own_heads': True, 'lookup': 2}, None, None, r'SpeculativeSampler.own_heads: expected False with a lookup'),
    ({'lookup': 0}, None, None, r'SpeculativeSampler.lookup: expected at least 1, or None'),
    ({'lookup': 1, 'draft_tokens': 0}, None, None, r'SpeculativeSampler.draft_tokens: expected at least 1'),
    ({'lookup': 1}, Tokens(0), None, r'SpeculativeSampler.temperature|needs a PRNG key'),
  ],
)
def test_what_cannot_be_guessed_is_refused(fields, steps, draft, told):
  def run():
    decoder = Config(SpeculativeSampler, **fields).instantiate()
    return decoder.decode(steps, PROMPTS, LENGTHS, None, draft_steps=draft)

  with pytest.raises(ConfigError, match=told):
    jax.eval_shape(run)
