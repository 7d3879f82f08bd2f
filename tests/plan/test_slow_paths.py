"""Slow paths of a step: each kind is planted, and named with its layer, its time and the field that changes it."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp
import pytest
from small_lm import small_lm

from praxis_lite.common.accelerators import ACCELERATORS
from praxis_lite.common.config import Config
from praxis_lite.instruments.explain import check
from praxis_lite.instruments.explain.report import task_and_inputs
from praxis_lite.instruments.plan import format_plan, plan
from praxis_lite.instruments.plan.cost import cost_of
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.slow_operations import find_slow_operations
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.layers import Linear, MoeFeedForward, MultiHeadAttention
from praxis_lite.runs.loop import run_description
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.slow_paths import SlowPath, describe_slow_paths, find_slow_paths


def slow_paths(config, x, chip='h100', num_devices=1, **arguments):
  layer, accelerator = config.set(name='layer').instantiate(), ACCELERATORS[chip]
  variables = jax.eval_shape(lambda: layer.init(jax.random.key(0)))

  def loss(variables, x):
    return jnp.sum(layer.apply(variables, x, **arguments)[0].astype(jnp.float32))

  with jax.sharding.use_abstract_mesh(abstract_mesh({'data': num_devices}, accelerator.kind)):
    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(variables, x)
  return find_slow_paths(jaxpr, layer, accelerator, num_devices)


def attention(implementation, length=2048, **fields):
  config = Config(MultiHeadAttention, input_dims=64, num_heads=2, dims_per_head=32, fprop_dtype=jnp.bfloat16)
  config.set(implementation=implementation, causal=True, logit_soft_cap=30.0, **fields)
  return config, jax.ShapeDtypeStruct((1, length, 64), jnp.bfloat16)


def test_attention_that_writes_its_logits():
  (found,) = slow_paths(*attention('dense'))
  size = 2 * 2048 * 2048 * (4 + 2)  # Of logits in float32, and of the gradients of probabilities in bfloat16.
  assert found.what.startswith('attention moves') and found.remedy == "set implementation to 'auto', or 'blockwise'"
  assert found.seconds == pytest.approx(4 * size / ACCELERATORS['h100'].bandwidth)
  assert slow_paths(*attention('blockwise')) == []
  assert slow_paths(*attention('dense', length=512)) == []


def experts(implementation, num_experts=8):
  config = Config(MoeFeedForward, input_dims=32, hidden_dims=64, num_experts=num_experts, fprop_dtype=jnp.bfloat16)
  config.set(num_experts_per_token=1, dispatch='dropless', grouped_matmul=implementation)
  return config, jax.ShapeDtypeStruct((2, 64, 32), jnp.bfloat16)


def test_an_expanded_grouped_product():
  found = [slow for slow in slow_paths(*experts('xla')) if 'groups' in slow.what]
  assert found and found[0].what == 'XLA multiplies every row by the weights of all 8 groups'
  assert found[0].remedy == "set grouped_matmul to 'auto'" and found[0].seconds > 0
  for config, x, chip in ((*experts('blocks'), 'h100'), (*experts('xla'), 'v5p'), (*experts('xla', 1), 'h100')):
    assert not any('groups' in slow.what for slow in slow_paths(config, x, chip))


def linear(dtype):
  return Config(Linear, input_dims=64, output_dims=32, fprop_dtype=dtype), jax.ShapeDtypeStruct((128, 64), dtype)


def test_a_product_in_float32():
  (found,) = slow_paths(*linear(jnp.float32), num_devices=2)
  chip = ACCELERATORS['h100']
  flops = 3 * 2 * 128 * 64 * 32 / 2  # Of each device.
  assert found.seconds == pytest.approx(flops / chip.peak('f32') - flops / chip.peak('bf16'))
  assert (found.what, found.remedy) == ('products of float32', "set fprop_dtype to 'bfloat16'")
  assert slow_paths(*linear(jnp.bfloat16)) == []
  assert slow_paths(*linear(jnp.float32), chip='v5p') == []  # There, XLA takes one product of bfloat16.
  assert slow_paths(*linear(jnp.float32), chip='cpu') == []


@pytest.mark.slow
def test_plan_and_check_name_them_with_their_layers(monkeypatch):
  config = small_lm((1, 1, 1), hidden_dims=1 << 14)
  config.datasets[0].set(batch_size=1 << 12)
  found = plan(config, None, 'h100:1', compile=False)
  assert found.slow_paths[0].layer.startswith('lm.') and found.slow_paths[0].what == 'products of float32'
  assert list(found.slow_paths) == sorted(found.slow_paths, key=lambda slow: -slow.seconds)
  assert f'slow path: {found.slow_paths[0].layer}: products of float32' in format_plan(found)
  assert plan(config, None, 'cpu:1', compile=False).slow_paths == ()
  assert plan(small_lm((1, 1, 1)), None, 'h100:1', compile=False).slow_paths == ()  # It is too small to matter.
  module = importlib.import_module('praxis_lite.instruments.explain.check')
  monkeypatch.setattr(module, 'device_kind', lambda: 'NVIDIA H100 80GB HBM3')
  kinds = [(problem.kind, problem.remedy) for problem in check(config)]
  assert ('slow path', "set fprop_dtype to 'bfloat16'") in kinds


def test_the_first_lines_of_train_name_them(monkeypatch):
  config = small_lm((1, 1, 1))
  task, inputs = task_and_inputs(config)
  monkeypatch.setattr(run_description, 'accelerator_of', lambda kind: ACCELERATORS['h100'])
  partitioned = PartitionedTask(task, inputs, mesh=task.create_mesh(jax.devices()[:1]))
  lines = list(run_description.describe_run(config, task, partitioned, '', None))
  (line,) = [line for line in lines if line.startswith('slow path: ')]
  assert 'layers, such as lm.' in line and 'products of float32' in line


# ---------------------------------------------------------------- compiled steps

_COMPILED = """HloModule step, is_scheduled=true

