"""Inputs: deterministic, resumable streams of host batches, and the thread that puts them on the devices."""

from praxis_lite.inputs.base import BaseInput
from praxis_lite.inputs.chats import ChatInput
from praxis_lite.inputs.grain_input import ArrayRecordInput, GrainInput, write_array_records
from praxis_lite.inputs.growing_batches import GrowingBatches
from praxis_lite.inputs.hf_tokenizer import HfTokenizer
from praxis_lite.inputs.image_records import ImageRecordInput
from praxis_lite.inputs.image_texts import ImageTextRecordInput
from praxis_lite.inputs.labelled_text import LabelledTextInput
from praxis_lite.inputs.masked_text import MaskedTextInput
from praxis_lite.inputs.mixture import MixtureInput
from praxis_lite.inputs.packing import pack_prompts
from praxis_lite.inputs.preferences import PreferenceInput
from praxis_lite.inputs.prefetch import PrefetchIterator
from praxis_lite.inputs.random_access import ArrayInput, RandomAccessInput
from praxis_lite.inputs.recordings import RecordingInput
from praxis_lite.inputs.rewarded import RewardedInput
from praxis_lite.inputs.rows import Feature
from praxis_lite.inputs.source_target import SourceTargetInput
from praxis_lite.inputs.span_corruption import SpanCorruptionInput
from praxis_lite.inputs.synthetic import (
  ConstantFeature,
  RandomFeature,
  SyntheticClassifierInput,
  SyntheticInput,
  SyntheticLMInput,
)
from praxis_lite.inputs.tables import Column, TableInput
from praxis_lite.inputs.text import TextInput, stdlib_files
from praxis_lite.inputs.tfdata import TFDataInput, TFRecordInput, write_tfrecords
from praxis_lite.inputs.tokenized import TokenizedInput
from praxis_lite.inputs.tokenizers import BaseTokenizer, ByteTokenizer, CharTokenizer, SentencePieceTokenizer
from praxis_lite.inputs.wav_files import read_wav, write_wav

__all__ = [
  'ArrayInput',
  'ArrayRecordInput',
  'BaseInput',
  'BaseTokenizer',
  'ByteTokenizer',
  'CharTokenizer',
  'ChatInput',
  'Column',
  'ConstantFeature',
  'Feature',
  'GrainInput',
  'GrowingBatches',
  'HfTokenizer',
  'ImageRecordInput',
  'ImageTextRecordInput',
  'LabelledTextInput',
  'MaskedTextInput',
  'MixtureInput',
  'PreferenceInput',
  'PrefetchIterator',
  'RandomAccessInput',
  'RandomFeature',
  'RecordingInput',
  'RewardedInput',
  'SentencePieceTokenizer',
  'SourceTargetInput',
  'SpanCorruptionInput',
  'SyntheticClassifierInput',
  'SyntheticInput',
  'SyntheticLMInput',
  'TFDataInput',
  'TFRecordInput',
  'TableInput',
  'TextInput',
  'TokenizedInput',
  'pack_prompts',
  'read_wav',
  'stdlib_files',
  'write_array_records',
  'write_tfrecords',
  'write_wav',
]
