"""Repeat: applies layers several times, each time with weights of their own, as a scan.

The compiled program contains the layers once, whatever the number of repetitions. The weights are stacked along a new
first dimension:

    for i in range(num_layers):
      x = layers(x, weights[i])

A pattern of several different layers is applied in turn: for seven layers, (a, b) means a b a b a b a. One iteration of
the scan is then one pass through the pattern, and the remaining layers come after the scan:

    for i in range(num_layers // 2):
      x = layers_0(x, weights_0[i])
      x = layers_1(x, weights_1[i])
    x = rest_0(x, weights)

Layers that differ from the repeated ones, such as dense layers of a model with experts, may come first:

    x = first_0(x, weights)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from praxis_lite.common.config import REQUIRED, Config, child, template
from praxis_lite.common.errors import ConfigError, RangeError
from praxis_lite.common.trees import NestedDict, merge
from praxis_lite.common.weighted import mean_of_means
from praxis_lite.layers.base import Layer, SplitMapping
from praxis_lite.layers.base.call import SideOutputs
from praxis_lite.layers.base.facts import Knob, KnobKind
from praxis_lite.layers.decode_caches import StackedCaches
from praxis_lite.layers.remat import Remat, other_policies
from praxis_lite.sharding.mesh import memory_of_single_gpu, platform
from praxis_lite.sharding.weights import SplitDimsMapping, WeightHParams

T = TypeVar('T')

# Decoding is a loop over more than 4 layers if each has fewer than 8 MiB of weights, and over more than 16 layers
# otherwise. Without a loop, each layer takes 0.25 s to compile. A loop copies all weights for each token, 8 MB in 1 ms.
_FEW_DECODED, _MOST_DECODED_UNROLLED, _LARGE_LAYER = 4, 16, 8 << 20
_MOST_UNROLLED = 48  # The most layers that a single GPU runs without a loop.
# Without a loop, layers are in memory twice. So a single GPU decodes 17 to 48 large layers without a loop only if they
# take at most this share of its memory. An H100 then needed 1.8 ms instead of 3.2 ms for a token of a 1B model; see
# docs/benchmarks.md.
_SHARE_OF_GPU = 1 / 4


class RepeatWeightSplit(SplitMapping):
  """`stack`: one entry, for the dimension along which weights are stacked."""

  stack: SplitDimsMapping = None


def pattern(layers_tpl: Config | tuple[Config, ...]) -> tuple[Config, ...]:
  """Returns a pattern of layers, given as one config or several, as a tuple of configs."""
  return (layers_tpl,) if isinstance(layers_tpl, Config) else tuple(layers_tpl)


def kinds_of_stack(stack: Any) -> tuple[Config, ...]:
  """Returns the configs of a stack's first layers and of its pattern; a stack among these is replaced by its layers.

  A stack is a `Repeat`, or another layer or config that has the fields `layers_tpl` and perhaps `first_tpl`.
  """
  kinds = (*getattr(stack, 'first_tpl', ()), *pattern(stack.layers_tpl))
  of_each = (kinds_of_stack(kind) if hasattr(kind, 'layers_tpl') else (kind,) for kind in kinds)
  return tuple(itertools.chain.from_iterable(of_each))


def check_pattern(
  layers_tpl: Config | tuple[Config, ...], num_layers: int, where: str, first_tpl: tuple[Config, ...] = ()
) -> None:
  """Raises ConfigError, naming the layer `where`, if the pattern is empty, or no layers remain after the first ones."""
  if num_layers < 1 + len(first_tpl):
    with_first = f', since first_tpl has {len(first_tpl)}' if first_tpl else ''
    least = f'at least {1 + len(first_tpl)}{with_first}'
    message = f'{where}.num_layers: expected {least}, got {num_layers}'
    raise RangeError(message, num_layers, least, field='num_layers')
  if not pattern(layers_tpl):
    raise ConfigError(f'{where}.layers_tpl: an empty pattern; expected the config of a layer, or of several')


class StackCall(NamedTuple):
  """A call of a stack of layers: the method, the arguments besides the carry, a key or None, and rematerialisation."""

  method: str
  args: tuple[object, ...]
  kwargs: Mapping[str, Any]
  key: jax.Array | None
  remat: Remat

  @property
  def is_differentiated(self) -> bool:
    """Whether gradients may be computed; False in decoding."""
    return self.method == '__call__'


class Repeat(Layer):
  """Applies the child `layers` `num_layers` times; all repetitions share its path.

  With a pattern, the children are `layers_0`, `layers_1`, ..., and `rest_0`, ... for the remaining layers. First layers
  are `first_0`, ...

  Summaries, updates of non-trainable variables and decode state of the repetitions are stacked like the weights. For an
  auxiliary loss, the value is the weighted mean over the repetitions, and the weight is the sum.

  In decoding, few layers run one after the other, without a loop, each with its own decode state under its number: up
  to 4 layers; up to 16 of at least 8 MiB each; on a single GPU up to 48 of at least 8 MiB, if a quarter of its memory
  can hold them; and any number if `unroll` is at least the number of repetitions. More layers run as a loop, which
  compiles faster but copies all weights for each token. The loop passes on the stack of KV caches, so that each layer
  writes to it in place; see `decode_caches.py`.

  Attributes:
    layers_tpl: the repeated layer; or a pattern of several, applied in turn. The result of each has the structure,
      shapes and dtypes of its first argument.
    num_layers: number of all layers: first ones, repeated ones and remaining ones.
    first_tpl: layers that come before the repeated ones, each with its own variables.
    remat, remat_save_names, remat_offload_names: what each layer keeps for the backward pass; see `remat.py`. First
      layers keep the same as the first layer of the pattern.
    unroll: repetitions in one iteration of the loop; more run faster, but compile slower. With 'auto', training on a
      single GPU unrolls up to 48 layers completely, because a loop would copy the values that it keeps for the backward
      pass; otherwise 'auto' is 1. With a number below that of the repetitions, decoding is a loop.
    weight_split_dims_mapping: `stack`, how the new dimension is split; `layers` splits the other dimensions.
  """

  counts_layers: ClassVar[bool] = True
  _stack: ClassVar[str] = 'stack'  # The field of weight_split_dims_mapping that splits the new dimension.

  layers_tpl: Config | tuple[Config, ...] = REQUIRED
  num_layers: int = REQUIRED
  first_tpl: tuple[Config, ...] = ()
  remat: str | tuple[str, ...] = 'auto'
  remat_save_names: tuple[str, ...] = ()
  remat_offload_names: tuple[str, ...] = ()
  unroll: int | str = 'auto'
  weight_split_dims_mapping: Config = template(RepeatWeightSplit)
  activation_split_dims_mapping: Config = template(SplitMapping)

  layers: Layer | Sequence[Layer] = child()
  first: Sequence[Layer] = child()
  rest: Sequence[Layer] = child()

  def setup(self) -> None:
    check_pattern(self.layers_tpl, self.num_layers, self.path_name, self.first_tpl)
    if self.unroll != 'auto' and (not isinstance(self.unroll, int) or self.unroll < 1):
      raise ConfigError(f"{self.path_name}.unroll: expected a number of repetitions, or 'auto', got {self.unroll!r}")
    configs = pattern(self.layers_tpl)
    self._remat = Remat.read(self, len(configs))
    self._stack_field = f'{self.path_name}.weight_split_dims_mapping.{self._stack}'
    self._stack_mapping: SplitDimsMapping = getattr(self.weight_split_dims_mapping, self._stack)
    self._resolve(self._stack_mapping, self._stack_field, rank=1)
    self.create_children('first', templates=self.first_tpl)
    self._repetitions, left = divmod(self.num_layers - len(self.first_tpl), len(configs))
    self._blocks = self._create_blocks()
    self.create_children('rest', templates=configs[:left])

  def _create_blocks(self) -> list[Layer]:
    """Creates the layers that are repeated."""
    if isinstance(self.layers_tpl, Config):
      return [self.create_child('layers', self.layers_tpl)]
    return self.create_children('layers', templates=self.layers_tpl if self._repetitions else ())

  def knobs(self) -> list[Knob]:
    if not isinstance(self.remat, str) or self.remat_save_names:
      return []
    return [Knob('remat', self.remat, other_policies, KnobKind.REMATERIALISATION)]

  def _unroll_count(self, *, training: bool) -> int:
    """Returns the number of repetitions in an iteration of the loop."""
    if not isinstance(self.unroll, str):
      return self.unroll
    if not training or platform() != 'gpu' or self.num_layers > _MOST_UNROLLED:
      return 1
    return self._repetitions if jax.sharding.get_abstract_mesh().size <= 1 else 1

  def layers_by_turn(self) -> list[Layer]:
    """Returns the `num_layers` layers in the order in which they are applied; a repeated layer occurs several times."""
    return [*self.first, *self._blocks * self._repetitions, *self.rest]

  def abstract_init(self) -> NestedDict:
    tree: NestedDict = {}
    for name, layer in self.named_children():
      below = layer.abstract_init()
      if layer in self._blocks:
        below = jax.tree.map(self._stack_weight, below)
      if below:
        tree[name] = below
    return tree

  def _stack_weight(self, weight: WeightHParams) -> WeightHParams:
    """Returns the declaration of the weights of all repetitions."""
    return weight.repeat(self._repetitions, (self._stack_mapping or (None,))[0], self._stack_field)

  def __call__(self, x: T, *args: object, **kwargs: Any) -> T:
    """Returns the result of the last layer.

    Args:
      x: input of the first layer, an array or a tree of arrays.
      *args, **kwargs: passed to each layer unchanged.
    """
    return self._run('__call__', x, *args, **kwargs)

  def init_decode_state(self, *args: object) -> None:
    """Allocates the caches of all layers; takes the arguments of one layer's `init_decode_state`."""
    (self._decode_unrolled if self._decodes_unrolled else self._run)('init_decode_state', None, *args)

  def extend_step(self, x: T, *args: object, **kwargs: Any) -> T:
    """Runs the `extend_step` of each layer on the next tokens, with its own caches; returns the last result."""
    return (self._decode_unrolled if self._decodes_unrolled else self._run)('extend_step', x, *args, **kwargs)

  @property
  def _decodes_unrolled(self) -> bool:
    if isinstance(self.unroll, int):
      return self.unroll >= self._repetitions
    weights = [w.as_struct() for layer in self._blocks for w in jax.tree.leaves(layer.abstract_init())]
    size = sum(w.size * w.dtype.itemsize for w in weights)
    if size < _LARGE_LAYER * len(self._blocks):
      return self.num_layers <= _FEW_DECODED
    fits_twice = size * self._repetitions <= _SHARE_OF_GPU * memory_of_single_gpu()
    return self.num_layers <= (_MOST_UNROLLED if fits_twice else _MOST_DECODED_UNROLLED)

  def unstack_for_decoding(self, variables: NestedDict) -> NestedDict:
    """Returns the layer's variables; without a loop in decoding, a stack becomes a dict with an entry per repetition.

    Decoding accepts both unstacked variables and stacks. A loop of decoding calls should use unstacked ones: XLA does
    not move slices of stacks out of the loop, so slicing would copy all weights in each iteration.
    """
    if not self._decodes_unrolled:
      return variables
    names = {name for name, layer in self.named_children() if layer in self._blocks}
    turns = range(self._repetitions)
    by_turn = {
      n: {str(t): jax.tree.map(lambda x, t=t: x[t], variables[n]) for t in turns} for n in names & set(variables)
    }
    return {**variables, **by_turn}

  def _decode_unrolled(self, method: str, carry: T, *args: object, **kwargs: Any) -> T:
    """Runs all layers one by one, each repetition with its own decode state; returns the last carry."""
    key = self.next_prng_key() if self.has_prng_key() else None
    sides: dict[Layer, list[SideOutputs]] = {layer: [] for layer in (*self.first, *self._blocks, *self.rest)}
    for number, layer in enumerate(self.layers_by_turn()):
      turn = len(sides[layer])
      variables, state = layer.variables, layer.decode_state
      if layer in self._blocks:
        own = variables.get(str(turn))
        variables = jax.tree.map(lambda x, turn=turn: x[turn], variables) if own is None else own
        state = state.get(str(turn), {})
      inputs = () if carry is None else (carry,)
      layer_key = None if key is None else jax.random.fold_in(key, number)
      carry, side = layer.apply(variables, *inputs, *args, key=layer_key, decode_state=state, method=method, **kwargs)
      sides[layer].append(side)
    for layer, of_layer in sides.items():
      if layer not in self._blocks:
        layer.absorb(*of_layer)
        continue
      states = {str(turn): side.decode_state for turn, side in enumerate(of_layer)}
      stacked = jax.tree.map(lambda *x: jnp.stack(x), *(side._replace(decode_state={}) for side in of_layer))
      aux_losses = {k: mean_of_means(*v) for k, v in stacked.aux_losses.items()}
      layer.absorb(stacked._replace(aux_losses=aux_losses, decode_state=states))
    return carry

  def _run(self, method: str, carry: T, *args: object, **kwargs: Any) -> T:
    """Runs the first layers, the repeated ones and the remaining ones; returns the last carry."""
    key, remat = self.next_prng_key() if self.has_prng_key() else None, self._remat
    if method != '__call__':  # No gradient is computed.
      remat = remat._replace(policies=('none',) * len(remat.policies))
    elif not self._is_loop(training=not self.do_eval):
      remat = remat.fit_to_memory(carry, [layer.variables for layer in (*self.first, *self._blocks, *self.rest)])
    call = StackCall(method, args, kwargs, key, remat)

    def run_alone(layer: Layer, carry: T, kind: int, number: int) -> T:
      body = self._body(call, layer, kind, in_scan=False)
      carry, side = body(carry, layer.variables, layer.decode_state, number)
      layer.absorb(side)
      return carry

    for number, layer in enumerate(self.first):
      carry = run_alone(layer, carry, 0, number)
    if self._blocks:
      carry = self._run_blocks(call, carry)
    for kind, layer in enumerate(self.rest):
      carry = run_alone(layer, carry, kind, self.num_layers - len(self.rest) + kind)
    return carry

  def _body(self, call: StackCall, layer: Layer, kind: int, *, in_scan: bool) -> Callable[..., tuple[Any, SideOutputs]]:
    """Returns the pure function of a layer: (carry, variables, decode state, number) -> (carry, side outputs)."""

    def body(carry: Any, variables: NestedDict, state: NestedDict, number: jax.Array | int) -> tuple[Any, SideOutputs]:
      # Layers without randomness need no condition: XLA removes a key that is not used.
      key = None if call.key is None else jax.random.fold_in(call.key, number)
      inputs = () if carry is None else (carry,)
      return layer.apply(variables, *inputs, *call.args, key=key, decode_state=state, method=call.method, **call.kwargs)

    return call.remat(body, kind, in_scan=in_scan, regathers=self.surroundings.reading_gathers)

  def _is_loop(self, *, training: bool) -> bool:
    """Whether the repetitions are computed in a loop."""
    return self._unroll_count(training=training) < self._repetitions

  def _run_blocks(self, call: StackCall, carry: T) -> T:
    """Runs all repetitions, as a scan, and absorbs their side outputs; returns the last carry."""
    unroll = self._unroll_count(training=call.is_differentiated and not self.do_eval)
    # XLA removes a loop of one iteration, and could then merge recomputations with the first computation.
    in_scan = unroll < self._repetitions
    bodies = [self._body(call, layer, kind, in_scan=in_scan) for kind, layer in enumerate(self._blocks)]
    stacks = [StackedCaches(layer.decode_state) for layer in self._blocks]

    def repetition(
      carry: tuple[T, list[NestedDict]], xs: tuple[jax.Array, list[tuple[Any, ...]]]
    ) -> tuple[tuple[T, list[NestedDict]], list[SideOutputs]]:
      (x, caches), (turn, layers), after, sides = carry, xs, [], []
      for body, of_kind, arrays, (variables, state, number) in zip(bodies, stacks, caches, layers):
        x, side = body(x, variables, of_kind.turn_state(arrays, state, turn), number)
        arrays, state = of_kind.split(side.decode_state)
        after.append(arrays)
        sides.append(side._replace(decode_state=state))
      return (x, after), sides

    first, period = len(self.first), len(self._blocks)
    last = first + self._repetitions * period
    layers = [
      (layer.variables, stacks[kind].others, np.arange(first + kind, last, period, dtype=np.int32))
      for kind, layer in enumerate(self._blocks)
    ]
    start = carry, [of_kind.arrays for of_kind in stacks]
    xs: Any = np.arange(self._repetitions, dtype=np.int32), layers
    (carry, caches), sides = jax.lax.scan(repetition, start, xs, unroll=unroll)
    for layer, side, arrays in zip(self._blocks, sides, caches):
      aux_losses = {k: mean_of_means(*v) for k, v in side.aux_losses.items()}
      layer.absorb(side._replace(aux_losses=aux_losses, decode_state=merge(side.decode_state, arrays)))
    return carry


def unstack_for_decoding(layer: Layer, variables: NestedDict) -> NestedDict:
  """Returns a layer's variables after `Repeat.unstack_for_decoding` of each `Repeat` in it."""
  if isinstance(layer, Repeat):
    return layer.unstack_for_decoding(variables)
  return {
    **variables,
    **{n: unstack_for_decoding(below, variables[n]) for n, below in layer.named_children() if n in variables},
  }
