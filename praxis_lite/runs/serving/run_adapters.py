"""read_run_adapter: reads the adapters of a run, whose other weights must equal those of the served model.

The other weights are compared in parts, so no second copy of them is kept in memory.
"""

from __future__ import annotations

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.checkpoints import Checkpointer
from praxis_lite.checkpoints.streamed import StreamedArray, boxes, whole_box
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import NestedDict, Path, leaves, nest, node_at, path_name
from praxis_lite.models.adapters import adapter_paths
from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
from praxis_lite.runs.run import SavedRun
from praxis_lite.runs.trained import TrainedModel


def read_run_adapter(run: SavedRun, served: TrainedModel, step: int | None = None) -> tuple[Config, NestedDict]:
  """Returns the config of a run's model, and the variables of its adapters in their true shapes.

  Like `decode`, it reads the moving averages if `task.decode.use_ema` says so. Weights in few bits are compared only if
  both models store them in the same way; a note on stderr says how many are not compared.

  Args:
    run: a run that has trained adapters.
    served: a model without adapters.
    step: the step of the checkpoint to read; None reads the newest.

  Raises:
    UserError: the run has no checkpoint, or its weights other than the adapters differ from the served model's.
  """
  config = use_kept_vocabulary(run.config, run.directory)
  task = config.task.instantiate()
  shapes = jax.tree.map(lambda weight: weight.as_struct(), task.model.abstract_init())
  own = adapter_paths(task.model)
  with contextlib.closing(Checkpointer(run.directory, read_only=True)) as checkpointer:
    stored = checkpointer.streamed_variables(shapes, use_ema=task.decode.use_ema, step=step)
    arrays: dict[Path, StreamedArray] = leaves(stored)
    if own:
      _check_base({path: x for path, x in arrays.items() if path not in own}, served, config.task.model)
    adapters = {path: x.read(whole_box(x.shape)) for path, x in arrays.items() if path in own}
  return config.task.model, nest(adapters)


def _check_base(arrays: dict[Path, StreamedArray], served: TrainedModel, model: Config) -> None:
  stored_otherwise = []
  has_few_bits = bool(model.quantized or served.layer.quantized)
  declared = {path: weight.as_struct() for path, weight in leaves(served.layer.abstract_init()).items()}
  for path, x in arrays.items():
    of_served = declared.get(path)
    dtype = None if of_served is None or of_served.shape != x.shape else _common(x.dtype, of_served.dtype)
    if dtype is not None:
      if not _is_same(x, _served_values(served, path), dtype):
        raise ConfigError(
          f'{path_name(path)} differs from that of the model that is served, and an adapter fits only the weights '
          'with which it was trained; serve the run that task.train.init_from of the adapter names, or the merged '
          'adapter'
        )
    elif has_few_bits:
      stored_otherwise.append(path)
    else:
      has = 'has none' if of_served is None else f'has {of_served.dtype} {list(of_served.shape)}'
      raise ConfigError(
        f'{path_name(path)} is {x.dtype} {list(x.shape)}, and the model that is served {has}; serve the run that '
        'task.train.init_from of the adapter names'
      )
  if stored_otherwise:
    print(
      f'note: {len(stored_otherwise)} variables, such as {path_name(stored_otherwise[0])}, are stored in few bits here '
      'or beside the adapter, and are not compared',
      file=sys.stderr,
    )


def _common(a: np.dtype, b: np.dtype) -> np.dtype | None:
  """Returns the dtype in which to compare arrays of two dtypes; None if neither can be cast to the other."""
  if a == b:
    return a
  are_floats = jnp.issubdtype(a, jnp.floating) and jnp.issubdtype(b, jnp.floating)
  return min(a, b, key=lambda dtype: dtype.itemsize) if are_floats and a.itemsize != b.itemsize else None


def _served_values(served: TrainedModel, path: Path) -> np.ndarray:
  one = nest({path: node_at(served.stored_variables, path)})
  return np.asarray(node_at(served.tasks.layout.mdl_vars.to_host(one), path))


def _is_same(x: StreamedArray, y: np.ndarray, dtype: np.dtype) -> bool:
  parts = boxes(whole_box(x.shape), x.part_shape(x.shape))
  return all(np.array_equal(x.read(box).astype(dtype), y[box].astype(dtype)) for box in parts)
