"""Layers: what models are made of."""

from praxis_lite.layers.activations import (
  ACTIVATIONS as ACTIVATIONS,
  Activation as Activation,
  get_activation as get_activation,
)
from praxis_lite.layers.adapters import (
  AdaptedFeedForward as AdaptedFeedForward,
  MultitaskResidualAdapter as MultitaskResidualAdapter,
)
from praxis_lite.layers.alibi import AlibiBias as AlibiBias
from praxis_lite.layers.attention import MultiHeadAttention as MultiHeadAttention
from praxis_lite.layers.attention_spec import (
  AttentionSpec as AttentionSpec,
  LogitBias as LogitBias,
  ProbabilityDropout as ProbabilityDropout,
)
from praxis_lite.layers.audio_encoder_decoder import (
  AudioEncoderDecoder as AudioEncoderDecoder,
  AudioStem as AudioStem,
  WindowLogMel as WindowLogMel,
)
from praxis_lite.layers.bi_tempered import (
  BiTemperedLoss as BiTemperedLoss,
  BiTemperedSoftmax as BiTemperedSoftmax,
  bi_tempered_loss as bi_tempered_loss,
)
from praxis_lite.layers.blockwise import blockwise_attention as blockwise_attention
from praxis_lite.layers.causal_conv import CausalConv as CausalConv
from praxis_lite.layers.chunk_memory import ChunkMemory as ChunkMemory, MemoryAttention as MemoryAttention
from praxis_lite.layers.conformer import ConformerBlock as ConformerBlock, ConformerEncoder as ConformerEncoder
from praxis_lite.layers.context_parallel import context_parallel_attention as context_parallel_attention
from praxis_lite.layers.contrastive import ContrastiveLoss as ContrastiveLoss, ContrastiveOutput as ContrastiveOutput
from praxis_lite.layers.convnext import ConvNeXt as ConvNeXt, ConvNeXtBlock as ConvNeXtBlock
from praxis_lite.layers.cross_attention import CrossAttention as CrossAttention
from praxis_lite.layers.ctc import (
  CtcAlignment as CtcAlignment,
  ctc_alignment as ctc_alignment,
  ctc_frames_needed as ctc_frames_needed,
  ctc_loss as ctc_loss,
)
from praxis_lite.layers.ctc_decoding import (
  CtcHypotheses as CtcHypotheses,
  ctc_beam_search as ctc_beam_search,
  ctc_greedy_decode as ctc_greedy_decode,
)
from praxis_lite.layers.diagonal_ssm import DiagonalSsm as DiagonalSsm
from praxis_lite.layers.differential_attention import DifferentialAttention as DifferentialAttention
from praxis_lite.layers.diffusion_transformer import (
  DiffusionTransformer as DiffusionTransformer,
  ModulatedBlock as ModulatedBlock,
  TimeEmbedding as TimeEmbedding,
)
from praxis_lite.layers.dora import Dora as Dora, DoraLinear as DoraLinear, DoraProjection as DoraProjection
from praxis_lite.layers.dot_product import (
  choose_attention as choose_attention,
  dot_product_attention as dot_product_attention,
)
from praxis_lite.layers.dropout import Dropout as Dropout, StochasticResidual as StochasticResidual
from praxis_lite.layers.embeddings import Embedding as Embedding
from praxis_lite.layers.encoder import HeadTransform as HeadTransform, TransformerEncoder as TransformerEncoder
from praxis_lite.layers.encoder_decoder import (
  DecoderBlock as DecoderBlock,
  TransformerEncoderDecoder as TransformerEncoderDecoder,
)
from praxis_lite.layers.feedforward import FeedForward as FeedForward, GatedFeedForward as GatedFeedForward
from praxis_lite.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
from praxis_lite.layers.ia3 import Ia3 as Ia3, Ia3Linear as Ia3Linear, Ia3Projection as Ia3Projection
from praxis_lite.layers.image_coders import ImageDecoder as ImageDecoder, ImageEncoder as ImageEncoder
from praxis_lite.layers.image_mixing import ImageMixing as ImageMixing, MixedImages as MixedImages
from praxis_lite.layers.image_tokens import AttentionPooling as AttentionPooling, PatchEmbedding as PatchEmbedding
from praxis_lite.layers.images import (
  Conv2D as Conv2D,
  ConvNet as ConvNet,
  GlobalPooling as GlobalPooling,
  Mlp as Mlp,
  Pooling as Pooling,
)
from praxis_lite.layers.latent_attention import LatentAttention as LatentAttention
from praxis_lite.layers.linears import Bias as Bias, Linear as Linear
from praxis_lite.layers.local_chunks import LocalChunks as LocalChunks
from praxis_lite.layers.log_mel import LogMel as LogMel, mel_filters as mel_filters
from praxis_lite.layers.lora import (
  Adapter as Adapter,
  Lora as Lora,
  LoraEmbedding as LoraEmbedding,
  LoraLinear as LoraLinear,
  LoraMoeFeedForward as LoraMoeFeedForward,
  LoraProjection as LoraProjection,
)
from praxis_lite.layers.low_rank import LowRankUpdate as LowRankUpdate
from praxis_lite.layers.mamba2 import GatedRMSNorm as GatedRMSNorm, Mamba2 as Mamba2
from praxis_lite.layers.masked_patches import PatchDecoder as PatchDecoder
from praxis_lite.layers.masks import (
  ArrayMask as ArrayMask,
  AttentionMask as AttentionMask,
  Band as Band,
  Causal as Causal,
  FunctionMask as FunctionMask,
  Known as Known,
  Paddings as Paddings,
  Prefix as Prefix,
  Segments as Segments,
  SlidingWindow as SlidingWindow,
  Visibility as Visibility,
  key_array as key_array,
  make_mask as make_mask,
  query_array as query_array,
  row_array as row_array,
)
from praxis_lite.layers.mixer_block import MixerBlock as MixerBlock
from praxis_lite.layers.moe import MoeFeedForward as MoeFeedForward
from praxis_lite.layers.multi_token import (
  MultiTokenModule as MultiTokenModule,
  MultiTokenPrediction as MultiTokenPrediction,
)
from praxis_lite.layers.normalizations import (
  BatchNorm as BatchNorm,
  GroupNorm as GroupNorm,
  IdentityNorm as IdentityNorm,
  LayerNorm as LayerNorm,
  RMSNorm as RMSNorm,
  RMSNormNoScale as RMSNormNoScale,
)
from praxis_lite.layers.partial_rotary import PartialRotaryPositions as PartialRotaryPositions
from praxis_lite.layers.pipeline import Pipelined as Pipelined, describe_pipelines as describe_pipelines
from praxis_lite.layers.pipeline_schedule import PipelineSchedule as PipelineSchedule
from praxis_lite.layers.positions import (
  LearnedPositions as LearnedPositions,
  RelativeBias as RelativeBias,
  RotaryPositions as RotaryPositions,
  SinusoidalPositions as SinusoidalPositions,
  SinusoidalPositions2D as SinusoidalPositions2D,
  grid_positions as grid_positions,
)
from praxis_lite.layers.projections import PerDimScale as PerDimScale, Projection as Projection
from praxis_lite.layers.quantized_weights import QuantizedWeights as QuantizedWeights
from praxis_lite.layers.quantizers import (
  GumbelQuantizer as GumbelQuantizer,
  QuantizedVectors as QuantizedVectors,
  RandomVectorQuantizer as RandomVectorQuantizer,
  VectorQuantizer as VectorQuantizer,
)
from praxis_lite.layers.recurrent import Recurrent as Recurrent
from praxis_lite.layers.relative_attention import RelativeAttention as RelativeAttention
from praxis_lite.layers.repeat import Repeat as Repeat
from praxis_lite.layers.resnet import ResNet as ResNet, ResNetBlock as ResNetBlock
from praxis_lite.layers.rg_lru import RgLru as RgLru
from praxis_lite.layers.rnnt import rnnt_loss as rnnt_loss
from praxis_lite.layers.routing import Router as Router
from praxis_lite.layers.scalar_quantizers import (
  FiniteScalarQuantizer as FiniteScalarQuantizer,
  LookupFreeQuantizer as LookupFreeQuantizer,
)
from praxis_lite.layers.scaled_embedding import ScaledEmbeddingSoftmax as ScaledEmbeddingSoftmax
from praxis_lite.layers.sequence_parts import SequenceSplit as SequenceSplit
from praxis_lite.layers.sequential import Sequential as Sequential
from praxis_lite.layers.sigmoid import SigmoidCrossEntropy as SigmoidCrossEntropy
from praxis_lite.layers.softmax import (
  FullSoftmax as FullSoftmax,
  SharedEmbeddingSoftmax as SharedEmbeddingSoftmax,
  cross_entropy as cross_entropy,
)
from praxis_lite.layers.spectrum_augmenter import SpectrumAugmenter as SpectrumAugmenter
from praxis_lite.layers.stacking import StackingOverTime as StackingOverTime
from praxis_lite.layers.time_convolutions import (
  ConvolutionModule as ConvolutionModule,
  ConvSubsampling as ConvSubsampling,
  DepthwiseConv1D as DepthwiseConv1D,
)
from praxis_lite.layers.transducer import (
  LabelNetwork as LabelNetwork,
  PathLogProbs as PathLogProbs,
  TransducerJoint as TransducerJoint,
)
from praxis_lite.layers.transformer import (
  PipelinedTransformer as PipelinedTransformer,
  RepeatedTransformer as RepeatedTransformer,
  StackedTransformer as StackedTransformer,
)
from praxis_lite.layers.transformer_block import TransformerBlock as TransformerBlock
from praxis_lite.layers.transformer_lm import TransformerLm as TransformerLm
from praxis_lite.layers.value_residual import ValueResidual as ValueResidual
from praxis_lite.layers.vision_transformer import VisionTransformer as VisionTransformer
from praxis_lite.layers.weight_norms import (
  SpectralNormLinear as SpectralNormLinear,
  StandardizedConv2D as StandardizedConv2D,
  WeightNormalizedLinear as WeightNormalizedLinear,
)
