"""Which arrays of a checkpoint are taken for stacks of layers that are grouped otherwise."""

from __future__ import annotations

from praxis_lite.checkpoints.regrouping import Regrouping
from praxis_lite.sharding.weights import WeightHParams

WEIGHTS = {'layers': {'w': WeightHParams((5, 4)).repeat(6)}, 'head': WeightHParams((6, 5, 4))}


def records(**shapes):
  return {name.replace('__', '.'): {'shape': list(shape), 'dtype': 'float32'} for name, shape in shapes.items()}


def test_only_stacks_of_as_many_equal_layers_are_regrouped():
  wanted = records(
    mdl_vars__layers__w=(6, 5, 4),
    mdl_vars__head=(6, 5, 4),
    opt_states__repeated_6__count=(),
    opt_states__repeated_6__mu__layers__w=(6, 5, 4),
    opt_states__repeated_6__row__layers__w=(6, 5),
  )
  saved = records(
    mdl_vars__layers__w=(2, 3, 5, 4),
    mdl_vars__head=(2, 3, 5, 4),
    opt_states__repeated_2_3__count=(),
    opt_states__repeated_2_3__mu__layers__w=(2, 3, 5, 4),
    opt_states__repeated_2_3__row__layers__w=(2, 3, 5),
  )
  found = Regrouping(saved, wanted, WEIGHTS).records
  assert {name for name in wanted if found.get(name) != wanted[name]} == {'mdl_vars.head'}
  assert found.keys() == wanted.keys()
  for shape in ((2, 4, 5, 4), (2, 3, 4, 5), (3, 5, 4), (30, 4)):  # More layers, other layers, less, no layers.
    saved['mdl_vars.layers.w']['shape'] = list(shape)
    assert Regrouping(saved, wanted, WEIGHTS).records['mdl_vars.layers.w'] == saved['mdl_vars.layers.w']
  assert Regrouping(saved, wanted, {}).records['mdl_vars.layers.w'] == saved['mdl_vars.layers.w']


def test_the_states_of_several_rules_are_regrouped_each_by_itself():
  wanted, saved = {}, {}
  for rule in ('encoder', 'head'):
    for found, group, stack in ((wanted, 'repeated_6', (6,)), (saved, 'repeated_2_3', (2, 3))):
      found |= records(**{f'opt_states__{rule}__{group}__count': ()})
      found |= records(**{f'opt_states__{rule}__{group}__mu__layers__w': (*stack, 5, 4)})
  assert Regrouping(saved, wanted, WEIGHTS).records == wanted
