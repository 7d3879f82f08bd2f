"""A mesh with an axis of 3 is verified as it is: what is wrong there is right beside an axis of 2."""

from __future__ import annotations

import json

import pytest
from warm_python import finished

# In a process of its own, of 12 devices. An axis of 3 splits the result of a product; the others its operands.
_PROGRAM = """
import json, sys
from praxis_lite.common.devices import simulate_cpu_devices
simulate_cpu_devices(12)
import jax, numpy as np
from praxis_lite import Config, Layer, SingleTask, template
from praxis_lite.layers import FeedForward
from praxis_lite.models import ClassificationModel
from praxis_lite.training import partitioned_step
from praxis_lite.instruments.verification import format_verification, verify

class Net(Layer):
  ff_tpl: Config = template(FeedForward)
  output_dims: int = 8
  def setup(self):
    self.create_child('ff', self.ff_tpl)
  def __call__(self, x, weights=None):
    return self.ff(x).mean(1)

ff = Config(FeedForward, input_dims=8, hidden_dims=8)
ff.weight_split_dims_mapping.set(wt=('c', 'b'), down=('b', 'a'))
ff.activation_split_dims_mapping.set(hidden=('b', None, 'a'), out=(None, 'a', 'c'))
model = Config(ClassificationModel, num_classes=3, network_tpl=Config(Net, ff_tpl=ff))
task = Config(SingleTask, model=model, mesh_axis_names=('a', 'b', 'c'), ici_mesh_shape=(2, 2, 3))
task.train.inputs_split_mapping = {f'map_{k}d': (('b', 'a'), *(None,) * (k - 1)) for k in (1, 2, 3)}
shapes = {'image': jax.ShapeDtypeStruct((24, 4, 8), np.float32), 'label': jax.ShapeDtypeStruct((24,), np.int32)}
if sys.argv[1] == 'unguarded':
  partitioned_step.guard = lambda lowered: []
found = verify(task, shapes, quick=True, search_seconds=0, **json.loads(sys.argv[2]))
print(json.dumps([found.is_right, found.mesh_sizes, found.variables(), format_verification(found)]))
"""


def verified(guards, **options):
  done = finished(_PROGRAM, guards, json.dumps(options))
  assert done.returncode == 0, done.stderr
  return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_feed_forward_beside_an_axis_of_3_is_wrong_without_guards():
  is_right, mesh, variables, text = verified('unguarded')
  assert not is_right and mesh == {'a': 2, 'b': 2, 'c': 3}
  assert 'network.ff.down.w' in variables
  assert 'mesh a 2 x b 2 x c 3 = 12 devices; sizes' in text and 'wrong: loss' in text


@pytest.mark.slow
def test_what_was_shrunk_is_said():
  *_, mesh, _, text = verified('unguarded', most_devices=8)
  assert mesh == {'a': 2, 'b': 2, 'c': 2}
  assert 'mesh a 2 x b 2 x c 3 = 12 devices, replaced by a 2 x b 2 x c 2 = 8 devices' in text


@pytest.mark.slow
def test_a_feed_forward_beside_an_axis_of_3_is_right_with_guards():
  is_right, mesh, _, text = verified('guarded')
  assert is_right, text
  assert mesh == {'a': 2, 'b': 2, 'c': 3} and 'works around: dot_general in ' in text
