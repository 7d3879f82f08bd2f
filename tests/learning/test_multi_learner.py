"""Several learners, each for its part of the variables: as if each were alone; when they train, and how much."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_trees import LAYERS, NON_TRAINABLE, declarations, values, weight

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves, leaves_by_path, path_name, select
from praxis_lite.training.learning import Constant, LayerDecay, Learner, LearnerRule, MultiLearner, base_learner

ADAM = Config(Learner, optimizer=Config(optax.adam), learning_rate=0.1, ema_decay=0.5, clip_gradient_norm_to_value=0.5)
SGD = Config(Learner, optimizer=Config(optax.sgd), learning_rate=1.0)
STACKS = r'lm\.(layers|deep)\..*'


def rules(*given: dict[str, Any], **fields: Any) -> MultiLearner:
  """A learner with these rules, named a, b, ...; their learner is SGD with rate 1 unless they have one."""
  built = tuple(Config(LearnerRule, **{'name': 'abc'[i], 'learner': SGD, **rule}) for i, rule in enumerate(given))
  return Config(MultiLearner, rules=built, **fields).instantiate()


def trained(learner: Any, weights: Any, steps: int = 3, seed: int = 0) -> list[Any]:
  """The updates of some steps, on gradients that do not depend on the variables."""
  bound, params = learner.bind(weights), values(weights)
  out: Any = (params, bound.init(params), bound.init_ema(params))
  found, update = [], jax.jit(bound.update)
  for step in range(steps):
    gradients = bound.select_trained(values(weights, seed + step + 1))
    out = update(gradients, jnp.float32(1), *out[:3], jnp.int32(step))
    found.append(out)
  return found


def flat(tree: Any) -> dict[str, np.ndarray]:
  return {path_name(path): np.asarray(x) for path, x in leaves_by_path(tree).items()}


def assert_same(actual: Any, expected: Any) -> None:
  assert flat(actual).keys() == flat(expected).keys()
  for name, x in flat(expected).items():
    np.testing.assert_allclose(flat(actual)[name], x, rtol=1e-6, atol=1e-7, err_msg=name)


# ---------------------------------------------------------------- each as if alone


def test_each_rule_trains_its_variables_as_its_learner_alone_would() -> None:
  weights = declarations() | {'moving': weight(2, marks=(NON_TRAINABLE,))}
  both = rules({'regex': STACKS, 'learner': ADAM}, {'learner': SGD.clone(learning_rate=0.5)})
  stacks = lambda path: path[:2] in (('lm', 'layers'), ('lm', 'deep'))  # noqa: E731
  others = lambda path: not stacks(path)  # noqa: E731
  for name, of_rule, alone in (('a', stacks, ADAM), ('b', others, SGD.clone(learning_rate=0.5))):
    # The same random numbers as in the whole tree, so that its part sees the same gradients.
    one = alone.clone(bprop_variable_inclusion=STACKS if name == 'a' else r'(?!lm\.(layers|deep)).*').instantiate()
    for got, want in zip(trained(both, weights), trained(one, weights)):
      assert_same(select(got.mdl_vars, of_rule), select(want.mdl_vars, of_rule))
      assert_same(got.opt_states[name], want.opt_states)
      if name == 'a':
        assert_same(got.ema_vars, want.ema_vars)
  got = trained(both, weights)[-1]
  assert np.array_equal(got.mdl_vars['moving'], values(weights)['moving'])
  assert both.keeps_averages
  assert not rules({}).keeps_averages


def test_slots_are_named_by_the_rule_and_their_axes_are_known() -> None:
  weights = declarations()
  bound = rules({'regex': STACKS, 'learner': ADAM}, {}).bind(weights)
  names = flat(bound.init(values(weights))).keys()
  slots = {f'a.all.0.{slot}.lm.{w}' for slot in ('mu', 'nu') for w in ('layers.ff.w', 'layers.ff.b', 'deep.w')}
  assert names == {'a.all.0.count', *slots}
  assert bound.slot_axes()['a', 'all', '0', 'mu', 'lm', 'layers', 'ff', 'w'] == (0, 1, 2)


def test_the_whole_gradient_is_clipped_before_that_of_a_rule() -> None:
  weights = {'x': weight(1), 'y': weight(1)}
  limited = SGD.clone(clip_gradient_norm_to_value=1.0)
  learner = rules({'regex': 'x', 'learner': limited}, {'regex': 'y'}, clip_gradient_norm_to_value=2.5).bind(weights)
  zeros = jax.tree.map(lambda w: jnp.zeros(w.shape), weights)
  gradients = {'x': jnp.array([3.0]), 'y': jnp.array([4.0])}
  out = learner.update(gradients, jnp.float32(1), zeros, learner.init(zeros), None, jnp.int32(0))
  np.testing.assert_allclose(out.mdl_vars['x'], [-1.0], rtol=1e-6)  # 3 -> 1.5 -> 1
  np.testing.assert_allclose(out.mdl_vars['y'], [-2.0], rtol=1e-6)
  assert {n: float(x) for n, x in out.stats.items()} == {
    **{'learning_rate/a': 1.0, 'learning_rate/b': 1.0, 'grad_norm/a': 3.0, 'grad_norm/b': 4.0},
    **{'grad_norm': 5.0, 'skipped': 0.0},
  }


# ---------------------------------------------------------------- when, and how much


def test_a_rule_trains_from_one_step_until_another() -> None:
  weights = {'x': weight(2), 'y': weight(2)}
  adam = ADAM.clone(ema_decay=0.0)
  late = {'regex': 'x', 'learner': adam, 'train_from_step': 1, 'train_until_step': 3}
  found = trained(rules(late, {}), weights, steps=4)
  start = values(weights)['x']
  x = [start, *(out.mdl_vars['x'] for out in found)]
  assert [np.array_equal(a, b) for a, b in itertools.pairwise(x)] == [True, False, False, True]
  assert [int(out.opt_states['a']['all'][0].count) for out in found] == [0, 1, 2, 2]
  assert [float(out.stats['learning_rate/a']) for out in found] == pytest.approx([0.0, 0.1, 0.1, 0.0])
  assert [float(out.stats['grad_norm/a']) > 0 for out in found] == [False, True, True, False]
  assert float(found[0].stats['grad_norm']) == float(found[0].stats['grad_norm/b'])
  # Its first step is the first of its optimizer, whose moments are corrected for that: Adam's first update is the rate.
  np.testing.assert_allclose(np.abs(x[2] - x[1]), 0.1, rtol=1e-5)


def test_a_rule_waits_on_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
  """There, values are chosen entry by entry, without a branch."""
  weights = {'x': weight(2), 'y': weight(2)}
  late = {'regex': 'x', 'learner': ADAM, 'train_from_step': 1, 'train_until_step': 2}
  here = trained(rules(late, {}), weights)
  monkeypatch.setattr(base_learner, 'platform', lambda: 'gpu')
  for got, want in zip(trained(rules(late, {}), weights), here):
    assert_same(got._asdict(), want._asdict())


def test_a_gradient_of_a_rule_that_does_not_train_need_not_be_finite() -> None:
  weights = {'x': weight(), 'y': weight()}
  learner = rules({'regex': 'x', 'train_from_step': 5}, {}, clip_gradient_norm_to_value=1.0).bind(weights)
  zeros = {'x': jnp.zeros(()), 'y': jnp.zeros(())}
  out = {}
  for step in (0, 5):
    gradients = {'x': jnp.float32(np.nan), 'y': jnp.float32(0.5)}
    out[step] = learner.update(gradients, jnp.float32(1), zeros, learner.init(zeros), None, jnp.int32(step))
  assert float(out[0].stats['skipped']) == 0.0 and float(out[0].mdl_vars['y']) == -0.5
  assert float(out[5].stats['skipped']) == 1.0 and float(out[5].mdl_vars['y']) == 0.0


def test_a_loss_of_a_rule_that_does_not_train_need_not_be_finite() -> None:
  weights = {'x': weight(), 'y': weight(), 'z': weight()}
  late = {'train_from_step': 5, 'loss': 'one'}
  learner = rules({'regex': 'x', **late}, {'regex': 'y', **late, 'train_from_step': 7}, {'loss': 'two'}).bind(weights)
  zeros = dict.fromkeys(weights, jnp.zeros(()))
  gradients = dict.fromkeys(weights, jnp.float32(0.5))

  def skipped(step: int, one: float, two: float) -> float:
    losses = {'one': jnp.float32(one), 'two': jnp.float32(two)}
    out = learner.update(gradients, losses, zeros, learner.init(zeros), None, jnp.int32(step))
    return float(out.stats['skipped'])

  assert skipped(0, np.nan, 1.0) == 0.0
  assert skipped(5, np.nan, 1.0) == skipped(7, np.inf, 1.0) == 1.0
  assert skipped(0, 1.0, np.nan) == 1.0


def test_the_optimizer_of_a_rule_is_given_its_own_loss() -> None:
  """Polyak's step is the loss over the squared norm of the gradient, times the gradient."""
  weights = {'x': weight(), 'y': weight()}
  rate = Config(optax.scale_by_learning_rate, flip_sign=False)
  polyak = SGD.clone(optimizer=Config(optax.chain, Config(optax.polyak_sgd), rate))
  learner = rules({'regex': 'x', 'learner': polyak, 'loss': 'one'}, {'learner': polyak, 'loss': 'two'}).bind(weights)
  zeros = dict.fromkeys(weights, jnp.zeros(()))
  losses = {'one': jnp.float32(2), 'two': jnp.float32(5)}
  gradients = dict.fromkeys(weights, jnp.float32(4))
  out = learner.update(gradients, losses, zeros, learner.init(zeros), None, jnp.int32(0)).mdl_vars
  np.testing.assert_allclose([out['x'], out['y']], [-2 / 4, -5 / 4], rtol=1e-6)


