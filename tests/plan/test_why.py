"""Why a step communicates: the fields behind its collectives, and what is declared badly; snapshots that notice."""

import dataclasses
import re

import pytest
from declared_plans import declared_snapshot
from small_lm import TOKENS, D, small_lm

from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments import testing
from praxis_lite.instruments.explain.explanation import ShardingReport, format_report
from praxis_lite.instruments.explain.report import explain, task_and_inputs, trace_task
from praxis_lite.instruments.plan import Reason, format_why, plan
from praxis_lite.instruments.plan.cost import Operation, cost_of
from praxis_lite.instruments.plan.dataflow import Dataflow
from praxis_lite.instruments.plan.declared import Declaration, Declarations
from praxis_lite.instruments.plan.hlo import parse
from praxis_lite.instruments.plan.layer_names import LayerNames
from praxis_lite.instruments.plan.links import Links
from praxis_lite.instruments.plan.snapshot import GrowthLimits, keep, read, regressions, snapshot_of
from praxis_lite.instruments.plan.topology import parse_topology
from praxis_lite.instruments.plan.why import Why
from praxis_lite.models import set_sharding, transformer_lm
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.state import state_layout

LAYERS = 'lm.transformer.layers'
HIDDEN = f'{LAYERS}.ff.activation_split_dims_mapping.hidden'
OUT = f'{LAYERS}.attention.activation_split_dims_mapping.out'
BATCH = ('replica', 'data')


def good_lm():
  return small_lm((2, 2, 2), hidden_dims=96)


def bad_lm():
  """Its feed-forward weights are tensor parallel and their activation is not; attention splits what no other does."""
  config = good_lm()
  block = config.task.model.lm_tpl.transformer_tpl.layers_tpl
  block.ff_tpl.activation_split_dims_mapping.hidden = (BATCH, None, None)
  block.attention_tpl.activation_split_dims_mapping.out = (BATCH, None, 'mdl')
  return config


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp('plans')


@pytest.fixture(scope='module')
def good(cache):
  return plan(good_lm(), None, 'cpu:8', cache=cache)


@pytest.fixture(scope='module')
def bad(cache):
  return plan(bad_lm(), None, 'cpu:8', cache=cache)


# ---------------------------------------------------------------- causes


@pytest.mark.slow
def test_what_is_declared_is_expected_and_names_its_field(good):
  assert all(c.expected for c in good.collectives) and not good.findings
  causes = {(c.kind, c.axes, c.layer, c.phase): c.cause for c in good.collectives}
  weights = f'{LAYERS}.ff.weight_split_dims_mapping.wt'
  gather = causes['all-gather', ('data',), f'{LAYERS}.ff.up', 'forward']
  assert (gather.reason, gather.fields) == (Reason.WEIGHT, (weights,))
  pair = causes['all-reduce', ('mdl',), f'{LAYERS}.ff.down', 'forward']
  assert (pair.reason, pair.fields) == (Reason.TENSOR, (weights,))
  reduction = causes['all-reduce', ('data',), LAYERS, 'backward']
  assert (reduction.reason, reduction.fields) == (Reason.GRADIENT, ('task.train.inputs_split_mapping',))
  text = format_why(good)
  assert re.search(r'gather of a fully sharded weight +data +\S+ KiB +\S+\.weight_split_dims_mapping\.wt', text)
  assert max(map(len, text.splitlines())) <= 100
  assert text.endswith('surprises: none')


@pytest.mark.slow
def test_an_exchange_of_looked_up_vectors_is_named_by_the_split_of_the_table():
  config = small_lm((1, 4, 2), num_layers=1)
  config.datasets[0].seq_len = 8  # Few ids, so that their vectors are fewer bytes than the table.
  found = plan(config, None, 'cpu:8')
  field = 'lm.embedding.weight_split_dims_mapping.wt'
  causes = {c.phase: c.cause for c in found.collectives if (c.kind, c.layer) == ('all-to-all', 'lm.embedding')}
  assert [(c.reason, c.fields) for c in causes.values()] == [(Reason.EXCHANGE, (field,))] * 2
  assert all(c.expected for c in found.collectives)
  assert re.search(rf'exchange of looked-up vectors +data +\S+ KiB +{re.escape(field)}', format_why(found))
  told = explain(config, 'lm.embedding.out').remarks
  assert any(re.match(r'exchanged after the lookup over data, \S+ KiB of vectors and ids, or 12 KiB', r) for r in told)


