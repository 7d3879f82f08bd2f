"""Prints, as JSON, the operations per second of large matrix products on the device: an upper bound for any step."""

from __future__ import annotations

import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp

_PRODUCTS_AT_A_TIME = 10


def operations_per_second(size: int, dtype: str, repeats: int = 10) -> float:
  """Returns the operations per second of products of square matrices of this size: the median of several times."""

  @jax.jit
  def products(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, _PRODUCTS_AT_A_TIME, lambda _, y: y @ w, x)

  x = jax.random.normal(jax.random.key(0), (size, size), dtype)
  w = jax.random.normal(jax.random.key(1), (size, size), dtype) * jnp.asarray(size**-0.5, dtype)
  seconds = []
  for _ in range(repeats + 2):
    start = time.perf_counter()
    products(x, w).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return _PRODUCTS_AT_A_TIME * 2 * size**3 / statistics.median(seconds[2:])


if __name__ == '__main__':
  sizes, dtype = json.loads(sys.argv[1])
  by_size = {str(size): operations_per_second(size, dtype) for size in sizes}
  print(json.dumps({'flops_per_s': max(by_size.values()), 'by_size': by_size, 'kind': jax.devices()[0].device_kind}))