def test_gradients_and_updates_have_factors() -> None:
  weights = {'x': weight(), 'y': weight()}
  decayed = SGD.clone(decoupled_weight_decay=0.5, clip_gradient_norm_to_value=4.0)
  learner = rules({'regex': 'x', 'learner': decayed, 'gradient_factor': 3.0, 'update_factor': 0.1}, {}).bind(weights)
  ones = {'x': jnp.ones(()), 'y': jnp.ones(())}
  two = {'x': jnp.float32(2), 'y': jnp.float32(2)}
  out = learner.update(two, jnp.float32(1), ones, learner.init(ones), None, jnp.int32(0))
  np.testing.assert_allclose(out.mdl_vars['x'], 1 - 0.1 * (4 + 0.5), rtol=1e-6)  # 3 * 2 = 6, clipped to 4
  np.testing.assert_allclose(out.mdl_vars['y'], 1 - 2, rtol=1e-6)
  np.testing.assert_allclose(out.stats['learning_rate/a'], 0.1, rtol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_updates_of_a_stack_decay_by_layer(dtype: Any) -> None:
  weights = {
    'emb': weight(2),
    'layers': {'w': weight(2, repeat=(LAYERS,)), 'b': weight(repeat=(LAYERS,))},
    'head': weight(2),
  }
  decay = Config(LayerDecay, factor=0.5, layers=r'layers\..*', embeddings='emb')
  learner = rules({'layer_decay': decay, 'update_factor': 2.0}).bind(weights)
  assert learner.remark(('emb',)) == "trained by rule 'a' times 2 with decay 0.5 by layer"
  zeros = jax.tree.map(lambda w: jnp.zeros(w.full_shape, dtype), weights)
  gradients = jax.tree.map(lambda x: -jnp.ones_like(x), zeros)
  out = learner.update(gradients, jnp.float32(1), zeros, learner.init(zeros), None, jnp.int32(0)).mdl_vars
  expected = 2 * 0.5 ** np.arange(LAYERS, 0, -1)  # The last layer once, the first LAYERS times.
  np.testing.assert_array_equal(out['layers']['w'], np.stack([expected] * 2, 1))
  np.testing.assert_array_equal(out['layers']['b'], expected)
  np.testing.assert_array_equal(out['emb'], [2 * 0.5 ** (LAYERS + 1)] * 2)
  np.testing.assert_array_equal(out['head'], [2.0] * 2)
  assert jax.tree.map(lambda x: x.dtype, out) == jax.tree.map(lambda x: x.dtype, zeros)


def depths(layers: Any, weights: Any, **fields: Any) -> dict[str, Any]:
  factors = Config(LayerDecay, factor=0.5, layers=layers, **fields).instantiate().factors(weights)
  return {path_name(path): np.ravel(-np.log2(factor)).tolist() for path, factor in factors.items()}


def test_depths_of_layers_with_a_number_in_the_path_of_rounds_and_of_several_parts() -> None:
  separate = {'layers_0': {'w': weight(2)}, 'layers_10': {'w': weight(2)}, 'head': weight()}
  assert depths(r'layers_(\d+)\..*', separate) == {'layers_0.w': [11.0], 'layers_10.w': [1.0]}
  rounds = {'layers_0': weight(2, repeat=(2,)), 'layers_1': weight(2, repeat=(2,))}
  assert depths(r'layers_(\d+)', rounds) == {'layers_0': [4.0, 2.0], 'layers_1': [3.0, 1.0]}
  parts = {'emb': weight(), 'first_0': weight(), 'layers': weight(2, repeat=(2,)), 'rest_0': weight()}
  found = depths((r'first_(\d+)', 'layers', r'rest_(\d+)'), parts, embeddings='emb')
  assert found == {'first_0': [4.0], 'layers': [3.0, 2.0], 'rest_0': [1.0], 'emb': [5.0]}
  assert depths('deep', {'deep': weight(3, repeat=(2, 2))}) == {'deep': [4.0, 3.0, 2.0, 1.0]}


def test_a_split_stack_needs_to_be_whole_for_factors_of_its_layers() -> None:
  weights = declarations()
  decay = Config(LayerDecay, factor=0.5, layers=r'lm\.layers\..*')
  bound = rules({'regex': r'lm\.emb\.w'}, {'layer_decay': decay}).bind(weights)
  path = ('lm', 'layers', 'ff', 'w')
  assert bound.needs_whole({path: (0,)}) == ('learner.rules[1].layer_decay', ['LayerDecay'])
  assert bound.needs_whole({path: (1, 2)}) == ('learner.rules', [])
  lamb = rules({'regex': STACKS}, {'learner': SGD.clone(optimizer=Config(optax.lamb))}).bind(weights)
  assert lamb.needs_whole({('lm', 'emb', 'w'): (0,)}) == ('learner.rules[1].learner.optimizer', ['lamb'])
  assert lamb.needs_whole({path: (1,)}) == ('learner.rules', [])


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
  ('given', 'message'),
  [
    ([{'regex': STACKS}], r'learner\.rules: lm\.emb\.w and 1 more belong to no rule; a rule without regex'),
    (
      [{'regex': STACKS}, {'regex': r'lm\.deep\.w'}, {}],
      r"rules\[1\]\.regex: lm\.deep\.w .* rules\[0\] \('a'\) and",
    ),
    ([{'regex': 'lm'}, {}], r"rules\[0\]\.regex: 'lm' matches no trained variable\. .*write 'lm\.\*'"),
    ([{'regex': ()}, {}], r'rules\[0\]\.regex: expected a regex, or None for all other variables, got \(\)'),
    ([{'regex': ''}, {}], r"rules\[0\]\.regex: expected a regex, or None for all other variables, got ''"),
    ([{'regex': '('}, {}], r"rules\[0\]\.regex: '\(' is not a regular expression"),
    ([{'regex': '.*'}, {}], r"rules\[1\]: the other rules leave no variable for 'b'"),
    ([{}, {}], r'rules\[1\]\.regex: None takes the variables that no other rule takes, as rules\[0\] does'),
    ([{}, {'name': 'a', 'regex': '.*'}], r"rules\[1\]\.name: rules\[0\] has the name 'a' too"),
    ([{'name': 'a.b'}], r"rules\[0\]\.name: expected letters, digits and underscores, got 'a\.b'"),
    ([{'train_from_step': -1}], r'rules\[0\]\.train_from_step: expected a number of steps, got -1'),
    (
      [{'train_from_step': 3, 'train_until_step': 3}],
      r'rules\[0\]\.train_until_step: expected more than .* 3,',
    ),
    ([{'update_factor': 0.0}], r'rules\[0\]\.update_factor: expected a finite number above 0, got 0\.0'),
    ([{'gradient_factor': float('nan')}], r'rules\[0\]\.gradient_factor: .* got nan'),
    ([{'learner': SGD.clone(num_microbatches=2)}], r'rules\[0\]\.learner\.num_microbatches: it holds for all'),
    ([{'learner': SGD.clone(learning_rate=-1.0)}], r'rules\[0\]\.learner\.learning_rate: expected a finite number'),
    ([{'learner': Config(optax.adam)}], r'rules\[0\]\.learner: expected the config of a Learner'),
    ([{'learner': SGD.clone(optimizer=Config(optax.scale_by_adam))}], r'rules\[0\]\.learner\.optimizer: scale_by_adam'),
    ([{'learner': SGD.clone(schedule=lambda: 1)}], r'rules\[0\]\.learner\.schedule: '),
    ([{'layer_decay': Config(LayerDecay, factor=2.0, layers=STACKS)}], r'rules\[0\]\.layer_decay\.factor: .* got 2\.0'),
    ([{'layer_decay': Config(Constant)}], r'rules\[0\]\.layer_decay: expected the config of a LayerDecay'),
    ([{'layer_decay': Config(LayerDecay, factor=0.5, layers='x')}], r"rules\[0\]\.layer_decay\.layers: 'x' matches no"),
    (
      [{'layer_decay': Config(LayerDecay, factor=0.5, layers=STACKS)}],
      r"layer_decay\.layers: the first group of .* is '\w+' in lm\.\S+, not the number of a layer",
    ),
    (
      [{'regex': r'lm\.emb.*', 'layer_decay': Config(LayerDecay, factor=0.5, layers=r'lm\.deep\..*')}, {}],
      r'rules\[0\]\.layer_decay: none of the variables of this rule is in a layer',
    ),
    (
      [{'layer_decay': Config(LayerDecay, factor=0.5, layers=r'lm\..*')}],
      r'layer_decay\.layers: .* matches variables of different stacks, or of a stack and of none; give each',
    ),
    ([], r'learner\.rules: expected at least one LearnerRule'),
  ],
)
def test_what_cannot_be_is_refused_with_the_path_of_the_rule(given: list[dict[str, Any]], message: str) -> None:
  with pytest.raises(ConfigError, match=message):
    rules(*given).bind(declarations()).init(values(declarations()))


