"""The trace that is running is told apart from those around it."""

import jax
import jax.numpy as jnp
from jax.extend import core

from praxis_lite.common.jax_internals.programs import current_trace


def test_a_trace_equals_itself_and_no_other():
  outer, inner = [current_trace(), current_trace()], []

  def body(carry, x):
    inner.extend([current_trace(), current_trace()])
    return carry, x

  jax.lax.scan(body, 0, jnp.ones(2))
  assert outer[0] == outer[1] == current_trace() and inner[0] == inner[1] != outer[0]


def test_all_traces_are_equal_if_jax_does_not_say(monkeypatch):
  monkeypatch.delattr(core, 'get_opaque_trace_state')
  assert current_trace() == jax.jit(current_trace).eval_shape() is None
