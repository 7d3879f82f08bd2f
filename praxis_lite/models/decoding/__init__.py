"""Decoding: generates whole sequences with a model that predicts the next token."""

from praxis_lite.models.decoding.beam_loop import BeamDecoded as BeamDecoded
from praxis_lite.models.decoding.beam_rows import find_row_axes as find_row_axes
from praxis_lite.models.decoding.beam_search import BeamSearch as BeamSearch, FlatBeamSearch as FlatBeamSearch
from praxis_lite.models.decoding.buckets import Bucket as Bucket, chunk_of as chunk_of
from praxis_lite.models.decoding.constraint import Constraint as Constraint
from praxis_lite.models.decoding.decoder import Decoder as Decoder
from praxis_lite.models.decoding.loop import Decoded as Decoded, Draws as Draws
from praxis_lite.models.decoding.processors import LogitProcessor as LogitProcessor
from praxis_lite.models.decoding.sampler import Sampler as Sampler
from praxis_lite.models.decoding.sampling import sample_tokens as sample_tokens
from praxis_lite.models.decoding.speculative_loop import SpeculativeDecoded as SpeculativeDecoded
from praxis_lite.models.decoding.speculative_sampler import SpeculativeSampler as SpeculativeSampler
from praxis_lite.models.decoding.steps import (
  DecodingSteps as DecodingSteps,
  extend_one_by_one as extend_one_by_one,
  prompt_step as prompt_step,
)
