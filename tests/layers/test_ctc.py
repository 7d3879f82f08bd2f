"""CTC: loss and alignment against all paths, decoding against all labels, and gradients on meshes."""

from __future__ import annotations

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import ctc_alignment, ctc_beam_search, ctc_frames_needed, ctc_greedy_decode, ctc_loss

B, T, V, U = 5, 5, 3, 3
LENGTHS = (5, 4, 3, 1, 0)
# Row 2 has two equal labels in the fewest frames; row 3 has fewer frames than labels; row 4 has nothing.
LABELS = {0: ((1, 2, 1), (2, 1), (1, 1), (2, 2), ()), 2: ((1, 0, 1), (0,), (0, 0), (1, 1), ())}


def case(blank_id=0):
  logits = 2 * np.random.default_rng(blank_id).standard_normal((B, T, V)).astype(np.float32)
  labels, label_paddings = np.full((B, U), 77, np.int32), np.ones((B, U), np.float32)
  for row, of_row in enumerate(LABELS[blank_id]):
    labels[row, : len(of_row)], label_paddings[row, : len(of_row)] = of_row, 0
  paddings = (np.arange(T) >= np.array(LENGTHS)[:, None]).astype(np.float32)
  return np.where(paddings[..., None], np.nan, logits), paddings, labels, label_paddings


def read(path, blank_id):
  return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != blank_id)


def all_paths(logits, blank_id):
  """(path, the labels that it reads, its log probability) of every path through these frames."""
  logits = logits.astype(np.float64)
  log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  for path in itertools.product(range(V), repeat=len(logits)):
    yield path, read(path, blank_id), sum(frame[symbol] for frame, symbol in zip(log_probs, path))


@pytest.mark.parametrize('blank_id', [0, 2])
def test_loss_and_alignment_are_those_of_all_paths(blank_id):
  logits, paddings, labels, label_paddings = case(blank_id)
  loss = ctc_loss(logits, paddings, labels, label_paddings, blank_id=blank_id)
  found = ctc_alignment(logits, paddings, labels, label_paddings, blank_id=blank_id)
  needed = ctc_frames_needed(labels, label_paddings)
  for row, (length, of_row) in enumerate(zip(LENGTHS, LABELS[blank_id])):
    paths = [(p, prob) for p, reads, prob in all_paths(logits[row, :length], blank_id) if reads == of_row]
    assert (needed[row] <= length) == bool(paths)
    if not paths:
      assert loss[row] > 9e4 and found.log_prob[row] == -np.inf and (found.ids[row] == blank_id).all()
      continue
    np.testing.assert_allclose(loss[row], -np.logaddexp.reduce([prob for _, prob in paths]), rtol=1e-5, atol=1e-5)
    best, prob = max(paths, key=lambda pair: pair[1])
    np.testing.assert_allclose(found.log_prob[row], prob, rtol=1e-5, atol=1e-5)
    assert tuple(found.ids[row]) == (*best, *[blank_id] * (T - length))
    index = np.asarray(found.label_index[row])
    assert [of_row[i] if i >= 0 else blank_id for i in index] == found.ids[row].tolist()
    assert (np.diff(index[index >= 0]) >= 0).all() and set(range(len(of_row))) == set(index[index >= 0])


def test_no_column_of_labels_is_a_path_of_blanks():
  logits = case()[0][:2, :3]
  none, paddings = np.zeros((2, 0), np.int32), np.zeros((2, 3), np.float32)
  expected = -jax.nn.log_softmax(logits)[..., 0].sum(1)
  np.testing.assert_allclose(ctc_loss(logits, paddings, none, none.astype(np.float32)), expected, rtol=1e-5)
  found = ctc_alignment(logits, paddings, none, none.astype(np.float32))
  np.testing.assert_allclose(found.log_prob, -expected, rtol=1e-5)
  assert not found.ids.any() and (found.label_index == -1).all()


@pytest.mark.parametrize('blank_id', [0, 2])
def test_a_wide_beam_finds_the_labels_of_all_paths_in_their_order(blank_id):
  logits, paddings, *_ = case(blank_id)
  found = ctc_beam_search(logits, paddings, num_beams=64, blank_id=blank_id)
  greedy = ctc_greedy_decode(logits, paddings, blank_id=blank_id)
  for row, length in enumerate(LENGTHS):
    of_labels, paths = collections.defaultdict(lambda: -np.inf), list(all_paths(logits[row, :length], blank_id))
    for _, reads, prob in paths:
      of_labels[reads] = np.logaddexp(of_labels[reads], prob)
    ranked = sorted(of_labels.items(), key=lambda item: -item[1])
    for k, (reads, prob) in enumerate(ranked):
      assert tuple(found.ids[row, k, : found.lengths[row, k]]) == reads
      assert (found.ids[row, k, found.lengths[row, k] :] == blank_id).all()
      np.testing.assert_allclose(found.log_probs[row, k], prob, rtol=1e-5, atol=1e-5)
    assert (found.log_probs[row, len(ranked) :] == -np.inf).all()
    _, reads, prob = max(paths, key=lambda path: path[2])
    assert tuple(greedy.ids[row, : greedy.lengths[row]]) == reads
    np.testing.assert_allclose(greedy.log_probs[row], prob, rtol=1e-5, atol=1e-5)


def test_a_narrow_beam_is_right_where_the_best_path_is_not():
  """Two frames, each 0.6 a blank: the best path reads nothing with 0.36, and "a" has 0.64."""
  logits = np.log(np.array([[[0.6, 0.4]] * 2], np.float32))
  assert ctc_greedy_decode(logits, np.zeros((1, 2))).lengths.tolist() == [0]
  found = ctc_beam_search(logits, np.zeros((1, 2)), num_beams=2, max_labels=1)
  assert found.ids.shape == (1, 2, 1) and found.ids[0, 0, 0] == 1
  np.testing.assert_allclose(np.exp(found.log_probs[0]), [0.64, 0.36], rtol=1e-5)


def test_mistakes_of_a_search_are_named():
  logits, paddings, *_ = case()
  for fields, message in (
    ({'num_beams': 0}, r'num_beams.* least 1'),
    ({'max_labels': 0}, r'max_labels.* least 1'),
    ({'blank_id': 3}, 'blank_id: 3 is not one of 3 symbols'),
  ):
    with pytest.raises(ConfigError, match=message):
      ctc_beam_search(logits, paddings, **fields)


@pytest.mark.slow_cases
@pytest.mark.parametrize('shape', [(3, 1), (2, 2)], ids=str)
def test_gradients_on_a_mesh_equal_one_device(shape):
  """Rows over an axis of 3 beside one of a single device, and over 2 beside an unused one; bfloat16 logits too."""
  logits, paddings, labels, label_paddings = case()
  at = np.array([0, 1, 2, 4, 0, 1]) if shape[0] == 3 else np.array([0, 1, 2, 4])
  args = [x[at] for x in (np.nan_to_num(logits), paddings, labels, label_paddings)]

  def loss(logits, *others):
    return jnp.sum(ctc_loss(logits, *others) * jnp.arange(1, len(at) + 1))

  expected = jax.grad(loss)(*args)
  mesh = jax.make_mesh(shape, ('data', 'mdl'), devices=jax.devices()[: shape[0] * shape[1]])
  placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec('data'))) for x in args]
  np.testing.assert_allclose(jax.jit(jax.grad(loss))(*placed), expected, atol=1e-5)
  assert not np.asarray(expected)[args[1] != 0].any()
  half = jax.grad(loss)(args[0].astype(jnp.bfloat16), *args[1:])
  assert half.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(half, np.float32), expected, atol=0.1)
