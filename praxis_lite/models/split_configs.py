"""set_sharding: the usual ways to split a model over a mesh.

B batch, L length, D model dims, F hidden dims, N heads, H dims per head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from praxis_lite.common.config import Config, target
from praxis_lite.common.errors import ConfigError
from praxis_lite.layers.conformer import ConformerEncoder
from praxis_lite.layers.convnext import ConvNeXt
from praxis_lite.layers.diffusion_transformer import DiffusionTransformer
from praxis_lite.layers.encoder import TransformerEncoder
from praxis_lite.layers.mixers import Axes, Mixer
from praxis_lite.layers.moe import MoeFeedForward
from praxis_lite.layers.recurrent import Recurrent
from praxis_lite.layers.repeat import kinds_of_stack
from praxis_lite.layers.resnet import ResNet
from praxis_lite.layers.vision_transformer import VisionTransformer
from praxis_lite.models.masked_image_model import MaskedAutoencoder
from praxis_lite.models.networks import LmT, find_network, is_a, stack_fields
from praxis_lite.models.speech_model import SpeechModel
from praxis_lite.models.transducer_model import TransducerModel
from praxis_lite.models.two_towers import TwoTowerModel
from praxis_lite.sharding.specs import axes_to_entry, spec_axes
from praxis_lite.sharding.weights import SplitDimsMapping

# Networks that contain no softmax.
_KINDS = (VisionTransformer, ResNet, ConvNeXt, DiffusionTransformer, TransformerEncoder)


class _Axes(NamedTuple):
  """The arguments of `set_sharding`, and the mappings that follow from them."""

  batch: Axes
  data: Axes
  mdl: Axes
  expert: Axes = None
  length: Axes = None

  @property
  def bld(self) -> SplitDimsMapping:
    return (self.batch, self.length, None)

  @property
  def blf(self) -> SplitDimsMapping:
    return (self.batch, self.length, self.mdl)

  @property
  def blnh(self) -> SplitDimsMapping:
    # The length of a cache is not split; attention splits other arrays itself, by `context_axis`.
    return (self.batch, None, self.mdl, None)

  @property
  def weight(self) -> SplitDimsMapping:
    """The mapping of weights [D, F] whose columns are split."""
    return (self.data, self.mdl)

  @property
  def filters(self) -> Axes:
    """The mesh axes of the output channels of convolution filters, which are gathered over `data`."""
    first = spec_axes(self.mdl)
    return axes_to_entry([*first, *(axis for axis in spec_axes(self.data) if axis not in first)])

  @property
  def table(self) -> SplitDimsMapping:
    return (self.mdl, self.data)


def set_sharding(
  config: Config[LmT],
  *,
  batch_axes: str | tuple[str, ...] | None = ('replica', 'data'),
  data_axis: str | tuple[str, ...] | None = 'data',
  mdl_axis: str | None = 'mdl',
  expert_axis: str | tuple[str, ...] | None = None,
  context_axis: str | None = None,
) -> Config[LmT]:
  """Sets the split mappings in the config of a model, in place, and returns it.

      activations of width D      batch over `batch_axes`
      other activations           also heads, hidden dims or classes over `mdl_axis` (tensor parallelism)
      weights                     heads, hidden dims or classes over `mdl_axis`, D over `data_axis` (fully sharded)
      weights of experts          experts over `expert_axis`, other dims as above, but without the axes in `expert_axis`

  The forward pass of a block then has two all-reduces over `mdl_axis` (Shoeybi et al., 2019), and gathers weights over
  `data_axis` before it uses them (Rajbhandari et al., 2020). Norms and learned positions are replicated.

  Args:
    config: the config of a `LanguageModel` or a `TransformerLm`, of an `EncoderDecoderModel` or its network, of a
      `MaskedLanguageModel`, a `SequenceClassifier`, a `TextEncoder` or their `TransformerEncoder`, of a
      `ClassificationModel` with a `VisionTransformer`, a `ResNet` or a `ConvNeXt`, a `DiffusionModel` or one of these
      networks, of a `MaskedAutoencoder`, of a `TwoTowerModel`, or of a `SpeechModel` or its `ConformerEncoder`.
    batch_axes, data_axis, mdl_axis: mesh or logical axes; None does not split.
    expert_axis: mesh or logical axes, often one of `batch_axes`, over which tokens are exchanged between experts; see
      `MoeFeedForward`. With None, each device computes all experts for its own tokens.
    context_axis: mesh axis that splits the length of all activations (context parallelism); None disables it.

  Raises:
    ConfigError: the config describes another kind of model.
  """
  _split(config, _Axes(batch_axes, data_axis, mdl_axis, expert_axis, context_axis))
  return config


def _split(config: Config, axes: _Axes) -> None:
  if is_a(config, TwoTowerModel):
    _split_towers(config, axes)
    return
  if is_a(config, (SpeechModel, ConformerEncoder)):
    _split_speech(config, axes)
    return
  network = find_network(config)
  if not is_a(network, _KINDS) and not hasattr(network, 'softmax_tpl'):
    name = getattr(target(config), '__name__', target(config))
    raise ConfigError(f'set_sharding: does not know how to split a {name}; set the mappings of its layers')
  for stack in stack_fields(network):
    for block in kinds_of_stack(getattr(network, stack)):
      _split_block(block, axes)
  if is_a(network, VisionTransformer):
    _split_vision_transformer(network, axes)
    if is_a(config, MaskedAutoencoder):
      _split_patch_decoder(config.patch_decoder_tpl, axes)
    _split_softmax(config, axes.weight, (axes.batch, axes.mdl))
  elif is_a(network, (ResNet, ConvNeXt)):
    (_split_resnet if is_a(network, ResNet) else _split_convnext)(network, axes)
    _split_softmax(config, axes.weight, (axes.batch, axes.mdl))
  elif is_a(network, DiffusionTransformer):
    _split_diffusion_transformer(network, axes)
  elif is_a(network, TransformerEncoder):
    _split_encoder(config, network, axes)
  else:
    _split_decoder(network, axes)


# ------------------------------------------------------------------ blocks


def _split_block(block: Config, axes: _Axes) -> None:
  block.activation_split_dims_mapping.out = axes.bld
  for name in ('attention_tpl', 'cross_attention_tpl'):
    attention = getattr(block, name, None)
    if attention is not None:
      _split_attention(attention, axes)
      attention.context_axis = axes.length
  if getattr(block, 'mixer_tpl', None) is not None:
    kind: Any = target(block.mixer_tpl)
    assert issubclass(kind, Mixer)
    kind.set_split(block.mixer_tpl, batch=axes.batch, length=axes.length, data=axes.data, mdl=axes.mdl)
  dense = block.ff_tpl
  if dense is not None and is_a(dense, MoeFeedForward):
    free = (_remove_axes(entry, spec_axes(axes.expert)) for entry in (axes.data, axes.mdl))
    dense.weight_split_dims_mapping.wt = (axes.expert, *free)
    dense.activation_split_dims_mapping.out = axes.bld
    dense.expert_axis = axes.expert
    dense = dense.shared_tpl
  if dense is not None:
    _split_feed_forward(dense, axes)


def _split_attention(attention: Config, axes: _Axes) -> None:
  attention.weight_split_dims_mapping.wt = (axes.data, axes.mdl, None)
  attention.activation_split_dims_mapping.set(blnh=axes.blnh, blkh=axes.blnh, out=axes.bld)


def _split_feed_forward(layer: Config, axes: _Axes) -> None:
  layer.weight_split_dims_mapping.wt = axes.weight
  layer.activation_split_dims_mapping.set(hidden=axes.blf, out=axes.bld)


def _remove_axes(axes: Axes, taken: tuple[str, ...]) -> Axes:
  """Returns the entry `axes` of a mapping without the mesh axes in `taken`."""
  return axes_to_entry([axis for axis in spec_axes(axes) if axis not in taken])


# ------------------------------------------------------------------ layers around the blocks


def _split_decoder(network: Config, axes: _Axes) -> None:
  """Splits the tables of a language model or an encoder-decoder, and the model's modules that predict later tokens."""
  network.activation_split_dims_mapping.out = axes.bld
  if (mtp := getattr(network, 'mtp_tpl', None)) is not None:
    mtp.module_tpl.join_tpl.weight_split_dims_mapping.wt = axes.weight
    mtp.module_tpl.join_tpl.activation_split_dims_mapping.out = axes.bld
    if mtp.block_tpl is not None:
      _split_block(mtp.block_tpl, axes)
  if getattr(network, 'relative_bias_tpl', None) is not None:
    network.relative_bias_tpl.weight_split_dims_mapping.wt = (None, axes.mdl)
    network.relative_bias_tpl.activation_split_dims_mapping.out = (None, axes.mdl, None, None)
  for name in ('embedding_tpl', 'decoder_embedding_tpl'):
    if getattr(network, name, None) is not None:
      getattr(network, name).weight_split_dims_mapping.wt = axes.table
      getattr(network, name).activation_split_dims_mapping.out = axes.bld
  if (stem := getattr(network, 'stem_tpl', None)) is not None:
    stem.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, axes.data)
    stem.conv_tpl.activation_split_dims_mapping.out = (axes.batch, None, None, None)
    stem.activation_split_dims_mapping.out = axes.bld
  softmax = network.softmax_tpl
  softmax.activation_split_dims_mapping.out = axes.blf
  if network.embedding_tpl is None:
    softmax.weight_split_dims_mapping.wt = axes.table
    softmax.activation_split_dims_mapping.emb = axes.bld
  else:
    softmax.weight_split_dims_mapping.wt = axes.weight


