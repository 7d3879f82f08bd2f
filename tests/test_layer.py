"""The contract of a layer: inheritance, variables, the pure call, randomness, state, sharding, and what is refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from praxis_lite.common.config import REQUIRED, Config, child, field_names, template
from praxis_lite.common.errors import ConfigError, ShardingError, UnknownFieldError
from praxis_lite.layers import Repeat
from praxis_lite.layers.base import Layer, SplitMapping, WeightSplit
from praxis_lite.sharding.weights import WeightHParams, WeightHParamsCollection, WeightInit

KEY = jax.random.key(0)


class Scale(Layer):
  """y = x * s, with noise if asked for."""

  dims: int = 3
  noise: float = 0.0

  def setup(self):
    self.create_variable('s', WeightHParams((self.dims,)))

  def __call__(self, x):
    if self.noise:
      x = x + self.noise * jax.random.normal(self.next_prng_key(), x.shape)
    return x * self.theta.s


class Pair(Layer):
  """Two children one after the other, and a third in between if asked for."""

  first_tpl: Config = template(Scale)
  second_tpl: Config = template(Scale)
  between: bool = False

  def setup(self):
    self.create_child('first', self.first_tpl)
    if self.between:
      self.create_child('between_layer', Config(Scale, noise=0.5))
    self.create_child('second', self.second_tpl)

  def __call__(self, x):
    x = self.first(x)
    if self.between:
      self.between_layer(x)
    return self.second(x)


class Counter(Layer):
  """Counts calls, and logs; `seen` is what a read after the update gives."""

  def setup(self):
    self.create_variable('n', WeightHParams((), init=WeightInit.Constant(0.0)), trainable=False)
    self.create_variable('w', WeightHParams((), init=WeightInit.Constant(2.0)))

  def __call__(self, x):
    self.update_var('n', self.theta.n + 1)
    seen = self.theta.n
    self.add_summary('x_mean', jnp.mean(x))
    self.add_aux_loss('penalty', self.theta.w**2, weight=0.5)
    return x * self.theta.w + seen


class Reports(Layer):
  """Reports something about each row, in a function that a transform of JAX traces, or after it."""

  transform: str = 'scan'
  what: str = 'summary'
  inside: bool = True

  def setup(self):
    self.create_variable('n', WeightHParams((), init=WeightInit.Constant(0.0)), trainable=False)

  def report(self, value):
    if self.what == 'summary':
      self.add_summary('mean', value)
    elif self.what == 'auxiliary loss':
      self.add_aux_loss('mean', value)
    else:
      self.update_var('n', value)

  def __call__(self, x):
    def row(x):
      if self.inside:
        self.report(jnp.mean(x))
      return jnp.mean(x)

    means = {
      'scan': lambda: jax.lax.scan(lambda carry, x: (carry, row(x)), 0, x)[1],
      'vmap': lambda: jax.vmap(row)(x),
      'grad': lambda: jax.grad(row)(x[0]),
      'checkpoint': lambda: jax.checkpoint(row)(x),
      'jit': lambda: jax.jit(row)(x),
    }[self.transform]()
    if not self.inside:
      self.report(jnp.mean(means))
    return x


class Cached(Layer):
  """The sum of all that it was given so far."""

  def __call__(self, x):
    return x

  def extend_step(self, x):
    total = self.get_decode_state('total')
    self.update_decode_state('total', x if total is None else total + x)
    return self.get_decode_state('total')


class Wrapper(Layer):
  """One child `sub`, and the child's path below it."""

  sub_tpl: Config = REQUIRED

  def setup(self):
    self.create_child('sub', self.sub_tpl)

  def __call__(self, x):
    return self.sub(x)


def build(cls, **fields):
  return Config(cls, **fields).instantiate()


def wrapped(cls, **fields):
  return build(Wrapper, sub_tpl=Config(cls, **fields))


def x_BD(rows=2, dims=3):
  return jnp.arange(rows * dims, dtype=jnp.float32).reshape(rows, dims) + 1


# ---------------------------------------------------------------- variables


def test_variable_tree_has_the_paths_of_the_layer_tree():
  layer = build(Wrapper, sub_tpl=Config(Pair))
  variables = layer.init(KEY)
  assert jax.tree.map(jnp.shape, variables) == {'sub': {'first': {'s': (3,)}, 'second': {'s': (3,)}}}
  assert layer.sub.second.path == ('sub', 'second')
  assert [child.path_name for child in layer.descendants()] == ['Wrapper', 'sub', 'sub.first', 'sub.second']