%body (p: (s32[], f32[512,4096])) -> (s32[], f32[512,4096]) {
  %p = (s32[], f32[512,4096]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[512,4096]{1,0} get-tuple-element(%p), index=1
  %row = f32[512,4096]{1,0} negate(%x)
  ROOT %t = (s32[], f32[512,4096]{1,0}) tuple(%i, %row)
}

%cond (q: (s32[], f32[512,4096])) -> pred[] {
  %q = (s32[], f32[512,4096]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%turned (c: f32[4096,512]) -> bf16[512,4096] {
  %c = f32[4096,512]{1,0} parameter(0)
  %b = bf16[4096,512]{1,0} convert(%c)
  ROOT %a = bf16[512,4096]{1,0} transpose(%b), dimensions={1,0}
}

ENTRY %main (w: f32[4096,512], v: f32[4096,512], k: s8[9,9,4,4], z: s8[8,99,99,4]) -> f32[512,4096] {
  %w = f32[4096,512]{1,0} parameter(0), metadata={op_name="state.mdl_vars['lm']['out']['w']"}
  %v = f32[4096,512]{1,0} parameter(1), metadata={op_name="state.opt_states['lm']['out']['w']"}
  %k = s8[9,9,4,4]{3,2,1,0} parameter(2)
  %z = s8[8,99,99,4]{3,2,1,0} parameter(3)
  %one = bf16[512,4096]{1,0} fusion(%w), kind=kInput, calls=%turned, metadata={op_name="jit(step)/lm/out/dot_general"}
  %two = f32[4096,512]{0,1} copy(%w), metadata={op_name="jit(step)/lm/out/dot_general"}
  %same = f32[4096,512]{1,0} copy(%w), metadata={op_name="jit(step)/lm/ff/add"}
  %slot = f32[4096,512]{0,1} copy(%v), metadata={op_name="jit(step)/lm/ff/add"}
  %conv = s32[8,91,91,4]{3,2,1,0} convolution(%z, %k), window={size=9x9}, dim_labels=b01f_01io->b01f, metadata={op_name="jit(step)/lm/conv/conv_general_dilated"}
  %n = s32[] constant(0)
  %y = f32[512,4096]{1,0} bitcast(%two)
  %s = (s32[], f32[512,4096]{1,0}) tuple(%n, %y)
  %l = (s32[], f32[512,4096]{1,0}) while(%s), condition=%cond, body=%body, metadata={op_name="jit(step)/lm/emb/gather"}
  ROOT %r = f32[512,4096]{1,0} get-tuple-element(%l), index=1
}
"""  # noqa: E501


def test_gathers_convolutions_and_weights_that_a_compiled_step_computes_slowly():
  topology, names = parse_topology('h100:1'), LayerNames([('lm', part) for part in ('out', 'ff', 'conv', 'emb')])
  program = parse(_COMPILED)
  cost = cost_of(program, topology.target, Links(topology), layers=names)
  seconds = {op.name: op.count * op.seconds for op in cost.operations}
  found = {slow.layer: slow for slow in find_slow_operations(program, cost, names, 'gpu')}
  assert {layer: slow.what for layer, slow in found.items()} == {
    'lm.out': 'each step transposes the weight lm.out.w',
    'lm.conv': 'a convolution is no call of cuDNN',
    'lm.emb': 'XLA makes a loop of a gather',
  }
  assert found['lm.out'].seconds == pytest.approx(seconds['one'] + seconds['two'])
  assert found['lm.emb'].seconds == seconds['row'] and found['lm.conv'].seconds == seconds['conv']
  assert {slow.layer for slow in find_slow_operations(program, cost, names, 'tpu')} == {'lm.out', 'lm.emb'}
  assert find_slow_operations(program, cost, names, 'cpu') == []


def test_layers_with_the_same_slow_path_share_a_line():
  found = [SlowPath('ff.up', 'products of float32', 0.002, 'cast'), SlowPath('attention', 'logits', 0.0015, 'fuse')]
  found += [SlowPath('ff.down', 'products of float32', 0.001, 'cast')]
  assert list(describe_slow_paths(found)) == [
    'slow path: 2 layers, such as ff.up: products of float32, 3 ms of a step; cast',
    'slow path: attention: logits, 1.5 ms of a step; fuse',
  ]
  assert list(describe_slow_paths([])) == []
