"""Masks of every kind, and compositions of them, are the same to all implementations of attention."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from praxis_lite import layers
from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers import (
  ArrayMask,
  AttentionMask,
  AttentionSpec,
  Band,
  Causal,
  ChunkMemory,
  FunctionMask,
  Known,
  LocalChunks,
  MultiHeadAttention,
  Paddings,
  Prefix,
  Segments,
  SequenceSplit,
  SlidingWindow,
  blockwise_attention,
  context_parallel_attention,
  dot_product,
  dot_product_attention,
  key_array,
  query_array,
  row_array,
)
from praxis_lite.layers.block_arrays import block_indices, mask_blocks
from praxis_lite.layers.masks import BlockRanges, split_offsets, to_mask
from praxis_lite.layers.splash import mask_obstacle
from praxis_lite.sharding import GuardedJit

B, T, N, K, H = 2, 13, 4, 2, 4


class Relatives(AttentionMask):
  """A kind of this test only, with arrays of every sort: keys of a family near the query's, and the first keys."""

  family_BT: jax.Array = query_array()
  key_family_BS: jax.Array = key_array()
  firsts_B: jax.Array = row_array()
  distance: int

  def allows(self, query_T, key_S):
    near = abs(self.family_BT[:, :, None] - self.key_family_BS[:, None, :]) <= self.distance
    return near | (key_S[..., None, :] < self.firsts_B[:, None, None])


class Strides(AttentionMask):
  """Another kind of this test: keys some whole strides away. It knows itself which blocks it empties."""

  stride: int

  def allows(self, query_T, key_S):
    return (query_T[..., :, None] - key_S[..., None, :]) % self.stride == 0

  def some_allowed(self, at):
    # The multiples of the stride between the least and the greatest difference.
    return Known((at.query_high - at.key_low) // self.stride > (at.query_low - at.key_high - 1) // self.stride)


def ints(seed, *shape, high=3):
  return jnp.asarray(np.random.default_rng(seed).integers(0, high, shape), jnp.int32)


IDS = jnp.asarray(np.sort(ints(1, B, T), axis=1))
KINDS = {
  'all': Band(),
  'causal': Causal(),
  'window': SlidingWindow(4),
  'band': Band(behind=2, ahead=5),
  'behind': Band(behind=3),
  'ahead': Band(ahead=-2),
  'prefix': Prefix(jnp.array([3, 9], jnp.int32)),
  'segments': Segments(IDS, IDS),
  'segments of all rows': Segments(IDS[:1], IDS[:1]),
  'paddings': Paddings(jnp.asarray(np.arange(T) >= np.array([[6], [11]]), jnp.float32)),
  'array': ArrayMask(ints(2, B, T, T, high=2) > 0),
  'function': FunctionMask(lambda query, key: (query + key) % 3 != 0),
  'relatives': Relatives(ints(3, B, T, high=6), ints(4, B, T, high=6), jnp.array([1, 2]), distance=1),
  'chunks': LocalChunks(5),
  'memory': ChunkMemory(5, 3),
  'strides': Strides(6),
}


def test_each_exported_kind_has_an_example():
  exported = {v for name in layers.__all__ if isinstance(v := getattr(layers, name), type)}
  missing = {v for v in exported if issubclass(v, AttentionMask)} - {type(mask) for mask in KINDS.values()}
  names = sorted(kind.__name__ for kind in missing if not kind.__abstractmethods__)
  assert not names, f'add an example of {names} to KINDS, which the tests of this file compare with dense attention'


def composed(seed):
  """A random composition of two to four kinds."""
  rng = np.random.default_rng(seed)
  mask = KINDS[str(rng.choice(list(KINDS)))]
  for _ in range(rng.integers(1, 4)):
    other = KINDS[str(rng.choice(list(KINDS)))]
    mask = mask & other if rng.random() < 0.5 else other | mask
  return mask


COMPOSED = {
  'causal window': Causal() & SlidingWindow(4),
  'causal chunks': Causal() & LocalChunks(4),
  'packed prefix window': (Causal() | Prefix(jnp.array([3, 9], jnp.int32))) & SlidingWindow(5) & Segments(IDS, IDS),
  **{f'composed {seed}': composed(seed) for seed in range(8)},
}
MASKS = KINDS | COMPOSED


def whole(mask):
  """A mask as a NumPy array [B, T, T], from `allows` of one query and a few keys at a time."""
  found = np.ones((B, T, T), bool)
  for t, keys in itertools.product(range(T), (slice(0, 5), slice(5, T))):
    here = mask.map_arrays(query=lambda x, t=t: x[:, t : t + 1], key=lambda x, keys=keys: x[:, keys])
    allowed = here.allows(jnp.array([t]), jnp.arange(T)[keys])
    found[:, t : t + 1, keys] &= True if allowed is None else np.asarray(allowed)
  return found


# Masks that know of each pair of blocks whether some key is allowed, and whether some is masked.
_EXACT = 'all', 'causal', 'window', 'band', 'behind', 'ahead', 'prefix', 'causal window', 'chunks', 'memory'


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', MASKS)
def test_a_mask_knows_the_blocks_that_it_empties_and_fills(name):
  """By brute force: on all pairs of blocks of several sizes."""
  mask = MASKS[name]
  expected = whole(mask)
  array = mask.to_array(T, T)
  assert (expected == (True if array is None else np.asarray(array)[:, 0])).all()
  for size in (1, 4, 5):
    at = block_indices(T, size)
    low, high = np.where(at < 0, T, at).min(1), at.max(1)
    in_blocks = mask_blocks(mask, size, size)
    for all_rows in (True, False):
      ranges = BlockRanges(low[:, None], high[:, None], low, high, all_rows)
      found = in_blocks.some_allowed(ranges), in_blocks.some_masked(ranges)
      assert not any(isinstance(known.by_index, jax.Array) for known in found), 'a static loop needs NumPy arrays'
      allowed, masked = (np.broadcast_to(True if x.both is None else x.both, (len(at),) * 2) for x in found)
      for i, j in np.ndindex(len(at), len(at)):
        pair = expected[:, at[i][at[i] >= 0]][:, :, at[j][at[j] >= 0]]
        assert allowed[i, j] >= pair.any(), (size, i, j)
        assert masked[i, j] >= (~pair).any(), (size, i, j)
        if all_rows and name in _EXACT:
          assert allowed[i, j] == pair.any() and masked[i, j] == (~pair).any()
        if all_rows and size == 1 and name in ('segments', 'paddings', 'strides'):
          assert allowed[i, j] == pair.any()


@functools.cache
def arguments():
  rng = np.random.default_rng(0)
  shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
  return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def gradients(attend, mask, gradient, *heads):
  """The result and gradients; those of queries that attend to nothing are left out."""

  def seen(*heads):
    allowed = mask.to_array(T, T)
    out = attend(*heads, mask)
    return out if allowed is None else jnp.where(allowed.any(-1)[:, 0, :, None, None], out, 0)

  out, pull = jax.vjp(seen, *heads)
  return out, pull(gradient)


def dense(query, key, value, mask):
  return dot_product_attention(query, key, value, mask, spec=AttentionSpec(implementation='dense'))


@functools.cache
def densely(name):
  *heads, gradient = arguments()
  return jax.jit(functools.partial(gradients, dense))(MASKS[name], gradient, *heads)


def assert_close(found, expected):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-5), found, expected)


