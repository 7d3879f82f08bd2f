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
    # Caches have this mapping, too, so the length is not split; in training, attention splits it by `context_axis`.
    return (self.batch, None, self.mdl, None)

  @property
  def weight(self) -> SplitDimsMapping:
    """The mapping of weights [D, F] whose columns are split."""
    return (self.data, self.mdl)

  @property
  def filters(self) -> Axes:
    """The mesh axes that split the output channels of filters: those of `mdl`, and then those of `data`."""
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
    config: the config of a `LanguageModel`, an `EncoderDecoderModel`, a `MaskedLanguageModel`, a `SequenceClassifier`,
      a `TextEncoder`, a `DiffusionModel`, a `MaskedAutoencoder`, a `TwoTowerModel`, a `SpeechModel`, or a
      `ClassificationModel` with a `VisionTransformer`, a `ResNet` or a `ConvNeXt`. Except for a `TwoTowerModel`, it may
      also be the config of the model's network, such as a `TransformerLm` or a `ConformerEncoder`.
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


def _set(layer: Config, wt: SplitDimsMapping = None, **activations: SplitDimsMapping) -> None:
  """Sets the mapping `wt` of the weights of a layer, unless it is None, and mappings of its activations by name."""
  if wt is not None:
    layer.weight_split_dims_mapping.wt = wt
  if activations:
    layer.activation_split_dims_mapping.set(**activations)


# ------------------------------------------------------------------ blocks


def _split_block(block: Config, axes: _Axes) -> None:
  _set(block, out=axes.bld)
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
    taken = spec_axes(axes.expert)
    free = (axes_to_entry([axis for axis in spec_axes(entry) if axis not in taken]) for entry in (axes.data, axes.mdl))
    _set(dense, (axes.expert, *free), out=axes.bld)
    dense.expert_axis = axes.expert
    dense = dense.shared_tpl
  if dense is not None:
    _split_feed_forward(dense, axes)


def _split_attention(attention: Config, axes: _Axes) -> None:
  _set(attention, (axes.data, axes.mdl, None), blnh=axes.blnh, blkh=axes.blnh, out=axes.bld)


def _split_feed_forward(layer: Config, axes: _Axes) -> None:
  _set(layer, axes.weight, hidden=axes.blf, out=axes.bld)


# ------------------------------------------------------------------ layers around the blocks


def _split_decoder(network: Config, axes: _Axes) -> None:
  """Splits the tables of a language model or an encoder-decoder, and the model's modules that predict later tokens."""
  _set(network, out=axes.bld)
  if (mtp := getattr(network, 'mtp_tpl', None)) is not None:
    _set(mtp.module_tpl.join_tpl, axes.weight, out=axes.bld)
    if mtp.block_tpl is not None:
      _split_block(mtp.block_tpl, axes)
  if (bias := getattr(network, 'relative_bias_tpl', None)) is not None:
    _set(bias, (None, axes.mdl), out=(None, axes.mdl, None, None))
  for name in ('embedding_tpl', 'decoder_embedding_tpl'):
    if (embedding := getattr(network, name, None)) is not None:
      _set(embedding, axes.table, out=axes.bld)
  if (stem := getattr(network, 'stem_tpl', None)) is not None:
    _set(stem.conv_tpl, (None, None, None, axes.data), out=(axes.batch, None, None, None))
    _set(stem, out=axes.bld)
  if network.embedding_tpl is None:
    _set(network.softmax_tpl, axes.table, emb=axes.bld, out=axes.blf)
  else:
    _set(network.softmax_tpl, axes.weight, out=axes.blf)


def _split_encoder(config: Config, network: Config, axes: _Axes) -> None:
  """Splits the tables of an encoder, and the head of the model."""
  _set(network, out=axes.bld)
  is_softmax = hasattr(network.embedding_tpl.activation_split_dims_mapping, 'emb')
  _set(network.embedding_tpl, axes.table, **({'emb': axes.bld, 'out': axes.blf} if is_softmax else {'out': axes.bld}))
  for name in ('transform_tpl', 'pooler_tpl'):
    if (head := getattr(config, name, None)) is not None:
      _set(head.linear_tpl, axes.weight)
  is_of_rows = hasattr(config, 'num_classes')
  _split_softmax(config, axes.weight, (axes.batch, axes.mdl) if is_of_rows else axes.blf)


def _split_vision_transformer(network: Config, axes: _Axes) -> None:
  whole = axes._replace(length=None)
  _set(network, states=axes.bld, out=(axes.batch, None))
  _set(network.patch_tpl, out=whole.bld)
  _set(network.patch_tpl.conv_tpl, (None, None, None, axes.data), out=(axes.batch, None, None, None))
  _set(network.pooling_tpl, out=(axes.batch, None))
  _split_attention(network.pooling_tpl.attention_tpl, whole)
  _split_feed_forward(network.pooling_tpl.ff_tpl, whole)
  if network.representation_tpl is not None:
    _set(network.representation_tpl.linear_tpl, axes.weight)


