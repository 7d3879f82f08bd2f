"""Operations whose results for integers are not integers."""

from __future__ import annotations

import functools

from tools.graphs.drawing import DrawnOperation, Graph, NotDrawn
from tools.graphs.families.register import Families, family

FAMILIES: Families = {}
_family = functools.partial(family, FAMILIES)


@_family(1, smooth=True)
def _normalize(g: Graph) -> DrawnOperation:
  x = g.pick(1, 4)
  axis = g.axis(x)
  form = g.one(
    'jax.nn.softmax({x}, axis={a})', 'jax.nn.log_softmax({x}, axis={a})', 'jax.nn.logsumexp({x}, axis={a})',
    '(({x} - {x}.mean({a}, keepdims=True)) / jnp.sqrt({x}.var({a}, keepdims=True) + 1))',
    'jnp.cumsum({x}, {a}) / 4', 'lax.cumlogsumexp({x}, axis={a})', 'jnp.cumprod(1 + {x} / 10, {a})',
  )  # fmt: skip
  return DrawnOperation(form.format(x=x.name, a=axis), 20.0)


@_family(1.5, smooth=True)
def _fourier(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = -1 if g.chance(0.9) else g.axis(x)  # XLA transposes others, and may then fail on CPUs.
  forms = [
    'jnp.real(jnp.fft.fft({x}, axis={a}))', 'jnp.imag(jnp.fft.fft({x}, axis={a}))',
    'jnp.abs(jnp.fft.rfft({x}, axis={a}) + 9)',
    'jnp.real(jnp.fft.ifft(jnp.fft.fft({x}, axis={a}) * 1j, axis={a}))', 'jnp.fft.irfft({x} + 0j, n={n}, axis={a})',
    'jnp.real(jnp.fft.rfft({x}, axis={a}))', 'jnp.imag(jnp.fft.rfft({x}, axis={a}))',
  ]  # fmt: skip
  if len(x.shape) > 1:
    forms += ['jnp.real(jnp.fft.fft2({x}))', 'jnp.real(jnp.fft.rfftn({x}))']
  return DrawnOperation(f'{g.one(*forms).format(x=x.name, a=axis, n=g.size())}', 1000.0)


@_family(1.5, smooth=True)
def _library(g: Graph) -> DrawnOperation:
  """Draws a call of LAPACK with a well-conditioned matrix."""
  x = g.pick(2, 3)
  n = x.shape[-1]
  if n > 8:
    raise NotDrawn
  squared = f"jnp.einsum('...ij,...ik->...jk', small({x.name}), small({x.name})) / {x.shape[-2]}"
  spd = f'({squared} + 2 * jnp.eye({n}, dtype={x.name}.dtype))'
  b = g.array((*x.shape[:-2], n, g.one(1, 2, 3)))
  text = g.one(
    f'jnp.linalg.cholesky({spd})', f'jnp.linalg.solve({spd}, {b.name})', f'jnp.linalg.inv({spd})',
    f'jnp.linalg.det({spd} / 2)', f'jnp.linalg.slogdet({spd})[1]', f'jnp.linalg.eigvalsh({spd})',
    f"jnp.linalg.qr({spd}, mode='r')", f'jax.scipy.linalg.solve_triangular({spd}, {b.name}, lower=True)',
    f'jax.scipy.linalg.expm({spd} / 9)' if len(x.shape) == 2 else f'jnp.linalg.cholesky({spd})',
    f'jnp.linalg.svd({spd}, compute_uv=False)', f'jnp.linalg.norm({spd}, axis=-1)',
  )  # fmt: skip
  return DrawnOperation(text, 1000.0, (spd,), size=2)


@_family(0.7, smooth=True)
def _quantiles(g: Graph) -> DrawnOperation:
  x = g.pick(1, 3)
  axis = g.axis(x)
  form = g.one('jnp.median({x}, axis={a})', 'jnp.quantile({x}, jnp.asarray([0.3, 0.8], {x}.dtype), axis={a})')
  return DrawnOperation(form.format(x=x.name, a=axis), g.bound(x), size=2)