@pytest.mark.slow_cases
@pytest.mark.parametrize('name', MASKS)
def test_blockwise_attention_is_dense_attention_under_every_mask(name):
  *heads, gradient = arguments()

  def attend(query, key, value, mask):
    return blockwise_attention(query, key, value, mask, spec=AttentionSpec(block_size=4))

  found = jax.jit(functools.partial(gradients, attend))(MASKS[name], gradient, *heads)
  assert found[0].std() > 0.01
  assert_close(found, densely(name))


# Masks with arrays go both ways, and the others take turns.
SPLITS = [
  (name, method)
  for i, (name, mask) in enumerate(MASKS.items())
  for j, method in enumerate(('ring', 'all_to_all'))
  if (i + j) % 2 or (name in KINDS and jax.tree.leaves(mask))
]


@pytest.mark.slow
@pytest.mark.parametrize('name, method', SPLITS)
def test_a_split_sequence_is_one_device_under_every_mask(name, method):
  """On two and three devices in turn, of which 13 tokens, 4 heads and 2 kv heads do not divide by all."""
  devices = SPLITS.index((name, method)) // 2 % 2 + 2
  rows = 2 if devices == 2 else 1
  mesh = jax.make_mesh(
    (rows, devices), ('data', 'context'), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: rows * devices]
  )
  split = SequenceSplit('context', method, ('data',))
  *heads, gradient = arguments()

  def attend(query, key, value, mask):
    return context_parallel_attention(query, key, value, mask, split=split, spec=AttentionSpec(block_size=3))

  def on_mesh(*args):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return gradients(attend, *args)

  placed = jax.device_put((MASKS[name], gradient, *heads), NamedSharding(mesh, PartitionSpec()))
  assert_close(GuardedJit(on_mesh)(*placed), densely(name))