def test_a_learner_is_no_rule() -> None:
  with pytest.raises(ConfigError, match=r'learner\.rules\[0\]: expected the config of a LearnerRule'):
    Config(MultiLearner, rules=(SGD,)).instantiate()


def test_a_rule_that_waits_keeps_the_dtypes_of_variables_and_slots() -> None:
  weights = {'x': weight(4, 4), 'y': weight()}
  lars = SGD.clone(optimizer=Config(optax.lars, momentum=0.9), learning_rate=100.0)
  learner = rules({'regex': 'x', 'learner': lars, 'train_from_step': 1}, {}).bind(weights)
  params: Any = {'x': jnp.ones((4, 4), jnp.bfloat16), 'y': jnp.ones((), jnp.bfloat16)}
  state = learner.init(params)
  out = jax.jit(learner.update)(params, jnp.float32(1), params, state, None, jnp.int32(1))
  assert jax.tree.map(jnp.dtype, (out.mdl_vars, out.opt_states)) == jax.tree.map(jnp.dtype, (params, state))
  assert not np.array_equal(out.mdl_vars['x'], params['x'])


def test_variables_that_are_not_trained_need_no_rule() -> None:
  learner = rules({'regex': STACKS}, bprop_variable_exclusion=(r'lm\.emb\.w', r'lm\.scale')).bind(declarations())
  assert {path[1] for path in leaves(learner.select_trained(declarations()))} == {'layers', 'deep'}
