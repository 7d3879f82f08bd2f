"""Continuous batching: requests that come and go are continued as each would be alone."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import numpy as np
import pytest
from batched_lm import ONE, V, made, task

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.layers import cached_attention, decode_kernel
from praxis_lite.models.decoding import BeamSearch, SpeculativeSampler
from praxis_lite.runs.prefix_store import PrefixStore
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.records.run_config import run_keys
from praxis_lite.runs.row_slots import RowSlots, TakenRow
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig

pytestmark = pytest.mark.usefixtures('shared_programs')

SYSTEM = 'be brief and kind. '
# Prompts of one token, of a chunk, and longer; limits and settings of all kinds; more than there are rows.
REQUESTS = [
  ('a', {'temperature': 0.0, 'max_tokens': 12}),
  (SYSTEM + 'who are you?', {'temperature': 0.7, 'seed': 5}),
  ('abcd', {'temperature': 0.7, 'max_tokens': 1}),
  (SYSTEM + 'what is it?', {'temperature': 0.7, 'seed': 5, 'max_tokens': 9}),
  (list(b'tokens in, tokens out'), {'temperature': 0.0, 'max_tokens': 11}),
  (SYSTEM + 'who are you?', {'temperature': 0.7, 'seed': 6}),
  ('abcde', {'temperature': 0.0, 'max_tokens': 3}),
]


@functools.cache
def alone(number):
  prompt, settings = REQUESTS[number]
  (result,) = made().decode([prompt], **settings)
  return result


def submit_all(batcher, **more):
  return [batcher.submit(prompt, **settings, **more) for prompt, settings in REQUESTS]


def batcher(mesh=ONE, **fields):
  return made(mesh).batcher(**{'rows': 3, 'max_length': 44, 'tokens_per_step': 4, 'chunk': 4, **fields})


def num_compiled(batcher):
  programs = batcher._programs
  return [len(program._compiled) for program in (programs._read, programs._copy, programs._extend)]


@pytest.mark.slow
def test_each_request_gets_the_tokens_that_it_gets_alone():
  """Requests that come later too, and those whose prompt begins like another; nothing is compiled for a request."""
  own = batcher(chunks_per_step=2)
  requests = [own.submit(prompt, **settings) for prompt, settings in REQUESTS[:2]]
  own.step()
  requests += [own.submit(prompt, **settings) for prompt, settings in REQUESTS[2:]]
  ended = list(own)
  assert {id(r) for r in requests} <= {id(r) for r in ended} and not own.num_running and not own.num_waiting
  assert [request.result for request in requests] == [alone(i) for i in range(len(REQUESTS))]
  assert len({request.text for request in requests}) > 3  # Not all the same.
  assert num_compiled(own) == [1, 1, 1]
  assert max(request.shared for request in requests) >= len(SYSTEM)
  read, shared = own.statistics.prompt_tokens, own.statistics.shared_tokens
  assert read + shared == sum(len(request.prompt) - 1 for request in ended) and shared > 0
  assert own.statistics.new_tokens == sum(len(request.ids) for request in ended)


@pytest.mark.slow
def test_without_shared_prefixes_the_tokens_are_the_same():
  own = batcher(reuse_prefixes=False, tokens_per_step=1, chunks_per_step=1)
  requests = submit_all(own)
  own.run(requests)
  assert [request.result for request in requests] == [alone(i) for i in range(len(REQUESTS))]
  assert not own.statistics.shared_tokens and num_compiled(own)[::2] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize('style, mesh', [('t5', ONE), ('bart', ONE), ('t5', (2, 1, 3, 1))], ids=str)
def test_sources_that_come_and_go_get_the_texts_that_they_get_alone(style, mesh):
  own = made(mesh, style).batcher(rows=4 if mesh != ONE else 3, max_length=34, tokens_per_step=5)
  requests = submit_all(own)
  own.run()
  of_one = made(style=style)
  expected = [of_one.decode([prompt], **settings)[0] for prompt, settings in REQUESTS]
  assert [request.result for request in requests] == expected
  assert len({request.text for request in requests}) > 3 and not own.statistics.shared_tokens
  assert num_compiled(own)[::2] == [1, 1]


def test_what_a_batcher_of_sources_refuses():
  with pytest.raises(ConfigError, match=r'^batcher: max_length = 60: the model sees only 49 tokens'):
    made(style='bart').batcher(max_length=60)
  with pytest.raises(ConfigError, match=r'^batcher: kept_prefixes = 2; sources are read as a whole'):
    made(style='t5').batcher(kept_prefixes=2)
  own = made(style='t5').batcher(rows=1, max_length=8)
  for prompt, most in (('a' * 9, 3), ('a', 9)):
    with pytest.raises(
      ConfigError, match=r'^submit: a source of [19] tokens? with max_tokens = [39]: both are at most'
    ):
      own.submit(prompt, max_tokens=most)


@pytest.mark.slow
def test_a_mesh_gives_the_same_tokens():
  """Its axes do not divide the rows; one of them is not used."""
  own = batcher((2, 1, 3, 1), rows=4)
  requests = submit_all(own)
  own.run()
  assert [request.result for request in requests] == [alone(i) for i in range(len(REQUESTS))]
  assert num_compiled(own) == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize('mesh, dtype', [(ONE, 'int8'), ((2, 1, 1, 3), None)], ids=str)
def test_the_kernel_of_tpus_gives_the_same_tokens(mesh, dtype, monkeypatch):
  """Interpreted: one token of each row, chunks of prompts, and guesses; layers with a window and without."""
  prompts = [prompt for prompt, _ in REQUESTS if isinstance(prompt, str)]

  def tokens():
    model = made.__wrapped__(mesh, cache_dtype=dtype)
    own = model.batcher(rows=4, max_length=44, tokens_per_step=4, chunk=4)
    requests = submit_all(own)
    own.run()
    guessed = model.decode(prompts, temperature=0.0, lookup=1, draft_tokens=3)
    plain = model.decode(prompts, temperature=0.0)
    assert guessed == plain and len({*plain}) > 3
    return [request.result for request in requests], plain

  wanted, seen, attend = tokens(), set(), decode_kernel.attend_by_kernel
  monkeypatch.setattr(cached_attention, 'platform', lambda: 'tpu')
  monkeypatch.setattr(cached_attention, '_KERNEL_FROM', 1)
  monkeypatch.setattr(decode_kernel, 'attend_by_kernel', lambda *a, **k: seen.add(a[0].shape[1]) or attend(*a, **k))
  assert tokens() == wanted
  assert {1, 4} <= seen


def test_a_seed_compiles_nothing(caplog):
  own = batcher()
  own.submit('a', seed=5)
  with jax.log_compiles(), caplog.at_level('WARNING'):
    keys = [own.submit('a', seed=seed)._key_data.tolist() for seed in (8, -3, 2**40 + 1)]
  assert len({str(key) for key in keys}) == 3 and 'Compiling' not in caplog.text
  for seed, key in zip((8, -3, 2**40 + 1), keys):
    assert own._programs.draw_key(run_keys(seed, made().tasks.mesh).evaluate).tolist() == key


@pytest.mark.slow
def test_each_request_has_its_own_top_p_and_log_probabilities():
  """They share a program with requests that have no top_p."""
  own, kinds = batcher(rows=4, top_log_probs=3), [{'top_p': 0.5}, {}, {'temperature': 0.0}, {'top_p': 1.0}]
  settings = [{'seed': 3, 'temperature': 1.5, **kind} for kind in kinds]
  requests = [own.submit('abcd', **each) for each in settings]
  own.run()
  assert [request.text for request in requests] == [made().decode(['abcd'], **each)[0] for each in settings]
  assert requests[0].ids != requests[1].ids
  scores = made().score([list(b'abcd')] * 4, [request.ids for request in requests])
  for request, score in zip(requests, scores):
    np.testing.assert_allclose(request.log_probs, score.log_probs, rtol=1e-4, atol=1e-4)
    assert len(request.top) == len(request.ids) and all(len(top) == 3 for top in request.top)
    assert all(top[0][1] >= top[1][1] >= top[2][1] for top in request.top)
    for token, log_prob, top in zip(request.ids, request.log_probs, request.top):
      assert dict(top).get(token, log_prob) == log_prob <= top[0][1]
  assert requests[2].ids == [top[0][0] for top in requests[2].top]


@pytest.mark.slow
def test_settings_of_all_requests_apply_and_history_counts():
  settings = {'repetition_penalty': 1.4, 'top_k': 20, 'no_repeat_ngram_size': 2, 'temperature': 0.7}
  own = batcher(**settings)
  request, other = own.submit('abab', seed=4), own.submit('xyz', seed=2)
  own.run()
  assert [request.text] == made().decode(['abab'], seed=4, **settings)
  assert [other.text] == made().decode(['xyz'], seed=2, **settings)


def test_stops_end_a_request_and_its_row_is_free():
  whole = alone(1)
  stop = whole[2:4]
  own = batcher(rows=1)
  first = own.submit(REQUESTS[1][0], **REQUESTS[1][1], stop=[stop])
  second = own.submit(list(REQUESTS[1][0].encode()), **REQUESTS[1][1], stop_tokens=[ord(whole[3])])
  own.run()
  assert first.text == whole[: whole.index(stop) + 2]
  assert bytes(second.ids).decode() == whole[: whole.index(whole[3]) + 1]
  assert second.shared == len(second.prompt) - 1  # All but the last token.


def test_requests_that_come_together_share_what_the_first_one_reads():
  own = batcher(chunks_per_step=99)
  first, second = (own.submit(SYSTEM + text, max_tokens=2, temperature=0.0) for text in 'xy')
  own.run()
  assert (first.shared, second.shared) == (0, len(SYSTEM))
  assert own.statistics.prompt_tokens == len(SYSTEM)


def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_no_trace():
  own = batcher(rows=1, chunks_per_step=1)
  request, other = own.submit(SYSTEM * 2, max_tokens=2), own.submit(REQUESTS[1][0], **REQUESTS[1][1])
  own.step()
  own.cancel(request)
  assert list(own) == [other] and other.text == alone(1)
  assert other.shared == 0  # Only one chunk had been read.


def test_streams_get_pieces_and_may_submit_and_cancel():
  own, pieces, later = batcher(), [], []

  def stream(piece):
    pieces.append(piece)
    if not later:
      later.append(own.submit('abcde', **REQUESTS[6][1]))

  request = own.submit(REQUESTS[3][0], **REQUESTS[3][1], stream=stream)
  tokens = []
  of_tokens = own.submit(REQUESTS[4][0], **REQUESTS[4][1], stream=tokens.extend)
  own.run()
  own.run(later)
  assert ''.join(pieces) == request.text == alone(3) and len(pieces) > 1
  assert tokens == of_tokens.ids == alone(4)
  assert later[0].text == alone(6)


def test_cancelled_requests_keep_what_they_have():
  own = batcher(rows=1)
  running, waiting, last = own.submit('a', **REQUESTS[0][1]), own.submit('b'), own.submit('abcde', **REQUESTS[6][1])
  own.step()
  assert 'running, 4 of up to 12' in repr(running) and 'waiting' in repr(waiting)
  own.cancel(running)
  own.cancel(waiting)
  own.cancel(waiting)  # Nothing happens.
  assert list(own) == [last] and last.text == alone(6)
  assert running.is_cancelled and waiting.is_cancelled and not last.is_cancelled
  assert running.text == alone(0)[:4] and waiting.text == ''
  other = batcher(rows=1)
  with pytest.raises(UserError, match='cancel: this request belongs to another batcher'):
    other.cancel(own.submit('c'))
  with pytest.raises(UserError, match='cancel: expected a request, as submit returns it, got str'):
    own.cancel('c')
  with pytest.raises(UserError, match='run: all requests of this batcher have ended'):
    other.run([own.submit('c')])


@pytest.mark.parametrize(
  'prompt, settings, told',
  [
    (
      'a' * 40,
      {'max_tokens': 6},
      r'a prompt of 40 tokens with max_tokens = 6 needs more .* max_length = 44 .* up to 5 fit',
    ),
    ('a' * 50, {}, 'the prompt has more than 44 tokens'),
    ([], {}, 'submit: a prompt is empty'),
    (['a', 'b'], {}, r"submit: a prompt is \['a', 'b'\]; expected one text, or a list of tokens"),
    ('', {}, 'empty'),
    ([1, V], {}, 'submit: ids: 128, at position 1 of row 0, is not in the vocabulary'),
    ('a', {'max_tokens': 0}, 'submit: max_tokens = 0; expected at least 1'),
    ('a', {'max_tokens': 'x'}, 'submit: max_tokens: expected int'),
    ('a', {'temperature': -1.0}, 'submit: temperature = -1.0; expected from 0'),
    ('a', {'temperature': float('nan')}, 'submit: temperature = nan'),
    ('a', {'top_p': 0.0}, 'submit: top_p = 0.0; expected more than 0 and at most 1'),
    ('a', {'top_p': float('nan')}, 'submit: top_p = nan'),
    ('a', {'stop': 'x'}, r"submit: stop: expected a list of texts, got one text; pass \['x'\]"),
    ('a', {'seed': 'x'}, 'seed: expected int'),
    ('a', {'stream': True}, 'submit: stream = True; expected a function'),
  ],
)
def test_a_request_that_cannot_be_continued_is_refused(prompt, settings, told):
  with pytest.raises(UserError, match=told):
    idle().submit(prompt, **settings)
  assert not idle().num_waiting


@functools.cache
def idle():
  return batcher()


def test_texts_need_a_tokenizer():
  model = made()
  bare = TrainedModel(model.config, model.tasks, model.stored_variables, model.global_step)
  own = bare.batcher(rows=1, max_length=20)
  with pytest.raises(UserError, match='submit: texts need a dataset with a tokenizer'):
    own.submit('a')


@pytest.mark.parametrize(
  'fields, told',
  [
    ({'rows': 0}, 'batcher: rows = 0; expected at least 1'),
    ({'max_length': 0}, 'batcher: max_length = 0; expected at least 1'),
    ({'rows': 'x'}, 'batcher: rows: expected int'),
    ({'kept_prefixes': -1}, 'batcher: kept_prefixes = -1; expected at least 0'),
    ({'kept_prefixes': None}, 'batcher: kept_prefixes: expected int'),
    ({'top_log_probs': -1}, 'batcher: top_log_probs = -1; expected at least 0'),
    ({'kept_prefixes': 2, 'reuse_prefixes': False}, 'kept_prefixes = 2; it needs reuse_prefixes=True'),
    ({'kept_prefixes': 10**13}, 'caches of rows = 3 and kept_prefixes = 10000000000000 need'),
    ({'chunk': 0}, 'batcher: chunk = 0; expected at least 1'),
    ({'max_length': 10**13}, 'batcher: the caches of rows = 3 need .* of memory; take fewer rows'),
    ({'temperature': 'hot'}, 'batcher: temperature: expected'),
    ({'beam_size': 2}, '^batcher: beam_size: a batcher does not support it; use TrainedModel.decode'),
    ({'lookup': 2}, '^batcher: lookup: a batcher does not support it'),
    ({'regex': '[0-9]'}, '^batcher: regex: a batcher does not support it'),
    ({'stop': ['x']}, '^batcher: stop is a setting of a request; give it to submit'),
    ({'seed': 1}, '^batcher: seed is a setting of a request'),
    ({'row': 2}, "^batcher: there is no setting 'row'. Did you mean 'rows'"),
    ({'top_kk': 2}, "^batcher: there is no setting 'top_kk'. Did you mean 'top_k'"),
  ],
)
def test_a_batcher_that_cannot_work_is_refused(fields, told):
  with pytest.raises(ConfigError, match=told):
    batcher(**fields)


def test_unknown_keywords_are_named_with_the_nearest_one():
  own = batcher(rows=1)
  for call, told in (
    (lambda: own.submit([1], top_k=5), r'^submit: top_k is set for all calls, as in batcher\(top_k=\.\.\.\)$'),
    (lambda: own.submit([1], temperture=0.5), "^submit: there is no setting 'temperture'. Did you mean 'temperature'"),
    (lambda: own.submit([1], max_new_tokens=5), "^submit: .* 'max_new_tokens'. Did you mean 'max_tokens'"),
    (lambda: made().decode([[1]], tempratur=1), "^decode: there is no setting 'tempratur'. Did you mean 'temperature'"),
    (lambda: made().decode(prompt=[[1]]), "^decode: there is no setting 'prompt'. Did you mean 'prompts'"),
    (lambda: made().decode([[1]], zzz=1), "^decode: there is no setting 'zzz'. There are: prompts, max_tokens, "),
    (lambda: made().score([[1]], [[2]], batch=1), "^score: there is no setting 'batch'. Did you mean 'batch_size'"),
    (lambda: made().export('out', format=('x',)), "^export: there is no setting 'format'. Did you mean 'formats'"),
  ):
    with pytest.raises(ConfigError, match=told) as raised:
      call()
    assert isinstance(raised.value, TypeError)
  with pytest.raises(TypeError, match='missing 1 required positional argument'):
    own.submit()
  assert {'prompts', 'temperature', 'seed'} < {*inspect.signature(made().decode).parameters}  # For help and completion.


@pytest.mark.parametrize(
  'change, told',
  [
    (lambda task: task.model.set(decoder_tpl=Config(BeamSearch)), 'task.model.decoder_tpl is a BeamSearch'),
    (lambda task: task.model.set(decoder_tpl=Config(SpeculativeSampler)), 'is a SpeculativeSampler'),
    (lambda task: task.model.set(model_type='prefix'), "model_type 'prefix' reads a whole prompt at once"),
    (lambda task: task.model.decoder_tpl.set(max_context=20), 'max_length = 44: the model sees only 20 tokens at once'),
  ],
)
def test_a_model_that_cannot_be_batched_is_refused(change, told):
  config = task()
  change(config)
  own = TaskOnMesh(config.instantiate(), made().tasks.mesh)
  model = TrainedModel(ExperimentConfig(config, [], []), own, made().stored_variables, np.int32(0))
  with pytest.raises(ConfigError, match=re.escape(told)):
    model.batcher(rows=3, max_length=44)


def test_the_stream_that_raises_ends_its_request_and_no_other():
  def fail(piece):
    raise OSError('the client is gone')

  own = batcher(rows=2)
  first, second = own.submit('a', max_tokens=9, stream=fail), own.submit('b', max_tokens=2)
  third = own.submit('c', max_tokens=3)
  with pytest.raises(OSError, match='the client is gone') as raised:
    list(own)
  assert 'the stream of <request' in raised.value.__notes__[0]
  assert first.is_cancelled and first.is_done
  assert list(own) == [second, third]  # Also what had ended in the step that raised the error.


def test_by_default_a_row_has_no_more_tokens_than_the_model_sees():
  config = task()
  config.model.decoder_tpl.max_context = 20
  own = TaskOnMesh(config.instantiate(), made().tasks.mesh)
  model = TrainedModel(ExperimentConfig(config, [], []), own, made().stored_variables, np.int32(0))
  with pytest.raises(ConfigError, match='max_length = 20 of the batcher'):
    model.batcher(rows=1).submit([1] * 30)


# ---------------------------------------------------------------- rows


TURNS = [f'{name} is the first of all. {text}' for text in ('why?', 'how?') for name in ('one', 'two', 'six')]


@pytest.mark.parametrize('mesh', [ONE, pytest.param((2, 1, 3, 1), marks=pytest.mark.slow)], ids=str)
def test_prefixes_outlive_the_rows_that_read_them(mesh):
  """One row is too few for three beginnings that take turns; three places keep them, and tokens stay the same."""
  found = {}
  for kept in (0, 3):
    own = batcher(mesh, rows=1, kept_prefixes=kept, chunks_per_step=20)
    requests = [own.submit(turn, max_tokens=3, temperature=0.0) for turn in TURNS]
    own.run()
    found[kept] = [request.ids for request in requests], [request.shared for request in requests]
  assert found[0][0] == found[3][0]
  shared = len(TURNS[0]) - len('why?')
  assert found[0][1] == [0] * 6 and found[3][1] == [0] * 3 + [shared] * 3
  assert [len(p._compiled) for p in (own._programs._keep, own._programs._fetch, own._programs._read)] == [1] * 3


def test_a_row_that_a_prompt_only_extends_takes_no_place():
  """The second turn of a chat overwrites nothing, so the prefix of another one stays in the only place."""
  own = batcher(ONE, rows=1, kept_prefixes=1, chunks_per_step=20)
  first, other = TURNS[:2]
  settings = {'max_tokens': 3, 'temperature': 0.0}
  for prompt in (first, other):
    answer = own.submit(prompt, **settings)
    own.run()
  own.submit([*other.encode(), *answer.ids, 32], **settings)
  own.run()
  again = own.submit(f'{first} so?', **settings)
  own.run()
  assert again.shared >= len(first)


def test_a_store_keeps_what_was_used_last_and_nothing_twice():
  store, one, two, three = PrefixStore(2, 3), [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
  assert store.find(one) is None and store.keep([1, 1]) is None  # Too few.
  assert [store.keep(ids) for ids in (one, two, one, [2, 2, 2])] == [0, 1, None, None]
  assert store.find([*one, 9]) == (0, 4) and store.find(one) == (0, 3)  # The last token is read again.
  assert store.find([*one, 9], more_than=4) is None
  assert store.keep(three) == 1 and store.find([*two, 9]) is None  # `two` was used least recently.
  assert store.keep([*one, 5]) == 0  # It takes the place of its own beginning.
  assert store.keep(two, but=1) == 0  # Place 1 is read next.
  assert PrefixStore(0, 3).keep(one) is None is PrefixStore(0, 3).find(one)
  assert PrefixStore(1, 3).keep(one, but=0) is None


def test_a_prompt_takes_the_row_that_begins_like_it():
  slots, system = RowSlots(3), list(range(10))
  assert slots.take([*system, 1]) == TakenRow(0, None, 0)
  slots.note_read(0, system)
  assert slots.take([*system, 2, 3]) == TakenRow(1, 0, 10)  # Row 0 is busy, and is copied.
  assert slots.take(list(range(20, 40))) == TakenRow(2, None, 0)
  assert not slots.has_free
  slots.release(2)
  slots.release(1)
  assert slots.take([*system, 4]) == TakenRow(1, 1, 10)  # Not copied, though row 2 was released first.
  assert slots.take([0, 1, 2, 7]) == TakenRow(2, None, 0)  # Too few to copy.
  slots.release(0)
  assert slots.take(system) == TakenRow(0, 0, 9)  # The last token is read again.
