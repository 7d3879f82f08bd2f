"""Taps of a step: statistics of activations, gradients, updates and weights, chosen by path.

    lm.transformer.*.attention:rms,max     results of each attention layer; '*' stands for any text
    lm.transformer.*.attention.entropy     entropy of the probabilities of each query and head, in nats
    lm.transformer.layers.in:mean          input of a block, its first argument
    lm.transformer.layers.attention.grad   gradient with respect to the result, for the whole batch
    grad(lm.softmax.*):rms                 gradients of variables, for the whole batch, before clipping
    update(*.w):rms,ratio                  changes of variables in a step; ratio is rms of change / rms of variable
    weight(lm.softmax.w):hist              variables before the step

Statistics exclude padding: of tokens, of rows of a batch, and of arrays on a mesh. Each layer of a stack has separate
statistics. `layers/base/taps.py` observes activations; variables are read where a step has them as whole arrays.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.errors import ConfigError, did_you_mean
from praxis_lite.common.statistics import HISTOGRAM, STATISTICS, PartKind, compute_parts, kind_of_part, to_statistics
from praxis_lite.common.trees import NestedDict, Path, leaves, node_at, path_name
from praxis_lite.layers.base.call import Summary, Surroundings
from praxis_lite.layers.base.taps import ARRAY, GRADIENT, Taps, raw_name, read_raw_name
from praxis_lite.layers.transformer_block import token_paddings
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.task import SingleTask

_DEFAULT = ('rms',)
_RATIO = 'ratio'  # The rms of the update of a weight, divided by the rms of the weight.
_FUNCTION = re.compile(r'(\w+)\((.*)\)')
OF_VARIABLES = ('grad', 'update', 'weight')
# Endings of points that a pattern must name, since '*' does not match them.
_SPECIAL = ('.in', '.entropy', f'.in{GRADIENT}', GRADIENT, '.rows_of_experts', '.hidden_rows_of_experts')
# Names of arrays of a batch that say which tokens are padding.
_MARKS = ('weights', 'segment_ids', 'paddings')


@dataclasses.dataclass(frozen=True)
class Tap:
  """The values to observe, and the statistics to compute."""

  text: str  # The text from which the tap was parsed.
  of: str  # 'grad', 'update', 'weight', or '' for an activation.
  pattern: str  # A path, in which '*' stands for any text.
  statistics: tuple[str, ...]  # Names in `STATISTICS`, or 'ratio'; or `ARRAY` alone.

  @classmethod
  def parse(cls, text: str, default: tuple[str, ...] = _DEFAULT) -> Tap:
    """Parses 'path:statistics' or 'grad(path):statistics'; the statistics may be omitted, and are then `default`.

    Raises ConfigError if the text does not have this form, or there is no such statistic.
    """
    where = f'tap {text!r}'
    path, colon, names = text.strip().partition(':')
    of, function = '', _FUNCTION.fullmatch(path)
    if function is not None:
      of, path = function.groups()
      if of not in OF_VARIABLES:
        raise ConfigError(
          f'{where}: there is no {of}(...).{did_you_mean(of, OF_VARIABLES)} Write grad(path), update(path) or '
          'weight(path) for variables, or a path alone for the result of a layer'
        )
    if not path or re.search(r'[^\w.*~-]', path):
      raise ConfigError(
        f"{where}: expected path:statistics, as in 'lm.transformer.*.attention:rms,max'; '*' stands for any text"
      )
    known = (*STATISTICS, *([_RATIO] if of == 'update' else []))
    statistics = tuple(filter(None, (name.strip() for name in names.split(',')))) if colon else default
    if not statistics:
      raise ConfigError(f'{where}: name statistics after the colon, such as rms; there are {", ".join(known)}')
    for name in statistics:
      if name not in (*known, *default):
        of_update = ' It is a statistic of update(path).' if name == _RATIO else ''
        close = of_update or did_you_mean(name, known)
        raise ConfigError(f'{where}: there is no statistic {name!r}.{close} There are {", ".join(known)}')
    return cls(text, of, path, tuple(dict.fromkeys(statistics)))

  def matches(self, name: str) -> bool:
    """Whether the pattern matches the path of a value."""
    return fnmatch.fnmatchcase(name, self.pattern)


class StepTaps:
  """The taps of the steps of a task.

  Args:
    trained: (path) -> whether the variable is trained; None for inference steps.
    of_loss: whether inference steps may compute a loss, and the gradients of activations.

  Attributes:
    trains: whether the steps train.
    seen: the names of all points of the step that was traced last, that is, of the activations that layers offer to
      taps. The value is '', or the reason why a point cannot be tapped.
    left_out: lines about points that match a pattern but cannot be tapped, set when the step is traced.
    wants_gradients: the text of the first tap of gradients of activations; '' if there is none.

  Raises:
    ConfigError: `grad`, `update` or `weight` matches no variable, or needs a train step.
  """

  def __init__(
    self, taps: Sequence[Tap], weights: NestedDict, trained: Callable[[Path], bool] | None, of_loss: bool = False
  ):
    self._activations = [tap for tap in taps if not tap.of]
    self._of_variables = [tap for tap in taps if tap.of]
    self._weights: dict[Path, WeightHParams] = leaves(weights)
    self._trained = {path for path in self._weights if trained is not None and trained(path)}
    self.trains = trained is not None
    self.seen: dict[str, str] = {}
    self.left_out: list[str] = []
    self.wants_gradients = next((tap.text for tap in self._activations if tap.pattern.endswith(GRADIENT)), '')
    if self.wants_gradients and not (self.trains or of_loss):
      raise ConfigError(
        f"tap {self.wants_gradients!r}: gradients are of a train step; tap them in `train`, or by a model's `tap`"
      )
    for tap in self._of_variables:
      if trained is None:
        raise ConfigError(
          f'tap {tap.text!r}: {tap.of}(...) is of a train step; tap it in `train`. The weights of a loaded model are '
          'its `variables`'
        )
      self._check_variable(tap)

  def _check_variable(self, tap: Tap) -> None:
    names = list(map(path_name, self._weights))
    met = [name for name in names if tap.matches(name)]
    if not met:
      below = any(name.startswith(f'{tap.pattern}.') for name in names)
      own = f' The gradient of its result is {tap.pattern}{GRADIENT}' if tap.of == 'grad' else ''
      of_layer = f' It is a layer; its variables are {tap.of}({tap.pattern}.*).{own}'
      near = of_layer if below else _nearest(tap.pattern, names)
      raise ConfigError(f'tap {tap.text!r} matches no variable.{near}')
    if tap.of != 'weight' and not any(tap.matches(path_name(path)) for path in self._trained):
      raise ConfigError(f'tap {tap.text!r}: {met[0]} is not trained, so it has no {tap.of}')

  def check_parts(self, axes: Iterable[str]) -> None:
    """Raises ConfigError if activations are tapped, and layers are split over `axes` under `shard_map`."""
    if self._activations and (split := sorted(axes)):
      raise ConfigError(
        f"tap {self._activations[0].text!r}: under task.partitioning='shard_map', the results of layers that are split "
        f"over {split[0]!r} are parts; tap weights, gradients and updates, or set task.partitioning='auto'"
      )

  # ---------------------------------------------------------------- activations

  def surround(
    self,
    surroundings: Surroundings,
    batch: Mapping[str, jax.Array],
    probed: dict[str, Path] | None = None,
    share: jax.Array | None = None,
  ) -> Surroundings:
    """Returns `surroundings` with the taps of values in a call of the model; unchanged if no activation is tapped.

    See `Taps` for `probed` and `share`.
    """
    if not self._activations:
      return surroundings
    self.seen.clear()
    taps = Taps(
      self._wanted_statistics,
      self.seen,
      real_tokens(batch),
      surroundings.manual_axes,
      wants_inputs=any(tap.pattern.endswith(('.in', f'.in{GRADIENT}', '*')) for tap in self._activations),
      probed=probed,
      share=share,
    )
    return dataclasses.replace(surroundings, taps=taps)

  def _wanted_statistics(self, name: str) -> Sequence[str]:
    return _statistics_of(tap for tap in self._activations if _is_meant(tap, name))

  def check_seen(self) -> None:
    """Raises ConfigError if a tap matched nothing in the step just traced, or only arrays that cannot be tapped."""
    for tap in self._activations:
      met = {name: problem for name, problem in self.seen.items() if _is_meant(tap, name)}
      if not met:
        raise ConfigError(f'tap {tap.text!r} matches no layer that the step calls.{_nearest(tap.pattern, self.seen)}')
      if all(met.values()):
        name, problem = next(iter(met.items()))
        raise ConfigError(f'tap {tap.text!r}: {name} cannot be tapped: {problem}')
    self.left_out = [
      f'tap: {name} is left out: {problem}'
      for name, problem in self.seen.items()
      if problem and any(_is_meant(tap, name) for tap in self._activations)
    ]

  # ---------------------------------------------------------------- variables

  def variables_of(self, of: str) -> list[Path]:
    """Returns the paths of the variables that are tapped; `of` is 'grad', 'update' or 'weight'."""
    return [path for path in self._weights if self._statistics(of, path)]

  def summarize(self, of: str, values: Mapping[Path, jax.Array]) -> dict[str, Summary]:
    """Returns the summaries of gradients, updates or weights, given as whole arrays in true shapes by path."""
    summaries: dict[str, Summary] = {}
    for path, value in values.items():
      statistics, label = self._statistics(of, path), f'{of}({path_name(path)})'
      computed = list(dict.fromkeys('rms' if name == _RATIO else name for name in statistics))
      parts = compute_parts(value, None, computed, len(self._weights[path].repeat_prefix))
      for part, x in parts.items():
        summaries[raw_name(part, statistics, label)] = Summary(x, str(kind_of_part(part)))
    return summaries

  def summarize_step(self, before: NestedDict, after: NestedDict) -> dict[str, Summary]:
    """Returns the summaries of weights and of their changes in a step; variables have their true shapes."""
    summaries = self.summarize('weight', {path: node_at(before, path) for path in self.variables_of('weight')})
    updated = self.variables_of('update')
    old, new = ({path: node_at(tree, path).astype(jnp.float32) for path in updated} for tree in (before, after))
    summaries |= self.summarize('update', {path: new[path] - old[path] for path in updated})
    for path in updated:
      statistics, label = self._statistics('update', path), f'update({path_name(path)})'
      if _RATIO in statistics:
        first = len(self._weights[path].repeat_prefix)
        squares = compute_parts(node_at(before, path), None, ['rms'], first)['squares']
        summaries[raw_name('squares_of_weight', statistics, label)] = Summary(squares, str(PartKind.SUM))
    return summaries

  def _statistics(self, of: str, path: Path) -> tuple[str, ...]:
    if of != 'weight' and path not in self._trained:
      return ()
    return _statistics_of(tap for tap in self._of_variables if tap.of == of and tap.matches(path_name(path)))


def step_taps(jax_task: SingleTask, taps: Sequence[str] | str, *, trains: bool = True) -> StepTaps:
  """Returns the taps of a task's steps, parsed from texts such as 'lm.transformer.*:rms'.

  Raises ConfigError if a text does not have this form, or matches nothing.
  """
  parsed = [Tap.parse(text) for text in ((taps,) if isinstance(taps, str) else taps)]
  return StepTaps(parsed, jax_task.model.abstract_init(), jax_task.bind_learner().is_trained if trains else None)


def _statistics_of(taps: Iterable[Tap]) -> tuple[str, ...]:
  return tuple(dict.fromkeys(name for tap in taps for name in tap.statistics))


def _is_meant(tap: Tap, name: str) -> bool:
  """Whether a tap matches a point; if the point has an ending in `_SPECIAL`, the pattern must have it too."""
  special = next((end for end in _SPECIAL if name.endswith(end)), '')
  return tap.matches(name) and tap.pattern.endswith(special)


def _nearest(pattern: str, names: Iterable[str]) -> str:
  """Returns the end of a message, with paths in `names` that are similar to a pattern; '' if there are no paths."""
  known = list(names)
  last = pattern.removesuffix(GRADIENT).rstrip('.*').rpartition('.')[2].rpartition('*')[2]
  inside = [name for name in known if last and last in name.split('.')][:3] or [
    name for name in known if last and fnmatch.fnmatchcase(name, f'*{last}*')
  ][:3]
  if inside:
    return f' Near paths: {", ".join(inside)}'
  return did_you_mean(pattern, known) or (f' There are {", ".join(known[:4])}, ...' if known else '')


def real_tokens(batch: Mapping[str, jax.Array]) -> jax.Array | None:
  """Returns which tokens, [B, T] bool, or which rows, [B] bool, are not padding; None if a batch has no weights.

  The result is for rows if no array of the batch marks tokens, or if there are several sequences, such as sources and
  targets.
  """
  marks = [name for name in batch if name.endswith(_MARKS)]
  weights = batch.get('weights')
  others = [name for name in marks if name not in _MARKS]
  tokens = [batch[name].shape for name in marks if batch[name].ndim > 1]
  if weights is None:
    return None
  if others or len(set(tokens)) != 1 or len(tokens[0]) != 2:
    return jnp.any(weights.reshape(len(weights), -1) != 0, axis=1)
  B, T = tokens[0]
  weights_BT = weights if weights.ndim > 1 else jnp.broadcast_to(weights[:, None], (B, T))
  segments = batch.get('segment_ids')
  padding = token_paddings(weights_BT, segments)
  real = ~padding if padding is not None else jnp.ones((B, T), bool)
  paddings = batch.get('paddings')
  return real if paddings is None else real & (paddings == 0)


# ---------------------------------------------------------------- on the host


def is_tapped(name: str) -> bool:
  """Whether a summary has this name because of a tap."""
  return read_raw_name(name) is not None


def raw_name_of(name: str) -> tuple[str, tuple[str, ...], str]:
  """Returns (part, statistics, label), the arguments from which `raw_name` made the name of a tapped summary."""
  raw = read_raw_name(name)
  assert raw is not None
  return raw


class TappedParts:
  """Parts of statistics of several batches, combined on the host."""

  def __init__(self) -> None:
    self._parts: dict[str, np.ndarray] = {}
    self._last: dict[str, Summary] = {}

  def add(self, summaries: Mapping[str, Summary]) -> None:
    """Adds those summaries of a batch from which the statistics of taps are computed, and ignores the others.

    They are only read from the devices in the next call, so that this call does not wait for a device.
    """
    self._read_last()
    self._last = {name: s for name, s in summaries.items() if is_tapped(name) and s.kind != ARRAY}

  def _read_last(self) -> None:
    for name, summary in jax.device_get(self._last).items():
      before = [self._parts[name]] if name in self._parts else []
      self._parts[name] = PartKind(summary.kind).combine_on_host([*before, summary.value])
    self._last = {}

  def statistics(self) -> dict[str, Summary]:
    """Returns the statistics by name, such as `path/rms`; histograms have the kind 'bins'."""
    return {
      name: summary
      for (statistics, label), parts in self.combine().items()
      for name, summary in _finish(label, statistics, parts)
    }

  def combine(self) -> dict[tuple[tuple[str, ...], str], dict[str, np.ndarray]]:
    """Returns {(statistics, label): parts by name}, with each part combined over all batches."""
    self._read_last()
    labels: dict[tuple[tuple[str, ...], str], dict[str, np.ndarray]] = {}
    for name, combined in self._parts.items():
      part, statistics, label = raw_name_of(name)
      labels.setdefault((statistics, label), {})[part] = combined
    return labels


def _finish(label: str, statistics: Sequence[str], parts: Mapping[str, np.ndarray]) -> Iterator[tuple[str, Summary]]:
  made: dict[str, Any] = {**to_statistics(parts, [name for name in statistics if name != _RATIO])}
  if _RATIO in statistics:
    with np.errstate(invalid='ignore', divide='ignore'):
      made[_RATIO] = np.sqrt(parts['squares'] / parts['squares_of_weight'])
  for name in statistics:
    value = made[name]
    if name != HISTOGRAM:
      yield f'{label}/{name}', Summary(value)
      continue
    for index in np.ndindex(value.shape[:-1]):
      yield '/'.join([f'{label}/{name}', *map(str, index)]), Summary(value[index], 'bins')


def arrays_by_path(arrays: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
  """Returns the arrays of a `TapStepOutput` by path, [stacks..., num_rows, ...], for the first `num_rows` rows."""
  found: dict[str, np.ndarray] = {}
  for name, value in arrays.items():
    _, (rank, *_), path = raw_name_of(name)
    found[path] = np.moveaxis(np.asarray(value)[:num_rows], 0, value.ndim - int(rank))
  return found


def finish_summaries(summaries: Mapping[str, Summary]) -> dict[str, Summary]:
  """Returns the summaries of a step, with the statistics of taps in place of the sums from which they are computed."""
  parts = TappedParts()
  parts.add(summaries)
  return {**{name: s for name, s in summaries.items() if not is_tapped(name)}, **parts.statistics()}