def test_abstract_init_is_the_shapes_and_dtypes_of_init():
  layer = build(Pair, first_tpl=Config(Scale, dims=5, dtype=jnp.bfloat16))
  structs = jax.tree.map(lambda w: w.as_struct(), layer.abstract_init())
  assert structs == jax.eval_shape(layer.init, KEY)
  assert structs['first']['s'].dtype == jnp.bfloat16


def test_children_inherit_what_they_do_not_set():
  own = WeightInit.Constant(7.0)
  layer = build(
    Pair,
    dtype=jnp.bfloat16,
    fprop_dtype=jnp.float16,
    params_init=WeightInit.Constant(3.0),
    mesh_axis_names=('data',),
    second_tpl=Config(Scale, dtype=jnp.float32, fprop_dtype=jnp.float32, params_init=own, mesh_axis_names=('mdl',)),
  )
  assert (layer.first.dtype, layer.first.fprop_dtype, layer.first.mesh_axis_names) == (
    jnp.bfloat16,
    jnp.float16,
    ('data',),
  )
  assert (layer.second.dtype, layer.second.fprop_dtype, layer.second.mesh_axis_names) == (
    jnp.float32,
    jnp.float32,
    ('mdl',),
  )
  variables = layer.init(KEY)
  np.testing.assert_array_equal(variables['first']['s'], np.full(3, 3))
  np.testing.assert_array_equal(variables['second']['s'], np.full(3, 7))
  assert variables['first']['s'].dtype == jnp.bfloat16


def test_inheritance_passes_through_layers_that_set_nothing():
  layer = build(Wrapper, fprop_dtype=jnp.bfloat16, sub_tpl=Config(Pair))
  assert layer.sub.second.fprop_dtype == jnp.bfloat16


def test_dtypes_at_the_root():
  layer = build(Scale)
  assert (layer.dtype, layer.fprop_dtype) == ('float32', 'float32')
  assert build(Scale, dtype=jnp.bfloat16).fprop_dtype == jnp.bfloat16
  assert build(Scale, fprop_dtype=jnp.bfloat16).dtype == 'float32'


def test_a_template_is_copied_so_its_owner_may_reuse_it():
  shared = Config(Scale)
  layer = build(Pair, first_tpl=shared, second_tpl=shared, dtype=jnp.bfloat16)
  assert shared.dtype is None
  assert layer.first.name == 'first' and layer.second.name == 'second'


def test_theta_is_in_the_compute_dtype_unless_marked_or_integer():
  class Mixed(Layer):
    def setup(self):
      keep = frozenset({WeightHParamsCollection.KEEP_FLOAT32})
      self.create_variable('w', WeightHParams((2,)))
      self.create_variable('kept', WeightHParams((2,), collections=keep))
      self.create_variable('ids', WeightHParams((2,), dtype=jnp.int32, init=WeightInit.Constant(1)))

    def __call__(self):
      return self.theta.w, self.theta.kept, self.theta.ids

  layer = build(Mixed, fprop_dtype=jnp.bfloat16)
  values, _ = layer.apply(layer.init(KEY))
  assert [v.dtype for v in values] == [jnp.bfloat16, jnp.float32, jnp.int32]


def test_one_child_used_twice_shares_its_weights():
  class Twice(Layer):
    def setup(self):
      self.create_child('scale', Config(Scale))

    def __call__(self, x):
      return self.scale(self.scale(x))

  layer = build(Twice)
  variables = {'scale': {'s': jnp.array([2.0, 3.0, 5.0])}}
  assert jax.tree.structure(layer.abstract_init()) == jax.tree.structure(variables)
  gradient = jax.grad(lambda v: layer.apply(v, x_BD(1))[0].sum())(variables)
  np.testing.assert_allclose(gradient['scale']['s'], 2 * np.array([2.0, 3.0, 5.0]) * [1, 2, 3])


def test_children_from_one_template_and_from_a_list():
  class Many(Layer):
    def setup(self):
      left, right = self.create_children('left', 'right', template=Config(Scale))
      stack = self.create_children('stack', templates=[Config(Scale, dims=d) for d in (4, 5)])
      assert left is self.left and right is self.right and stack == self.stack

    def __call__(self, x):
      return x

  layer = build(Many)
  assert jax.tree.map(lambda w: w.shape, layer.abstract_init()) == {
    'left': {'s': (3,)},
    'right': {'s': (3,)},
    'stack_0': {'s': (4,)},
    'stack_1': {'s': (5,)},
  }
  assert [name for name, _ in layer.named_children()] == ['left', 'right', 'stack_0', 'stack_1']
  assert layer.stack[1].path_name == 'stack_1'


# ---------------------------------------------------------------- randomness


