"""Inputs: deterministic, resumable streams of host batches, and the thread that puts them on the devices."""

from praxis_lite.inputs.base import BaseInput as BaseInput
from praxis_lite.inputs.chats import ChatInput as ChatInput
from praxis_lite.inputs.grain_input import (
  ArrayRecordInput as ArrayRecordInput,
  GrainInput as GrainInput,
  write_array_records as write_array_records,
)
from praxis_lite.inputs.growing_batches import GrowingBatches as GrowingBatches
from praxis_lite.inputs.hf_tokenizer import HfTokenizer as HfTokenizer
from praxis_lite.inputs.image_records import ImageRecordInput as ImageRecordInput
from praxis_lite.inputs.image_texts import ImageTextRecordInput as ImageTextRecordInput
from praxis_lite.inputs.labelled_text import LabelledTextInput as LabelledTextInput
from praxis_lite.inputs.masked_text import MaskedTextInput as MaskedTextInput
from praxis_lite.inputs.mixture import MixtureInput as MixtureInput
from praxis_lite.inputs.preferences import PreferenceInput as PreferenceInput
from praxis_lite.inputs.prefetch import PrefetchIterator as PrefetchIterator
from praxis_lite.inputs.random_access import ArrayInput as ArrayInput, RandomAccessInput as RandomAccessInput
from praxis_lite.inputs.recordings import RecordingInput as RecordingInput
from praxis_lite.inputs.rewarded import RewardedInput as RewardedInput
from praxis_lite.inputs.rows import Feature as Feature
from praxis_lite.inputs.source_target import SourceTargetInput as SourceTargetInput
from praxis_lite.inputs.span_corruption import SpanCorruptionInput as SpanCorruptionInput
from praxis_lite.inputs.synthetic import (
  ConstantFeature as ConstantFeature,
  RandomFeature as RandomFeature,
  SyntheticClassifierInput as SyntheticClassifierInput,
  SyntheticInput as SyntheticInput,
  SyntheticLMInput as SyntheticLMInput,
)
from praxis_lite.inputs.tables import Column as Column, TableInput as TableInput
from praxis_lite.inputs.text import TextInput as TextInput, stdlib_files as stdlib_files
from praxis_lite.inputs.tfdata import (
  TFDataInput as TFDataInput,
  TFRecordInput as TFRecordInput,
  write_tfrecords as write_tfrecords,
)
from praxis_lite.inputs.tokenizers import (
  BaseTokenizer as BaseTokenizer,
  ByteTokenizer as ByteTokenizer,
  CharTokenizer as CharTokenizer,
  SentencePieceTokenizer as SentencePieceTokenizer,
)
from praxis_lite.inputs.wav_files import read_wav as read_wav, write_wav as write_wav
