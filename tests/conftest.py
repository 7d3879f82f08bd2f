"""All tests run on eight simulated CPU devices."""

import os

from quick_xla import xla_flags

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
os.environ['XLA_FLAGS'] = xla_flags(devices=8)
