"""Taps read the values between the layers of a call, and edits change them.

A *point* is a value that one layer gives to another. Its name is the path of the layer. The name of the method follows
unless it is `__call__`, or `extend_step`, which decoding calls instead:

    lm.transformer.layers.attention         the result of the attention; one point for all layers of a stack
    lm.transformer.layers.attention.in      its first argument
    lm.softmax.emb_lookup                   the result of another method
    lm.transformer.layers.attention.entropy what a layer computes only for taps; see `tap_value`
    lm.transformer.layers.attention.grad    the gradient of the loss with respect to the first of these, in training

If a result is a tree, the point is its first floating array. `run_in_scope` calls `edit_and_tap` for each point.
Without taps and edits, these calls add nothing to the program.

An edit replaces x by `(x or 0) + add`. Its arrays are entries of the variables, below the path of the layer, so the
scan of a stack of layers gives each layer its own:

    drop     [] bool, whether zeros take the place of x
    units    [k] int32, if only these entries of the last dimension become zeros
    add      any shape that broadcasts to x

Gradients exist only in the backward pass. There, `_watch` computes parts of their statistics. It returns these as the
gradient with respect to a *probe*: zeros of the shapes of the parts. Probes, too, are entries of the variables.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from praxis_lite.common.errors import ConfigError
from praxis_lite.common.jax_internals.programs import current_trace
from praxis_lite.common.statistics import compute_parts, kind_of_part
from praxis_lite.common.trees import Path, path_name
from praxis_lite.layers.base.summaries import Summary

# The first part of the names of edits among variables; no layer can declare a variable with such a name.
EDIT = '~edit'
# The kind of a summary that holds a whole tapped value.
ARRAY = 'array'
# The suffix of a point that is the gradient with respect to another one.
GRADIENT = '.grad'
_PROBE = '~probe:'
_SAME_POINT = ('__call__', 'extend_step')


class TappedCall(Protocol):
  """The part of a `Frame` that taps need."""

  trace: object

  @property
  def surroundings(self) -> Any: ...
  def variable(self, path: Path) -> Any: ...
  def add_summary(self, name: str, summary: Summary) -> None: ...
  def has_summary(self, name: str) -> bool: ...


@dataclasses.dataclass(frozen=True)
class Taps:
  """Which points of a call to report, and what the call has found about them."""

  # Given the name of a point, returns what to report of it: names in `STATISTICS`, or `ARRAY`; () reports nothing.
  wanted: Callable[[str], Sequence[str]]
  # Collects the names of the points that the call has passed. The value is the reason why a point cannot be tapped, or
  # ''.
  seen: dict[str, str]
  real: jax.Array | None = None  # [B, T] or [B] bool, False for padding, which is left out; None if all entries count.
  # Mesh axes along which a device has only its own rows. The statistics of the devices are combined later.
  manual_axes: frozenset[str] = frozenset()
  wants_inputs: bool = False  # Whether a point may be the input of a layer.
  in_pipeline: bool = False
  # Collects the layer's path for each wanted gradient. The key is the name of the gradient: `point.grad`, then
  # `point.grad_1`, ... if the layer is called again. None if no loss is differentiated.
  probed: dict[str, Path] | None = None
  # The factor that turns a gradient into the gradient of the whole batch's loss. It is None in a first call, which only
  # finds the probes, and adds zeros of their shapes to the summaries.
  share: jax.Array | None = None

  def narrow_to_microbatch(self, real: jax.Array | None, real_rows: jax.Array | None) -> Taps:
    """Returns the taps for a microbatch; `real` is False for padding, `real_rows` for rows that copy other rows."""
    if real is None:
      real = real_rows
    elif real_rows is not None:
      real = real & real_rows.reshape(-1, *(1,) * (real.ndim - 1))
    return dataclasses.replace(self, real=real, in_pipeline=True)

  def listen(self, frame: TappedCall, name: str, x: jax.Array) -> None:
    """Adds what taps want to know of `x`, the value of the point `name`, to the summaries of a frame."""
    wanted = self.wanted(name)
    real, problem = self._check(frame, wanted, name, x)
    if not problem:
      for raw, summary in _reports(jax.lax.stop_gradient(x), real, wanted, name).items():
        frame.add_summary(raw, summary)

  def watch_gradient(self, frame: TappedCall, path: Path, name: str, x: jax.Array) -> jax.Array:
    """Returns x, the value of a point; in the backward pass, a probe gets the wanted statistics of x's gradient."""
    point = f'{name}{GRADIENT}'
    wanted = self.wanted(point)
    if self.probed is None or not wanted:
      return x
    real, problem = self._check(frame, wanted, point, x)
    if problem:
      return x
    calls = itertools.chain([point], (f'{point}_{number}' for number in itertools.count(1)))
    for call in calls:  # Each call has its own probe; if calls shared one, autodiff would add up their statistics.
      reports = jax.eval_shape(lambda call=call: _reports(jnp.zeros(x.shape), real, wanted, call))
      if not any(map(frame.has_summary, reports)):
        break
    for raw, summary in reports.items():  # Statistics of gradients replace these zeros.
      frame.add_summary(raw, Summary(jnp.zeros(summary.value.shape), summary.kind))
    if self.share is None:
      self.probed[call] = path
      return x
    return _watch(x, frame.variable((*path, probe_name(call))), real, self.share, tuple(wanted))

  def _check(self, frame: TappedCall, wanted: Sequence[str], name: str, x: jax.Array) -> tuple[jax.Array | None, str]:
    """Notes that a point was seen. Returns a mask of the entries that count, and a reason why it cannot be tapped.

    The reason is '' if the point can be tapped. Only then is the mask used; None means that all entries count.
    """
    problem, real = self._problem(frame, x), None
    if not problem:
      real, problem = self._entries_that_count(x)
    if ARRAY in wanted and not problem:
      if self.in_pipeline:
        problem = 'it is in a pipeline, whose stages compute microbatches at different times; tap its statistics'
      elif self.real is not None and len(x) != len(self.real):
        problem = f'its shape, {x.shape}, does not begin with the {len(self.real)} rows; tap its statistics'
    if name not in self.seen or not problem:
      self.seen[name] = problem
    return real, problem

  def _problem(self, frame: TappedCall, x: jax.Array) -> str:
    if isinstance(x, jax.core.Tracer) and frame.trace != current_trace():
      return 'it is computed in a function that a transform of JAX traces, such as a scan or vmap in its layer'
    if frame.surroundings.manual_axes != self.manual_axes:
      return 'it is computed in a shard_map of its layer, where each device has a part of it'
    return ''

  def _entries_that_count(self, x: jax.Array) -> tuple[jax.Array | None, str]:
    """Returns a pair: a mask of the entries of x that count, which broadcasts to x; and the reason why it is unknown.

    The mask is None if all entries count or if it is unknown. The reason is '' if the mask is known.
    """
    real = self.real
    if real is None:
      return None, ''
    # A value [B, D] is one vector per row, even if D happens to equal the number of tokens.
    if real.ndim == 2 and x.ndim > 2 and x.shape[:2] == real.shape:
      return real.reshape(*real.shape, *(1,) * (x.ndim - 2)), ''
    rows = real.any(axis=1) if real.ndim == 2 else real
    if x.shape[:1] == rows.shape:
      return rows.reshape(-1, *(1,) * (x.ndim - 1)), ''
    if real.ndim == 2 and x.shape[:1] == (real.size,):
      return real.reshape(-1, *(1,) * (x.ndim - 1)), ''
    return None, f'its shape, {x.shape}, does not begin with the {len(rows)} rows of the batch, so padding is unknown'


