"""What compiled programs cost, against counts by hand."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from praxis_lite.instruments.plan.cost import cost_of
from praxis_lite.instruments.plan.hlo import device_groups, parse
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.memory import live_memory
from praxis_lite.instruments.plan.targets import find_target
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.instruments.plan.work import CountedProduct, operation_seconds
from praxis_lite.instruments.testing import collectives


def cost(program, topology='cpu:1', **more):
  topology = parse_topology(topology)
  return cost_of(parse(program), topology.target, Links(topology), **more)


def compiled(fn, *shapes, dtype=jnp.float32):
  return jax.jit(fn).lower(*[jax.ShapeDtypeStruct(s, dtype) for s in shapes]).compile()


def test_nested_loops_run_as_often_as_their_counts_multiply():
  def inner(x, w):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)[0], None

  found = cost(compiled(lambda x, ws: jax.lax.scan(inner, x, ws)[0], (8, 16), (3, 16, 16)))
  assert found.flops == 3 * 5 * 2 * 8 * 16 * 16
  assert not found.unknown_loops


def test_collectives_of_nested_loops_run_as_often_too():
  mesh = jax.make_mesh((8,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))

  def summed(h, _):
    return jax.lax.psum(jnp.sin(h), 'data'), None

  def inner(h, _):
    return jax.lax.scan(summed, h, None, length=5)[0], None

  fn = jax.shard_map(
    lambda h: jax.lax.scan(inner, h, None, length=3)[0],
    mesh=mesh,
    in_specs=jax.sharding.PartitionSpec(),
    out_specs=jax.sharding.PartitionSpec(),
  )
  (reduced,) = cost(compiled(fn, (64, 16)), 'cpu:8', mesh={'data': 8}).collectives
  assert (reduced.kind, reduced.count, reduced.axes) == ('all-reduce', 3 * 5, ('data',))
  assert reduced.fast_bytes == 2 * 7 / 8 * 4 * 64 * 16


def test_a_loop_of_unknown_length_counts_once_and_is_named():
  program = compiled(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: jnp.sin(x @ x), x), (16, 16))
  found = cost(program)
  assert found.flops == 2 * 16**3
  assert len(found.unknown_loops) == 1


def test_of_two_branches_the_longer_counts():
  def fn(x):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x @ x) @ x, lambda: x)

  assert cost(compiled(fn, (64, 64))).flops == 2 * 2 * 64**3


def convolution(x, k, **options):
  return jax.lax.conv_general_dilated(x, k, padding='SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC'), **options)


def test_convolutions_count_the_elements_that_meet():
  x, k = (2, 8, 8, 4), (3, 3, 4, 6)
  # At the border, a third of the kernel is over padding.
  assert cost(compiled(lambda x, k: convolution(x, k, window_strides=(1, 1)), x, k)).flops == 2 * 2 * 22 * 22 * 4 * 6
  strided = compiled(lambda x, k: convolution(x, k, window_strides=(2, 2)), x, k)
  assert cost(strided).flops == 2 * 2 * 11 * 11 * 4 * 6
  grouped = compiled(lambda x, k: convolution(x, k, window_strides=(1, 1), feature_group_count=2), x, (3, 3, 2, 6))
  assert cost(grouped).flops == 2 * 2 * 22 * 22 * 2 * 6


def test_bytes_of_a_slice_and_of_an_update_in_place_are_those_of_the_part():
  n = 1 << 14

  def scanned(x, ws):
    return jax.lax.scan(lambda h, w: (h + w, h * 2), x, ws)

  found = cost(compiled(scanned, (n,), (64, n)))
  part = 4 * n  # Of each array, in a round; whole arrays would be 64 of them.
  assert 64 * 5 * part <= found.bytes <= 64 * 9 * part
  assert cost(compiled(lambda x: x + 1, (n,))).bytes == 2 * 4 * n


# Parts of programs as the compilers of TPU and GPU print them; the machine of the tests has neither.

_LOOP = """HloModule step, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8,8]{1,0:T(8,128)S(1)} get-tuple-element(%p), index=1
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %y = f32[8,8]{1,0:T(8,128)} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %out = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)S(1)}) tuple(%next, %y)
}

%condition (p.1: (s32[], f32[8,8])) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  %p.1 = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %bound), direction=LT
}

