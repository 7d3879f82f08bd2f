"""Quantizers against plain NumPy: codes, vectors, losses, averages of the codebook, and what padding may not change."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import layers
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.quantizers import split_codes


def normal(*shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def call(config, z, variables=None, **kwargs):
  """Returns (variables, outputs, side outputs) of a call in training."""
  layer = config.instantiate()
  variables = layer.init(jax.random.key(0)) if variables is None else variables
  return variables, *layer.apply(variables, z, key=jax.random.key(1), **kwargs)


def nearest(z, codebook):
  """Codes [N, G] of z [N, G, E] by a loop."""
  return np.array([[((of - x) ** 2).sum(-1).argmin() for x, of in zip(row, codebook)] for row in z])


def loss_of(side, name):
  (value,) = [v for path, (v, _) in side.aux_losses.items() if path.endswith(f'/{name}')]
  return float(value)


def test_ema_codebook_moves_to_the_means_of_its_vectors_as_a_loop_computes():
  z, paddings = normal(5, 3, 4), np.zeros((5, 3))
  paddings[4] = paddings[0, 2] = 1
  config = Config(layers.VectorQuantizer, input_dims=4, num_codes=6, num_groups=2, decay=0.75)
  variables, (vectors, codes), side = call(config, z, paddings=paddings)
  real, grouped = paddings.reshape(-1) == 0, z.reshape(15, 2, 2)
  codebook, counts = np.array(variables['codebook']), np.ones((2, 6))
  expected = nearest(grouped, codebook)
  np.testing.assert_array_equal(np.asarray(codes).reshape(15, 2)[real], expected[real])
  by_code = np.stack([codebook[g, expected[:, g]] for g in range(2)], axis=1)
  np.testing.assert_allclose(np.asarray(vectors).reshape(15, 2, 2)[real], by_code[real], atol=1e-6)
  assert loss_of(side, 'commitment') == pytest.approx(((grouped - by_code)[real] ** 2).mean(), rel=1e-5)
  sums = counts[..., None] * codebook
  for g, v in itertools.product(range(2), range(6)):
    own = grouped[real & (expected[:, g] == v), g]
    counts[g, v] = 0.75 * counts[g, v] + 0.25 * len(own)
    sums[g, v] = 0.75 * sums[g, v] + 0.25 * own.sum(0)
  np.testing.assert_allclose(side.updates['counts'], counts, rtol=1e-6)
  np.testing.assert_allclose(side.updates['codebook'], sums / counts[..., None], rtol=1e-5, atol=1e-6)
  share = np.stack([np.bincount(expected[real, g], minlength=6) / real.sum() for g in range(2)])
  perplexity = np.exp(-(share * np.log(np.where(share, share, 1))).sum(-1)).mean()
  assert side.summaries['VectorQuantizer/perplexity'].value == pytest.approx(perplexity, rel=1e-5)
  assert side.summaries['VectorQuantizer/usage'].value == pytest.approx((share > 0).mean())


def test_evaluation_and_a_batch_of_padding_change_no_codebook():
  z, config = normal(2, 3, 4), Config(layers.VectorQuantizer, input_dims=4, num_codes=6)
  variables, _, side = call(config, z, do_eval=True)
  assert not side.updates
  _, _, side = call(config, np.full_like(z, np.nan), variables, paddings=np.ones(2))
  jax.tree.map(np.testing.assert_array_equal, side.updates, variables)
  assert loss_of(side, 'commitment') == 0


def test_padding_counts_in_nothing():
  """Rows of NaN that are padding change neither losses, nor averages, nor gradients of the others."""
  for cls, fields in (
    (layers.VectorQuantizer, {'num_codes': 6}),
    (layers.LookupFreeQuantizer, {}),
    (layers.GumbelQuantizer, {'num_codes': 6, 'diversity_weight': 1.0, 'kl_weight': 1.0, 'noise': 0.0}),
  ):
    config, z = Config(cls, input_dims=4, **fields), normal(3, 4)
    variables, outputs, side = call(config, z)
    more = np.concatenate([z, np.full((2, 4), np.nan, np.float32)])
    _, padded, padded_side = call(config, more, variables, paddings=np.array([0, 0, 0, 1, 1]))
    np.testing.assert_allclose(padded.vectors[:3], outputs.vectors, atol=1e-6)
    for a, e in zip(jax.tree.leaves(padded_side), jax.tree.leaves(side)):
      np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_gradients_go_straight_through_and_commitment_moves_vectors_only():
  config = Config(layers.VectorQuantizer, input_dims=4, num_codes=6, update='gradient')
  layer, z, target = config.instantiate(), normal(5, 4), normal(5, 4, seed=1)
  variables = layer.init(jax.random.key(0))

  def loss(variables, z):
    (vectors, _), side = layer.apply(variables, z)
    return jnp.sum(vectors * target) + sum(v * w for v, w in side.aux_losses.values())

  of_variables, of_z = jax.grad(loss, argnums=(0, 1))(variables, z)
  codebook = np.array(variables['codebook'])
  codes = nearest(z[:, None], codebook)[:, 0]
  by_code = codebook[0, codes]
  np.testing.assert_allclose(of_z, target + 0.25 * 2 * (z - by_code) / z.size, rtol=1e-4, atol=1e-6)
  expected = np.zeros((6, 4))
  np.add.at(expected, codes, 2 * (by_code - z) / z.size)
  np.testing.assert_allclose(of_variables['codebook'][0], expected, rtol=1e-4, atol=1e-6)


def test_least_used_codes_become_halves_of_the_most_used_ones():
  counts, codebook = np.array([[0.0, 8.0, 3.0, 0.1, 5.0]], np.float32), normal(1, 5, 3)
  new, moved = split_codes(jnp.array(counts), jnp.array(codebook), 0.1)
  np.testing.assert_allclose(new, [[4.0, 4.0, 3.0, 2.5, 2.5]])
  for code, of in enumerate((1, 1, 2, 4, 4)):
    np.testing.assert_allclose(moved[0, code], codebook[0, of], atol=0.1)
  assert (np.asarray(moved[0, 0]) != codebook[0, 1]).all()
  same = split_codes(jnp.array(counts + 4), jnp.array(codebook), 0.1)
  np.testing.assert_array_equal(same[0], counts + 4)
  np.testing.assert_array_equal(same[1], codebook)


def test_normalized_vectors_are_compared_by_angle():
  config = Config(layers.VectorQuantizer, input_dims=4, num_codes=6, normalize=True)
  variables, (vectors, codes), _ = call(config, normal(7, 4))
  codebook = np.array(variables['codebook'][0])
  codebook /= np.linalg.norm(codebook, axis=-1, keepdims=True)
  expected = (normal(7, 4) @ codebook.T).argmax(-1)
  np.testing.assert_array_equal(codes[:, 0], expected)
  np.testing.assert_allclose(vectors, codebook[expected], atol=1e-5)


def test_random_quantizer_takes_the_code_of_the_greatest_cosine():
  config = Config(layers.RandomVectorQuantizer, input_dims=5, num_codes=6, num_groups=2, code_dims=3)
  variables, (vectors, codes), _ = call(config, normal(7, 5))
  assert not any(w.trainable for w in jax.tree.leaves(config.instantiate().abstract_init()))
  for g in range(2):
    book = np.array(variables['codebook'][g])
    book /= np.linalg.norm(book, axis=-1, keepdims=True)
    expected = (normal(7, 5) @ np.array(variables['projection'][g]) @ book.T).argmax(-1)
    np.testing.assert_array_equal(codes[:, g], expected)
    np.testing.assert_allclose(vectors[:, 3 * g : 3 * g + 3], book[expected], atol=1e-6)


def test_gumbel_quantizer_takes_the_most_probable_code_and_draws_by_probability():
  config = Config(layers.GumbelQuantizer, input_dims=4, num_codes=3, kl_weight=1.0, diversity_weight=1.0)
  z = np.repeat(normal(1, 4), 4000, axis=0)
  variables, (_, codes), side = call(config, z)
  logits = z[0] @ np.array(variables['linear']['w'])
  p = np.exp(logits) / np.exp(logits).sum()
  np.testing.assert_allclose(np.bincount(codes[:, 0]) / 4000, p, atol=0.03)
  assert loss_of(side, 'kl') == pytest.approx((p * np.log(3 * p)).sum(), rel=1e-3)
  assert loss_of(side, 'diversity') == pytest.approx(1 - np.exp(-(p * np.log(p)).sum()) / 3, rel=1e-3)
  _, (vectors, codes), _ = call(config, z[:2], variables, do_eval=True)
  assert (codes == p.argmax()).all()
  np.testing.assert_allclose(vectors[0], variables['codebook'][0, p.argmax()], atol=1e-6)


@pytest.mark.parametrize('levels', [(8, 5, 5, 5), (2,), (3, 2)])
def test_finite_scalars_reach_each_level_and_their_codes_count_them(levels):
  config = Config(layers.FiniteScalarQuantizer, levels=levels)
  z = 3 * normal(500, len(levels))
  _, (vectors, codes), _ = call(config, z)
  half = np.array(levels) // 2
  digits = np.asarray(vectors) * half + half
  np.testing.assert_allclose(digits, digits.round(), atol=1e-5)
  for d, count in enumerate(levels):
    assert set(digits[:, d].round()) == set(range(count))
  np.testing.assert_array_equal(codes[:, 0], np.ravel_multi_index(digits.round().astype(int).T[::-1], levels[::-1]))
  looked_up, _ = config.instantiate().apply({}, codes, method='lookup')
  np.testing.assert_allclose(looked_up, vectors, atol=1e-6)
  order = z[:, 0].argsort()
  assert (np.diff(digits[order, 0]) >= -1e-5).all()


@pytest.mark.parametrize('joint_dims', [3, 2])
def test_entropies_of_lookup_free_codes_are_those_of_an_enumeration(joint_dims):
  config = Config(layers.LookupFreeQuantizer, input_dims=3, joint_dims=joint_dims, temperature=2.0, diversity=0.7)
  z = normal(6, 3)
  _, (vectors, codes), side = call(config, z)
  np.testing.assert_array_equal(vectors, np.where(z > 0, 1, -1))
  np.testing.assert_array_equal(codes[:, 0], (z > 0) @ [1, 2, 4])
  every = np.array(list(itertools.product([-1, 1], repeat=3)))
  p = np.exp(-((z[:, None] - every) ** 2).sum(-1) / 2.0)
  p /= p.sum(-1, keepdims=True)
  mean = p.mean(0).reshape(2, 2, 2)
  runs = [mean] if joint_dims == 3 else [mean.sum(2), mean.sum((0, 1))]
  of_batch = -sum((q * np.log(q)).sum() for q in runs)
  assert loss_of(side, 'entropy') == pytest.approx(-(p * np.log(p)).sum(-1).mean() - 0.7 * of_batch, rel=1e-4)
  looked_up, _ = config.instantiate().apply({}, codes, method='lookup')
  np.testing.assert_array_equal(looked_up, vectors)


def test_one_row_and_no_rows():
  for rows in (1, 0):
    _, (vectors, codes), side = call(Config(layers.VectorQuantizer, input_dims=4, num_codes=3), normal(rows, 2, 4))
    assert vectors.shape == (rows, 2, 4) and codes.shape == (rows, 2, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(side))


@pytest.mark.parametrize(
  'cls, fields, message',
  [
    (layers.VectorQuantizer, {'input_dims': 5, 'num_codes': 3, 'num_groups': 2}, 'num_groups: 2 does not divide'),
    (layers.VectorQuantizer, {'input_dims': 4, 'num_codes': 1}, 'num_codes'),
    (layers.VectorQuantizer, {'input_dims': 4, 'num_codes': 3, 'update': 'sgd'}, "update: .*'ema'"),
    (layers.FiniteScalarQuantizer, {'levels': (5, 1)}, 'levels: expected numbers of at least 2'),
    (layers.LookupFreeQuantizer, {'input_dims': 31}, 'input_dims'),
    (layers.GumbelQuantizer, {'input_dims': 4, 'num_codes': 3, 'temperature': 0.0}, 'temperature'),
  ],
)
def test_impossible_hyperparameters_are_refused_by_name(cls, fields, message):
  with pytest.raises(ConfigError, match=message):
    Config(cls, **fields).instantiate()


def test_an_input_of_other_dims_is_refused():
  with pytest.raises(ConfigError, match='quantizes vectors of 2 dims, and an input of shape'):
    call(Config(layers.FiniteScalarQuantizer, levels=(3, 3)), normal(2, 4))
