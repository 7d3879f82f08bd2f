"""Compares the implementations of attention: time, forward and backward, and memory from the compiler's analysis.

  python tools/benchmark_attention.py                      # CPU: times at 2k, memory from 1k to 64k
  python tools/benchmark_attention.py --dtype=bfloat16 --heads=16 --lengths=2048,8192,32768   # a GPU

Times are in milliseconds: medians of interleaved runs, so that a slower machine affects all implementations alike.
`jax` is `jax.nn.dot_product_attention`, which is dense; `cudnn` is measured only on NVIDIA GPUs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent))

from praxis_lite.layers import AttentionSpec, Band, Causal, SlidingWindow, dot_product_attention
from praxis_lite.layers.attention_spec import AttentionImplementation
from tools.timing import measure_in_turn, seconds

AttentionStep = Callable[[jax.Array, jax.Array, jax.Array], object]


def jax_attention(causal: bool, window: int | None, backward: bool) -> AttentionStep:
  """Returns JAX's own dense attention as a function of queries, keys and values."""
  sizes = None if window is None else (window - 1, 0 if causal else window - 1)
  return _step(
    lambda q, k, v: jax.nn.dot_product_attention(
      q, k, v, is_causal=causal, local_window_size=sizes, implementation='xla'
    ),
    backward,
  )


def our_attention(
  implementation: AttentionImplementation, causal: bool, window: int | None, backward: bool
) -> AttentionStep:
  """Returns one implementation of this package as a function of queries, keys and values."""
  mask = (Causal() if causal else Band()) & (Band() if window is None else SlidingWindow(window))
  spec = AttentionSpec(implementation=implementation)
  return _step(lambda q, k, v: dot_product_attention(q, k, v, mask, spec=spec), backward)


def _step(attend: Callable[..., jax.Array], backward: bool) -> AttentionStep:
  if not backward:
    return attend

  def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
    return jax.value_and_grad(lambda *x: jnp.sum(attend(*x).astype(jnp.float32) ** 2), argnums=(0, 1, 2))(q, k, v)

  return gradients


def heads(length: int, args: argparse.Namespace) -> list[jax.ShapeDtypeStruct]:
  """Returns the shapes of queries, keys and values."""
  kv_heads = args.kv_heads or args.heads
  return [
    jax.ShapeDtypeStruct((args.batch, length, n, args.dims), args.dtype) for n in (args.heads, kv_heads, kv_heads)
  ]


def milliseconds(steps: dict[str, AttentionStep], length: int, args: argparse.Namespace) -> dict[str, float]:
  """Returns the median time of each step. The steps take turns."""
  keys = jax.random.split(jax.random.key(0), 3)
  arrays = [jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, heads(length, args))]
  compiled = {name: jax.jit(step).lower(*arrays).compile() for name, step in steps.items()}
  times = measure_in_turn([partial(seconds, partial(step, *arrays)) for step in compiled.values()], args.repeats)
  return {name: 1e3 * statistics.median(t) for name, t in zip(compiled, times)}


def mebibytes(step: AttentionStep, length: int, args: argparse.Namespace) -> float:
  """Returns the temporary memory of a step, from the compiler's analysis."""
  analysis = jax.jit(step).lower(*heads(length, args)).compile().memory_analysis()
  assert analysis is not None
  return analysis.temp_size_in_bytes / 2**20


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--lengths', default='2048', help='lengths to measure times at')
  parser.add_argument('--memory_lengths', default='1024,2048,4096,8192,16384,32768,65536')
  parser.add_argument('--dense_up_to', type=int, default=16384, help='longest length of dense attention')
  parser.add_argument('--batch', type=int, default=1)
  parser.add_argument('--heads', type=int, default=8)
  parser.add_argument('--kv_heads', type=int, default=None)
  parser.add_argument('--dims', type=int, default=64, help='dims per head')
  parser.add_argument('--dtype', default='float32')
  parser.add_argument('--repeats', type=int, default=7)
  args = parser.parse_args()
  gpu = jax.default_backend() == 'gpu' and args.dtype != 'float32'
  print(f'{jax.devices()[0].device_kind}, {args.dtype}, batch {args.batch}, {args.heads} heads of {args.dims} dims\n')

  print('| length | mask | pass | jax ms | blockwise ms | ratio |' + (' cudnn ms |' if gpu else ''))
  print('|' + '---|' * (7 if gpu else 6))
  for length in (int(n) for n in args.lengths.split(',')):
    for mask, causal, window in (('none', False, None), ('causal', True, None), ('window T/8', True, length // 8)):
      for backward in (False, True):
        steps = {'blockwise': our_attention('blockwise', causal, window, backward)}
        if length <= args.dense_up_to:
          steps['jax'] = jax_attention(causal, window, backward)
        if gpu:
          steps['cudnn'] = our_attention('cudnn', causal, window, backward)
        ms = milliseconds(steps, length, args)
        jax_ms, ratio = (f'{ms["jax"]:.1f}', f'{ms["blockwise"] / ms["jax"]:.2f}') if 'jax' in ms else ('-', '-')
        cells = [f'{length:,}', mask, 'both' if backward else 'forward', jax_ms, f'{ms["blockwise"]:.1f}', ratio]
        print('| ' + ' | '.join(cells + ([f'{ms["cudnn"]:.1f}'] if gpu else [])) + ' |', flush=True)

  print('\n| length | dense MiB | blockwise MiB | blockwise / dense | KiB a token |\n|---|---|---|---|---|')
  for length in (int(n) for n in args.memory_lengths.split(',')):
    blockwise = mebibytes(our_attention('blockwise', True, None, True), length, args)
    dense, share = '-', '-'
    if length <= args.dense_up_to:
      most = mebibytes(our_attention('dense', True, None, True), length, args)
      dense, share = f'{most:,.0f}', f'1 / {most / blockwise:.0f}'
    print(f'| {length:,} | {dense} | {blockwise:,.1f} | {share} | {blockwise * 1024 / length:.1f} |', flush=True)


if __name__ == '__main__':
  main()