ENTRY %main (x.1: f32[8,8]) -> f32[8,8] {
  %x.1 = f32[8,8]{1,0:T(8,128)} parameter(0)
  %two = s32[]{:T(128)} constant(2)
  %start = s32[]{:T(128)} copy(%two)
  %init = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)}) tuple(%start, %x.1)
  %loop = (s32[]{:T(128)}, f32[8,8]{1,0:T(8,128)S(1)}) while(%init), condition=%condition, body=%body
  ROOT %result = f32[8,8]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def test_a_tpu_loop_runs_from_its_start_to_the_bound_of_its_condition():
  found = cost(_LOOP, 'v5e:2x4')
  assert found.flops == (7 - 2) * 2 * 8**3
  # What is in the vector memory is not read from the main one.
  (product,) = (op for op in found.operations if op.flops)
  assert (product.count, product.bytes) == (5, 4 * 8 * 8)


_NESTED = """HloModule step, is_scheduled=true, num_partitions=8

%row (all: f32[64,1024], i: s32[]) -> f32[1,1024] {
  %all = f32[64,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %one = f32[1,1024]{1,0} dynamic-slice(%all, %i, %zero), dynamic_slice_sizes={1,1024}
}

%put (into: f32[64,1024], part: f32[1,1024], k: s32[]) -> f32[64,1024] {
  %into = f32[64,1024]{1,0} parameter(0)
  %part = f32[1,1024]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %none = s32[] constant(0)
  ROOT %new = f32[64,1024]{1,0} dynamic-update-slice(%into, %part, %k, %none)
}

%both (x: f32[64,1024], n: s32[], y: f32[64,1024]) -> f32[64,1024] {
  %x = f32[64,1024]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %y = f32[64,1024]{1,0} parameter(2)
  %read = f32[1,1024]{1,0} fusion(%x, %n), kind=kLoop, calls=%row
  ROOT %wrote = f32[64,1024]{1,0} fusion(%y, %read, %n), kind=kLoop, calls=%put
}

ENTRY %main (a: f32[64,1024], j: s32[], b: f32[64,1024]) -> f32[64,1024] {
  %a = f32[64,1024]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %b = f32[64,1024]{1,0} parameter(2)
  ROOT %r = f32[64,1024]{1,0} fusion(%a, %j, %b), kind=kLoop, calls=%both
}
"""


def test_a_fusion_in_a_fusion_moves_only_the_part_that_it_slices_or_updates():
  index = 2 * 4  # Both read it.
  assert cost(_NESTED, 'v5e:2x4').bytes == pytest.approx(2 * 4 * 1024, abs=index)


@pytest.mark.parametrize(('step', 'trips'), [(1, 5), (2, 3), (5, 1)])
def test_a_tpu_loop_that_is_unrolled_counts_in_larger_steps(step, trips):
  assert cost(_LOOP.replace('constant(1)', f'constant({step})'), 'v5e:2x4').flops == trips * 2 * 8**3
  # So does one whose counter is one of several results of a fusion.
  fused = _LOOP.replace(
    '%body (p:',
    """%counted (k: s32[], z: f32[8,8]) -> (f32[8,8], s32[]) {
  %z = f32[8,8]{1,0} parameter(1)
  %k = s32[] parameter(0)
  %by = s32[] constant(STEP)
  %sum = s32[] add(%k, %by)
  ROOT %both = (f32[8,8]{1,0}, s32[]) tuple(%z, %sum)
}

%body (p:""".replace('STEP', str(step)),
  ).replace(
    '%next = s32[]{:T(128)} add(%i, %one)',
    """%pair = (f32[8,8]{1,0}, s32[]) fusion(%i, %x), kind=kLoop, calls=%counted
  %next = s32[]{:T(128)} get-tuple-element(%pair), index=1""",
  )
  assert cost(fused, 'v5e:2x4').flops == trips * 2 * 8**3


_FUSIONS = """HloModule step, is_scheduled=true, num_partitions=8

%start (a: bf16[4,8]) -> (bf16[4,8], bf16[8,8]) {
  %a = bf16[4,8]{1,0} parameter(0)
  %g = bf16[8,8]{1,0} all-gather(%a), channel_id=7, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
  ROOT %c = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%carry (b: bf16[4,8], m: bf16[512,512]) -> bf16[512,512] {
  %b = bf16[4,8]{1,0} parameter(0)
  %m = bf16[512,512]{1,0} parameter(1)
  %g.1 = bf16[8,8]{1,0} all-gather(%b), channel_id=7, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
  ROOT %d = bf16[512,512]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%end (e: bf16[4,8]) -> bf16[8,8] {
  %e = bf16[4,8]{1,0} parameter(0)
  %g.2 = bf16[8,8]{1,0} all-gather(%e), channel_id=7, replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
  ROOT %f = bf16[8,8]{1,0} custom-call(%e, %g.2), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[4,8], y: bf16[512,512]) -> bf16[8,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[512,512]{1,0} parameter(1)
  %s = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) fusion(%x), kind=kCustom, calls=%start
  %p = bf16[512,512]{1,0} fusion(%x, %y), kind=kOutput, calls=%carry
  %z = bf16[4,8]{1,0} get-tuple-element(%s), index=0
  ROOT %r = bf16[8,8]{1,0} fusion(%z), kind=kCustom, calls=%end
}
"""