def test_adding_a_layer_changes_neither_the_first_values_nor_the_noise_of_others():
  noisy = Config(Scale, noise=1.0)
  plain = build(Pair, first_tpl=noisy, second_tpl=noisy)
  more = build(Pair, first_tpl=noisy, second_tpl=noisy, between=True)
  variables, variables_more = plain.init(KEY), more.init(KEY)
  between = variables_more.pop('between_layer')
  jax.tree.map(np.testing.assert_array_equal, variables, variables_more)
  y, _ = plain.apply(variables, x_BD(), key=jax.random.key(1))
  y_more, _ = more.apply({**variables, 'between_layer': between}, x_BD(), key=jax.random.key(1))
  np.testing.assert_array_equal(y, y_more)


def test_noise_is_a_function_of_the_key_and_differs_between_layers_and_draws():
  class Noise(Layer):
    def __call__(self):
      return jnp.stack([jax.random.normal(self.next_prng_key()) for _ in range(2)])

  class Two(Layer):
    def setup(self):
      self.create_children('a', 'b', template=Config(Noise))

    def __call__(self):
      return jnp.concatenate([self.a(), self.b()])

  layer = build(Two)
  drawn, _ = layer.apply({}, key=KEY)
  assert len(set(drawn.tolist())) == 4
  np.testing.assert_array_equal(drawn, layer.apply({}, key=KEY)[0])
  assert not np.isin(layer.apply({}, key=jax.random.key(1))[0], drawn).any()


def test_sibling_weights_of_one_shape_get_different_first_values():
  variables = build(Pair).init(KEY)
  assert not np.array_equal(variables['first']['s'], variables['second']['s'])


def test_drawing_without_a_key_names_the_layer_and_the_remedy():
  layer = wrapped(Scale, noise=1.0)
  with pytest.raises(ConfigError, match=r'^sub draws random numbers; pass key='):
    layer.apply(layer.init(KEY), x_BD())


# ---------------------------------------------------------------- the pure call


def test_apply_is_pure_and_works_under_jax_transforms():
  layer = build(Pair)
  variables, x = layer.init(KEY), x_BD()
  expected = x * variables['first']['s'] * variables['second']['s']

  def call(variables, x):
    return layer.apply(variables, x)[0]

  np.testing.assert_allclose(call(variables, x), expected, rtol=1e-6)
  np.testing.assert_allclose(jax.jit(call)(variables, x), expected, rtol=1e-6)
  np.testing.assert_allclose(jax.vmap(call, in_axes=(None, 0))(variables, x), expected, rtol=1e-6)
  np.testing.assert_allclose(jax.checkpoint(call)(variables, x), expected, rtol=1e-6)
  gradient = jax.grad(lambda v: call(v, x).sum())(variables)
  np.testing.assert_allclose(gradient['first']['s'], x.sum(0) * variables['second']['s'], rtol=1e-5)


@pytest.mark.parametrize('transform', ['scan', 'vmap', 'grad', 'checkpoint', 'jit'])
@pytest.mark.parametrize('what', ['summary', 'auxiliary loss', 'variable'])
def test_what_a_transform_computes_is_reported_after_it_or_refused_where_it_is_reported(transform, what):
  inside = Config(Reports, transform=transform, what=what)
  after, x = inside.clone(inside=False), jnp.ones((3, 4))
  model = Config(Pair, first_tpl=after, second_tpl=after).instantiate()
  model.apply(model.init(KEY), x)
  model = Config(Pair, first_tpl=after, second_tpl=inside).instantiate()
  variables = model.init(KEY)
  for call in (model.apply, jax.jit(model.apply)):
    with pytest.raises(ConfigError, match=rf'^second\.(mean|n): .* {what} .*; return the value .* after'):
      call(variables, x)


def test_scan_over_apply_is_a_loop_over_apply():
  layer = wrapped(Counter)
  stacked = {'sub': {'n': jnp.arange(3.0), 'w': jnp.array([2.0, 3.0, 5.0])}}

  def body(x, v):
    return layer.apply(v, x)

  x = jnp.float32(1.0)
  scanned, side = jax.jit(lambda x: jax.lax.scan(body, x, stacked))(x)
  looped = []
  for n, w in zip(stacked['sub']['n'], stacked['sub']['w']):
    x, s = layer.apply({'sub': {'n': n, 'w': w}}, x)
    looped.append(s)
  np.testing.assert_allclose(scanned, x)
  jax.tree.map(np.testing.assert_allclose, side, jax.tree.map(lambda *v: jnp.stack(v), *looped))


