"""What a layer's methods may use in a call: variables, keys, side outputs, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from praxis_lite.common.errors import ConfigError, DataError, UnknownFieldError, check_choice, did_you_mean
from praxis_lite.common.figures import number_of
from praxis_lite.common.importing import calling_line
from praxis_lite.common.jax_internals.programs import current_trace
from praxis_lite.common.trees import NestedDict, Path, path_name
from praxis_lite.layers.base import call
from praxis_lite.layers.base.call import SideOutputs, Summary, Surroundings
from praxis_lite.layers.base.stored import StoredWeight
from praxis_lite.layers.base.taps import tap_value
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection

# Kinds of summaries that event files support.
_SUMMARIES = ('scalar', 'histogram', 'image', 'text')
_CHANNELS = (1, 3, 4)  # The numbers of channels that an image may have.


class InCall:
  """The part of a `Layer` that reads and writes the frame of the current call; raises ConfigError outside of a call."""

  name: str
  _path: Path
  _weights: dict[str, WeightHParams]
  _stored: dict[str, StoredWeight]
  fprop_dtype: DTypeLike | None

  @property
  def path(self) -> Path:
    """The names from the root layer down to this one. The variables of this layer have the same path."""
    return self._path

  @property
  def path_name(self) -> str:
    """The path in the form in which messages show it."""
    return path_name(self._path) or type(self).__name__

  @property
  def variables(self) -> NestedDict:
    """In a call: this layer's subtree of the variables, in the form that `apply` takes."""
    return self._frame().variable(self._path) or {}

  @property
  def theta(self) -> Theta:
    """In a call: this layer's own variables, as attributes; see `_read_dtype` for the dtypes."""
    return Theta(self)

  def _read_dtype(self, weight: WeightHParams) -> DTypeLike | None:
    """Returns the dtype to which `theta` casts a floating variable; None if `theta` does not cast it."""
    return None if WeightHParamsCollection.KEEP_FLOAT32 in weight.collections else self.fprop_dtype

  def _read_weight(self, name: str, dtype: DTypeLike | None) -> jax.Array:
    """In a call: returns a weight of this layer, cast to `dtype` if the weight is floating and `dtype` is not None."""
    if (stored := self._stored.get(name)) is not None:
      return stored.read(self._read_parts(name), dtype)
    return self._read_variable(name, dtype)

  def _read_parts(self, name: str) -> dict[str, jax.Array]:
    """In a call: returns the variables that store a weight of this layer in another form."""
    return {part: self._read_variable(part, None) for part in self._stored[name].parts}

  def _read_variable(self, name: str, dtype: DTypeLike | None) -> jax.Array:
    path, frame = (*self.path, name), self._frame()
    value = frame.variable(path)
    if value is None:
      raise ConfigError(
        f'{self.path_name}.{name}: the variables passed to apply() have no such entry. If {type(self).__name__} is '
        'part of another layer, build it in the setup() of that layer, by self.create_child(name, Config(...))'
      )
    kept = not jnp.issubdtype(value.dtype, jnp.floating)
    return call.read_through(frame, frame.surroundings.read_weight(path, value, None if kept else dtype))

  def absorb(self, side: SideOutputs) -> None:
    """In a call: takes over the side outputs that a `self.apply(...)` inside a transform has returned."""
    self._frame().absorb(self._path, side)

  @property
  def do_eval(self) -> bool:
    """In a call: whether it evaluates rather than trains."""
    return self._frame().do_eval

  @property
  def surroundings(self) -> Surroundings:
    """In a call: how weights are read, how sums over rows are completed, which mesh axes are manual."""
    return self._frame().surroundings

  def real_rows(self, num_rows: int) -> jax.Array | None:
    """In a call: returns [B] bool, False for rows that only fill up a pipeline's microbatch; None without such rows.

    Means, averages and counts over rows must leave them out, because they are copies of other rows. Rows that fill up a
    batch are different: their weights are zero.

    Args:
      num_rows: B, dimension 0 of the arrays that the layer is about to reduce.

    Raises:
      DataError: dimension 0 of the microbatch is not B, so the real rows are unknown.
    """
    ask = self.surroundings.real_rows
    if ask is None:
      return None
    real = ask()
    if real.shape != (num_rows,):
      raise DataError(
        f'{self.path_name}: the arrays have {number_of(num_rows, "row")}, and the microbatch of the enclosing '
        f'pipeline has {real.shape[0]}, including copies that fill it up, so it is unknown which rows are real. Keep '
        'the rows as dimension 0, or choose num_microbatches so that it divides the batch'
      )
    return real

  def mark_filler_rows(self, paddings: jax.Array | None, shape: tuple[int, ...]) -> jax.Array | None:
    """In a call: returns `paddings` in which filler rows, for which `real_rows` is False, are padding too.

    `paddings`, of `shape` (B, T), are nonzero for padding. None, here and in the result, means no padding.
    """
    real = self.real_rows(shape[0])
    if real is None:
      return paddings
    filler = jnp.broadcast_to(~real.reshape(-1, *(1,) * (len(shape) - 1)), shape)
    return filler if paddings is None else filler | (paddings != 0)

  def next_prng_key(self) -> jax.Array:
    """In a call: returns a new PRNG key; it depends on the call's key, and on the path and earlier draws of the layer.

    In the body of a `jax.lax.scan` of the layer, the key is the same in each iteration; split a key before the loop.
    """
    return self._frame().next_key(self._path)

  def has_prng_key(self) -> bool:
    """In a call: whether the call has a key."""
    return self._frame().key is not None

  def add_summary(self, name: str, value: jax.Array, kind: str = 'scalar') -> None:
    """In a call: logs `value` as `<path>/<name>`; if the layer is used again, as `<path>/<name>_1`, and so on.

    A value from the body of a `jax.lax.scan` of the layer has to be returned by the body, and logged after the loop.

    Raises:
      ConfigError: the kind is unknown, the value has no entries or is not a valid 'scalar' or 'image', or it is logged
        in the body of a loop, or in another function that a transform of JAX traces.
    """
    check_choice(f'{self.path_name}: kind of the summary {name!r}', kind, _SUMMARIES)
    if kind == 'scalar' and jnp.ndim(value):
      raise ConfigError(
        f"{self.path_name}: the summary {name!r} has shape {jnp.shape(value)}; log its mean, or pass kind='histogram'"
      )
    shape = jnp.shape(value)
    if kind == 'image' and (len(shape) < 3 or shape[-1] not in _CHANNELS):
      raise ConfigError(
        f'{self.path_name}: the summary {name!r} has shape {shape}; an image is [..., H, W, C] with 1, 3 or 4 channels'
      )
    if 0 in shape:
      raise ConfigError(f'{self.path_name}: the summary {name!r} has shape {shape}, so there is nothing to log')
    self._frame_for('summary', name, value).add_summary(f'{self.path_name}/{name}', Summary(jnp.asarray(value), kind))

  def add_tap(self, name: str, make: Callable[[], jax.Array]) -> None:
    """In a call: offers the value that `make` returns, [B, T, ...], to taps as `<path>.<name>`.

    `make` is called only if a tap names the value; a '*' at the end of a tap's pattern does not match this name.
    """
    tap_value(self._frame(), self.path, name, make)

  def add_aux_loss(self, name: str, value: jax.Array, weight: jax.Array | float = 1.0) -> None:
    """In a call: adds `weight * value` to the training loss, reported as `<path>/<name>`.

    A layer that is used several times adds its loss each time; the weighted mean is reported.
    """
    if jnp.ndim(value) or jnp.ndim(weight):
      raise ConfigError(
        f'{self.path_name}: the auxiliary loss {name!r} has shape {jnp.shape(value)} and a weight of shape '
        f'{jnp.shape(weight)}; both are scalars, such as a mean'
      )
    frame = self._frame_for('auxiliary loss', name, (value, weight))
    frame.add_aux_loss(f'{self.path_name}/{name}', jnp.asarray(value), jnp.asarray(weight, jnp.float32))

  def update_var(self, name: str, value: jax.Array) -> None:
    """In a call: sets a non-trainable variable; later reads in the same call see the new value.

    Raises:
      ConfigError: no such variable exists, or it is trainable, so that only the optimizer may change it.
    """
    if name not in self._weights:
      raise ConfigError(f'{self.path_name} has no variable {name!r}.{did_you_mean(name, self._weights)}')
    if self._weights[name].trainable:
      raise ConfigError(f'{self.path_name}.{name} is trainable; declare it with trainable=False to update it in a call')
    path, frame = (*self._path, name), self._frame_for('new value of a variable', name, value)
    new, stored = jnp.asarray(value, self._weights[name].dtype), frame.variable(path)
    if stored is not None and new.shape != stored.shape:
      raise ConfigError(f'{self.path_name}.{name} has shape {stored.shape}, and its new value has shape {new.shape}')
    frame.update(path, new)

  def get_decode_state(self, name: str) -> Any:
    """In a call: returns this layer's cache entry `name`, or None if it does not exist yet."""
    return self._frame().read_cache((*self._path, name))

  def update_decode_state(self, name: str, value: Any) -> None:
    """In a call: sets this layer's cache entry `name`."""
    self._frame().write_cache((*self._path, name), value)

  @property
  def decode_state(self) -> NestedDict:
    """In a call: the caches below this layer, as `apply` takes them."""
    return self._frame().read_cache(self._path) or {}

  def _frame_for(self, what: str, name: str, values: object) -> call.Frame:
    """Returns the frame that collects these values; raises ConfigError if an inner transform of JAX traces them."""
    frame = self._frame()
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values)) and frame.trace != current_trace():
      raise ConfigError(
        f'{self.path_name}.{name}: the {what} is computed in a function that a transform of JAX traces, such as the '
        'body of a scan, and has no value outside of it; return the value from that function, and report it after '
        'the transform'
      )
    return frame

  def _frame(self) -> call.Frame:
    frame = call.frame_holding(self._path)
    if frame is None:
      raise ConfigError(
        f'{self.path_name} is used outside a call; go through apply(variables, ...). In setup() there are no arrays yet'
      )
    return frame


