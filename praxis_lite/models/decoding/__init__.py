"""Decoding: generates whole sequences with a model that predicts the next token."""

from praxis_lite.models.decoding.beam_loop import BeamDecoded
from praxis_lite.models.decoding.beam_rows import find_row_axes
from praxis_lite.models.decoding.beam_search import BeamSearch, FlatBeamSearch
from praxis_lite.models.decoding.buckets import Bucket, chunk_of
from praxis_lite.models.decoding.constraint import Constraint
from praxis_lite.models.decoding.decoder import Decoder
from praxis_lite.models.decoding.loop import Decoded, Draws
from praxis_lite.models.decoding.processors import LogitProcessor
from praxis_lite.models.decoding.sampler import Sampler
from praxis_lite.models.decoding.sampling import sample_tokens
from praxis_lite.models.decoding.speculative_loop import SpeculativeDecoded
from praxis_lite.models.decoding.speculative_sampler import SpeculativeSampler
from praxis_lite.models.decoding.steps import DecodingSteps, extend_one_by_one, prompt_step

__all__ = [
  'BeamDecoded',
  'BeamSearch',
  'Bucket',
  'Constraint',
  'Decoded',
  'Decoder',
  'DecodingSteps',
  'Draws',
  'FlatBeamSearch',
  'LogitProcessor',
  'Sampler',
  'SpeculativeDecoded',
  'SpeculativeSampler',
  'chunk_of',
  'extend_one_by_one',
  'find_row_axes',
  'prompt_step',
  'sample_tokens',
]