def test_a_layer_runs_a_child_in_a_transform_and_absorbs_what_it_yields_aside():
  class InJit(Wrapper):
    def __call__(self, x):
      y, side = jax.checkpoint(self.sub.apply)(self.sub.variables, x)
      self.sub.absorb(side)
      return y

  plain, inside = wrapped(Counter), build(InJit, sub_tpl=Config(Counter))
  variables = plain.init(KEY)
  jax.tree.map(np.testing.assert_array_equal, plain.apply(variables, x_BD()), inside.apply(variables, x_BD()))


def test_side_outputs_are_named_by_path():
  layer = wrapped(Counter)
  y, side = layer.apply(layer.init(KEY), x_BD())
  np.testing.assert_allclose(side.summaries['sub/x_mean'].value, 3.5)
  value, weight = side.aux_losses['sub/penalty']
  assert (value, weight) == (4.0, 0.5)
  assert side.updates == {'sub': {'n': 1.0}}
  np.testing.assert_allclose(y, 2 * x_BD() + 1)


@pytest.mark.parametrize(
  ('value', 'kind', 'message'),
  [
    (jnp.ones(3), 'scalar', r"^child: the summary 's' has shape \(3,\); log its mean, or pass kind='histogram'"),
    (jnp.ones((4, 4)), 'image', r"^child: the summary 's' has shape \(4, 4\); an image is \[..., H, W, C\]"),
    (jnp.ones((2, 4, 4, 2)), 'image', r"^child: the summary 's' has shape \(2, 4, 4, 2\); an image is .* 1, 3 or 4"),
    (jnp.ones((0, 3)), 'histogram', r"^child: the summary 's' has shape \(0, 3\), so there is nothing to log"),
    (1.0, 'scaler', r"^child: kind of the summary 's': expected .*, got 'scaler'\. Did you mean 'scalar'\?"),
  ],
)
def test_a_summary_that_is_none_of_its_kind_is_refused(value, kind, message):
  class Logs(Layer):
    def __call__(self, x):
      self.add_summary('s', value, kind)
      return x

  class Parent(Layer):
    def setup(self):
      self.create_child('child', Config(Logs))

    def __call__(self, x):
      return self.child(x)

  with pytest.raises(ConfigError, match=message):
    Config(Parent).instantiate().apply({}, 1.0)


@pytest.mark.parametrize('absorbed', [False, True])
def test_auxiliary_losses_of_a_layer_used_twice_add_up(absorbed):
  class Penalty(Layer):
    def __call__(self, x):
      self.add_aux_loss('size', jnp.mean(x), weight=x[0, 0])
      return 3 * x

  class Twice(Wrapper):
    def __call__(self, x):
      for _ in range(2):
        if absorbed:
          x, side = self.sub.apply(self.sub.variables, x)
          self.sub.absorb(side)
        else:
          x = self.sub(x)
      return x

  _, side = build(Twice, sub_tpl=Config(Penalty)).apply({}, jnp.full((2, 3), 2.0))
  ((name, (value, weight)),) = side.aux_losses.items()
  assert name == 'sub/size'
  assert (weight, value * weight) == (2.0 + 6.0, pytest.approx(2.0 * 2.0 + 6.0 * 6.0))


def test_update_of_a_variable_is_read_back_in_the_call_and_leaves_the_arguments_alone():
  layer = build(Counter)
  variables = layer.init(KEY)
  for _ in range(2):
    _, side = layer.apply(variables, x_BD())
    assert side.updates == {'n': 1.0}
  assert variables['n'] == 0


def test_only_non_trainable_variables_of_that_name_are_updated():
  class Bad(Counter):
    which: str = 'w'

    def __call__(self, x):
      self.update_var(self.which, x)
      return x

  layer = build(Bad)
  with pytest.raises(ConfigError, match=r'Bad\.w is trainable'):
    layer.apply(layer.init(KEY), jnp.float32(1))
  misspelt = wrapped(Bad, which='nn')
  with pytest.raises(ConfigError, match=r"^sub has no variable 'nn'\. Did you mean 'n'\?"):
    misspelt.apply(misspelt.init(KEY), jnp.float32(1))


def test_non_trainable_variables_are_marked():
  weights = build(Counter).abstract_init()
  assert (weights['n'].trainable, weights['w'].trainable) == (False, True)


def test_decode_state_is_threaded_from_call_to_call():
  layer = build(Wrapper, sub_tpl=Config(Wrapper, sub_tpl=Config(Cached)))
  state, totals = None, []
  for x in (1.0, 2.0, 4.0):
    before = jax.tree.map(float, state)
    y, side = _extend(layer, x, state)
    assert jax.tree.map(float, state) == before
    state = side.decode_state
    totals.append(float(y))
  assert totals == [1, 3, 7]
  assert state == {'sub': {'sub': {'total': 7.0}}}


