"""The cache of compiled programs on disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import jax

from praxis_lite.common.files import cache_folder

# Programs that compile faster than this are not cached.
_MIN_CACHED_COMPILE_SECONDS = 0.1


def set_up_compilation_cache(*, enabled: bool = True) -> Path | None:
  """Stores compiled programs on disk, so that a second start of the same run need not compile them.

  On GPUs, JAX keeps the results of XLA's autotuning in the same directory, so that a changed program is tuned only
  where it differs. JAX's setting `JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES` can change this.

  The directory is the one in JAX's setting `JAX_COMPILATION_CACHE_DIR`, or else `cache_folder`. Returns the
  directory; None if the cache is disabled or the directory is not writable.
  """
  jax.config.update('jax_enable_compilation_cache', enabled)
  if not enabled:
    return None
  cache = Path(getattr(jax.config, 'jax_compilation_cache_dir', None) or cache_folder())
  with contextlib.suppress(OSError):
    cache.mkdir(parents=True, exist_ok=True)
  if not os.access(cache, os.W_OK | os.X_OK):
    # With a read-only home the run continues without a cache.
    jax.config.update('jax_enable_compilation_cache', False)
    return None
  jax.config.update('jax_compilation_cache_dir', str(cache))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', _MIN_CACHED_COMPILE_SECONDS)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', 0)
  return cache
