"""CtcModel: losses and error rates against oracles, padding, steps on any mesh, search, alignments, and mistakes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_state import drawn_variables
from model_steps import assert_close, loss_and_gradients, take_a_step

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.common.trees import path_name
from praxis_lite.inputs import ArrayInput
from praxis_lite.layers import LogMel
from praxis_lite.models import conformer_ctc, set_sharding
from praxis_lite.models.edit_distance import edit_distance, error_rate, hash_words

pytestmark = pytest.mark.usefixtures('shared_programs')

B, N, V, BLANK = 5, 90, 7, 6
LENGTHS = np.array([90, 70, 55, 90, 10], np.int32)
LABELS = np.array([[1, 0, 2, 2], [3, 6, 6, 6], [1, 2, 3, 4], [0, 1, 2, 3], [1, 6, 6, 6]], np.int32)
WEIGHTS = np.array([1, 0.5, 1, 0, 1], np.float32)


def config(**fields):
  frontend = Config(LogMel, sample_rate=400, frame_length=10, frame_step=4, num_mels=6, normalize=True)
  sizes = {'model_dims': 12, 'num_layers': 2, 'num_heads': 3, 'hidden_dims': 14, 'kernel_size': 3, 'channels': 3}
  model = conformer_ctc(vocab_size=V, blank_id=BLANK, space_id=0, frontend=frontend, **sizes)
  model.augmenter_tpl = None
  return model.set(**fields)


def batch_of():
  audio = np.random.default_rng(0).standard_normal((B, N)).astype(np.float32)
  audio = np.where(np.arange(N) < LENGTHS[:, None], audio, 0)
  return {'audio': audio, 'audio_lengths': LENGTHS, 'labels': LABELS, 'weights': WEIGHTS}


@functools.cache
def make():
  model = config().instantiate()
  return model, jax.tree.map(lambda w: 2 * w if w.ndim > 1 else w, drawn_variables(model.abstract_init()))


@functools.cache
def evaluated():
  model, variables = make()
  return jax.jit(lambda batch: model.apply(variables, batch, do_eval=True)[0])(batch_of())


def distance(a, b):
  rows = [list(range(len(b) + 1))]
  for i, x in enumerate(a, 1):
    row = [i]
    for j, y in enumerate(b, 1):
      row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
    rows.append(row)
  return rows[-1][-1]


def said(row):
  return [int(x) for x in LABELS[row] if x != BLANK]


def words(ids):
  return [word for word in ''.join(chr(97 + i) if i else ' ' for i in ids).split(' ') if word]


def test_edit_distances_of_tokens_and_words_are_those_of_the_textbook():
  rng = np.random.default_rng(1)
  a, b = rng.integers(0, 3, (9, 7)), rng.integers(0, 3, (9, 5))
  of_a, of_b = rng.integers(0, 8, 9), rng.integers(0, 6, 9)
  of_a[0] = of_b[0] = of_b[1] = 0
  rows = [(x[:n].tolist(), y[:m].tolist()) for x, n, y, m in zip(a, of_a, b, of_b)]
  found = jax.jit(edit_distance)(a, of_a, b, of_b)
  assert found.tolist() == [distance(x, y) for x, y in rows]
  hashed = [jax.jit(hash_words, static_argnums=2)(x, n, 0) for x, n in ((a, of_a), (b, of_b))]
  assert [x.tolist() for _, x in hashed] == [[len(words(row[i])) for row in rows] for i in (0, 1)]
  found = edit_distance(*hashed[0], *hashed[1])
  assert found.tolist() == [distance(words(x), words(y)) for x, y in rows]
  rate, total = error_rate(jnp.array([2, 1, 9]), jnp.array([4, 0, 3]), jnp.array([1.0, 0.5, 0.0]))
  assert (float(rate), float(total)) == (2.5 / 4, 4)


def test_loss_is_that_of_the_rows_that_fit_and_error_rates_are_those_of_the_best_path():
  model, variables = make()
  metrics, by_row = evaluated()
  prediction = jax.jit(lambda b: model.apply(variables, b, method='compute_predictions', do_eval=True)[0])(batch_of())
  frames = (np.asarray(prediction.paddings) == 0).sum(1)
  # 90 samples are 21 frames of the front end; row 2 has 12 and 4 labels; row 3 has weight 0; row 4 has one frame.
  assert frames.tolist() == [6, 4, 3, 0, 1]
  fits = [0, 1, 4]
  is_label = LABELS != BLANK
  expected = optax.ctc_loss(prediction.logits, prediction.paddings * 1.0, LABELS, ~is_label * 1.0, blank_id=BLANK)
  np.testing.assert_allclose(by_row['loss'], np.where(np.isin(range(B), fits), expected, 0), rtol=1e-5)
  mean = sum(WEIGHTS[i] * float(expected[i]) for i in fits) / sum(WEIGHTS[fits])
  np.testing.assert_allclose(metrics['loss'], (mean, 2.5), rtol=1e-5)
  np.testing.assert_allclose(metrics['too_short'], (1 / 3.5, 3.5))
  best = np.asarray(prediction.logits).argmax(-1)
  paths = [row[:n] for row, n in zip(best, frames)]
  written = [[int(x) for i, x in enumerate(p) if x != BLANK and (i == 0 or x != p[i - 1])] for p in paths]
  for name, parts in (('token_error_rate', list), ('word_error_rate', words)):
    pairs = [(WEIGHTS[i], parts(written[i]), parts(said(i))) for i in range(B)]
    total = sum(w * len(s) for w, _, s in pairs)
    np.testing.assert_allclose(metrics[name], (sum(w * distance(x, s) for w, x, s in pairs) / total, total), rtol=1e-6)


@pytest.mark.slow
def test_padding_and_rows_without_weight_may_hold_anything():
  model, variables = make()
  run = functools.partial(loss_and_gradients, model, variables, do_eval=True)
  bad = batch_of()
  bad['audio'] = np.where(np.arange(N) < LENGTHS[:, None], bad['audio'], np.nan)
  bad['audio'][3], bad['labels'] = np.nan, np.where(np.arange(B)[:, None] == 3, -9, bad['labels'])
  bad['labels'][1, 2:] = 5  # After a blank.
  assert_close(run(bad), run(batch_of()), 1e-5)
  whole = {name: x[:1] for name, x in batch_of().items()}
  without = {name: x for name, x in whole.items() if name != 'audio_lengths'}
  assert_close(run(without), run(whole), 1e-5)


def test_predictions_need_no_labels_and_a_search_is_at_least_as_probable():
  model, variables = make()
  batch = {name: x for name, x in batch_of().items() if name in ('audio', 'audio_lengths')}
  wide = config(num_beams=4).instantiate()
  best, found = (
    jax.jit(lambda b, m=m: m.apply(variables, b, method='predict', do_eval=True)[0])(batch) for m in (model, wide)
  )
  assert found['ids'].shape == best['ids'].shape == (B, 6)
  assert (np.asarray(found['log_prob']) >= np.asarray(best['log_prob']) - 1e-5).all()
  (metrics, out), _ = jax.jit(lambda b: model.apply(variables, b, method='decode', do_eval=True))(batch_of())
  assert {'log_prob', 'token_error_rate', 'word_error_rate'} == metrics.keys()
  np.testing.assert_array_equal(out['ids'][0], best['ids'][0])
  assert float(metrics['token_error_rate'][0]) == pytest.approx(float(evaluated()[0]['token_error_rate'][0]))


def test_alignments_read_as_the_labels():
  model, variables = make()
  found = jax.jit(lambda b: model.apply(variables, b, method='align', do_eval=True)[0])(batch_of())
  for row in (0, 1, 4):
    index = np.asarray(found.label_index[row])
    assert [said(row)[i] for i in sorted(set(index[index >= 0]))] == said(row)
  assert np.isneginf(found.log_prob[2])


@functools.cache
def on_one_device():
  return take_a_step(set_sharding(config()), batch_of())


@pytest.mark.slow_cases
@pytest.mark.parametrize('mesh', [(2, 1, 3, 1), (1, 2, 2, 2), (1, 1, 2, 3)])
def test_a_step_on_a_mesh_is_that_of_one_device(mesh):
  (loss, variables), (expected, one) = take_a_step(set_sharding(config()), batch_of(), mesh), on_one_device()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  for path, value in one.items():
    np.testing.assert_allclose(variables[path], value, atol=5e-5 * (1 + np.abs(value).max()), err_msg=path_name(path))


@pytest.mark.slow
def test_bfloat16_runs_and_initial_values_have_the_declared_shapes():
  model = config(fprop_dtype=jnp.bfloat16).instantiate()
  variables = model.init(jax.random.key(0))
  declared = jax.tree.map(lambda w: (tuple(w.full_shape), jnp.dtype(w.dtype)), model.abstract_init())
  assert jax.tree.map(lambda x: (x.shape, x.dtype), variables) == declared
  loss, gradients = loss_and_gradients(model, variables, batch_of(), key=jax.random.key(1))
  assert loss.dtype == jnp.float32 and np.isfinite(loss)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def check(model, **leaves):
  batch = {**batch_of(), **leaves}
  data = Config(ArrayInput, name='data', arrays={k: x for k, x in batch.items() if x is not None}, batch_size=2)
  model.check_input(data.instantiate(), {k: x for k, x in batch.items() if x is not None})


def test_mistakes_are_named():
  with pytest.raises(ConfigError, match=r'blank_id: 7 is not a symbol; it must be from 0 to 6'):
    config(blank_id=7).instantiate()
  with pytest.raises(ConfigError, match=r'num_beams: expected at least 1'):
    config(num_beams=0).instantiate()
  with pytest.raises(ConfigError, match=r'a Conformer has convolutions over time, so no context_axis'):
    set_sharding(config(), context_axis='length')
  model, variables = make()
  with pytest.raises(ConfigError, match=r"data: a CtcModel needs 'audio' in each batch; this one has"):
    check(model, audio=None)
  with pytest.raises(ConfigError, match=r"data: found 9 in 'labels', but task.model.vocab_size is 7"):
    check(model, labels=LABELS + 7 * (LABELS == 2))
  with pytest.raises(DataError, match=r"the batch has no leaf 'audio'"):
    model.apply(variables, {'weights': WEIGHTS}, method='predict')
  with pytest.raises(ConfigError, match=r'writes down recordings and continues no prompts'):
    model.apply(variables, {'ids': LABELS, 'prompt_lengths': LENGTHS}, method='decode')
