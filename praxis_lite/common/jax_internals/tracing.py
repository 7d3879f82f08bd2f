"""Which trace is running: a trace belongs to one call of a transform such as `grad`, or of a body such as a scan's."""

from __future__ import annotations

from jax.extend import core


def current_trace() -> object:
  """Returns an object that identifies the running trace, by equality; None if JAX does not say."""
  read = getattr(core, 'get_opaque_trace_state', None)  # A public name that some releases may lack.
  return None if read is None else read(convention='praxis_lite')
