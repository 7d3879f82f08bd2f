"""Mistakes in the classes of a file: fields of layers, tasks, data, meshes. A line each, as of those in models."""

from __future__ import annotations

import re
import sys

import pytest
from test_bad_input import fails
from test_model_mistakes import FILE

MODEL = """
class Mine(Right):
  {}
"""
SIZED = """dims: int = 6

  def setup(self):
    super().setup()
    self.create_child('of_a_size', Config(Linear, input_dims=6, output_dims=self.dims))
"""
BLOCK = """
class Block(Layer):
  {}

  def __call__(self, x):
    return x


class Mine(Right):
  def setup(self):
    super().setup()
    self.create_child('block', Config(Block))
"""
NESTED = """
class Rbf(Layer):
  input_dims: int = REQUIRED

class Block(Layer):
  rbf_tpl: Config = template(Rbf)

  def setup(self):
    self.create_child('rbf', self.rbf_tpl)

class Mine(Right):
  def setup(self):
    super().setup()
    self.create_child('block', Config(Block))
"""
EXPERIMENT = """
class Experiment(Experiment):
  {}
"""
TASK = """
class Experiment(Experiment):
  def task(self):
    task = super().task()
    {}
    return task
"""
DATA = """
def data():
  {}

class Experiment(Experiment):
  def datasets(self):
    return [Config(ArrayInput, name='train', arrays=Config(data), batch_size=4, is_training=True)]
"""
ON_A_MESH = """
class Mine(Right):
  def setup(self):
    super().setup()
    linear = Config(Linear, input_dims=6, output_dims=6)
    linear.weight_split_dims_mapping.wt = {}
    self.create_child('other', linear)
"""

