"""Makes tokamax trace its kernels for the ambient mesh's chip, which this machine may not have.

tokamax comes with the extra `praxis_lite[kernels]`, and is imported when a program for a GPU first needs it. Version
0.0.12 has Pallas kernels; 0.0.17, for JAX 0.11.1 and later, needs the packages triton and jax-triton for some of them.
Only `tokamax_attention.py` and this file know tokamax.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from absl import flags
from jax.extend import backend

from praxis_lite.common.jax_internals.lowering import replace_attribute
from praxis_lite.layers.gpu_capability import compute_capability
from praxis_lite.sharding.mesh import device_kind

INSTALL = 'install praxis_lite[kernels]'
_flags_lock = threading.RLock()
_CORES = 128  # The assumed number of multiprocessors, if that of the chip is not known.


def is_installed() -> bool:
  """Whether tokamax is installed; does not import it."""
  return importlib.util.find_spec('tokamax') is not None


@contextlib.contextmanager
def tokamax_for_mesh() -> Iterator[Any]:
  """Yields tokamax; inside the block, tokamax compiles for the chip of the ambient mesh, not for this machine's chip.

  tokamax logs a warning for each shape that is not tuned for a chip; inside the block, these warnings are dropped.
  """
  import tokamax

  log, device = logging.getLogger('absl'), _target_device()
  with _parsed_flags(), tokamax.config.cross_compile(True):
    log.addFilter(_is_news)
    try:
      with replace_attribute(backend, 'get_default_device', lambda: device):
        yield tokamax
    finally:
      log.removeFilter(_is_news)


@contextlib.contextmanager
def _parsed_flags() -> Iterator[None]:
  """Marks absl's flags as parsed inside the block, so that their values can be read.

  If they were unparsed, tokamax would parse the command line itself, and fail on this program's flags.
  """
  with _flags_lock:
    values = flags.FLAGS
    were_parsed = values.is_parsed()
    if not were_parsed:
      values.mark_as_parsed()
    try:
      yield
    finally:
      if not were_parsed:  # absl's `unparse_flags` would also forget values that the program has set.
        vars(values)['__flags_parsed'] = False


class _Chip(NamedTuple):
  """Stands for a device: the attributes of a device that tokamax reads."""

  platform: str
  device_kind: str
  compute_capability: str
  core_count: int


def _target_device() -> Any:
  """Returns a GPU of the ambient mesh's kind, or a `_Chip` if this machine has none."""
  here, kind = jax.devices()[0], device_kind()
  if here.platform == 'gpu' and here.device_kind == kind:
    return here
  chip = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None)
  major, minor = compute_capability() or (0, 0)
  return _Chip('gpu', kind, f'{major}.{minor}', getattr(chip, 'num_cores', None) or _CORES)


def _is_news(record: logging.LogRecord) -> bool:
  return not str(record.msg).startswith('Autotuning cache miss')
