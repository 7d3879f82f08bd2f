"""Plans of decoding: caches, products and loops against counts by hand, and what cannot be planned."""

import jax
import jax.numpy as jnp
import pytest
from browser import IS_NARROW, needs_chromium, use_page
from small_lm import DIMS, HEADS, LAYERS, MULTIPLIED, D, small_lm

from praxis_lite.cli.main import main
from praxis_lite.common.errors import ConfigError
from praxis_lite.instruments.plan import inference
from praxis_lite.instruments.plan.inference import Requests, format_inference, plan_inference
from praxis_lite.instruments.plan.page import page_data, render_plan_page
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.partitioned_task import PartitionedTask

ROWS, PROMPT, NEW = 8, 24, 9
SLOTS = PROMPT + NEW - 1
REQUESTS = Requests(ROWS, PROMPT, NEW)


def planned(task=None, topology='cpu:8', requests=REQUESTS, **how):
  return plan_inference(task or small_lm().task, topology, requests, **how)


def work(plan, phase):
  """Returns the FLOPs of all devices in the prompts, or in each of the later tokens."""
  times = plan.requests.max_tokens - 1 if phase == 'tokens' else 1
  flops = sum(op.count * op.flops for op in plan.cost.operations if op.phase == phase)
  return flops * plan.topology.num_devices / times


@pytest.fixture(scope='module', params=[True, False], ids=['compiled', 'formulas'])
def plan(request):
  return planned(compile=request.param)


@pytest.fixture(scope='module')
def formulas_of_half():
  return planned(small_lm(dtype=jnp.bfloat16).task, compile=False)


@pytest.mark.slow
def test_the_bytes_of_caches_are_those_of_the_real_ones(plan):
  model = small_lm().task.model.instantiate()
  variables = model.init(jax.random.key(0))['lm']
  caches = model.lm.apply(variables, ROWS, SLOTS, method='init_decode_state')[1].decode_state
  assert plan.cache_bytes == sum(x.nbytes for x in jax.tree.leaves(caches))
  assert plan.cache_bytes >= LAYERS * ROWS * SLOTS * 2 * HEADS * DIMS * 4


@pytest.mark.slow_cases
def test_each_token_multiplies_all_weights_and_attends_to_the_whole_cache(plan):
  attention = 4 * LAYERS * HEADS * DIMS * SLOTS
  assert plan.is_time_known
  assert work(plan, 'tokens') == pytest.approx(ROWS * (2 * MULTIPLIED + attention), rel=0.02)


