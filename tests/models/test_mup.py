"""Mup: what a model takes from a smaller one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_state import drawn_variables
from model_steps import take_a_step

from praxis_lite.bridges.hf.families import describe_model
from praxis_lite.common.config import Config, child
from praxis_lite.common.config.json import from_json, to_json
from praxis_lite.common.errors import ConfigError
from praxis_lite.common.trees import leaves_by_path, node_at, path_name
from praxis_lite.layers import Linear, MoeFeedForward, Repeat
from praxis_lite.models import BaseModel, Mup, image_classifier, mamba2_lm, set_pipeline, set_sharding, transformer_lm
from praxis_lite.sharding.weights import WeightInit, init_weight

V, SMALL, WIDE = 13, {'model_dims': 6, 'hidden_dims': 10}, {'model_dims': 12, 'hidden_dims': 30}

MAMBA = {'model_dims': 6, 'lm_tpl.transformer_tpl.layers_tpl.mixer_tpl.num_heads': 2}


def lm(style: str = 'llama', base: object = None, layers: int = 2, **fields) -> Config:
  sizes = {'num_layers': layers, 'num_heads': 3, 'max_len': 16, **WIDE}
  model = transformer_lm(vocab_size=V, style=style, **sizes, **fields)
  return model.set(mup=None if base is None else Config(Mup, base=base))


def batch(rows: int = 5, length: int = 4):
  ids = np.random.default_rng(0).integers(1, V, (rows, length + 1)).astype(np.int32)
  return {'ids': ids[:, :-1], 'labels': ids[:, 1:], 'weights': np.ones((rows, length), np.float32)}


def scales(model) -> dict[str, float]:
  """The scales of the initializers of a model's variables, by the last parts of their paths."""
  found = leaves_by_path(model.abstract_init())
  return {path_name(path[-2:]): weight.init.scale for path, weight in found.items()}


def test_initial_scales_by_kind():
  base, wide = scales(lm().instantiate()), scales(lm(base=SMALL).instantiate())
  ratio = {name: wide[name] / base[name] for name in base if base[name]}
  assert ratio['embedding.w'] == ratio['attention_norm.scale'] == 1
  assert ratio['query.w'] == ratio['out.w'] == ratio['up.w'] == pytest.approx(2**-0.5)
  assert ratio['down.w'] == pytest.approx(3**-0.5)
  assert ratio['softmax.w'] == pytest.approx(1 / 2)


def test_values_are_drawn_as_declared_whatever_the_initializer():
  """Fan-in scales already shrink with the width; the table, whose scale is so too, is an input and must not."""
  for init in (WeightInit.GaussianFanIn(), WeightInit.Xavier()):
    small, wide = (
      transformer_lm(vocab_size=40, model_dims=D, hidden_dims=40, num_layers=1, num_heads=2) for D in (20, 80)
    )
    wide.mup = Config(Mup, base={'model_dims': 20})
    for model in (small, wide):
      model.lm_tpl.params_init = init
    values = [
      {name: np.std(node_at(drawn, name)) for name in (('lm', 'softmax', 'w'), ('lm', 'embedding', 'w'))}
      for drawn in (eager_init(small.instantiate()), eager_init(wide.instantiate()))
    ]
    ratios = [values[1][name] / values[0][name] for name in values[0]]
    np.testing.assert_allclose(ratios, [1 / 4, 1], rtol=0.1)


def eager_init(model):
  tables = {'lm': {name: node_at(model.abstract_init(), ('lm', name)) for name in ('softmax', 'embedding')}}
  return jax.tree.map(lambda w: init_weight(w, jax.random.key(0)), tables)


def test_a_model_like_its_base_is_the_same_program_with_the_same_values():
  plain, same = (lm('gpt2', base).instantiate() for base in (None, WIDE))
  variables = drawn_variables(plain.abstract_init())
  programs = [str(jax.make_jaxpr(lambda v, m=m: m.apply(v, batch())[0])(variables)) for m in (plain, same)]
  assert programs[0] == programs[1]
  assert scales(plain) == scales(same)
  assert not any(layer.growth_multipliers() for layer in same.descendants())


def multipliers(model) -> dict[str, dict[str, float]]:
  found = {layer.path_name: layer.growth_multipliers() for layer in model.descendants()}
  return {name: factors for name, factors in found.items() if factors}


