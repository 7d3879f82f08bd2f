"""What a step is by default on a GPU, in programs traced for one: no device is needed."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from praxis_lite.common.config import Config
from praxis_lite.instruments.plan.compilers import pretend_cudnn_for_plans
from praxis_lite.layers import MultiHeadAttention, Sequential, StackedTransformer, TransformerBlock
from praxis_lite.models import transformer_lm
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.weights import WeightHParams
from praxis_lite.training.learning import Learner

B, T, D, V = 2, 256, 32, 64


def gradient_program(platform, size=1, packed=False, **fields):
  """The gradient of a language model of two layers, traced for a mesh of this platform and size."""
  config = transformer_lm(vocab_size=V, model_dims=D, num_layers=2, num_heads=2, fprop_dtype=jnp.bfloat16)
  config.lm_tpl.transformer_tpl.set(**fields)
  model = config.set(packed=packed).instantiate()
  batch = {name: jax.ShapeDtypeStruct((B, T), jnp.int32) for name in ('ids', 'labels', 'segment_ids', 'segment_pos')}
  batch['weights'] = jax.ShapeDtypeStruct((B, T), jnp.float32)
  variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))

  def loss(variables, batch):
    return model.apply(variables, batch)[0][0]['loss'][0]

  with jax.sharding.use_abstract_mesh(abstract_mesh({'data': size}, platform)), pretend_cudnn_for_plans():
    return str(jax.make_jaxpr(jax.grad(loss))(variables, batch))


@pytest.mark.parametrize('packed', [False, True])
def test_attention_is_the_fused_kernel_and_runs_once_forward(packed):
  program = gradient_program('gpu', packed=packed)
  assert program.count('dot_product_attention_fwd_wrapper[') == 1  # In the body of the loop: none is computed again.
  assert program.count('dot_product_attention_bwd_wrapper[') == 1
  assert f'{B},2,{T},{T}]' not in program  # No logits of all heads.


@pytest.mark.parametrize('implementation', ['auto', 'dense'])
@pytest.mark.parametrize(
  'fields',
  [{'sliding_window': 128, 'logit_soft_cap': 50.0}, {'logit_soft_cap': 50.0}, {'dropout_rate': 0.1}, {'dims': 144}],
  ids=['window and soft cap', 'soft cap', 'dropout', 'large heads'],
)
def test_attention_that_cudnn_refuses_holds_no_logits(fields, implementation):
  length, dims = 2048, fields.get('dims', 64)
  config = Config(MultiHeadAttention, input_dims=2 * dims, num_heads=2, num_kv_heads=1, causal=True)
  config.set(dims_per_head=dims, fprop_dtype=jnp.bfloat16, implementation=implementation)
  layer = config.set(**{name: value for name, value in fields.items() if name != 'dims'}).instantiate()
  x = jax.ShapeDtypeStruct((1, length, 2 * dims), jnp.bfloat16)
  variables = jax.eval_shape(lambda: layer.init(jax.random.key(0)))
  with jax.sharding.use_abstract_mesh(abstract_mesh({'data': 1}, 'gpu')), pretend_cudnn_for_plans():
    loss = jax.grad(lambda v, x: jnp.sum(layer.apply(v, x, key=jax.random.key(1))[0].astype(jnp.float32)), (0, 1))
    program = str(jax.make_jaxpr(loss)(variables, x))
  largest = max(math.prod(map(int, dims.split(','))) for dims in re.findall(r'\b\w+\[([\d,]+)\]', program))
  assert (largest < length * length) == (implementation == 'auto')


def test_a_single_gpu_has_no_loop_over_layers_and_several_have():
  assert re.findall(r'unroll=(\d)', gradient_program('gpu')) == ['2', '2']  # Forward and backward.
  for program in (gradient_program('gpu', size=2), gradient_program('cpu')):
    assert re.findall(r'unroll=(\d)', program) == ['1', '1']


def test_norms_and_activations_are_computed_again():
  """Kept of a layer are its input and results of products, in bfloat16."""
  kept = gradient_program('gpu', size=2)
  assert f'f32[2,{B},{T},{D}]' not in kept and f'f32[2,{B},{T},{D}]' in gradient_program('gpu', size=2, remat='none')
  assert f'bf16[2,{B},{T},{D}]' in kept


def trace_gradient(kind, rows, length=64, devices=1, stacked=False, **fields):
  """The gradient of a model of two layers of 128 dims, traced for a GPU of this kind, as text."""
  config = transformer_lm(
    vocab_size=V, model_dims=128, num_layers=2, num_heads=2, fprop_dtype=jnp.bfloat16, repeat=not stacked
  )
  config.lm_tpl.transformer_tpl.set(**fields)
  model = config.set(packed=False).instantiate()
  batch = {name: jax.ShapeDtypeStruct((rows, length), jnp.int32) for name in ('ids', 'labels')}
  batch['weights'] = jax.ShapeDtypeStruct((rows, length), jnp.float32)
  variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))

  def loss(variables, batch):
    return model.apply(variables, batch)[0][0]['loss'][0]

  with jax.sharding.use_abstract_mesh(abstract_mesh({'data': devices}, 'gpu', kind)), pretend_cudnn_for_plans():
    return str(jax.make_jaxpr(jax.grad(loss))(variables, batch))


@pytest.mark.parametrize('stacked', [False, True])
def test_a_single_gpu_with_room_keeps_all_activations(stacked):
  """A token of a layer needs about 1.5 x 12.1 x 128 values in 2 bytes, so 0.65 x 80 GiB are enough for 6 million."""
  h100 = functools.partial(trace_gradient, 'NVIDIA H100 80GB HBM3', stacked=stacked)
  assert 'Remat._saveable' not in h100(8) and 'Remat._saveable' in h100(8, remat='products')
  assert 'Remat._saveable' not in h100(40_000) and 'Remat._saveable' in h100(100_000)
  assert 'Remat._saveable' in trace_gradient('a GPU that is not known', 8, stacked=stacked)
  assert 'Remat._saveable' in trace_gradient('NVIDIA H100 80GB HBM3', 8, devices=2, stacked=stacked)
  if not stacked:
    assert 'Remat._saveable' in h100(8, unroll=1)  # A loop copies what is kept into stacks, and out of them.


@pytest.mark.parametrize('num_layers, is_kept', [(4, True), (8, False)])
def test_the_stacks_of_a_model_share_the_memory(num_layers, is_kept):
  """One stack of 8 layers would fit into 0.65 x 80 GiB; two of them do not."""
  D, rows, length = 4096, 8, 2048
  block = Config(TransformerBlock, input_dims=D, num_heads=32, hidden_dims=11008)
  stack = Config(StackedTransformer, num_layers=num_layers, layers_tpl=block, fprop_dtype=jnp.bfloat16)
  two = Config(Sequential, layers_tpl=(stack, stack)).instantiate()
  x = jax.ShapeDtypeStruct((rows, length, D), jnp.bfloat16)

  def program(layer):
    variables = jax.eval_shape(lambda: layer.init(jax.random.key(0)))
    mesh = abstract_mesh({'data': 1}, 'gpu', 'NVIDIA H100 80GB HBM3')
    with jax.sharding.use_abstract_mesh(mesh), pretend_cudnn_for_plans():
      return str(jax.make_jaxpr(lambda v, x: layer.apply(v, x)[0])(variables, x))

  assert 'Remat._saveable' not in program(stack.instantiate())
  assert ('Remat._saveable' not in program(two)) == is_kept


@pytest.mark.parametrize('platform, branches', [('gpu', 0), ('cpu', 1)])
def test_a_step_that_is_not_finite_is_masked_on_a_gpu(platform, branches):
  weights = {'w': WeightHParams((4, 4))}
  learner = Config(Learner, optimizer=Config(optax.adamw)).instantiate().bind(weights)
  params = {'w': jnp.ones((4, 4))}
  state = learner.init(params)

  def update(params, state, gradient, loss):
    out = learner.update({'w': gradient}, loss, params, state, None, jnp.int32(0))
    return out.mdl_vars, out.opt_states, out.stats['skipped']

  with jax.sharding.use_abstract_mesh(abstract_mesh({'data': 1}, platform)):
    traced = jax.jit(update).trace(params, state, params['w'], jnp.float32(0))
  assert str(traced.jaxpr).count('cond[') == branches
  if platform == 'gpu':  # What was traced for it is computed here all the same.
    run = jax.extend.core.jaxpr_as_fun(traced.jaxpr)
    for bad, skipped in ((jnp.nan, 1), (0.5, 0)):
      leaves = jax.tree.leaves((params, state, jnp.full((4, 4), bad), jnp.float32(0)))
      *changed, flag = run(*leaves)
      same = all(bool(jnp.array_equal(a, b)) for a, b in zip(changed, leaves))
      assert flag == skipped and same == bool(skipped)