def _split_encoder(config: Config, network: Config, axes: _Axes) -> None:
  """Splits the tables of an encoder, and the head of the model."""
  network.activation_split_dims_mapping.out = axes.bld
  network.embedding_tpl.weight_split_dims_mapping.wt = axes.table
  of_table = network.embedding_tpl.activation_split_dims_mapping
  of_table.set(**({'emb': axes.bld, 'out': axes.blf} if hasattr(of_table, 'emb') else {'out': axes.bld}))
  for name in ('transform_tpl', 'pooler_tpl'):
    if getattr(config, name, None) is not None:
      getattr(config, name).linear_tpl.weight_split_dims_mapping.wt = axes.weight
  is_of_rows = hasattr(config, 'num_classes')
  _split_softmax(config, axes.weight, (axes.batch, axes.mdl) if is_of_rows else axes.blf)


def _split_vision_transformer(network: Config, axes: _Axes) -> None:
  network.activation_split_dims_mapping.set(states=axes.bld, out=(axes.batch, None))
  whole = axes._replace(length=None)
  network.patch_tpl.activation_split_dims_mapping.out = whole.bld
  network.patch_tpl.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, axes.data)
  network.patch_tpl.conv_tpl.activation_split_dims_mapping.out = (axes.batch, None, None, None)
  pooling = network.pooling_tpl
  pooling.activation_split_dims_mapping.out = (axes.batch, None)
  _split_attention(pooling.attention_tpl, whole)
  _split_feed_forward(pooling.ff_tpl, whole)
  if network.representation_tpl is not None:
    network.representation_tpl.linear_tpl.weight_split_dims_mapping.wt = axes.weight