@pytest.mark.slow_cases
def test_prompts_are_read_at_once(plan):
  vocabulary = 128 * 64  # Only the last token of a prompt needs logits.
  attention = 4 * LAYERS * HEADS * DIMS * SLOTS
  by_hand = ROWS * (PROMPT * (2 * (MULTIPLIED - vocabulary) + attention) + 2 * vocabulary)
  assert work(plan, 'prompts') == pytest.approx(by_hand, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize('compile', [True, False])
def test_loops_over_the_pages_of_a_cache_run_as_often_as_there_are_pages(compile):
  config = small_lm(mesh=(1, 8, 1))
  config.task.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.cache_page_size = 8
  found = planned(config.task, requests=Requests(2 * ROWS, PROMPT, NEW), compile=compile)
  pages = -(-SLOTS // 8)
  attention = 4 * LAYERS * HEADS * DIMS * 8 * pages
  assert found.is_time_known
  assert work(found, 'tokens') == pytest.approx(2 * ROWS * (2 * MULTIPLIED + attention), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize('plan', [True], ids=['compiled'], indirect=True)
def test_memory_of_simulated_devices_is_that_of_the_program(plan):
  task = small_lm().task
  task.model.decoder_tpl.max_decode_steps = NEW
  shape = jax.ShapeDtypeStruct
  inputs = {'ids': shape((ROWS, PROMPT), 'int32'), 'prompt_lengths': shape((ROWS,), 'int32')}
  step = PartitionedTask(task.instantiate(), inputs).decode_step
  found, real = plan.memory, step.lower().compile().memory_analysis()
  assert (found.arguments, found.temporaries) == (real.argument_size_in_bytes, real.temp_size_in_bytes)


@pytest.mark.slow
def test_the_least_time_of_a_token_reads_weights_and_caches_once(plan, formulas_of_half):
  target = plan.topology.target
  moved = plan.memory.state.parameters + plan.cache_bytes / 8  # It computes in float32, as weights are stored.
  assert plan.least_token_seconds == pytest.approx(moved / target.device_bandwidth)
  assert plan.token_seconds > plan.least_token_seconds
  norms = (2 * LAYERS + 1) * D  # In float32.
  assert formulas_of_half.read_bytes == pytest.approx(formulas_of_half.memory.state.parameters / 2, abs=2 * norms)
  total = plan.first_token_seconds + (NEW - 1) * plan.token_seconds
  assert total == pytest.approx(plan.cost.seconds)
  assert plan.tokens_per_second == pytest.approx(ROWS * NEW / total)


@pytest.mark.slow
def test_the_largest_batch_fits_and_a_larger_one_does_not():
  config = configure(registry.get('lm_sizes.Llama8B'))
  config.task.ici_mesh_shape = (1, 1, 8)
  how = {'topology': 'h100:1x8', 'compile': False}
  rows = planned(config.task, requests=Requests(8, 1024, 128), **how).largest_rows
  assert rows > 500
  assert planned(config.task, requests=Requests(rows, 1024, 128), **how).fits
  assert not planned(config.task, requests=Requests(rows * 11 // 10, 1024, 128), **how).fits


@pytest.mark.slow
def test_one_token_is_only_the_prompt_and_each_number_of_rows_is_traced_once(monkeypatch):
  traced, make_estimate = [], inference._InferencePlanner._make_estimate

  def counted(planner, rows, needs):
    traced.append(rows)
    return make_estimate(planner, rows, needs)

  monkeypatch.setattr(inference._InferencePlanner, '_make_estimate', counted)
  found = planned(requests=Requests(1, 16, 1), compile=False)
  assert len(traced) == len(set(traced)) > 2  # Those of the plan, and of the search for the largest batch.
  assert found.token_seconds is None and 'next tokens' not in format_inference(found)


@pytest.mark.slow
def test_one_token_on_chips_has_a_loop_of_later_tokens_that_never_runs():
  config = configure(registry.get('lm_sizes.Llama8B'))  # Its layers are a loop, in which weights are gathered.
  config.task.ici_mesh_shape = (1, 8, 1)
  found = planned(config.task, 'h100:8', Requests(8, 16, 1), compile=False)
  assert found.token_seconds is None and found.first_token_seconds == pytest.approx(found.cost.seconds)


def test_models_without_caches_and_long_requests_are_refused():
  with pytest.raises(ConfigError, match='this model is not one'):
    planned(configure(registry.get('digits.DigitsMlp')).task)
  config = small_lm()
  config.task.model.decoder_tpl.max_context = 64
  with pytest.raises(ConfigError, match='sees 64 tokens at once, and prompts of 60 tokens with 9 after them need 68'):
    planned(config.task, requests=Requests(8, 60, 9))


@pytest.mark.slow
def test_a_command_plans_requests(capsys):
  command = ['plan', 'lm.SyntheticLmTiny', '--topology=cpu:8', '--inference', '--nocompile']
  assert main([*command, '--rows=16', '--prompt_length=16', '--max_tokens=8', '--price_per_chip_hour=2']) == 0
  text = capsys.readouterr().out
  for part in ('16 rows, prompts of 16 tokens, 8 tokens after each', 'first token', 'next tokens', 'in money for a'):
    assert part in text
  assert main(['plan', 'lm.SyntheticLmTiny', '--topology=cpu:8', '--rows=16']) == 2
  assert '--rows needs --inference' in capsys.readouterr().err
  assert main([*command, '--search']) == 2
  assert '--search is about train steps; leave it out, or --inference' in capsys.readouterr().err


@pytest.mark.slow_cases
def test_a_page_has_the_times_of_prompts_and_of_tokens(plan):
  data = page_data(plan, 'x')
  (first, first_seconds, *_), (later, later_seconds, *_) = data['headline']['times']
  assert (first, later, data['headline']['work']) == ('first token', 'each later token', 'program')
  assert (first_seconds, later_seconds) == (plan.first_token_seconds, plan.token_seconds)
  assert {row[2] for row in data['operations']} <= {'prompts', 'tokens', 'other'}
  assert sum(row[4] * row[7] for row in data['operations'] if row[2] == 'tokens') <= (NEW - 1) * plan.token_seconds


@pytest.mark.slow
def test_a_page_of_one_token_and_of_a_plan_for_chips():
  one = page_data(planned(requests=Requests(8, 16, 1), compile=False), 'x')['headline']
  assert [time[0] for time in one['times']] == ['first token'] and one['times'][0][2] is None
  (first, _) = page_data(planned(topology='h100:8', compile=False), 'x')['headline']['times']
  assert first[2][0] < first[1] < first[2][1]


_SESSION = """
  say([...document.querySelectorAll('#totals dt')].map((item) => item.textContent).join());
  say($('chips').textContent, [...document.querySelectorAll('#phases button')].map((item) => item.textContent).join());
  say(document.querySelector('.work').textContent, $('layers-count').textContent.includes('of the program'));
  document.querySelector('#phases button').click(); $('theme').click();
"""


@needs_chromium
@pytest.mark.parametrize('width', [1400, 400])
def test_in_a_browser_the_page_of_decoding_names_requests_and_phases(plan, width, tmp_path):
  said = use_page(render_plan_page(plan, 'x'), _SESSION + (IS_NARROW if width == 400 else ''), tmp_path, width=width)
  assert said[:2] == [
    'fits,first token,each later token,caches,largest batch',
    '8 prompts of 24 tokens, 9 tokens after each, on cpu:8: 8 simulated devices',
  ]
  assert said[2].startswith('prompts,tokens') and said[3] == 'program' and {*said[4:]} == {'true'}


@pytest.mark.slow
def test_a_command_writes_the_page(tmp_path, capsys):
  page = tmp_path / 'decoding.html'
  command = ['plan', 'lm.SyntheticLmTiny', '--topology=cpu:8', '--inference', '--nocompile', '--prompt_length=16']
  assert main([*command, '--max_tokens=8', f'--html={page}']) == 0
  assert f'wrote {page}' in capsys.readouterr().out and 'each later token' in page.read_text()