def _extend(layer, x, state):
  class Root(Wrapper):
    def extend_step(self, x):
      return self.sub.sub.extend_step(x)

  return build(Root, sub_tpl=layer.sub_tpl).apply({}, jnp.float32(x), decode_state=state, method='extend_step')


def test_do_eval_is_that_of_the_enclosing_call_unless_given():
  class Ask(Layer):
    def __call__(self):
      return self.do_eval

  class Asks(Wrapper):
    def __call__(self):
      return self.sub(), self.sub.apply({})[0], self.sub.apply({}, do_eval=False)[0]

  layer = build(Asks, sub_tpl=Config(Ask))
  assert layer.apply({})[0] == (False, False, False)
  assert layer.apply({}, do_eval=True)[0] == (True, True, False)


def test_method_names_what_is_called():
  class Other(Scale):
    def double(self, x, *, times=2):
      return times * self(x)

  layer = build(Other)
  variables = {'s': jnp.ones(3)}
  np.testing.assert_allclose(layer.apply(variables, x_BD(), times=4, method='double')[0], 4 * x_BD())


def test_operations_carry_the_path_of_their_layer():
  layer = build(Wrapper, sub_tpl=Config(Pair))
  compiled = jax.jit(lambda v, x: layer.apply(v, x)[0]).lower(layer.init(KEY), x_BD())
  assert 'sub/second/mul' in compiled.as_text(debug_info=True)


def test_a_call_of_the_base_class_enters_the_layer_once():
  class Sub(Scale):
    def __call__(self, x):
      return super().__call__(x)

  layer = wrapped(Sub)
  text = jax.jit(lambda v, x: layer.apply(v, x)[0]).lower(layer.init(KEY), x_BD()).as_text(debug_info=True)
  assert 'Wrapper/sub/mul' in text
  assert 'sub/sub' not in text


# ---------------------------------------------------------------- sharding


def on_mesh(fn, *args):
  mesh = jax.make_mesh((2, 4), ('data', 'mdl'), axis_types=(AxisType.Auto,) * 2)
  with jax.set_mesh(mesh):
    return jax.jit(fn)(*args)


def test_activation_is_split_as_declared():
  class Split(Scale):
    def __call__(self, x):
      return self.shard(super().__call__(x))

  config = Config(Split, dims=8, mesh_axis_names=('data', 'mdl'))
  config.activation_split_dims_mapping.out = ('data', 1)
  layer = config.instantiate()
  variables, x = layer.init(KEY), x_BD(2, 8)
  y = on_mesh(lambda v, x: layer.apply(v, x)[0], variables, x)
  assert y.sharding.spec == PartitionSpec('data', 'mdl')
  np.testing.assert_allclose(y, layer.apply(variables, x)[0])


def test_inputs_are_split_on_entry_by_rank():
  class Look(Layer):
    def __call__(self, inputs):
      return inputs

  splits = {'map_1d': ('mdl',), 'map_2d': (('data', 'mdl'), None), 'map_3d': None}
  layer = build(Look, mesh_axis_names=('data', 'mdl'), inputs_split_mapping=splits)
  inputs = {'a': jnp.zeros((8,)), 'b': jnp.zeros((8, 3)), 'c': jnp.zeros((2, 2, 2)), 'd': jnp.zeros(())}
  outputs = on_mesh(lambda x: layer.apply({}, x)[0], inputs)
  assert outputs['a'].sharding.spec == PartitionSpec('mdl')
  assert outputs['b'].sharding.spec == PartitionSpec(('data', 'mdl'))
  assert outputs['c'].sharding.is_fully_replicated


@pytest.mark.parametrize('method', ['__call__', 'extend_step', 'score'])
@pytest.mark.parametrize('by_keyword', [False, True])
def test_inputs_are_split_on_entry_of_any_method_and_by_keyword(method, by_keyword):
  class Look(Layer):
    def __call__(self, inputs, scale=1):
      return inputs * scale

    extend_step = score = __call__

  layer = build(Look, mesh_axis_names=('data', 'mdl'), inputs_split_mapping={'map_2d': (('data', 'mdl'), None)})

  def apply(x):
    args, kwargs = ((), {'inputs': x}) if by_keyword else ((x,), {})
    return layer.apply({}, *args, method=method, **kwargs)[0]

  assert on_mesh(apply, jnp.zeros((8, 3))).sharding.spec == PartitionSpec(('data', 'mdl'))


