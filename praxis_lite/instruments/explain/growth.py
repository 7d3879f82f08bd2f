"""The factors that `Mup` gives to the variables of a model, relative to its base model, and the reasons for them."""

from __future__ import annotations

from praxis_lite.common.trees import leaves_by_path, path_name
from praxis_lite.instruments.explain.explanation import align_columns
from praxis_lite.training.task import SingleTask


def format_growth(task: SingleTask) -> str:
  """Returns a table of the trained variables to which `Mup` gives factors; '' if there are none.

  A line has the factors of the initial values and the updates, and the fans that determine them.
  """
  learner, rows = task.bind_learner(), list[tuple[str, str]]()
  for path in leaves_by_path(task.model.abstract_init()):
    if learner.is_trained(path) and (remark := learner.growth_remark(path)):
      rows.append((path_name(path), remark))
  return '\n'.join(align_columns([('variable', 'in relation to mup.base'), *rows])) if rows else ''
