"""Errors in a layer's method, called from Python: what is explained, what is left as it is, what stays the cause."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from praxis_lite import REQUIRED, Config, Layer, WeightHParams, layers
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.common.mistakes import (
  MissingEntryError,
  NotALayerError,
  NotAnArrayError,
  ShapesError,
  TracedValueError,
)


class Product(Layer):
  def setup(self):
    self.create_variable('w', WeightHParams((3, 2)))

  def __call__(self, x_BD):
    return x_BD @ self.theta.w


class Outer(Layer):
  def setup(self):
    self.create_child('inner', Config(Product))

  def __call__(self, x):
    return self.inner(x)

  def choose(self, x):
    return self.inner(x) if x.sum() > 0 else x

  def read(self, batch, key='y'):
    return batch[key]

  def nested(self, batch):
    return batch['x']['z']

  def shape_of(self, x):
    a, b, c = x.shape
    return a + b + c

  def on_the_host(self, x):
    return np.ones((2, 3)) + np.ones((2, 4))

  def wrong_call(self, x):
    return self.inner(x, 3)

  def one_too_deep(self, x):
    return self.inner.theta.w(x)

  def call_a_text(self, x):
    return self.name(x)

  def with_a_helper(self, x):
    return first_above_zero(x)


def first_above_zero(x):
  return next(v for v in x if v > 0)


@pytest.fixture
def call():
  layer = Config(Outer).instantiate()
  variables = layer.init(jax.random.key(0))
  return lambda method, *args: layer.apply(variables, *args, method=method)[0]


@pytest.mark.parametrize('jitted', [False, True])
def test_shapes_that_do_not_fit_name_layer_operands_and_line_and_keep_their_cause(call, jitted):
  run = jax.jit(lambda x: call('__call__', x)) if jitted else lambda x: call('__call__', x)
  with pytest.raises(
    ShapesError, match=r'^inner \(Product\.__call__\): .*; x_BD \[5, 4\], w \[3, 2\] \(.*\.py:\d+\)'
  ) as told:
    run(jnp.ones((5, 4)))
  assert isinstance(told.value, TypeError | ValueError) and isinstance(told.value.__cause__, TypeError)


class Sized(Layer):
  in_dims: int = 4
  out_dims: int = 4

  def setup(self):
    self.create_variable('w', WeightHParams((self.in_dims, self.out_dims)))

  def __call__(self, x):
    return x @ self.theta.w

  def add(self, x):
    return x + jnp.ones((7, 7))


class Holder(Layer):
  dims: int = 8

  def setup(self):
    self.create_child('ff', Config(layers.FeedForward, input_dims=self.dims, hidden_dims=16))

  def __call__(self, x):
    return self.ff(x)


FITTING = {
  'product': (Config(layers.Linear, input_dims=8, output_dims=16), (2, 5), 'Linear.input_dims = 5 would fit'),
  'one input': (Config(layers.Linear, input_dims=8, output_dims=16), (2, 1), 'Linear.input_dims = 1 would fit'),
  'square': (Config(Sized), (2, 5), r'Sized.in_dims = 5 would fit \(.*test_mistakes.py:\d+\)'),
  'scale': (Config(layers.RMSNorm, dims=8), (2, 5), 'RMSNorm.dims = 5 would fit'),
  'the layer around': (Config(Holder), (2, 3, 5), r'ff.input_dims = 5 would fit \(.*test_mistakes.py:\d+\)'),
  'attention': (Config(layers.MultiHeadAttention, input_dims=8, num_heads=2), (2, 3, 5), 'Attention.input_dims = 5 .*'),
  'filter': (
    Config(layers.Conv2D, filter_shape=(3, 3, 3, 4)),
    (2, 8, 8, 1),
    r'Conv2D.filter_shape = \(3, 3, 1, 4\) would fit',
  ),
}


@pytest.mark.parametrize(('config', 'shape', 'remedy'), FITTING.values(), ids=FITTING)
def test_a_shape_that_does_not_fit_a_weight_comes_with_the_field_and_value_that_would(config, shape, remedy):
  layer = config.instantiate()
  variables = jax.eval_shape(layer.init, jax.random.key(0))
  with pytest.raises(ShapesError, match=rf'{remedy}(\n|$)'):
    jax.eval_shape(layer.apply, variables, jax.ShapeDtypeStruct(shape, jnp.float32))


class Turned(Layer):
  """Declares `gate` as [outputs, inputs], by mistake."""

  def setup(self):
    self.create_variable('gate', WeightHParams((45, 18)))
    self.create_variable('down', WeightHParams((45, 18)))

  def __call__(self, x):
    return (x @ self.theta.gate) @ self.theta.down


def test_a_matrix_that_would_fit_when_transposed_is_named():
  layer = Config(Turned).instantiate()
  with pytest.raises(ShapesError, match=r'; gate or down would fit as \[18, 45\] \(.*test_mistakes.py:\d+\)$'):
    layer.apply(layer.init(jax.random.key(0)), jnp.ones((2, 18)))


class Confused(Layer):
  """Multiplies its input with the weight of its state."""

  dims: int = 18

  def setup(self):
    self.create_variable('of_input', WeightHParams((2, self.dims)))
    self.create_variable('of_state', WeightHParams((self.dims, self.dims)))

  def __call__(self, x):
    return x @ self.theta.of_state


def test_another_weight_that_would_fit_is_named_before_a_field():
  layer = Config(Confused).instantiate()
  with pytest.raises(ShapesError, match=r'; of_input would fit \(.*test_mistakes.py:\d+\)$'):
    layer.apply(layer.init(jax.random.key(0)), jnp.ones((3, 2)))
  with pytest.raises(ShapesError, match=r'; Confused.dims = 5 would fit \(.*test_mistakes.py:\d+\)$'):
    layer.apply(layer.init(jax.random.key(0)), jnp.ones((3, 5)))


class TurnedInItsCall(Layer):
  """Transposes a weight that fits as it is, beside one that would fit as its transpose."""

  def setup(self):
    self.create_variable('first', WeightHParams((18, 45)))
    self.create_variable('second', WeightHParams((45, 18)))

  def __call__(self, x):
    h = x @ self.theta.first
    return h @ self.theta.second.T


def test_a_matrix_that_a_line_transposes_by_mistake_is_named_and_no_other():
  layer = Config(TurnedInItsCall).instantiate()
  with pytest.raises(ShapesError, match=r'; second would fit without \.T \(.*test_mistakes.py:\d+\)$'):
    layer.apply(layer.init(jax.random.key(0)), jnp.ones((2, 18)))


def test_no_field_is_proposed_where_none_decides():
  layer = Config(Sized, in_dims=3, out_dims=4).instantiate()
  with pytest.raises(ShapesError) as told:
    layer.apply(layer.init(jax.random.key(0)), jnp.ones((2, 3)), method='add')
  assert 'would fit' not in str(told.value)


def test_shapes_of_numpy_and_of_unpacking_are_told_too(call):
  with pytest.raises(ShapesError, match=r'^Outer\.on_the_host: operands could not be broadcast .*; x \[5, 3\] \('):
    call('on_the_host', jnp.ones((5, 3)))
  with pytest.raises(ShapesError, match=r'^Outer\.shape_of: not enough values to unpack .*; x \[5, 3\] \('):
    call('shape_of', jnp.ones((5, 3)))


@pytest.mark.parametrize('key', ['y', 'xx'])
def test_a_missing_entry_is_told_with_those_that_there_are(call, key):
  with pytest.raises(
    MissingEntryError, match=rf"^Outer\.read: the batch has no entry '{key}'; its entries: x\."
  ) as told:
    call('read', {'x': jnp.ones(3)}, key)
  assert isinstance(told.value, KeyError) and isinstance(told.value, UserError)


def test_a_missing_entry_is_told_under_the_name_of_the_own_argument():
  class Reads(Layer):
    def __call__(self, b):
      return b['label']

  layer = Config(Reads).instantiate()
  for given, message in (
    ({'weights': jnp.ones(3)}, "the batch, b, has no entry 'label'; its entries: weights. The input, or"),
    ({'x': jnp.ones(3)}, "b has no entry 'label'; its entries: x. ("),
  ):
    with pytest.raises(MissingEntryError, match=f'^Reads.__call__: {re.escape(message)}'):
      layer.apply({}, given)


def test_what_is_not_about_arrays_or_a_dict_at_hand_keeps_its_type(call):
  with pytest.raises(KeyError) as missing:
    call('nested', {'x': {'y': jnp.ones(3)}})
  assert not isinstance(missing.value, UserError)
  with pytest.raises(TypeError, match='positional argument') as wrong:
    call('wrong_call', jnp.ones((5, 3)))
  assert not isinstance(wrong.value, UserError)


def test_a_value_that_only_the_compiled_step_knows_is_told_with_its_line_of_code_and_keeps_its_cause(call):
  with pytest.raises(
    TracedValueError,
    match=r'^Outer\.choose: Python decides by the value of an array, .*, in `return self\.inner\(x\) if x\.sum\(\) > 0 '
    r'else x`; choose by jnp\.where\(condition, a, b\), or branch by jax\.lax\.cond \(.*test_mistakes\.py:\d+\)',
  ) as told:
    jax.jit(lambda x: call('choose', x))(jnp.ones((5, 3)))
  assert isinstance(told.value, TypeError | ValueError)
  assert isinstance(told.value.__cause__, jax.errors.TracerBoolConversionError)
  with pytest.raises(TracedValueError, match=r'^Outer\.with_a_helper: .*in `return next\(v for v in x if v > 0\)`'):
    jax.jit(lambda x: call('with_a_helper', x))(jnp.ones(3))
  assert call('choose', jnp.ones((5, 3))).shape == (5, 2)  # Without a trace its value is known.


def test_an_array_of_another_trace_is_told(call):
  kept = []
  jax.eval_shape(kept.append, jnp.ones((5, 3)))
  with pytest.raises(
    TracedValueError, match=r'^inner \(Product\.__call__\): an array of an earlier call is used, .*keep none'
  ):
    call('__call__', kept[0])


def test_what_is_called_and_is_no_layer_keeps_its_type(call):
  for method, kind in (('one_too_deep', r'[\w.]+ArrayImpl'), ('call_a_text', 'str')):
    with pytest.raises(TypeError, match=rf"'{kind}' object is not callable") as wrong:
      call(method, jnp.ones((5, 3)))
    assert not isinstance(wrong.value, NotALayerError)


class Casts(Layer):
  def __call__(self, x_BD):
    return x_BD.astype('float32')


class Casting(Layer):
  def setup(self):
    self.create_child('inner', Config(Casts))

  def __call__(self, batch):
    return self.inner(batch)

  def misses(self, batch):
    return batch['x'].no_such_attribute


def test_a_dict_in_place_of_an_array():
  layer, batch = Config(Casting).instantiate(), {'x': jnp.ones(3)}
  with pytest.raises(
    NotAnArrayError, match=r"^inner \(Casts\.__call__\): x_BD is a dict, .* such as x_BD\['x'\] \("
  ) as told:
    layer.apply({}, batch)
  assert isinstance(told.value.__cause__, AttributeError)
  with pytest.raises(AttributeError, match='no_such_attribute') as own:  # Of an array: left as it is.
    layer.apply({}, batch, method='misses')
  assert not isinstance(own.value, UserError)
  with pytest.raises(UserError, match=r'^Casting\.apply\(variables, \*args\): .* got ndarray'):
    layer.apply(np.ones(3), {})
  with pytest.raises(UserError, match=r'^Casting\.init: expected one key, .* got a dict'):
    layer.init({'params': jax.random.key(0)})
  with pytest.raises(UserError, match=r'^Casting\.init\(0\): expected a key, such as jax\.random\.key\(0\)'):
    layer.init(0)


class NoSegments(Layer):
  """In the place of an attention layer, which is called with segments."""

  input_dims: int = 0
  num_heads: int = 0
  num_kv_heads: int | None = None
  dims_per_head: int | None = None

  def __call__(self, x_BTD):
    return x_BTD


def test_a_layer_that_lacks_an_argument_which_its_parent_passes_is_one_line():
  block = Config(layers.TransformerBlock, input_dims=4, hidden_dims=4, num_heads=2)
  layer = block.set(attention_tpl=Config(NoSegments)).instantiate()
  told = r'attention \(NoSegments\): __call__\(\) got an unexpected keyword argument .*, as TransformerBlock calls it'
  with pytest.raises(ConfigError, match=rf'{told}; declare its arguments \(.*test_mistakes\.py:\d+\)'):
    jax.eval_shape(layer.apply, layer.abstract_init(), jnp.ones((1, 3, 4)), segment_ids=jnp.ones((1, 3), int))


def test_a_feed_forward_layer_without_the_sizes_that_its_block_sets_is_told_what_to_declare():
  class Memory(Layer):
    input_dims: int = 0

  block = Config(layers.TransformerBlock, input_dims=4, hidden_dims=4, num_heads=2, ff_tpl=Config(Memory))
  told = (
    r'^TransformerBlock\.ff_tpl: Memory does not declare hidden_dims; TransformerBlock sets input_dims, hidden_dims on'
  )
  with pytest.raises(ConfigError, match=told):
    block.instantiate()


class Misspelt(Layer):
  def __call__(self, x):
    return self.haed(x)

  def scaled(self, x):
    return x * self.theta.sacle


@pytest.mark.parametrize('method', ['__call__', 'scaled'])
def test_a_child_or_weight_that_is_not_there_is_told_with_the_line(method):
  with pytest.raises(ConfigError, match=r'no (attribute or child|variable) .* \(.*test_mistakes\.py:\d+\)$'):
    Config(Misspelt).instantiate().apply({}, jnp.ones(3), method=method)


class OfPyTorch(Layer):
  dims: int = REQUIRED
  bias: bool = False

  def forward(self, x):
    return x


def test_code_in_the_manner_of_pytorch_is_told_what_to_write():
  layer = Config(OfPyTorch, dims=3).instantiate()
  with pytest.raises(ConfigError, match=r'^OfPyTorch: .* no method __call__; .*; that is the name of forward here$'):
    layer.apply({}, jnp.ones(3))
  by_name = r'^OfPyTorch takes its fields by name, in a config: Config\(OfPyTorch, dims=\.\.\.\)$'
  for make in (OfPyTorch, lambda dims: Config(OfPyTorch, dims)):
    with pytest.raises((TypeError, ConfigError), match=by_name):
      make(3)
  with pytest.raises(TypeError, match=r"^OfPyTorch has no field 'dim'\. Did you mean 'dims'\?$"):
    OfPyTorch(dim=3)
