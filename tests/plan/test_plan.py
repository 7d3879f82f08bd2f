"""Plans of a small language model on simulated devices, against what is counted by hand and what its run compiles."""

import collections
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from small_lm import ALL, ATTENTION_FLOPS, LAYERS, LENGTH, MATRICES, MULTIPLIED, ROWS, TOKENS, VOCAB, D, small_lm

from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError, ShardingError
from praxis_lite.instruments.explain.report import task_and_inputs
from praxis_lite.instruments.plan import compilers, format_plan, parse_topology, plan, planning
from praxis_lite.instruments.plan.local_program import local_program
from praxis_lite.instruments.plan.topology import time_factors
from praxis_lite.sharding.mesh import abstract_mesh
from praxis_lite.sharding.xla_flags import NO_FLAGS, XlaFlags
from praxis_lite.training import registry
from praxis_lite.training.partitioned_task import PartitionedTask

MESHES = {'data': (8, 1, 1), 'fully sharded': (1, 8, 1), 'tensor': (1, 1, 8), 'mixed': (2, 2, 2)}


@pytest.fixture(scope='module')
def cache(tmp_path_factory):
  return tmp_path_factory.mktemp('plans')


@pytest.fixture(scope='module')
def plans(cache):
  found = {}

  def planned(name):
    if name not in found:
      found[name] = plan(small_lm(MESHES[name]), None, 'cpu:8', cache=cache)
    return found[name]

  return planned


def sent(planned, kind, **where):
  """Bytes that a device sends in collectives of a kind, and of a phase or of layers."""
  return sum(
    c.count * (c.fast_bytes + c.network_bytes)
    for c in planned.cost.collectives
    if c.kind == kind and all(getattr(c, name).startswith(value) for name, value in where.items())
  )


@pytest.mark.slow
@pytest.mark.parametrize('name', MESHES)
def test_flops_are_6n_and_attention(plans, name):
  planned = plans(name)
  by_hand = TOKENS * (6 * MULTIPLIED + ATTENTION_FLOPS)
  assert planned.work.flops == by_hand
  assert planned.work.causal_flops == by_hand - TOKENS * ATTENTION_FLOPS / 2
  assert planned.cost.flops * 8 == pytest.approx(by_hand, rel=0.01)
  assert planned.work.parameters == ALL


@pytest.mark.slow
def test_data_parallel_reduces_each_gradient_once(plans):
  planned = plans('data')
  assert sent(planned, 'all-reduce') == pytest.approx(2 * 7 / 8 * 4 * ALL, rel=0.01)
  assert sent(planned, 'all-gather') < 1000  # Of what each example came to.


@pytest.mark.slow
def test_fully_sharded_gathers_forward_and_backward(plans):
  planned = plans('fully sharded')
  matrices, table, ids, vectors = (7 / 8 * 4 * n for n in (LAYERS * MATRICES, VOCAB * D, TOKENS, TOKENS / 8 * D))
  assert sent(planned, 'all-gather', phase='forward') == pytest.approx(matrices + table + ids, rel=0.01)
  assert sent(planned, 'all-gather', phase='backward') == pytest.approx(matrices, rel=0.01)
  # CPUs have no reduce-scatter. The embedding's table is more than its vectors, which are exchanged instead.
  assert sent(planned, 'all-reduce') == pytest.approx(2 * (7 / 8 * 4 * ALL - table), rel=0.01)
  for phase in ('forward', 'backward'):
    assert sent(planned, 'all-to-all', phase=phase) == vectors


# All-reduces of activations: after attention and feed-forward; backward, for each product of x: q, k, v, gate and up.
REDUCED = {'forward': 2 * LAYERS, 'backward': 5 * LAYERS}


@pytest.mark.slow
def test_tensor_parallel_reduces_activations(plans):
  planned = plans('tensor')
  once = 2 * 7 / 8 * 4 * ROWS * LENGTH * D
  embedding_and_softmax = 2
  total = sum(REDUCED.values()) + embedding_and_softmax
  assert sent(planned, 'all-reduce') == pytest.approx(total * once, rel=0.01)
  layers = 'lm.transformer.layers'
  for phase, times in REDUCED.items():
    assert sent(planned, 'all-reduce', layer=layers, phase=phase) == pytest.approx(times * once, rel=0.01)