def test_multipliers_say_what_the_model_computes():
  """A shared table, an attention of wider heads and deeper stacks: each layer against its formula."""
  model = lm('gpt2', SMALL | {'num_layers': 1}).instantiate()
  block, attention = 'lm.transformer.layers', 'lm.transformer.layers.attention'
  found = multipliers(model)
  assert found['lm.softmax'] == {'logits': 1 / 2}
  assert found[block] == {'residual branches': pytest.approx(2**-0.5)}
  assert found[attention] == {'logits of attention': pytest.approx(2**-0.5)}
  assert model.lm.transformer.layers.attention.logit_scale == pytest.approx(2**-0.5 / 2)  # 1 / sqrt(2), over 2.
  variables = drawn_variables(model.abstract_init())
  x = np.random.default_rng(1).standard_normal((2, 3, 12)).astype(np.float32)
  table = variables['lm']['softmax']['w']
  logits, _ = model.lm.softmax.apply(variables['lm']['softmax'], x, method='get_logits')
  np.testing.assert_allclose(logits, x @ table.T / 2, rtol=1e-4, atol=1e-5)
  chunked = lm('gpt2', SMALL)
  chunked.lm_tpl.softmax_tpl.chunk_size = 4
  losses, _ = chunked.instantiate().lm.softmax.apply(
    variables['lm']['softmax'], x, np.zeros((2, 3), np.int32), method='compute_xent'
  )
  np.testing.assert_allclose(losses, -jax.nn.log_softmax(logits)[..., 0], rtol=1e-4, atol=1e-5)


def test_a_deeper_stack_multiplies_its_branches():
  """With the same weights, branches of the deep model are those of the plain one, times 2^-1/2."""
  plain, deep = (lm(base=base).instantiate() for base in (None, WIDE | {'num_layers': 1}))
  block = plain.lm.transformer.layers, deep.lm.transformer.layers
  variables = drawn_variables(block[0].abstract_init())
  x = np.random.default_rng(1).standard_normal((2, 3, 12)).astype(np.float32)
  attended, _ = block[0].attention.apply(
    variables['attention'], block[0].attention_norm.apply(variables['attention_norm'], x)[0]
  )
  variables['ff'] = jax.tree.map(jnp.zeros_like, variables['ff'])
  found, _ = block[1].apply(variables, x)
  np.testing.assert_allclose(found, x + 2**-0.5 * attended, rtol=1e-4, atol=1e-5)


def test_separate_layers_find_their_counterparts_and_experts_and_patterns_too():
  stacked = lm('llama', SMALL | {'num_layers': 1}, layers=3, repeat=False).instantiate()
  growths = [
    node_at(stacked.abstract_init(), ('lm', 'transformer', f'layers_{i}', 'ff', 'up', 'w')).growth for i in range(3)
  ]
  assert [(g.base_shape, g.depth) for g in growths] == [((6, 10), 3.0)] * 3
  experts = Config(MoeFeedForward, num_experts=3, num_experts_per_token=2)
  moe = lm('llama', SMALL | {'num_layers': 2}, experts=experts, first_hidden_dims=(30,), layers=3)
  declared = leaves_by_path(moe.instantiate().abstract_init())
  assert {w.growth.depth for path, w in declared.items() if 'transformer' in path} == {1.5}
  assert all(w.growth is not None for w in declared.values())


@pytest.mark.parametrize(
  ('model', 'base'),
  [
    (
      lambda: image_classifier(
        num_classes=5, image_size=8, patch_size=4, model_dims=12, num_layers=2, num_heads=2, hidden_dims=20
      ),
      {'network_tpl.model_dims': 6, 'network_tpl.num_layers': 1},
    ),
    (lambda: mamba2_lm(vocab_size=V, model_dims=12, num_layers=1, dims_per_head=6, state_dims=4), MAMBA),
  ],
  ids=['vit', 'mamba2'],
)
def test_other_models_need_only_their_widths(model, base):
  built = model().set(mup=Config(Mup, base=base)).instantiate()
  weights = leaves_by_path(built.abstract_init())
  assert any(w.growth.base_shape != w.shape for w in weights.values())
  heads = [w for path, w in weights.items() if path[-2:] == ('softmax', 'w')]
  assert all(w.init.scale < 1 for w in heads)


def test_a_config_may_name_the_whole_base_and_is_recorded():
  by_fields, by_config = lm(base=SMALL), lm(base=lm().set(**SMALL))
  assert scales(by_fields.instantiate()) == scales(by_config.instantiate())
  for config in (by_fields, by_config):
    again = from_json(to_json({'model': config}))['model']
    assert scales(again.instantiate()) == scales(by_fields.instantiate())


