"""Training, decoding and export agree; a planted difference is found, and its layer is named."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_language_model import tiny_language_model

from praxis_lite.bridges.hf import agreement as hf_agreement
from praxis_lite.bridges.hf.agreement import agree, export, read_again
from praxis_lite.common.errors import UserError
from praxis_lite.layers import MultiHeadAttention, RotaryPositions, cached_attention
from praxis_lite.models.base import ScoreLimits
from praxis_lite.runs.agreement import Agreement, format_result
from praxis_lite.runs.forced_tokens import random_texts, texts_of_batch, texts_of_tokens

LIMITS = ScoreLimits(37, None, takes_prefixes=False)
TEXTS = random_texts(LIMITS, 3, 14)


@pytest.fixture(scope='module')
def agreement():
  """The tiny model, whose reference is computed once."""
  return Agreement(tiny_language_model(), TEXTS)


def way_named(agreement, name, **settings):
  return next(way for way in agreement.list_ways(**settings) if way.name.startswith(name))


def test_a_right_model_agrees_in_every_way(agreement):
  for name in ('one pass', 'cached decoding', 'a batcher'):
    compared = agreement.compare(way_named(agreement, name))
    assert compared.is_right and compared.num_tokens == TEXTS.num_tokens and not compared.problem
    assert compared.difference < compared.tolerance < 1e-4
    assert format_result(agreement, compared).endswith('ok')
  head = format_result(agreement)
  assert f'{TEXTS.num_tokens} tokens in 3 texts' in head and 'the reference' in head and 'note' not in head


def test_an_export_agrees_and_a_wrong_one_does_not(agreement, tmp_path):
  export(agreement.model, tmp_path)
  assert agreement.compare(read_again(agreement, tmp_path)).is_right
  values = json.loads((tmp_path / 'config.json').read_text())
  values['rope_theta'] = 31.0
  (tmp_path / 'config.json').write_text(json.dumps(values))
  compared = agreement.compare(read_again(agreement, tmp_path))
  assert compared.layer == 'lm.transformer.layers.attention.rotary, layer 0 of the stack, from token 1 of text 0'
  line = format_result(agreement, compared)
  assert not compared.is_right and 'DIFFERS' in line and compared.layer in line


# ---------------------------------------------------------------- planted differences


def plant_wrong_rope_base(monkeypatch):
  """Queries and keys of cached decoding are rotated with another base."""
  extend, rates = MultiHeadAttention._extend, RotaryPositions.rates_h
  is_decoding = []

  def wrong_extend(self, *args, **kwargs):
    is_decoding.append(True)
    try:
      return extend(self, *args, **kwargs)
    finally:
      is_decoding.pop()

  def wrong_rates(self):
    return rates.fget(self) * (1.01 if is_decoding else 1.0)

  monkeypatch.setattr(MultiHeadAttention, '_extend', wrong_extend)
  monkeypatch.setattr(RotaryPositions, 'rates_h', property(wrong_rates))
  return 'lm.transformer.layers.attention.rotary, layer 0 of the stack, from token 1 '


def plant_stale_slot(monkeypatch):
  """What is written to slot 6 of a cache is lost; slot 6 keeps what it had."""
  append = cached_attention.append_tokens

  def append_but_one(cache, new):
    after = append(cache, new)
    return after._replace(key=after.key.at[..., 6, :].set(cache.key[..., 6, :]))

  monkeypatch.setattr(cached_attention, 'append_tokens', append_but_one)
  return 'lm.transformer.layers.attention, before its out, layer 0 of the stack, from token '


def plant_missing_cast(monkeypatch):
  """Caches keep their entries in bfloat16, although the model computes in float32."""
  cached = MultiHeadAttention._cached_attention

  def in_bfloat16(self, *args, **kwargs):
    return dataclasses.replace(cached(self, *args, **kwargs), dtype=jnp.bfloat16)

  monkeypatch.setattr(MultiHeadAttention, '_cached_attention', in_bfloat16)
  return 'lm.transformer.layers.attention, before its out, layer 0 of the stack, from token 0 '


PLANTED = [plant_wrong_rope_base, plant_stale_slot, plant_missing_cast]


@pytest.mark.slow_cases
@pytest.mark.parametrize('plant', PLANTED)
def test_a_planted_difference_is_found_and_named(agreement, monkeypatch, plant):
  expected = plant(monkeypatch)
  compared = agreement.compare(way_named(agreement, 'cached decoding'))
  assert not compared.is_right and compared.difference > 10 * compared.tolerance
  assert compared.layer.startswith(expected), compared.layer


@pytest.mark.slow
@pytest.mark.parametrize('plant', PLANTED)
def test_a_planted_difference_is_found_in_a_batcher_and_on_a_mesh(monkeypatch, plant):
  on_mesh = Agreement(tiny_language_model((2, 1, 3)), TEXTS)
  expected = plant(monkeypatch)
  compared = on_mesh.compare(way_named(on_mesh, 'a batcher'))
  assert not compared.is_right and compared.layer.startswith(expected), compared.layer


def test_the_second_layer_is_named_if_the_first_is_right(agreement):
  way = way_named(agreement, 'one pass')
  values = way.values()
  name = 'lm.transformer.layers.ff'
  changed = {**values, name: values[name]._replace(values=values[name].values.copy())}
  changed[name].values[1, 2, 3] += 1e-2
  wrong = way._replace(compute=lambda: [x + 1.0 for x in agreement.reference], values=lambda: changed)
  assert agreement.compare(wrong).layer == f'{name}, layer 1 of the stack, from token 3 of text 2'
  same = wrong._replace(values=lambda: values)
  assert agreement.compare(same).layer.startswith('no layer alone')
  assert agreement.compare(wrong._replace(values=None)).layer == 'its layers cannot be compared'


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_differ_and_only_masked_tokens_are_left_out(agreement, value):
  way, reference = way_named(agreement, 'one pass')._replace(values=None), agreement.reference
  found = [x.copy() for x in reference]
  found[1][2] = value
  compared = agreement.compare(way._replace(compute=lambda: found))
  assert not compared.is_right and compared.difference == np.inf and compared.num_tokens == TEXTS.num_tokens
  assert compared.first == (1, len(TEXTS.contexts[1]) + 2)
  masked = [np.ma.array(x, mask=~np.isfinite(x)) for x in found]
  compared = agreement.compare(way._replace(compute=lambda: masked))
  assert compared.is_right and compared.difference == 0 and compared.num_tokens == TEXTS.num_tokens - 1
  none = agreement.compare(way._replace(compute=lambda: [np.ma.masked_all(len(x)) for x in reference]))
  assert not none.is_right and none.num_tokens == 0 and 'WRONG: it computed none' in format_result(agreement, none)


def test_a_layer_whose_values_are_all_nan_is_named(agreement):
  way = way_named(agreement, 'one pass')
  values = way.values()
  name = 'lm.transformer.layers.ff'
  changed = {**values, name: values[name]._replace(values=np.full_like(values[name].values, np.nan))}
  wrong = way._replace(compute=lambda: [x * np.nan for x in agreement.reference], values=lambda: changed)
  assert agreement.compare(wrong).layer == f'{name}, layer 0 of the stack, from token 0 of text 0'


def test_a_reference_that_is_not_finite_is_an_error():
  model = tiny_language_model()
  stored = jax.tree.map(lambda x: x * jnp.nan, model.stored_variables)
  with pytest.raises(UserError, match=r'^agree: .* token 0 of the continuation of text 0 is nan in the training step;'):
    Agreement(dataclasses.replace(model, stored_variables=stored), TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize('mesh', [(1, 1, 1), (2, 1, 3)], ids=str)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_a_right_model_agrees_in_all_dtypes_and_on_meshes(dtype, mesh):
  model = tiny_language_model(mesh, fprop_dtype=dtype, dropout=0.1)
  lines = []
  compared = agree(model, TEXTS, cache_dtype='int8', progress=lines.append)
  assert all(each.is_right for each in compared), '\n'.join(lines)
  names = [each.name for each in compared if not each.problem]
  assert any('pages' in name for name in names) and any('int8' in name for name in names)
  assert any('one device' in name for name in names) == (mesh != (1, 1, 1))
  assert any(name == 'float32 beside bfloat16' for name in names) == (dtype == 'bfloat16')
  assert 'note: the training step without random numbers, as in evaluation: lm.' in '\n'.join(lines)


# ---------------------------------------------------------------- what is compared


def test_texts_of_a_batch():
  ids = np.arange(24).reshape(2, 12)
  batch = {'ids': ids, 'labels': ids + 1, 'weights': np.ones((2, 12), np.float32)}
  whole = texts_of_batch(batch, LIMITS, 5, 64)
  assert [c + k for c, k in zip(*whole)] == [list(range(13)), list(range(12, 25))]
  batch['segment_ids'] = np.array([[1] * 5 + [2] * 7, [0] * 12])
  packed = texts_of_batch(batch, LIMITS, 5, 64)
  assert packed.contexts == [[0, 1]] and packed.continuations == [[2, 3, 4, 5]]
  del batch['segment_ids']
  batch['weights'] = np.array([1.0, 0.0], np.float32)  # One for each row.
  assert len(texts_of_batch(batch, LIMITS, 5, 64).contexts) == 1
  short = texts_of_batch(batch, LIMITS._replace(max_positions=6), 5, 64)
  assert len(short.contexts[0] + short.continuations[0]) == 6
  with pytest.raises(UserError, match=r'^agree: there is no text of at least 4 tokens'):
    texts_of_tokens([[1, 2, 3]], 64)


def test_sources_are_contexts():
  limits = LIMITS._replace(start_id=0, source_end_id=1)
  batch = {'ids': np.array([[0, 5, 6]]), 'labels': np.array([[5, 6, 7]]), 'weights': np.array([[1.0, 1, 0]])}
  batch['source_ids'] = np.array([[8, 9, 1, 0]])
  for marks in ({'source_lengths': np.array([3])}, {'source_segment_ids': np.array([[2, 2, 2, 0]])}):
    assert texts_of_batch(batch | marks, limits, 5, 64) == ([[8, 9]], [[5, 6]])
  for nothing in ({'weights': np.zeros((1, 3))}, {'source_lengths': np.array([0])}):
    with pytest.raises(UserError, match=r'^agree: no row of the data has a source and a target'):
      texts_of_batch(batch | nothing, limits, 5, 64)


def test_a_missing_package_is_a_line_of_its_own(agreement, tmp_path):
  export(agreement.model, tmp_path / 'exported')
  python = tmp_path / 'python'
  python.write_text('#!/bin/sh\necho "ModuleNotFoundError: No module named \'torch\'" >&2\nexit 1\n')
  python.chmod(0o755)
  compared = agreement.compare(hf_agreement.transformers_way(agreement, tmp_path / 'exported', str(python)))
  assert compared.problem == f'torch is not installed for {python}; another Python may have it: --python=...'
  assert compared.is_right and 'not compared: torch' in format_result(agreement, compared)
  missing = agreement.compare(hf_agreement.transformers_way(agreement, tmp_path / 'exported', str(tmp_path / 'none')))
  assert missing.problem == f'{tmp_path / "none"} cannot be run: No such file or directory'


@pytest.mark.slow
def test_transformers_agrees_and_a_wrong_export_is_named(agreement, tmp_path):
  pytest.importorskip('torch', reason='needs PyTorch: pip install praxis_lite[hf-oracle]')
  pytest.importorskip('transformers', reason='needs transformers: pip install praxis_lite[hf-oracle]')
  import sys

  export(agreement.model, tmp_path)
  assert agreement.compare(hf_agreement.transformers_way(agreement, tmp_path, sys.executable)).is_right
  values = json.loads((tmp_path / 'config.json').read_text())
  values['rope_theta'] = 31.0
  (tmp_path / 'config.json').write_text(json.dumps(values))
  wrong = agreement.compare(hf_agreement.transformers_way(agreement, tmp_path, sys.executable))
  assert wrong.layer.startswith('lm.transformer.layers, layer 0 of the stack, from token 1')


def test_the_requests_of_a_batcher_know_their_log_probabilities():
  model = tiny_language_model()
  batcher = model.batcher(rows=2, max_length=12, tokens_per_step=2, chunk=4)
  requests = [batcher.submit([1, 2, 3], max_tokens=n, temperature=t, seed=n) for n, t in ((5, 0.0), (3, 1.0), (1, 2.0))]
  batcher.run()
  scores = model.score([[1, 2, 3]] * 3, [request.ids for request in requests])
  for request, score in zip(requests, scores):
    assert len(request.log_probs) == len(request.ids)
    np.testing.assert_allclose(request.log_probs, score.log_probs, atol=1e-5)