def test_a_collective_that_tpu_fusions_carry_on_counts_once_and_is_overlapped():
  assert collectives(_FUSIONS)['all-gather'] == type(collectives(_FUSIONS)['all-gather'])(1, 128)
  (gather,) = cost(_FUSIONS, 'v5e:2x4', mesh={'replica': 2, 'data': 2, 'mdl': 2}).collectives
  assert (gather.count, gather.result_bytes, gather.axes, gather.group_size) == (1, 128, ('data',), 2)
  assert gather.exposed < gather.seconds


# The same, but it is carried on in a loop, between its start and its end.
_CARRIED = _FUSIONS.replace(
  'ENTRY %main',
  """%body (t: (s32[], bf16[4,8], bf16[512,512])) -> (s32[], bf16[4,8], bf16[512,512]) {
  %t = (s32[], bf16[4,8]{1,0}, bf16[512,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %u = bf16[4,8]{1,0} get-tuple-element(%t), index=1
  %v = bf16[512,512]{1,0} get-tuple-element(%t), index=2
  %w = bf16[512,512]{1,0} fusion(%u, %v), kind=kOutput, calls=%carry
  ROOT %o = (s32[], bf16[4,8]{1,0}, bf16[512,512]{1,0}) tuple(%i, %u, %w)
}

%condition (c: (s32[], bf16[4,8], bf16[512,512])) -> pred[] {
  %c = (s32[], bf16[4,8]{1,0}, bf16[512,512]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main""",
).replace(
  '%p = bf16[512,512]{1,0} fusion(%x, %y), kind=kOutput, calls=%carry',
  """%k = (s32[], bf16[4,8]{1,0}, bf16[512,512]{1,0}) tuple(%x, %x, %y)
  %p = (s32[], bf16[4,8]{1,0}, bf16[512,512]{1,0}) while(%k), condition=%condition, body=%body, """
  'backend_config={"known_trip_count":{"n":"9"}}',
)


def test_a_collective_that_a_loop_carries_on_counts_once_too():
  assert collectives(_CARRIED)['all-gather'].count == 1
  found = cost(_CARRIED, 'v5e:2x4')
  assert [op.count for op in found.operations if op.flops] == [9]
  assert [(c.name, c.count) for c in found.collectives] == [('g', 1)]
  assert found.exposed_seconds < found.collectives[0].seconds


_SHIFTS = """HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[1024,1024]) -> (bf16[1024,1024], bf16[1024,1024]) {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %a = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %b = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) collective-permute-start(%x), source_target_pairs={{1,0},{2,1},{3,2},{0,3}}
  %c = bf16[1024,1024]{1,0} collective-permute-done(%a)
  %d = bf16[1024,1024]{1,0} collective-permute-done(%b)
  ROOT %r = (bf16[1024,1024]{1,0}, bf16[1024,1024]{1,0}) tuple(%c, %d)
}
"""  # noqa: E501


def test_shifts_in_opposite_directions_of_a_torus_go_on_at_the_same_time():
  on_torus, of_host = cost(_SHIFTS, 'v5p:2x2x2'), cost(_SHIFTS, 'h100:1x8')
  once = on_torus.collectives[0].seconds
  assert on_torus.exposed_seconds == pytest.approx(once)
  assert of_host.exposed_seconds == pytest.approx(2 * of_host.collectives[0].seconds)


