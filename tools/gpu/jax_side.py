"""The parts that both implementations on JAX share: tokens on the device, waiting, memory and versions."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.gpu.case import ModelCase, first_weights, tokens
from tools.gpu.turn import Options

_PACKAGES = ('jax', 'jaxlib', 'jax-cuda12-plugin', 'jax-cuda13-plugin', 'nvidia-cudnn-cu12', 'nvidia-cudnn-cu13')


def set_up() -> None:
  """Makes JAX keep compiled programs in the benchmark's cache."""
  if cache := os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    jax.config.update('jax_compilation_cache_dir', cache)
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.1)


def first_params(case: ModelCase) -> dict[str, jax.Array]:
  """Returns the first weights on the device, in the dtype of the case's state."""
  return {
    name: jnp.resize(jax.device_put(values.astype(case.state)), shape) for name, shape, values in first_weights(case)
  }


def step_bytes(compiled: jax.stages.Compiled) -> int:
  """Returns the memory that a compiled step needs, by the compiler; 0 if it does not say."""
  analysis: Any = compiled.memory_analysis()
  if analysis is None:
    return 0
  sizes = (analysis.argument_size_in_bytes, analysis.output_size_in_bytes, analysis.temp_size_in_bytes)
  return int(sum(sizes) - analysis.alias_size_in_bytes)


class JaxSide(ABC):
  """An implementation on JAX; see `turn.Side`."""

  def __init__(self) -> None:
    self._state: Any = None
    self._compiled: jax.stages.Compiled | None = None

  @abstractmethod
  def prepare(self, case: ModelCase, batch: int, options: Options) -> None:
    """Sets the case, `_compiled` and `_state`."""

  @abstractmethod
  def take(self, inputs: dict[str, np.ndarray]) -> jax.Array:
    """Takes a step with a batch from the host, and returns its loss."""

  def step(self, number: int) -> jax.Array:
    ids = tokens(self.case, self.batch, number)
    weights = np.ones((self.batch, self.case.length), np.float32)
    return self.take({'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights})

  def value(self, loss: Any) -> float:
    jax.block_until_ready((self._state, loss))
    return float(loss)

  def release(self) -> None:
    self._state = self._compiled = None
    jax.clear_caches()
    gc.collect()

  def peak_bytes(self) -> int:
    stats = jax.devices()[0].memory_stats()
    if stats:
      return int(stats['peak_bytes_in_use'])
    return 0 if self._compiled is None else step_bytes(self._compiled)

  def versions(self) -> dict[str, str]:
    found = {'device': jax.devices()[0].device_kind}
    for name in _PACKAGES:
      try:
        found[name] = metadata.version(name)
      except metadata.PackageNotFoundError:
        continue
    return found

  def shapes(self, case: ModelCase, batch: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Sets the case and the batch size, and returns the shapes of a batch."""
    self.case, self.batch = case, batch
    dtypes = {'ids': jnp.int32, 'labels': jnp.int32, 'weights': jnp.float32}
    return {name: jax.ShapeDtypeStruct((batch, case.length), dtype) for name, dtype in dtypes.items()}