def _split_patch_decoder(decoder: Config, axes: _Axes) -> None:
  _check_no_length(axes, 'a MaskedAutoencoder takes patches out of an image')
  for block in kinds_of_stack(decoder.transformer_tpl):
    _split_block(block, axes)
  _set(decoder, states=axes.bld, out=axes.blf)
  _set(decoder.embed_tpl, axes.weight, out=axes.bld)
  _set(decoder.pixels_tpl, axes.weight, out=axes.blf)


def _split_resnet(network: Config, axes: _Axes) -> None:
  """Splits a ResNet: output channels over `mdl_axis`, filters also over `data_axis`."""
  _check_no_length(axes, 'a network of convolutions has convolutions over its image')
  channels = (axes.batch, None, None, axes.mdl)
  _set(network.conv_tpl, (None, None, None, axes.filters), out=channels)
  _set(network.norm_tpl, (axes.mdl,), out=channels)
  for layer in (network.block_tpl, network.pooling_tpl):
    if layer is not None:
      _set(layer, out=channels)
  _set(network.global_pooling_tpl, out=(axes.batch, axes.mdl))
  _set(network, out=(axes.batch, None))


def _split_convnext(network: Config, axes: _Axes) -> None:
  """Splits a ConvNeXt: depthwise channels and hidden dims over `mdl_axis`, all weights also over `data_axis`."""
  _check_no_length(axes, 'a network of convolutions has convolutions over its image')
  whole, channels = (axes.batch, None, None, None), (axes.batch, None, None, axes.mdl)
  block = network.block_tpl
  _set(network.conv_tpl, (None, None, None, axes.filters), out=whole)
  _set(block.conv_tpl, (None, None, None, axes.filters), out=channels)
  _set(block.ff_tpl, axes.weight, hidden=channels, out=whole)
  for layer in (network.norm_tpl, block.norm_tpl, block):
    _set(layer, out=whole)
  for layer in (network.global_pooling_tpl, network.final_norm_tpl, network):
    _set(layer, out=(axes.batch, None))


def _check_no_length(axes: _Axes, why: str) -> None:
  if axes.length is not None:
    raise ConfigError(f'set_sharding: {why}, so no context_axis can split it')


def _split_diffusion_transformer(network: Config, axes: _Axes) -> None:
  _set(network, out=axes.bld)
  of_blocks = [block.modulation_tpl for block in kinds_of_stack(network.blocks_tpl)]
  for layer in (*of_blocks, network.modulation_tpl, network.time_tpl.linear_tpl):
    _set(layer, axes.weight)
  _set(network.patch_tpl, (None, axes.data))
  _set(network.class_tpl, (None, axes.data))
  _set(network.out_tpl, (axes.data, None))


def _split_towers(config: Config, axes: _Axes) -> None:
  for tower in (config.image_tpl, config.text_tpl):
    _split(tower, axes)
  _set(config.projection_tpl, axes.weight, out=(axes.batch, None))
  _set(config.loss_tpl, out=(axes.batch,), logits=(axes.batch, None))


def _split_speech(config: Config, axes: _Axes) -> None:
  """Splits a Conformer and, if `config` configures a whole model, the model's other layers."""
  _check_no_length(axes, 'a Conformer has convolutions over time')
  encoder = config if is_a(config, ConformerEncoder) else config.encoder_tpl
  subsampling = encoder.subsampling_tpl
  _set(encoder, out=axes.bld)
  _set(subsampling.conv_tpl, (None, None, None, axes.mdl), out=(axes.batch, None, None, axes.mdl))
  _set(subsampling.proj_tpl, axes.table)
  _set(subsampling, out=axes.bld)
  for block in kinds_of_stack(encoder.stack_tpl):
    _split_attention(block.attention_tpl, axes)
    _split_feed_forward(block.ff_tpl, axes)
    _set(block.conv_tpl, axes.weight, out=axes.bld)
    _set(block.conv_tpl.depthwise_tpl, out=axes.blf)
    _set(block.conv_tpl.norm_tpl, (axes.mdl,))
    _set(block, out=axes.bld)
  _split_softmax(config, axes.weight, axes.blf)
  if is_a(config, TransducerModel):
    labels, joint = config.label_tpl, config.joint_tpl
    _set(labels, out=axes.bld)
    _set(labels.embedding_tpl, axes.table, out=axes.bld)
    Recurrent.set_split(labels.recurrent_tpl, batch=axes.batch, length=None, data=axes.data, mdl=axes.mdl)
    _set(joint, axes.weight, out=(axes.batch, None, None, axes.mdl), hidden=(axes.batch, None, None, None))
    _set(joint.proj_tpl, axes.weight)


def _split_softmax(config: Config, wt: SplitDimsMapping, out: SplitDimsMapping) -> None:
  """Sets the mappings of the softmax of a model, if it has one."""
  if getattr(config, 'softmax_tpl', None) is not None:
    _set(config.softmax_tpl, wt, out=out)
