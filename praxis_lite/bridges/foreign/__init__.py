"""Modules of Flax, Equinox and Haiku as layers of ours, and our layers as pure functions for them."""

from praxis_lite.bridges.foreign.equinox import EquinoxLayer as EquinoxLayer
from praxis_lite.bridges.foreign.haiku import HaikuLayer as HaikuLayer
from praxis_lite.bridges.foreign.linen import LinenLayer as LinenLayer
from praxis_lite.bridges.foreign.nnx import NnxLayer as NnxLayer
from praxis_lite.bridges.foreign.pure import PureLayer as PureLayer, PureOutput as PureOutput
