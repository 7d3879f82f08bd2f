"""Prompts that share rows are continued as in rows of their own, by every decoder, kind of cache and mesh."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest
from drawn_state import drawn_variables

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import pack_prompts
from praxis_lite.layers import LatentAttention, Mamba2, MoeFeedForward, RotaryPositions
from praxis_lite.models import cached_steps, recurrent_lm, set_pipeline, set_sharding, transformer_lm
from praxis_lite.models.decoding import BeamSearch, Sampler, SpeculativeSampler
from praxis_lite.runs.prompts import check_ids
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.task import SingleTask

pytestmark = pytest.mark.usefixtures('shared_programs')

V, M = 17, 4
LENGTHS = (3, 9, 1, 4, 2, 9, 5)
PROMPTS = [np.random.default_rng(n).integers(0, V, n).tolist() for n in LENGTHS]


def config(decoder=None, **fields):
  sizes = {'vocab_size': V, 'model_dims': 12, 'num_heads': 3, 'hidden_dims': 10, 'num_layers': 3}
  model = transformer_lm(**sizes, **fields)
  model.decoder_tpl = Config(Sampler, temperature=0.0) if decoder is None else decoder
  return set_steps(model)


def set_steps(model):
  model.decoder_tpl.max_decode_steps = M
  return model


def windows():
  model = config(num_kv_heads=1)
  model.lm_tpl.transformer_tpl.sliding_windows = (3, None, 4)
  return model


def of_attention(attention=None, **fields):
  model = config()
  block = model.lm_tpl.transformer_tpl.layers_tpl
  block.attention_tpl = block.attention_tpl if attention is None else attention
  block.attention_tpl.set(**fields)
  return model


def experts(**fields):
  model = config()
  moe = Config(MoeFeedForward, num_experts=3, num_experts_per_token=2, **fields)
  model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl = moe
  return model


def recurrence():
  mixer = Config(Mamba2, num_heads=3, dims_per_head=4, state_dims=5, chunk_size=4)
  model = recurrent_lm(mixer, vocab_size=V, model_dims=12, num_layers=2, hidden_dims=10)
  model.decoder_tpl = Config(Sampler, temperature=0.0)
  return set_steps(model)


# Of each, whether prompts are read in packed rows.
KINDS = {
  'plain': (config, True),
  'gpt2': (functools.partial(config, style='gpt2', max_len=16), True),
  'windows': (windows, True),
  'chunks': (lambda: of_attention(local_chunk=4), True),
  'sinks': (lambda: of_attention(use_sinks=True, gate_output=True), True),
  'latent': (
    lambda: of_attention(Config(LatentAttention, latent_dims=5, rotary_dims=2, rotary_tpl=Config(RotaryPositions))),
    True,
  ),
  'experts': (experts, True),
  'capacity': (lambda: experts(dispatch='capacity', capacity_factor=4.0), False),
  'int8': (lambda: of_attention(cache_dtype='int8'), False),
  'stages': (lambda: set_pipeline(config(), num_stages=3, num_microbatches=2, stage_axis=None), False),
  'recurrence': (recurrence, False),
  'samples': (lambda: config(Config(Sampler, temperature=1.5, top_k=5, repetition_penalty=1.2)), True),
  'beams': (lambda: config(Config(BeamSearch, beam_size=3, num_best=2, stop_ids=(1,))), True),
  'guesses': (lambda: config(Config(SpeculativeSampler, temperature=0.0, lookup=2, draft_tokens=2)), True),
}


def make(model):
  model = model.instantiate()
  return model, jax.tree.map(lambda w: 4 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


def decode(model, variables, batch):
  run = jax.jit(lambda b: model.apply(variables, b, do_eval=True, key=jax.random.key(0), method='decode')[0])
  return jax.tree.map(np.asarray, run(batch))


def alone():
  ids = np.stack([np.pad(p, (0, max(LENGTHS) - len(p)), constant_values=-9) for p in PROMPTS]).astype(np.int32)
  return {'ids': ids, 'prompt_lengths': np.array(LENGTHS, np.int32)}


def in_order(decoded, place):
  return {name: x.reshape(-1, *x.shape[2:])[place] for name, x in decoded.items()}


def check_same(found, expected):
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    if name == 'prompt_ids':
      continue
    if value.dtype.kind in 'iub':
      np.testing.assert_array_equal(found[name], value, err_msg=name)
    else:
      np.testing.assert_allclose(found[name], value, atol=1e-4, err_msg=name)


@pytest.mark.slow_cases
@pytest.mark.parametrize('kind', KINDS)
def test_packed_prompts_are_continued_as_in_rows_of_their_own(kind, monkeypatch):
  make_config, packs = KINDS[kind]
  model, variables = make(make_config())
  calls = []
  read = cached_steps.PackedSteps.read_prompts
  monkeypatch.setattr(cached_steps.PackedSteps, 'read_prompts', lambda *a: calls.append(1) or read(*a))
  batch, place = pack_prompts(PROMPTS, 11)
  assert batch['packing'].shape == (4, 11) and batch['prompt_lengths'].shape[1] == 3
  expected = alone()
  # Random numbers go by the number of a row.
  batch['row'] = np.full(batch['prompt_lengths'].size, 99, np.int32)
  batch['row'][place], expected['row'] = np.arange(len(place)), np.arange(len(place), dtype=np.int32)
  batch['row'] = batch['row'].reshape(batch['prompt_lengths'].shape)
  metrics, found = decode(model, variables, batch)
  of_rows, expected = decode(model, variables, expected)
  check_same(in_order(found, place), expected)
  assert bool(calls) == packs
  for name in of_rows:
    np.testing.assert_allclose(metrics[name], of_rows[name], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 3, 1), (3, 1, 2)], ids=str)
def test_a_mesh_packs_like_one_device(mesh):
  model, variables = make(windows())
  batch, place = pack_prompts(PROMPTS, 11)
  task = Config(SingleTask, model=set_sharding(windows()), mesh_axis_names=('replica', 'data', 'mdl'))
  task.ici_mesh_shape = mesh
  task.train.inputs_split_mapping = {'map_1d': (('replica', 'data'),), 'map_2d': (('replica', 'data'), None)}
  rows = batch | {'weights': np.ones(len(batch['ids']), np.float32)}
  partitioned = PartitionedTask(task.instantiate(), jax.eval_shape(lambda: rows))
  out = partitioned.decode_step(partitioned.pad(variables), jax.random.key(0), np.int32(0), rows)
  found = jax.tree.map(lambda x: np.asarray(x)[: len(rows['ids'])], out.decoded)
  check_same(in_order(found, place), decode(model, variables, alone())[1])


def test_each_prompt_is_in_one_place_and_rows_have_little_padding():
  batch, place = pack_prompts(PROMPTS)
  assert batch['packing'].shape == (4, 9) and (batch['packing'] >= 0).sum() == sum(LENGTHS) == 33
  ids = np.take_along_axis(batch['ids'], np.maximum(batch['packing'], 0), 1)[batch['packing'] >= 0]
  assert sorted(ids.tolist()) == sorted(itertools.chain(*PROMPTS))
  rows, lengths = batch['ids'].reshape(-1, 9), batch['prompt_lengths'].reshape(-1)
  assert [rows[i, : lengths[i]].tolist() for i in place] == PROMPTS
  assert pack_prompts([[5]])[0]['ids'].tolist() == [[5]]


@pytest.mark.parametrize(
  'prompts, message',
  [
    ([], 'there are no prompts; expected at least one'),
    ([[1], []], 'at least one token'),
    ([[1] * 5], 'has 5 tokens'),
    ([[2**40]], 'prompts of ids'),
    ([['a']], 'prompts of ids'),
  ],
)
def test_prompts_that_cannot_be_packed_are_named(prompts, message):
  with pytest.raises(DataError, match=f'pack_prompts: .*{message}'):
    pack_prompts(prompts, 4)


def test_ids_outside_of_the_vocabulary_are_found_in_packed_prompts():
  batch, _ = pack_prompts([[1, 2], [3, 99], [4]])
  with pytest.raises(DataError, match='ids: 99, at position'):
    check_ids(batch, V)
  batch['ids'] = np.where(batch['ids'] == 99, 0, batch['ids'])
  batch['ids'][batch['prompt_lengths'][:, 0] == 1, 1] = -7  # After the end of a prompt.
  check_ids(batch, V)


@pytest.mark.parametrize(
  'change',
  [{'packing': None}, {'prompt_lengths': np.ones((2, 2, 1), np.int32)}, {'ids': np.zeros((2, 5), np.int32)}],
  ids=lambda change: next(iter(change)),
)
def test_a_batch_whose_arrays_do_not_belong_together_is_refused(change):
  batch = pack_prompts([[1, 2], [3], [4, 5, 6]], 3)[0]
  batch = {name: x for name, x in (batch | change).items() if x is not None}
  model = config().instantiate()
  with pytest.raises(ConfigError, match='packing'):
    model.apply(drawn_variables(model.abstract_init()), batch, do_eval=True, method='decode')