def _split_patch_decoder(decoder: Config, axes: _Axes) -> None:
  _check_no_length(axes, 'a MaskedAutoencoder takes patches out of an image')
  for block in kinds_of_stack(decoder.transformer_tpl):
    _split_block(block, axes)
  decoder.activation_split_dims_mapping.set(states=axes.bld, out=axes.blf)
  decoder.embed_tpl.weight_split_dims_mapping.wt = decoder.pixels_tpl.weight_split_dims_mapping.wt = axes.weight
  decoder.embed_tpl.activation_split_dims_mapping.out = axes.bld
  decoder.pixels_tpl.activation_split_dims_mapping.out = axes.blf


def _split_resnet(network: Config, axes: _Axes) -> None:
  """Splits a ResNet: output channels over `mdl_axis`, filters also over `data_axis`."""
  _check_no_length(axes, 'a network of convolutions has convolutions over its image')
  channels = (axes.batch, None, None, axes.mdl)
  network.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, axes.filters)
  network.norm_tpl.weight_split_dims_mapping.wt = (axes.mdl,)
  for layer in (network.conv_tpl, network.norm_tpl, network.block_tpl, network.pooling_tpl):
    if layer is not None:
      layer.activation_split_dims_mapping.out = channels
  network.global_pooling_tpl.activation_split_dims_mapping.out = (axes.batch, axes.mdl)
  network.activation_split_dims_mapping.out = (axes.batch, None)


