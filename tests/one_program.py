"""`layer.apply` as one program. Without `jax.jit`, JAX compiles each of its operations, which takes longer."""

import functools

import jax


def apply(layer, variables, *args, **kwargs):
  """Returns what `layer.apply` returns; texts, booleans and None in `kwargs` are settings, all else is arrays."""
  settings = {name: x for name, x in kwargs.items() if x is None or isinstance(x, str | bool)}
  arrays = {name: x for name, x in kwargs.items() if name not in settings}
  return _program(layer, **settings)(variables, *args, **arrays)


@functools.lru_cache(8)  # For calls in a loop.
def _program(layer, **settings):
  return jax.jit(functools.partial(layer.apply, **settings))