@pytest.mark.slow
def test_bad_mappings_are_named_by_their_fields(bad):
  surprises = [c for c in bad.collectives if not c.expected]
  assert {c.cause.fields[0] for c in surprises} == {HIDDEN, OUT}
  for field, layer in ((HIDDEN, 'ff'), (OUT, 'attention')):
    of_field = [c for c in surprises if c.cause.fields[0] == field]
    assert any(c.cause.reason is Reason.ACTIVATION_MOVED and c.axes == ('mdl',) for c in of_field)
    assert 'make them agree' in of_field[0].cause.remedy and f'{LAYERS}.{layer}' in of_field[0].cause.remedy
  moved = [c for c in surprises if c.cause.reason is Reason.WEIGHT_MOVED]
  assert {c.layer for c in moved} == {f'{LAYERS}.ff.gate', f'{LAYERS}.ff.up'}
  text = re.sub(r'\s+', ' ', format_why(bad))
  assert f'{HIDDEN} does not split {LAYERS}.ff.hidden over mdl, unlike {LAYERS}.ff.weight_split_dims_mapping.wt' in text
  assert f'{OUT} splits {LAYERS}.attention.out over mdl, unlike' in text


@pytest.mark.slow
def test_explain_shows_what_the_compiler_made_of_activations(bad, monkeypatch, capsys):
  found = {e.path: e for e in bad.activations}
  hidden, free = found[f'{LAYERS}.ff.hidden'], found[f'{LAYERS}.ff_norm.out']
  assert hidden.compiled == hidden.local_shape == (4, 32, 96) and not hidden.differs
  assert free.at_most and free.compiled == (4, 32, 64) and not free.differs  # Left to the compiler.
  other = dataclasses.replace(hidden, compiled=(4, 32, 64))
  text = format_report(ShardingReport(bad.mesh, [], [], [hidden, other, free], []))
  assert re.search(r'hidden .* 4 x 32 x 96 +4 x 32 x 96 ', text) and '4 x 32 x 64 (differs)' in text
  monkeypatch.setattr('praxis_lite.instruments.plan.plan', lambda *args, **kwargs: bad)
  assert main(['show', '--exp=lm.SyntheticLmTiny', '--compiled=cpu:8']) == 0
  assert re.search(r'ff.hidden .* 4 x 32 x 96 +4 x 32 x 96 ', capsys.readouterr().out)


def why_of(config):
  task, inputs = task_and_inputs(config)
  layers = [layer.path for layer in task.model.descendants()]
  return Why(trace_task(task, state_layout(task, abstract_mesh(task.mesh_sizes())), inputs), LayerNames(layers))


def test_what_devices_compute_alike_is_found_by_its_flops():
  config = good_lm()
  set_sharding(config.task.model, mdl_axis=None)  # Two devices of each four hold and compute the same.
  why, layer = why_of(config), f'{LAYERS}.ff.up'
  flops = 3 * 2 * TOKENS * D * 96 * 2
  op = Operation('dot', 'dot', layer, 'forward', 1, flops / 4, 0.0, 0.0)
  (cause,) = why.find_replicated([op], num_devices=8)
  assert (cause.reason, cause.layers) == (Reason.REPLICATED, (layer,))
  assert 'the 2 devices of mdl compute the same' in cause.what and cause.fields
  assert not why.find_replicated([dataclasses.replace(op, flops=flops / 8)], num_devices=8)


def test_what_xla_replicates_to_split_it_anew_is_explained():
  why = why_of(good_lm())
  message = (
    'W1122 11:24:22.7 1 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler cannot go '
    'from sharding {devices=[4,1,1,2]<=[8] last_tile_dim_replicate} to {devices=[1,1,2,4]<=[4,2]T(1,0)} efficiently '
    'for HLO operation %c = f32[4,32,64]{2,1,0} copy(%sin.0), sharding={devices=[4,1,1,2]<=[8]}, '
    'metadata={op_name="jit(train_step)/jvp(LanguageModel)/lm/transformer/while/body/layers/ff/add"}.'
  )
  (cause,) = why.find_rematerialized([message])
  assert cause.layers == (f'{LAYERS}.ff',) and 'from 4x1x1 parts to 1x1x2x4 parts' in cause.what


