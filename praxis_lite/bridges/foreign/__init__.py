"""Modules of Flax, Equinox and Haiku as layers of ours, and our layers as pure functions for them."""

from praxis_lite.bridges.foreign.equinox import EquinoxLayer
from praxis_lite.bridges.foreign.haiku import HaikuLayer
from praxis_lite.bridges.foreign.linen import LinenLayer
from praxis_lite.bridges.foreign.nnx import NnxLayer
from praxis_lite.bridges.foreign.pure import PureLayer, PureOutput

__all__ = ['EquinoxLayer', 'HaikuLayer', 'LinenLayer', 'NnxLayer', 'PureLayer', 'PureOutput']
