"""All tests run on eight simulated CPU devices."""

import functools
import gc
import itertools
import os
import sys

import pytest
from quick_xla import simulate_devices

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
# Where in the source each operation of a program was called, of which nothing here asks.
os.environ.setdefault('JAX_TRACEBACK_IN_LOCATIONS_LIMIT', '0')
# TensorFlow imports Keras 3, which takes 1.5 s in each process; the older Keras is not installed.
os.environ.setdefault('TF_USE_LEGACY_KERAS', '1')
# Every process that a test starts would compile the package from its source.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False
simulate_devices(8)
# Traced programs are trees of many small objects that live on. Looking through them all for garbage as often as Python
# does by itself takes a fifth of the suite's time.
gc.set_threshold(200_000, 20, 100)


@pytest.fixture(scope='module')
def shared_programs(tmp_path_factory):
  """For a file whose tests compile the same programs over and over: JAX keeps them, and each is compiled once."""
  import jax  # not before the environment above is made
  from jax.experimental.compilation_cache import compilation_cache

  def use(values):
    compilation_cache.reset_cache()
    for name, value in values.items():
      jax.config.update(name, value)

  wanted = {
    'jax_enable_compilation_cache': True,  # A command that was run with --nocompilation_cache has turned it off.
    'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('programs')),
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': 0,
  }
  before = {name: getattr(jax.config, name) for name in wanted}
  use(wanted)
  yield
  use(before)


@pytest.fixture(autouse=True, scope='session')
def _no_state_of_the_user(tmp_path_factory):
  """What commands keep for the user, such as consents, is kept for the tests alone."""
  os.environ['XDG_STATE_HOME'] = str(tmp_path_factory.mktemp('state'))


@pytest.fixture(autouse=True, scope='session')
def _shared_mlir_contexts():
  """JAX makes a context of MLIR for each program that it lowers, which takes 3 ms; here, 64 programs share one."""
  from jax._src.interpreters import mlir  # not before the environment above is made

  if hasattr(mlir, 'make_ir_context'):  # Other releases of JAX may have none.
    make, programs = mlir.make_ir_context, itertools.count()
    shared = functools.lru_cache(1)(lambda group: make())
    mlir.make_ir_context = lambda: shared(next(programs) // 64)


@pytest.fixture(autouse=True)
def _jax_is_known():
  """No test may go on without what a release of JAX hides; those that fake such a release take back what it told."""
  from praxis_lite.common.jax_internals import told  # not before the environment above is made

  before = len(told)
  yield
  assert told[before:] == []


@pytest.hookimpl(tryfirst=True)  # Before pytest reads the markers for `-m`.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Files with slow tests come first: a worker takes a file at a time, and the last ones should be short."""
  seen = set()
  for item in items:
    if item.get_closest_marker('slow_cases'):
      function = item.nodeid.partition('[')[0]
      if function in seen:
        item.add_marker('slow')
      seen.add(function)
  slow = {item.path for item in items if item.get_closest_marker('slow')}
  items.sort(key=lambda item: item.path not in slow)


def pytest_sessionfinish() -> None:
  """What the tests leave is not looked through for garbage, which Python and pytest do several times while they end.

  After all tests of a worker it would take many seconds, for which pytest waits.
  """
  gc.disable()
  gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
  """Workers take whole files, as with `--dist=loadfile`. If one ends, only the test that has ended it fails.

  By itself, xdist queues all files of such a worker again, also those whose tests have all ended. A worker that is
  given one of these has nothing to run, and waits for ever. xdist would also run the test again that has ended the
  worker.
  """
  from xdist.scheduler import LoadFileScheduling  # Only with workers.

  class Scheduler(LoadFileScheduling):
    def remove_node(self, node):
      left = {
        file: {test: False for test, has_ended in tests.items() if not has_ended}
        for file, tests in self.assigned_work.pop(node).items()
      }
      pending = [(file, test) for file, tests in left.items() for test in tests]
      if not pending:
        return None
      file, crashed = pending[0]
      del left[file][crashed]
      self.workqueue.update({file: tests for file, tests in left.items() if tests})
      for other in self.assigned_work:
        self._reschedule(other)
      return crashed

  return Scheduler(config, log) if config.getvalue('dist') == 'loadfile' else None