def _split_convnext(network: Config, axes: _Axes) -> None:
  """Splits a ConvNeXt: depthwise channels and hidden dims over `mdl_axis`, all weights also over `data_axis`."""
  _check_no_length(axes, 'a network of convolutions has convolutions over its image')
  whole, channels = (axes.batch, None, None, None), (axes.batch, None, None, axes.mdl)
  block = network.block_tpl
  for conv, out in ((network.conv_tpl, whole), (block.conv_tpl, channels)):
    conv.weight_split_dims_mapping.wt = (None, None, None, axes.filters)
    conv.activation_split_dims_mapping.out = out
  block.ff_tpl.weight_split_dims_mapping.wt = axes.weight
  block.ff_tpl.activation_split_dims_mapping.set(hidden=channels, out=whole)
  for layer in (network.norm_tpl, block.norm_tpl, block):
    layer.activation_split_dims_mapping.out = whole
  for layer in (network.global_pooling_tpl, network.final_norm_tpl, network):
    layer.activation_split_dims_mapping.out = (axes.batch, None)


def _check_no_length(axes: _Axes, why: str) -> None:
  if axes.length is not None:
    raise ConfigError(f'set_sharding: {why}, so no context_axis can split it')


def _split_diffusion_transformer(network: Config, axes: _Axes) -> None:
  network.activation_split_dims_mapping.out = axes.bld
  of_blocks = [block.modulation_tpl for block in kinds_of_stack(network.blocks_tpl)]
  for layer in (*of_blocks, network.modulation_tpl, network.time_tpl.linear_tpl):
    layer.weight_split_dims_mapping.wt = axes.weight
  network.patch_tpl.weight_split_dims_mapping.wt = network.class_tpl.weight_split_dims_mapping.wt = (None, axes.data)
  network.out_tpl.weight_split_dims_mapping.wt = (axes.data, None)


def _split_towers(config: Config, axes: _Axes) -> None:
  for tower in (config.image_tpl, config.text_tpl):
    _split(tower, axes)
  config.projection_tpl.weight_split_dims_mapping.wt = axes.weight
  config.projection_tpl.activation_split_dims_mapping.out = (axes.batch, None)
  config.loss_tpl.activation_split_dims_mapping.set(out=(axes.batch,), logits=(axes.batch, None))


def _split_speech(config: Config, axes: _Axes) -> None:
  """Splits a Conformer, and the other layers of the model."""
  _check_no_length(axes, 'a Conformer has convolutions over time')
  encoder = config if is_a(config, ConformerEncoder) else config.encoder_tpl
  encoder.activation_split_dims_mapping.out = axes.bld
  subsampling = encoder.subsampling_tpl
  subsampling.conv_tpl.weight_split_dims_mapping.wt = (None, None, None, axes.mdl)
  subsampling.conv_tpl.activation_split_dims_mapping.out = (axes.batch, None, None, axes.mdl)
  subsampling.proj_tpl.weight_split_dims_mapping.wt = axes.table
  subsampling.activation_split_dims_mapping.out = axes.bld
  for block in kinds_of_stack(encoder.stack_tpl):
    _split_attention(block.attention_tpl, axes)
    _split_feed_forward(block.ff_tpl, axes)
    convolution = block.conv_tpl
    convolution.weight_split_dims_mapping.wt = axes.weight
    convolution.depthwise_tpl.activation_split_dims_mapping.out = axes.blf
    convolution.norm_tpl.weight_split_dims_mapping.wt = (axes.mdl,)
    convolution.activation_split_dims_mapping.out = block.activation_split_dims_mapping.out = axes.bld
  _split_softmax(config, axes.weight, axes.blf)
  if is_a(config, TransducerModel):
    labels, joint = config.label_tpl, config.joint_tpl
    labels.embedding_tpl.weight_split_dims_mapping.wt = axes.table
    labels.embedding_tpl.activation_split_dims_mapping.out = labels.activation_split_dims_mapping.out = axes.bld
    Recurrent.set_split(labels.recurrent_tpl, batch=axes.batch, length=None, data=axes.data, mdl=axes.mdl)
    joint.proj_tpl.weight_split_dims_mapping.wt = joint.weight_split_dims_mapping.wt = axes.weight
    joint.activation_split_dims_mapping.set(
      out=(axes.batch, None, None, axes.mdl), hidden=(axes.batch, None, None, None)
    )


def _split_softmax(config: Config, wt: SplitDimsMapping, out: SplitDimsMapping) -> None:
  """Sets the mappings of the softmax of a model, if it has one."""
  if getattr(config, 'softmax_tpl', None) is not None:
    config.softmax_tpl.weight_split_dims_mapping.wt = wt
    config.softmax_tpl.activation_split_dims_mapping.out = out