@pytest.mark.slow
def test_a_mixed_mesh_does_all_of_it_on_parts(plans):
  planned, layers = plans('mixed'), 'lm.transformer.layers'
  part = LAYERS * MATRICES * 4 / 2  # Of the weights, which the axis mdl splits.
  for phase in ('forward', 'backward'):
    assert sent(planned, 'all-gather', layer=layers, phase=phase) == pytest.approx(part / 2, rel=0.01)
  once = 2 / 2 * 4 * ROWS * LENGTH * D / 4
  gradients = part + part / 2  # Over data, and half of them over replica.
  assert sent(planned, 'all-reduce', layer=layers, phase='forward') == pytest.approx(
    REDUCED['forward'] * once, rel=0.01
  )
  backward = sent(planned, 'all-reduce', layer=layers, phase='backward')
  assert backward == pytest.approx(REDUCED['backward'] * once + gradients, rel=0.01)
  axes = {c.axes for c in planned.cost.collectives if c.layer.startswith(layers) and c.result_bytes > 1000}
  assert axes == {('data',), ('mdl',), ('replica',)}


@pytest.mark.slow
def test_memory_is_that_of_the_step_of_a_run(plans):
  memory = plans('mixed').memory
  task, inputs = task_and_inputs(small_lm(MESHES['mixed']))
  of_run = PartitionedTask(task, dict(inputs)).train_step.compiled.memory_analysis()
  assert memory.temporaries == of_run.temp_size_in_bytes
  assert memory.arguments == of_run.argument_size_in_bytes
  assert memory.peak == sum(
    getattr(of_run, f'{part}_size_in_bytes') * sign
    for part, sign in (('argument', 1), ('output', 1), ('alias', -1), ('temp', 1))
  )
  kinds = memory.bytes_by_kind()
  assert sum(kinds.values()) == memory.peak
  assert kinds['optimizer slots'] == pytest.approx(2 * kinds['parameters'], rel=0.01)
  # What the schedule says is live is what the compiler needs.
  assert sum(live.bytes for live in memory.live) == pytest.approx(memory.temporaries, rel=0.05)
  gradients = sum(live.bytes for live in memory.live if live.kind == 'gradients')
  assert gradients == pytest.approx(LAYERS * MATRICES * 4 / 4, rel=0.05)  # Split over data and mdl.


@pytest.mark.slow
def test_its_schedule_holds_what_runs_and_what_is_live(plans):
  found = plans('mixed')
  counts, peak = collections.Counter(), 0

  def walk(spans, times, live):
    nonlocal peak
    for span in spans:
      now = live + found.memory.over_time.get(span.name, 0)
      peak = max(peak, now)
      counts[span.name] += 0 if span.inside else times
      walk(span.inside, times * span.rounds, now)

  walk(found.cost.schedule, 1, 0)
  assert +counts == {what.name: what.count for what in (*found.cost.operations, *found.cost.collectives)}
  assert peak == sum(live.bytes for live in found.memory.live)
  assert max(span.end for span in found.cost.schedule) <= found.cost.seconds * (1 + 1e-9)
  arrays = found.memory.state.arrays
  slots = [a for a in arrays if a.layer == 'lm.transformer.layers.ff.up' and a.kind == 'optimizer slots']
  assert [a.name for a in slots] == ['w · mu', 'w · nu']
  assert sum(a.bytes for a in arrays) == found.memory.state.total


@pytest.mark.slow
def test_a_second_plan_takes_the_program_of_the_first(plans, cache, monkeypatch):
  first = plans('mixed')
  monkeypatch.setattr(jax.stages.Lowered, 'compile', lambda *args, **kwargs: pytest.fail('it compiles again'))
  again = plan(small_lm(MESHES['mixed']), None, 'cpu:8', cache=cache)
  assert again.is_cached and not first.is_cached
  assert (again.memory, again.cost, again.compile_seconds) == (first.memory, first.cost, first.compile_seconds)


@pytest.mark.parametrize(
  'chips, is_compiled, expected',
  [
    ('h100:1x8', True, (0.98, 1.35)),
    ('h100:8x8', True, (0.98, 1.57)),
    ('h100:8x8', False, (0.86, 2.62)),
    ('v5p:4x4x4', True, (0.98, 1.27)),
    ('cpu:8', True, None),
  ],
)
def test_a_plan_gives_the_range_of_its_time_by_the_errors_of_earlier_plans(chips, is_compiled, expected):
  assert time_factors(parse_topology(chips), is_compiled) == expected