def test_blocks_that_are_all_full_are_not_masked():
  def selects(mask, length):
    x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)
    attend = functools.partial(blockwise_attention, mask=mask, spec=AttentionSpec(block_size=8))
    return str(jax.make_jaxpr(lambda x: attend(x, x, x))(x)).count('select_n')

  unmasked = selects(None, 32)
  assert selects(Band(behind=40), 32) == unmasked
  assert selects(Causal(), 32) == unmasked + 1
  assert selects(None, 30) == unmasked + 1, 'the last block has padding'


def test_offsets_compose_to_what_a_fused_kernel_takes(monkeypatch):
  """Causal masks and causal windows are arguments of the kernel, and what else there is becomes an array."""
  calls = []
  monkeypatch.setattr(dot_product, 'platform', lambda: 'gpu')
  monkeypatch.setattr(jax.nn, 'dot_product_attention', lambda *args, **kwargs: calls.append(kwargs) or args[0])

  def call(mask):
    x, ids = jnp.ones((2, 16, 2, 8), jnp.bfloat16), jnp.ones((2, 16), jnp.int32)
    mask = mask & Segments(ids, ids) if packed else mask
    dot_product_attention(x, x, x, mask, spec=AttentionSpec(implementation='cudnn'))
    found = calls.pop()
    return found['is_causal'], found['local_window_size'], None if found['mask'] is None else found['mask'].shape

  packed = False
  assert call(Band()) == (False, None, None)
  assert call(Causal()) == (True, None, None)
  assert call(SlidingWindow(9) & Causal() & SlidingWindow(5)) == (True, (4, 0), None)
  assert call(Causal() | Prefix(jnp.array([3, 2]))) == (False, None, (2, 1, 16, 16))
  with pytest.raises(ConfigError, match='sliding_window only with causal attention'):
    call(SlidingWindow(5))
  packed = True
  assert call(Causal() & SlidingWindow(5)) == (True, (4, 0), (2, 1, 16, 16))
  assert call(Band()) == (False, None, (2, 1, 16, 16))


def test_kernels_that_have_no_chunks_leave_them_to_others_and_say_so():
  mask = Causal() & LocalChunks(4)
  assert mask_obstacle(mask, T, T).endswith('not the mask LocalChunks')
  at = np.arange(3)[:, None] * 4, np.arange(3)[:, None] * 4 + 3
  known = mask.some_allowed(BlockRanges(*at, at[0][:, 0], at[1][:, 0]))
  np.testing.assert_array_equal(known.by_index, np.eye(3))  # So a static loop visits the diagonal alone.


def test_masks_compose_flat_and_offsets_first():
  ids = Segments(IDS, IDS)
  offsets, others = split_offsets(ids & Causal() & KINDS['function'] & SlidingWindow(3))
  assert (offsets.behind, offsets.ahead) == (2, 0)
  assert others.parts == (ids, KINDS['function'])
  assert Band() & ids is ids
  assert to_mask(None).allows(jnp.arange(3), jnp.arange(3)) is None
  assert (Band() | ids).allows(jnp.arange(T), jnp.arange(T)) is None


def test_the_spelling_of_older_versions_is_the_same_attention():
  query, key, value, _ = arguments()
  more = {'segment_ids': IDS, 'kv_segment_ids': IDS, 'prefix_lengths': jnp.array([3, 9])}
  older = dot_product_attention(query, key, value, causal=True, window=5, scale=0.3, implementation='dense', **more)
  mask = (Causal() | Prefix(jnp.array([3, 9]))) & SlidingWindow(5) & Segments(IDS, IDS)
  spec = AttentionSpec(scale=0.3, implementation='dense')
  np.testing.assert_array_equal(older, dot_product_attention(query, key, value, mask, spec=spec))
  with pytest.raises(TypeError, match='windows'):
    dot_product_attention(query, key, value, windows=5)


def test_a_mask_by_head_is_refused_where_blocks_are_cut():
  query, key, value, _ = arguments()
  with pytest.raises(ConfigError, match='differs by head'):
    blockwise_attention(query, key, value, ArrayMask(jnp.ones((B, N, T, T), bool)))


# ---------------------------------------------------------------- the layer


class OneField(AttentionMask):
  ids_BT: jax.Array = query_array()

  def allows(self, query_T, key_S):
    return self.ids_BT[:, :, None] == self.ids_BT[:, None, :]


