"""Logical names of train states: declared, overridden by path, inherited by optimizer slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

from praxis_lite.bridges.t5x.axis_names import AxisNames, declared_axis_names, override_axis_names, slot_axis_names
from praxis_lite.common.errors import ShardingError
from praxis_lite.sharding.weights import WeightHParams

WEIGHTS = {
  'emb': {'w': WeightHParams((6, 4), tensor_split_dims_mapping=('vocab', 'embed'))},
  'layers': {'ff': {'w': WeightHParams((4, 8), tensor_split_dims_mapping=('embed', 'mlp')).repeat(3, 'layers')}},
  'scale': WeightHParams((4,)),
}
AXES = {
  'emb': {'w': AxisNames('vocab', 'embed')},
  'layers': {'ff': {'w': AxisNames('layers', 'embed', 'mlp')}},
  'scale': AxisNames(None),
}


def test_axis_names_are_leaves() -> None:
  assert jax.tree.leaves({'w': AxisNames('a', 'b')}) == [('a', 'b')]
  assert repr(AxisNames('a', None)) == "AxisNames('a', None)"


def test_declarations_name_axes_with_their_repeat_prefix() -> None:
  assert declared_axis_names(WEIGHTS) == AXES
  with pytest.raises(ShardingError, match=r'lm.w: a .* does not name its axes; pass .*abstract_init'):
    declared_axis_names({'lm': {'w': jnp.ones(2)}})


def test_overrides_replace_names_first_match_first() -> None:
  overrides = [('emb/w', ('joined_kv', None)), (r'.*\.w', ('stack', 'embed', 'heads'))]
  axes = override_axis_names(AXES, overrides)
  assert axes['emb']['w'] == ('joined_kv', None)
  assert axes['layers']['ff']['w'] == ('stack', 'embed', 'heads')
  assert axes['scale'] == (None,)
  assert override_axis_names(AXES, []) == AXES


@pytest.mark.parametrize(
  ('overrides', 'message'),
  [
    ([('emb', ('a', 'b'))], "override 'emb' changes nothing; the paths are emb.w, layers.ff.w, scale"),
    ([('emb.*', ('a', 'b')), ('emb.w', ('c', 'd'))], "'emb.w' changes nothing; 'emb.*' comes first"),
    ([('emb.w', ('a',))], r"has 1 name \('a',\), and emb.w has 2 axes"),
    ([('(', ('a',))], 'not a regular expression'),
  ],
)
def test_overrides_that_do_nothing_or_do_not_fit_are_errors(
  overrides: list[tuple[str, tuple[str, ...]]], message: str
) -> None:
  with pytest.raises(ShardingError, match=message):
    override_axis_names(AXES, overrides)


def test_slots_inherit_and_factored_ones_are_replicated_unless_overridden() -> None:
  params = {'w': jnp.zeros((8, 8)), 'b': jnp.zeros((8,))}
  axes = {'w': AxisNames('embed', 'mlp'), 'b': AxisNames('mlp')}
  adam = slot_axis_names(params, axes, jax.eval_shape(optax.adam(1.0).init, params))
  assert adam[0].mu == adam[0].nu == axes
  assert adam[0].count == ()
  state = jax.eval_shape(optax.adafactor(1.0, min_dim_size_to_factor=4).init, params)
  factored = slot_axis_names(params, axes, state)
  assert factored[0].v_row['w'] == factored[0].v_col['w'] == (None,)
  assert factored[0].v['b'] == ('mlp',)
  named = override_axis_names(factored, [('0/v_row/w', ('embed',))])
  assert named[0].v_row['w'] == ('embed',) and named[0].v_col['w'] == (None,)
