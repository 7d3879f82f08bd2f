"""Records values between the layers of a language model, in one pass or in cached decoding, and compares them.

One pass and decoding compute the same values at the same points (`layers/base/taps.py`). Because all tokens of a text
are known, the values of a layer depend only on the layers before it. So the first layer that differs has the fault.

Shapes: B texts in a batch, T tokens in the longest text, C tokens read in one step.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.trees import NestedDict
from praxis_lite.inputs.rows import Rows
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.call import Summary, Surroundings
from praxis_lite.layers.base.taps import ARRAY, Taps, read_raw_name
from praxis_lite.layers.moe import HIDDEN_ROWS, ROWS
from praxis_lite.models import BaseModel, LanguageModel
from praxis_lite.models.cached_steps import start_caches
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.constraints import axis_rules
from praxis_lite.sharding.mesh import bind_mesh
from praxis_lite.training.execution import CompilerPlaced


class PointValues(NamedTuple):
  """The values at one point.

  Attributes:
    values: [layers, B, T, ...]; layers is 1 for a layer outside of stacks. In a masked array, the masked tokens were
      not computed.
  """

  values: np.ndarray
  is_stacked: bool


class LayerDifference(NamedTuple):
  """The first layer whose values differ.

  Attributes:
    point: the path of the layer, with the method if it is not the main one. If it ends with '.in', the layer's input
      differs, although no layer before it does.
    layer: the number of the layer in its stack; None outside of stacks.
    row, token: the first text whose values differ, and the index of the first such token.
  """

  point: str
  layer: int | None
  row: int
  token: int

  def __str__(self) -> str:
    number = '' if self.layer is None else f', layer {self.layer} of the stack'
    where, before = self.point, ''
    if where.endswith('.in'):  # What is computed between two layers belongs to their parent.
      where, _, child = where.removesuffix('.in').rpartition('.')
      before = f', before its {child}'
    return f'{where}{before}{number}, from token {self.token} of text {self.row}'


def values_in_one_pass(model: BaseModel, variables: NestedDict, batch: Rows) -> dict[str, PointValues]:
  """Returns the values in a call of `predict` on texts, on one device, in the order of the layers."""
  seen: dict[str, str] = {}

  def run(variables: NestedDict, batch: Rows) -> dict[str, Summary]:
    surroundings = Surroundings(taps=_taps(seen, Surroundings()))
    _, side = model.apply(variables, batch, do_eval=True, method='predict', surroundings=surroundings)
    return _select_arrays(side.summaries)

  return _group_by_point(jax.jit(run)(variables, batch), seen)


def values_on_mesh(model: TrainedModel, batch: Rows) -> dict[str, PointValues]:
  """Returns the values in a call of `predict` on texts, on the mesh of a model."""
  seen: dict[str, str] = {}

  def run(variables: NestedDict, batch: Rows, surroundings: Surroundings) -> dict[str, Summary]:
    surroundings = dataclasses.replace(surroundings, taps=_taps(seen, surroundings))
    _, side = model.layer.apply(variables, batch, do_eval=True, method='predict', surroundings=surroundings)
    return _select_arrays(side.summaries)

  return _group_by_point(map_over_mesh(model.tasks, run)(model.stored_variables, batch), seen)


def values_in_decoding(
  model: TrainedModel, batch: Rows, context_lengths: Sequence[int], *, can_go_back: bool, chunk: int | None = None
) -> dict[str, PointValues]:
  """Returns the values of cached decoding on the mesh of a model.

  Args:
    batch: the texts, `ids` and `weights` [B, T], and sources if the model has some.
    context_lengths: how many tokens at the beginning of each text are its context.
    can_go_back: whether to use a batcher's caches, which can be read again from an earlier token.
    chunk: how many tokens of a context are read in one step; None reads all in one step.
  """
  language_model = model.tasks.jax_task.model
  assert isinstance(language_model, LanguageModel)
  lm: Layer = language_model.lm
  ids_BT, lengths_B = batch['ids'], (batch['weights'] > 0).sum(1)
  B, T = ids_BT.shape
  read_B = np.array(context_lengths, np.int32)
  slots = int(read_B.max() + (lengths_B - read_B).max())
  seen: dict[str, str] = {}

  def start(variables: NestedDict, surroundings: Surroundings) -> NestedDict:
    del surroundings
    if 'source_ids' in batch:
      source, is_token = (jnp.asarray(batch[name]) for name in ('source_ids', 'source_segment_ids'))
      _, side = lm.apply(variables['lm'], source, is_token, slots, method='init_decode_state', do_eval=True)
      return side.decode_state
    return start_caches(lm, variables['lm'], B, slots, can_go_back)

  def extend(
    variables: NestedDict, ids_BC: jax.Array, pos_BC: jax.Array, state: NestedDict, surroundings: Surroundings
  ) -> tuple[NestedDict, dict[str, Summary]]:
    surroundings = dataclasses.replace(surroundings, taps=_taps(seen, surroundings))
    prefix = (jnp.asarray(read_B),) if language_model.model_type == 'prefix' and ids_BC.shape[1] > 1 else ()
    arguments = ids_BC, pos_BC, jnp.zeros(B, jnp.int32), *prefix
    settings: dict[str, Any] = {'do_eval': True, 'method': 'extend_step', 'surroundings': surroundings}
    side = lm.apply(variables['lm'], *arguments, decode_state=state, **settings)[1]
    return side.decode_state, _select_arrays(side.summaries)

  run = map_over_mesh(model.tasks, extend)
  state = map_over_mesh(model.tasks, start)(model.stored_variables)
  found: dict[str, PointValues] = {}
  for pos_BC in _positions(read_B, lengths_B, chunk):
    ids_BC = np.where(pos_BC < 0, 0, np.take_along_axis(ids_BT, np.maximum(pos_BC, 0), axis=1))
    state, summaries = run(model.stored_variables, ids_BC, pos_BC, state)
    rows, columns = np.nonzero(pos_BC >= 0)
    for name, new in _group_by_point(summaries, seen, is_one_token=pos_BC.shape[1] == 1).items():
      if new.values.shape[1:3] == pos_BC.shape:
        unknown = np.ma.masked_all((len(new.values), B, T, *new.values.shape[3:]), np.float32)
        values = found.setdefault(name, PointValues(unknown, new.is_stacked)).values
        values[:, rows, pos_BC[rows, columns]] = new.values[:, rows, columns]
  return found


def _positions(read_B: np.ndarray, lengths_B: np.ndarray, chunk: int | None) -> Iterator[np.ndarray]:
  """Yields the positions, [B, C] int32, that each step of decoding reads; -1 for padding."""
  most = int(read_B.max())
  for first in range(0, most, chunk or most):
    place_C = first + np.arange(chunk or most, dtype=np.int32)
    yield np.where(place_C < read_B[:, None], place_C, -1)
  for number in range(int((lengths_B - read_B).max())):
    place_B = read_B + np.int32(number)
    yield np.where(place_B < lengths_B, place_B, -1)[:, None]


def first_layer_difference(
  expected: Mapping[str, PointValues], found: Mapping[str, PointValues], lengths: Sequence[int], tolerance: float
) -> LayerDifference | None:
  """Returns the first layer whose values differ; None if none does.

  Args:
    expected, found: the values by point, in the order of the layers; points that only one of them has are ignored.
    tolerance: the largest difference that counts as equal, relative to the largest value of the layer.
  """
  is_token_BT = np.arange(max(lengths)) < np.array(lengths)[:, None]
  for group in _groups(expected):
    for layer in range(len(expected[group[0]].values)):
      for name in group:
        pair = [values[name].values for values in (expected, found) if name in values]
        if len(pair) < 2 or pair[0].shape != pair[1].shape or pair[0].shape[1:3] != is_token_BT.shape:
          continue
        a_BT, b_BT = (x[layer].reshape(*is_token_BT.shape, -1).astype(np.float32) for x in pair)
        is_known_BT, b_BT = is_token_BT & ~np.ma.getmaskarray(b_BT).all(axis=2), np.ma.filled(b_BT, np.nan)
        if not is_known_BT.any():
          continue
        most = tolerance * max(float(np.abs(a_BT[is_known_BT]).max()), 1e-30)
        differs_BT = is_known_BT & ~(np.abs(a_BT - b_BT).max(axis=2) <= most)
        if differs_BT.any():
          row, token = min(map(tuple, np.argwhere(differs_BT).tolist()), key=lambda at: at[::-1])
          return LayerDifference(name, layer if expected[name].is_stacked else None, row, token)
  return None


def _groups(values: Mapping[str, PointValues]) -> Iterator[list[str]]:
  """Yields groups of successive points.

  A group is either one point that is in no stack, or points in stacks that have the same number of layers.
  """
  sizes = {name: len(point.values) if point.is_stacked else name for name, point in values.items()}
  for _, group in itertools.groupby(values, sizes.__getitem__):
    yield list(group)


# ---------------------------------------------------------------- how


def map_over_mesh(tasks: TaskOnMesh, fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a jitted function of `(variables, *arguments)`, with the variables as they are stored on the mesh.

  It returns `fn(variables, *arguments, surroundings=...)`, where the variables have their true shapes.
  """
  surroundings = CompilerPlaced(tasks.jax_task, tasks.layout).surroundings

  def run(variables: NestedDict, *arguments: Any) -> Any:
    with axis_rules(tasks.jax_task.logical_axis_rules or ()):
      return fn(tasks.layout.mdl_vars.unpad(variables), *arguments, surroundings=surroundings)

  return GuardedJit(bind_mesh(run, tasks.mesh))