_GPU = """HloModule step, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[64,32], w: bf16[32,128]) -> bf16[64,128] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[16,128]{1,0} parameter(1)
  %s = ((bf16[16,128]{1,0}), (bf16[32,128]{1,0})) all-gather-start(%w), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
  %n = bf16[64,32]{1,0} negate(%x)
  %d = bf16[32,128]{1,0} all-gather-done(%s)
  %g = (bf16[64,128]{1,0}, s8[4096]{0}) custom-call(%n, %d), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %q = bf16[2,64,8,16]{3,2,1,0} parameter(2)
  %a = (bf16[2,64,8,16]{3,1,2,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","8","64","64"]},"mask_type":"CAUSAL"}}
  ROOT %r = bf16[64,128]{1,0} get-tuple-element(%g), index=0
}
"""  # noqa: E501


def test_a_gpu_start_counts_its_result_and_library_calls_their_flops():
  assert collectives(_GPU)['all-gather'].bytes == 2 * 32 * 128
  found = cost(_GPU, 'h100:1x8')
  product, attention = (op.flops for op in found.operations if op.flops)
  assert product == 2 * 64 * 128 * 32
  assert attention == 2 * 2 * (2 * 8 * 64 * 64 * 16) / 2  # Two products, of which a causal mask leaves half.
  (gather,) = found.collectives
  assert gather.fast_bytes == 2 * 32 * 128 / 2
  assert 0 < gather.exposed < gather.seconds


_STREAMS = """HloModule step, is_scheduled=true

%slice (w: f32[64,256,128], i: s32[]) -> f32[1,256,128] {
  %w = f32[64,256,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %part = f32[1,256,128]{2,1,0} dynamic-slice(%w, %i, %zero, %zero), dynamic_slice_sizes={1,256,128}
}

ENTRY %main (ws: f32[64,256,128], n: s32[]) -> f32[1,256,128] {
  %ws = f32[64,256,128]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %fusion-start = ((f32[64,256,128]{2,1,0}, s32[]), f32[1,256,128]{2,1,0}, u32[]) fusion-start(%ws, %n), kind=kLoop, calls=%slice
  ROOT %fusion-done = f32[1,256,128]{2,1,0} fusion-done(%fusion-start)
}
"""  # noqa: E501


def test_a_gpu_fusion_on_a_stream_of_its_own_moves_what_it_would_move_in_order():
  found = cost(_STREAMS, 'h100:1')
  assert found.bytes == 2 * 4 * 256 * 128 + 4  # And the index; not the 64 slices of its operand.
  assert [op.opcode for op in found.operations] == ['fusion']


_KERNELS = """HloModule step, is_scheduled=true

ENTRY %main (x: bf16[64,8], w: bf16[4,8,16], s: s32[4]) -> bf16[64,16] {
  %x = bf16[64,8]{1,0} parameter(0)
  %w = bf16[4,8,16]{2,1,0} parameter(1)
  %s = s32[4]{0} parameter(2)
  %p = bf16[64,16]{1,0} custom-call(%x, %w, %s), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/ff/jvp(jit(grouped_product))/tokamax:{\\"op\\":{}}/pallas_call"}
  %g = bf16[4,8,16]{2,1,0} custom-call(%x, %p, %s), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/ff/transpose(jvp(jit(grouped_sum)))/pallas_call"}
  ROOT %o = bf16[64,16]{1,0} custom-call(%x, %w, %s), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/ff/pallas_call"}
}
"""  # noqa: E501


def test_kernels_for_grouped_products_have_the_flops_of_their_rows():
  found = cost(_KERNELS, 'h100:1', layers=LayerNames([('ff',)]))
  assert [op.flops for op in found.operations] == [2 * 64 * 8 * 16] * 2 + [0]
  assert [(op.layer, op.phase) for op in found.operations[:2]] == [('ff', 'forward'), ('ff', 'backward')]
  assert {op.bytes for op in found.operations} == {2 * (64 * 8 + 4 * 8 * 16 + 64 * 16) + 4 * 4}


def test_kernels_for_grouped_products_are_slower_than_plain_products_on_gpus():
  name = 'jit(f)/ff/jvp(jit(grouped_product))/pallas_call'
  kernel, plain = (CountedProduct(1e12, 'bf16', op_name) for op_name in (name, name.replace('pallas_call', 'dot')))
  for chip, times in (('h100', 1.25), ('v5p', 1.0)):
    one, other = (operation_seconds(find_target(chip), [product], 0.0) for product in (kernel, plain))
    assert one == pytest.approx(times * other)