def find_misspelled_setup(cls: type) -> str:
  """Returns a sentence about a method such as `setUp`, which is never called because of its name; '' without one."""
  name = next((name for name in vars(cls) if name != 'setup' and name.lower().replace('_', '') == 'setup'), '')
  return f' Its method {name} is never called; name it setup.' if name else ''


class Theta:
  """A layer's own variables as attributes, cast to the dtype the layer computes in."""

  __slots__ = ('_layer',)
  _layer: InCall

  def __init__(self, layer: InCall):
    object.__setattr__(self, '_layer', layer)

  def __getattr__(self, name: str) -> jax.Array:
    layer = self._layer
    weight = layer._weights.get(name)
    if weight is None:
      raise UnknownFieldError(
        f'{layer.path_name} ({type(layer).__name__}) has no variable {name!r}.'
        f'{did_you_mean(name, layer._weights)}{find_misspelled_setup(type(layer))} '
        f'Declare it in setup(): self.create_variable({name!r}, WeightHParams(shape)){calling_line()}'
      )
    return layer._read_weight(name, layer._read_dtype(weight))

  def __setattr__(self, name: str, value: object) -> NoReturn:
    raise ConfigError(
      f'{self._layer.path_name}.{name}: variables cannot be assigned. self.update_var({name!r}, value) gives a new '
      'value to a variable that is declared with trainable=False; the others are trained'
    )

  def __getitem__(self, name: str) -> NoReturn:
    raise ConfigError(f'{self._layer.path_name}: variables are attributes; write self.theta.{name}')