@pytest.mark.parametrize(
  ('base', 'message'),
  [
    ({}, 'mup.*base: expected what is different'),
    ({'model_dim': 6}, r"mup\.base: .*model_dim.*Did you mean '?.*model_dims"),
    ({'model_dims': 7}, r'mup\.base: lm\.transformer.*num_heads, 3, does not divide the model dims, 7'),
    ({'lm_tpl.position_tpl': None}, r'lm\.position: mup\.base has no such layer'),
    ({'lm_tpl.transformer_tpl.layers_tpl.attention_tpl.use_bias': False}, r'query\.b: mup\.base has no such variable'),
  ],
)
def test_a_base_that_is_not_a_smaller_model_is_refused(base, message):
  with pytest.raises(ConfigError, match=message):
    lm('gpt2', base).instantiate()


def test_wrong_values_are_refused():
  with pytest.raises(ConfigError, match=r'mup.*depth_exponent: expected at least 0.5 and at most 1, got 2'):
    lm().set(mup=Config(Mup, base=SMALL, depth_exponent=2)).instantiate()
  with pytest.raises(ConfigError, match=r'mup: expected Config\(Mup'):
    lm().set(mup=Config(Mup, base=lm()).base).instantiate()


class Linears(BaseModel):
  """A stack without residual branches."""

  num_layers: int = 2
  stack: Repeat = child()

  def setup(self) -> None:
    linear = Config(Linear, input_dims=3, output_dims=3)
    self.create_child('stack', Config(Repeat, layers_tpl=linear, num_layers=self.num_layers))


def test_a_stack_without_branches_cannot_be_deeper():
  with pytest.raises(
    ConfigError, match=r'stack\.num_layers: mup\.base has another number of layers, and Linear has no'
  ):
    Config(Linears, mup=Config(Mup, base={'num_layers': 1})).instantiate()


def test_a_model_of_transformers_has_no_such_multipliers():
  with pytest.raises(ConfigError, match=r'lm\.softmax multiplies logits by 0\.5 because of LanguageModel\.mup'):
    describe_model(lm('gpt2', SMALL).instantiate())


def test_decoding_computes_what_the_forward_pass_computes():
  model = lm('gpt2', SMALL | {'num_layers': 1}).instantiate()
  variables, ids = drawn_variables(model.abstract_init()), batch()['ids']
  whole, _ = model.lm.apply(variables['lm'], ids, method='logits')
  _, side = model.lm.apply(variables['lm'], 5, 4, method='init_decode_state', do_eval=True)
  logits, _ = model.lm.apply(
    variables['lm'],
    ids,
    np.broadcast_to(np.arange(4, dtype=np.int32), (5, 4)),
    np.broadcast_to(np.arange(4, dtype=np.int32), (5, 4)),
    method='extend_step',
    decode_state=side.decode_state,
    do_eval=True,
  )
  np.testing.assert_allclose(logits, whole, rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('mesh', 'fields'),
  [
    ((1, 2, 2, 2), {}),
    pytest.param((2, 1, 3, 1), {}, marks=pytest.mark.slow),
    pytest.param((1, 2, 3, 1), {'partitioning': 'shard_map'}, marks=pytest.mark.slow),
  ],
  ids=['2x2x2', 'spare and 3', 'shard_map'],
)
def test_a_mesh_trains_as_one_device(mesh, fields):
  """All gradients times their factors, over uneven dimensions; a spare axis, and one of 3."""
  config = set_sharding(lm('gpt2', SMALL | {'num_layers': 1}))
  expected, found = take_a_step(config, batch()), take_a_step(config, batch(), mesh, **fields)
  np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
  for path, x in expected[1].items():
    np.testing.assert_allclose(found[1][path], x, rtol=0, atol=3e-5 * (1 + np.abs(x).max()), err_msg=str(path))


def test_stages_of_a_pipeline_multiply_their_branches():
  model = set_pipeline(lm('llama', SMALL | {'num_layers': 2}, layers=4), num_stages=2, num_microbatches=2)
  plain = lm('llama', SMALL | {'num_layers': 2}, layers=4).instantiate()
  piped = model.instantiate()
  assert scales(piped) == scales(plain)
  assert multipliers(piped) == multipliers(plain)