def test_the_key_of_a_program_knows_no_addresses_and_the_chip(monkeypatch):
  rule = '%2 = stablehlo.custom_call @CustomSPMDPartitioning(%1) {api_version = 2 : i32, backend_config = "NUMBER", x}'

  def key(text, topology='h100:8', flags=NO_FLAGS):
    mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(id=0)]))
    lowered, step = types.SimpleNamespace(as_text=lambda debug_info=False: text), types.SimpleNamespace(mesh=mesh)
    return compilers._key(lowered, step, flags, parse_topology(topology), ())

  first = key(rule.replace('NUMBER', '140110625912144'))
  assert key(rule.replace('NUMBER', '140040091481552')) == first
  assert key(rule.replace('NUMBER', '140040091481552').replace('%1', '%0')) != first
  assert key(rule.replace('NUMBER', '140040091481552'), 'h200:8') != first
  assert key(rule.replace('NUMBER', '140040091481552'), flags=XlaFlags(given={'xla_gpu_autotune_level': 0})) != first
  monkeypatch.setattr(compilers, 'gpu_target_config', lambda target: 'with more memory')
  assert key(rule.replace('NUMBER', '140110625912144')) != first


@pytest.mark.slow
def test_the_report_says_it_in_a_terminal(plans):
  text = format_plan(plans('mixed'))
  for expected in (
    r'fits +\S+ MiB of 4 GiB on each device',
    r'MFU .* by 6N \+ 12LdS = \S+ a token, .* by 6N \+ 6LdS',
    r'bottleneck +\w+: \d+% of a step',
    r'all-reduce +mdl +lm.transformer.layers.attention +backward',
    r'saved activations +lm.transformer',
    'note: times on cpu are of an imagined machine',
  ):
    assert re.search(expected, text), (expected, text)


# ---------------------------------------------------------------- without a compiler


def test_without_its_compiler_a_plan_is_analytic_and_says_so(monkeypatch):
  monkeypatch.setattr(compilers, '_MODULES', dict.fromkeys(('tpu', 'gpu', 'cpu'), ()))
  found = plan(small_lm((1, 8, 1), remat='full'), None, 'h100:1x8')
  assert found.mode == 'analytic'
  assert "pip install 'praxis_lite[plan]'" in found.notes[0]
  assert 'analytic: formulas, no compiler (compiling for h100' in ' '.join(format_plan(found).split())
  assert any('temporaries, what is fused and what overlaps are estimates' in n for n in found.notes)
  recomputed = TOKENS * (2 * LAYERS * MATRICES + ATTENTION_FLOPS / 3)
  assert found.cost.flops * 8 == pytest.approx(found.work.flops + recomputed, rel=0.05)
  state = found.memory.state
  assert state.parameters == pytest.approx(4 * ALL / 8, rel=0.05)
  assert state.slots == pytest.approx(2 * state.parameters, rel=0.01)
  matrices, table, ids, vectors = (7 / 8 * 4 * n for n in (LAYERS * MATRICES, VOCAB * D, TOKENS, TOKENS / 8 * D))
  assert sent(found, 'all-gather', phase='forward') == pytest.approx(matrices + table + ids, rel=0.01)
  assert sent(found, 'all-gather') == pytest.approx(2 * matrices + table + ids, rel=0.01)
  assert sent(found, 'reduce-scatter') == pytest.approx(matrices + table, rel=0.01)
  assert sent(found, 'all-reduce') == pytest.approx(2 * 7 / 8 * 4 * (2 * LAYERS + 1) * D, rel=0.01)  # Of norms.
  assert sent(found, 'all-to-all') == 2 * vectors
  assert {c.axes for c in found.collectives if c.kind == 'all-to-all'} == {('data',)}
  # Weights are gathered, and gradients summed, beside the work of the layers.
  matrices = [c for c in found.collectives if c.layer.startswith('lm.transformer') and c.result_bytes > 1000]
  assert {c.kind for c in matrices} == {'all-gather', 'reduce-scatter'}
  assert all(c.exposed < c.seconds for c in matrices)


def test_without_a_compiler_activations_that_are_summed_are_known():
  found = plan(small_lm((1, 1, 8)), None, 'h100:1x8', compile=False)
  once = 2 * 7 / 8 * 4 * ROWS * LENGTH * D
  # Backward, those of q, k and v, and of gate and up, are added up before they are reduced, as on a GPU.
  for phase, times in {'forward': 2 * LAYERS, 'backward': 2 * LAYERS}.items():
    assert sent(found, 'all-reduce', layer='lm.transformer.layers', phase=phase) == pytest.approx(times * once)
  # The work that follows waits for them.
  assert all(c.exposed == c.seconds for c in found.collectives if c.kind == 'all-reduce' and c.axes == ('mdl',))


