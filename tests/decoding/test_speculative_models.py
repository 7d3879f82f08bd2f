"""Speculative decoding with transformers: every kind of cache goes back, and on any mesh."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.decode_caches import place_caches
from praxis_lite.models import DraftedModel, encoder_decoder, set_pipeline, set_sharding, transformer_lm
from praxis_lite.models.decoding import Sampler, SpeculativeSampler
from praxis_lite.runs.programs import TaskOnMesh
from praxis_lite.runs.trained import TrainedModel
from praxis_lite.training.experiment import ExperimentConfig
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

AXES = ('spare', 'replica', 'data', 'mdl')
V, M = 5, 14
PROMPTS = {
  'ids': np.random.default_rng(0).integers(0, V, (4, 5)).astype(np.int32),
  'prompt_lengths': np.array([2, 5, 0, 1], np.int32),
}


def config(num_layers=2, **fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_heads': 3, 'hidden_dims': 10, 'num_layers': num_layers}
  return transformer_lm(**sizes, **fields)


def windows(num_layers=6):
  model = config(num_layers)
  model.lm_tpl.transformer_tpl.sliding_windows = (3, None)
  return model


def pages():
  model = config(num_layers=1)
  attention = model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl
  attention.set(cache_dtype='int8', cache_page_size=4)
  return model


KINDS = {
  'rings and all in a loop': windows,
  'pages of int8': pages,
  'stages of a pipeline': lambda: set_pipeline(config(num_layers=4), num_stages=2, num_microbatches=2, stage_axis=None),
  'rings and all': lambda: windows(2),
  'a prefix-LM': lambda: config(num_layers=1).set(model_type='prefix'),
}


@functools.cache
def variables_of(kind, seed=0):
  weights = KINDS.get(kind, lambda: config(num_layers=1))().instantiate().abstract_init()
  return jax.tree.map(lambda w: 5 * w if w.ndim > 1 else w, drawn_variables(weights, seed))


def with_decoder(model, cls, **fields):
  return model.set(decoder_tpl=Config(cls, **{'max_decode_steps': M, 'stop_ids': (1,), **fields}))


def decode(model, variables):
  model = model.instantiate()
  run = jax.jit(lambda v, b, key: model.apply(v, b, do_eval=True, method='decode', key=key)[0])
  metrics, decoded = run(variables, PROMPTS, jax.random.key(3))
  return metrics, jax.tree.map(np.asarray, decoded)


def check_same(found, expected):
  np.testing.assert_array_equal(found['ids'], expected['ids'])
  np.testing.assert_array_equal(found['lengths'], expected['lengths'])
  np.testing.assert_allclose(found['log_probs'], expected['log_probs'], atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kind', [kind for kind in KINDS if kind != 'rings and all'])
def test_every_kind_of_cache_goes_back(kind):
  """Most guesses are wrong, and rows go on from different positions."""
  variables = variables_of(kind)
  _, expected = decode(with_decoder(KINDS[kind](), Sampler), variables)
  metrics, found = decode(with_decoder(KINDS[kind](), SpeculativeSampler, lookup=2, draft_tokens=3), variables)
  check_same(found, expected)
  passes, drafted, accepted = (found[f'num_{name}'] for name in ('passes', 'drafted', 'accepted'))
  assert 0 < accepted.sum() < drafted.sum() and not passes[2]
  np.testing.assert_allclose(metrics['accepted_drafts'][0], accepted.sum() / drafted.sum(), rtol=1e-5)
  np.testing.assert_allclose(metrics['tokens_per_pass'][0], found['lengths'].sum() / passes.sum(), rtol=1e-5)


def drafted(**fields):
  decoder = Config(SpeculativeSampler, max_decode_steps=M, stop_ids=(1,), draft_tokens=3, **fields)
  return Config(DraftedModel, model_tpl=windows(2), draft_tpl=config(num_layers=1), decoder_tpl=decoder)


def drafted_variables():
  return {'model': variables_of('rings and all'), 'draft': variables_of('small', 1)}


def on_mesh(model, mesh, variables):
  task = Config(SingleTask, model=model, mesh_axis_names=AXES, ici_mesh_shape=mesh)
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  batch = PROMPTS | {'weights': np.ones(4, np.float32)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: batch))
  out = partitioned.decode_step(partitioned.pad(variables), jax.random.key(0), np.int32(0), batch)
  return jax.tree.map(lambda x: np.asarray(x)[:4], out.decoded)


@functools.cache
def on_one_device(temperature):
  return on_mesh(drafted(temperature=temperature), (1, 1, 1, 1), drafted_variables())


@pytest.mark.slow
def test_a_smaller_model_guesses_and_greedy_tokens_are_the_same():
  expected = decode(with_decoder(windows(2), Sampler, temperature=0.0), variables_of('rings and all'))[1]
  found = on_one_device(0.0)
  check_same(found, expected)
  assert found['num_drafted'].sum() > 0


@pytest.mark.slow
def test_a_mesh_draws_like_one_device():
  """Also with a draft model; the mesh has an axis of 3 and one that is not used."""
  model = drafted(temperature=1.0)
  model.set(model_tpl=set_sharding(model.model_tpl), draft_tpl=set_sharding(model.draft_tpl))
  found, expected = on_mesh(model, (2, 1, 3, 1), drafted_variables()), on_one_device(1.0)
  check_same(found, expected)
  np.testing.assert_array_equal(found['num_accepted'], expected['num_accepted'])


# ---------------------------------------------------------------- encoder-decoders


def translator(num_layers=2, **fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_layers': num_layers, 'num_encoder_layers': 2, 'num_heads': 3}
  style = {'style': 't5', 'num_buckets': 8, 'max_distance': 6, 'start_id': 0, **fields}
  return encoder_decoder(**sizes, hidden_dims=10, **style)


TRANSLATORS = {
  't5': translator,
  'a loop': lambda: translator(6),
  'learned positions': lambda: translator(style='bart', num_buckets=32, max_distance=128, max_len=32),
  'int8': lambda: set_cache_dtype(translator(), 'int8'),
  'stages': lambda: set_pipeline(translator(4), num_stages=2, num_microbatches=2, stage_axis=None),
}


def set_cache_dtype(model, dtype):
  block = model.lm_tpl.decoder_tpl.layers_tpl
  for attention in (block.attention_tpl, block.cross_attention_tpl):
    attention.cache_dtype = dtype
  return model


@functools.cache
def translator_variables(kind, seed=0):
  weights = TRANSLATORS[kind]().instantiate().abstract_init()
  return jax.tree.map(lambda w: 4 * w if w.ndim > 1 else w, drawn_variables(weights, seed))


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', TRANSLATORS)
def test_an_encoder_decoder_takes_guesses_from_its_source_and_target(kind):
  variables, settings = translator_variables(kind), {'temperature': 0.5, 'stop_ids': ()}
  _, expected = decode(with_decoder(TRANSLATORS[kind](), Sampler, **settings), variables)
  guess = with_decoder(TRANSLATORS[kind](), SpeculativeSampler, lookup=2, draft_tokens=3, **settings)
  metrics, found = decode(guess, variables)
  check_same(found, expected)
  assert 0 < found['num_accepted'].sum() < found['num_drafted'].sum() and not found['num_passes'][2]
  assert metrics['accepted_drafts'][0] > 0


def drafted_translator(**fields):
  decoder = Config(SpeculativeSampler, max_decode_steps=M, stop_ids=(1,), draft_tokens=3, **fields)
  model = Config(DraftedModel, model_tpl=translator(), draft_tpl=translator(), decoder_tpl=decoder)
  variables = translator_variables('t5')
  return model, {'model': variables, 'draft': jax.tree.map(lambda w: 0.7 * w, variables)}


@pytest.mark.slow
def test_another_encoder_decoder_guesses():
  """Greedy tokens are the same; drawn ones are the same on a mesh with an axis of 3 and an unused one."""
  expected = decode(with_decoder(translator(), Sampler, temperature=0.0), translator_variables('t5'))[1]
  found = decode(*drafted_translator(temperature=0.0))[1]
  check_same(found, expected)
  assert found['num_accepted'].any()
  model, variables = drafted_translator(temperature=1.0)
  one = on_mesh(model, (1, 1, 1, 1), variables)
  model.set(model_tpl=set_sharding(model.model_tpl), draft_tpl=set_sharding(model.draft_tpl))
  split = on_mesh(model, (2, 1, 3, 1), variables)
  check_same(split, one)
  assert 0 < one['num_accepted'].sum() < one['num_drafted'].sum()
  np.testing.assert_array_equal(split['num_accepted'], one['num_accepted'])


def test_the_positions_of_targets_limit_what_is_guessed():
  model = with_decoder(TRANSLATORS['learned positions'](), SpeculativeSampler, lookup=2, max_decode_steps=40)
  with pytest.raises(ConfigError, match='needs all tokens at each step, but the model sees only 32 at once'):
    decode(model, translator_variables('learned positions'))


def loaded(num_layers=1, max_len=32, **changes):
  """An encoder-decoder with learned positions on one device, whose texts vary and end only where they must."""
  sizes = {'style': 'bart', 'num_buckets': 32, 'max_distance': 128, 'max_len': max_len}
  model = with_decoder(translator(num_layers, **sizes), Sampler, temperature=0.0, stop_ids=(), **changes)
  task = Config(SingleTask, name='lm', model=model)
  built = task.instantiate()
  tasks = TaskOnMesh.make_for_inference(built, built.create_mesh(jax.devices()[:1]))
  variables = tasks.layout.mdl_vars.to_mesh(drawn_variables(built.model.abstract_init()))
  return TrainedModel(ExperimentConfig(task, [], []), tasks, variables, jnp.int32(0))


@pytest.mark.slow_cases
@pytest.mark.parametrize('guesses', ['lookup', 'draft'])
def test_texts_that_grow_are_guessed_up_to_the_last_position(guesses):
  prompts, pieces = [[2, 4, 3, 1, 2], [3]], [[], []]
  model, settings = loaded(), {'max_tokens': 32, 'temperature': 1.0, 'seed': 3}
  if guesses == 'draft':  # Which would draw with other random numbers.
    settings['temperature'] = 0.0
  guess = {'lookup': 2} if guesses == 'lookup' else {'draft': loaded(num_layers=2)}
  expected = model.decode(prompts, **settings)
  assert all(len(text) == 32 and len(set(text)) > 2 for text in expected)
  settings |= guess
  assert model.decode(prompts, stream=lambda row, new: pieces[row].extend(new), **settings) == pieces == expected
  for stream in (None, print):
    with pytest.raises(ConfigError, match='the model sees only 32 at once, and prompts of 1 with'):
      model.decode(prompts, stream=stream, **{**settings, 'max_tokens': 33})


def test_the_positions_of_a_draft_model_limit_what_is_guessed():
  model, draft = loaded(max_len=32), loaded(max_len=16)
  for stream in (None, print):
    with pytest.raises(ConfigError, match=r'draft.*the model sees only 16 at once, and prompts of 1 with'):
      model.decode([[2, 4, 3]], max_tokens=20, stream=stream, draft=draft)
  decoder = Config(SpeculativeSampler, max_decode_steps=20)
  both = Config(DraftedModel, model_tpl=model.config.task.model, draft_tpl=draft.config.task.model, decoder_tpl=decoder)
  variables = {'model': model.variables, 'draft': draft.variables}
  with pytest.raises(ConfigError, match=r'draft.*the model sees only 16 at once'):
    decode(both, variables)


# ---------------------------------------------------------------- what is refused


def test_a_draft_model_has_the_same_vocabulary_and_is_a_language_model():
  model = drafted()
  model.draft_tpl.vocab_size = V + 1
  with pytest.raises(ConfigError, match='draft_tpl: its vocabulary has 6 tokens, and that of the model has 5'):
    model.instantiate()
  model.draft_tpl = translator()
  with pytest.raises(
    ConfigError, match='reads what the model reads; the model is a LanguageModel, and the draft model'
  ):
    model.instantiate()
  with pytest.raises(ConfigError, match=r'no heads for further tokens; set lookup instead'):
    with_decoder(translator(), SpeculativeSampler, own_heads=True).instantiate()


def test_a_context_that_is_too_short_is_named():
  model = with_decoder(config(num_layers=1), SpeculativeSampler, lookup=2, max_context=9).instantiate()
  with pytest.raises(
    ConfigError, match='speculative decoding needs all tokens at each step, but the model sees only 9'
  ):
    model.check_fits(5, 6)
  model.check_fits(5, 5)


def test_a_state_that_is_no_cache_is_named():
  state = {'mixer': {'hidden': jnp.zeros((2, 3))}}
  with pytest.raises(ConfigError, match=r'^mixer.hidden: this state of a layer cannot go back to an earlier token'):
    place_caches(state, 8)
