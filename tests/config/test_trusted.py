"""A config from a file names what it wants to be called; nothing that could do harm is imported or returned."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from praxis_lite.common.config import Config, Configurable, target
from praxis_lite.common.config.json import from_json, to_json
from praxis_lite.common.config.text import to_text
from praxis_lite.common.config.trusted import UntrustedError, import_trusted
from praxis_lite.common.errors import ConfigError, UserError
from praxis_lite.inputs.text import stdlib_files
from praxis_lite.layers import Linear
from praxis_lite.sharding.weights import WeightInit
from praxis_lite.training import registry
from praxis_lite.training.experiment import configure

registry.load_all()


class Loaded(Configurable):
  value: int = 1


def loaded_function():
  return 1


@pytest.mark.parametrize('name', registry.names())
def test_each_registered_experiment_can_be_read_back_without_trust(name):
  roots = configure(registry.get(name)).roots()
  assert to_text(from_json(to_json(roots))) == to_text(roots)


@pytest.mark.parametrize(
  'value',
  [
    *(Linear, WeightInit, WeightInit.Gaussian, optax.adamw, optax.GradientTransformation, stdlib_files),
    *(jax.nn.gelu, jax.nn.relu, jnp.tanh, jnp.maximum, jax.lax.rsqrt, jax.nn.initializers.normal),
    *(jnp.bfloat16, np.float32, int, dict, len),
  ],
)
def test_what_configs_name_is_read(value):
  assert from_json(to_json(value)) is value or from_json(to_json(value)) == value


HOSTILE = [
  *('os:system', 'posix:system', 'subprocess:Popen', 'subprocess:run', 'shutil:rmtree', 'runpy:run_path', 'pty:spawn'),
  *('builtins:eval', 'builtins:exec', 'builtins:__import__', 'builtins:open', 'builtins:getattr', 'builtins:compile'),
  *('builtins:input', 'builtins:type', 'builtins:map', 'builtins:breakpoint', 'importlib:import_module'),
  *('pickle:loads', 'numpy:load', 'numpy:save', 'numpy:memmap', 'numpy:frompyfunc', 'numpy.lib.npyio:DataSource'),
  *('jax.numpy:load', 'jax.numpy:save', 'jax.numpy:savez', 'jax.numpy:fromfile', 'jax.numpy:frompyfunc'),
  *('jax:pure_callback', 'jax.debug:callback', 'jax.numpy:os.system', 'jax.profiler:start_trace', 'jax:Array'),
  *('praxis_lite.common.importing:import_module', 'praxis_lite.common.importing:importlib.import_module'),
  *('praxis_lite.common.importing:os.system', 'praxis_lite.common.importing:os', 'praxis_lite.training.registry:get'),
  *(
    'praxis_lite.common.config.references:import_reference',
    'praxis_lite.cli.main:main',
    'praxis_lite.cli.main:os.execv',
  ),
  *('praxis_lite.inputs.tfdata:write_tfrecords', 'praxis_lite.checkpoints.checkpointer:Checkpointer'),
  *('praxis_lite.runs.cluster.distributed:initialize_distributed', 'praxis_lite.runs.executor:run_train'),
  *('praxis_lite.layers:Linear.__init__', 'praxis_lite.layers:Linear.__class__', 'praxis_lite.layers:Linear.mro'),
  *('praxis_lite.layers:Linear.apply', 'praxis_lite.layers.linears:jax', 'praxis_lite.layers.linears:jnp.load'),
  *('optax:jnp.load', 'optax._src.base:jnp.load', 'optax:chex', 'fiddle:Config', 'absl.app:run', 'tensorflow:io'),
  *(
    'this:s',
    'antigravity:webbrowser.open',
    '__main__:__builtins__',
    'test_trusted:loaded_function',
    'test_trusted:sys',
  ),
  *('', 'os.system', 'os:', ':system', 'os:system:x', '.os:system', 'os:system()', 'os\n:system', 'jax.nn:gelu\n'),
]


@pytest.mark.slow_cases
@pytest.mark.parametrize('reference', HOSTILE)
@pytest.mark.parametrize('form', ['$config', '$ref', '$object', '$enum', '$partial'])
def test_nothing_that_could_do_harm_is_read(reference, form, monkeypatch):
  before = set(sys.modules)
  encoded = {
    '$enum': {'$enum': [reference, 'A']},
    '$partial': {'$partial': [{'$ref': reference}, ['x'], {}]},
  }.get(form, {form: reference})
  with pytest.raises(ConfigError, match=r'^task\.model: '):
    from_json(json.dumps({'task': {'$config': 'praxis_lite.training.task:SingleTask', 'model': encoded}}))
  assert not {'this', 'antigravity', 'pty', 'runpy'} & (set(sys.modules) - before)


@pytest.mark.parametrize('reference', ['test_trusted:sys', 'test_trusted:json.loads', 'test_trusted:os.system'])
def test_trusting_a_module_does_not_trust_what_it_imports(reference):
  with pytest.raises(UserError):
    import_trusted(reference, ['test_trusted'])


def test_names_that_are_no_text():
  for name in (None, 1, ['os:system'], {'a': 1}):
    with pytest.raises(ConfigError):
      from_json(json.dumps({'$config': name}))


def test_classes_that_are_loaded_and_modules_that_are_trusted():
  config = Config(Loaded, value=2)
  assert from_json(to_json(config)) == config  # A Configurable, imported before: of a notebook, or by --exp.
  encoded = to_json(Config(loaded_function))
  with pytest.raises(UntrustedError, match='test_trusted:loaded_function') as refused:
    from_json(encoded)
  assert refused.value.module == 'test_trusted'
  assert target(from_json(encoded, ['test_trusted'])) is loaded_function


def test_objects_are_only_made_of_classes_of_values():
  for name in ('praxis_lite.layers:Linear', 'builtins:dict', 'builtins:list', 'jax.nn:gelu'):
    with pytest.raises(ConfigError, match='neither a dataclass nor a named tuple'):
      from_json(json.dumps({'$object': name}))
  with pytest.raises(ConfigError, match='is not an enum'):
    from_json(json.dumps({'$enum': ['praxis_lite.layers:Linear', 'name']}))


@pytest.mark.parametrize(
  'encoded',
  [
    {'$array': ['object', [1], 'AQEBAQEBAQE=']},  # Bytes of the file as an address.
    {'$scalar': ['O', 'AQEBAQEBAQE=']},
    {'$array': ['i4,O', [1], 'AQEBAQEBAQEBAQEB']},
    {'$array': ['float32', [1000000000000], 'AAAA']},
    {'$array': [{'a': 1}, [1], '']},
    {'$dtype': 'object'},
    {'$array': 'float32'},
    {'$tuple': 3},
    {'$dict': [[[], 1]]},
    {'$partial': ['print', [], {}]},
    {'$config': 'praxis_lite.layers:Linear', '__class__': 'x'},
    {'$path': ['a']},
    {'$float': 'x'},
  ],
)
def test_malformed_entries_are_refused_with_their_path(encoded):
  with pytest.raises(ConfigError, match=r'^task'):
    from_json(json.dumps({'task': encoded}))


@pytest.mark.parametrize('text', ['[' * 100_000, '{"a":' * 50_000 + '1' + '}' * 50_000, '1' * 5000, '\x00', ''])
def test_text_made_to_break_a_parser(text):
  with pytest.raises(ConfigError):
    from_json(text)