class Returned(AttentionMask):
  """Returns what a function makes of the indices, and of the ranges of blocks."""

  fn: object
  of_blocks: object = lambda at: Known()

  def allows(self, query_T, key_S):
    return self.fn(query_T, key_S)

  def some_allowed(self, at):
    return self.of_blocks(at)


def earlier(query_T, key_S):
  return key_S[None] <= query_T[:, None]


@pytest.mark.parametrize('implementation', ['dense', 'blockwise'])
@pytest.mark.parametrize(
  'mask, message',
  [
    (
      Relatives(IDS[:, :-1], IDS, jnp.array([1, 2]), distance=1),
      r'family_BT: expected .* 13 queries, .*12\)',
    ),
    (Relatives(IDS, IDS[:, :-1], jnp.array([1, 2]), distance=1), r'key_family_BS: expected .* or 1, 13 keys, ...\]'),
    (
      Relatives(IDS, IDS, jnp.array([1, 2, 3]), distance=1),
      r'firsts_B: expected .* of shape \[2 rows or 1, ...\]',
    ),
    (Relatives(IDS[0], IDS, jnp.array([1, 2]), distance=1), r'family_BT: expected .* got \(13,\)'),
    (Causal() & Segments(IDS, IDS[:, :4]), r'Segments.key_ids_BS: expected .* got \(2, 4\)'),
    (Prefix(jnp.zeros((), jnp.int32)), r'Prefix.length_B: expected .* got \(\)'),
    (
      OneField(IDS),
      r'OneField.allows: .*the shape \(2, 5, 5\); .* needs two fields, a query_arr',
    ),
    (Causal() & Returned(lambda q, k: q < 5), r'Returned.allows: .*S = 3 keys, .*got the shape \(5,\)'),
    (Returned(lambda q, k: q[:, None] - k), r'Returned.allows: expected it to return an array of bool, got int32'),
    (Returned(lambda q, k: True), r'Returned.allows: expected it to return an array of bool, got bool'),
    (FunctionMask(lambda q, k: q - k), r'FunctionMask.allows: expected it to return an array of bool, got int32'),
    (
      FunctionMask(lambda q, k: jnp.where(q[:, None] >= k, True, 'no')),
      r'(?s)FunctionMask.allows fails for (?!.*two fields)',
    ),
    (Returned(lambda q, k: q >= k), r'Returned.allows fails for .* needs two fields'),
    (Returned(earlier, lambda at: at.key_low <= at.query_high), r'some_allowed: expected it to return a Known, got '),
  ],
)
def test_a_mask_that_does_not_fit_is_refused_by_every_implementation(mask, message, implementation):
  x = jnp.ones((B, T, N, H))
  with pytest.raises(ConfigError, match=message):
    dot_product_attention(x, x[:, :, :K], x[:, :, :K], mask, spec=AttentionSpec(implementation=implementation))


@pytest.mark.parametrize('other', [None, np.ones((T, T), bool)], ids=['None', 'array'])
def test_only_masks_compose(other):
  with pytest.raises(ConfigError, match=r"expected an AttentionMask after '&', got .*; to_mask makes a mask"):
    Causal() & other
  with pytest.raises(ConfigError, match=r"expected an AttentionMask after '\|'"):
    Causal() | other


class StridedAttention(MultiHeadAttention):
  """Attends to some whole strides before a token, and to the tokens just before it."""

  stride: int = 5

  def attention_mask(self, **rows):
    return super().attention_mask(**rows) & (Strides(self.stride) | SlidingWindow(3))


def strided(**fields):
  return Config(StridedAttention, input_dims=6, num_heads=N, num_kv_heads=K, dims_per_head=4, causal=True).set(**fields)


@pytest.mark.slow_cases
@pytest.mark.parametrize('page_size', [64, 4])
def test_a_mask_of_a_users_own_is_the_same_in_one_pass_in_blocks_and_with_a_cache(page_size):
  layer = strided(cache_page_size=page_size).instantiate()
  variables = drawn_variables(layer.abstract_init())
  x = jnp.asarray(np.random.default_rng(1).standard_normal((B, T, 6)), jnp.float32)
  expected = jax.jit(layer.apply)(variables, x)[0]
  plain = Config(MultiHeadAttention, input_dims=6, num_heads=N, num_kv_heads=K, dims_per_head=4, causal=True)
  assert abs(jax.jit(plain.instantiate().apply)(variables, x)[0] - expected).max() > 1e-3
  in_blocks = strided(implementation='blockwise', block_size=4).instantiate()
  np.testing.assert_allclose(jax.jit(in_blocks.apply)(variables, x)[0], expected, atol=2e-6)

  _, side = layer.apply(variables, B, T, method='init_decode_state')
  extend = jax.jit(lambda x, pos, s: layer.apply(variables, x, pos, decode_state=s, method='extend_step'))
  found, start = [], 0
  for length in (6, *[1] * (T - 6)):
    pos = jnp.tile(jnp.arange(start, start + length), (B, 1))
    y, side = extend(x[:, start : start + length], pos, side.decode_state)
    found.append(y)
    start += length
  np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, atol=2e-6)


