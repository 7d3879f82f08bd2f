"""A model whose sequences are split trains as on one device: repeated layers, remat, packed rows; nothing divides."""

import jax
import numpy as np
import pytest
from drawn_state import drawn_state

from praxis_lite.instruments.explain import explain_task
from praxis_lite.instruments.testing import collectives
from praxis_lite.instruments.verification import verify
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure
from praxis_lite.training.partitioned_task import PartitionedTask


def trained(name, mesh_shape):
  """Losses of two steps, the parameters after them, and the compiled step."""
  config = configure(registry.get(f'long_context.{name}'))
  config.task.ici_mesh_shape = mesh_shape
  batches = iter(config.datasets[0].instantiate())
  batches = [next(batches), next(batches)]
  model = PartitionedTask(config.task.instantiate(), batches[0])
  state, losses = drawn_state(model), []
  for batch in batches:
    out = model.train_step(state, jax.random.key(1), batch)
    state = out.state
    losses.append(float(out.weighted_loss))
  return losses, model.unpad(state).mdl_vars, model.train_step.compiled


@pytest.mark.slow
def test_trains_like_one_device():
  losses, weights, _ = trained('RingLmTiny', (1, 1, 1, 1))
  split_losses, split_weights, compiled = trained('RingLmTiny', (1, 2, 2, 2))
  np.testing.assert_allclose(split_losses, losses, rtol=1e-5)
  jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, atol=1e-5), split_weights, weights)
  assert collectives(compiled)['collective-permute'].count


@pytest.mark.slow
def test_verify_finds_the_kernels_for_tpus_right():
  """They are interpreted here, and compared on several devices with themselves on one."""
  config = configure(registry.get('long_context.AllToAllLmTiny'))
  config.task.model.lm_tpl.transformer_tpl.layers_tpl.attention_tpl.implementation = 'splash'
  found = verify(config, quick=True)
  assert found.compared and found.is_right, found.differences


def test_explain_knows_the_sequence_split_and_how_attention_is_computed():
  report = explain_task(registry.get('long_context.RingLmTiny'))
  for name in ('blnh', 'blkh'):
    found = report.find(f'lm.transformer.layers.attention.{name}')
    assert found.dims[1].axes == ('context',) and found.dims[1].local == 23
    assert found.dims[1].source == 'lm.transformer.layers.attention.context_axis'
  assert report.find('lm.out').dims[1].axes == ('context',)
  remarks = [remark for e in report.activations for remark in e.remarks]
  assert 'attention is blockwise: the sequence is split over a mesh axis' in remarks
  rows = report.find('inputs.ids')
  assert rows.dims[0].axes == ('replica', 'data') and 'over 4 parts, as 4 rows' in rows.remarks[0]