def test_a_method_that_the_layer_calls_itself_does_not_split_inputs_again():
  class Look(Layer):
    def __call__(self, inputs):
      return self.flat(inputs.reshape(-1))

    def flat(self, x):
      return x

  layer = build(Look, mesh_axis_names=('data', 'mdl'), inputs_split_mapping={'map_2d': ('data', None)})
  assert on_mesh(lambda x: layer.apply({}, x)[0], jnp.zeros((2, 4))).shape == (8,)


def test_a_misspelt_activation_field_suggests_a_name():
  class Misspelt(Scale):
    def __call__(self, x):
      return self.shard(super().__call__(x), 'otu')

  layer = build(Misspelt)
  with pytest.raises(ConfigError, match=r"activation_split_dims_mapping has no field 'otu'. Did you mean 'out'"):
    layer.apply(layer.init(KEY), x_BD())


def test_missing_rank_of_inputs_is_named():
  layer = build(Wrapper, sub_tpl=Config(Scale, inputs_split_mapping={'map_3d': None}), mesh_axis_names=('data',))
  with pytest.raises(ShardingError, match='map_2d'):
    layer.apply(layer.init(KEY), x_BD())


def test_without_a_mesh_mappings_change_nothing():
  config = Config(Scale, mesh_axis_names=('data',), inputs_split_mapping={'map_2d': ('data', None)})
  layer = config.instantiate()
  variables = layer.init(KEY)
  np.testing.assert_array_equal(layer.apply(variables, x_BD())[0], x_BD() * variables['s'])


class Table(Layer):
  """A weight whose mapping is the layer's `wt`."""

  weight_split_dims_mapping: Config = template(WeightSplit)

  def setup(self):
    self.create_variable('w', WeightHParams((4, 6), tensor_split_dims_mapping=self.weight_split_dims_mapping.wt))

  def __call__(self, x):
    return self.shard(x @ self.theta.w)


def table(wt, **fields):
  config = Config(Table, **fields)
  config.weight_split_dims_mapping.wt = wt
  return Config(Wrapper, sub_tpl=config, mesh_axis_names=('data', 'mdl'))


@pytest.mark.parametrize(
  'wt, message',
  [
    (('data', 'model'), r"^sub\.weight_split_dims_mapping\.wt: axis 'model' is not a mesh axis; .*'mdl'"),
    (('mdl', 'mdl'), r"^sub\.weight_split_dims_mapping\.wt: mesh axis 'mdl' occurs twice"),
    (('data', 7), r'^sub\.weight_split_dims_mapping\.wt: axis 7 is out of range'),
    (('data',), r'^sub\.w: .* has 1 entry, but the tensor has 2 dimensions'),
    ('data', r"^sub\.weight_split_dims_mapping\.wt: 'data' is not a split mapping"),
  ],
)
def test_impossible_weight_mapping_is_refused_when_the_layer_is_built(wt, message):
  with pytest.raises(ShardingError, match=message):
    table(wt).instantiate()


def test_activation_mapping_of_the_wrong_rank_is_named():
  config = table(None)
  config.sub_tpl.activation_split_dims_mapping.out = ('data',)
  layer = config.instantiate()
  with pytest.raises(ShardingError, match=r'^sub\.activation_split_dims_mapping\.out: .* has 1 entry'):
    layer.apply(layer.init(KEY), jnp.ones((2, 4)))


def test_mappings_may_name_logical_axes():
  class Both(SplitMapping):
    wt: object = ('embed', 'mlp')

  layer = build(
    Table,
    mesh_axis_names=('data', 'mdl'),
    logical_axis_rules=(('embed', 'data'), ('mlp', 'mdl')),
    weight_split_dims_mapping=Config(Both),
  )
  assert layer.abstract_init()['w'].tensor_split_dims_mapping == ('embed', 'mlp')
  with pytest.raises(ShardingError, match=r'weight_split_dims_mapping\.wt.*ebmed'):
    table(('ebmed', None)).set(logical_axis_rules=(('embed', 'data'),)).instantiate()


# ---------------------------------------------------------------- misuse


def test_a_built_layer_does_not_change():
  layer = wrapped(Scale)
  with pytest.raises(AttributeError, match=r'^sub\.dims: a layer does not change after setup'):
    layer.sub.dims = 5
  with pytest.raises(AttributeError, match='cache'):
    layer.cache = 1


def test_missing_child_suggests_a_name():
  layer = build(Pair)
  with pytest.raises(AttributeError, match=r"Pair.*'frist'\. Did you mean 'first'\?"):
    _ = layer.frist


def test_missing_variable_suggests_a_name():
  class Typo(Scale):
    def __call__(self, x):
      return self.theta.ss

  layer = build(Typo)
  with pytest.raises(AttributeError, match=r"has no variable 'ss'\. Did you mean 's'\?"):
    layer.apply(layer.init(KEY), x_BD())


