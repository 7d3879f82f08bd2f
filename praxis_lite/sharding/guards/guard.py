"""Reads a lowered program, and changes the operations in it that XLA would compute wrongly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.export

from praxis_lite.common.errors import ShardingError
from praxis_lite.common.jax_internals import reading, tell_once, unless_unknown
from praxis_lite.common.jax_internals.flags import jaxlib_release
from praxis_lite.common.jax_internals.lowering import export_changed
from praxis_lite.sharding.guards import images, lapack, lookups, products, reshapes, results, transforms
from praxis_lite.sharding.guards.arrays import GATHER, IDS, PRODUCT, SCATTER, TRANSPOSE, integer
from praxis_lite.sharding.guards.crops import crop_before_convolutions, pad_only_between_entries
from praxis_lite.sharding.guards.starts import clamp_starts
from praxis_lite.sharding.hlo import scopes
from praxis_lite.sharding.propagation import Instance, Propagation, Site, Split

T = TypeVar('T')
# How often what a guard states may lead to splits that another one guards.
_MAX_ROUNDS = 6
_NOT_GUARDED = (
  'guards are not applied, so a step on several devices may be computed wrongly; `praxis-lite verify` compares it with '
  'one device'
)
_NOT_GUARDED_EXPORT = 'guards are not applied to what is exported, so on CPUs it may be computed wrongly'


# The releases of JAX for which tests and enumerations have shown what the guards do.
SHOWN = ((0, 10), (0, 11), (0, 12))
_NOT_SHOWN = (
  'guards against wrong programs were shown for JAX {first} to {last}, not for {this}: `praxis-lite verify` compares '
  'an experiment on its mesh with one device'
)


class Guarded(NamedTuple):
  """An operation that a guard changed.

  Attributes:
    op: its name, such as 'dot_general'.
    where: the operation as it is named in profiles.
    shapes: the global shape of each operand, then of each result.
    before, after: how these were split, and how they are split now.
    mended: what else was done, such as 'signed ids'.
  """

  op: str
  where: str
  shapes: tuple[tuple[int, ...], ...]
  before: tuple[Split, ...]
  after: tuple[Split, ...]
  mended: tuple[str, ...] = ()

  @property
  def layer(self) -> str:
    """The layers that the operation is in, such as 'lm/softmax'; empty outside of all."""
    return scopes(self.where).rpartition('/')[0]


_GUARDS: dict[str, Callable[[Instance], tuple[Split, ...] | None]] = {
  PRODUCT: products.guard_product,
  TRANSPOSE: products.guard_transpose,
  images.CONVOLUTION: images.guard_convolution,
  'stablehlo.reduce_window': images.guard_windows,
  'stablehlo.pad': images.guard_pad,
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
  """Changes a lowered program, before it is compiled, where XLA would compute it wrongly; returns what it changed.

  If JAX lowers programs in a way that is not known, it is left as it is, and the user is told so once.

  Raises:
    ShardingError: Shardy, JAX's default, is turned off.
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
    crop_before_convolutions(module.operation)
    pad_only_between_entries(module.operation)
    clamp_starts(module.operation)
    propagation = Propagation(module, {*_GUARDS, results.RETURN})
    # Lowered without Shardy, a program says nothing of its mesh but its size.
    parts = 'mhlo.num_partitions'
    num_devices = integer(module.operation, parts) if parts in module.operation.attributes else 1
    if num_devices > 1 and not jax.config.jax_use_shardy_partitioner:  # type: ignore[attr-defined]
      raise ShardingError('jax_use_shardy_partitioner is False; what guards against wrong programs needs it to be True')
    if num_devices > 1:
      _tell_of_unknown_release()
    first: dict[Site, tuple[Split, ...]] = {}
    last: dict[Site, tuple[Split, ...]] = {}
    instances: list[Instance] = []
    for round_ in range(_MAX_ROUNDS if propagation.sites else 0):
      instances = propagation.instances()
      for site, splits, _ in instances:
        first.setdefault(site, splits)
      found = [*_to_change(instances)]
      for (site, before, _), after in found:
        if round_ == _MAX_ROUNDS - 1:  # They do not agree; what is not split is computed rightly.
          after = tuple(((),) * len(shape) for shape in site.shapes)
        site.state(before, after)
        last[site] = after
      if found and round_ < _MAX_ROUNDS - 1:
        continue
      restricted = _restrict_results(instances)
      last |= restricted
      if not found and not restricted:
        _keep(instances)
        break
    guarded = [
      Guarded(s.op.name.partition('.')[2], s.where, s.shapes, first[s], last.get(s, first[s]), (*s.mended,))
      for s in propagation.sites
      if s in last or s.mended
    ]
    for site in propagation.sites:
      if site.op.name == transforms.FFT:
        transforms.order_entries(site.op)
    final = [instance._replace(splits=last.get(instance.site, instance.splits)) for instance in instances]
    lapack.call_one_matrix_at_a_time(module.operation, final, num_devices)
    return guarded