def test_each_buffer_that_a_loop_fills_takes_memory():
  def loss(x):
    return jnp.sum(jax.lax.scan(lambda x, _: (jnp.sin(x @ jnp.sin(x)), None), x, length=8)[0])

  mesh = abstract_mesh({'data': 2})
  x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P()))
  program = local_program(jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=('cpu',)))
  assert program.peak.bytes > 4 * 8 * 64 * 64 * 4  # Before each sine and after it; all of them begin as one constant.


def test_a_step_that_the_compiler_refuses_is_planned_by_formulas(monkeypatch):
  def refuses(*args, **kwargs):
    raise RuntimeError('RESOURCE_EXHAUSTED: Used 33G of 15.75G hbm.\nmore')

  monkeypatch.setattr(jax.stages.Lowered, 'compile', refuses)
  found = plan(small_lm(), None, 'cpu:8')
  assert found.mode == 'analytic'
  assert found.notes[0].startswith('cpu: the compiler refuses the step: RESOURCE_EXHAUSTED: Used 33G of 15.75G hbm;')
  assert not found.fits and found.memory.peak == 33 * 2**30  # The compiler knows better than formulas.
  assert re.search('does not fit +33 GiB of 4 GiB on each device, 29 GiB too much', format_plan(found))


class Program:
  """A TPU program, whose text is written down, or can be read back alone if fewer operations carry collectives on."""

  def __init__(self, writes):
    self.writes, self.is_readable = writes, False

  def compile(self, compiler_options):
    compiled = Program(self.writes)
    compiled.is_readable = compiler_options.get('xla_tpu_enable_async_collective_fusion') is False
    if self.writes and 'xla_dump_to' in compiler_options:
      folder = pathlib.Path(compiler_options['xla_dump_to'])
      (folder / 'module_1.small.after_optimizations.txt').write_text('a')
      (folder / 'module_2.jit_step.after_optimizations.txt').write_text('the step')
    return compiled

  def as_text(self):
    if not self.is_readable:
      raise RuntimeError('async-update instruction should have 1 operands but sees 2')
    return 'the step, without'


def test_the_plan_of_a_train_step_on_one_gpu_has_the_products_that_the_gpu_would_choose():
  def flags(topology, **given):
    step = types.SimpleNamespace(flags=XlaFlags({'xla_gpu_other': 1}, given))
    return compilers.flags_of_plan(step, parse_topology(topology)).all

  cublas = {'xla_gpu_enable_triton_gemm': False}
  assert flags('h200:1') == cublas | {'xla_gpu_other': 1}
  assert flags('h200:1', xla_gpu_enable_triton_gemm=True) == {'xla_gpu_enable_triton_gemm': True, 'xla_gpu_other': 1}
  assert flags('h200:2') == flags('cpu:1') == flags('v5e:1x1') == {'xla_gpu_other': 1}


def test_without_a_gpu_sorts_and_products_are_compiled_without_what_would_ask_one():
  asked = []

  class Flags:
    def __init__(self, *refusals):
      self.refusals = refusals

    def compile(self, lowered, **more):
      asked.append(more)
      if refusal := self.refusals[len(asked) - 1 :][:1]:
        raise RuntimeError(f'INTERNAL: {refusal[0]}')
      return 'compiled'

  no_sort, no_tiles = 'no CUB scratch size for this device', "Couldn't find output tile sizes that satisfy hlo: %dot.2"
  compiled, added = compilers._compile_for_gpu(None, Flags(no_tiles, no_sort))
  without_triton = {'xla_gpu_enable_triton_gemm': False}
  assert (compiled, added) == ('compiled', {**without_triton, 'xla_gpu_enable_cub_radix_sort': False})
  assert asked == [{}, without_triton, added]
  (note,) = planning._notes_of_flags(tuple(added))
  assert 'cuBLAS computes all' in note and planning._notes_of_flags(()) == []
  for refusals in (['out of registers'], [no_tiles, no_tiles]):  # One that the flags do not mend is not tried for ever.
    asked.clear()
    with pytest.raises(RuntimeError, match=refusals[-1][:9]):
      compilers._compile_for_gpu(None, Flags(*refusals))
    assert len(asked) == len(refusals)


