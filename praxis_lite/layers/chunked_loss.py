"""Softmax cross entropy over chunks of the classes: the logits [..., V] are never in memory as a whole.

    for each chunk of C classes                         forward: a running log-sum-exp
      logits = x w[:, chunk] + b[chunk]
      m'     = max(m, max(logits))
      m, s   = m', s exp(m - m') + sum(exp(logits - m'))
    log normalizer = m + log s

    for each chunk of C classes                         backward: the logits are computed again
      logits         = x w[:, chunk] + b[chunk]
      g              = softmax(logits) - target, times the cotangents
      dw[:, chunk]   = x^T g
      dx            += g w[:, chunk]^T

This takes one more product of x and w than a loss of whole logits. The operands of products have the dtype of x; sums,
the log-sum-exp and dx are in float32. Sums of dw and dx over devices are in their own dtypes, as in other layers.

If a mesh splits the classes into S parts, each part is cut into its own chunks, and step i of the loop computes chunk i
of every part. So no step moves logits or weights over the mesh axes that split the classes. Devices exchange only the
maxima and sums, [...], once after the loop, and dx. If the chunks do not divide a part evenly, the last one begins
earlier, and the repeated classes count once.

If a mesh splits the rows, each device adds up a dw of its own rows, and these are summed once after the loop. If it
splits D of w too (fully sharded), one collective gathers w before the loop, and both passes share the result. But w and
dw might then take more than half of the memory that chunks save. If so, a collective gathers each chunk in each pass,
and another one sums its dw.

V classes, D model dims, S parts of the classes, K classes of a part, C classes of a chunk.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import PartitionSpec

from praxis_lite.layers.precision import sum_dtype
from praxis_lite.sharding.constraints import manual_axes, with_sharding_constraint
from praxis_lite.sharding.mesh import memory_of_single_gpu
from praxis_lite.sharding.padding import pad_to
from praxis_lite.sharding.specs import UNCONSTRAINED, axes_to_entry, spec_axes

# 'auto' cuts the classes into `_AUTO_CHUNKS` chunks of at least `_AUTO_LEAST` classes, if the logits of a device have
# at least `_AUTO_BYTES` bytes. A single GPU computes whole logits if they take at most `_SHARE_OF_GPU` of its memory.
# On an H100, a step of 1.3B parameters was 4 % faster with whole logits, and took more memory: three quarters of the
# size of the logits. See docs/benchmarks.md.
_AUTO_BYTES = 2**28
_SHARE_OF_GPU = 1 / 12
_AUTO_CHUNKS = 16
_AUTO_LEAST = 1024


class CrossEntropy(NamedTuple):
  """The cross entropy of labels, and other values computed from the same logits."""

  xent: jax.Array  # [...] float32, in nats; NaN if the label is not in [0, V).
  log_normalizer: jax.Array  # [...] float32.
  correct: jax.Array  # [...] bool, whether the label has the largest logit; of several equal ones, only the first.


@dataclasses.dataclass(frozen=True)
class ClassChunks:
  """How classes are cut into chunks, and how logits are processed."""

  num_classes: int  # V.
  chunk_size: int  # The largest number of classes in a chunk; `size` is smaller if a part has fewer classes.
  axes: tuple[str, ...] = ()  # Mesh axes that split the classes.
  dims_axes: tuple[str, ...] = ()  # Mesh axes that split dimension D of w.
  rows: tuple[object, ...] | None = None  # How the leading dimensions of logits are split; None leaves it to XLA.
  classes_first: bool = False  # Whether w is [V, D], not [D, V].
  label_smoothing: float = 0.0  # See `FullSoftmax`, also for `soft_cap`.
  soft_cap: float | None = None

  @property
  def num_parts(self) -> int:
    """S, the number of parts of the classes."""
    return _num_parts(self.axes)

  @property
  def part_size(self) -> int:
    """K, the number of classes of a part."""
    return -(-self.num_classes // self.num_parts)

  @property
  def size(self) -> int:
    """C, the number of classes of a chunk."""
    return min(self.chunk_size, self.part_size)

  @property
  def spec(self) -> PartitionSpec:
    """The spec of w, cut into parts."""
    parts, dims = axes_to_entry(self.axes), axes_to_entry(self.dims_axes)
    return PartitionSpec(parts, None, dims) if self.classes_first else PartitionSpec(parts, dims, None)

  @property
  def starts(self) -> jax.Array:
    """The first class of each chunk, counted from the start of its part."""
    return jnp.minimum(jnp.arange(0, self.part_size, self.size), self.part_size - self.size)

  def cut_into_parts(self, weights: jax.Array, axis: int) -> jax.Array:
    """Returns `weights` with its axis of V classes padded with zeros and cut into [S, K], and S moved to the front."""
    shape = [*weights.shape]
    shape[axis] = self.num_parts * self.part_size
    padded = pad_to(weights, tuple(shape))
    parts = jnp.moveaxis(padded.reshape(*shape[:axis], self.num_parts, self.part_size, *shape[axis + 1 :]), axis, 0)
    spec: list[object] = [UNCONSTRAINED] * parts.ndim
    spec[0], spec[axis + 1] = axes_to_entry(self.axes), None
    return with_sharding_constraint(parts, PartitionSpec(*spec))

  def holds_whole(self, w: jax.Array, num_rows: int) -> bool:
    """Whether each device may hold its part of the classes of w for all of D, instead of gathering a chunk at a time.

    It may if D is not split, or if this part of w is small compared to the logits.
    """
    if not self.dims_axes:
      return True
    own_rows = num_rows // _num_parts(tuple(axis for entry in self.rows or () for axis in unmapped_mesh_axes(entry)))
    return w.size // self.num_parts * w.dtype.itemsize <= own_rows * self.part_size

  def row_parts(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns how many parts the mesh cuts each dimension of rows into; () if it cuts none, or cuts one unevenly."""
    parts = tuple(_num_parts(unmapped_mesh_axes(entry)) for entry in self.rows or ())
    return parts if any(n > 1 for n in parts) and not any(size % n for size, n in zip(shape, parts)) else ()

  def split(self, x: jax.Array, *dims: object) -> jax.Array:
    """Constrains an array with the leading dimensions of the logits to be split by `rows`, unless `rows` is None.

    `dims` are entries of a spec, one per dimension; `...` stands for the leading dimensions.
    """
    if self.rows is None:
      return x
    at = dims.index(...)
    return with_sharding_constraint(x, PartitionSpec(*dims[:at], *self.rows, *dims[at + 1 :]))


