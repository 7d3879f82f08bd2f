"""Grouped products: rows in groups, where each group is multiplied by its own weights.

    out[m] = rows[m] @ weights[g]    for a row m of group g; zeros for rows after the last group

Groups are neighbours: the first `sizes[0]` rows belong to group 0, the next `sizes[1]` rows to group 1, and so forth.

    xla       `jax.lax.ragged_dot`: a kernel on TPU. On CPU and GPU, XLA multiplies every row by the weights of every
              group
    blocks    a loop over blocks of rows of one group, in plain JAX; its time grows with the rows, not with the groups
    triton    kernels for NVIDIA GPUs; see `grouped_kernels.py`
    auto      one of these, by platform; `choose_grouped_matmul` says which and why

One group is a plain product. In 'blocks', a block is multiplied as a whole. Its rows that belong to other groups are
masked, so rows need not be moved, and groups need no padding.

V independent products, M rows, G groups, K dims that are summed over, N dims of the output, R rows in a block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import export
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.sharding import PartitionSpec

from praxis_lite.common.errors import check_choice, first_line
from praxis_lite.layers.gpu_capability import OLDEST_CAPABILITY, compute_capability
from praxis_lite.layers.precision import sum_dtype
from praxis_lite.sharding.constraints import unmapped_axes
from praxis_lite.sharding.mesh import device_kind, platform

ProductMethod = Literal['xla', 'blocks', 'triton']
IMPLEMENTATIONS = ('auto', 'xla', 'blocks', 'triton')
# Policies of rematerialisation find the results by this tag, because in a jaxpr a loop does not look like a product.
GROUPED_PRODUCT = 'grouped_product'
# The fewest and the most rows of a block, by platform. Within these limits, a block is as large as an average group:
# small blocks read the weights too often, and large ones reach too far into the next groups. On a GPU, a loop
# over small blocks would be limited by memory.
_ROWS_OF_BLOCKS = {'gpu': (128, 2048)}
_ROWS_OF_OTHER_BLOCKS = (32, 256)

_KERNEL_DTYPES = ('float32', 'bfloat16', 'float16')
_FEWEST_KERNEL_ROWS = 16

# How much longer 'blocks' takes than 'triton', from plans for H100 with 8 and 64 groups.
_COST_OF_BLOCKS = '1.5 to 4 times'

_Arrays = tuple[jax.Array, jax.Array, jax.Array]


class GroupedMatmulChoice(NamedTuple):
  """An implementation, and the reason for it."""

  name: ProductMethod
  reason: str


class ProductCase(NamedTuple):
  """What the choice of an implementation depends on, besides the platform."""

  dtype: jax.typing.DTypeLike | None = jnp.bfloat16  # Of both operands; None means float32.
  rows: int = 128
  unmapped: tuple[str, ...] = ()  # Mesh axes that may split the operands, because no `shard_map` maps over them.


_ANY_CASE = ProductCase()


def choose_grouped_matmul(
  implementation: str, path: str = 'implementation', case: ProductCase = _ANY_CASE
) -> GroupedMatmulChoice:
  """Returns 'xla', 'blocks' or 'triton', and the reason. If 'triton' cannot run, another implementation replaces it.

  Raises:
    ConfigError: there is no such implementation; `path`, its config path, is in the message.
  """
  check_choice(path, implementation, IMPLEMENTATIONS)
  if implementation in ('xla', 'blocks'):
    return GroupedMatmulChoice(cast(ProductMethod, implementation), f'{path} is {implementation!r}')
  at = platform()
  if at == 'gpu':
    refused = _why_no_kernel(case)
    if case.unmapped:
      axes = ', '.join(map(repr, case.unmapped))
      refused = f"the compiler may split operands over {axes}, and cannot split the kernel of 'triton'"
    if not refused:
      return GroupedMatmulChoice('triton', 'there is a kernel for GPUs of NVIDIA')
    return GroupedMatmulChoice('blocks', f"{refused}; by plans for H100, 'blocks' takes {_COST_OF_BLOCKS} as long")
  refused = f"{path} is 'triton', which is for GPUs; " if implementation == 'triton' else ''
  if at == 'tpu':
    return GroupedMatmulChoice('xla', f'{refused}XLA has a kernel for TPU')
  return GroupedMatmulChoice('blocks', f"{refused}on {at}, 'xla' multiplies every row by the weights of every group")


def _why_no_kernel(case: ProductCase) -> str:
  """Returns why no kernel can multiply these operands; '' if one can."""
  if (name := jnp.dtype(jnp.float32 if case.dtype is None else case.dtype).name) not in _KERNEL_DTYPES:
    return f'the kernel takes {", ".join(_KERNEL_DTYPES)}, not {name}'
  if case.rows < _FEWEST_KERNEL_ROWS:
    return f'the kernel takes at least {_FEWEST_KERNEL_ROWS} rows, not {case.rows}'
  return why_no_kernel_for(device_kind())


@functools.cache
def why_no_kernel_for(chip: str) -> str:
  """Returns why no kernel can be lowered for the chips of the ambient mesh, of kind `chip`; '' if one can."""
  del chip  # Only a key of the cache: the result depends on the chips of the mesh, which is not an argument.
  if (capability := compute_capability()) is None:
    return "'triton' takes GPUs of NVIDIA"
  if capability < OLDEST_CAPABILITY:
    return f"'triton' takes compute capability 8.0 and newer, not {'.'.join(map(str, capability))}"
  rows, weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 128), (1, 128, 128)))
  sizes = jax.ShapeDtypeStruct((1,), jnp.int32)
  try:
    multiply = _kernels().multiply
    jax.jit(multiply, static_argnums=3).trace(rows, weights, sizes, False).lower(lowering_platforms=('cuda',))
  except Exception as error:  # A JAX release with another Pallas may raise anything.
    return f"'triton' fails on this JAX: {first_line(error)}"
  return ''


def _kernels() -> ModuleType:
  from praxis_lite.layers import grouped_kernels  # Importing Pallas takes long, and only GPUs need these kernels.

  return grouped_kernels


def grouped_matmul(
  rows_MK: jax.Array,
  weights_GKN: jax.Array,
  sizes_G: jax.Array,
  implementation: str = 'auto',
  stage_axes: tuple[str, ...] = (),
) -> jax.Array:
  """Returns [M, N]: the rows of each group multiplied by its weights; zeros for rows after the last group.

  Both operands have gradients. Sums are float32, or float64 for float64 operands. If both are int8, sums and result are
  int32, without gradients.

  Args:
    rows_MK: floats; one group after the other.
    weights_GKN: floats; 8-bit integers and floats, as in quantized weights, are converted to the dtype of the rows.
    sizes_G: integers, the number of rows in each group; at most M in sum.
    implementation: one of `IMPLEMENTATIONS`.
    stage_axes: the mesh axes that split the stages of a pipeline evenly, if this is called in a stage. The innermost
      `vmap` is then the one over the stages.

  Raises:
    ConfigError: there is no such implementation.
  """
  dtype = rows_MK.dtype if weights_GKN.dtype.itemsize == 1 else jnp.result_type(rows_MK, weights_GKN)
  rows_MK, weights_GKN, sizes_G = rows_MK.astype(dtype), weights_GKN.astype(dtype), sizes_G.astype(jnp.int32)
  unmapped = unmapped_axes()
  stage_axes = tuple(axis for axis in stage_axes if axis in unmapped)
  case = ProductCase(dtype, rows_MK.shape[0], tuple(axis for axis in unmapped if axis not in stage_axes))
  method = choose_grouped_matmul(implementation, case=case).name
  if method == 'xla' or export.is_symbolic_dim(rows_MK.shape[0]):  # Sizes of blocks depend on the number of rows.
    return jax.lax.ragged_dot(rows_MK, weights_GKN, sizes_G, preferred_element_type=_result_dtype(dtype))
  if not (rows_MK.size and weights_GKN.size):  # The methods below need a row and a group.
    return jnp.zeros((rows_MK.shape[0], weights_GKN.shape[2]), _result_dtype(dtype))
  method = 'blocks' if len(sizes_G) == 1 else method  # One group is a plain product.
  limits = _ROWS_OF_BLOCKS.get(platform(), _ROWS_OF_OTHER_BLOCKS)
  form = _Form(method, *limits, platform() != 'cpu', stage_axes=stage_axes)
  out_VMN = _multiply(rows_MK[None], weights_GKN[None], sizes_G[None], form)
  return checkpoint_name(out_VMN[0], GROUPED_PRODUCT)


def _result_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
  """Returns the dtype of a product of operands with this dtype."""
  return jnp.dtype(jnp.int32 if dtype == jnp.int8 else dtype)


def _dtype_of_sums(x: jax.Array) -> jnp.dtype:
  return jnp.dtype(jnp.int32) if x.dtype == jnp.int8 else sum_dtype(x)


class _Block(NamedTuple):
  """R consecutive rows from index `start` on; the rows with indices in [first, end) belong to the block's group."""

  start: jax.Array  # All are int32.
  first: jax.Array
  end: jax.Array
  rows: int

  def belongs(self) -> jax.Array:
    """Returns [R, 1] bool, whether each row belongs to the group."""
    row = self.start + jnp.arange(self.rows)[:, None]
    return (row >= self.first) & (row < self.end)


