"""tokamax is called without changing the flags of the program, and is imported only for GPUs."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from absl import flags

from praxis_lite.layers.dot_product import dot_product_attention
from praxis_lite.layers.grouped_matmul import grouped_matmul
from praxis_lite.layers.masks import Causal
from praxis_lite.layers.tokamax_target import tokamax_for_mesh


@pytest.fixture
def own_flags(monkeypatch):
  """The flags of a program that has set one, and parsed none."""
  values = flags.FlagValues()
  for name in ('set', 'other'):
    flags.DEFINE_string(name, 'default', '', flag_values=values)
  values.set = 'by hand'
  monkeypatch.setattr(flags, 'FLAGS', values)
  return values


@pytest.fixture(autouse=True)
def _stand_in_for_tokamax(monkeypatch):
  module = types.ModuleType('tokamax')
  module.__spec__ = importlib.util.spec_from_loader('tokamax', None)
  module.config = types.SimpleNamespace(cross_compile=contextlib.nullcontext)
  monkeypatch.setitem(sys.modules, 'tokamax', module)


def read_flags() -> None:
  """Does what tokamax does before a kernel."""
  with tokamax_for_mesh():
    time.sleep(0.002)  # So that threads meet here.
    if not flags.FLAGS.is_parsed():
      flags.FLAGS(['a notebook', '-f', 'kernel.json'])


def is_unparsed(values):
  with pytest.raises(flags.UnparsedFlagAccessError):
    _ = values.other
  return not values.is_parsed() and values['set'].value == 'by hand'


def test_flags_of_a_program_that_has_not_parsed_them_stay_as_they_are(own_flags):
  with ThreadPoolExecutor(4) as threads:
    list(threads.map(lambda _: read_flags(), range(4)))
  assert is_unparsed(own_flags)
  with pytest.raises(ValueError, match='in the kernel'), tokamax_for_mesh():
    raise ValueError('in the kernel')
  assert is_unparsed(own_flags)


def test_parsed_flags_stay_parsed(own_flags):
  own_flags(['a program', '--other=given'])
  read_flags()
  assert own_flags.is_parsed() and (own_flags.set, own_flags.other) == ('by hand', 'given')


def test_tokamax_is_not_imported_for_other_platforms(monkeypatch):
  monkeypatch.setitem(sys.modules, 'tokamax', None)  # Importing it fails.
  x = jnp.ones((1, 4, 1, 8), jnp.bfloat16)
  assert dot_product_attention(x, x, x, Causal()).shape == x.shape
  rows, weights = jnp.ones((20, 4)), jnp.ones((2, 4, 3))
  assert grouped_matmul(rows, weights, jnp.array([8, 12])).shape == (20, 3)
  assert jax.default_backend() == 'cpu'