def test_variables_of_another_layer_are_refused_by_name():
  layer = build(Pair)
  variables = layer.init(KEY)
  del variables['second']
  with pytest.raises(ConfigError, match=r'^second\.s: the variables passed to apply\(\) have no such entry'):
    layer.apply(variables, x_BD())


def test_a_layer_outside_of_a_call_says_how_to_call_it():
  layer = wrapped(Scale)
  with pytest.raises(ConfigError, match=r'^sub is used outside a call; go through apply'):
    layer(x_BD())


def test_a_name_is_declared_once():
  class Clash(Layer):
    twice: str = 'variable'

    def setup(self):
      self.create_variable('a', WeightHParams((1,)))
      if self.twice == 'variable':
        self.create_variable('a', WeightHParams((1,)))
      elif self.twice == 'child':
        self.create_child('a', Config(Scale))
      else:
        self.create_children('a', templates=[Config(Scale)])

  for twice in ('variable', 'child', 'children'):
    with pytest.raises(ConfigError, match=r"^sub: the name 'a' is declared twice"):
      wrapped(Clash, twice=twice)


def test_a_list_of_children_takes_its_numbered_names():
  class Clash(Layer):
    list_first: bool = True

    def setup(self):
      if self.list_first:
        self.create_children('a', templates=[Config(Scale)])
      self.create_child('a_0', Config(Scale))
      if not self.list_first:
        self.create_children('a', templates=[Config(Scale)])

  for list_first in (True, False):
    with pytest.raises(ConfigError, match=r"^sub: the name 'a_0' is declared twice"):
      wrapped(Clash, list_first=list_first)


@pytest.mark.parametrize('name', ['init', 'path', 'name', 'dims', 'theta'])
def test_a_child_is_not_hidden_by_an_attribute(name):
  class Hides(Layer):
    dims: int = 3

    def setup(self):
      self.create_child(name, Config(Scale))

  with pytest.raises(ConfigError, match=rf"^sub: a child cannot be named '{name}', which is an attribute of Hides"):
    wrapped(Hides)


def test_a_declared_child_is_no_hyperparameter():
  class Declares(Layer):
    sub_tpl: Config = template(Scale)
    first: Scale = child()
    others: list[Scale] = child()
    absent: Scale = child()

    def setup(self):
      self.create_child('first', self.sub_tpl)
      self.create_children('others', templates=[self.sub_tpl] * 2)

  layer = build(Declares)
  assert isinstance(layer.first, Scale) and [type(each) for each in layer.others] == [Scale, Scale]
  assert [name for name, _ in layer.named_children()] == ['first', 'others_0', 'others_1']
  assert not {'first', 'others', 'absent'} & set(field_names(Declares))
  with pytest.raises(UnknownFieldError, match=r"has no field 'first'"):
    Config(Declares, first=Config(Scale))
  with pytest.raises(UnknownFieldError, match=r"has no attribute or child 'absent'.*self\.create_child\('absent'"):
    layer.absent  # noqa: B018
  with pytest.raises(UnknownFieldError, match=r"has no attribute or child 'frist'\. Did you mean 'first'\?"):
    layer.frist  # noqa: B018
  with pytest.raises(UnknownFieldError, match=r"has no attribute or child 'sub_tp'\. Did you mean 'sub_tpl'\?"):
    layer.sub_tp  # noqa: B018


@pytest.mark.parametrize('name', ['setUp', 'set_up', 'setup_'])
def test_a_setup_of_another_spelling_is_named(name):
  def declare(self):
    self.create_variable('w', WeightHParams((2,)))

  misspelled = type('Misspelled', (Layer,), {name: declare, '__call__': lambda self, x: x * self.theta.w})
  layer = build(misspelled)
  with pytest.raises(
    UnknownFieldError, match=rf"has no variable 'w'\. Its method {name} is never called; name it setup"
  ):
    layer.apply({}, jnp.ones(2))
  with pytest.raises(
    UnknownFieldError, match=rf"child 'head'\. Its method {name} is never called; name it setup\. A child"
  ):
    layer.head  # noqa: B018


def test_a_child_that_is_declared_in_another_way_is_explained():
  class Bare(Layer):
    first: Scale

  with pytest.raises(ConfigError, match=r'Bare\.first: a value is required .*first: Scale = child\(\)$'):
    build(Bare)

  with pytest.raises(ConfigError, match=r'Own\.first has no type annotation, .* write first: Linear = child\(\)'):

    class Own(Layer):
      first = child()


