"""Logical axis rules give the standard transformer partitionings, and their errors name the remedy."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding import create_device_mesh
from praxis_lite.sharding.constraints import axis_rules, with_logical_constraint
from praxis_lite.sharding.rules import (
  logical_to_mesh_axes,
  match_rules,
  resolve,
  shadowed_rules,
  standard_logical_axis_rules,
)
from praxis_lite.sharding.specs import spec_axes

D, M = 'data', 'model'
_: Any = None
DIMS = ((1, 1), (2, 1), (1, 2), (2, 2))  # (activation, parameter) partitioning dimensions

# Names of an array, and its spec for each of DIMS: the published table of T5X.
STANDARD = [
  (('vocab', 'embed'), ((M, _), (M, _), (M, D), (M, D))),
  (('embed', 'mlp'), ((_, M), (_, M), (D, M), (D, M))),
  (('mlp', 'embed'), ((M, _), (M, _), (M, D), (M, D))),
  (('joined_kv', 'embed'), ((M, _), (M, _), (M, D), (M, D))),
  (('embed', 'heads', 'kv'), ((_, M, _), (_, M, _), (D, M, _), (D, M, _))),
  (('embed',), ((_,), (M,), (D,), (M,))),
  (('batch', 'length', 'embed'), ((D, _, _), (D, _, M), (D, _, _), (D, _, M))),
  (('batch', 'length', 'mlp'), ((D, _, M),) * 4),
  (('batch', 'length', 'heads', 'kv'), ((D, _, M, _),) * 4),
  *(
    ((name,), ((_,),) * 4)
    for name in ('relpos_buckets', 'abspos_buckets', 'length', 'layers', 'stack', 'mlp_activations')
  ),
]


@pytest.mark.parametrize(('names', 'specs'), STANDARD)
@pytest.mark.parametrize('column', range(4))
def test_standard_rules(names: tuple[str, ...], specs: Any, column: int) -> None:
  assert tuple(logical_to_mesh_axes(names, standard_logical_axis_rules(*DIMS[column]))) == specs[column]


@pytest.mark.parametrize('dims', [(3, 1), (1, 3), (0, 1), (1, 0)])
def test_other_numbers_of_dimensions_are_refused(dims: tuple[int, int]) -> None:
  with pytest.raises(ValueError, match=f'activation_partitioning_dims={dims[0]}.*each is 1 or 2'):
    standard_logical_axis_rules(*dims)


def test_additional_rules_add_names_but_never_win() -> None:
  rules = standard_logical_axis_rules(additional_rules=[('embed', 'data'), ('expert', 'data')])
  assert tuple(logical_to_mesh_axes(('expert', 'embed'), rules)) == ('data', None)


def test_override_rules_win() -> None:
  rules = standard_logical_axis_rules(override_rules=[('embed', 'model'), ('vocab', None)])
  assert tuple(logical_to_mesh_axes(('vocab', 'embed'), rules)) == (None, 'model')
  assert tuple(logical_to_mesh_axes(('embed', 'mlp'), rules)) == ('model', None)


def test_names_twice_or_unknown_are_refused() -> None:
  rules = standard_logical_axis_rules()
  with pytest.raises(ValueError, match="'mlp' occurs twice"):
    logical_to_mesh_axes(('mlp', 'mlp'), rules)
  with pytest.raises(ShardingError, match=r"lm.w: no rule has the logical axis 'embd'; .* Did you mean 'embed'"):
    logical_to_mesh_axes(('embd',), rules, path='lm.w')


def test_it_is_known_which_rule_decided() -> None:
  rules = (('mlp', 'model'), ('embed', 'model'), ('embed', 'data'))
  assert match_rules(('embed', 'mlp'), rules) == (2, 0)
  assert match_rules(('embed', None), rules) == (1, None)


names = st.lists(st.sampled_from('abcd'), unique=True, max_size=4)
axes = st.sampled_from([None, 'x', 'y', ('x', 'y'), ('y', 'z')])


@settings(max_examples=60, deadline=None)
@given(names=names, rules=st.lists(st.tuples(st.sampled_from('abcd'), axes), max_size=7))
def test_first_fit_agrees_with_trying_every_rule_in_turn(names: list[str], rules: list[Any]) -> None:
  rules = [*rules, *((name, None) for name in 'abcd')]
  spec: dict[str, Any] = {}
  for name, mesh_axes in rules:
    free = not set(spec_axes(mesh_axes)) & {a for used in spec.values() for a in spec_axes(used)}
    if name in names and name not in spec and free:
      spec[name] = mesh_axes
  assert tuple(logical_to_mesh_axes(names, rules)) == tuple(spec[name] for name in names)


@settings(max_examples=60, deadline=None)
@given(rules=st.lists(st.tuples(st.sampled_from('ab'), axes), max_size=5))
def test_shadowed_rules_never_decide(rules: list[Any]) -> None:
  shadowed = {later for later, _ in shadowed_rules(rules)}
  known = [*rules, ('a', None), ('b', None)]
  for array in itertools.permutations(('a', 'b')):
    for taken in ((), ('x',), ('y',), ('x', 'z')):
      assert not shadowed & set(match_rules(array, known, taken))


def test_a_rule_after_an_unconditional_one_is_shadowed() -> None:
  assert shadowed_rules([('embed', None), ('mlp', 'model'), ('embed', 'data')]) == ((2, 0),)
  assert shadowed_rules([('embed', 'model'), ('embed', 'data')]) == ()


MESH_AXES = ('data', 'model')


def test_mappings_mix_logical_names_and_mesh_axes() -> None:
  rules = (('mlp', 'model'), ('embed', 'data'), ('embed', 'model'))
  entries = lambda mapping: tuple(resolve(mapping, MESH_AXES, rules, rank=len(mapping)).spec)  # noqa: E731
  assert entries(('embed', 'mlp')) == ('data', 'model')
  assert entries(('embed', 'data')) == ('model', 'data')
  assert entries(('embed', 1)) == ('data', 'model')
  assert entries(('embed', ('data', 'model'))) == (None, ('data', 'model'))
  assert tuple(resolve(None, MESH_AXES, rules, rank=2).spec) == (None, None)
  assert tuple(resolve(('model',), MESH_AXES, None).spec) == ('model',)


def test_mappings_with_rules_keep_their_errors() -> None:
  rules = (('batch', ('replica', 'data')), ('embed', None))
  with pytest.raises(ShardingError, match=r"w.wt: rule \('batch', .*'replica' is not a mesh axis"):
    resolve(('batch', 'embed'), MESH_AXES, rules, path='w.wt')
  with pytest.raises(ShardingError, match=r"'mdl' is neither a mesh axis, of .*, nor a logical axis that a rule has"):
    resolve(('mdl', 'embed'), MESH_AXES, rules)
  with pytest.raises(ShardingError, match='2 entries, but the tensor has 3'):
    resolve(('embed', None), MESH_AXES, rules, rank=3)


def test_activations_are_constrained_by_the_rules_in_force() -> None:
  mesh = create_device_mesh((2, 4), None, MESH_AXES)
  x = jnp.ones((4, 3, 8))
  assert with_logical_constraint(x, ('nonsense',)) is x
  with jax.set_mesh(mesh), axis_rules(standard_logical_axis_rules()):
    y = jax.jit(lambda x: with_logical_constraint(x, ('batch', 'length', 'mlp')))(x)
    with pytest.raises(ShardingError, match='2 entries'):
      with_logical_constraint(x, ('batch', 'mlp'))
  assert y.sharding.is_equivalent_to(jax.sharding.NamedSharding(mesh, P('data', None, 'model')), 3)


ANY = P.UNCONSTRAINED


def test_a_rule_to_unconstrained_leaves_a_dimension_to_the_compiler() -> None:
  rules = (('embed', ANY), ('mlp', 'model'))
  assert logical_to_mesh_axes(('embed', 'mlp'), rules) == P(ANY, 'model')
  assert resolve(('embed', 'mlp'), MESH_AXES, rules).spec == P(ANY, 'model')
  assert shadowed_rules([*rules, ('embed', 'data')]) == ((2, 0),)


def test_unconstrained_stands_among_names_as_often_as_wanted() -> None:
  rules = (('mlp', 'model'),)
  assert logical_to_mesh_axes((ANY, 'mlp', ANY), rules) == P(ANY, 'model', ANY)
  assert resolve((ANY, 'mlp', ANY, 'data'), MESH_AXES, rules).spec == P(ANY, 'model', ANY, 'data')
  assert resolve((ANY, 'model'), MESH_AXES, None).spec == P(ANY, 'model')


def test_an_unconstrained_dimension_is_lowered_as_open() -> None:
  mesh = create_device_mesh((2, 4), None, MESH_AXES)
  rules = (('batch', 'data'), ('embed', ANY), ('mlp', None))
  with jax.set_mesh(mesh), axis_rules(rules):
    step = jax.jit(lambda x: with_logical_constraint(x, ('batch', 'embed', 'mlp')))
    assert '[{"data"}, {?}, {}]' in step.lower(jnp.ones((4, 3, 8))).as_text()


def test_no_names_are_no_constraint() -> None:
  x = jnp.ones((4, 3))
  with jax.set_mesh(create_device_mesh((2, 4), None, MESH_AXES)), axis_rules(standard_logical_axis_rules()):
    assert with_logical_constraint(x, None) is x