class _Groups(NamedTuple):
  """The groups of V products with M rows each; indices of groups and of rows run through all products."""

  sizes: jax.Array  # int32
  ends: jax.Array  # int32, the index after the last row of each group.
  num_rows: int  # Of all products: V times M.
  rows: int  # R, the number of rows of a block.

  @classmethod
  def make(cls, sizes_VG: jax.Array, M: int, form: _Form) -> _Groups:
    V, G = sizes_VG.shape
    share = 1 if form.fixed_trips else 4
    rows = min(max(2 ** round(math.log2(M / G / share)), form.fewest_rows), form.most_rows, M)
    ends = jnp.cumsum(sizes_VG, axis=1) + M * jnp.arange(V, dtype=jnp.int32)[:, None]
    return cls(sizes_VG.reshape(-1), ends.reshape(-1), V * M, rows)

  def counts(self) -> jax.Array:
    """Returns the number of blocks of each group."""
    return -(-self.sizes // self.rows)

  def block(self, group: jax.Array, place: jax.Array) -> _Block:
    """Returns block number `place` of a group. A block near the end of all rows begins earlier, to have R rows."""
    first = self.ends[group] - self.sizes[group] + self.rows * place
    return _Block(jnp.minimum(first, self.num_rows - self.rows), first, self.ends[group], self.rows)

  def loop_over_groups(self, body: Callable[[jax.Array, jax.Array, Any], Any], init: Any) -> Any:
    """Runs `carry = body(group, number of its blocks, carry)` for each group with rows; returns the last carry."""
    with_rows, counts = jnp.argsort(self.sizes == 0, stable=True).astype(jnp.int32), self.counts()
    number = jnp.sum(self.sizes > 0)
    return jax.lax.fori_loop(0, number, lambda i, carry: body(with_rows[i], counts[with_rows[i]], carry), init)

  def loop_over_blocks(self, body: Callable[[jax.Array, jax.Array, Any], Any], init: Any, V: int) -> Any:
    """Runs `carry = body(group, number of the block in the group, carry)` for each block; returns the last carry.

    The number of iterations is the largest that V products of this size can need, whatever the sizes of their groups.
    Iterations that are not needed come last; their blocks lie after the end of the last group.
    """
    counts = self.counts()
    ends, M, G = jnp.cumsum(counts), self.num_rows // V, len(counts) // V
    # A group of n > 0 rows needs (n - 1) // rows + 1 blocks. The total is largest with as few empty groups as possible.
    filled = min(M, G)
    most = V * ((M - filled) // self.rows + filled)
    block = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(block[:, None] >= ends, axis=1, dtype=jnp.int32), V * G - 1)
    place = block - (ends - counts)[group]
    return jax.lax.fori_loop(0, most, lambda b, carry: body(group[b], place[b], carry), init)


class _Form(NamedTuple):
  """How a product is computed."""

  method: ProductMethod  # 'blocks' or 'triton'.
  fewest_rows: int  # The least number of rows of a block.
  most_rows: int
  # Whether there is one loop, with the largest number of iterations that may be needed. A GPU would wait for the host
  # in each iteration if the number depended on data. Otherwise there is a loop over the blocks of each group, which
  # reads the weights of a group once, so blocks can be smaller.
  fixed_trips: bool
  transposed: bool = False  # Whether weights are [V, G, N, K].
  stage_axes: tuple[str, ...] = ()  # Mesh axes that split the mapped dimension of a `vmap` evenly.


def _run_multiply(rows_VMK: jax.Array, weights_VGKN: jax.Array, sizes_VG: jax.Array, *, form: _Form) -> jax.Array:
  """Returns [V, M, N]."""
  if form.method == 'triton':
    return _run_each(
      functools.partial(_kernels().multiply, transposed=form.transposed), rows_VMK, weights_VGKN, sizes_VG
    )
  V, M, K = rows_VMK.shape
  if sizes_VG.shape[1] == 1:
    dims = 'vmk,vnk->vmn' if form.transposed else 'vmk,vkn->vmn'
    return _multiply_all(dims, _keep_rows(rows_VMK, sizes_VG), weights_VGKN[:, 0])
  weights = weights_VGKN.reshape(-1, *weights_VGKN.shape[2:])
  summed, N = (1, weights.shape[1]) if form.transposed else (0, weights.shape[2])
  groups = _Groups.make(sizes_VG, M, form)
  rows, init = rows_VMK.reshape(-1, K), jnp.zeros((V * M, N), _result_dtype(rows_VMK.dtype))

  def weights_of(group: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(weights, group, keepdims=False)

  def fill(block: _Block, w: jax.Array, out: jax.Array) -> jax.Array:
    x, before = (jax.lax.dynamic_slice_in_dim(array, block.start, block.rows) for array in (rows, out))
    y = jax.lax.dot_general(x, w, (((1,), (summed,)), ((), ())), preferred_element_type=_dtype_of_sums(x))
    y = jnp.where(block.belongs(), y.astype(out.dtype), before)
    return jax.lax.dynamic_update_slice_in_dim(out, y, block.start, 0)

  def fill_group(group: jax.Array, count: jax.Array, out: jax.Array) -> jax.Array:
    w = weights_of(group)
    return jax.lax.fori_loop(0, count, lambda place, out: fill(groups.block(group, place), w, out), out)

  def fill_block(group: jax.Array, place: jax.Array, out: jax.Array) -> jax.Array:
    return fill(groups.block(group, place), weights_of(group), out)

  if form.fixed_trips:
    return groups.loop_over_blocks(fill_block, init, V).reshape(V, M, N)
  return groups.loop_over_groups(fill_group, init).reshape(V, M, N)


def _run_sum(left_VMK: jax.Array, right_VMN: jax.Array, sizes_VG: jax.Array, *, form: _Form) -> jax.Array:
  """Returns [V, G, K, N]: for each group, the sum over its rows of the outer products of both operands."""
  if form.method == 'triton':
    return _run_each(_kernels().sum_outer_products, left_VMK, right_VMN, sizes_VG)
  (V, M, K), N = left_VMK.shape, right_VMN.shape[2]
  if sizes_VG.shape[1] == 1:
    left, right = _keep_rows(left_VMK, sizes_VG), _keep_rows(right_VMN, sizes_VG)
    return _multiply_all('vmk,vmn->vkn', left, right)[:, None]
  groups = _Groups.make(sizes_VG, M, form)
  left, right = left_VMK.reshape(-1, K), right_VMN.reshape(-1, N)
  init, zeros = jnp.zeros((groups.sizes.size, K, N), left.dtype), jnp.zeros((K, N), sum_dtype(left))

  def add(block: _Block, total: jax.Array) -> jax.Array:
    slices = (jax.lax.dynamic_slice_in_dim(array, block.start, block.rows) for array in (left, right))
    x, y = (jnp.where(block.belongs(), rows, 0) for rows in slices)
    return total + jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)

  def write(group: jax.Array, total: jax.Array, out: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), group, 0)

  def sum_group(group: jax.Array, count: jax.Array, out: jax.Array) -> jax.Array:
    total = jax.lax.fori_loop(0, count, lambda place, total: add(groups.block(group, place), total), zeros)
    return write(group, total, out)

  def add_block(group: jax.Array, place: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    out, total = carry
    total = add(groups.block(group, place), jnp.where(place == 0, 0, total))
    return write(group, total, out), total

  if form.fixed_trips:
    return groups.loop_over_blocks(add_block, (init, zeros), V)[0].reshape(V, -1, K, N)
  return groups.loop_over_groups(sum_group, init).reshape(V, -1, K, N)


def _keep_rows(rows_VMK: jax.Array, sizes_V1: jax.Array) -> jax.Array:
  """Returns the rows of the only group, with zeros in place of the rows after it."""
  return jnp.where(jnp.arange(rows_VMK.shape[1])[:, None] < sizes_V1[:, :, None], rows_VMK, 0)


def _multiply_all(dims: str, left: jax.Array, right: jax.Array) -> jax.Array:
  return jnp.einsum(dims, left, right, preferred_element_type=_dtype_of_sums(left)).astype(_result_dtype(left.dtype))


def _run_each(kernel: Callable[..., jax.Array], *arrays_V: jax.Array) -> jax.Array:
  if len(arrays_V[0]) == 1:
    return kernel(*(x[0] for x in arrays_V))[None]
  return jax.lax.map(lambda arrays: kernel(*arrays), arrays_V)


def _fold_batch(run: Callable[..., jax.Array], form: _Form, arrays: _Arrays) -> jax.Array:
  """Returns the result of `run`. Under `vmap`, the products of the mapped dimension run one after another.

  For this, the mapped dimension becomes a part of V. Otherwise `vmap` would run the loops of all products in lockstep.
  """

  @custom_vmap
  def folding(*arrays: jax.Array) -> jax.Array:
    return run(*arrays, form=form)

  @folding.def_vmap
  def fold(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
    batch = [x if split else jnp.broadcast_to(x, (axis_size, *x.shape)) for x, split in zip(arrays, in_batched)]
    if {*unmapped_axes()} - {*form.stage_axes}:  # The mesh may split the new dimension; a reshape would hide that.
      return jax.vmap(functools.partial(run, form=form._replace(method='blocks', fixed_trips=True)))(*batch), True

    def run_batch(*batch: jax.Array) -> jax.Array:
      folded = tuple(x.reshape(-1, *x.shape[2:]) for x in batch)
      out = _fold_batch(run, form._replace(stage_axes=()), cast(_Arrays, folded))
      return out.reshape(len(batch[0]), -1, *out.shape[1:])

    if form.stage_axes:
      spec = PartitionSpec(form.stage_axes)
      axes = {*form.stage_axes}
      run_batch = jax.shard_map(run_batch, in_specs=spec, out_specs=spec, axis_names=axes, check_vma=False)
    return run_batch(*batch), True

  return folding(*arrays)


# FLOPs are counted by the names that these two functions have in the jaxpr.
@functools.partial(jax.jit, static_argnums=3)
def grouped_product(rows_VMK: jax.Array, weights_VGKN: jax.Array, sizes_VG: jax.Array, form: _Form) -> jax.Array:
  return _fold_batch(_run_multiply, form, (rows_VMK, weights_VGKN, sizes_VG))


@functools.partial(jax.jit, static_argnums=3)
def grouped_sum(left_VMK: jax.Array, right_VMN: jax.Array, sizes_VG: jax.Array, form: _Form) -> jax.Array:
  return _fold_batch(_run_sum, form, (left_VMK, right_VMN, sizes_VG))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(rows_VMK: jax.Array, weights_VGKN: jax.Array, sizes_VG: jax.Array, form: _Form) -> jax.Array:
  return grouped_product(rows_VMK, weights_VGKN, sizes_VG, form)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sum(left_VMK: jax.Array, right_VMN: jax.Array, sizes_VG: jax.Array, form: _Form) -> jax.Array:
  return grouped_sum(left_VMK, right_VMN, sizes_VG, form)


def _multiply_bwd(form: _Form, operands: _Arrays, gradient_VMN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  rows, weights, sizes = operands
  left, right = (gradient_VMN, rows) if form.transposed else (rows, gradient_VMN)
  other = form._replace(transposed=not form.transposed)
  return _multiply(gradient_VMN, weights, sizes, other), _sum(left, right, sizes, form), None


def _sum_bwd(form: _Form, operands: _Arrays, gradient_VGKN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  left, right, sizes = operands
  forms = form._replace(transposed=True), form._replace(transposed=False)
  return _multiply(right, gradient_VGKN, sizes, forms[0]), _multiply(left, gradient_VGKN, sizes, forms[1]), None


_multiply.defvjp(lambda *args: (_multiply(*args), args[:3]), _multiply_bwd)
_sum.defvjp(lambda *args: (_sum(*args), args[:3]), _sum_bwd)
