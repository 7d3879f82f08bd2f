"""The tables of `docs/from-pax.md`: each name on the right exists, and each public name of Praxis is on the left."""

import pathlib
import pkgutil
import re

import pytest

from praxis_lite.common.config import Config, field_names

PAGE = pathlib.Path(__file__).parent.parent / 'docs' / 'from-pax.md'
# A table whose head names the module of the names on the right, and its rows.
TABLE = re.compile(
  r'^\| (?P<theirs>.*) \| `(?P<module>[\w.]+)\.` \|\n\|---\|---\|\n(?P<rows>(?:\|.*\n)+)', re.MULTILINE
)

# What the modules of Praxis export.
PRAXIS = """
  BaseActivation CubedReLU GELU Identity LeakyReLU ReLU ReLU6 Sigmoid SiLU SquaredReLU Swish Tanh Softplus Exp
  AdaptedTransformerFeedForward MultitaskResidualAdapter AttentionProjection causal_mask causal_segment_mask
  CausalDepthwiseConv1D convert_paddings_to_mask DotProductAttention DotProductAttentionXL LocalSelfAttention
  LocalSelfAttentionXL PerDimScale RelativeBias segment_mask TemporalShifting BregmanPCA AutodiffCheckpointType
  Conformer
  DotProductAttentionWithContext DotProductAttentionWithContextXL SelfAttentionWithNormAndResidual Conv2D ConvBNAct
  ConvBNActWithPadding DepthwiseConv1D LightConv1D Embedding FullSoftmax GShardSharedEmbeddingSoftmax
  PositionalEmbedding PositionalEmbedding2D SharedEmbeddingSoftmax SigmoidCrossEntropy TrainablePositionalEmbedding
  RotaryPositionalEmbedding NClassMajorSharedEmbeddingSoftmax FRnn LstmFrnn StackFrnn Bias FeedForward Linear MLPBlock
  project_last_dim StackingOverTime BiTemperedLoss ClassificationMLPModel ClassificationModel LanguageModel
  SequenceModel BertModel MaskedLmDataAugmenter
  get_bigram_ids Ngrammer VectorQuantization VQNgrammer BaseNormalization IdentityNorm BatchNorm
  compute_moments GroupNorm LayerNorm RmsNorm RmsNormNoScale LayerwiseShardablePipelined GlobalPooling Pooling
  quantize_vector RandomVectorQuantizer VectorQuantizer Repeat ResNet ResNetBlock CifgLstmCellSimple
  LayerNormalizedLstmCellSimple LstmCellSimple Sequential SpectrumAugmenter SSM Dropout StochasticResidual
  LanguageModelType TransformerEncoderDecoder TransformerLm compute_attention_masks_for_extend_step
  compute_attention_masks_for_fprop PipelinedTransformer StackedTransformer StackedTransformerRepeated Transformer
  TransformerFeedForward TransformerFeedForwardMoe VanillaBlock VanillaNet VisionTransformer VitEntryLayers
  VitExitLayers
  MultiQueryDotProductAttention OneHeadedAttentionProjection DotProductAttentionWithLPB
  MultiQueryDotProductAttentionLPB GroupedQueryAttention gpu_fast_attention FlaxModuleAdapter FlaxModuleAdapterBase glam
  grok flaxformer_models mobilenet asr streaming sparsity chunk unchunk Einsum ArrayLookup fp8_ops injection chain
  copy_n_times add_residual apply_padding dict_to_args full_like log_args

  Gaussian Uniform Xavier XavierWithFixupParams Constant TruncatedGaussian GaussianSqrtDim GaussianSqrtFanIn
  GaussianSqrtFanOut GaussianSqrtFanAvg UniformSqrtDim UniformUnitScaling TruncatedGaussianSqrtDim
  TruncatedGaussianSqrtFanIn TruncatedGaussianSqrtFanOut ScaledDeltaOrthogonal

  BaseSchedule Polynomial Exponential Cosine DelayedCosine LinearRampupPolynomialDecay LinearRampupCosineDecay
  PiecewiseConstant SqrtDecay LinearRampupSqrtDecay LinearRampupExponentialDecay LinearRampupPiecewiseConstant
  PiecewiseSchedule CycleSchedule ContinuousSchedule

  Sgd ShardedSgd Adam Adagrad ShardedAdagrad Adafactor ShardedAdafactor HeroLion DistributedShampoo
  ShardedDistributedShampoo ShardedStaticAccumulator DynamicAccumulator

  learning_rate lr_schedule l2_regularizer_weight l1_regularizer_weight skip_lp_1d_vectors decoupled_weight_decay
  clip_gradient_norm_to_value clip_gradient_single_norm_to_value ema_decay ewc_regularizer_weight ewc_weight_per_var

  BeamSearchHParams parse_tokens beam_size tokens_per_beam length_norm_alpha FlatBeamSearchHParams
  GreedyDecoderHParams SampleDecoderHParams seqlen min_prefix_len eos_id min_decode_steps max_decode_steps
  fprop_for_prefix lazy_prefix_broadcast decode_loop_mesh_axes_transpose process_result_fn emb_lookup_style
  use_extra_input_kwargs num_cache_slots num_samples temperature k p top_k_recall_target use_top_k_for_logprobs
  next_token_sampler_tpl sample_constraint global_normalize cf_guidance_scale controlled_decoding sort_samples
  override_next_token_sampler_params optimize_eos vanilla_sample_decode
"""


def rows():
  """(module, names of Praxis, what is here) of each row."""
  for table in TABLE.finditer(PAGE.read_text()):
    for line in table['rows'].splitlines():
      theirs, ours = line.removeprefix('| ').removesuffix(' |').split(' | ')
      yield table['module'], theirs, ours


ROWS = list(rows())


def resolve(name):
  """Returns what a name means; a field of a layer that has no default in its class exists too."""
  try:
    return pkgutil.resolve_name(name)
  except AttributeError:
    owner, _, field = name.rpartition('.')
    if field not in field_names(Config(pkgutil.resolve_name(owner))):
      raise
    return None


@pytest.mark.parametrize('module, theirs, ours', ROWS, ids=[theirs[:40] for _, theirs, _ in ROWS])
def test_what_is_here_exists(module, theirs, ours):
  """The first name in a cell is of the module of its table, and so are all that begin with a capital."""
  if ours.startswith('not here'):
    assert len(ours) > len('not here: '), 'a reason'
    return
  names = [match[1] for match in re.finditer(r'`([A-Za-z_][\w.]*)[^`]*`', ours)]
  of_module = [name for name in names[1:] if name[0].isupper()]
  for name in dict.fromkeys([names[0], *of_module]):
    resolve(name if name.startswith('praxis_lite.') else f'{module}.{name}')


def test_every_public_name_of_praxis_is_in_a_table():
  found = {
    name for _, theirs, _ in ROWS for span in re.findall(r'`([^`]+)`', theirs) for name in re.findall(r'\w+', span)
  }
  assert not set(PRAXIS.split()) - found
  assert len(ROWS) > 60