_LOOP = """HloModule step, num_partitions=2

%body (p: (s32[], f32[8], f32[4], f32[8])) -> (s32[], f32[8], f32[4], f32[8]) {
  %p = (s32[], f32[8], f32[4], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %w = f32[4] get-tuple-element(%p), index=2
  %h = bf16[4] fusion(%w), kind=kLoop, calls=%cast
  %g = bf16[8] all-gather(%h), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %y = f32[4] slice(%x), slice={[0:4]}
  %a = f32[8] all-gather(%y), channel_id=2, replica_groups={{0,1}}, dimensions={0}
  ROOT %t = (s32[], f32[8], f32[4], f32[8]) tuple(%i, %a, %w, %x)
}

%cast (c: f32[4]) -> bf16[4] {
  %c = f32[4] parameter(0)
  ROOT %b = bf16[4] convert(%c)
}

%cond (q: (s32[], f32[8], f32[4], f32[8])) -> pred[] {
  %q = (s32[], f32[8], f32[4], f32[8]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (v: f32[4], z: f32[8]) -> f32[8] {
  %v = f32[4] parameter(0), metadata={op_name="state.mdl_vars[\\'lm\\'][\\'out\\'][\\'w\\']"}
  %z = f32[8] parameter(1), metadata={op_name="inputs[\\'ids\\']"}
  %n = s32[] constant(0)
  %s = (s32[], f32[8], f32[4], f32[8]) tuple(%n, %z, %v, %z)
  %l = (s32[], f32[8], f32[4], f32[8]) while(%s), condition=%cond, body=%body
  ROOT %r = f32[8] get-tuple-element(%l), index=1
}
"""


def test_a_weight_is_known_through_casts_and_loops_and_what_a_loop_changes_is_computed():
  flow = Dataflow(parse(_LOOP))
  found = {
    instruction.name: flow.arguments(instruction, computation) for instruction, computation in flow.collectives()
  }
  assert found == {'g': ['mdl_vars.lm.out.w'], 'a': ['']}


_GATHERED_BY_SUMS = """HloModule m, num_partitions=4

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%place (p: f32[2], at: s32[]) -> f32[8] {
  %p = f32[2] parameter(0)
  %at = s32[] parameter(1)
  %zero = f32[] constant(0)
  %zeros = f32[8] broadcast(%zero), dimensions={}
  %mask = pred[2] constant({true, false})
  %none = f32[2] broadcast(%zero), dimensions={}
  %true = f32[2] select(%mask, %p, %none)
  ROOT %placed = f32[8] dynamic-update-slice(%zeros, %true, %at)
}

ENTRY %main (v: f32[2], w: f32[2], d: f32[8], at: s32[]) -> f32[8] {
  %v = f32[2] parameter(0), metadata={op_name="state.mdl_vars[\\'lm\\'][\\'v\\']"}
  %w = f32[2] parameter(1), metadata={op_name="state.mdl_vars[\\'lm\\'][\\'w\\']"}
  %d = f32[8] parameter(2), metadata={op_name="inputs[\\'ids\\']"}
  %at = s32[] parameter(3)
  %a = f32[8] fusion(%v, %at), kind=kLoop, calls=%place
  %b = f32[8] fusion(%w, %at), kind=kLoop, calls=%place
  %one = f32[8] all-reduce(%a), to_apply=%sum
  %joined = f32[16] concatenate(%a, %b), dimensions={0}
  %two = f32[16] all-reduce(%joined), to_apply=%sum
  %twice = f32[8] multiply(%a, %a)
  %mixed = f32[16] concatenate(%a, %twice), dimensions={0}
  %three = f32[16] all-reduce(%mixed), to_apply=%sum
  %into = f32[8] dynamic-update-slice(%d, %v, %at)
  ROOT %four = f32[8] all-reduce(%into), to_apply=%sum
}
"""


def test_a_weight_that_is_gathered_by_a_sum_of_filled_arrays_is_known():
  flow = Dataflow(parse(_GATHERED_BY_SUMS))
  found = {
    instruction.name: flow.arguments(instruction, computation) for instruction, computation in flow.collectives()
  }
  assert found == {'one': ['mdl_vars.lm.v'], 'two': ['mdl_vars.lm.v'], 'three': [''], 'four': ['']}


