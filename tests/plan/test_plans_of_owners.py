"""What matrices on their owners cost: the sentence of a plan, the compiled program, and the formula on paper agree."""

import pytest
from small_lm import HIDDEN, LAYERS, D, small_lm

from praxis_lite.common.config import Config
from praxis_lite.instruments.explain.report import task_and_inputs
from praxis_lite.instruments.plan import plan
from praxis_lite.tasks.learners import adamw_learner
from praxis_lite.training.execution import splits_of
from praxis_lite.training.learning import Learner, LearnerRule, MultiLearner, muon, soap
from praxis_lite.training.state import state_layout

MATRICES = r'lm\.transformer\.layers\.(attention|ff)\..*\.w'
STEPS = 5


def lm_with_muon(mesh, **fields):
  return lm_with(Config(muon, ns_steps=STEPS, **fields), mesh)


def lm_with(optimizer, mesh):
  config = small_lm(mesh)
  others = adamw_learner(0.003).set(clip_gradient_norm_to_value=0.0)
  config.task.train.learner = Config(
    MultiLearner,
    rules=(
      Config(
        LearnerRule,
        name='matrices',
        regex=MATRICES,
        learner=Config(Learner, optimizer=optimizer),
      ),
      Config(LearnerRule, name='others', learner=others),
    ),
  )
  return config


@pytest.mark.slow
def test_a_step_computes_and_sends_what_the_formula_says():
  """Eight devices own one of the 4 x 2 square matrices each, and six of them one of the 3 x 2 others."""
  found = plan(lm_with_muon((2, 2, 2)), None, 'cpu:8')
  square, wide = STEPS * (4 * D * D * D + 2 * D**3), STEPS * (4 * D * D * HIDDEN + 2 * D**3)
  of_update = [op for op in found.cost.operations if op.phase == 'update']
  assert sum(op.flops * op.count for op in of_update) == square + wide
  sent = [c for c in found.cost.collectives if c.phase == 'update' and not c.layer and c.result_bytes > 1000]
  expected = []
  for entries in (D * D, D * HIDDEN):  # Of each group: there and back over both axes, and all results over replicas.
    expected += [('all-to-all', (axis,), 4 * entries) for axis in ('data', 'mdl') for _ in range(2)]
    expected.append(('all-gather', ('replica',), 4 * 2 * entries))
  assert sorted((c.kind, c.axes, c.count * c.result_bytes) for c in sent) == sorted(expected)
  of_muon = [note for note in found.notes if note.startswith('muon: ')]
  assert of_muon == [
    f'muon: 8 matrices of {D} x {D}, dealt out over 8 devices (the mesh splits them); each computes 1, {square:.2e} '
    'FLOPs, and receives 64 KiB of all-to-alls and 32 KiB of an all-gather',
    f'muon: {3 * LAYERS} matrices of {D} x {HIDDEN}, dealt out over 8 devices (the mesh splits them); each computes 1, '
    f'{wide:.2e} FLOPs, and receives 128 KiB of all-to-alls and 64 KiB of an all-gather',
  ]


@pytest.mark.slow
def test_square_arrays_are_sent_as_the_formula_says():
  """Matrices come and go as with Muon, in three arrays there and two back; statistics and bases, over all owners."""
  found = plan(lm_with(Config(soap, largest_side=D), (2, 2, 2)), None, 'cpu:8')
  assert HIDDEN > D
  sent = [c for c in found.cost.collectives if c.phase == 'update' and not c.layer and c.kind == 'all-to-all']
  # Of each group, a device owns one matrix; the square ones have square arrays of both sides.
  matrices, squares = 5 * 2 * (D * D + D * HIDDEN), 4 * (2 * D * D + D * D)
  assert sum(c.count * c.result_bytes for c in sent) == 4 * (matrices + squares)
  notes = [note for note in found.notes if note.startswith('soap: ')]
  received = [(5 * 2 + 4 * 2) * D * D * 4, (5 * 2 * D * HIDDEN + 4 * D * D) * 4]
  assert [f'receives {size // 1024} KiB of all-to-alls' in note for size, note in zip(received, notes)] == [True, True]


def notes_of(mesh, **fields):
  task = task_and_inputs(lm_with_muon(mesh, **fields))[0]
  layout = state_layout(task, task.create_mesh())
  return task.bind_learner().describe_exchanges(splits_of(layout))


def test_the_reason_is_shown_if_matrices_are_whole():
  small = notes_of((8, 1, 1))
  assert 'not dealt out (the mesh does not split them, and sides below 512 take longer to send than' in small[0]
  assert small[0].endswith(f'each computes 8, {8 * STEPS * 6 * D**3:.2e} FLOPs')
  assert "dealt out over 8 devices (placement='owner'); each computes 1" in notes_of((8, 1, 1), placement='owner')[0]
  assert notes_of((2, 2, 2), placement='split') == []
