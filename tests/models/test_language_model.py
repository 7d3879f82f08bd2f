"""Language models: what the loss is, what padding and packing may change, how prompts are continued, on any mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves
from praxis_lite.inputs import ChatInput
from praxis_lite.instruments.testing import collectives
from praxis_lite.layers.base.call import path_name
from praxis_lite.layers.dropout import Dropout
from praxis_lite.layers.repeat import Repeat
from praxis_lite.layers.softmax import FullSoftmax
from praxis_lite.layers.transformer_block import TransformerBlock
from praxis_lite.models import set_pipeline, set_sharding, transformer_lm
from praxis_lite.sharding import GuardedJit
from praxis_lite.sharding.specs import to_partition_spec
from praxis_lite.training.partitioned_task import partition_spmd_model
from praxis_lite.training.task import SingleTask

V, B, T = 13, 3, 8


def config(style='llama', **fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 10}
  return transformer_lm(**{**sizes, 'style': style, **fields})


def make(style='llama', **fields):
  """A model, and variables that are not nearly constant functions as the first values are."""
  return _made(style=style, **fields)


@functools.cache
def _made(**fields):
  model = config(**fields).instantiate()
  return model, jax.tree.map(lambda w: 8 * w if w.ndim > 1 else w, model.init(jax.random.key(0)))


def batch(seed=0):
  rng = np.random.default_rng(seed)
  ids = rng.integers(0, V, (B, T + 1)).astype(np.int32)
  weights = np.ones((B, T), np.float32)
  weights[1, 5:], weights[2] = 0, 0
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': weights}


def evaluate(model, variables, batch, **kwargs):
  (metrics, per_example), side = _evaluate(model, **kwargs)(variables, batch)
  return jax.tree.map(np.asarray, (metrics, per_example)), side


@functools.cache
def _evaluate(model, **kwargs):
  return jax.jit(lambda v, b: model.apply(v, b, **kwargs))


def logits(model, variables, ids):
  return np.asarray(_logits(model)(variables['lm'], ids))


@functools.cache
def _logits(model):
  return jax.jit(lambda v, ids: model.lm.apply(v, ids, do_eval=True, method='logits')[0])


def log_softmax(x):
  x = x.astype(np.float64)
  return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


# ------------------------------------------------------------------ loss


@pytest.mark.slow_cases
@pytest.mark.parametrize('style', ['llama', 'gpt2'])
def test_loss_is_the_mean_negative_log_probability_of_the_labels(style):
  model, variables = make(style=style)
  data = {**batch(), 'bytes': np.full((B, T), 3.0, np.float32)}
  (metrics, per_example), _ = evaluate(model, variables, data, do_eval=True)
  predicted = logits(model, variables, data['ids'])
  xent = -np.take_along_axis(log_softmax(predicted), data['labels'][..., None], -1)[..., 0]
  weights = data['weights']
  np.testing.assert_allclose(metrics['loss'], [(xent * weights).sum() / weights.sum(), weights.sum()], rtol=1e-5)
  np.testing.assert_allclose(
    metrics['nats_per_byte'], [(xent * weights).sum() / (3 * weights.sum()), 3 * weights.sum()], rtol=1e-5
  )
  correct = (predicted.argmax(-1) == data['labels']) * weights
  np.testing.assert_allclose(metrics['accuracy'], [correct.sum() / weights.sum(), weights.sum()], rtol=1e-5)
  np.testing.assert_allclose(per_example['loss'][:2], [xent[0].mean(), xent[1, :5].mean()], rtol=1e-5)
  assert per_example['loss'][2] == 0 and per_example['weights'].tolist() == [8, 5, 0]


@pytest.mark.parametrize('rows', [1, B, T])
def test_weights_of_rows_are_those_of_their_tokens(rows):
  model, variables = make()
  ids = np.random.default_rng(0).integers(0, V, (rows, T + 1)).astype(np.int32)
  data, weights_B = {'ids': ids[:, :-1], 'labels': ids[:, 1:]}, np.linspace(1, 2, rows, dtype=np.float32)
  by_row, _ = evaluate(model, variables, {**data, 'weights': weights_B}, do_eval=True)
  by_token, _ = evaluate(model, variables, {**data, 'weights': np.tile(weights_B[:, None], (1, T))}, do_eval=True)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), by_row, by_token)


class NoBlock(TransformerBlock):
  """For what the loss alone decides."""

  def setup(self):
    pass

  def __call__(self, x, **_):
    return x


@pytest.mark.slow
@pytest.mark.parametrize('k', [1, 3])
@pytest.mark.parametrize('partitioning', ['auto', 'shard_map'])
def test_a_weight_that_is_nan_makes_a_step_that_does_not_count(partitioning, k):
  model = config(num_layers=1, repeat=False)
  model.lm_tpl.transformer_tpl.layers_tpl = Config(NoBlock)
  task = Config(SingleTask, model=model, mesh_axis_names=('data',), ici_mesh_shape=(2,), partitioning=partitioning)
  task.train.learner.set(optimizer=Config(optax.sgd), num_microbatches=k)
  rng = np.random.default_rng(0)
  ids = rng.integers(0, V, (6, T + 1)).astype(np.int32)
  data = {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': np.ones((6, T), np.float32)}
  model = partition_spmd_model(task, jax.random.key(0), data)
  out = model.train_step(model.partitioned_train_state, jax.random.key(0), data)
  assert out.mean_metrics['skipped'][0] == 0
  data['weights'][4, 2] = np.nan
  out = model.train_step(out.state, jax.random.key(0), data)
  assert not np.isfinite(out.weighted_loss)
  assert out.mean_metrics['skipped'][0] == 1


def test_training_computes_no_accuracy():
  model, variables = make()
  (metrics, _), _ = evaluate(model, variables, batch())
  assert set(metrics) == {'loss'}


def test_nats_per_byte_of_bytes_is_the_loss():
  model = config().set(tokens_are_bytes=True).instantiate()
  (metrics, _), _ = evaluate(model, make()[1], batch())
  assert metrics['nats_per_byte'] == metrics['loss']


@functools.cache
def _loss_and_gradients(model):
  return jax.jit(jax.value_and_grad(lambda v, data: model.apply(v, data)[0][0]['loss'][0]))


@pytest.mark.parametrize('padding', [7, -1])
def test_padding_changes_neither_loss_nor_gradients(padding):
  model, variables = make()
  data = batch()

  run = functools.partial(_loss_and_gradients(model), variables)
  other = {k: np.where(data['weights'] > 0, v, padding).astype(v.dtype) for k, v in data.items() if k != 'weights'}
  expected, got = run(data), run({**other, 'weights': data['weights']})
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)


@pytest.mark.parametrize('style', ['llama', 'gpt2'])
def test_packed_segments_are_as_rows_of_their_own(style):
  model, variables = make(style=style)
  data = batch()
  lengths = [3, 5]
  packed = {k: v[:1] for k, v in data.items()} | {
    'segment_ids': np.repeat([1, 2], lengths)[None].astype(np.int32),
    'segment_pos': np.concatenate([np.arange(n) for n in lengths])[None].astype(np.int32),
  }
  (_, together), _ = evaluate(model, variables, packed)
  separate = {k: np.zeros((2, 5), v.dtype) for k, v in data.items()}
  for k, v in data.items():
    separate[k][0, :3], separate[k][1] = v[0, :3], v[0, 3:]
  (_, alone), _ = evaluate(model, variables, separate)
  np.testing.assert_allclose(together['loss'][0], np.average(alone['loss'], weights=lengths), rtol=1e-5)


def test_rows_of_one_segment_need_no_segment_ids():
  model, variables = make()
  data = batch()
  one = {
    'segment_ids': (data['weights'] > 0).astype(np.int32),
    'segment_pos': np.tile(np.arange(T, dtype=np.int32), (B, 1)),
  }
  expected, _ = evaluate(model, variables, data)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), evaluate(model, variables, {**data, **one})[0], expected
  )
  unpacked = config().set(packed=False).instantiate()
  zeros = {k: np.zeros_like(v) for k, v in one.items()}
  np.testing.assert_equal(evaluate(unpacked, variables, {**data, **zeros})[0], expected)


def test_z_loss_is_an_auxiliary_loss():
  p = config()
  p.lm_tpl.softmax_tpl.z_loss_weight = 1e-3
  model = p.instantiate()
  _, side = evaluate(model, make()[1], batch())
  assert list(side.aux_losses) == ['lm.softmax/z_loss']


# ------------------------------------------------------------------ structure


@pytest.mark.parametrize('tied', [False, True])
def test_variables_have_the_paths_of_the_layers(tied):
  model = config(tie_embeddings=tied).instantiate()
  leaves = jax.tree_util.tree_leaves_with_path(model.abstract_init())
  weights = {path_name(tuple(k.key for k in path)): w for path, w in leaves}
  assert weights['lm.transformer.layers.attention.query.w'].full_shape == (2, 12, 3, 4)
  assert weights['lm.transformer.layers.ff.gate.w'].full_shape == (2, 12, 10)
  assert weights['lm.softmax.w'].full_shape == ((V, 12) if tied else (12, V))
  assert ('lm.embedding.w' in weights) == (not tied)


def test_residual_projections_start_smaller_with_depth():
  model = config(style='gpt2', num_layers=8, model_dims=48).instantiate()
  variables = model.init(jax.random.key(0))
  layers = variables['lm']['transformer']['layers']
  for w, expected in (
    (layers['attention']['query'], 0.02),
    (layers['ff']['up'], 0.02),
    (layers['attention']['out'], 0.005),
    (layers['ff']['down'], 0.005),
  ):
    np.testing.assert_allclose(np.std(w['w']), expected, rtol=0.1)


def test_scanned_and_unrolled_blocks_compute_the_same():
  scanned, variables = make()
  unrolled = config(repeat=False).instantiate()
  transformer = variables['lm']['transformer']['layers']
  layers = {f'layers_{i}': jax.tree.map(lambda w, i=i: w[i], transformer) for i in range(2)}
  same = {'lm': {**variables['lm'], 'transformer': layers}}
  expected = logits(scanned, variables, batch()['ids'])
  np.testing.assert_allclose(logits(unrolled, same, batch()['ids']), expected, atol=1e-4)


def test_sizes_are_set_in_one_place():
  p = config()
  p.num_layers = 5
  assert p.instantiate().lm.num_layers == 5
  p.lm_tpl.num_layers = 3
  with pytest.raises(ConfigError, match=r'num_layers is 5, but .*lm_tpl\.num_layers is 3'):
    p.instantiate()
  p.num_layers = None
  assert p.instantiate().lm.num_layers == 3


def test_a_pipeline_keeps_what_is_set_on_the_scan_over_blocks():
  scan = config()
  fields = {'remat': 'save_names', 'remat_offload_names': ('context',), 'fprop_dtype': 'bfloat16', 'unroll': 2}
  scan.lm_tpl.transformer_tpl.set(**fields)
  scan.lm_tpl.transformer_tpl.weight_split_dims_mapping.stack = ('data',)
  stages = set_pipeline(scan.clone(), num_stages=2, num_microbatches=2).lm_tpl.transformer_tpl
  assert {name: getattr(stages, name) for name in fields} == fields
  assert stages.layers_tpl == scan.lm_tpl.transformer_tpl.layers_tpl
  assert stages.weight_split_dims_mapping.stages == ('stage',)
  scan.lm_tpl.transformer_tpl.sliding_windows = (4, None)
  assert set_pipeline(scan, num_stages=2, num_microbatches=2).lm_tpl.transformer_tpl.sliding_windows == (4, None)


def test_blocks_of_a_stack_in_a_stack_have_the_sizes_of_the_model():
  whole, nested = config(num_layers=6), config(num_layers=3)
  blocks = nested.lm_tpl.transformer_tpl
  blocks.layers_tpl = Config(Repeat, num_layers=2, layers_tpl=blocks.layers_tpl)
  set_pipeline(nested, num_stages=3, num_microbatches=2)
  assert nested.instantiate().total_num_params == whole.instantiate().total_num_params


def test_contradictions_are_named():
  untied = config()
  untied.lm_tpl.set(embedding_tpl=None, softmax_tpl=Config(FullSoftmax))
  with pytest.raises(ConfigError, match='a FullSoftmax has none to share'):
    untied.instantiate()
  with pytest.raises(ConfigError, match="style is 'llama' or 'gpt2', got 'bert'"):
    config(style='bert')
  short = config(style='gpt2', max_len=T - 1).instantiate()
  with pytest.raises(ConfigError, match=r'max_len: 7 is less than the sequence length, 8'):
    jax.eval_shape(lambda key: short.apply(short.init(key), batch()), jax.random.key(0))


def test_bfloat16_computes_near_float32_from_float32_weights():
  model, variables = make()
  half = config(fprop_dtype=jnp.bfloat16).instantiate()
  assert {w.dtype for w in jax.tree.leaves(jax.eval_shape(half.init, jax.random.key(0)))} == {jnp.dtype('float32')}
  (expected, _), _ = evaluate(model, variables, batch())
  (metrics, _), _ = evaluate(half, variables, batch())
  assert metrics['loss'][0].dtype == np.float32
  np.testing.assert_allclose(metrics['loss'][0], expected['loss'][0], rtol=0.02)


@pytest.mark.parametrize('style', ['gpt2', 'llama'])
def test_biases_are_off_and_on_by_one_field(style):
  def biases(use_bias):
    variables = leaves(config(style=style).set(use_bias=use_bias).instantiate().abstract_init())
    return {path[-2] for path in variables if path[-1] in ('b', 'bias')}

  assert biases(False) == set()
  linears = {'query', 'key', 'value', 'out', 'up', 'down'}
  norms = {'attention_norm', 'ff_norm', 'final_norm'}
  assert biases(True) == (linears | norms if style == 'gpt2' else linears | {'gate'})
  assert biases(None) == (biases(True) if style == 'gpt2' else set())


# ------------------------------------------------------------------ decoding

PROMPT_LENGTHS = np.array([2, 5, 1, 0], np.int32)


def prompts():
  ids = np.random.default_rng(4).integers(0, V, (4, 5)).astype(np.int32)
  return {'ids': ids, 'prompt_lengths': PROMPT_LENGTHS}


def decode(model, variables, data, seed=0):
  return jax.tree.map(np.asarray, _decode(model)(variables, data, jax.random.key(seed)))


@functools.cache
def _decode(model):
  return jax.jit(lambda v, b, key: model.apply(v, b, key=key, do_eval=True, method='decode')[0])


@pytest.mark.slow
@pytest.mark.parametrize('style', ['llama', 'gpt2'])
def test_greedy_decoding_is_the_argmax_of_the_whole_model(style):
  p = config(style=style, num_kv_heads=1, max_len=10)
  p.decoder_tpl.set(max_decode_steps=4, temperature=0.0)
  p.lm_tpl.dropout_tpl = Config(Dropout, rate=0.5)
  model = p.instantiate()
  _, variables = make(style=style, num_kv_heads=1, max_len=10)
  metrics, decoded = decode(model, variables, prompts())
  for row, length in enumerate(PROMPT_LENGTHS[:3]):
    ids = list(prompts()['ids'][row, :length])
    for step in range(4):
      padded = np.zeros((1, 9), np.int32)
      padded[0, : len(ids)] = ids
      after = log_softmax(logits(model, variables, padded)[0, len(ids) - 1])
      assert decoded['ids'][row, step] == after.argmax()
      np.testing.assert_allclose(decoded['log_probs'][row, step], after.max(), atol=1e-4)
      ids.append(after.argmax())
  assert decoded['lengths'].tolist() == [4, 4, 4, 0]
  assert metrics['decoded_length'] == (4, 3)
  np.testing.assert_allclose(metrics['log_prob'], (decoded['log_probs'].sum() / 12, 12), rtol=1e-5)


@functools.cache
def greedy(style='llama'):
  p = config(style=style)
  p.decoder_tpl.set(max_decode_steps=3, temperature=0.0)
  return p.instantiate()


@pytest.mark.parametrize('padding', [-1, 1000])
def test_padding_of_prompts_may_be_any_id(padding):
  model, variables = greedy(), make()[1]
  known = prompts()
  past = np.arange(known['ids'].shape[1]) >= known['prompt_lengths'][:, None]
  other = {**known, 'ids': np.where(past, padding, known['ids']).astype(np.int32)}
  expected, found = (decode(model, variables, batch)[1] for batch in (known, other))
  for name in ('ids', 'lengths', 'log_probs'):
    np.testing.assert_array_equal(found[name], expected[name])


def test_sampling_depends_on_the_key():
  p = config()
  p.decoder_tpl.set(max_decode_steps=8, temperature=2.0, top_k=10)
  model, variables = p.instantiate(), make()[1]
  first, again, other = (decode(model, variables, prompts(), seed)[1]['ids'] for seed in (0, 0, 1))
  np.testing.assert_array_equal(first, again)
  assert not np.array_equal(first, other)


@pytest.mark.slow
@pytest.mark.parametrize('fields, max_context', [({'style': 'gpt2', 'max_len': 7}, None), ({}, 4)])
def test_decoding_beyond_the_context_sees_the_last_tokens_only(fields, max_context):
  p = config(**fields)
  p.decoder_tpl.set(max_decode_steps=6, temperature=0.0, max_context=max_context)
  model = p.instantiate()
  variables = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
  context = max_context or 7
  assert model.context == context
  _, decoded = decode(model, variables, prompts())
  for row, length in enumerate(PROMPT_LENGTHS[:3]):
    ids = list(prompts()['ids'][row, :length])
    for step in range(6):
      seen = ids[-context:]
      padded = np.zeros((1, context), np.int32)
      padded[0, : len(seen)] = seen
      after = log_softmax(logits(model, variables, padded)[0, len(seen) - 1])
      assert decoded['ids'][row, step] == after.argmax()
      np.testing.assert_allclose(decoded['log_probs'][row, step], after.max(), atol=1e-4)
      ids.append(after.argmax())
  assert decoded['lengths'].tolist() == [6, 6, 6, 0]


# ------------------------------------------------------------------ meshes


def mesh_of(shape):
  return jax.make_mesh(shape, ('replica', 'data', 'mdl'), axis_types=(AxisType.Auto,) * 3)


def compile_on(mesh, model, fn, *arguments):
  """Compiles `fn(variables, *arguments)` with weights split as the model declares and arguments over the batch."""

  def on_mesh(*args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return fn(*args)

  def weight_sharding(w):
    return NamedSharding(mesh, to_partition_spec(w.full_split_dims_mapping, mesh.axis_names))

  weights = model.abstract_init()
  batch_sharding = NamedSharding(mesh, PartitionSpec(('replica', 'data')))
  shardings = (jax.tree.map(weight_sharding, weights), *[batch_sharding] * len(arguments))
  structs = jax.tree.map(lambda w: w.as_struct(), weights)
  return jax.jit(on_mesh, in_shardings=shardings).lower(structs, *arguments).compile()


@pytest.mark.slow
@pytest.mark.parametrize('style', ['llama', 'gpt2'])
def test_a_mesh_that_divides_nothing_trains_and_decodes_like_one_device(style):
  mesh = mesh_of((2, 2, 2))
  p = set_sharding(config(style=style)).set(mesh_axis_names=mesh.axis_names)
  p.decoder_tpl.set(max_decode_steps=3, temperature=0.0)
  model, (on_one, variables) = p.instantiate(), make(style=style)

  def on_mesh(variables, data, prompts):
    def loss(v):
      (metrics, _), _ = model.apply(v, data)
      return metrics['loss'][0]

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      (_, decoded), _ = model.apply(variables, prompts, do_eval=True, method='decode')
      return jax.value_and_grad(loss)(variables), decoded['ids']

  replicated = NamedSharding(mesh, PartitionSpec())
  got = jax.jit(on_mesh, in_shardings=replicated)(variables, batch(), prompts())
  expected = _loss_and_gradients(on_one)(variables, batch()), decode(greedy(style), variables, prompts())[1]['ids']
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, expected)


# ------------------------------------------------------------------ prefix-LM


PREFIXES = np.array([5, 2, 0], np.int32)


def prefix_lm(**fields):
  """A model, and itself without causal masks, to compute its loss with any other."""
  p = config(num_kv_heads=1, **fields)
  p.set(model_type='prefix')
  p.decoder_tpl.set(max_decode_steps=4, temperature=0.0)
  p.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.cache_page_size = 2
  blocks = p.lm_tpl.transformer_tpl.clone(num_layers=2)
  blocks.layers_tpl.set(input_dims=12, hidden_dims=10, num_heads=3, num_kv_heads=1)
  return p, blocks.instantiate()


def logits_by_hand(lm, blocks, variables, ids, prefixes):
  """With a mask written out: a token sees those up to itself, and the prefix of its row."""
  t = np.arange(ids.shape[1])
  mask = (t[None, :] <= t[:, None]) | (t < np.reshape(prefixes, (-1, 1, 1)))
  x, _ = lm.embedding.apply(variables['embedding'], ids)
  x, _ = blocks.apply(variables['transformer'], x, mask=mask[:, None])
  x, _ = lm.final_norm.apply(variables['final_norm'], x)
  return lm.softmax.apply(variables['softmax'], x, method='get_logits')[0]


@pytest.mark.slow
def test_a_prefix_lm_attends_to_its_prefix_on_one_device_and_on_a_mesh():
  """Loss and gradients, against dense attention with the mask as an array; weights of 3 heads over 2 devices."""
  p, blocks = prefix_lm()
  model, mesh = p.instantiate(), mesh_of((2, 2, 2))
  sharded = set_sharding(p.clone()).set(mesh_axis_names=mesh.axis_names).instantiate()
  _, variables = make(num_kv_heads=1)
  data = batch() | {'prefix_lengths': PREFIXES}

  def loss(variables, data, model):
    return model.apply(variables, data)[0][0]['loss'][0]

  def by_hand(variables, data):
    logits = logits_by_hand(model.lm, blocks, variables['lm'], data['ids'], PREFIXES)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, data['labels'])
    return jnp.sum(losses * data['weights']) / data['weights'].sum()

  expected, found = jax.jit(
    lambda v, data: (jax.value_and_grad(by_hand)(v, data), jax.value_and_grad(loss)(v, data, model))
  )(variables, data)

  def on_mesh(variables, data):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.value_and_grad(loss)(variables, data, sharded)

  on_mesh = GuardedJit(on_mesh)(*jax.device_put((variables, data), NamedSharding(mesh, PartitionSpec())))
  for each in found, on_mesh:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), each, expected)
  (causal, _), _ = evaluate(make(num_kv_heads=1)[0], variables, data)
  assert abs(expected[0] - causal['loss'][0]) > 1e-3, 'a causal mask makes a difference'


def test_a_prefix_lm_decodes_with_its_prompt_as_the_prefix():
  p, blocks = prefix_lm()
  model, (_, variables) = p.instantiate(), make(num_kv_heads=1)
  _, decoded = decode(model, variables, prompts())
  by_hand = jax.jit(lambda ids, length: logits_by_hand(model.lm, blocks, variables['lm'], ids, length))
  for row, length in enumerate(PROMPT_LENGTHS[:3]):
    ids = np.zeros((1, 9), np.int32)
    ids[0, :length] = prompts()['ids'][row, :length]
    for step in range(4):
      after = log_softmax(np.asarray(by_hand(ids, length))[0, length + step - 1])
      assert decoded['ids'][row, step] == after.argmax()
      np.testing.assert_allclose(decoded['log_probs'][row, step], after.max(), atol=1e-4)
      ids[0, length + step] = after.argmax()


@pytest.mark.slow
def test_a_prefix_lm_goes_on_after_tokens_that_earlier_calls_drew():
  """Only the prompt is the prefix, not the tokens that followed it."""
  p, _ = prefix_lm()
  model, (_, variables) = p.instantiate(), make(num_kv_heads=1)
  once = decode(model, variables, prompts())[1]['ids']
  lengths, ids = PROMPT_LENGTHS[:3], np.zeros((3, 16), np.int32)
  for row, length in enumerate(lengths):
    ids[row, : length + 2] = [*prompts()['ids'][row, :length], *once[row, :2]]
  again = {'ids': ids, 'prompt_lengths': lengths + 2, 'max_tokens': np.full(3, 2), 'num_drawn': np.full(3, 2)}
  np.testing.assert_array_equal(decode(model, variables, again)[1]['ids'][:, :2], once[:3, 2:4])


def test_mistakes_with_prefixes_are_named():
  model = prefix_lm()[0].instantiate()
  _, variables = make(num_kv_heads=1)
  with pytest.raises(
    ConfigError, match=r"model_type: 'prefix' needs prefix_lengths .* this one has ids, labels, weights"
  ):
    model.apply(variables, batch())
  with pytest.raises(ConfigError, match=r"model_type: expected 'causal' or 'prefix', got 'masked'"):
    config().set(model_type='masked').instantiate()
  p = prefix_lm()[0]
  p.decoder_tpl.max_context = 6
  with pytest.raises(ConfigError, match='the model sees only 6 tokens at once, and prompts of '):
    decode(p.instantiate(), variables, prompts())


def loss_collectives(mesh, num_layers):
  p = config(vocab_size=64, model_dims=32, num_heads=8, hidden_dims=64, num_layers=num_layers)
  model = set_sharding(p).set(mesh_axis_names=mesh.axis_names).instantiate()
  data = jax.tree.map(lambda x: jnp.zeros((16, T), x.dtype), batch())
  return compile_on(mesh, model, lambda v, b: model.apply(v, b)[0][0]['loss'], data)


def test_tensor_parallel_blocks_have_two_all_reduces_and_no_gathers():
  few, many = (collectives(loss_collectives(mesh_of((1, 1, 8)), n)) for n in (2, 5))
  assert many['all-reduce'].count - few['all-reduce'].count == 2 * 3
  assert many['all-gather'].count == few['all-gather'].count == 0


def test_fully_sharded_blocks_gather_weights_and_no_activations():
  few, many = (collectives(loss_collectives(mesh_of((1, 8, 1)), n)) for n in (2, 5))
  block_bytes = 4 * (4 * 32 * 32 + 3 * 32 * 64)
  assert many['all-gather'].bytes - few['all-gather'].bytes == 3 * block_bytes
  ids, table = 4 * 16 * T, 4 * 64 * 32  # That of the embedding is more than its vectors, which are exchanged instead.
  rest = few['all-gather'].bytes - 2 * block_bytes - table - ids
  assert 0 <= rest < 200
  assert few['all-to-all'].bytes == many['all-to-all'].bytes == 4 * 2 * T * 32


@pytest.mark.parametrize('packed_input', [True, False])
def test_rows_of_several_segments_need_a_packed_model(packed_input):
  """Also if each row of the first batch happens to have one segment."""
  examples = [{'prompt': 'a', 'completion': 'bc'}, {'prompt': 'd', 'completion': 'e'}]
  fields = {'name': 'chats', 'examples': examples, 'seq_len': 8, 'batch_size': 1}
  data = Config(ChatInput, packed=packed_input, **fields).instantiate()
  batch = data.get_next()
  assert batch['segment_ids'].max() == 1 + packed_input
  model = transformer_lm(vocab_size=256, model_dims=4, num_layers=1, num_heads=1, hidden_dims=4)
  model.clone().instantiate().check_input(data, batch)
  alone = model.set(packed=False).instantiate()
  if not packed_input:
    return alone.check_input(data, batch)
  for segments in (batch['segment_ids'], np.minimum(batch['segment_ids'], 1)):
    with pytest.raises(ConfigError, match=r'chats: its rows have several segments.*set task.model.packed=True, or'):
      alone.check_input(data, {**batch, 'segment_ids': segments})