def auto_chunk_size(num_classes: int, num_rows: int, axes: tuple[str, ...]) -> int | None:
  """Returns the chunk size that `chunk_size='auto'` stands for; None if whole logits take little memory.

  The mesh `axes` split the classes. In an exported program, the number of labels may be symbolic, and counts as large.
  """
  mesh = jax.sharding.get_abstract_mesh()
  devices = _num_parts(tuple(axis for axis in mesh.axis_names if axis not in manual_axes()))
  most_bytes = max(_AUTO_BYTES * devices, _SHARE_OF_GPU * memory_of_single_gpu())
  if not export.is_symbolic_dim(num_rows) and 4 * num_classes * num_rows < most_bytes:
    return None
  return usual_chunk_size(-(-num_classes // _num_parts(axes)))


def usual_chunk_size(part_size: int) -> int:
  """Returns the size of chunks for 'auto': large enough for a matrix unit, small enough to save memory.

  A size that divides the classes evenly is preferred to a round number. Otherwise the last chunk would repeat classes,
  and every chunk would have to check for repeated ones.
  """
  size = -(-part_size // _AUTO_CHUNKS)
  if part_size % _AUTO_CHUNKS == 0 and size % 8 == 0 and size >= _AUTO_LEAST:
    return size
  return max(_AUTO_LEAST, -(-size // 128) * 128)


def unmapped_mesh_axes(entry: object) -> tuple[str, ...]:
  """Returns the axes in an entry of a spec that the ambient mesh has and no `shard_map` maps; () without a mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  return tuple(axis for axis in spec_axes(entry) if axis in mesh.axis_names and axis not in manual_axes())


def _num_parts(axes: tuple[str, ...]) -> int:
  sizes = jax.sharding.get_abstract_mesh().shape
  return functools.reduce(lambda parts, axis: parts * sizes[axis], axes, 1)


def chunked_cross_entropy(
  x: jax.Array, w: jax.Array, b: jax.Array | None, labels: jax.Array, chunks: ClassChunks
) -> CrossEntropy:
  """Returns the cross entropy of integer labels [...] under softmax(x w + b), without their logits in memory.

  x is [..., D] in the dtype to compute in; w is [D, V], or [V, D] if `chunks.classes_first`; b is [V] or None.
  """
  x = chunks.split(x, ..., None)
  w = chunks.cut_into_parts(w, 0 if chunks.classes_first else 1)
  return _cross_entropy(x, w, None if b is None else chunks.cut_into_parts(b, 0), labels, chunks)


_Residuals = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array, jax.Array]  # x, w, b, labels, log normalizer.


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _cross_entropy(
  x: jax.Array, w: jax.Array, b: jax.Array | None, labels: jax.Array, chunks: ClassChunks
) -> CrossEntropy:
  return _forward(x, w, b, labels, chunks)[0]


class _Running(NamedTuple):
  """Running values over the classes seen so far, for each part: [..., S] float32."""

  largest: jax.Array
  exponentials: jax.Array  # The sum of exp(logit - largest).
  target: jax.Array  # The logit of the label; 0 before it is seen.
  total: jax.Array  # The sum of the logits, for label smoothing.
  before: jax.Array  # The largest logit of a class before the label.


def _forward(
  x: jax.Array, w: jax.Array, b: jax.Array | None, labels: jax.Array, chunks: ClassChunks
) -> tuple[CrossEntropy, _Residuals]:
  read = _reader(w, labels.size, chunks)

  def step(seen: _Running, start_and_first: tuple[jax.Array, jax.Array]) -> tuple[_Running, None]:
    start, first_new = start_and_first
    logits, classes, is_new = _logits(x, read(start), b, chunks, start, first_new)
    counted = logits if is_new is None else jnp.where(is_new, logits, -jnp.inf)
    label = labels[..., None, None]
    largest = jnp.maximum(seen.largest, jnp.max(counted, -1))
    finite = jnp.where(jnp.isfinite(largest), largest, 0.0)
    exponentials = jnp.sum(jnp.exp(counted - finite[..., None]), -1)
    total = seen.total
    if chunks.label_smoothing:
      total += jnp.sum(logits if is_new is None else jnp.where(is_new, logits, 0.0), -1)
    return _Running(
      largest,
      seen.exponentials * jnp.exp(seen.largest - finite) + exponentials,
      seen.target + _target(logits, classes, label, is_new),
      total,
      jnp.maximum(seen.before, jnp.max(jnp.where(classes < label, counted, -jnp.inf), -1)),
    ), None

  zeros = jnp.zeros((*labels.shape, chunks.num_parts), sum_dtype(x, w))
  zeros = chunks.split(zeros, ..., axes_to_entry(chunks.axes))
  seen, _ = jax.lax.scan(step, _Running(zeros - jnp.inf, zeros, zeros, zeros, zeros - jnp.inf), _steps(chunks))
  # Sums of all parts: the only communication of the forward pass.
  log_normalizer = jax.nn.logsumexp(seen.largest + jnp.log(seen.exponentials), axis=-1)
  label_logit = jnp.sum(seen.target, -1)
  target = label_logit
  if e := chunks.label_smoothing:
    target = (1 - e) * target + e / chunks.num_classes * jnp.sum(seen.total, -1)
  possible = (labels >= 0) & (labels < chunks.num_classes)
  largest, before = jnp.max(seen.largest, -1), jnp.max(seen.before, -1)
  outputs = CrossEntropy(
    jnp.where(possible, log_normalizer - target, jnp.nan),
    log_normalizer,
    possible & (label_logit == largest) & (before < largest),
  )
  return outputs, (x, w, b, labels, log_normalizer)


def _backward(
  chunks: ClassChunks, residuals: _Residuals, cotangents: CrossEntropy
) -> tuple[jax.Array, jax.Array, jax.Array | None, None]:
  x, w, b, labels, log_normalizer = residuals
  of_xent, of_normalizer = (c[..., None, None] for c in cotangents[:2])
  axis, weights = _layout(chunks)
  e = chunks.label_smoothing
  read = _reader(w, labels.size, chunks)
  own = _OwnRows(chunks, chunks.row_parts(labels.shape) if chunks.holds_whole(w, labels.size) else ())

  def step(
    sums: tuple[jax.Array, jax.Array, jax.Array | None], start_and_first: tuple[jax.Array, jax.Array]
  ) -> tuple[tuple[jax.Array, jax.Array, jax.Array | None], None]:
    (dx, dw, db), (start, first_new) = sums, start_and_first
    chunk = read(start)
    logits, classes, is_new = _logits(x, chunk, b, chunks, start, first_new)
    target = (1 - e) * (classes == labels[..., None, None]) + e / chunks.num_classes
    probabilities = jnp.exp(logits - log_normalizer[..., None, None])
    gradient = probabilities * (of_xent + of_normalizer) - target * of_xent
    if chunks.soft_cap is not None:
      gradient *= 1 - jnp.square(logits / chunks.soft_cap)
    if db is not None:
      of_b = jnp.sum(gradient, tuple(range(labels.ndim))).astype(db.dtype)
      db = jax.lax.dynamic_update_slice_in_dim(db, of_b, start, 1)
    gradient = gradient.astype(x.dtype)
    # The last chunk may repeat classes: dw gets equal values for them again, but dx must not count them twice.
    of_w = own.product(gradient, x, dw.dtype)
    dw = jax.lax.dynamic_update_slice_in_dim(dw, of_w, start, axis + own.rank)
    new = gradient if is_new is None else jnp.where(is_new, gradient, 0)
    of_x = jnp.einsum(f'...sk,{weights}->s...d', new, chunk, preferred_element_type=dx.dtype)
    return (dx + of_x, dw, db), None

  dx = jnp.zeros((chunks.num_parts, *x.shape), sum_dtype(x, w))
  dx = chunks.split(dx, axes_to_entry(chunks.axes), ..., UNCONSTRAINED)
  first = dx, own.zeros_like(w), None if b is None else jnp.zeros_like(b)
  (dx, dw, db), _ = jax.lax.scan(step, first, _steps(chunks))
  # Without the barrier, the compiler may delay the sums of dw to the end of the backward pass, and keep all parts.
  dx, dw = jax.lax.optimization_barrier((_add_up(dx.astype(x.dtype), 1), own.sum(dw)))
  return dx, dw, db, None


_cross_entropy.defvjp(_forward, _backward)


class _OwnRows(NamedTuple):
  """Computes a gradient of w for each part of the rows, from its own rows: [*P, S, D, C] or [*P, S, C, D].

  P are the `parts`, see `row_parts`.
  """

  chunks: ClassChunks
  parts: tuple[int, ...]

  @property
  def rank(self) -> int:
    return len(self.parts)

  def product(self, gradient: jax.Array, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the gradient of a chunk of w, given the gradient of the chunk's logits, [..., S, C], and x, [..., D]."""
    _, weights = _layout(self.chunks)
    if not self.parts:
      return jnp.einsum(f'...sk,...d->{weights}', gradient, x, preferred_element_type=dtype)
    devices, rows = 'ABCDEFG'[: self.rank], 'NOPQRST'[: self.rank]
    both = ''.join(map(''.join, zip(devices, rows)))
    gradient, x = self._cut(gradient, axes_to_entry(self.chunks.axes), None), self._cut(x, None)
    return jnp.einsum(f'{both}sk,{both}d->{devices}{weights}', gradient, x, preferred_element_type=dtype)

  def zeros_like(self, w: jax.Array) -> jax.Array:
    if not self.parts:
      return jnp.zeros_like(w)
    spec = PartitionSpec(*(self.chunks.rows or ()), axes_to_entry(self.chunks.axes), None, None)
    return with_sharding_constraint(jnp.zeros((*self.parts, *w.shape), w.dtype), spec)

  def sum(self, dw: jax.Array) -> jax.Array:
    return with_sharding_constraint(_add_up(dw, self.rank), self.chunks.spec) if self.parts else dw

  def _cut(self, x: jax.Array, *others: object) -> jax.Array:
    """Returns x, each dimension of rows cut into (parts, rows of a part); `others` are specs of other dimensions."""
    sizes = [size for whole, parts in zip(x.shape, self.parts) for size in (parts, whole // parts)]
    spec = [entry for of_rows in self.chunks.rows or () for entry in (of_rows, None)]
    return with_sharding_constraint(x.reshape(*sizes, *x.shape[self.rank :]), PartitionSpec(*spec, *others))


def _add_up(parts: jax.Array, rank: int) -> jax.Array:
  """Returns the sum over the first `rank` dimensions, in the dtype of `parts`; `jnp.sum` adds bfloat16 in float32."""
  return jax.lax.reduce(parts, jnp.zeros((), parts.dtype), jax.lax.add, range(rank))


def _steps(chunks: ClassChunks) -> tuple[jax.Array, jax.Array]:
  """Returns two arrays with an entry for each chunk: its first class, and its first class that no earlier chunk has.

  Classes are counted from the start of the part. The last chunk may overlap the one before.
  """
  return chunks.starts, jnp.arange(0, chunks.part_size, chunks.size)


def _layout(chunks: ClassChunks) -> tuple[int, str]:
  """Returns which dimension of w, cut into parts, has the classes, and the einsum letters of w's dimensions."""
  return (1, 'skd') if chunks.classes_first else (2, 'sdk')


def _reader(w: jax.Array, num_rows: int, chunks: ClassChunks) -> Callable[[jax.Array], jax.Array]:
  """Returns a function of `start` that reads one chunk of each part of w, [S, D, C] or [S, C, D], with D gathered."""
  axis, _ = _layout(chunks)
  if chunks.rows is None:
    return lambda start: jax.lax.dynamic_slice_in_dim(w, start, chunks.size, axis)
  whole = PartitionSpec(axes_to_entry(chunks.axes), None, None)
  if chunks.holds_whole(w, num_rows):
    table = with_sharding_constraint(w, whole)
    return lambda start: jax.lax.dynamic_slice_in_dim(table, start, chunks.size, axis)

  def gather(start: jax.Array) -> jax.Array:
    # Without this constraint, the compiler would gather all of w and then take a chunk of it.
    chunk = with_sharding_constraint(jax.lax.dynamic_slice_in_dim(w, start, chunks.size, axis), chunks.spec)
    return with_sharding_constraint(chunk, whole)

  return gather


def _logits(
  x: jax.Array, w: jax.Array, b: jax.Array | None, chunks: ClassChunks, start: jax.Array, first_new: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Returns the float32 logits of one chunk of each part [..., S, C], and the classes [S, C] that they belong to.

  The third result, [S, C] bool, says which classes count; None if all do. A class does not count if an earlier chunk
  has it, or if it is padding. `w` has only this chunk of each part; `b` has the whole parts. `start` and `first_new`
  are entries of the two arrays that `_steps` returns.
  """
  _, weights = _layout(chunks)
  logits = jnp.einsum(f'...d,{weights}->...sk', x, w, preferred_element_type=sum_dtype(x, w))
  logits = chunks.split(logits, ..., axes_to_entry(chunks.axes), None)
  if b is not None:
    logits += jax.lax.dynamic_slice_in_dim(b, start, chunks.size, 1).astype(logits.dtype)
  if chunks.soft_cap is not None:
    logits = chunks.soft_cap * jnp.tanh(logits / chunks.soft_cap)
  within = start + jnp.arange(chunks.size)
  classes = jnp.arange(chunks.num_parts)[:, None] * chunks.part_size + within
  is_new = None
  if chunks.part_size % chunks.size:
    is_new = jnp.broadcast_to(within >= first_new, classes.shape)
  if chunks.num_classes % chunks.num_parts:
    is_new = _and(classes < chunks.num_classes, is_new)
  return logits, classes, is_new


def _target(logits: jax.Array, classes: jax.Array, label: jax.Array, is_new: jax.Array | None) -> jax.Array:
  """Returns the logit of `label`, [..., 1, 1], in each part: [..., S]. It is 0 in a part whose chunk lacks the label.

  It is also 0 if an earlier chunk had the label, because each class counts once.
  """
  if is_new is not None or jax.sharding.get_abstract_mesh().size > 1:  # On a mesh, a lookup might gather logits.
    return jnp.sum(jnp.where(_and(classes == label, is_new), logits, 0.0), -1)
  # A lookup reads one logit of each row; a sum would read all of them.
  at, last = label - classes[:, :1], classes.shape[1] - 1
  found = jnp.take_along_axis(logits, jnp.clip(at, 0, last), axis=-1)
  return jnp.where((at >= 0) & (at <= last), found, 0.0)[..., 0]


def _and(condition: jax.Array, other: jax.Array | None) -> jax.Array:
  return condition if other is None else condition & other
