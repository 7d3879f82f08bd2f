"""Beam search on a model so small that all continuations can be enumerated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.models.decoding import BeamSearch, FlatBeamSearch, Sampler, find_row_axes
from praxis_lite.models.decoding.beam_rows import keep_places

V, P = 4, 3
TABLE = np.random.default_rng(3).normal(size=(V, V)).astype(np.float32)
PROMPTS = np.array([[1, 2, 3], [2, 0, 0], [3, 1, 0]], np.int32)
LENGTHS = np.array([3, 1, 2], np.int32)


class RunningSum:
  """The steps of a model whose logits are a sum over tokens and their positions."""

  def __init__(self, max_positions=None):
    self.max_positions, self.calls = max_positions, []

  def start(self, num_rows, num_slots):
    return jnp.zeros((num_rows, 1, V))

  def extend(self, ids_BT, pos_BT, last_B, state):
    jax.debug.callback(lambda: self.calls.append(ids_BT.shape))
    factor_BT1 = jnp.where(pos_BT >= 0, jnp.cos(pos_BT + 1.0), 0.0)[..., None]
    sums_BTV = state + jnp.cumsum(factor_BT1 * jnp.asarray(TABLE)[ids_BT], axis=1)
    return jnp.take_along_axis(sums_BTV, last_B[:, None, None], axis=1)[:, 0], sums_BTV[:, -1:]


def log_probs_after(ids):
  logits = sum(np.cos(position + 1.0) * TABLE[token].astype(np.float64) for position, token in enumerate(ids))
  return logits - np.log(np.exp(logits).sum())


def norm(length, alpha):
  return ((5 + length) / 6) ** alpha


def decode(prompts=PROMPTS, lengths=LENGTHS, max_tokens=None, context=None, chunk=None, cls=BeamSearch, **fields):
  run = _decode(cls, context, chunk, **fields)
  return jax.tree.map(np.asarray, run(prompts, lengths, max_tokens))


@functools.cache
def _decode(cls, context, chunk, **fields):
  decoder = Config(cls, **fields).instantiate()

  def run(prompts, lengths, max_tokens):
    return decoder.decode(RunningSum(context), prompts, lengths, None, max_tokens, chunk)

  return jax.jit(run)


def enumerate_all(prompt, steps, stops, alpha):
  """All complete continuations, the best first: pairs of a score and tokens."""
  found = []

  def grow(ids, total):
    if len(ids) == steps or (ids and ids[-1] in stops):
      found.append((total / norm(len(ids), alpha), ids))
      return
    for token, log_prob in enumerate(log_probs_after([*prompt, *ids])):
      grow([*ids, token], total + log_prob)

  grow([], 0.0)
  return sorted(found, key=lambda pair: -pair[0])


def search_by_hand(prompt, steps, beam_size, num_best, stops=(), alpha=0.6, early=False, context=99, adjust=None):
  """What the docstring of `BeamSearch` says, one prompt at a time."""
  beams, best = [(0.0, [])], []
  for number in range(1, steps + 1):
    pairs = []
    for total, ids in beams:
      log_probs = log_probs_after([*prompt, *ids][-context:])
      log_probs = log_probs if adjust is None else adjust(log_probs, [*prompt, *ids])
      pairs += [(total + log_probs[token], [*ids, token]) for token in range(V) if log_probs[token] > -np.inf]
    pairs.sort(key=lambda pair: -pair[0])
    best += [(x / norm(number, alpha), ids) for x, ids in pairs[:beam_size] if ids[-1] in stops or number == steps]
    best = sorted(best, key=lambda pair: -pair[0])[:beam_size]
    beams = [pair for pair in pairs if pair[1][-1] not in stops][:beam_size]
    is_sure = len(best) >= num_best and (not beams or best[num_best - 1][0] >= beams[0][0] / norm(steps, alpha))
    if is_sure or (early and len(best) == beam_size):
      break
  return best[:num_best]


def check(decoded, row, expected, prompt, context=99):
  """Checks the best continuations of a row, and that their log-probabilities are those of the model."""
  assert np.isfinite(decoded.beam_scores[row]).sum() == len(expected)
  for n, (score, ids) in enumerate(expected):
    length = decoded.beam_lengths[row, n]
    assert decoded.beam_ids[row, n, :length].tolist() == ids
    assert not decoded.beam_ids[row, n, length:].any() and not decoded.beam_log_probs[row, n, length:].any()
    np.testing.assert_allclose(decoded.beam_scores[row, n], score, atol=1e-5)
    whole = [*prompt, *ids]
    log_probs = [log_probs_after(whole[:i][-context:])[whole[i]] for i in range(len(prompt), len(whole))]
    np.testing.assert_allclose(decoded.beam_log_probs[row, n, :length], log_probs, atol=1e-5)
  assert not decoded.beam_lengths[row, len(expected) :].any()
  np.testing.assert_array_equal(decoded.ids[row], decoded.beam_ids[row, 0])
  np.testing.assert_array_equal(decoded.log_probs[row], decoded.beam_log_probs[row, 0])
  assert decoded.lengths[row] == decoded.beam_lengths[row, 0]


@pytest.mark.slow_cases
@pytest.mark.parametrize('stops, alpha', [((), 0.6), ((2,), 0.0), ((0, 3), 0.6), ((2,), 3.0), ((0, 1, 2, 3), 1.0)])
def test_with_as_many_beams_as_continuations_the_search_is_exhaustive(stops, alpha):
  decoded = decode(max_decode_steps=4, beam_size=V**4, num_best=12, stop_ids=stops, length_penalty=alpha)
  for row, length in enumerate(LENGTHS):
    prompt = PROMPTS[row, :length].tolist()
    check(decoded, row, enumerate_all(prompt, 4, stops, alpha)[:12], prompt)


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'fields, arguments',
  [
    ({}, {}),
    ({'stop_ids': (2,)}, {}),
    ({'stop_ids': (0, 3), 'length_penalty': 2.0, 'num_best': 1}, {}),
    ({'stop_ids': (2,), 'length_penalty': 1.0, 'early_stopping': True}, {}),
    ({'stop_ids': (2,), 'beam_size': 2, 'num_best': 2}, {'context': 3}),
    ({'stop_ids': (2,)}, {'context': 6, 'chunk': 2}),
  ],
  ids=str,
)
def test_a_few_beams_are_those_of_a_search_by_hand(fields, arguments):
  fields = {'max_decode_steps': 9, 'beam_size': 3, 'num_best': 3, **fields}
  decoded = decode(**arguments, **fields)
  by_hand = {
    'stops': fields.get('stop_ids', ()),
    'alpha': fields.get('length_penalty', 0.6),
    'early': fields.get('early_stopping', False),
    'context': arguments.get('context', 99),
  }
  for row, length in enumerate(LENGTHS):
    prompt = PROMPTS[row, :length].tolist()
    expected = search_by_hand(prompt, 9, fields['beam_size'], fields['num_best'], **by_hand)
    check(decoded, row, expected, prompt, by_hand['context'])


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'early, alpha, penalties',
  [(False, 0.0, {}), (True, 1.5, {}), (False, 0.0, {'repetition_penalty': 1.4, 'no_repeat_ngram_size': 2})],
)
def test_one_beam_is_greedy(early, alpha, penalties):
  fields = {'max_decode_steps': 7, 'stop_ids': (1,), **penalties}
  found = decode(beam_size=1, early_stopping=early, length_penalty=alpha, **fields)
  greedy = decode(cls=Sampler, temperature=0.0, **fields)
  np.testing.assert_array_equal(found.ids, greedy.ids)
  np.testing.assert_array_equal(found.lengths, greedy.lengths)
  np.testing.assert_allclose(found.log_probs, greedy.log_probs, atol=1e-5)


def test_penalties_change_what_is_ranked_and_not_the_log_probs():
  def no_repetition(log_probs, ids):
    return np.where(np.isin(np.arange(V), ids), -np.inf, log_probs)

  decoded = decode(max_decode_steps=3, beam_size=3, num_best=3, stop_ids=(2,), no_repeat_ngram_size=1)
  for row, length in enumerate(LENGTHS):
    prompt = PROMPTS[row, :length].tolist()
    check(decoded, row, search_by_hand(prompt, 3, 3, 3, (2,), adjust=no_repetition), prompt)


@pytest.mark.slow
def test_rows_may_be_wide_limited_fillers_or_alone():
  fields = {'max_decode_steps': 12, 'beam_size': 3, 'num_best': 2, 'stop_ids': (2,)}
  wide = np.pad(np.vstack([PROMPTS, PROMPTS[:1]]), ((0, 0), (0, 13)), constant_values=3)
  lengths, limits = np.array([3, 1, 0, 3], np.int32), np.array([2, 9, 5, 0], np.int32)
  decoded = decode(wide, lengths, limits, context=8, chunk=2, **fields)
  for row in range(2):
    prompt = PROMPTS[row, : lengths[row]].tolist()
    check(decoded, row, search_by_hand(prompt, limits[row], 3, 2, (2,), context=8), prompt, context=8)
    alone = decode(wide[row : row + 1], lengths[row : row + 1], limits[row : row + 1], context=8, chunk=2, **fields)
    np.testing.assert_array_equal(alone.beam_ids[0], decoded.beam_ids[row])
    np.testing.assert_allclose(alone.beam_scores[0], decoded.beam_scores[row], atol=1e-6)
  assert not decoded.beam_lengths[2:].any() and not decoded.beam_ids[2:].any() and not decoded.log_probs[2:].any()
  assert (decoded.beam_scores[2:] == -np.inf).all()


def search_in_groups(prompt, steps, beam_size, num_groups, penalty, num_best, stops=(), alpha=0.6):
  """What the docstring of `BeamSearch` says of groups, one prompt at a time."""
  size, found = beam_size // num_groups, []
  groups = [{'beams': [(0.0, [])], 'best': [], 'is_done': False} for _ in range(num_groups)]
  for number in range(1, steps + 1):
    chosen = []
    for group in groups:
      pairs = []
      for total, ids in group['beams']:
        log_probs = log_probs_after([*prompt, *ids])
        pairs += [(total + log_probs[token], [*ids, token]) for token in range(V)]
      pairs.sort(key=lambda pair: -(pair[0] - penalty * chosen.count(pair[1][-1])))
      if not group['is_done']:
        ends = [(x / norm(number, alpha), ids) for x, ids in pairs[:size] if ids[-1] in stops or number == steps]
        group['best'] = sorted([*group['best'], *ends], key=lambda pair: -pair[0])[:size]
      group['beams'] = [pair for pair in pairs if pair[1][-1] not in stops][:size]
      chosen += [ids[-1] for _, ids in group['beams']]
      most = max(x for x, _ in group['beams']) / norm(steps, alpha)
      least = min(num_best, size)
      group['is_done'] |= len(group['best']) >= least and group['best'][least - 1][0] >= most
  for group in groups:
    found += group['best']
  return sorted(found, key=lambda pair: -pair[0])[:num_best]


@pytest.mark.slow_cases
@pytest.mark.parametrize('groups, penalty, stops', [(2, 0.9, (2,)), (4, 1.5, ()), (2, 0.0, (0, 3)), (4, 9.0, (1,))])
def test_groups_of_beams_are_those_of_a_search_by_hand(groups, penalty, stops):
  fields = {'max_decode_steps': 6, 'beam_size': 4, 'num_best': 3, 'stop_ids': stops}
  decoded = decode(num_groups=groups, diversity_penalty=penalty, **fields)
  for row, length in enumerate(LENGTHS):
    prompt = PROMPTS[row, :length].tolist()
    check(decoded, row, search_in_groups(prompt, 6, 4, groups, penalty, 3, stops), prompt)


@pytest.mark.slow
def test_a_penalty_makes_groups_differ():
  alike, diverse = (
    decode(max_decode_steps=4, beam_size=4, num_best=4, num_groups=4, diversity_penalty=penalty)
    for penalty in (0.0, 3.0)
  )
  for row in range(3):
    assert len({tuple(ids) for ids in alike.beam_ids[row].tolist()}) == 1
    assert len({ids[0] for ids in diverse.beam_ids[row].tolist()}) == 4


def search_flat(prompt, steps, beam_size, num_best, stops, alpha, adjust=None):
  """What the docstring of `FlatBeamSearch` says, one prompt at a time."""
  beams, ended = [(0.0, [])], []
  for number in range(1, steps + 1):
    pairs = []
    for total, ids in beams:
      log_probs = log_probs_after([*prompt, *ids])
      log_probs = log_probs if adjust is None else adjust(log_probs, ids)
      pairs += [(total + log_probs[token], [*ids, token]) for token in range(V) if log_probs[token] > -np.inf]
    ended += [(total / norm(number, alpha), ids) for total, ids in pairs if ids[-1] in stops]
    ended = sorted(ended, key=lambda pair: -pair[0])[:beam_size]
    beams = sorted((pair for pair in pairs if pair[1][-1] not in stops), key=lambda pair: -pair[0])[:beam_size]
  return ended[:num_best]


@pytest.mark.slow_cases
@pytest.mark.parametrize(
  'steps, beam_size, stops, alpha, least',
  [(4, V**4, (2,), 0.8, 0), (9, 3, (2,), 0.8, 0), (6, 2, (0, 3), 2.0, 0), (5, 2, (1,), 0.0, 4), (1, 2, (1,), 0.8, 0)],
)
def test_a_flat_search_is_that_of_a_search_by_hand(steps, beam_size, stops, alpha, least):
  def no_early_stop(log_probs, ids):
    return np.where(np.isin(np.arange(V), stops) & (len(ids) < least), -np.inf, log_probs)

  fields = {'max_decode_steps': steps, 'stop_ids': stops, 'length_penalty': alpha, 'min_decode_steps': least}
  num_best = min(12, beam_size)
  decoded = decode(cls=FlatBeamSearch, beam_size=beam_size, num_best=num_best, **fields)
  for row, length in enumerate(LENGTHS):
    prompt = PROMPTS[row, :length].tolist()
    expected = search_flat(prompt, steps, beam_size, num_best, stops, alpha, no_early_stop)
    check(decoded, row, expected, prompt)
    if beam_size == V**4:
      every = [pair for pair in enumerate_all(prompt, steps, stops, alpha) if pair[1][-1] in stops]
      check(decoded, row, every[:num_best], prompt)


class Tabled:
  """Steps whose logits at each position are a table by the last token."""

  max_positions = None

  def __init__(self, *tables):
    self.tables = np.array(tables, np.float32)

  def start(self, num_rows, num_slots):
    return jnp.zeros((num_rows, 1))

  def extend(self, ids_BT, pos_BT, last_B, state):
    return jnp.asarray(self.tables)[pos_BT[:, -1], ids_BT[:, -1]], state


def check_tabled(steps, prompt, alpha, expected, sums):
  fields = {'beam_size': 4, 'num_best': 4, 'max_decode_steps': 3, 'stop_ids': (4,), 'length_penalty': alpha}
  decoder = Config(FlatBeamSearch, **fields).instantiate()
  found = decoder.decode(steps, np.array([prompt], np.int32), np.array([len(prompt)]), None)
  texts = [ids[:length] for ids, length in zip(found.beam_ids[0].tolist(), found.beam_lengths[0])]
  assert texts == expected
  scores = [total / norm(len(text), alpha) for text, total in zip(expected, sums)]
  np.testing.assert_allclose(found.beam_scores[0], scores, rtol=1e-6, atol=1e-6)


def test_a_flat_search_gives_the_tables_of_praxis(monkeypatch):
  """Two of its tests have these logits, and expect these texts; the second takes the logits for log-probabilities."""
  table = np.array([[1, 0, 0, 2, 0], [5, 1, 0, 0, 0], [5, 0, 0, 1, 0], [0, 1, 0, 2, 10], [0] * 5])
  log_probs = table - np.log(np.exp(table).sum(1, keepdims=True))
  texts = [[4], [3, 4], [0, 3, 4], [1, 0, 4]]
  sums = [sum(log_probs[i, j] for i, j in zip([3, *text], text)) for text in texts]
  check_tabled(Tabled(*[table] * 4), [2, 3], 0.0, texts, sums)

  monkeypatch.setattr(jax.nn, 'log_softmax', lambda x, axis=-1: x)
  first, zeros = np.tile([2, 3, 1, 5, 0], (5, 1)), np.zeros((5, 5))
  second = [[0] * 5, [25, 4, 3, 2, 1], [1, 2, 26, 4, 5], [2, 3, 4, 1, 55], [0] * 5]
  texts = [[3, 4], [1, 0, 4], [2, 2, 4], [3, 2, 4]]
  check_tabled(Tabled(first, second, zeros), [0], 0.8, texts, [5 + 55, 3 + 25, 1 + 26, 5 + 4])


def test_a_flat_search_needs_stop_tokens_and_does_not_end_early():
  with pytest.raises(ConfigError, match=r'FlatBeamSearch.stop_ids: expected at least one token, got \(\)'):
    decode(cls=FlatBeamSearch, max_decode_steps=3)
  with pytest.raises(ConfigError, match=r'FlatBeamSearch\.early_stopping: expected False, since all beams end'):
    Config(FlatBeamSearch, early_stopping=True).instantiate()
  assert Config(FlatBeamSearch).instantiate().length_penalty == 0.8


ATTENTION = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.0, 0.1, 0.9]], np.float32)


class Covering(RunningSum):
  """The same, with a source of three tokens, and in each row a fourth that is padding; a token always covers alike."""

  def start(self, num_rows, num_slots):
    return {'sums': super().start(num_rows, num_slots), 'covered': jnp.zeros((num_rows, 4)).at[:, 3].set(jnp.inf)}

  def extend(self, ids_BT, pos_BT, last_B, state):
    logits_BV, sums = super().extend(ids_BT, pos_BT, last_B, state['sums'])
    new = jnp.where(pos_BT[..., None] >= 0, jnp.pad(ATTENTION, ((0, 0), (0, 1)))[ids_BT], 0.0).sum(1)
    return logits_BV, {'sums': sums, 'covered': state['covered'] + new}

  def coverage(self, state):
    return state['covered']


def test_coverage_is_a_term_of_the_score_of_what_ends():
  fields = {'max_decode_steps': 3, 'beam_size': V**3, 'num_best': 12, 'stop_ids': (2,), 'coverage_penalty': 0.6}
  decoder = Config(BeamSearch, **fields).instantiate()
  decoded = jax.tree.map(np.asarray, jax.jit(lambda: decoder.decode(Covering(), PROMPTS, LENGTHS))())
  for row, length in enumerate(LENGTHS):
    prompt, expected = PROMPTS[row, :length].tolist(), []
    for score, ids in enumerate_all(prompt, 3, (2,), 0.6):
      covered = ATTENTION[[*prompt, *ids[:-1]]].sum(0)
      expected.append((score + 0.6 * np.log(np.clip(covered, np.finfo(np.float32).tiny, 1.0)).sum(), ids))
    check(decoded, row, sorted(expected, key=lambda pair: -pair[0])[:12], prompt)


def test_a_model_without_sources_has_no_coverage():
  with pytest.raises(ConfigError, match=r'BeamSearch\.coverage_penalty: expected 0 for a model without sources, got'):
    decode(max_decode_steps=3, coverage_penalty=0.2)


def test_scores_may_be_divided_by_the_length_as_transformers_does():
  fields = {'max_decode_steps': 4, 'beam_size': V**4, 'num_best': 9, 'stop_ids': (2,), 'length_penalty': 1.5}
  decoded = decode(length_norm='length', **fields)
  for row, length in enumerate(LENGTHS):
    every = enumerate_all(PROMPTS[row, :length].tolist(), 4, (2,), 0.0)
    expected = sorted(((total / len(ids) ** 1.5, ids) for total, ids in every), key=lambda pair: -pair[0])[:9]
    check(decoded, row, expected, PROMPTS[row, :length].tolist())


def test_the_metrics_are_those_of_the_best():
  decoded = decode(PROMPTS, np.array([3, 0, 2]), max_decode_steps=5, beam_size=2, num_best=2)
  metrics = decoded.metrics(np.array([True, False, True]))
  assert metrics['decoded_length'] == (5, 2)
  np.testing.assert_allclose(metrics['log_prob'][0], np.asarray(decoded.log_probs).sum() / 10, rtol=1e-5)


@pytest.mark.slow
def test_a_prompt_is_read_once_and_the_search_ends_when_it_can_find_nothing_better():
  def calls(**fields):
    steps = RunningSum()
    decoder = Config(BeamSearch, max_decode_steps=50, beam_size=3, stop_ids=(0, 2), **fields).instantiate()
    jax.block_until_ready(jax.jit(lambda: decoder.decode(steps, PROMPTS, LENGTHS))())
    jax.effects_barrier()
    return steps.calls

  without, early = calls(length_penalty=0.0), calls(length_penalty=9.0, early_stopping=True)
  assert without[0] == (3, P) and set(without[1:]) == {(9, 1)}
  assert len(without) < 50 and len(early) < 50 and len(calls(length_penalty=9.0)) == 50


class Stacked(RunningSum):
  """The same, with rows in the second dimension of one array, and an array that all rows share."""

  def start(self, num_rows, num_slots):
    return {'stack': jnp.zeros((2, num_rows, 1, V)), 'count': jnp.int32(0)}

  def row_axes(self, num_rows, num_slots):
    return find_row_axes(self.start(num_rows, num_slots), self.start(2 * num_rows, num_slots))

  def extend(self, ids_BT, pos_BT, last_B, state):
    logits_BV, after = super().extend(ids_BT, pos_BT, last_B, state['stack'][1])
    return logits_BV, {'stack': state['stack'].at[1].set(after), 'count': state['count'] + 1}


class Unknown(Stacked):
  row_axes = None


class Square(Stacked):
  def start(self, num_rows, num_slots):
    return {'square': jnp.zeros((num_rows, num_rows))}


def test_rows_may_be_any_dimension_of_the_state():
  decoder = Config(BeamSearch, max_decode_steps=5, beam_size=3, num_best=3).instantiate()
  found = jax.jit(lambda: decoder.decode(Stacked(), PROMPTS, LENGTHS).beam_ids)()
  np.testing.assert_array_equal(found, decode(max_decode_steps=5, beam_size=3, num_best=3).beam_ids)
  with pytest.raises(
    ConfigError, match=r'count of the decoding state has shape \(\); .* Unknown needs a method row_ax'
  ):
    decoder.decode(Unknown(), PROMPTS, LENGTHS)
  with pytest.raises(ConfigError, match=r'square of the decoding state has shape \(3, 3\), and \(6, 6\) for twice'):
    decoder.decode(Square(), PROMPTS, LENGTHS)


def test_beams_that_go_on_keep_their_places():
  parents = np.random.default_rng(0).integers(0, 5, (40, 5))
  parents[:3] = [0, 0, 0, 0, 0], [4, 3, 2, 1, 0], [2, 2, 1, 1, 2]
  order = np.asarray(keep_places(parents))
  np.testing.assert_array_equal(np.sort(order, axis=1), np.tile(np.arange(5), (40, 1)))
  for parent in np.take_along_axis(parents, order, axis=1):
    assert all(parent[beam] == beam for beam in parent)


@pytest.mark.parametrize(
  'fields, expected',
  [
    ({'beam_size': 0}, 'at least 1'),
    ({'num_best': 0}, 'from 1 to beam_size, which is 4'),
    ({'num_best': 5}, 'from 1 to beam_size, which is 4'),
    ({'num_groups': 3}, 'a divisor of beam_size, which is 4'),
    ({'num_groups': 0}, 'a divisor of beam_size, which is 4'),
    ({'diversity_penalty': -1.0}, 'a finite number of at least 0'),
    ({'coverage_penalty': -0.1}, 'a finite number of at least 0'),
    ({'length_norm': 'tokens'}, "'gnmt' or 'length'"),
    ({'length_penalty': -0.5}, 'a finite number of at least 0'),
    ({'length_penalty': float('nan')}, 'a finite number of at least 0'),
    ({'max_decode_steps': 0}, 'from 1 to'),
  ],
  ids=str,
)
def test_impossible_hyperparameters_are_named(fields, expected):
  (field,) = fields
  with pytest.raises(ConfigError, match=f'BeamSearch.{field}: expected {expected}'):
    Config(BeamSearch, **fields).instantiate()