def guarded_export(fn: Callable[..., object], platforms: Sequence[str]) -> Callable[..., jax.export.Exported]:
  """`jax.export.export` of a function, with the guards that a program of one device needs, of any batch size too.

  Args:
    fn: the function; not one that was jitted before.
    platforms: as for `jax.export.export`.
  """
  jitted = jax.jit(fn)
  plain = jax.export.export(jitted, platforms=platforms)

  def exported(*args: Any) -> jax.export.Exported:
    found = unless_unknown(_NOT_GUARDED_EXPORT, lambda: export_changed(jitted, guard, platforms, args), None)
    return plain(*args) if found is None else found

  return exported


class GuardedJit(Generic[T]):
  """`jax.jit` with guards, for a training loop of your own; the steps of a `PartitionedTask` have them anyway.

  Args:
    fn, options: as for `jax.jit`; of static arguments, `static_argnums`.
  """

  def __init__(self, fn: Callable[..., T], *, static_argnums: int | Sequence[int] = (), **options: Any):
    # A function of its own: what `jax.jit` has lowered for `fn` itself, and compiled, JAX would not compile again.
    @functools.wraps(fn)
    def call_own(*args: Any, **kwargs: Any) -> T:
      return fn(*args, **kwargs)

    self.jitted = jax.jit(call_own, static_argnums=static_argnums, **options)
    self._static = {static_argnums} if isinstance(static_argnums, int) else {*static_argnums}
    self._compiled: dict[Hashable, jax.stages.Compiled] = {}

  def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
    """The lowered program for some arguments, or their `jax.ShapeDtypeStruct`s, already guarded."""
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


def _tell_of_unknown_release() -> None:
  """Tells the user, once, that the guards were not shown for this release of JAX."""
  this = jaxlib_release()
  if this[:2] not in SHOWN:
    first, last, named = ('.'.join(map(str, release)) for release in (SHOWN[0], SHOWN[-1], this))
    tell_once(_NOT_SHOWN.format(first=first, last=last, this=named))


def _to_change(instances: Sequence[Instance]) -> Iterator[tuple[Instance, tuple[Split, ...]]]:
  """The operations that are computed wrongly, each with splits that are computed rightly."""
  for instance in instances:
    guarded_by = _GUARDS.get(instance.site.op.name)
    after = guarded_by and guarded_by(instance)
    if after is not None and after != instance.splits:
      yield instance, after


def _restrict_results(instances: Iterable[Instance]) -> dict[Site, tuple[Split, ...]]:
  """Restricts how results of the program are split; returns how those are split now.

  What is stated there reaches operations before it: on a mesh of four axes, `einsum('gbv,gcv->gbc', x, y)` was split in
  another way than had been read, and wrong, where a second product was added to it and the sum, which did not divide,
  was returned. So the program is read again afterwards. Test: `test_sum_of_products_that_is_returned`.
  """
  restricted = {}
  for site, before, _ in instances:
    if site.op.name == results.RETURN and (after := results.guard_results(site.shapes, before)) != before:
      for i in (i for i, split in enumerate(after) if split != before[i]):
        site.restrict(i, before[i], after[i])
      restricted[site] = after
  return restricted


def _keep(instances: Sequence[Instance]) -> None:
  """States how arrays are split where that is right as it is, but might not be if XLA, which propagates for itself in
  a program that it has simplified, split them in another way."""
  has_empty = any(0 in shape for instance in instances for shape in instance.site.shapes)
  for instance in instances:
    if instance.site.op.name == GATHER and lookups.keeps_ids(instance):
      instance.site.keep(IDS, instance.splits[IDS])
    is_cut = has_empty and instance.site.op.name == 'stablehlo.slice' and lookups.is_cut_where_split(instance)
    if instance.site.op.name == images.CONVOLUTION or is_cut:
      for number, split in enumerate(instance.splits):
        instance.site.keep(number, split)


def static_positions(static_argnums: Collection[int], num_args: int) -> set[int]:
  """Returns which arguments of a call are static; as for `jax.jit`, numbers below 0 count from the last."""
  return {i + num_args if i < 0 else i for i in static_argnums}
