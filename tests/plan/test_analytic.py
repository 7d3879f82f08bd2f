"""What is read from lowered programs: fused attention, what is stored, what runs beside work; nothing is compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from small_lm import LAYERS, MULTIPLIED, D, small_lm

from praxis_lite.instruments.plan import plan
from praxis_lite.instruments.plan.compilers import pretend_cudnn_for_plans
from praxis_lite.instruments.plan.local_program import local_program
from praxis_lite.instruments.plan.lowering import lower_without_devices
from praxis_lite.layers.dot_product import dot_product_attention
from praxis_lite.sharding.mesh import abstract_mesh

B, T, N, H = 8, 256, 4, 32
MESH = {'data': 4, 'mdl': 2}
# Up to 0.10, the gradient of fused attention returns that of its bias too, which nothing uses.
COMPUTES_GRADIENT_OF_MASK = tuple(int(part) for part in jax.__version__.split('.')[:2]) < (0, 11)


def lowered_program(function, *arrays, mesh=MESH, kind='gpu'):
  """What a device does in a function of arrays, each with its shape, dtype and how its dimensions are split."""
  mesh = abstract_mesh(mesh, kind)
  structs = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*split))) for shape, dtype, split in arrays
  ]
  with jax.sharding.use_abstract_mesh(mesh), pretend_cudnn_for_plans():
    return local_program(lower_without_devices(jax.jit(function).trace(*structs), kind))


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
  assert all(p.is_attention and p.dtype == 'bf16' and p.count == 1 for p in program.products)
  one, sums = 2 * B * T * N * H / devices, 4 * B * T * N / devices  # Bytes of queries, and of what softmax keeps.
  mask = 2 * B * T * T / mesh['data'] if packed else 0  # A bias, which heads share.
  assert forward.bytes == 4 * one + sums + mask
  gradients = 1 if COMPUTES_GRADIENT_OF_MASK else 0
  assert backward.bytes == 8 * one + sums + mask * (1 + gradients)
  assert program.collectives == ()
  # What the forward pass keeps, the mask and the gradient of the result: never the logits of all heads.
  assert one + sums + mask <= program.temporaries <= 3 * one + sums + 2 * mask


# ---------------------------------------------------------------- what is stored


def test_sums_of_what_goes_through_layers_are_stored_once_each():
  size = 4 * 64 * 64

  def layers(x, w, count):
    for _ in range(count):
      x = x + jnp.sin(x @ w)
    return x @ w

  array = ((64, 64), jnp.float32, ())
  few, many = (lowered_program(lambda x, w, n=n: layers(x, w, n), array, array, mesh={'data': 1}) for n in (2, 12))
  assert few.temporaries == many.temporaries <= 3 * size
  assert sum(f.bytes for f in many.fusions) == 12 * 3 * size  # Each reads x and its product, and writes their sum.


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


def test_a_loop_without_a_known_count_is_named():
  def until_small(x):
    return jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: jnp.tanh(x @ x), x)

  program = lowered_program(until_small, ((64, 64), jnp.float32, ()), mesh={'data': 1})
  (name,) = program.unknown_loops
  assert name.endswith('while') and [p.count for p in program.products] == [1]


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
