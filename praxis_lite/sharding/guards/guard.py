"""Changes the operations of a lowered program that XLA would compute wrongly."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.export

from praxis_lite.common.errors import ShardingError
from praxis_lite.common.jax_internals import reading, tell_once, unless_unknown
from praxis_lite.common.jax_internals.flags import jaxlib_release
from praxis_lite.common.jax_internals.lowering import export_changed
from praxis_lite.common.jax_internals.mlir import ir
from praxis_lite.common.jax_internals.programs import scopes
from praxis_lite.sharding.guards import images, lapack, lookups, products, reshapes, results, starts, transforms
from praxis_lite.sharding.guards.arrays import GATHER, PRODUCT, SCATTER, TRANSPOSE, integer
from praxis_lite.sharding.guards.crops import crop_before_convolutions, pad_only_between_entries
from praxis_lite.sharding.guards.reshards import reshard_in_two_steps
from praxis_lite.sharding.propagation import ArraySplit, Instance, Propagation, Site, operations

T = TypeVar('T')
_PAD = 'stablehlo.pad'
# The most passes over a program: constraints of one guard can lead to splits that another guard must change.
_MAX_ROUNDS = 6
_NOT_GUARDED = (
  'guards are not applied, so a step on several devices may be computed wrongly; `praxis-lite verify` compares it with '
  'one device'
)
_NOT_GUARDED_EXPORT = 'guards are not applied to what is exported, so on CPUs it may be computed wrongly'


# The releases of JAX for which tests and enumerations of cases have shown that the guards work.
SHOWN = ((0, 10), (0, 11), (0, 12))
_NOT_SHOWN = (
  'guards against wrong programs were tested with JAX {first} to {last}, not with {this}: `praxis-lite verify` '
  'compares an experiment on its mesh with one device'
)


class Guarded(NamedTuple):
  """An operation that a guard changed."""

  op: str  # Its name, such as 'dot_general'.
  where: str  # The operation as it is named in profiles.
  shapes: tuple[tuple[int, ...], ...]  # The global shape of each operand, then of each result.
  before: tuple[ArraySplit, ...]  # The split of each of these arrays before and after the change.
  after: tuple[ArraySplit, ...]
  mended: tuple[str, ...] = ()  # Other changes, such as 'signed ids'.

  @property
  def layer(self) -> str:
    """The path of the layer that contains the operation, such as 'lm/softmax'; '' if no layer does."""
    return scopes(self.where).rpartition('/')[0]


_GUARDS: dict[str, Callable[[Instance], tuple[ArraySplit, ...] | None]] = {
  PRODUCT: products.guard_product,
  TRANSPOSE: products.guard_transpose,
  images.CONVOLUTION: images.guard_convolution,
  'stablehlo.reduce_window': images.guard_windows,
  _PAD: images.guard_pad,
  'stablehlo.select_and_scatter': images.guard_max_pooling_gradient,
  'stablehlo.slice': lookups.guard_static_slice,
  'stablehlo.dynamic_slice': lookups.guard_slice,
  'stablehlo.dynamic_update_slice': lookups.guard_slice,
  GATHER: lookups.guard_lookup,
  SCATTER: lookups.guard_scatter,
  reshapes.RESHAPE: reshapes.guard_reshape,
  transforms.FFT: transforms.guard_fft,
  lapack.CALL: lapack.guard_lapack,
}


def guard(lowered: jax.stages.Lowered) -> list[Guarded]:
  """Changes a lowered program where XLA would compute it wrongly, and returns the changes.

  If this release of JAX lowers programs in an unknown way, the program stays unchanged and the user is warned once.
  Raises ShardingError if the program is for several devices and Shardy, JAX's default, is turned off.
  """

  def change() -> list[Guarded]:
    with reading('a lowered program'):
      return _guard(lowered)

  return unless_unknown(_NOT_GUARDED, change, [])


def _guard(lowered: jax.stages.Lowered) -> list[Guarded]:
  module = lowered.compiler_ir('stablehlo')
  if module is None:
    return []
  with module.context:
    found = operations(module.operation, {images.CONVOLUTION, _PAD, *starts.KINDS})
    crop_before_convolutions(op for op in found if op.name == images.CONVOLUTION)
    pad_only_between_entries(op for op in found if op.name == _PAD)
    starts.clamp_starts(op for op in found if op.name in starts.KINDS)
    propagation = Propagation(module, {*_GUARDS, results.RETURN})
    # A program that was lowered without Shardy contains no mesh, only the number of devices.
    parts = 'mhlo.num_partitions'
    num_devices = integer(module.operation, parts) if parts in module.operation.attributes else 1
    if num_devices > 1 and not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
      raise ShardingError('jax_use_shardy_partitioner is False; the guards against wrong programs need it to be True')
    if num_devices > 1 and (this := jaxlib_release())[:2] not in SHOWN:
      first_shown, last_shown, named = ('.'.join(map(str, release)) for release in (SHOWN[0], SHOWN[-1], this))
      tell_once(_NOT_SHOWN.format(first=first_shown, last=last_shown, this=named))
    first: dict[Site, tuple[ArraySplit, ...]] = {}
    last: dict[Site, tuple[ArraySplit, ...]] = {}
    instances: list[Instance] = []
    for round_ in range(_MAX_ROUNDS if propagation.sites else 0):
      instances = propagation.instances()
      for instance in instances:
        first.setdefault(instance.site, instance.splits)
      wrong = [*_to_change(instances)]
      for (site, before, *_), after in wrong:
        if round_ == _MAX_ROUNDS - 1:  # The guards do not converge, so no array is split.
          after = tuple(((),) * len(shape) for shape in site.shapes)
        site.state(before, after)
        last[site] = after
      if wrong and round_ < _MAX_ROUNDS - 1:
        continue
      restricted = _restrict_results(instances)
      last |= restricted
      if not wrong and not restricted:
        break
    _keep(instances)
    guarded = [
      Guarded(_kind(s.op), s.where, s.shapes, first[s], last.get(s, first[s]), (*s.mended,))
      for s in propagation.sites
      if s in last or s.mended
    ]
    for site in propagation.sites:
      if site.op.name == transforms.FFT:
        transforms.order_entries(site.op)
    for site, splits in reshard_in_two_steps(module).items():
      guarded.append(Guarded(_kind(site.op), site.where, site.shapes, splits, splits, (*site.mended,)))
    final = [instance._replace(splits=last.get(instance.site, instance.splits)) for instance in instances]
    lapack.call_one_matrix_at_a_time(module.operation, final, num_devices)
    return guarded


def guarded_export(fn: Callable[..., object], platforms: Sequence[str]) -> Callable[..., jax.export.Exported]:
  """Returns a function that exports `fn` with the guards that programs on one device need. `fn` must not be jitted.

  The batch size of its arguments may be symbolic; `jax.export.export` explains `platforms`.
  """
  jitted = jax.jit(fn)
  plain = jax.export.export(jitted, platforms=platforms)

  def export(*args: Any) -> jax.export.Exported:
    found = unless_unknown(_NOT_GUARDED_EXPORT, lambda: export_changed(jitted, guard, platforms, args), None)
    return plain(*args) if found is None else found

  return export


class GuardedJit(Generic[T]):
  """`jax.jit` with guards, for training loops of your own. The steps of a `PartitionedTask` are already guarded.

  Args:
    fn, options: as for `jax.jit`.
    static_argnums: positions of the static arguments; `static_argnames` is not supported.
  """

  def __init__(self, fn: Callable[..., T], *, static_argnums: int | Sequence[int] = (), **options: Any):
    # A new function, because JAX would reuse an unguarded program that it has already compiled for `fn` itself.
    @functools.wraps(fn)
    def call_own(*args: Any, **kwargs: Any) -> T:
      return fn(*args, **kwargs)

    self.jitted = jax.jit(call_own, static_argnums=static_argnums, **options)
    self._static = {static_argnums} if isinstance(static_argnums, int) else {*static_argnums}
    self._compiled: dict[Hashable, jax.stages.Compiled] = {}

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """Returns the guarded lowered program for arguments, which may be `jax.ShapeDtypeStruct`s."""
    lowered = self.jitted.lower(*args, **kwargs)
    guard(lowered)
    return lowered

  def __call__(self, *args: Any, **kwargs: Any) -> T:
    static = static_positions(self._static, len(args))
    dynamic = [x for i, x in enumerate(args) if i not in static]
    leaves, structure = jax.tree.flatten((dynamic, kwargs))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
      return self.jitted(*args, **kwargs)
    types = tuple((jax.typeof(x), getattr(x, 'sharding', None)) for x in leaves)
    key = (structure, types, tuple(x for i, x in enumerate(args) if i in static))
    if key not in self._compiled:
      self._compiled[key] = self.lower(*args, **kwargs).compile()
    return self._compiled[key](*dynamic, **kwargs)


def _kind(op: ir.Operation) -> str:
  """Returns the name of an operation without its dialect, such as 'dot_general'."""
  return op.name.partition('.')[2]


def _to_change(instances: Sequence[Instance]) -> Iterator[tuple[Instance, tuple[ArraySplit, ...]]]:
  """Yields the operations that XLA may compute wrongly, each with splits for which it computes them correctly."""
  for instance in instances:
    guarded_by = _GUARDS.get(instance.site.op.name)
    after = guarded_by and guarded_by(instance)
    if after is not None and after != instance.splits:
      yield instance, after


def _restrict_results(instances: Iterable[Instance]) -> dict[Site, tuple[ArraySplit, ...]]:
  """Restricts the splits of the program's results, and returns the new splits.

  Such a constraint can change the splits of earlier operations, so the program is read again afterwards. For example,
  on a mesh of four axes, a program returned `einsum('gbv,gcv->gbc', x, y)` plus another product, and the sum did not
  divide evenly. The constraint on the sum changed the split of the first product, which was then wrong. Test:
  `test_sum_of_products_that_is_returned`.
  """
  restricted = {}
  for site, before, *_ in instances:
    if site.op.name == results.RETURN and (after := results.guard_results(site.shapes, before)) != before:
      for i in (i for i, split in enumerate(after) if split != before[i]):
        site.restrict(i, before[i], after[i])
      restricted[site] = after
  return restricted


def _keep(instances: Sequence[Instance]) -> None:
  """Constrains arrays that XLA might split in another, wrong way to the splits that they have, which are right.

  XLA simplifies the program and propagates splits again. Without constraints, it could choose splits that it computes
  wrongly.
  """
  # XLA does not remove empty arrays that a library call takes, such as cuDNN's attention.
  of_xla = (site for site, *_ in instances if site.op.name != lapack.CALL)
  has_empty = any(0 in shape for site in of_xla for shape in site.shapes)
  calls = collections.defaultdict[Site, list[Instance]](list)
  for instance in instances:
    calls[instance.site].append(instance)
  for site, of_site in calls.items():
    for number in sorted({number for instance in of_site for number in _arrays_to_pin(instance, has_empty)}):
      site.keep(number, [instance.splits[number] for instance in of_site])


def _arrays_to_pin(instance: Instance, has_empty: bool) -> Iterable[int]:
  """Returns the indices of the arrays of a correct operation that XLA might split in another, wrong way."""
  name = instance.site.op.name
  if name == GATHER:
    return lookups.arrays_to_pin(instance)
  if name == SCATTER:
    return lookups.arrays_of_scatter_to_pin(instance)
  is_cut = has_empty and name == 'stablehlo.slice' and lookups.is_cut_where_split(instance)
  return range(len(instance.splits)) if name == images.CONVOLUTION or is_cut else []


def static_positions(static_argnums: Collection[int], num_args: int) -> set[int]:
  """Returns the positions of the static arguments of a call; negative ones count from the end, as in `jax.jit`."""
  return {i + num_args if i < 0 else i for i in static_argnums}
