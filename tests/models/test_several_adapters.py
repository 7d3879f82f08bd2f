"""Several adapters on one base: each row that is decoded gets the tokens that it gets with its adapter alone."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import map_with_path, merge, select
from praxis_lite.layers import Dora, LatentAttention, Lora, MoeFeedForward, RotaryPositions
from praxis_lite.layers.base.call import Surroundings
from praxis_lite.layers.low_rank import LowRankUpdate
from praxis_lite.models import add_adapters, combine_adapters, merge_adapters, set_sharding, transformer_lm
from praxis_lite.models.decoding import BeamSearch
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.prompts import check_adapters
from praxis_lite.runs.serving.requests import RequestError, parse_request
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.sharding.mesh import create_device_mesh
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, AXES = 37, ('spare', 'replica', 'data', 'mdl')
# Ranks, scales and layers differ.
RULES = {
  'one': (Config(Lora, layers=r'.*\.(query|out)', rank=3), Config(Lora, layers=r'.*\.ff\.up', rank=2)),
  'two': (Config(Lora, layers=r'.*\.(query|value|down)', rank=2, alpha=1.0, rank_stabilized=True),),
}
PROMPTS = [([3, 5, 8, 2], 'two'), ([11], None), ([3, 5, 8, 4, 9, 1], 'one'), ([3, 5, 8, 2], 'one'), ([11], 'two')]


def base():
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_heads': 3, 'hidden_dims': 10, 'num_layers': 2}
  model = set_sharding(transformer_lm(**sizes))
  return model.set(decoder_tpl=model.decoder_tpl.set(max_decode_steps=8, temperature=0.0))


@functools.cache
def variables():
  """Of the base, and of each adapter."""

  def drawn(config, seed):
    values = drawn_variables(config.instantiate().abstract_init())
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda w: 9 * rng.permutation(w.reshape(-1)).reshape(w.shape) if w.ndim > 1 else w, values)

  of_base = drawn(base(), 0)
  own = {name: drawn(add_adapters(base(), *rules), i + 1) for i, (name, rules) in enumerate(RULES.items())}
  return of_base, {name: select(tree, lambda path: 'lora' in path) for name, tree in own.items()}


def combined():
  of_base, own = variables()
  config, adapters = combine_adapters(base(), {n: (add_adapters(base(), *r), own[n]) for n, r in RULES.items()})
  return config, merge(of_base, adapters)


def decode(config, values, prompts, **fields):
  """The ids that a model of this config draws."""
  model = config.set(**fields).instantiate()
  width = max(map(len, prompts))
  batch = {
    'ids': np.stack([np.pad(p, (0, width - len(p))) for p in prompts]).astype(np.int32),
    'prompt_lengths': np.array([*map(len, prompts)], np.int32),
  }

  def run(values, more):
    return model.apply(values, batch | more, key=jax.random.key(0), do_eval=True, method='decode')[0][1]['ids']

  return lambda **more: np.asarray(jax.jit(run)(values, more))


def on_mesh(mesh):
  """The base with all adapters, as a trained model on a mesh."""
  of_base, own = variables()
  task = Config(SingleTask, model=base(), mesh_axis_names=AXES, ici_mesh_shape=mesh)
  tasks = TaskOnMesh.make_for_inference(task.instantiate(), create_device_mesh(mesh, None, AXES))
  stored = tasks.layout.mdl_vars.to_mesh(of_base)
  plain = TrainedModel(ExperimentConfig(task, [], []), tasks, stored, np.int32(3), seed=1)
  return plain.attach_adapters({name: (add_adapters(base(), *rules), own[name]) for name, rules in RULES.items()})


@functools.cache
def alone(name, beams=False):
  """What all prompts become with one adapter, or with none, merged into the base."""
  of_base, own = variables()
  values = of_base
  if name is not None:
    model = add_adapters(base(), *RULES[name]).instantiate()
    values = merge_adapters(model, merge(of_base, own[name]))
  more = {'decoder_tpl': Config(BeamSearch, max_decode_steps=8, beam_size=3)} if beams else {}
  return decode(base(), values, [prompt for prompt, _ in PROMPTS], **more)()


@pytest.mark.parametrize('beams', [False, pytest.param(True, marks=pytest.mark.slow)])
def test_rows_of_a_batch_use_their_own_adapters(beams):
  config, values = combined()
  more = {'decoder_tpl': Config(BeamSearch, max_decode_steps=8, beam_size=3)} if beams else {}
  numbers = np.array([-1 if name is None else list(RULES).index(name) for _, name in PROMPTS], np.int32)
  run = decode(config, values, [prompt for prompt, _ in PROMPTS], **more)
  found = run(adapters=numbers)
  for i, (_, name) in enumerate(PROMPTS):
    np.testing.assert_array_equal(found[i], alone(name, beams)[i])
  assert len({alone(name, beams).tobytes() for name in (None, 'one', 'two')}) == 3
  np.testing.assert_array_equal(run(), alone(None, beams))  # Without `adapters`, no row uses one.


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 1, 3)])
def test_rows_of_predictions_scores_and_prompts_use_their_own_adapters(mesh):
  of_base, own = variables()
  model = on_mesh(mesh)
  names = ['one', None, 'two', 'one', 'two']
  ids = np.random.default_rng(0).integers(1, 30, (5, 6)).astype(np.int32)
  numbers = np.array([-1 if name is None else list(RULES).index(name) for name in names])
  logits = model.predict({'ids': ids, 'adapters': numbers})['logits']
  losses = model.evaluate_examples({'ids': ids, 'labels': ids, 'adapters': numbers})['loss']
  scores = model.score(ids[:, :2].tolist(), ids[:, 2:].tolist(), adapters=names, batch_size=2)
  for i, name in enumerate(names):
    merged = of_base if name is None else merge(of_base, own[name])
    single = base() if name is None else add_adapters(base(), *RULES[name])
    wanted, _ = single.instantiate().apply(merged, {'ids': ids[i : i + 1], 'weights': np.ones(1)}, method='predict')
    np.testing.assert_allclose(logits[i], wanted['logits'][0], atol=2e-5)
    log_probs = jax.nn.log_softmax(wanted['logits'][0])
    np.testing.assert_allclose(losses[i], -np.mean(np.diag(log_probs[:, ids[i]])), atol=2e-5)
    np.testing.assert_allclose(scores[i].log_probs, np.diag(log_probs[1:5][:, ids[i, 2:]]), atol=2e-5)
  assert not np.allclose(logits, model.predict({'ids': ids})['logits'], atol=1e-2)
  prompts, of_prompts = zip(*PROMPTS)
  found = model.decode(prompts, adapters=of_prompts, temperature=0.0, max_tokens=8, batch_size=2)
  assert found == [alone(name)[i].tolist() for i, name in enumerate(of_prompts)]
  one, same = (model.score([[1]], [[2, 3]], adapters=two) for two in ('two', ['two']))
  assert one[0].log_prob == same[0].log_prob
  for call, told in (
    (lambda: model.score([[1]], [[2]], adapters=['three']), r"score: adapters: the model has no adapter 'three'; expe"),
    (lambda: model.decode([[1]], adapters=['one', 'two']), r'decode: adapters has 2 entries, for 1 row'),
    (lambda: model.predict({'ids': ids, 'adapters': numbers + 2}), r'adapters: 2 is no adapter of the model'),
  ):
    with pytest.raises(DataError, match=told):
      call()


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 1, 1, 1), (1, 2, 2, 2), (2, 1, 1, 3)])
def test_requests_of_a_batcher_use_their_own_adapters(mesh):
  """More requests than rows, so rows change their adapters."""
  model = on_mesh(mesh)
  batcher = model.batcher(rows=2, max_length=16, tokens_per_step=4, chunk=4)
  requests = [batcher.submit(prompt, adapter=name, temperature=0.0, max_tokens=8) for prompt, name in PROMPTS]
  batcher.run(requests)
  for i, (request, (_, name)) in enumerate(zip(requests, PROMPTS)):
    assert request.ids == alone(name)[i].tolist()
    assert request.shared == 0
  with pytest.raises(
    ConfigError, match=r"adapter = 'three': the model has no such adapter; expected one of 'one', 'two'"
  ):
    batcher.submit([1], adapter='three')
  with pytest.raises(ConfigError, match=r'kept_prefixes = 2; with several adapters, set it to 0'):
    model.batcher(rows=2, max_length=16, kept_prefixes=2)
  with pytest.raises(ConfigError, match=r'attach_adapters: the model has adapters already'):
    model.attach_adapters({})


def test_side_outputs_of_the_network_are_kept():
  experts = Config(MoeFeedForward, num_experts=2)
  model = transformer_lm(vocab_size=8, model_dims=4, num_heads=2, num_layers=1, experts=experts)
  model = add_adapters(model, Config(Lora, layers=r'.*\.query', names=('a', 'b'))).instantiate()
  values = drawn_variables(model.abstract_init())
  batch = {name: np.arange(6, dtype=np.int32).reshape(2, 3) for name in ('ids', 'labels')}
  batch['weights'] = np.ones((2, 3), np.float32)

  def side(**more):
    call = functools.partial(model.apply, do_eval=True, method='compute_predictions')
    return jax.eval_shape(call, values, {**batch, **more})[1]

  assert side().summaries and side(adapters=np.array([-1, 1], np.int32)) == side()


def test_a_request_names_its_adapter_as_its_model():
  def parse(**fields):
    body = json.dumps({'prompt': [1], **fields}).encode()
    return parse_request(body, is_chat=False, model='base', most_top=0, adapters=('one', 'two'))

  assert [parse(**fields).adapter for fields in ({}, {'model': 'base'}, {'model': 'two'})] == [None, None, 'two']
  with pytest.raises(RequestError, match=r'there is no model "three"; this server has .base., .one., .two.'):
    parse(model='three')


def test_what_several_adapters_cannot_do():
  config, values = combined()
  model = config.instantiate()
  with pytest.raises(ConfigError, match=r'several adapters cannot be merged into one weight'):
    merge_adapters(model, values)
  batch = {name: np.ones((1, 3), np.int32) for name in ('ids', 'labels')} | {'weights': np.ones((1, 3), np.float32)}
  with pytest.raises(ConfigError, match=r'query.lora: several adapters are for decoding; train each of them by itself'):
    jax.eval_shape(lambda: model.apply(values, batch, method='compute_predictions'))
  with pytest.raises(ConfigError, match=r'which adapter each row uses, and the model does not have several'):
    decode(base(), variables()[0], [[1]])(adapters=np.zeros(1, np.int32))
  with pytest.raises(ConfigError, match=r'there are no adapters'):
    combine_adapters(base(), {})
  with pytest.raises(ConfigError, match=r"'x' has no adapters; expected the config of a model with some"):
    combine_adapters(base(), {'one': (add_adapters(base(), *RULES['one']), variables()[1]['one']), 'x': (base(), {})})
  with pytest.raises(ConfigError, match=r"'x' has a DoraProjection at .*; expected adapters of Lora"):
    combine_adapters(base(), {'x': (add_adapters(base(), Config(Dora)), {})})
  with pytest.raises(ConfigError, match=r'names: expected at least one name, each once'):
    add_adapters(base(), Config(Lora, names=('a', 'a'))).instantiate()
  experts = transformer_lm(
    vocab_size=8, model_dims=4, num_heads=2, num_layers=1, experts=Config(MoeFeedForward, num_experts=2)
  )
  with pytest.raises(ConfigError, match=r'several adapters are for linear layers and projections'):
    add_adapters(experts, Config(Lora, names=('a',))).instantiate()


def test_variables_that_do_not_fit_are_errors_that_name_adapter_and_layer():
  own = variables()[1]['two']
  query = 'lm.transformer.layers.attention.query.lora'

  def combine(config, tree):
    return combine_adapters(base(), {'x': (add_adapters(config, *RULES['two']), tree)})

  def cut(path):  # Like a model of one layer.
    return map_with_path(lambda at, x: x[:1] if '.'.join(at) == path else x, own)

  with pytest.raises(ConfigError, match=rf"'x': {query}.a has shape \(1, 12, 2\); this model needs \(2, 12, 2\)"):
    combine(base(), cut(f'{query}.a'))
  with pytest.raises(ConfigError, match=rf"'x': {query}.b has shape \(1, 2, 3, 4\); this model needs \(2, 2, 3, 4\)"):
    combine(base(), cut(f'{query}.b'))
  with pytest.raises(ConfigError, match=rf"'x': {query}.a is missing; this model needs"):
    combine(base(), {})
  shallow = transformer_lm(vocab_size=V, model_dims=12, num_heads=3, hidden_dims=10, num_layers=1)
  with pytest.raises(ConfigError, match=r"'x': .* has shape \(1, 12, 2\); this model needs \(2, 12, 2\)"):
    combine(shallow, jax.tree.map(lambda x: x[:1], own))
  gated = transformer_lm(vocab_size=V, model_dims=12, num_heads=3, hidden_dims=10, num_layers=2, style='gpt2')
  with pytest.raises(ConfigError, match=r"'x' has an adapter of .*\.ff\.gate, which the model lacks"):
    combine_adapters(gated, {'x': (add_adapters(base(), Config(Lora, layers=r'.*\.gate')), {})})


def test_adapters_of_the_keys_and_values_of_latent_attention_are_refused():
  latent = base()
  rotary = Config(RotaryPositions, interleaved=True)
  latent.lm_tpl.transformer_tpl.layers_tpl.attention_tpl = Config(
    LatentAttention, latent_dims=4, rotary_dims=2, value_dims=4, rotary_tpl=rotary
  )
  with pytest.raises(ConfigError, match=r"'x' has an adapter of lm\..*\.attention\.key, whose weight latent attention"):
    combine_adapters(latent, {'x': (add_adapters(latent.clone(), Config(Lora, layers=r'.*\.(query|key)')), {})})
  tuned = add_adapters(latent.clone(), Config(Lora, layers=r'.*\.(query|latent|out)', rank=2))
  own = jax.tree.map(lambda w: np.zeros(w.full_shape), tuned.instantiate().abstract_init())
  config, _ = combine_adapters(latent, {'x': (tuned, own)})
  batch = {'ids': np.ones((1, 2), np.int32), 'prompt_lengths': np.ones(1, np.int32), 'adapters': np.zeros(1, np.int32)}
  built = config.instantiate()
  shapes = jax.tree.map(lambda w: w.as_struct(), built.abstract_init())
  jax.eval_shape(lambda x: built.apply(x, batch, key=jax.random.key(0), do_eval=True, method='decode'), shapes)


def test_numbers_of_rows_that_no_adapter_has_are_errors():
  config, values = combined()
  model = config.instantiate()
  names = model.adapter_names
  for bad in (2, -2, -9):
    with pytest.raises(
      DataError, match=rf"adapters: {bad} is no adapter of the model; expected 0 for 'one', 1 for 'two'"
    ):
      check_adapters({'adapters': np.array([0, bad, -1])}, names)
  for bad in (np.ones(2), np.ones(2, bool)):
    with pytest.raises(DataError, match=r'adapters: expected integers'):
      check_adapters({'adapters': bad}, names)
    batch = {'ids': np.ones((2, 3), np.int32), 'prompt_lengths': np.full(2, 3, np.int32), 'adapters': bad}
    with pytest.raises(ConfigError, match=r'`adapters` is (float|bool).*; expected int32 \[B\]'):
      jax.eval_shape(
        lambda batch=batch: model.apply(values, batch, key=jax.random.key(0), do_eval=True, method='decode')
      )
  check_adapters({'adapters': np.array([0, 1, -1])}, names)
  check_adapters({'adapters': np.array([5])}, ())


def test_rows_choose_by_traced_numbers_among_arrays_of_numpy():
  """As in the loop of a decoder without jit. A number that is no adapter's gives NaN."""
  layer = Config(LowRankUpdate, in_shape=(3,), out_shape=(2,), rank=1, num_adapters=2).instantiate()
  values = {'a': np.ones((2, 3, 1), np.float32), 'b': np.arange(4, dtype=np.float32).reshape(2, 1, 2)}

  def update(number):
    call = layer.apply(
      values, np.ones((1, 3), np.float32), do_eval=True, surroundings=Surroundings(adapters=number[None])
    )
    return call[0][0]

  found = jax.lax.map(update, np.array([0, 1, -1, 2, -2]))
  np.testing.assert_array_equal(found, [[0, 3], [6, 9], [0, 0], [np.nan] * 2, [np.nan] * 2])


def test_names_may_be_a_list():
  model = add_adapters(base(), Config(Lora, layers='.*query', names=['a', 'b'])).instantiate()
  assert model.adapter_names == ('a', 'b')
