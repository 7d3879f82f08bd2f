"""The search for mappings that are right, on steps that only say what they were given."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest

from praxis_lite.common.trees import node_at
from praxis_lite.instruments.explain.report import batch_of
from praxis_lite.instruments.verification.remedies import nearest
from praxis_lite.instruments.verification.shrink import small_task
from praxis_lite.instruments.verification.steps import Name, StepKind, task_of
from praxis_lite.sharding.specs import all_axes
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure


class Step(NamedTuple):
  """A case whose results are the specs of its variables and the mappings of its layers."""

  kind: StepKind
  config: Any
  task: Any

  def run(self, mesh, specs):
    layers = {layer.path_name: layer for layer in self.task.model.descendants()}
    return specs, lambda layer, name: layers[layer].split_mappings('activation_split_dims_mapping')[
      f'{layer}.activation_split_dims_mapping.{name}'
    ]


@pytest.fixture(scope='module')
def small():
  config = configure(registry.get('lm.SyntheticLmTiny'))
  return small_task(config.task, batch_of(config.datasets))


def search(small, is_right, wrong='lm.transformer.layers.ff.linear_in.w', seconds=60.0):
  step = Step(StepKind.GRADIENT, small.config, task_of(small.config, StepKind.GRADIENT))
  return nearest(small, step, None, is_right, [Name('gradient', wrong)], seconds)


@pytest.mark.slow
def test_an_axis_of_a_weight_in_the_order_of_its_field(small):
  ff = ('lm', 'transformer', 'layers', 'ff')
  names = list(node_at(small.placements, ff))
  assert len(names) > 1

  def is_right(results):
    return all('data' not in all_axes(node_at(results[0], (*ff, name, 'w'))) for name in names)

  assert search(small, is_right) == (
    "right with lm.transformer.layers.ff.weight_split_dims_mapping.wt = (None, 'mdl') instead of ('data', 'mdl')"
  )


def test_two_causes_far_from_the_variable(small):
  def is_right(results):
    specs, activation = results
    logits = activation('lm.softmax', 'out')
    return 'mdl' not in all_axes(logits) and 'mdl' not in all_axes(node_at(specs, ('lm', 'embedding', 'w')))

  lines = search(small, is_right).splitlines()
  assert sorted(lines) == [
    "right with lm.embedding.weight_split_dims_mapping.wt = (None, 'data') instead of ('mdl', 'data')",
    "right with lm.softmax.activation_split_dims_mapping.out = (('replica', 'data'), None, None) instead of "
    "(('replica', 'data'), None, 'mdl')",
  ]


def test_no_mapping_is_the_cause(small):
  assert 'no mapping is the cause' in search(small, lambda results: False)


def test_the_search_ends_in_time(small):
  def is_right(results):
    time.sleep(0.2)
    return 'mdl' not in all_axes(results[1]('lm.softmax', 'out'))

  start = time.monotonic()
  assert 'in time' in search(small, is_right, seconds=0.3)
  assert time.monotonic() - start < 10