IN_DATA = r', in data\(\), a function of the data; --traceback'
MISTAKES = {
  # The body of a class.
  '__init__': (
    BLOCK.format('def __init__(self, dims): self.dims = dims'),
    r'^cannot import own\S*: Block defines __init__, which its annotated attributes make; declare each argument as an '
    r'attribute, name: type = default, and do the rest in setup\(self\) \(own\.py:\d+\)$',
  ),
  '__post_init__': (BLOCK.format('def __post_init__(self): pass'), r'Block defines __post_init__, .*; write setup\('),
  'arguments of setup': (
    BLOCK.format('def setup(self, dims): pass'),
    r'Block\.setup takes only self; declare what it needs as an attribute',
  ),
  'shared config': (
    BLOCK.format('proj_tpl: Config = Config(Linear)'),
    r'^cannot import own\S*: Block\.proj_tpl: a Config as a default would be shared by all objects; write '
    r'proj_tpl: Config = template\(Linear\), with its fields as keywords \(own\.py:\d+\)$',
  ),
  'shared list': (
    BLOCK.format('sizes: list = [3]'),
    r'Block\.sizes: a list as a default would be shared .*; write a tup',
  ),
  'template without a type': (
    BLOCK.format('proj_tpl = template(Linear)'),
    r'Block\.proj_tpl has no type annotation, so it is not a field; write proj_tpl: Config = template\(\.\.\.\)',
  ),
  'REQUIRED without a type': (
    BLOCK.format('dims = REQUIRED'),
    r'Block\.dims has no type .*; write dims: int = REQUIRED',
  ),
  'class for a template': (
    BLOCK.format('proj_tpl: Config = Linear'),
    r'^block\.proj_tpl: expected a Config, got .*Linear \(type\), the default of Block; write '
    r'proj_tpl: Config = template\(Linear\)$',
  ),
  'object for a template': (
    BLOCK.format('scale_tpl: Config = template(Scale())'),
    r'Config takes the class Scale, not an object of it; write Config\(Scale, \.\.\.\)$',
  ),
  'type of a default': (
    BLOCK.format('dims: int = 6.5'),
    r'^block\.dims: expected int, got 6\.5 \(float\), the default of Block$',
  ),
  'type of a default of the model': (
    MODEL.format("dims: int = '6'"),
    r"^task\.model\.dims: expected int, got '6' \(str\), the default of Mine$",
  ),
  'field without a type': (
    MODEL.format('dims = 6') + TASK.format('task.model = Config(Mine, dims=7)'),
    r"^Mine has no field 'dims': its attribute of this name has no type annotation\. Write dims: int = 6 .*\(own\.py:",
  ),
  'required below': (NESTED, r'^block\.rbf\.input_dims: a value is required but not set \(a field of Rbf\)$'),
  'misspelt base': (
    'class Mine(Rihgt): pass',
    r"^cannot import own\S*: NameError: .*\. Did you mean 'Right'\? \(own\.py:",
  ),
  'syntax': (
    'class Mine(Right)\n  pass',
    r"^cannot import own\.py: SyntaxError: expected ':': `class Mine\(Right\)` \(own\.py:\d+\)$",
  ),
  'null bytes': ('x = 0\0', r'^cannot import own\.py: SyntaxError: source code string cannot contain null bytes$'),
  'syntax of text that is evaluated': (
    "eval('1 +')",
    r'^cannot import own\.py: SyntaxError: invalid syntax: `1 \+` \(own\.py:\d+\)$',
  ),
  'module that is not there': (
    'import no_such',
    r"^cannot import own\S*: ModuleNotFoundError: .*'no_such' \(own\.py:\d+",
  ),
  # The task.
  'no task': (
    EXPERIMENT.format('def task(self): pass'),
    r'^Experiment\.task\(\) returned NoneType; it must return a Conf',
  ),
  'built task': (
    EXPERIMENT.format('def task(self): return SingleTask(model=Config(Mine))'),
    r'^Experiment\.task\(\) returned SingleTask; it must return a Config of a task$',
  ),
  'model for a task': (
    EXPERIMENT.format('def task(self): return Config(Mine)'),
    r'^Experiment\.task\(\) returned the Config of Mine; it must return that of a task, as in Config\(SingleTask, ',
  ),
  'no self': (
    EXPERIMENT.format('def task(): pass'),
    r'^Experiment\.task takes arguments, or lacks self; it is called as',
  ),
  'arguments of an experiment': (
    EXPERIMENT.format('def __init__(self, size): pass'),
    r'^Experiment takes arguments, or lacks self; it is called as Experiment\(\), without any$',
  ),
  'no model': (TASK.format('task = Config(SingleTask)'), r'^task\.model: a value is required but not set'),
  'class for a model': (
    TASK.format('task.model = Mine'),
    r'^task\.model: expected the config of a BaseModel, got .*Mine \(type\); write Config\(Mine, .* \(own\.py:\d+\)$',
  ),
  'layer for a model': (
    TASK.format('task.model = Config(Scale)'),
    r'^task\.model: expected the config of a BaseModel, got the config of Scale \(own\.py:\d+\)$',
  ),
  'no learner': (
    TASK.format('task.train.learner = None'),
    r'^task\.train\.learner: expected a Config, got None \(own\.py:\d+\)$',
  ),
  'optimizer for a learner': (
    TASK.format('task.train.learner = Config(optax.adam, learning_rate=1e-3)'),
    r'^task\.train\.learner: expected the config of a Learner, got that of adam; an optimizer is a field of it: ',
  ),
  'built optimizer': (
    TASK.format('task.train.learner.optimizer = optax.adam(1e-3)'),
    r'^task\.train\.learner\.optimizer: expected a Config, got GradientTransformation',
  ),
  'function for an optimizer': (
    TASK.format('task.train.learner.optimizer = optax.adam'),
    r'^task\.train\.learner\.optimizer: expected a Config, got optax.*adam \(function\); write Config\(adam, .* \(own',
  ),
  'name of an optimizer': (
    TASK.format("task.train.learner.optimizer = 'adam'"),
    r"^task\.train\.learner\.optimizer: expected a Config, got 'adam' \(str\); write Config\(\.\.\.\) of the function",
  ),
  'size of a model that is not positive': (
    MODEL.format(SIZED) + TASK.format('task.model = Config(Mine).set(dims=-6)'),
    r'^task\.model\.dims: expected at least 1, got -6; it makes \w+\.w of shape \(.*-6\) \(own\.py:\d+\)$',
  ),
  'share of the rate': (
    TASK.format('task.train.num_train_steps = 2.5'),
    r'^task\.train\.num_train_steps: expected int, got 2\.5 \(float\) \(own\.py:\d+\)$',
  ),
  'schedule for a rate': (
    TASK.format('task.train.learner.learning_rate = optax.cosine_decay_schedule(1e-3, 100)'),
    r'^task\.train\.learner\.learning_rate: expected float, got .*; a function of the step belongs in ',
  ),
  'text for a rate': (
    TASK.format("task.train.learner.learning_rate = '1e-3'"),
    r"^task\.train\.learner\.learning_rate: expected float, got '1e-3' \(str\) \(own\.py:\d+\)$",
  ),
  'field in the wrong place': (
    TASK.format('task.num_train_steps = 3'),
    r"^task \(SingleTask\) has no field 'num_train_steps'\. Did you mean 'train\.num_train_steps'\? .*\(own\.py:\d+\)$",
  ),
  'misspelt name in a task': (
    TASK.format('task.model = Config(Mien)'),
    r"^NameError: name 'Mien' is not defined\. Did you mean 'Mine'\? \(own\.py:\d+\); --traceback",
  ),
  'names of a mesh': (
    EXPERIMENT.format("mesh_axis_names = 'data'"),
    r"^task\.mesh_axis_names: expected tuple\[str, \.\.\.\] \| None, got 'data' \(str\)$",
  ),
  'shape of a mesh': (
    EXPERIMENT.format('ici_mesh_shape = 2'),
    r'^task\.ici_mesh_shape: expected a tuple of integers, .* as in \(-1,\); got 2$',
  ),
  'no names': (
    ON_A_MESH.format("('data', 'mdl')"),
    r"^other\.weight_split_dims_mapping\.wt names the mesh axis 'mdl', and task\.mesh_axis_names is not set; .* "
    r"or the task, as in mesh_axis_names = \('data', 'mdl'\), or leave out the mapping",
  ),
  'wrong name': (
    ON_A_MESH.format("('data', 'model')") + EXPERIMENT.format("mesh_axis_names = ('data', 'mdl')"),
    r"^other\.weight_split_dims_mapping\.wt: axis 'model' is not a mesh axis; .*Did you mean 'mdl'\?$",
  ),
  'wrong rank': (
    ON_A_MESH.format("('data',)") + EXPERIMENT.format("mesh_axis_names = ('data', 'mdl')"),
    r"^other\.w: mapping \('data',\) has 1 entry, but the tensor has 2 dimensions; give one entry per dimension in ",
  ),
  # Data.
  'no data': (
    EXPERIMENT.format('def datasets(self): pass'),
    r'^Experiment\.datasets\(\) returned NoneType; .* a list of',
  ),
  'bare data': (
    EXPERIMENT.format('def datasets(self): return super().datasets()[0]'),
    r'^Experiment\.datasets\(\) returned Config; it must return a list of Configs of inputs$',
  ),
  'function for data': (
    EXPERIMENT.format('def datasets(self): return [Config(dict)]').replace('dict', 'np.ones, shape=3'),
    r'^Experiment\.datasets\(\)\[0\] is the Config of ones; it must be that of an input, as in Config\(ArrayInput, ',
  ),
  'misspelt name in data': (
    DATA.format("return {'x': np.onse((8, 6))}"),
    r"^AttributeError: module 'numpy' has no attribute 'onse'\. Did you mean 'ones'\? \(own\.py:\d+\)" + IN_DATA,
  ),
  'import in data': (
    DATA.format('import no_such'),
    r"^ModuleNotFoundError: No module named 'no_such' \(own\.py:\d+\)" + IN_DATA + r' shows how it got there$',
  ),
  'file of data': (
    DATA.format("return np.load('nothing.npy')"),
    r"^FileNotFoundError: .*No such file or directory: 'nothing\.npy' \(own\.py:\d+\)" + IN_DATA,
  ),
}


@pytest.mark.parametrize(('text', 'message'), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_a_file_is_told_in_a_line_with_its_remedy(capsys, tmp_path, monkeypatch, text, message):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', list(sys.path))
  (tmp_path / 'own.py').write_text(FILE.replace('MISTAKE', '  pass') + text)
  told = fails(capsys, 'train', '--exp=own.py:Experiment', f'--job_log_dir={tmp_path / "run"}')
  assert re.search(message, told), told
  assert not (tmp_path / 'run').exists()
