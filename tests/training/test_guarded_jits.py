"""What the package jits on a mesh is guarded: `jax.jit` itself is used only where it is named below."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from test_partitioned_task import batch, struct, task

import praxis_lite
from praxis_lite.common.config import Config
from praxis_lite.sharding.constraints import with_sharding_constraint
from praxis_lite.training.partitioned_task import PartitionedTask
from praxis_lite.training.state import state_initializer

PACKAGE = pathlib.Path(praxis_lite.__file__).parent
# Of each file that uses `jax.jit` itself: how often, and why.
UNGUARDED = {
  'bridges/hf/agreement.py': (1, 'one device: an export that is read again'),
  'bridges/hf/reader.py': (1, 'one device: what is read is placed on each by itself'),
  'common/jax_internals/lowering.py': (1, 'a part of a program that is lowered by itself, to be read'),
  'layers/weight_formats.py': (1, 'a weight by itself, in parts that were read from a file'),
  'layers/gptq.py': (1, 'a weight by itself, in parts that were read from a file'),
  'layers/input_scales.py': (2, 'a weight by itself, that was read from a file'),
  'models/quantization.py': (1, 'a weight by itself; each entry follows from one entry of each array'),
  'layers/splash.py': (1, 'within the step, whose program is guarded'),
  'layers/tokamax_attention.py': (1, 'within the step, whose program is guarded'),
  'layers/grouped_matmul.py': (
    3,
    'within the step, whose program is guarded; one is lowered only to see if it can be',
  ),
  'training/learning/moments.py': (2, 'within the step, whose program is guarded'),
  'sharding/weights.py': (1, 'one device'),
  'sharding/constraints.py': (1, 'a reshard, which is right for all splits'),
  'sharding/guards/guard.py': (2, 'GuardedJit, and what is exported, whose program is guarded'),
  'instruments/plan/calibration.py': (1, 'measures links of devices with arrays whose values are not used'),
  'runs/agreement.py': (1, 'changes each entry of arrays by itself'),
  'runs/layer_values.py': (1, 'one device: a model that is not on a mesh'),
  'runs/determinism.py': (1, 'one device: each compares its part with another one'),
  'runs/host_speeds.py': (1, 'a product on one device at a time'),
  'runs/replicas.py': (1, 'each device adds up its own parts, inside shard_map'),
  'runs/records/run_config.py': (1, 'keys, which are not split'),
  'runs/row_programs.py': (4, 'keys, which are not split; zeros; and a program that shows its splits and never runs'),
  'runs/exported.py': (1, 'one device; the exported program is guarded'),
  'training/partitioned_step.py': (1, 'guards what it lowers'),
  'instruments/verification/steps.py': (2, 'one device'),
  'instruments/coordinates.py': (1, 'one device'),
  'training/learning/update_sizes.py': (1, 'one device: a small matrix of its own'),
}


def uses(source: str) -> int:
  names = {'jit', 'pjit', 'pmap'}
  return sum(
    isinstance(node, ast.Attribute)
    and node.attr in names
    and isinstance(node.value, ast.Name)
    and node.value.id == 'jax'
    for node in ast.walk(ast.parse(source))
  )


def test_every_jit_on_a_mesh_is_guarded():
  found = {str(path.relative_to(PACKAGE)): uses(path.read_text()) for path in PACKAGE.rglob('*.py')}
  found = {name: count for name, count in found.items() if count and not name.startswith(('tasks/', 'experiments/'))}
  known = {name: count for name, (count, _) in UNGUARDED.items() if count}
  assert found == known, 'use praxis_lite.sharding.GuardedJit, or say here why it needs no guards'


def test_the_first_state_is_guarded():
  """Here the first value of a slot is a transform along a split dimension."""

  def init(params):
    def gradient(p):
      p = with_sharding_constraint(p, P(*(None,) * (p.ndim - 1), 'mdl'))
      return jax.grad(lambda p: jnp.sum(jnp.real(jnp.fft.rfft(p + 1.0)) ** 2))(p)

    return jax.tree.map(gradient, params)

  def optimizer(learning_rate):
    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))

  partitioned = PartitionedTask(task((1, 2, 4), Config(optimizer)).instantiate(), struct(batch()))
  program = state_initializer(partitioned.jax_task, partitioned.layout).lower(jax.random.key(0))
  assert 'LayoutConstraint' in program.as_text()  # Which the guard of transforms has put there.
  for leaf in jax.tree.leaves(partitioned.init_state(jax.random.key(0))):
    assert np.isfinite(np.asarray(jax.device_get(leaf), np.float32)).all()
