"""Pattern strategies: what each op does, how they compose, and what they refuse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax_boxes import LogicallyPartitioned
from jax.sharding import PartitionSpec as P

from praxis_lite.common.errors import ShardingError, UserError
from praxis_lite.common.trees import leaves_by_path
from praxis_lite.sharding import strategies as strategy_ops
from praxis_lite.sharding.constraints import axis_rules
from praxis_lite.sharding.strategies import (
  Op,
  Spec,
  Variable,
  explain_sharding,
  infer_sharding,
  parse_ops,
  register_rule,
  unused_patterns,
)
from praxis_lite.sharding.weights import WeightHParams

MESH = {'data': 8, 'model': 4}


def struct(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def spec_of(shape: tuple[int, ...], ops: str, dtype: Any = jnp.float32) -> tuple[Any, ...]:
  return tuple(infer_sharding({'w': struct(*shape, dtype=dtype)}, [('.*', ops)], MESH)['w'])


@pytest.mark.parametrize(
  ('shape', 'ops', 'spec'),
  [
    ((1024, 1024), 'fsdp(axis="data")', (None, None)),
    ((1024, 1025), 'fsdp(axis="data")', ('data', None)),
    ((2048, 2048), 'fsdp(axis="data")', (None, 'data')),
    ((3, 3, 512, 1024), 'fsdp(axis="data")', (None, None, None, 'data')),
    ((1537, 1539), 'fsdp("data", allow_padding=False)', (None, None)),
    ((1537, 1539), 'fsdp(axis="data")', (None, 'data')),
    ((2048, 1000), 'fsdp(axis=("data", "model"))', (('data', 'model'), None)),
    ((8, 8), 'fsdp(axis="data", min_size_to_shard_mb=0)', (None, 'data')),
    ((2048, 2048), 'shard_dim("model", 0) | fsdp(axis="data")', ('model', 'data')),
    ((2048, 2048), 'shard_dim("model",0)|fsdp(axis="data")', ('model', 'data')),
    ((5, 6), 'shard_dim("model", 2, ignore_ndim_error=True)', (None, None)),
    ((8,), 'shard_dim("model", -1)', ('model',)),
    ((8, 4), 'shard_dim("model", -2)', ('model', None)),
    ((8, 4), 'shard_dim("model", 0) | shard_dim("data", 1)', ('model', 'data')),
    ((9, 4), 'shard_dim(("data", "model"), 0)', (('data', 'model'), None)),
    ((2048, 2048), 'replicate', (None, None)),
    ((2048, 2048), 'replicate() | fsdp("data")', (None, 'data')),
    ((), 'fsdp("data", 0)', ()),
  ],
)
def test_ops(shape: tuple[int, ...], ops: str, spec: tuple[Any, ...]) -> None:
  assert spec_of(shape, ops) == spec


def test_the_threshold_counts_bytes() -> None:
  assert spec_of((2048, 1024), 'fsdp("data")') == ('data', None)
  assert spec_of((2048, 1024), 'fsdp("data")', jnp.bfloat16) == (None, None)


@pytest.mark.parametrize(
  ('shape', 'ops', 'message'),
  [
    ((8, 8), 'shard_dim("model",1)|replicate', 'w is split .* inconsistent'),
    ((8, 8), 'shard_dim("model",0)|shard_dim("data",0)', "w: dimension 0 is split over 'model' already"),
    ((8, 8), 'shard_dim("model",2)', 'w has 2 dimensions, .* dimension 2'),
    ((8, 8), 'shard_dim("model",-3)', 'w has 2 dimensions, .* dimension -3'),
    ((9, 8), 'shard_dim("model", 0, allow_padding=False)', 'size 9 does not divide by the 4 parts'),
    ((2048, 2048), 'shard_dim("data",0)|fsdp("data")', "w: fsdp.*'data' occurs twice"),
    ((8, 8), 'shard_dim("model", ",", 0)', "dim = ',' is not of type int; the op is shard_dim"),
    ((8, 8), 'fsdp("data", "4")', "min_size_to_shard_mb = '4' is not of type float"),
    ((2048, 2048), 'fsdp("date")', "'date' is not an axis .* Did you mean 'data'"),
  ],
)
def test_contradictions_name_the_variable(shape: tuple[int, ...], ops: str, message: str) -> None:
  with pytest.raises(ValueError, match=message):
    spec_of(shape, ops)


def test_logical_names_do_not_overrule_what_is_split() -> None:
  weights = {'w': WeightHParams((8, 8), tensor_split_dims_mapping=('data', None))}
  with pytest.raises(ShardingError, match="w: dimension 0 is split over 'model' already"):
    infer_sharding(weights, [('.*', 'shard_dim("model", 0) | logical_partitioning')], MESH)


PARAMS = {'emb': {'w': struct(2048, 2048)}, 'ff': {'w': struct(2048, 4096), 'b': struct(4096)}}


def test_earlier_patterns_win_and_the_unmatched_are_replicated() -> None:
  strategy = [('emb.*', 'replicate'), (r'.*\.w', 'fsdp("data")'), ('emb/w', 'shard_dim("model", 0)')]
  decisions = explain_sharding(PARAMS, strategy, MESH)
  assert decisions['emb']['w'].spec == P(None, None) and decisions['emb']['w'].pattern == 'emb.*'
  pattern = repr(r'.*\.w')
  assert decisions['ff']['w'].why == (f'strategy {pattern} does not split it', f'strategy {pattern}: fsdp("data")')
  assert decisions['ff']['b'].spec == P(None) and decisions['ff']['b'].pattern is None
  assert unused_patterns(PARAMS, strategy) == [2]


def test_patterns_match_the_whole_path() -> None:
  specs = infer_sharding(PARAMS, [('emb', 'fsdp("data")'), ('ff/w', 'fsdp("data")')], MESH)
  assert specs['emb']['w'] == P(None, None) and specs['ff']['w'] == P(None, 'data')


def test_one_pass_covers_optimizer_state() -> None:
  state = {'params': PARAMS, 'opt': jax.eval_shape(optax.adam(1.0).init, PARAMS)}
  specs = infer_sharding(state, [('.*', 'fsdp("data")')], MESH)
  assert specs['opt'][0].mu == specs['opt'][0].nu == specs['params']
  assert specs['opt'][0].count == P()
  assert specs['params']['ff'] == {'w': P(None, 'data'), 'b': P(None)}


def test_padding_and_refusals_are_said() -> None:
  decide = lambda ops: explain_sharding({'w': struct(1537, 1539)}, [('.*', ops)], MESH)['w']  # noqa: E731
  assert '1539 is padded to 1544' in decide('fsdp("data")').remarks[0]
  assert 'splits nothing' in decide('fsdp("data", allow_padding=False)').remarks[0]
  assert 'not above the 100 MiB' in decide('fsdp("data", 100)').remarks[0]


def test_logical_names_are_resolved_by_the_rules() -> None:
  weights = {
    'w': WeightHParams((6, 4), tensor_split_dims_mapping=('embed', 'mlp'), dtype=jnp.float32),
    'stacked': WeightHParams((6, 4), tensor_split_dims_mapping=('embed', 'mlp')).repeat(3),
    'plain': WeightHParams((6, 4)),
  }
  strategy = [('.*', 'logical_partitioning')]
  assert infer_sharding(weights, strategy, MESH) == {
    'w': P(None, 'model'),
    'stacked': P(None, None, 'model'),
    'plain': P(None, None),
  }
  with axis_rules([('embed', 'data'), ('mlp', None)]):
    assert infer_sharding(weights, strategy, MESH)['w'] == P('data', None)
  explicit = [('.*', 'logical_partitioning(rules=(("embed", "model"), ("mlp", None)))')]
  assert infer_sharding(weights, explicit, MESH)['w'] == P('model', None)
  both = [('w', 'logical_partitioning | fsdp("data", 0)')]
  assert infer_sharding(weights, both, MESH)['w'] == P('data', 'model')


def test_users_register_their_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(strategy_ops, '_OPS', dict(strategy_ops._OPS))

  @register_rule('shard_first')
  def shard_first(axis: str) -> Op:
    def op(spec: Spec, variable: Variable, mesh: Any) -> Spec:
      return (axis, *spec[1:])

    return op

  assert spec_of((5, 6), 'shard_first("data")') == ('data', None)
  with pytest.raises(ShardingError, match=r'w: shard_first.* gives 1 entry to 0 dimensions'):
    spec_of((), 'shard_first("data")')
  with pytest.raises(KeyError, match=r"'fsdp' is registered already; known ops: fsdp, .*, shard_first"):
    register_rule('fsdp')(shard_first)


def test_unknown_rules_list_the_known_ones() -> None:
  with pytest.raises(KeyError, match='known ops: fsdp, logical_partitioning, replicate, shard_dim') as error:
    parse_ops('fdsp("data")')
  assert "Did you mean 'fsdp'?" in str(error.value) and isinstance(error.value, UserError)


@pytest.mark.parametrize(
  ('ops', 'message'),
  [
    ('fsdp(axis=axis)', "'axis' is not a literal"),
    ('fsdp("da" + "ta")', 'is not a literal'),
    ('fsdp(__import__("os").getcwd())', 'is not a literal'),
    ('fsdp(**{"axis": "data"})', 'no \\*\\*'),
    ('os.system("true")', 'is not a call of an op'),
    ('"fsdp"', 'is not a call of an op'),
    ('fsdp("data"', 'is not a chain of ops'),
    ('', 'is not a chain of ops'),
    ('fsdp()', "missing a required argument: 'axis'"),
    ('fsdp("data", nonsense=1)', "unexpected keyword argument 'nonsense'"),
  ],
)
def test_only_calls_with_literal_arguments_are_ops(ops: str, message: str) -> None:
  with pytest.raises(ShardingError, match=message):
    parse_ops(ops)


@pytest.mark.parametrize('strategy', [['fsdp("data")'], [('.*',)], [('.*', ['replicate'])]])
def test_malformed_strategies_are_refused(strategy: Any) -> None:
  with pytest.raises(ShardingError, match='list of pairs'):
    infer_sharding(PARAMS, strategy, MESH)
  with pytest.raises(ShardingError, match='not a regular expression'):
    infer_sharding(PARAMS, [('*', 'replicate')], MESH)


DEEP = {'a': {'b': {'x': struct(8, 8)}}, 'c': struct(8, 8)}


@pytest.mark.parametrize(
  ('pattern', 'matched'),
  [
    ('[^/]+', ['c']),
    ('[^.]+', ['c']),
    ('a/[^/]+', []),
    ('a/[^/]+/x', ['a.b.x']),
    (r'a\.[^.]+', []),
    (r'a\.[^.]+\.x', ['a.b.x']),
    ('a/.*', ['a.b.x']),
    ('.*x', ['a.b.x']),
  ],
)
def test_a_pattern_sees_one_separator_of_paths(pattern: str, matched: list[str]) -> None:
  decisions = leaves_by_path(explain_sharding(DEEP, [(pattern, 'shard_dim("data", 0)')], MESH))
  assert ['.'.join(path) for path, placed in decisions.items() if placed.spec == P('data', None)] == matched


def test_logical_partitioning_takes_the_rules_it_is_given() -> None:
  weights = {'w': WeightHParams((8, 8), tensor_split_dims_mapping=('embed', 'mlp'))}
  strategy = [('.*', 'logical_partitioning')]
  specs = infer_sharding(weights, strategy, MESH, rules=[('embed', 'data'), ('mlp', None)])
  assert specs == {'w': P('data', None)}


def test_names_in_boxes_of_flax_are_logical_axes() -> None:
  params = {
    'up': {'kernel': LogicallyPartitioned(struct(16, 32), ('embed', 'mlp')), 'bias': struct(32)},
    'none': LogicallyPartitioned(struct(16, 16), (None, None)),
    'of a factored slot': LogicallyPartitioned(struct(16), ('embed', 'mlp')),
    'own rules': LogicallyPartitioned(struct(16, 32), ('embed', 'mlp'), rules=(('embed', 'data'), ('mlp', None))),
  }
  specs = infer_sharding(params, [('.*', 'logical_partitioning')], MESH)
  assert jax.tree.structure(specs) == jax.tree.structure(params)
  assert specs['up']['kernel'] == LogicallyPartitioned(P(None, 'model'), ('embed', 'mlp'))
  assert specs['up']['bias'] == P(None) and specs['none'].value == P(None, None)
  assert specs['of a factored slot'].value == P(None) and specs['own rules'].value == P('data', None)
  rules = (('embed', 'model'), ('mlp', 'data'))
  given = infer_sharding(params, [('up/kernel', 'logical_partitioning')], MESH, rules=rules)
  assert given['up']['kernel'].value == P('model', 'data')
  assert unused_patterns(params, [('up/kernel', 'replicate'), ('up/kernel/value', 'replicate')]) == [1]
  state = jax.eval_shape(optax.adam(1e-3).init, params)
  assert infer_sharding(state, [('.*', 'logical_partitioning')], MESH)[0].mu == specs