@pytest.mark.slow
def test_weights_that_are_gathered_by_sums_are_surprises_with_a_remedy(cache):
  config = small_lm((1, 8, 1))
  lm = transformer_lm(vocab_size=64, model_dims=4, num_layers=2, num_heads=1, dims_per_head=8, hidden_dims=64)
  config.task.model = set_sharding(lm.set(packed=False))
  found = plan(config, None, 'cpu:8', cache=cache)
  summed = [c for c in found.collectives if c.cause is not None and c.cause.reason is Reason.WEIGHT_SUMMED]
  assert summed and {c.kind for c in summed} == {'all-reduce'} and not any(c.expected for c in summed)
  text = ' '.join(format_why(found).split())
  assert 'is gathered over data by a sum, which sends twice as much' in text
  assert 'split over fewer devices: data has 8, which does not divide 4' in text


def test_gradients_of_stacks_in_stages_are_those_of_weights():
  """Those of attention have as many dimensions as heads, whose sizes they may have too."""
  heads = Declaration('a.query.w', 'a.query', (16, 12, 8), ((), ('mdl',), ()), ('', '', ''), (None,) * 3, True, 24)
  found = Declarations(ShardingReport({'stage': 4, 'mdl': 3}, [], [], [], []), {})
  for dims, fits in (((1, 1, 6, 16, 4, 8), True), ((1, 1, 5, 16, 4, 8), False), ((6, 16, 4, 8), False)):
    assert found.fitting(dims, [heads]) == [heads] * fits


_CHUNK_OF_A_GRADIENT = """HloModule m, num_partitions=8

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

ENTRY %main (a: f32[1,9999,9]) -> f32[1,9999,9] {
  %a = f32[1,9999,9] parameter(0)
  %b = f32[1,9999,9] multiply(%a, %a)
  ROOT %r = f32[1,9999,9] all-reduce(%b), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum, metadata={op_name="NAME"}
}
"""


@pytest.mark.parametrize('splits_rows', [True, False])
def test_a_chunk_of_a_gradient_is_summed_over_all_axes_that_split_the_rows_of_its_layer(splits_rows):
  """A chunk has no declared shape, and the rows of a softmax after a pipeline may be split over its stages."""
  config = configure(registry.get('pipelines.SyntheticLmPipelined'))
  softmax = config.task.model.lm_tpl.softmax_tpl
  softmax.activation_split_dims_mapping.out = (('replica', 'data', *['stage'] * splits_rows), None, 'mdl')
  why, topology = why_of(config), parse_topology('h100:8')
  program = parse(_CHUNK_OF_A_GRADIENT.replace('NAME', 'jit(step)/transpose(jvp(LanguageModel))/lm/softmax/reduce'))
  mesh = {'stage': 2, 'replica': 1, 'data': 2, 'mdl': 2}
  cost = cost_of(program, topology.target, Links(topology), mesh=mesh, layers=why._names)
  (cause,) = (c.cause for c in why.add_causes(cost, program).collectives)
  assert cause.expected == splits_rows
  if splits_rows:
    assert cause.reason is Reason.GRADIENT and cause.fields == ('lm.softmax.activation_split_dims_mapping.out',)


# ---------------------------------------------------------------- snapshots


@pytest.mark.slow
def test_a_snapshot_is_read_as_it_was_written_and_notices_a_gather(good, bad, tmp_path, monkeypatch):
  path = tmp_path / 'plans' / 'lm.txt'
  monkeypatch.delenv('UPDATE_GOLDEN', raising=False)
  with pytest.raises(AssertionError, match=r'lm\.txt is missing; UPDATE_GOLDEN=1 writes it'):
    testing.assert_plan_matches(good_lm(), 'cpu:8', path)
  keep(snapshot_of(good), path)
  assert read(path) == snapshot_of(good)
  assert not regressions(read(path), snapshot_of(good))
  monkeypatch.setattr(testing, 'plan', lambda *args, **kwargs: bad)
  with pytest.raises(AssertionError, match=rf'added: all-gather over mdl in {LAYERS}.ff \(backward\).*{HIDDEN}'):
    testing.assert_plan_matches(bad_lm(), 'cpu:8', path)
  monkeypatch.setenv('UPDATE_GOLDEN', '1')
  path.write_text(str(dataclasses.replace(read(path), limits=GrowthLimits(memory=0.2))))
  testing.assert_plan_matches(bad_lm(), 'cpu:8', path)
  assert read(path).limits.memory == 0.2  # Updating keeps the limits of the file.
  assert read(path).collectives == snapshot_of(bad).collectives