@pytest.mark.slow
def test_a_product_whose_rows_fit_no_block_is_compiled_without_a_gpu():
  topology = parse_topology('h100:1')
  if missing := compilers.missing_compiler(topology):
    pytest.skip(missing)
  at = NamedSharding(jax.sharding.Mesh(np.array(compilers.devices_of(topology)), ('data',)), P())
  x, w, y = (
    jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=at) for s in ((64, 16, 64, 197), (1024, 1024), (64 * 197, 1024))
  )
  lowered = jax.jit(lambda x, w, y: jnp.transpose(x, (0, 3, 1, 2)).reshape(-1, 1024) @ w + y).lower(x, w, y)
  assert '__cublas' in compilers._compile_for_gpu(lowered, NO_FLAGS)[0].as_text()


def test_the_text_of_a_tpu_program_that_cannot_be_read_back_is_what_its_compiler_writes_down():
  v5p = parse_topology('v5p:2x2x1')
  assert compilers._compile(Program(writes=True), NO_FLAGS, v5p)[1] == 'the step'
  compiled, text, _ = compilers._compile(Program(writes=False), NO_FLAGS, v5p)
  assert (compiled.is_readable, text) == (False, 'the step, without')  # Its memory is that of the real one.


def test_a_program_without_text_is_one_that_the_compiler_refuses():
  program = types.SimpleNamespace(as_text=lambda debug_info=False: None)
  with pytest.raises(NotImplementedError, match='has no text'):  # As `compile_step` expects of a compiler.
    compilers._compile(types.SimpleNamespace(compile=lambda **_: program), NO_FLAGS, parse_topology('h100:8'))


def test_what_does_not_fit_says_by_how_much():
  wide = small_lm((1, 1, 1))
  wide.task.model.set(model_dims=1 << 15, hidden_dims=1 << 17)
  found = plan(wide, None, 'rtx4090:1', compile=False)
  assert not found.fits
  assert re.search(r'does not fit +\S+ \w+ of 23.47 GiB on each device, \S+ \w+ too much', format_plan(found))


def test_mistakes_are_told_before_anything_is_traced():
  with pytest.raises(ShardingError, match='8 devices, and the topology h100:2x8 has 16'):
    plan(small_lm(), None, 'h100:2x8')
  with pytest.raises(ConfigError, match=r'there are 8 CPU devices; call praxis_lite.simulate_cpu_devices\(16\)'):
    plan(small_lm((4, 2, 2)), None, 'cpu:16')
  config = small_lm()
  with pytest.raises(ConfigError, match='the shapes of a batch'):
    plan(config.task, None, 'h100:1x8')


@pytest.mark.slow
def test_the_command(capsys, tmp_path):
  named = ['plan', '--exp=lm.SyntheticLmTiny', '--set', 'task.ici_mesh_shape=(2,2,2)']
  assert main([*named, '--topology=cpu:8', '--nocompile', f'--html={tmp_path}/new/plan.html']) == 0
  out = capsys.readouterr().out
  assert 'analytic: formulas, no compiler' in out and f'wrote {tmp_path}/new/plan.html' in out
  assert 'lm.SyntheticLmTiny' in (tmp_path / 'new' / 'plan.html').read_text()
  assert main(['plan', '--exp=lm.SyntheticLmTiny']) == 2
  assert '--topology is missing' in capsys.readouterr().err
  assert main([*named, '--topology=cpu:8', '--html=']) == 2
  assert '--html is empty: name a file' in capsys.readouterr().err
  assert main([*named, '--topology=cpu:8', f'--html={tmp_path}']) == 2
  assert f'is a directory: name a file, as in --html={tmp_path}/plan.html' in capsys.readouterr().err
  assert main([*named, '--topology=h101:8']) == 2
  assert "Did you mean 'h100'" in capsys.readouterr().err
  assert main([*named, '--topology=h100:16']) == 2
  assert 'task.ici_mesh_shape=(4, 2, 2)' in capsys.readouterr().err


@pytest.mark.slow
def test_a_plan_of_a_pipeline_prints_its_bubble():
  planned = plan(registry.get('pipelines.SyntheticLmCircular'), None, 'cpu:8', compile=False)
  (line,) = planned.pipelines
  assert 'pipeline' in (text := ' '.join(format_plan(planned).split())) and line in text
  assert line.endswith('4 stages x 2 rounds x 1 layer, 4 microbatches of 2 rows in 11 ticks, bubble 27.3%')
