"""A user's own layer says what it communicates, what it computes unseen, and what a search may change."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from small_lm import LENGTH, TOKENS, small_lm

from praxis_lite.common.config import REQUIRED, Config
from praxis_lite.instruments.explain import check, explain_task, format_report
from praxis_lite.instruments.plan import Reason, format_plan, format_why, plan
from praxis_lite.instruments.plan.compare import format_comparison
from praxis_lite.instruments.plan.knobs import configure_task, knobs_of
from praxis_lite.instruments.plan.price import format_price
from praxis_lite.instruments.plan.searching import format_search, search
from praxis_lite.instruments.plan.what_if import WhatIf
from praxis_lite.layers.base import Layer
from praxis_lite.layers.base.expected_trips import expected_trips, read_expected_trips
from praxis_lite.layers.base.facts import Exchange, Knob, KnobKind, LayerProblem, TokenFlops, double_or_halve
from praxis_lite.sharding.weights import WeightHParams

PATH = 'lm.transformer.layers.ff'
ROWS = ('replica', 'data')
SIZE, TRIPS, LOOP_FLOPS, CALL_FLOPS = 16, 7, 2 * 16**3, 16**3 // 3


class Codes(Layer):
  """y = codes(x) w, scaled by what a loop settles on; the devices of `axis` make parts of the codes. D dims."""

  input_dims: int = REQUIRED
  hidden_dims: int = 0
  axis: str | None = 'mdl'
  num_chunks: int = 2
  max_len: int = LENGTH

  length_fields = ('max_len',)

  def setup(self):
    self.create_variable('w', WeightHParams((self.input_dims, self.input_dims)))

  def __call__(self, x_BTD):
    codes_BTD = jnp.concatenate([self._codes(x) for x in jnp.split(x_BTD, self.num_chunks, axis=1)], axis=1)
    return codes_BTD @ self.theta.w * self._settle(jax.lax.stop_gradient(self.theta.w))

  def _codes(self, x_BTD):
    if self.axis not in jax.sharding.get_abstract_mesh().shape:
      return jnp.tanh(x_BTD)

    def gather(part):
      return jax.lax.all_gather(jnp.tanh(part), self.axis, axis=2, tiled=True)

    return jax.shard_map(gather, in_specs=P(ROWS, None, self.axis), out_specs=P(ROWS), check_vma=False)(x_BTD)

  def _settle(self, w_DD):
    root = jnp.linalg.cholesky((w_DD @ w_DD.T)[:SIZE, :SIZE] + jnp.eye(SIZE))
    with self._told_trips():
      root = jax.lax.while_loop(lambda w: jnp.sum(w) > 1e-3, lambda w: 0.01 * (w @ w), root)
    return 1 + jnp.sum(root)

  def _told_trips(self):
    return contextlib.nullcontext()


class KnownCodes(Codes):
  """`Codes` that tells the tools about itself."""

  def exchanges(self):
    return [Exchange('gather of the codes', 'axis', (self.axis,))]

  def token_flops(self, length):
    products, _ = super().token_flops(length)
    return TokenFlops(products, attention=length)

  def _told_trips(self):
    return expected_trips(TRIPS)

  def call_flops(self, target, shapes):
    return shapes[0][-1] ** 3 // 3 if 'potrf' in target else 0.0

  def knobs(self):
    return [Knob('num_chunks', self.num_chunks, double_or_halve, KnobKind.MICROBATCHES)]

  def problems(self, mesh_sizes):
    if mesh_sizes[self.axis] > 1:
      yield LayerProblem('gathered codes', f'{self.path_name}.axis', 'codes are gathered', 'set it to None')


def lm_with(layer, mesh=(2, 2, 2), **fields):
  config = small_lm(mesh)
  config.task.model.lm_tpl.transformer_tpl.layers_tpl.ff_tpl = Config(layer, **fields)
  return config


def flops_in(found, layer=PATH):
  return sum(op.count * op.flops for op in found.cost.operations if op.layer == layer and op.phase == 'forward')


def test_what_a_layer_communicates_is_explained():
  report = explain_task(lm_with(KnownCodes))
  assert [(field, e.axes) for field, e in report.exchanges.items()] == [(f'{PATH}.axis', ('mdl',))]
  head, row = 'over +communication that layers declare +field', f'mdl +gather of the codes +{PATH}.axis'
  assert re.search(f'{head}\n{row}', format_report(report))


def test_what_a_layer_communicates_and_its_problems_are_checked():
  (problem,) = [p for p in check(lm_with(KnownCodes)) if 'codes' in p.message]
  assert (problem.kind, problem.path, problem.remedy) == ('gathered codes', f'{PATH}.axis', 'set it to None')
  problems = check(lm_with(KnownCodes, axis='model'))
  assert [(p.kind, p.path) for p in problems] == [('unknown axis', f'{PATH}.axis')]
  assert "gather of the codes: axis 'model' is not an axis of the mesh" in problems[0].message


@pytest.mark.slow
def test_the_collectives_of_a_layer_have_its_words_as_their_cause(tmp_path):
  found = plan(lm_with(KnownCodes), None, 'cpu:8', cache=tmp_path)
  gathers = [c for c in found.collectives if c.layer == PATH and c.kind == 'all-gather' and c.axes == ('mdl',)]
  assert gathers and all(c.expected and c.cause.reason is Reason.EXCHANGE for c in gathers)
  assert {(str(c.cause), c.cause.fields) for c in gathers} == {('gather of the codes', (f'{PATH}.axis',))}
  assert 'gather of the codes' in format_why(found) and not found.cost.unknown_loops
  silent = plan(lm_with(Codes), None, 'cpu:8', cache=tmp_path)
  assert Reason.OTHER in {c.cause.reason for c in silent.collectives if c.layer == PATH}
  assert silent.cost.unknown_loops == (PATH,)


@pytest.mark.slow
@pytest.mark.parametrize('compile', [True, False])
def test_work_that_the_program_does_not_show_counts_as_the_layer_says(compile, tmp_path):
  known, silent = (
    plan(lm_with(layer, (1, 1, 1)), None, 'cpu:1', compile=compile, cache=tmp_path) for layer in (KnownCodes, Codes)
  )
  assert flops_in(known) - flops_in(silent) == 2 * ((TRIPS - 1) * LOOP_FLOPS + CALL_FLOPS)  # Two layers.
  assert known.cost.seconds > silent.cost.seconds and not known.findings
  assert not known.cost.unknown_loops and silent.cost.unknown_loops == (PATH,)


@pytest.mark.slow
@pytest.mark.usefixtures('shared_programs')
def test_a_program_in_jaxs_cache_with_other_names_is_not_taken_for_this_one(tmp_path):
  silent, known = (plan(lm_with(layer, (1, 1, 1)), None, 'cpu:1', cache=tmp_path) for layer in (Codes, KnownCodes))
  assert silent.cost.unknown_loops == (PATH,) and not known.cost.unknown_loops


@pytest.mark.slow
def test_a_plan_withholds_the_time_of_loops_of_unknown_length_and_a_search_does_not_rank_it(tmp_path):
  config = lm_with(Codes, (1, 1, 1))
  found = plan(config, None, 'h100:1', compile=False)
  text = format_plan(found)
  assert 'step         not known' in text and 'bottleneck   not known' in text and 'MFU' not in text
  assert f'says how often the loops of {PATH} run' in text.replace('\n      ', ' ') and not format_price(found)
  known = plan(lm_with(KnownCodes, (1, 1, 1)), None, 'h100:1', compile=False)
  assert 'not known' not in format_plan(known) and 'MFU' in format_plan(known) and format_price(known)
  assert 'faster is not known' in format_comparison(found, known)
  ranked = search(config, None, 'h100:1', verify=0, estimates=2)
  assert 'which setting is the fastest is not known' in format_search(ranked)


@pytest.mark.parametrize(
  'name, trips',
  [
    ('jit(f)/lm/expected_trips=12/while', 12),
    ('jit(f)/transpose(jvp(lm/expected_trips=2.5))/while', 2.5),
    ('jit(f)/lm/while/body/expected_trips=0/search/while', 0),
    ('jit(f)/expected_trips=3/while/body/lm/expected_trips=4e+10/while', 4e10),
    ('jit(f)/lm/expected_trips=12/while/body/while', None),
    ('jit(f)/lm/while', None),
    ('', None),
  ],
)
def test_only_the_loop_of_a_scope_has_its_expected_trips(name, trips):
  assert read_expected_trips(name) == trips


def test_the_expected_trips_of_a_loop_and_of_its_gradient_are_in_their_names():
  def f(x, most):
    with expected_trips(2.5):
      return jax.lax.fori_loop(0, most, lambda i, y: jnp.sin(y @ x), x).sum()

  text = jax.jit(jax.vmap(f, (0, None))).lower(jnp.ones((2, 3, 3)), 4).compile().as_text()
  names = re.findall(r' while\(.*op_name="([^"]*)"', text)
  assert names and [read_expected_trips(name) for name in names] == [2.5] * len(names)


def test_the_flops_of_a_token_are_those_that_the_layer_says():
  known, silent = (plan(lm_with(layer), None, 'cpu:8', compile=False).work for layer in (KnownCodes, Codes))
  assert known.flops - silent.flops == TOKENS * 3 * 2 * LENGTH
  assert known.causal_flops - silent.causal_flops == TOKENS * 3 * LENGTH


@pytest.mark.slow
def test_the_knob_of_a_layer_is_searched():
  field = f'task.model.{PATH}.num_chunks'
  knobs = {knob.paths: knob for knob in knobs_of(configure_task(lm_with(KnownCodes)))}
  assert (knobs[field,].own, knobs[field,].neighbours(2)) == (2, [1, 4])
  assert (field,) not in {knob.paths for knob in knobs_of(configure_task(lm_with(Codes)))}
  found = search(lm_with(KnownCodes), None, 'cpu:8', verify=0, estimates=12)
  assert {f'{field}=1', f'{field}=4'} <= {line for ranked in found for line in ranked.overrides}


@pytest.mark.slow
def test_a_longer_sequence_sets_the_fields_of_the_layer_that_grow_with_it():
  config = configure_task(lm_with(KnownCodes))
  change = WhatIf(config, plan(config.explained, None, 'cpu:8', compile=False)).largest_length()
  length = change.overrides[0].rpartition('=')[2]
  assert change.overrides[1:] == (f'task.model.{PATH}.max_len={length}',) and int(length) > LENGTH
