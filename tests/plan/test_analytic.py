"""What is read from lowered programs: fused attention, what is stored, what runs beside work; nothing is compiled."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from small_lm import LAYERS, MULTIPLIED, D, small_lm

from praxis_lite.instruments.plan import local_overlap, plan
from praxis_lite.instruments.plan.compilers import pretend_cudnn_for_plans
from praxis_lite.instruments.plan.local_program import local_program
from praxis_lite.instruments.plan.lowering import lower_without_devices
from praxis_lite.layers import AttentionSpec, Causal, dot_product_attention
from praxis_lite.layers.blocks import Formula
from praxis_lite.layers.blockwise import RowSplit
from praxis_lite.layers.decode_kernel import attend_by_kernel
from praxis_lite.layers.fp8 import fp8_tensordot
from praxis_lite.layers.kv_cache import KVCache
from praxis_lite.sharding.mesh import abstract_mesh

B, T, N, H = 8, 256, 4, 32
MESH = {'data': 4, 'mdl': 2}
# Up to 0.10, the gradient of fused attention returns that of its bias too, which nothing uses.
COMPUTES_GRADIENT_OF_MASK = tuple(int(part) for part in jax.__version__.split('.')[:2]) < (0, 11)


def lowered_program(function, *arrays, mesh=MESH, kind='gpu', **options):
  """What a device does in a function of arrays, each with its shape, dtype and how its dimensions are split."""
  mesh = abstract_mesh(mesh, kind)
  structs = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split))) for shape, dtype, split in arrays
  ]
  with jax.sharding.use_abstract_mesh(mesh), pretend_cudnn_for_plans():
    return local_program(lower_without_devices(jax.jit(function).trace(*structs), kind), **options)


# ---------------------------------------------------------------- fused attention


@pytest.mark.parametrize('mesh', [MESH, {'data': 1}], ids=['split', 'one device'])
@pytest.mark.parametrize('packed', [False, True], ids=['whole rows', 'packed'])
@pytest.mark.parametrize('causal', [False, True])
def test_fused_attention_counts_as_the_kernels_that_a_compiler_calls(causal, packed, mesh):
  split = ('data', None, 'mdl') if len(mesh) > 1 else ()
  array = ((B, T, N, H), jnp.bfloat16, split)

  def loss(query, key, value, segments):
    ids = segments if packed else None
    out = dot_product_attention(
      query, key, value, causal=causal, segment_ids=ids, kv_segment_ids=ids, implementation='cudnn'
    )
    return jnp.square(out.astype(jnp.float32)).sum()

  program = lowered_program(jax.grad(loss, (0, 1, 2)), array, array, array, ((B, T), jnp.int32, split[:1]), mesh=mesh)
  forward, backward = program.products
  devices = 8 if split else 1
  product = 2.0 * B * N * T * T * H * (0.5 if causal else 1.0) / devices
  assert (forward.flops, backward.flops) == (2 * product, 5 * product)
  assert all(p.attention_dims == H and p.dtype == 'bf16' and p.count == 1 for p in program.products)
  one, sums = 2 * B * T * N * H / devices, 4 * B * T * N / devices  # Bytes of queries, and of what softmax keeps.
  mask = 2 * B * T * T / mesh['data'] if packed else 0  # A bias, which heads share.
  assert forward.bytes == 4 * one + sums + mask
  gradients = 1 if COMPUTES_GRADIENT_OF_MASK else 0
  assert backward.bytes == 8 * one + sums + mask * (1 + gradients)
  assert program.collectives == ()
  # What the forward pass keeps, the mask and the gradient of the result: never the logits of all heads.
  assert one + sums + mask <= program.peak.bytes <= 3 * one + sums + 2 * mask


@pytest.mark.parametrize('mesh', [MESH, {'data': 1}], ids=['split', 'one device'])
def test_splash_attention_counts_as_what_its_kernels_compute(mesh):
  """Of the 10 pairs of blocks that meet under a causal mask, in 2, 3 and 4 products."""
  T, split = 512, ('data', None, 'mdl') if len(mesh) > 1 else ()
  array = ((B, T, N, H), jnp.bfloat16, split)
  rows = RowSplit(('data',), ('mdl',)) if split else None
  spec = AttentionSpec(implementation='splash', block_size=128)

  def loss(query, key, value):
    out = dot_product_attention(query, key, value, Causal(), spec=spec, split=rows)
    return jnp.square(out.astype(jnp.float32)).sum()

  program = lowered_program(jax.grad(loss, (0, 1, 2)), array, array, array, mesh=mesh, kind='tpu')
  product = 2.0 * B * N * 10 * 128 * 128 * H / (8 if split else 1)
  kernels = [p for p in program.products if p.attention_dims == H]
  assert sorted(p.flops for p in kernels) == [2 * product, 3 * product, 4 * product]
  assert all(p.dtype == 'bf16' and p.count == 1 for p in kernels)
  one = 2 * B * T * N * H / (8 if split else 1)  # Bytes of queries.
  assert min(p.bytes for p in kernels) >= 3 * one + 2 * one * 10 / 4  # Keys and values, for each pair.
  assert program.collectives == ()


def test_the_kernel_of_a_decoding_step_reads_the_cache_of_its_own_layer_only():
  layers, slots, kv = 8, 256, 2

  def step(query, keys, values, pos):
    def one(query, layer):
      cache = KVCache(keys, values, pos, turn=layer)
      return attend_by_kernel(query, cache, pos[layer][:, None] >= 0, formula=Formula(1.0)), None

    return jax.lax.scan(one, query, jnp.arange(layers))[0]

  cache = ((layers, B, kv, slots, H), jnp.bfloat16, ())
  arrays = ((B, 1, N, H), jnp.bfloat16, ()), cache, cache, ((layers, B, slots), jnp.int32, ())
  program = lowered_program(step, *arrays, mesh={'data': 1}, kind='tpu')
  (kernel,) = program.products
  assert (kernel.count, kernel.bytes) == (layers, 2 * 2 * B * H * (kv * slots + N))


# ---------------------------------------------------------------- what is stored


@pytest.mark.parametrize('on_tpu', [True, False])
def test_products_on_tpus_read_weights_from_their_stack(on_tpu):
  layers, n = 6, 64

  def run(x, stack):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

  weights = ((layers, n, n), jnp.float32, ())
  program = lowered_program(run, ((4, n), jnp.float32, ()), weights, mesh={'data': 1}, on_tpu=on_tpu)
  (product,) = program.products
  assert (product.count, product.bytes) == (layers, 4 * (n * n + 2 * 4 * n))
  copied = sum(f.count * f.bytes for f in program.fusions if 'dynamic_slice' in f.name)
  assert copied == (0 if on_tpu else layers * 2 * 4 * n * n)


def test_sums_of_what_goes_through_layers_are_stored_once_each():
  size = 4 * 64 * 64

  def layers(x, w, count):
    for _ in range(count):
      x = x + jnp.sin(x @ w)
    return x @ w

  array = ((64, 64), jnp.float32, ())
  few, many = (lowered_program(lambda x, w, n=n: layers(x, w, n), array, array, mesh={'data': 1}) for n in (2, 12))
  assert few.peak.bytes == many.peak.bytes <= 3 * size
  assert sum(f.bytes for f in many.fusions) == 12 * 3 * size  # Each reads x and its product, and writes their sum.


def test_a_product_writes_the_dtype_that_it_is_cast_to():
  n = 64

  def run(x, w, also):
    y = jnp.dot(x, w, preferred_element_type=jnp.float32)
    z = jnp.tanh(jnp.reshape(y, (n * n,)).astype(jnp.bfloat16)).reshape(n, n) @ w
    return (z, y.sum()) if also else z

  array = ((n, n), jnp.bfloat16, ())
  cast, both = (
    lowered_program(lambda x, w, also=also: run(x, w, also), array, array, mesh={'data': 1}) for also in (False, True)
  )
  assert cast.peak.bytes == 2 * n * n  # The result of tanh takes the place of the product.
  assert both.peak.bytes >= 4 * n * n  # In float32, which another operation reads too.


def test_a_fusion_writes_into_an_array_of_its_shape_that_it_reads_last():
  def run(x, w, also):
    y = x @ w
    z = jnp.exp(y - y.max(axis=1, keepdims=True)) @ w
    return z + y if also else z

  array = ((64, 64), jnp.float32, ())
  last, not_last = (
    lowered_program(lambda x, w, also=also: run(x, w, also), array, array, mesh={'data': 1}) for also in (False, True)
  )
  maxima, whole = 4 * 64, 4 * 64 * 64
  assert whole <= last.peak.bytes <= whole + 2 * maxima
  assert not_last.peak.bytes >= 2 * whole


@pytest.mark.parametrize(('devices', 'on_tpu', 'kept'), [(1, False, 0), (2, False, 1), (2, True, 0)])
def test_two_iterations_that_are_merged_keep_what_passes_between_them(devices, on_tpu, kept):
  def run(x, stack, trips):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), x), x, stack[:trips])

  arrays = ((64, 64), jnp.bfloat16, ('data',)), ((4, 64, 64), jnp.bfloat16, ())
  many, one = (
    lowered_program(lambda x, s, n=n: run(x, s, n), *arrays, mesh={'data': devices}, on_tpu=on_tpu) for n in (4, 1)
  )
  between = [buffer for buffer in many.peak.buffers if buffer.shape == f'bf16[{64 // devices}, 64]']
  others = [buffer for buffer in one.peak.buffers if buffer.shape == f'bf16[{64 // devices}, 64]']
  assert len(between) - len(others) == kept


def gradient_of_layers(layers, rows, n, *, split=('data',), kind='gpu', mesh=None, product=jnp.matmul):
  """The program of the gradient of a loop over 3 blocks of `layers` products each, which recomputes each block."""

  def block(x, weights):
    for weight in weights:
      x = jnp.tanh(product(x, weight))
    return x, None

  def loss(stack, x):
    return jnp.square(jax.lax.scan(jax.checkpoint(block, prevent_cse=False), x, stack)[0]).sum()

  stack = tuple(((3, n, n), jnp.bfloat16, (None, *split)) for _ in range(layers))
  structs = ((rows, n), jnp.bfloat16, ('data',))
  return lowered_program(
    lambda x, *stack: jax.grad(loss)(stack, x),
    structs,
    *stack,
    mesh=mesh or {'data': 4},
    kind=kind,
    on_tpu=kind == 'tpu',
  )


@pytest.mark.parametrize(
  ('kind', 'mesh', 'split', 'kept'),
  [
    ('gpu', {'data': 4}, ('data',), 2),
    ('tpu', {'data': 4}, ('data',), 1),
    ('gpu', {'data': 4, 'mdl': 2}, ('mdl', 'data'), 1),  # Products are sums over `mdl`, on which work waits.
    ('gpu', {'data': 1}, (), 1),
  ],
  ids=['gpu', 'tpu', 'work waits', 'one device'],
)
def test_gradients_of_weights_are_computed_last_so_their_operands_stay(kind, mesh, split, kept):
  rows, n = 2**14, 64
  peaks = [gradient_of_layers(layers, rows, n, split=split, kind=kind, mesh=mesh).peak.bytes for layers in (2, 5)]
  one = 2 * rows * n / mesh['data']
  assert (peaks[1] - peaks[0]) / one == pytest.approx(3 * kept, abs=0.5)


@pytest.mark.parametrize(('moves_all', 'mapped', 'kept'), [(True, False, 4), (False, False, 0), (False, True, 2)])
def test_iterations_keep_weights_that_the_next_gathers_and_gradients_that_it_reduces(
  monkeypatch, moves_all, mapped, kept
):
  """For two layers, whose weights the backward pass needs twice: once for what it recomputes."""
  monkeypatch.setattr(local_overlap, '_MOVES_ALL', moves_all)
  n = 256

  def product(x, weight):
    gathered = (
      jax.lax.all_gather(weight, 'data', tiled=True) if mapped else jax.lax.with_sharding_constraint(weight, P())
    )
    return x @ gathered

  if mapped:
    product = jax.shard_map(product, in_specs=(P('data'), P('data')), out_specs=P('data'), check_vma=False)
  peak = gradient_of_layers(2, 16, n, product=product).peak
  between = [b for b in peak.buffers if b.shape == f'bf16[{n}, {n}]' and b.defined == b.last_use == 0]
  assert len(between) == kept


def test_a_sum_of_which_each_device_keeps_a_part_takes_the_memory_of_the_part():
  n = 64

  def run(x, w, other):
    part = jax.lax.with_sharding_constraint(x @ w, P('data'))
    return jnp.sort(jnp.sort(other, axis=1) @ w, axis=1), jnp.sort(part, axis=1)

  arrays = (
    ((n, n), jnp.float32, (None, 'data')),
    ((n, n), jnp.float32, ('data',)),
    ((16 * n, n), jnp.float32, ('data',)),
  )
  program = lowered_program(run, *arrays, mesh={'data': 4})
  assert [buffer.shape for buffer in program.peak.buffers if 'dot' in buffer.name] == ['f32[16, 64]', 'f32[256, 64]']


def test_sums_of_the_same_array_read_it_once():
  def both(x):
    x = x.astype(jnp.float32)
    return x.sum(), (x * x).sum()

  program = lowered_program(both, ((1024, 1024), jnp.bfloat16, ()), mesh={'data': 1})
  assert sum(f.bytes for f in program.fusions) == 2 * 1024 * 1024 + 2 * 4


# ---------------------------------------------------------------- loops


def test_all_reduces_that_are_added_up_are_one():
  def both(x, a, b):
    return x @ a + x @ b

  whole = ((64, 64), jnp.float32, ('data',))
  program = lowered_program(both, ((64, 64), jnp.float32, (None, 'data')), whole, whole, mesh={'data': 4})
  assert [c.kind for c in program.collectives] == ['all-reduce']
  assert program.peak.bytes == 2 * 4 * 64 * 64  # The products, one of which holds the sum.


@pytest.mark.parametrize(('size', 'gather', 'scatter'), [(5, 'all-gather', 'reduce-scatter'), (4, *['all-reduce'] * 2)])
def test_weights_of_which_half_of_the_devices_have_no_part_are_gathered_by_sums(size, gather, scatter):
  """As XLA does. Variables are stored padded."""

  def loss(w, x):
    return jnp.square(x @ jax.lax.with_sharding_constraint(w[:size], P('data'))).sum()

  program = lowered_program(
    jax.value_and_grad(loss), ((8, 64), jnp.float32, ('data',)), ((64, size), jnp.float32, ('data',)), mesh={'data': 8}
  )
  assert [c.kind for c in program.collectives if c.result_bytes > 4] == [gather, scatter]


@pytest.mark.parametrize(('dtype', 'summed'), [('bfloat16', 'bf16'), ('float16', 'f32'), ('float32', 'f32')])
def test_devices_add_up_products_in_8_bits_in_the_dtype_of_their_inputs(dtype, summed):
  def loss(x, w):
    return jnp.square(fp8_tensordot(x, w, 1)).sum()

  x, w = ((64, 64), dtype, ('data', 'mdl')), ((64, 64), dtype, ('mdl', None))
  program = lowered_program(jax.grad(loss, (0, 1)), x, w)
  sums = [(c.axes, c.dtype) for c in program.collectives if c.result_bytes > 64]
  assert sums == [(('mdl',), summed), (('data',), summed)]


def test_a_loop_without_a_known_count_is_named():
  def until_small(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: jnp.tanh(x @ x), x)

  program = lowered_program(until_small, ((64, 64), jnp.float32, ()), mesh={'data': 1})
  (name,) = program.unknown_loops
  assert name.endswith('while') and [p.count for p in program.products] == [1]


def test_loops_that_draw_from_a_beta_distribution_are_known():
  def mixed(x):
    share = jax.random.beta(jax.random.key(0), 0.2, 0.2, x.shape[:1])
    return share[:, None] * x

  assert not lowered_program(mixed, ((64, 8), jnp.float32, ()), mesh={'data': 1}).unknown_loops


@pytest.mark.parametrize('trips', [None, 16], ids=['scan', 'while'])
@pytest.mark.parametrize('reads', [False, True], ids=['writes', 'reads what was there'])
def test_an_update_in_a_loop_moves_its_slice(reads, trips):
  rows, size = 16, 4 * 1024

  def fill(x, end):
    def body(i, out):
      row = 2 * jax.lax.dynamic_slice_in_dim(x, i, 1)
      row = jnp.where(i > 3, row, jax.lax.dynamic_slice_in_dim(out, i, 1)) if reads else row
      return jax.lax.dynamic_update_slice_in_dim(out, row, i, 0)

    return jax.lax.fori_loop(0, rows if trips is None else jnp.minimum(end[0], trips), body, jnp.zeros_like(x))

  program = lowered_program(fill, ((rows, 1024), jnp.float32, ()), ((1,), jnp.int32, ()), mesh={'data': 1})
  updates = [f for f in program.fusions if 'update_slice' in f.name]
  assert [f.count for f in updates] == [rows if trips is None else 1]
  scalars = 16  # At most: the numbers of rows.
  assert size * (2 + reads) <= updates[0].bytes <= size * (2 + reads) + scalars
  others = sum(f.count * f.bytes for f in program.fusions if f not in updates)
  assert rows * size <= others <= rows * (size + 3 * scalars)  # Only zeros at the start, and the numbers of rows.


# ---------------------------------------------------------------- grouped products


@pytest.mark.parametrize(('on_tpu', 'groups'), [(True, 1), (False, 4)])
def test_a_ragged_dot_without_a_kernel_multiplies_every_row_by_every_group(on_tpu, groups):
  def loss(x, w, sizes):
    return jnp.square(jax.lax.ragged_dot(x, w, sizes)).sum()

  arrays = ((64, 8), jnp.float32, ()), ((4, 8, 16), jnp.float32, ()), ((4,), jnp.int32, ())
  program = lowered_program(jax.grad(loss, (0, 1)), *arrays, mesh={'data': 1}, on_tpu=on_tpu)
  assert [p.flops for p in program.products] == [2 * 64 * 8 * 16 * groups] * 3


def test_kernels_for_grouped_products_have_the_flops_of_their_rows():
  def call(*shape):
    return jax.ffi.ffi_call('kernel', jax.ShapeDtypeStruct(shape, jnp.bfloat16))

  def grouped_product(x, w, sizes):
    return call(64, 16)(x, w, sizes)

  def grouped_sum(x, y, sizes):
    return call(4, 8, 16)(x, y, sizes)

  def both(x, w, sizes):
    return jax.jit(grouped_sum)(x, jax.jit(grouped_product)(x, w, sizes), sizes), call(64, 16)(x, w, sizes)

  arrays = ((64, 8), jnp.bfloat16, ()), ((4, 8, 16), jnp.bfloat16, ()), ((4,), jnp.int32, ())
  program = lowered_program(both, *arrays, mesh={'data': 1})
  moved = 2 * (64 * 8 + 4 * 8 * 16 + 64 * 16) + 4 * 4
  assert [(p.flops, p.bytes, p.dtype) for p in program.products] == [(2 * 64 * 8 * 16, moved, 'bf16')] * 2


# ---------------------------------------------------------------- a model


def test_a_model_is_planned_as_a_gpu_runs_it():
  config = small_lm((1, 1, 1), dtype=jnp.bfloat16)
  rows, length = 8, 512
  config.datasets[0].set(seq_len=length, batch_size=rows)
  found = plan(config, None, 'h100:1', compile=False)
  attention = 7 * rows * length * length * D * LAYERS  # Two products forward and five backward, half of each.
  assert found.cost.flops == pytest.approx(6 * rows * length * MULTIPLIED + attention, rel=0.01)
  kernels = [op for op in found.cost.operations if op.layer == 'lm.transformer.layers.attention' and op.flops]
  # Read as a loop, although a single GPU has none.
  assert sorted((op.phase, op.count) for op in kernels) == [('backward', LAYERS), ('forward', LAYERS)]
  assert not any("'auto'" in note for note in found.notes)


def test_live_bytes_are_divided_by_layer_and_kind():
  found = plan(small_lm((1, 4, 2)), None, 'h100:1x8', compile=False)
  live = found.memory.live
  assert sum(part.bytes for part in live) == found.memory.temporaries
  saved = [part for part in live if part.kind == 'saved activations']
  assert saved and all(part.layer.startswith('lm.transformer') and part.phase == 'forward' for part in saved)
  assert all(buffer.shape.split('[')[1].startswith(f'{LAYERS},') for part in saved for buffer in part.buffers)
  assert max(part.bytes for part in live) < found.memory.temporaries


@pytest.mark.parametrize('split', ['rows', 'height'])
@pytest.mark.parametrize('groups', [1, 2, 4])
@pytest.mark.parametrize('stride', [1, 2])
def test_convolutions_and_their_gradients_count_the_elements_that_meet(stride, groups, split):
  """Rows or height are split over 4 devices, channels over 2; the border of a kernel is over padding."""

  def loss(x, k):
    y = jax.lax.conv_general_dilated(
      x, k, (stride, stride), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'), feature_group_count=groups
    )
    return jnp.square(y).sum()

  x, k = (8, 8, 8, 4), (3, 3, 4 // groups, 8)
  over = ('data', None, None) if split == 'rows' else (None, 'data', None)
  arrays = (x, jnp.float32, (*over, 'mdl' if groups > 1 else None)), (k, jnp.float32, (None, None, None, 'mdl'))
  products = lowered_program(jax.grad(loss, (0, 1)), *arrays).products
  met, features, read = {1: 22, 2: 11}[stride], 4 // groups, 2 if groups > 1 else 4
  assert [product.flops for product in products] == [2 * 2 * met**2 * features * 4] * 3
  assert products[0].bytes == 4 * (2 * 64 * read + 9 * features * 4 + 2 * (8 // stride) ** 2 * 4)


def test_what_reads_a_value_that_comes_late_comes_later(monkeypatch):
  class Operation:
    def __init__(self, name, *operands):
      self.name, self.operands, self.results, self.operation = name, operands, (object(),), self

  state = object()
  value = Operation('stablehlo.multiply', state)
  reader = Operation('stablehlo.add', value.results[0])
  reduction = Operation('sdy.all_reduce', value.results[0])
  gather = Operation('sdy.all_gather', state)
  body = SimpleNamespace(operations=[value, reader, reduction, gather, Operation('stablehlo.return', state)])
  monkeypatch.setattr(local_overlap, 'changing_state', lambda body: [(state, state)])
  overlapping = local_overlap.Overlapping(set(), {reduction})
  order = local_overlap.order_on_gpus(body, overlapping, SimpleNamespace(bytes=lambda value: 2**21))
  assert order.index(value) < order.index(reader)