class Forgets(MultiHeadAttention):
  def attention_mask(self, **rows):
    super().attention_mask(**rows)


class LacksAnArgument(MultiHeadAttention):
  def attention_mask(self, *, segment_ids=None, segment_pos=None, prefix_lengths=None):
    return super().attention_mask(segment_ids=segment_ids)


class ReturnsAnArray(MultiHeadAttention):
  def attention_mask(self, **rows):
    return jnp.ones((T, T), bool)


WRONG_MASKS = {
  Forgets: r'\(?Forgets\.attention_mask\)? returned None; does it lack a return\? \(.*test_masks\.py:\d+\)',
  LacksAnArgument: r'LacksAnArgument\.attention_mask lacks the argument kv_segment_ids; define it as .*test_masks\.py:',
  ReturnsAnArray: r'ReturnsAnArray\.attention_mask returned an array; it must return an AttentionMask, .*test_masks',
}


@pytest.mark.parametrize(('kind', 'message'), WRONG_MASKS.items(), ids=[kind.__name__ for kind in WRONG_MASKS])
def test_an_attention_mask_that_cannot_be_used_is_one_line(kind, message):
  layer = Config(kind, input_dims=6, num_heads=2, dims_per_head=3, causal=True).instantiate()
  with pytest.raises(ConfigError, match=message):
    jax.eval_shape(layer.apply, layer.abstract_init(), jnp.ones((B, T, 6)))
  with pytest.raises(ConfigError, match=message):
    layer.implementation_of(T, packed=True)


class PackedOnlyAttention(MultiHeadAttention):
  """Its mask has an array of keys, in decoding too."""

  def attention_mask(self, **rows):
    return super().attention_mask(**rows) & KINDS['paddings']


def test_a_cache_refuses_a_mask_with_arrays_of_keys():
  layer = Config(PackedOnlyAttention, input_dims=6, num_heads=N, dims_per_head=4, causal=True).instantiate()
  variables = drawn_variables(layer.abstract_init())
  _, side = layer.apply(variables, B, T, method='init_decode_state')
  with pytest.raises(ConfigError, match='cannot be used with a cache'):
    layer.apply(
      variables, jnp.ones((B, 1, 6)), jnp.zeros((B, 1), jnp.int32), decode_state=side.decode_state, method='extend_step'
    )


@pytest.mark.slow
@pytest.mark.parametrize('method', ['ring', 'all_to_all'])
def test_a_layer_with_a_mask_of_a_users_own_splits_its_sequence(method):
  mesh = jax.make_mesh((3,), ('context',), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
  one = strided().instantiate()
  many = strided(context_axis='context', context_method=method, mesh_axis_names=mesh.axis_names).instantiate()
  variables = drawn_variables(one.abstract_init())
  x = np.random.default_rng(1).standard_normal((B, T, 6)).astype(np.float32)

  def loss(layer, variables, x):
    return jnp.sum(layer.apply(variables, x, segment_ids=IDS)[0] ** 2)

  def on_mesh(variables, x):
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
      return jax.value_and_grad(functools.partial(loss, many), argnums=(0, 1))(variables, x)

  placed = jax.device_put((variables, x), NamedSharding(mesh, PartitionSpec()))
  expected = jax.jit(jax.value_and_grad(functools.partial(loss, one), argnums=(0, 1)))(variables, x)
  found = GuardedJit(on_mesh)(*placed)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-4, rtol=1e-5), found, expected)


@pytest.mark.parametrize('size', [0, -1, '3', 2.5])
@pytest.mark.parametrize(
  ('kind', 'name'), [(SlidingWindow, 'SlidingWindow.window'), (LocalChunks, 'LocalChunks.chunk')]
)
def test_a_mask_of_no_tokens_is_an_error(kind, name, size):
  with pytest.raises(ConfigError, match=f'{name}: expected an integer of at least 1, got '):
    kind(size)


def test_the_class_of_a_mask_is_not_a_mask():
  x = jnp.zeros((1, 4, 2, 4))
  with pytest.raises(ConfigError, match=r'expected a mask, got the class Causal; call it, as in Causal\(\)'):
    dot_product_attention(x, x, x, Causal)
