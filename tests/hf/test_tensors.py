"""The table's notation: what is read is the transposed and split tensor, whichever part of it is asked for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from praxis_lite.bridges.hf.families import FAMILIES
from praxis_lite.bridges.hf.files import Declared, read_folder, write_folder
from praxis_lite.bridges.hf.tensors import Extent, View, parse_axes, pieces
from praxis_lite.common.config import Config
from praxis_lite.layers import RepeatedTransformer, StackedTransformer, TransformerBlock, TransformerLm

AXES = {
  'D N H -> (N H) D': lambda x: x.transpose(1, 2, 0).reshape(12, 5),
  'D N H -> D (1+.+1 N H)': lambda x: np.concatenate([0 * x, x, 0 * x], axis=1).reshape(5, 36),
  'D N H -> (2+N+1 H) D': lambda x: np.pad(x.transpose(1, 2, 0), ((2, 1), (0, 0), (0, 0))).reshape(24, 5),
  'D N H -> (N 3+H) 1+D': lambda x: np.pad(x.transpose(1, 2, 0), ((0, 0), (3, 0), (1, 0))).reshape(21, 6),
  'D N H -> 7|(N H)|9 D': lambda x: np.pad(x.transpose(1, 2, 0).reshape(12, 5), ((7, 9), (0, 0))),
  'D N H -> D . 2|(N 1+H)': lambda x: np.pad(
    np.pad(x, ((0, 0), (0, 0), (1, 0))).reshape(5, 1, 15), ((0, 0), (0, 0), (2, 0))
  ),
  '(G R=5) N H -> (G 1+R+2 N 3+H) .': lambda x: np.pad(x.reshape(1, 5, 3, 4), ((0, 0), (1, 2), (0, 0), (3, 0))).reshape(
    -1, 1
  ),
  'D N (G R=2) -> (G 2+R N) D': lambda x: np.pad(
    x.reshape(5, 3, 2, 2).transpose(2, 3, 1, 0), ((0, 0), (2, 0), (0, 0), (0, 0))
  ).reshape(24, 5),
  'N H D -> D (N H)': lambda x: x.transpose(2, 0, 1).reshape(4, 15),
  'I O L -> O I L': lambda x: x.swapaxes(0, 1),
}
SHAPE = (5, 3, 4)


@pytest.mark.parametrize('axes', AXES)
@settings(deadline=None, max_examples=40)
@given(bounds=st.tuples(*[st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted) for n in SHAPE]))
def test_a_part_of_a_variable_is_read_from_its_tensor(axes, bounds, tmp_path_factory):
  x = np.arange(1, 61, dtype=np.float32).reshape(SHAPE)
  theirs = np.ascontiguousarray(AXES[axes](x))
  folder = tmp_path_factory.mktemp('one')
  write_folder(folder, {'x': Declared(theirs.dtype, theirs.shape)}, lambda _: theirs, 10**9)
  view = View.parse(SHAPE, axes)
  assert view.their_shape == theirs.shape
  index = tuple(slice(low, high) for low, high in bounds)
  np.testing.assert_array_equal(view.read(read_folder(folder)['x'], index), x[index])
  written = np.zeros_like(theirs)
  view.write(written, tuple(slice(0, size) for size in SHAPE), x)
  np.testing.assert_array_equal(written, theirs)


def test_notation():
  assert parse_axes('D N H -> 12+D (1+.+1 N H)') == ((Extent(0, 12),), (Extent(None, 1, 1), Extent(1), Extent(2)))
  assert View((4, 6), parse_axes('I O -> O I')).outermost == 1


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16', 'float16', 'float64'])
def test_files_are_those_of_the_package_safetensors(dtype, tmp_path):
  library = pytest.importorskip('safetensors.numpy')
  import ml_dtypes

  kind = np.dtype(ml_dtypes.bfloat16 if dtype == 'bfloat16' else dtype)
  tensors = {name: np.arange(n, dtype=np.float32).astype(kind).reshape(-1, 3) for name, n in (('b', 6), ('a', 9))}
  if dtype != 'bfloat16':  # NumPy has none, and neither has the package without PyTorch.
    library.save_file(tensors, tmp_path / 'model.safetensors', metadata={'format': 'pt'})
    for name, tensor in read_folder(tmp_path).items():
      np.testing.assert_array_equal(tensor.read((slice(1, 2), slice(0, 2))), tensors[name][1:2, :2])
  (tmp_path / 'ours').mkdir()
  declared = {name: Declared(kind, x.shape) for name, x in tensors.items()}
  files = write_folder(tmp_path / 'ours', declared, tensors.__getitem__, max_file_bytes=1)
  assert files == [
    'model-00001-of-00002.safetensors',
    'model-00002-of-00002.safetensors',
    'model.safetensors.index.json',
  ]
  for name, tensor in read_folder(tmp_path / 'ours').items():
    np.testing.assert_array_equal(tensor.read((slice(None), slice(None))), tensors[name])
    if dtype != 'bfloat16':
      np.testing.assert_array_equal(library.load_file(tensor.file)[name], tensors[name])


@pytest.mark.parametrize(
  ('cls', 'pattern'), [(StackedTransformer, 1), (RepeatedTransformer, 1), (RepeatedTransformer, 2)]
)
@pytest.mark.parametrize('num_layers', [1, 5])
def test_layers_have_the_numbers_of_their_turns(cls, pattern, num_layers):
  """Of each layer's own variables the tensors are named by its turn, however the layers are stacked."""
  layers = (Config(TransformerBlock),) * pattern if pattern > 1 else Config(TransformerBlock)
  config = Config(TransformerLm, vocab_size=7, model_dims=4, num_layers=num_layers, num_heads=2)
  lm = config.set(transformer_tpl=Config(cls, layers_tpl=layers)).instantiate()
  found = {}
  for path, of_variable in pieces(FAMILIES['llama'].table(tied=True), lm.abstract_init()).items():
    for piece in of_variable:
      if 'q_proj' in piece.name:
        found[piece.name] = path[1], piece.at
  assert sorted(found) == [f'model.layers.{i}.self_attn.q_proj.weight' for i in range(num_layers)]
  if pattern == 2 and num_layers == 5:
    assert [found[name] for name in sorted(found)] == [
      *[('layers_0', (0,)), ('layers_1', (0,)), ('layers_0', (1,)), ('layers_1', (1,)), ('rest_0', ())]
    ]