@pytest.fixture(scope='module')
def by_formulas():
  return snapshot_of(plan(good_lm(), None, 'cpu:8', compile=False), 'lm.SyntheticLmTiny')


@pytest.fixture
def kept(by_formulas, tmp_path):
  """A snapshot by formulas, and its file."""
  path = tmp_path / 'lm.txt'
  keep(by_formulas, path)
  return read(path), path


def test_growth_is_told_with_layer_and_field_from_its_limit_on(kept):
  old, _ = kept
  saved = 'saved activations of lm.transformer, forward'
  memory = dict(old.memory) | {saved: old.memory.get(saved, 0) + (1 << 20)}

  def grown(share):
    return dataclasses.replace(old, memory=memory | {'peak': int(old.memory['peak'] * (1 + share))})

  assert not regressions(old, grown(0.04))
  (text,) = regressions(old, grown(0.06))
  assert re.search(r'the peak grew from .* by 6.0%.*saved activations of lm.transformer, forward, by 1 MiB', text)
  assert not regressions(old, grown(0.06), GrowthLimits(memory=0.1))
  key, group = next(iter(old.collectives.items()))
  more = dict(old.collectives) | {key: dataclasses.replace(group, sent=2 * group.sent)}
  (text,) = regressions(old, dataclasses.replace(old, collectives=more))
  assert f'{key[0]} over {key[1]} in {key[2]}' in text and 'sends more' in text and group.fields in text
  smaller = dataclasses.replace(old, collectives={}, memory={'peak': 1})
  assert not regressions(old, smaller)
  assert 'it was cpu:8' in regressions(old, dataclasses.replace(old, topology='cpu:4'))[0]


def test_without_a_compiler_weights_and_the_state_are_compared(kept):
  old, _ = kept
  compiled = dataclasses.replace(old, mode='compiled', memory=dict(old.memory) | {'peak': 1})
  assert not regressions(compiled, declared_snapshot(good_lm(), compiled))
  config = good_lm()
  config.task.model.lm_tpl.embedding_tpl.weight_split_dims_mapping.wt = ('mdl', None)
  texts = regressions(compiled, declared_snapshot(config, compiled))
  field = 'lm.embedding.weight_split_dims_mapping.wt'
  assert texts[0] == f'lm.embedding.w: it was 128 x 64 split (mdl, data), and is 128 x 64 split (mdl, -): {field}'


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (lambda text: 'else', 'this is not a snapshot of a plan'),
    (lambda text: text + '\nmore', r"line \d+: 'more' is not as plan --snapshot writes it"),
    (lambda text: text.replace('limits: memory', 'limits: x'), "'memory' is missing"),
    (lambda text: re.sub(r'  [\d,]+ +peak', '  many  peak', text), 'invalid literal'),
  ],
)
def test_a_file_that_is_no_snapshot_is_told(kept, change, message):
  _, path = kept
  path.write_text(change(path.read_text()))
  with pytest.raises(ConfigError, match=message):
    read(path)


@pytest.mark.slow
def test_the_commands(tmp_path, capsys):
  path = tmp_path / 's.txt'
  named = ['plan', '--exp=lm.SyntheticLmTiny', '--nocompile', '--set', 'task.ici_mesh_shape=(2,2,2)']
  assert main([*named, '--topology=cpu:8', f'--snapshot={path}', '--why']) == 0
  out = capsys.readouterr().out
  assert f'wrote {path}' in out and 'why it communicates is read from the compiled program' in out
  # The file says what of, and on what.
  split = "task.model.lm_tpl.softmax_tpl.weight_split_dims_mapping.wt=('data',None)"
  assert main(['plan', '--nocompile', f'--check={path}', '--set', split]) == 1
  assert 'lm.softmax.w: it was 18 x 37 split (data, mdl), and is 18 x 37 split (data, -)' in capsys.readouterr().out
  path.write_text(path.read_text().replace('mode: analytic', 'mode: compiled'))
  assert main(['plan', '--nocompile', f'--check={path}']) == 0
  assert 'the snapshot is compiled and this plan is analytic, so only the splits' in capsys.readouterr().out
  assert main(['plan', f'--check={path}x']) == 2
  assert 'plan --snapshot=' in capsys.readouterr().err