def test_create_children_explains_its_two_forms():
  class Confused(Layer):
    def setup(self):
      self.create_children('a', 'b', templates=[Config(Scale)])

  with pytest.raises(ConfigError, match='create_children takes names and template='):
    build(Confused)


def test_missing_hyperparameter_is_named():
  class Needs(Layer):
    dims: int = REQUIRED

  with pytest.raises(ConfigError, match=r'Needs\.dims: a value is required'):
    build(Needs)


def test_a_failed_call_leaves_nothing_behind():
  layer = build(Pair)
  variables = layer.init(KEY)
  with pytest.raises(TypeError):
    layer.apply(variables, 'not an array')
  y, side = layer.apply(variables, x_BD())
  assert y.shape == (2, 3) and not side.updates


def test_printing_a_layer_shows_its_tree_with_shapes_and_counts():
  class Norm(Layer):
    def setup(self):
      self.create_variable('scale', WeightHParams((4,)))
      self.create_variable('mean', WeightHParams((), dtype=jnp.bfloat16), trainable=False)

  class Block(Layer):
    def setup(self):
      self.create_variable('w', WeightHParams((4, 5)))
      self.create_children('norm', templates=[Config(Norm)])

  class Model(Layer):
    def setup(self):
      self.create_child('blocks', Config(Repeat, num_layers=3, layers_tpl=Config(Block)))

  assert str(Config(Model).instantiate()).splitlines() == [
    'Model, 75 parameters',
    '  blocks: Repeat, 75 parameters',
    '    layers: Block, 75 parameters',
    '      w: 3 x 4 x 5 float32',
    '      norm_0: Norm, 15 parameters',
    '        scale: 3 x 4 float32',
    '        mean: 3 bfloat16, not trainable',
  ]


# ---------------------------------------------------------------- what is told early


def test_a_class_that_cannot_be_a_layer_is_refused_when_it_is_defined():
  with pytest.raises(ConfigError, match=r'Own defines __init__, .* the rest in setup\(self\)$'):

    class Own(Layer):
      def __init__(self, dims):
        self.dims = dims

  with pytest.raises(
    ConfigError, match=r'Shared\.sub_tpl: a Config as a default .*sub_tpl: Config = template\(Scale\)'
  ):

    class Shared(Layer):
      sub_tpl: Config = Config(Scale)


def test_an_attribute_that_keeps_an_array_of_a_trace_is_named():
  class Keeps(Layer):
    def setup(self):
      self.create_child('inner', Config(Scale))
      self.seen = {'x': []}

    def __call__(self, x):
      self.seen['x'].append(x)
      return self.inner(x)

  layer = build(Keeps)
  variables = layer.init(KEY)
  layer.apply(variables, x_BD())  # Outside of a trace an array has its value for good.
  with pytest.raises(ConfigError, match=r'^Keeps\.seen keeps an array of the call, .*trainable=False.*update_var'):
    jax.jit(layer.apply)(variables, x_BD())


def test_a_variable_keeps_its_shape_when_it_is_updated():
  class Sums(Layer):
    def setup(self):
      self.create_variable('n', WeightHParams((3,), init=WeightInit.Constant(0.0)), trainable=False)

    def __call__(self, x):
      self.update_var('n', x)
      return x

  layer = build(Sums)
  variables = layer.init(KEY)
  assert (layer.apply(variables, np.arange(3))[1].updates['n'] == jnp.arange(3.0)).all()
  with pytest.raises(ConfigError, match=r'^Sums\.n has shape \(3,\), and its new value has shape \(2, 3\)$'):
    layer.apply(variables, x_BD())


def test_split_mappings_are_read_and_changed_by_field():
  class Named(Layer):
    def __call__(self, x):
      return self.shard(x)

  layer = build(Named, mesh_axis_names=('data',))
  group, field = 'activation_split_dims_mapping', 'Named.activation_split_dims_mapping.out'
  assert layer.split_mappings(group) == {field: None} and layer.placements(group) == {}
  layer.apply({}, x_BD())  # What a call has read is read again after a change.
  layer.change_split_mappings(group, out=('data', None))
  placement = layer.placements(group)[field]
  assert placement.spec == PartitionSpec('data', None) and set(placement.why) == {field}
  with pytest.raises(ShardingError, match=r'out: mapping .* has 2 entries, but the tensor has 3 dimensions'):
    layer.apply({}, jnp.ones((2, 3, 4)))


def test_an_attribute_that_a_property_misses_is_named():
  class Wide(Layer):
    @property
    def width(self):
      return 2 * self.widht

  with pytest.raises(AttributeError, match=r"^Wide \(Wide\) has no attribute or child 'widht'"):
    _ = build(Wide).width
