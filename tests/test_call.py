"""The pure call: frames by path, randomness by path, side outputs."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import merge
from praxis_lite.layers.base import call
from praxis_lite.layers.base.call import Frame, SideOutputs, Summary


def draws(key):
  return np.asarray(jax.random.key_data(key)).tolist()


def side_outputs(**fields):
  return SideOutputs(**{'summaries': {}, 'aux_losses': {}, 'updates': {}, 'decode_state': {}, **fields})


@pytest.mark.slow
def test_key_of_a_path_is_the_same_in_every_process():
  program = (
    'import jax; from praxis_lite.layers.base import call;'
    "print(jax.random.key_data(call.fold_in_path(jax.random.key(3), ('lm', 'softmax'))).tolist())"
  )
  other = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
  assert other.stdout.strip() == str(draws(call.fold_in_path(jax.random.key(3), ('lm', 'softmax'))))


def test_keys_differ_by_path_and_by_draw_and_not_by_what_others_drew():
  alone, busy = Frame((), {}, key=jax.random.key(0)), Frame((), {}, key=jax.random.key(0))
  busy.next_key(('a',))
  busy.next_key(('b', 'c'))
  first = busy.next_key(('b',))
  assert draws(first) == draws(alone.next_key(('b',)))
  keys = [first, busy.next_key(('b',)), busy.next_key(('a',)), busy.next_key(('b', 'c')), busy.next_key(('bc',))]
  assert len({str(draws(k)) for k in keys}) == len(keys)


def test_keys_are_relative_to_the_root_of_the_frame():
  """So a layer draws the same wherever its call starts, given the same key."""
  key = jax.random.key(0)
  whole, part = Frame((), {}, key=key), Frame(('lm',), {}, key=key)
  assert draws(whole.next_key(('a',))) == draws(part.next_key(('lm', 'a')))


def test_drawing_without_a_key_names_the_layer():
  with pytest.raises(ConfigError, match=r'lm\.dropout.*key='):
    Frame((), {}).next_key(('lm', 'dropout'))


def test_update_is_read_back_in_the_same_frame_and_leaves_the_arguments_alone():
  variables = {'a': {'m': 1, 'w': 2}}
  frame = Frame((), variables)
  frame.update(('a', 'm'), 5)
  assert frame.variable(('a', 'm')) == 5
  assert frame.variable(('a',)) == {'m': 5, 'w': 2}
  assert variables == {'a': {'m': 1, 'w': 2}}
  assert frame.side_outputs().updates == {'a': {'m': 5}}


def test_cache_is_written_without_changing_what_was_passed_in():
  state = {'a': {'k': 1}}
  frame = Frame((), {}, decode_state=state)
  frame.write_cache(('a', 'k'), 2)
  frame.write_cache(('a', 'v'), 3)
  assert frame.read_cache(('a', 'k')) == 2
  assert frame.read_cache(('b',)) is None
  assert frame.side_outputs().decode_state == {'a': {'k': 2, 'v': 3}}
  assert state == {'a': {'k': 1}}


def test_innermost_frame_that_holds_the_path_is_found():
  outer, inner = Frame((), {'x': 1}), Frame(('layers',), {'w': 2})
  assert call.current_frame() is None
  with call.enter(outer), call.enter(inner):
    assert call.frame_holding(('layers', 'w')) is inner
    assert call.frame_holding(('x',)) is outer
    assert call.frame_holding(('layers_2',)) is outer
    assert call.current_frame() is inner
  assert call.frame_holding(('x',)) is None


def test_frames_are_left_when_the_call_raises():
  with pytest.raises(RuntimeError), call.enter(Frame((), {})):
    raise RuntimeError
  assert call.current_frame() is None


def test_absorbed_side_outputs_join_those_of_the_frame():
  frame = Frame((), {'b': {'m': 0, 'n': 0}})
  frame.update(('b', 'm'), 1)
  frame.summaries['x'] = Summary(jnp.float32(1.0))
  nested = side_outputs(
    summaries={'b/y': Summary(jnp.float32(2.0))},
    aux_losses={'b/z': (jnp.float32(3.0), jnp.float32(1.0))},
    updates={'n': 2},
    decode_state={'k': 4},
  )
  frame.absorb(('b',), nested)
  side = frame.side_outputs()
  assert set(side.summaries) == {'x', 'b/y'}
  assert set(side.aux_losses) == {'b/z'}
  assert side.updates == {'b': {'m': 1, 'n': 2}}
  assert side.decode_state == {'b': {'k': 4}}


def test_merge_updates_replaces_leaves_and_keeps_the_rest():
  variables = {'a': {'w': 1, 'm': 2}, 'b': 3}
  assert merge(variables, {'a': {'m': 9}}) == {'a': {'w': 1, 'm': 9}, 'b': 3}
  assert merge(variables, {}) == variables
  assert variables == {'a': {'w': 1, 'm': 2}, 'b': 3}


def test_summaries_pass_through_transforms_with_their_kind():
  def body(carry, x):
    return carry, {'h': Summary(x * 2, 'histogram')}

  _, stacked = jax.jit(lambda xs: jax.lax.scan(body, 0, xs))(jnp.arange(3.0))
  assert stacked['h'].kind == 'histogram'
  np.testing.assert_array_equal(stacked['h'].value, [0.0, 2.0, 4.0])


def test_summaries_of_a_layer_used_twice_are_both_kept():
  frame = Frame((), {})
  frame.add_summary('a/s', Summary(jnp.ones(())))
  frame.absorb(('a',), side_outputs(summaries={'a/s': Summary(jnp.zeros(()))}))
  assert {name: float(s.value) for name, s in frame.summaries.items()} == {'a/s': 1.0, 'a/s_1': 0.0}


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg', 'unsafe_rbg'])
@pytest.mark.parametrize('paths', [[], [('lm', 'w'), ('lm', 'softmax', 'w'), ('b',)]], ids=len)
def test_keys_of_several_paths_are_those_of_each(impl, paths):
  key = jax.random.key(3, impl=impl)
  alone = [draws(call.fold_in_path(key, path)) for path in paths]
  for fold in (call.fold_in_paths, jax.jit(call.fold_in_paths, static_argnums=1)):
    keys = fold(key, tuple(paths))
    assert [draws(keys[path]) for path in paths] == alone