def test_bytes_of_an_update_in_a_loop_are_those_of_its_slice():
  rows, n = 64, 1 << 12

  def fill(x):
    def body(i, out):
      return jax.lax.dynamic_update_slice_in_dim(out, 2 * jax.lax.dynamic_slice_in_dim(x, i, 1), i, 0)

    return jax.lax.fori_loop(0, rows, body, jnp.zeros_like(x))

  found = cost(compiled(fill, (rows, n)))
  once = 4 * rows * n  # Zeros at the start; then each row is read and written.
  assert 3 * once <= found.bytes <= 3.01 * once + rows * 64


_TPU_KERNEL = """HloModule step, is_scheduled=true, num_partitions=1

ENTRY %main (q: bf16[8,512,64]) -> bf16[8,512,64] {
  %t = s8[1,4,4]{2,1,0} constant({...})
  %q = bf16[8,512,64]{2,1,0} parameter(0)
  ROOT %a = bf16[8,512,64]{2,1,0} custom-call(%t, %q, %q, %q), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(step)/lm/splash_mha_fwd_residuals/pallas_call"}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"5000000","transcendentals":"1","bytes_accessed":"3000000"}}}
}
"""  # noqa: E501


@pytest.mark.parametrize('moved', [3000000, 100000])
def test_a_tpu_kernel_counts_what_its_author_estimates(moved):
  """More bytes than those of its operands and its result: it reads some several times. Fewer: it reads only a part."""
  text = _TPU_KERNEL.replace('3000000', str(moved))
  (found,) = [op for op in cost(text, 'v5e:1x1').operations if op.flops]
  assert (found.flops, found.bytes) == (5e6, moved)
  v5e = find_target('v5e')
  assert found.seconds == max(
    moved / (v5e.device_bandwidth * v5e.efficiency.memory), v5e.efficiency.seconds_per_operation
  )


@pytest.mark.parametrize('chip, dims, filled', [('v5e', 64, 0.5), ('v5e', 128, 1), ('v6e', 128, 0.5), ('v6e', 512, 1)])
def test_attention_takes_longer_if_its_heads_do_not_fill_the_units_for_products(chip, dims, filled):
  text = _TPU_KERNEL.replace('512,64]', f'512,{dims}]').replace('"5000000"', '"5000000000000"')
  (found,) = [op for op in cost(text, f'{chip}:1x1').operations if op.flops]
  target = find_target(chip)
  assert found.seconds == pytest.approx(5e12 / target.peak('bf16') / (target.efficiency.attention * filled))


def test_attention_of_narrow_heads_takes_longer_on_gpus_too():
  h100 = find_target('h100')
  assert h100.attention_share(64) < h100.attention_share(128) == h100.attention_share(256)


_OFFLOADED = """HloModule step, is_scheduled=true, num_partitions=8

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

%called (p: bf16[64,256]) -> bf16[8,256] {
  %p = bf16[64,256]{1,0} parameter(0)
  ROOT %r = bf16[8,256]{1,0} reduce-scatter(%p), channel_id=3, replica_groups=mesh['x'=8] {'x'}, dimensions={0}, to_apply=%sum
}

%wrapped (q: bf16[64,256]) -> bf16[8,256] {
  %q = bf16[64,256]{1,0} parameter(0)
  ROOT %c = bf16[8,256]{1,0} custom-call(%q), custom_call_target="offloaded", called_computations={%called}
}

ENTRY %main (a: bf16[64,256], m: bf16[512,512]) -> bf16[8,256] {
  %a = bf16[64,256]{1,0} parameter(0)
  %m = bf16[512,512]{1,0} parameter(1)
  %s = ((), (), (s32[16]{0})) async-start(), calls=%wrapped
  %u = ((bf16[64,256]{1,0}), bf16[8,256]{1,0}, (s32[16]{0})) async-update(%s, %a)
  %d = bf16[512,512]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = bf16[8,256]{1,0} async-done(%u)
}
"""  # noqa: E501


def test_a_collective_that_other_cores_of_a_tpu_run_is_overlapped():
  assert collectives(_OFFLOADED)['reduce-scatter'].count == 1
  (found,) = cost(_OFFLOADED, '7x:2x2x1', mesh={'data': 8}).collectives
  assert (found.kind, found.axes, found.fast_bytes) == ('reduce-scatter', ('data',), 2 * 64 * 256 * 7 / 8)
  assert found.exposed < found.seconds


