"""TensorFlow, imported when one of its names is first used: `from praxis_lite.inputs.tensorflow import tf`."""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

from praxis_lite.common.errors import ConfigError

__all__ = ['import_tensorflow', 'tf']


@functools.cache
def import_tensorflow(instead: str = 'use another input') -> ModuleType:
  """Imports TensorFlow, and hides accelerators from it, because it would reserve their memory.

  Raises ConfigError if it is not installed; `instead` says what works without it.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')  # oneDNN would print a notice, and nothing here needs oneDNN.
  try:
    import tensorflow
  except ImportError:
    raise ConfigError(f'TensorFlow is not installed; pip install tensorflow-cpu, or {instead}') from None
  for kind in ('GPU', 'TPU'):
    try:
      tensorflow.config.set_visible_devices([], kind)
    except RuntimeError:  # The program already uses TensorFlow, so the choice of devices stays with the program.
      break
  return tensorflow


if TYPE_CHECKING:
  import tensorflow as tf
else:

  class _LazyTensorFlow:  # A module with a `__getattr__` would import TensorFlow when pickle looks up names in modules.
    def __getattr__(self, name: str) -> Any:
      if name.startswith('__'):
        raise AttributeError(name)
      return getattr(import_tensorflow(), name)

  tf = _LazyTensorFlow()