def _taps(seen: dict[str, str], surroundings: Surroundings) -> Taps:
  def values_wanted(name: str) -> tuple[str, ...]:
    # A tap on rows of experts would make all experts compute all tokens.
    return () if name.endswith((ROWS, HIDDEN_ROWS)) else (ARRAY,)

  return Taps(values_wanted, seen, manual_axes=surroundings.manual_axes, wants_inputs=True)


def _select_arrays(summaries: Mapping[str, Summary]) -> dict[str, Summary]:
  return {name: summary for name, summary in summaries.items() if summary.kind == ARRAY}


def _group_by_point(
  summaries: Mapping[str, Summary], seen: Mapping[str, str], is_one_token: bool = False
) -> dict[str, PointValues]:
  """Returns values by point, in the order of `seen`; with `is_one_token`, adds the missing dimension of tokens."""
  found: dict[str, PointValues] = {}
  for name, summary in summaries.items():
    raw = read_raw_name(name)
    assert raw is not None
    ndim, value = int(raw[1][0]), np.asarray(summary.value, np.float32)
    stack = value.shape[: value.ndim - ndim]
    value = value.reshape(-1, *value.shape[value.ndim - ndim :])
    if value.ndim >= 2 and is_one_token and value.shape[2:3] != (1,):
      value = value[:, :, None]
    if value.ndim >= 3:
      found[raw[2]] = PointValues(value, bool(stack))
  return {name: found[name] for name in seen if name in found}
