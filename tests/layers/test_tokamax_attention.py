"""Attention by kernels of tokamax: the choice, a stand-in for the kernels, the kernels, and compiles for H100."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.plan.compilers import devices_of, missing_compiler
from praxis_lite.instruments.plan.cost import cost_of
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import (
  AttentionSpec,
  Band,
  Causal,
  MultiHeadAttention,
  Paddings,
  Prefix,
  Segments,
  SlidingWindow,
  dot_product_attention,
  tokamax_attention,
)
from praxis_lite.layers.attention_spec import DEFAULT_SPEC, sort_arguments
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.dot_product import AttentionCase, choose_attention
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.flops import count_flops

needs_tokamax = pytest.mark.skipif(
  importlib.util.find_spec('tokamax') is None, reason='tokamax is not installed: praxis_lite[kernels]'
)
IDS = jnp.asarray(np.repeat([[1, 2, 3, 0], [4, 4, 5, 5]], 50, axis=1), jnp.int32)
PADDINGS = jnp.arange(140) > jnp.array([[100], [139]])
CASES = {
  'causal, grouped heads': (Causal(), (200, 200, 4, 2, 8), None),
  'all': (Band(), (128, 128, 1, 1, 8), None),
  'odd lengths, soft cap': (Band(), (129, 77, 2, 1, 8), 2.0),
  'two-sided window': (SlidingWindow(30), (200, 200, 2, 2, 24), None),
  'causal window of packed rows': (Causal() & SlidingWindow(60) & Segments(IDS, IDS), (200, 200, 2, 1, 8), 3.0),
  'prefix': (Causal() | Prefix(jnp.array([150, 7])), (200, 200, 2, 2, 8), None),
  'causal, fewer keys': (Causal(), (200, 140, 2, 1, 8), None),
  'padded keys': (Paddings(PADDINGS), (200, 140, 2, 1, 8), None),
  'sinks, causal window, soft cap': (Causal() & SlidingWindow(60), (200, 200, 4, 2, 8), 2.0),
  'sinks of packed rows': (Causal() & Segments(IDS, IDS), (200, 200, 2, 1, 8), None),
}


def sinks_of(case, N):
  return (jnp.linspace(4, -1, N),) if 'sinks' in case else ()


class StandInMask(NamedTuple):
  mask: Any
  k_start: Any
  k_end: Any
  is_causal: bool

  def logits(self, T, S):
    query, key = jnp.arange(T)[:, None], jnp.arange(S)
    seen = jnp.ones((1, 1, T, S), bool) if self.mask is None else self.mask
    seen &= (key <= query) if self.is_causal else True
    seen &= True if self.k_start is None else key >= self.k_start[:, None]
    seen &= True if self.k_end is None else key < self.k_end[:, None]
    assert bool(seen.shape[-1] % 128 == 0)
    return jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min)


class StandIn:
  """The operation of tokamax: the formulas of its kernels, on whole blocks."""

  def __call__(self, q, k, v, *, return_residuals, **options):
    logits, _ = self.logits(q, k, options)
    top = logits.max(-1)
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    return jnp.einsum('bnts,bsnh->btnh', weights / total[..., None], self.repeat(v, q)), (top, total)

  def bind(self, q, k, v, **options):
    return types.SimpleNamespace(kwargs={**options, 'return_residuals': False})

  def vjp(self, residuals, out, dout, q, k, v, **options):
    top, total = residuals
    logits, slope = self.logits(q, k, options)
    probs = jnp.exp(logits - top[..., None]) / total[..., None]
    delta = jnp.einsum('btnh,btnh->bnt', out, dout)
    dlogits = probs * (jnp.einsum('btnh,bsnh->bnts', dout, self.repeat(v, q)) - delta[..., None]) * slope
    scale, sums = options['logits_scale'], (*k.shape[:3], -1, k.shape[3])
    dk, dv = jnp.einsum('bnts,btnh->bsnh', dlogits * scale, q), jnp.einsum('bnts,btnh->bsnh', probs, dout)
    dk, dv = (g.reshape(sums).sum(3) for g in (dk, dv))
    return {'q': jnp.einsum('bnts,bsnh->btnh', dlogits * scale, self.repeat(k, q)), 'k': dk, 'v': dv}

  @staticmethod
  def repeat(x, q):
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)

  def logits(self, q, k, options):
    assert q.shape[1] % 128 == k.shape[1] % 128 == 0
    s, cap = jnp.einsum('btnh,bsnh->bnts', q, self.repeat(k, q)) * options['logits_scale'], options['logits_soft_cap']
    slope = 1.0
    if cap is not None:
      s = cap * jnp.tanh(s / cap)
      slope = 1 - (s / cap) ** 2
    return s + options['mask'].logits(q.shape[1], k.shape[1]), slope


def use_kernels(monkeypatch, operation, mask, is_mosaic=True):
  found = tokamax_attention._Kernels(operation, mask, is_mosaic)
  monkeypatch.setattr(tokamax_attention, '_kernels', lambda: found)


@pytest.fixture
def stand_in(monkeypatch):
  use_kernels(monkeypatch, StandIn(), StandInMask)

  monkeypatch.setattr(tokamax_attention, 'tokamax_for_mesh', contextlib.nullcontext)


@pytest.fixture
def installed(monkeypatch):
  """Makes `choose_attention` take the kernels as installed and fitting; each test may change the chip."""
  monkeypatch.setattr(tokamax_attention, 'is_installed', lambda: True)
  monkeypatch.setattr(tokamax_attention, '_why_not_traced', lambda *chip: '')


def drawn(seed, *shape, dtype=jnp.float32):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def results(attend, heads, gradient):
  """The output, and the gradients of queries, keys, values, and perhaps sinks."""

  def run(heads, gradient):
    out, pullback = jax.vjp(lambda q, k, v, sinks=None: attend(q, k, v, sinks=sinks), *heads)
    return out, *pullback(gradient)

  return jax.jit(run)(heads, gradient)


def attend_by_kernels(query, key, value, mask=None, *, spec=DEFAULT_SPEC, sinks=None, split=None):
  if split is not None:
    key, value = split.repeat_kv_heads(key), split.repeat_kv_heads(value)
  formula, heads, integers = sort_arguments((query, key, value), mask, None, None, spec, sinks)
  return tokamax_attention.attend_by_tokamax(formula, split, heads, integers)


def check_case(case, tolerance=1e-5):
  mask, (T, S, N, K, H), soft_cap = CASES[case]
  heads, gradient = (drawn(0, 2, T, N, H), drawn(1, 2, S, K, H), drawn(2, 2, S, K, H)), drawn(3, 2, T, N, H)
  heads += sinks_of(case, N)
  attend = functools.partial(attend_by_kernels, mask=mask, spec=AttentionSpec(logit_soft_cap=soft_cap))
  dense = AttentionSpec(implementation='dense', logit_soft_cap=soft_cap)
  expected = results(functools.partial(dot_product_attention, mask=mask, spec=dense), heads, gradient)
  for found, e in zip(results(attend, heads, gradient), expected, strict=True):
    np.testing.assert_allclose(found, e, atol=tolerance, rtol=tolerance)


@pytest.mark.slow_cases
@pytest.mark.parametrize('case', CASES)
def test_values_and_gradients_are_those_of_dense_attention(stand_in, case):
  check_case(case)


# ---------------------------------------------------------------- choices

CASE = AttentionCase('gpu', jnp.dtype('bfloat16'), 4096, 4096, 128, causal=True)


def on_chip(kind):
  return jax.sharding.use_abstract_mesh(abstract_mesh({'a': 1}, 'gpu', kind))


@pytest.mark.parametrize(
  'chip, change, name, reason',
  [
    ('NVIDIA H100', {}, 'cudnn', 'takes this case'),
    ('NVIDIA H100', {'soft_cap': True}, 'tokamax', "takes this case (cuDNN's kernel has no logit_soft_cap)"),
    ('NVIDIA H100', {'sinks': True}, 'tokamax', "takes this case (cuDNN's kernel has no sinks)"),
    ('NVIDIA A100-SXM4-80GB', {'sinks': True}, 'tokamax', 'takes this case'),
    ('NVIDIA H100', {'dims_per_head': 256}, 'tokamax', 'at most 128, not 256'),
    (
      'NVIDIA H100',
      {'dims_per_head': 512},
      'blockwise',
      "tokamax's needs dims_per_head",
    ),
    ('NVIDIA H100', {'causal': False, 'window': True}, 'tokamax', 'sliding_window only with causal attention'),
    ('NVIDIA H100', {'by_rows': True, 'query_len': 4095}, 'tokamax', 'only for even lengths'),
    ('NVIDIA H100', {'by_rows': True, 'query_len': 65535}, 'blockwise', 'as an array of this size'),
    ('NVIDIA H100', {'dropout': True}, 'blockwise', "tokamax's has no gradients with dropout"),
    ('NVIDIA H100', {'dtype': jnp.dtype('float32')}, 'blockwise', 'not in float32'),
    ('NVIDIA H100', {'soft_cap': True, 'split': True}, 'blockwise', 'split over a mesh axis'),
    ('NVIDIA H100', {'soft_cap': True, 'logit_bias': True}, 'blockwise', "tokamax's takes no bias"),
    ('NVIDIA H100', {'soft_cap': True, 'query_len': 200}, 'dense', 'are small'),
    ('NVIDIA H100', {'soft_cap': True, 'mesh_obstacle': 'needs blnh'}, 'blockwise', "tokamax's needs blnh"),
    ('NVIDIA H100', {'soft_cap': True, 'excludes_self': True}, 'blockwise', "excludes a query's own index"),
    ('NVIDIA B200', {'soft_cap': True}, 'blockwise', 'no gradients of logit_soft_cap on chips other than Hopper'),
    ('NVIDIA B200', {'dims_per_head': 256}, 'tokamax', 'takes this case'),
    ('NVIDIA L4', {'dims_per_head': 256}, 'blockwise', 'multiple of 8 of at most 128 on this chip, not 256'),
    ('NVIDIA A100-SXM4-80GB', {'dims_per_head': 256}, 'tokamax', 'takes this case'),
    (
      'NVIDIA A100-SXM4-80GB',
      {'soft_cap': True},
      'blockwise',
      'no gradients of logit_soft_cap on chips other',
    ),
    ('NVIDIA L4', {'causal': False, 'window': True}, 'blockwise', 'has no gradients of windows without an array'),
  ],
)
def test_auto_says_what_it_chooses_and_why(installed, chip, change, name, reason):
  with on_chip(chip):
    choice = choose_attention('auto', CASE._replace(**change))
  assert choice.name == name and reason in choice.reason


def test_without_the_extra_blocks_replace_it_and_say_so(monkeypatch):
  monkeypatch.setattr(tokamax_attention, 'is_installed', lambda: False)
  with on_chip('NVIDIA H100'):
    name, reason = choose_attention('auto', CASE._replace(soft_cap=True))
    assert name == 'blockwise' and "tokamax's is not installed: install praxis_lite[kernels]" in reason
    with pytest.raises(ConfigError, match=r"lm\.implementation: 'tokamax' is not installed: install"):
      choose_attention('tokamax', CASE, 'lm.implementation')


def test_a_tokamax_that_does_not_fit_this_jax(monkeypatch):
  def fail():
    raise AttributeError("no 'PallasMosaicGpuFlashAttention'\nmore")

  monkeypatch.setattr(tokamax_attention, 'is_installed', lambda: True)
  monkeypatch.setattr(tokamax_attention, '_kernels', fail)
  tokamax_attention._why_not_traced.cache_clear()
  with on_chip('NVIDIA H100'):
    name, reason = choose_attention('auto', CASE._replace(soft_cap=True))
  tokamax_attention._why_not_traced.cache_clear()
  assert name == 'blockwise' and "packages: no 'PallasMosaicGpuFlashAttention'" in reason


def test_other_platforms_do_not_ask_for_it(monkeypatch):
  monkeypatch.setattr(tokamax_attention, 'is_installed', lambda: 1 / 0)
  assert choose_attention('auto', CASE._replace(platform='cpu', soft_cap=True)).name == 'blockwise'
  with pytest.raises(ConfigError, match="'tokamax' needs an NVIDIA GPU, and the platform is 'cpu'"):
    choose_attention('tokamax', CASE._replace(platform='cpu'))


# ---------------------------------------------------------------- layers


def layer_of(**fields):
  config = Config(MultiHeadAttention, input_dims=12, num_heads=4, num_kv_heads=2, dims_per_head=8, logit_soft_cap=3.0)
  config.activation_split_dims_mapping.set(blnh=('data', None, 'mdl', None))
  return config.set(mesh_axis_names=('data', 'spare', 'mdl'), causal=True, **fields).instantiate()


def test_on_a_mesh_results_and_gradients_are_those_of_one_device(stand_in):
  heads = drawn(0, 2, 200, 4, 8), drawn(1, 2, 200, 2, 8), drawn(2, 2, 200, 2, 8), jnp.array([2.0, 0, -1, 1])
  mask, gradient = Causal() & Segments(IDS, IDS), drawn(3, 2, 200, 4, 8)
  attend = functools.partial(attend_by_kernels, mask=mask)
  expected = results(attend, heads, gradient)
  for sizes in ((2, 1, 4), (1, 3, 2)):
    mesh = jax.make_mesh(sizes, ('data', 'spare', 'mdl'), axis_types=(AxisType.Auto,) * 3)
    with jax.set_mesh(mesh):
      found = results(functools.partial(attend, split=RowSplit(('data',), ('mdl',))), heads, gradient)
    for e, f in zip(expected, found, strict=True):
      np.testing.assert_allclose(f, e, atol=2e-5)


def test_a_layer_maps_it_over_the_mesh(stand_in, installed):
  layer = layer_of(fprop_dtype=jnp.bfloat16)
  variables = jax.eval_shape(lambda: layer.init(jax.random.key(0)))
  x = jax.ShapeDtypeStruct((4, 256, 12), jnp.bfloat16)
  for sizes, chosen in (((2, 1, 2), 1), ((1, 1, 1), 1), ((3, 1, 1), 0)):
    mesh = abstract_mesh(dict(zip(('data', 'spare', 'mdl'), sizes)), 'gpu', 'NVIDIA H100')
    with jax.sharding.use_abstract_mesh(mesh):
      program = str(jax.make_jaxpr(lambda v, x: layer.apply(v, x)[0])(variables, x))
    assert program.count(f'name={tokamax_attention.ATTENTION_KERNEL}') == chosen
    assert ('shard_map' in program) == (sizes == (2, 1, 2))


@pytest.mark.parametrize('kept, forward', [(('context',), 1), ((), 2)])
def test_what_attention_keeps_is_not_computed_again(stand_in, kept, forward):
  heads = (drawn(0, 1, 128, 1, 8),) * 3
  policy = jax.checkpoint_policies.save_only_these_names(*kept)
  fn = jax.checkpoint(lambda *heads: jnp.sin(attend_by_kernels(*heads, Causal())), policy=policy)
  program = str(jax.make_jaxpr(jax.grad(lambda *heads: fn(*heads).sum(), (0, 1, 2)))(*heads))
  flops = 2 * 2 * 128 * 128 * 8
  assert program.count(f'name={tokamax_attention.ATTENTION_KERNEL}{flops}_1') == forward


def test_flops_are_those_of_the_blocks_that_the_kernels_compute(stand_in):
  q, block = jax.ShapeDtypeStruct((2, 1000, 4, 64), jnp.bfloat16), 2 * 2 * 4 * 128 * 128 * 64
  for mask, forward, backward in ((Causal(), 36, 36), (Band(), 64, 64), (Causal() & SlidingWindow(129), 15, 36)):
    attend = functools.partial(attend_by_kernels, mask=mask)
    assert count_flops(jax.make_jaxpr(lambda q, attend=attend: attend(q, q, q))(q)) == 2 * forward * block
    step = jax.grad(lambda q, attend=attend: attend(q, q, q).astype(jnp.float32).sum())
    assert count_flops(jax.make_jaxpr(step)(q)) == (2 * forward + 7 * backward) * block


# ---------------------------------------------------------------- tokamax itself


@needs_tokamax
@pytest.mark.parametrize('case', [name for name in CASES if 'sinks' not in name])
def test_the_formulas_of_tokamax_itself(monkeypatch, case):
  """The operation that its kernels are compared with, from the arguments that the kernels get.

  Its gradients are JAX's of the softmax, and unlike those of the kernels do not follow from sums that contain sinks.
  """
  base = pytest.importorskip('tokamax._src.ops.attention.base')
  operation = base.DotProductAttention()
  object.__setattr__(operation, 'vjp', base.DotProductAttentionVjp())
  use_kernels(monkeypatch, operation, base.Mask)
  with jax.default_matmul_precision('highest'):
    check_case(case)


@needs_tokamax
@pytest.mark.parametrize('case', [name for name, (_, _, cap) in CASES.items() if cap is None])
def test_the_triton_kernels_interpreted(monkeypatch, case):
  pallas = pytest.importorskip('jax.experimental.pallas')
  kernels = pytest.importorskip('tokamax._src.ops.attention.pallas_triton')
  base = pytest.importorskip('tokamax._src.ops.attention.base')
  call, program_id = pallas.pallas_call, pallas.program_id

  def interpreted(kernel, *args, grid_spec, **kwargs):
    def run(*refs):  # The interpreter knows the indices of a program only outside of loops.
      ids = dict(enumerate(map(program_id, range(len(grid_spec.grid)))))
      with monkeypatch.context() as change:
        change.setattr(pallas, 'program_id', lambda axis: ids[axis])
        kernel(*refs)

    return call(run, *args, grid_spec=grid_spec, interpret=True, **kwargs)

  monkeypatch.setattr('tokamax._src.pallas.block._pids', lambda: (0, 0))  # For the ends of arrays, which blocks divide.
  monkeypatch.setattr(pallas, 'pallas_call', interpreted)
  use_kernels(monkeypatch, kernels.PallasTritonFlashAttention(), base.Mask, is_mosaic=False)
  with jax.default_matmul_precision('highest'):
    check_case(case)


@needs_tokamax
@pytest.mark.parametrize(
  'chip, soft_cap, window, H, has_sinks',
  [('h100', 30.0, None, 128, False), ('h100', None, 200, 256, False), ('h100', 30.0, 200, 64, True)],
)
def test_compiled_for_gpus_no_logits_are_in_memory(chip, soft_cap, window, H, has_sinks):
  topology = parse_topology(f'{chip}:1')
  if missing := missing_compiler(topology):
    pytest.skip(missing)
  mesh = jax.sharding.Mesh(np.array(devices_of(topology)), ('a',))
  at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  T, N = 1920, 2
  q = jax.ShapeDtypeStruct((1, T, N, H), jnp.bfloat16, sharding=at)
  sinks = jax.ShapeDtypeStruct((N,), jnp.float32, sharding=at) if has_sinks else None
  attend = functools.partial(
    dot_product_attention,
    mask=Causal() if window is None else SlidingWindow(window),
    spec=AttentionSpec(logit_soft_cap=soft_cap),
  )
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    step = jax.grad(
      lambda heads, sinks: jnp.sum(attend(*heads, sinks=sinks).astype(jnp.float32) ** 2), (0, 1) if has_sinks else 0
    )
    compiled = jax.jit(step).trace((q, q, q), sinks).lower().compile()
  program = parse(compiled)
  cost = cost_of(program, topology.target, Links(topology))
  calls = [op for op in cost.operations if op.opcode == 'custom-call' and op.flops]
  pairs, backward = (120, 120) if window is None else (15 + 2 * 14 + 2 * 13, 225)
  block = 2 * N * 128 * 128 * H
  assert sorted(op.flops for op in calls) == sorted([2 * pairs * block, *[3.5 * backward * block] * 2])
  assert not re.search(rf'\[[\d,]*{T},{T}\]', compiled.as_text())
  assert compiled.memory_analysis().temp_size_in_bytes < 8 * 2 * T * N * H