def edit_and_tap(frame: TappedCall, path: Path, method: str, value: Any, side: str = '') -> Any:
  """Returns a value after it was changed by the edits of the current call; passes it to the taps of this call, too.

  The value, an array or a tree of them, is the result of the layer's method or, if `side` is '.in', its first argument.
  """
  surroundings = frame.surroundings
  if not path or (surroundings.taps is None and surroundings.edited is None):
    return value
  found, structure = jax.tree.flatten(value)
  index = next((i for i, x in enumerate(found) if jnp.issubdtype(jnp.result_type(x), jnp.floating)), None)
  if index is None or not jnp.ndim(found[index]):
    return value
  name = f'{path_name(path if method in _SAME_POINT else (*path, method))}{side}'
  if surroundings.edited is not None:
    surroundings.edited[name] = found[index].shape
    for edit in _edits_at(frame, path, name):
      found[index] = _apply(edit, found[index], name)
  if surroundings.taps is not None:
    surroundings.taps.listen(frame, name, found[index])
    found[index] = surroundings.taps.watch_gradient(frame, path, name, found[index])
  return jax.tree.unflatten(structure, found)


def _reports(x: jax.Array, real: jax.Array | None, wanted: Sequence[str], label: str) -> dict[str, Summary]:
  """Returns the wanted summaries of a value, by name; `real` is a mask of the entries that count."""
  statistics = [each for each in wanted if each != ARRAY]
  found = {raw_name(ARRAY, (str(x.ndim),), label): Summary(x, ARRAY)} if ARRAY in wanted else {}
  for part, value in compute_parts(x, real, statistics).items() if statistics else ():
    found[raw_name(part, statistics, label)] = Summary(value, str(kind_of_part(part)))
  return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _watch(
  x: jax.Array, probe: dict[str, jax.Array], real: jax.Array | None, share: jax.Array, wanted: tuple[str, ...]
) -> jax.Array:
  """Returns x. In the backward pass, `probe` gets the `wanted` statistics of x's gradient times `share`."""
  return x


