"""Running an experiment: start-up, the training loop, records, summaries, evaluation and decoding."""

from praxis_lite.hosts.compilation_cache import set_up_compilation_cache
from praxis_lite.hosts.devices import simulate_cpu_devices
from praxis_lite.hosts.distributed import initialize_distributed
from praxis_lite.runtime.executor import TrainResult, run_train
from praxis_lite.runtime.hooks import Hook, Run
from praxis_lite.runtime.inference import run_decode, run_eval
from praxis_lite.runtime.nonfinite import NonFiniteError
from praxis_lite.runtime.run import SavedRun, open_run
from praxis_lite.runtime.trained import TrainedModel
