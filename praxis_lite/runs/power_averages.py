"""Computes averages of a run's weights over any fraction of the run, from the averages in its checkpoints.

`Learner.power_averages` keeps these averages; `training/learning/power_averages.py` explains how they are combined.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.common.config import Config
from praxis_lite.common.errors import UserError
from praxis_lite.common.figures import number_of
from praxis_lite.common.trees import NestedDict, Path, leaves, map_with_path, nest, node_at, to_path
from praxis_lite.training.learning.multi_learner import nested_learners, nested_rules
from praxis_lite.training.learning.power_averages import check_widths, combine_averages

# An average gives a weight to each step of a run. If it is combined from others, its weights differ somewhat from the
# wanted ones. This is the largest norm of the difference that is accepted, relative to the norm of the wanted weights.
_MOST_MISSED = 0.2
_NAME = re.compile(r'opt_states\.((?:\w+\.)?)averages\.(\d+)\.(.+)')


def power_average(
  directory: str | os.PathLike[str], learner: Config, variables: NestedDict, width: float, step: int
) -> NestedDict:
  """Returns the variables of a checkpoint. If checkpoints have averages of a variable, its average takes its place.

  Args:
    variables: the variables of the checkpoint of `step`, on a mesh.
    width: the relative width of the average.

  Raises:
    UserError: the width is not valid, or the checkpoints up to `step` have no averages, or too few to combine.
  """
  check_widths((width,), 'load(power_average=...)')
  rules = nested_rules(learner)
  prefixes = [f'{rule.name}.' for rule in rules] if rules else ['']
  widths = {prefix: each.power_averages for prefix, each in zip(prefixes, nested_learners(learner).values())}
  with contextlib.closing(Checkpointer(directory, read_only=True)) as checkpointer:
    found = {at: _averages_in(checkpointer, at, widths) for at in checkpointer.steps() if at <= step}
    known: dict[Path, list[tuple[int, float]]] = {}
    for at, names in found.items():
      for name in names:
        path, own = names[name]
        known.setdefault(path, []).append((at, own))
    if not known:
      raise UserError(
        f'load(power_average={width}): no checkpoint up to step {step} has averages; train with '
        'task.train.learner.power_averages, and keep checkpoints by task.train.keep_interval_steps'
      )
    factors = {path: iter(_factors(each, width, step)) for path, each in known.items()}
    sums: dict[Path, jax.Array] = {}
    for at, names in found.items():
      like = {name: node_at(variables, path) for name, (path, _) in names.items()}
      shapes = {
        to_path(name): jax.ShapeDtypeStruct(x.shape, jnp.float32, sharding=x.sharding) for name, x in like.items()
      }
      arrays = leaves(checkpointer.restore_arrays(nest(shapes), step=at)) if names else {}
      for name, (path, _) in names.items():
        term = jnp.float32(next(factors[path])) * arrays[to_path(name)]
        sums[path] = sums[path] + term if path in sums else term
  return map_with_path(lambda path, x: sums[path].astype(x.dtype) if path in sums else x, variables)


def _factors(known: Sequence[tuple[int, float]], width: float, step: int) -> list[float]:
  factors, missed = combine_averages(known, width, step)
  if missed > _MOST_MISSED:
    steps, widths = (sorted({*each}) for each in zip(*known))
    raise UserError(
      f'load(power_average={width}): averages of widths {", ".join(f"{each:g}" for each in widths)} in '
      f'{number_of(len(steps), "checkpoint")} up to step {step} make it only up to an error of {missed:.0%} of its '
      f'weights, and {_MOST_MISSED:.0%} are the limit; take a width nearer to one of these, or keep more checkpoints '
      'by task.train.keep_interval_steps'
    )
  return factors.tolist()


def _averages_in(
  checkpointer: Checkpointer, step: int, widths: Mapping[str, tuple[float, ...]]
) -> dict[str, tuple[Path, float]]:
  """Returns the averages in a checkpoint, by the name of the array: the variable's path, and the average's width."""
  averages = {}
  for name in checkpointer.about(step)['variables']:
    match = _NAME.fullmatch(name)
    if match and int(match[2]) < len(of_learner := widths.get(match[1], ())):
      averages[name] = to_path(match[3]), of_learner[int(match[2])]
  return averages