def test_groups_in_all_spellings():
  listed, iota = parse(_GPU).entry.instructions[2], parse(_FUSIONS).computations['start'].instructions[1]
  assert device_groups(listed, 8) == ((0, 1), (2, 3), (4, 5), (6, 7))

  def named(axes):
    text = _GPU.replace('{{0,1},{2,3},{4,5},{6,7}}', f"mesh['a'=2,'b'=4] {axes}")
    return parse(text).entry.instructions[2]

  assert device_groups(named("{'b'}"), 8) == ((0, 1, 2, 3), (4, 5, 6, 7))
  assert device_groups(named("{'a'}"), 8) == ((0, 4), (1, 5), (2, 6), (3, 7))
  assert device_groups(named("{'b':(1)2}"), 8) == ((0, 2), (1, 3), (4, 6), (5, 7))
  assert device_groups(named("{'a','b':(2)2}"), 8) == ((0, 1, 4, 5), (2, 3, 6, 7))
  # Devices that are not in order, as a transposed count, or one by one.
  for order in ('[4,2]T(1,0)', '0,2,4,6,1,3,5,7'):
    text = _GPU.replace('{{0,1},{2,3},{4,5},{6,7}}', f"mesh['a'=2,'b'=4], device_ids=({order}) {{'b'}}")
    assert device_groups(parse(text).entry.instructions[2], 8) == ((0, 2, 4, 6), (1, 3, 5, 7))
  assert device_groups(iota, 8) == ((0, 4), (1, 5), (2, 6), (3, 7)) or device_groups(iota, 8) == (
    (0, 2),
    (4, 6),
    (1, 3),
    (5, 7),
  )


_STEP, _MODEL = 'jit(step)', 'lm/stack/while/body/closed_call'


@pytest.mark.parametrize(
  ('name', 'layer', 'phase'),
  [
    (f'{_STEP}/jvp(Model)/{_MODEL}/layers/ff/up/dot_general', 'lm.stack.layers.ff.up', 'forward'),
    (f'{_STEP}/transpose(jvp(Model))/{_MODEL}/layers/ff/up/dot_general', 'lm.stack.layers.ff.up', 'backward'),
    (
      f'{_STEP}/transpose(jvp(Model))/{_MODEL}/checkpoint/rematted_computation/layers/ff/mul',
      *('lm.stack.layers.ff', 'recomputed'),
    ),
    (f'{_STEP}/jvp(Model)/{_MODEL}/layers/(ff/up/dot:ff/gate/dot:norm/mul)', 'lm.stack.layers', 'forward'),
    (f'{_STEP}/jvp(Model)/{_MODEL}/layers/(ff/up/dot:ff/gate/dot)', 'lm.stack.layers.ff', 'forward'),
    (f'{_STEP}/cond/branch_1_fun/add', '', 'update'),
    ('', '', 'update'),
  ],
)
def test_layers_and_phases_are_found_in_the_names_of_operations(name, layer, phase):
  paths = [
    'lm',
    'lm.stack',
    'lm.stack.layers',
    'lm.stack.layers.ff',
    'lm.stack.layers.ff.up',
    'lm.stack.layers.ff.gate',
  ]
  names = LayerNames(tuple(p.split('.')) for p in [*paths, 'lm.stack.layers.norm'])
  assert (names.layer(name), names.phase(name)) == (layer, phase)


def test_names_and_links_do_not_outlive_their_plan():
  gc.freeze()  # What all tests before have left would be looked through for garbage, which takes seconds.
  names, links = LayerNames([('lm', 'ff')]), Links(parse_topology('h100:8'))
  assert names.layer('jit(step)/M/lm/ff/dot_general') == 'lm.ff' and links.hops(((0, 1),)) == 1
  references = [weakref.ref(names), weakref.ref(links)]
  del names, links
  gc.collect()
  gc.unfreeze()
  assert [reference() for reference in references] == [None, None]


_COPIED = """HloModule step, is_scheduled=true

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a = f32[8]{0} multiply(%p, %p)
  %start = (f32[8]{0:S(1)}, f32[8]{0}, u32[]) copy-start(%a)
  %b = f32[8]{0} add(%p, %p)
  %done = f32[8]{0:S(1)} copy-done(%start)
  %c = f32[8]{0} multiply(%b, %done)
  %d = f32[8]{0} add(%c, %done)
  %e = f32[8]{0} add(%d, %d)
  ROOT %r = f32[8]{0} add(%e, %e)
}
"""


def test_an_array_and_its_asynchronous_copy_are_both_live_until_the_last_use_of_the_copy():
  live, _ = live_memory(parse(_COPIED), LayerNames(()))
  assert sum(found.bytes for found in live) == 4 * 32 + 4  # a, its copy, c and d; and the context of the copy.
