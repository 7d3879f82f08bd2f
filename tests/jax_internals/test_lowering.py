"""Programs are lowered with other rules in every release; what is not as it was is said to be unknown."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common.jax_internals import UnknownJax, lowering
from praxis_lite.sharding.mesh import abstract_mesh


def unrolled(x):
  return lax.scan(lambda c, _: (c * 2, c), x, length=3, unroll=True)


def test_scans_are_lowered_as_loops():
  traced = jax.jit(unrolled).trace(1.0)
  assert 'stablehlo.while' not in traced.lower().as_text()
  for platform in ('cpu', 'cuda', 'tpu'):
    lowered = lowering.lower_with(traced, platform, {'scan': lowering.lower_scan_as_loop})
    assert lowered.as_text().count('stablehlo.while') == 1
  lowered = lowering.lower_with(traced, 'cpu', {'scan': lowering.lower_scan_as_loop})
  last, each = lowered.compile()(1.0)
  assert last == 8
  np.testing.assert_array_equal(each, [1, 2, 4])


@pytest.mark.parametrize('rule', ['i j -> i', lambda mesh, taken, given: 'i j -> i'], ids=['text', 'made'])
def test_operations_with_a_rule_are_lowered_without_devices(rule):
  @custom_partitioning
  def sums(x):
    return x.sum(1)

  parts = {'partition': lambda *_: None, 'infer_sharding_from_operands': lambda *_: None}
  sums.def_partition(**parts, sharding_rule=rule)
  mesh = abstract_mesh({'a': 2}, 'gpu')
  x = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec('a')))
  rules = []

  def lower(context, *values, call, sharding_rule, static_args, **_):
    outputs = lowering.lower_call(context, call, *values)
    types = [v.type for v in values], [v.type for v in outputs]
    rules.append(lowering.sharding_rule_attribute(context, sharding_rule, static_args, *types))
    return outputs

  text = lowering.lower_with(jax.jit(sums).trace(x), 'cuda', {'custom_partitioning': lower}).as_text()
  assert 'reduce' in text
  (made,) = rules
  assert '([i, j])->([i])' in str(made)
  assert lowering.sharding_rule_attribute(None, None, (), (), ()) is None


GONE = [('custom_partitioning', 'custom_partitioning_p'), ('interpreters.mlir', 'LoweringParameters')]


@pytest.mark.parametrize(
  'module, name', [('custom_partitioning', 'custom_partitioning_p'), ('interpreters.mlir', 'LoweringParameters')]
)
def test_what_is_gone_is_unknown(monkeypatch, module, name):
  traced = jax.jit(unrolled).trace(1.0)
  monkeypatch.delattr(lowering._private(module), name)
  with pytest.raises(UnknownJax, match=name):
    lowering.lower_with(traced, 'cpu', {})
  with pytest.raises(UnknownJax, match='nowhere'):
    lowering._private('nowhere')


def test_fused_attention_is_traced_without_cudnn():
  def attend(x):
    return jax.nn.dot_product_attention(x, x, x, implementation='cudnn')

  x = jax.ShapeDtypeStruct((2, 64, 2, 64), jnp.bfloat16)
  with pytest.raises(RuntimeError):
    jax.make_jaxpr(attend)(x)
  with lowering.pretend_cudnn(91000):
    assert 'dot_product_attention' in str(jax.make_jaxpr(attend)(x))


def test_which_inputs_are_used(monkeypatch):
  def fn(a, b, c, d):
    return jnp.sin(a) + lax.scan(lambda s, x: (s + x, b), c, jnp.arange(3.0))[0], np.ones(3)

  assert lowering.used_inputs(jax.make_jaxpr(fn)(1.0, 2.0, 3.0, 4.0).jaxpr) == [True, False, True, False]
  from jax.interpreters import partial_eval

  monkeypatch.setattr(partial_eval, 'dce_jaxpr', lambda program: None)
  with pytest.raises(UnknownJax, match='used'):
    lowering.used_inputs(jax.make_jaxpr(fn)(1.0, 2.0, 3.0, 4.0).jaxpr)
