"""Which trace is running: the call of a transform, such as `grad`, or of one body, such as that of a scan."""

from __future__ import annotations

from jax.extend import core


def current_trace() -> object:
  """Returns an object that equals those of other calls in the same trace; always None if JAX does not say."""
  read = getattr(core, 'get_opaque_trace_state', None)  # A public name that some releases may lack.
  return None if read is None else read(convention='praxis_lite')