def _watch_backward(wanted: tuple[str, ...], kept: Any, gradient: jax.Array) -> Any:
  real, share = kept
  reports = _reports(gradient.astype(jnp.float32) * share, real, wanted, '')
  of_parts = {read[0]: summary.value for raw, summary in reports.items() if (read := read_raw_name(raw))}
  return gradient, of_parts, None, None


_watch.defvjp(lambda x, probe, real, share, wanted: (x, (real, share)), _watch_backward)


def tap_value(frame: TappedCall, path: Path, name: str, make: Callable[[], jax.Array]) -> None:
  """Lets taps listen to the value `name` that a layer computes only for them; `make` is called if a tap wants it."""
  if (taps := frame.surroundings.taps) is None:
    return
  point = path_name((*path, name))
  if taps.wanted(point):
    taps.listen(frame, point, make())
  else:
    taps.seen.setdefault(point, '')


def edit_name(point: str) -> str:
  """Returns the name under which a layer's variables contain the edits of a point."""
  return f'{EDIT}:{point}'


def probe_name(point: str) -> str:
  """Returns the name of the variable, in a layer, that probes the gradient of the value called `point`."""
  return f'{_PROBE}{point}'


def is_probe(path: Path) -> bool:
  """Whether a path in a tree of variables leads to a part of a probe."""
  return len(path) > 1 and path[-2].startswith(_PROBE)


def _edits_at(frame: TappedCall, path: Path, name: str) -> Iterator[dict[str, jax.Array]]:
  edits = frame.variable((*path, edit_name(name)))
  if edits is not None:
    yield from (edits[key] for key in sorted(edits))


def _apply(edit: dict[str, jax.Array], x: jax.Array, name: str) -> jax.Array:
  drop, add = edit['drop'], edit['add']
  if add.ndim > x.ndim or any(a not in (1, b) for a, b in zip(add.shape[::-1], x.shape[::-1])):
    raise ConfigError(f'edit of {name}: an array of shape {add.shape} does not fit its values, {x.shape}')
  if 'units' in edit:
    drop = drop & jnp.isin(jnp.arange(x.shape[-1]), edit['units'])
  return jnp.where(drop, 0, x) + add.astype(x.dtype)


def raw_name(part: str, statistics: Sequence[str], label: str) -> str:
  """Returns the name of a summary that has a part of the value `label`; `statistics` are computed from such parts."""
  return f'tap:{part}:{",".join(statistics)}:{label}'


def read_raw_name(name: str) -> tuple[str, tuple[str, ...], str] | None:
  """Returns the arguments (part, statistics, label) from which `raw_name` made a name; None for other names."""
  if not name.startswith('tap:'):
    return None
  _, part, statistics, label = name.split(':', 3)
  return part, tuple(filter(None, statistics.split(','))), label
