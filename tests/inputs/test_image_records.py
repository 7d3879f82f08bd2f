"""Images from records: pixels against NumPy, random crops and operations by seed and epoch, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError
from praxis_lite.inputs import ImageRecordInput, write_tfrecords
from praxis_lite.inputs.tf_example import serialized_examples

HEIGHT, WIDTH = 6, 8


def pixels(number, channels=3, height=HEIGHT, width=WIDTH):
  return np.random.default_rng(number).integers(0, 256, (height, width, channels)).astype(np.uint8)


def png(image):
  import tensorflow as tf

  return tf.io.encode_png(image).numpy()


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  path = str(tmp_path_factory.mktemp('images') / 'a.tfrecord')
  write_tfrecords(path, {'image': [png(pixels(i)) for i in range(5)], 'label': np.arange(5) + 1})
  return path


def config(path, **fields):
  fields = {'image_size': (HEIGHT, WIDTH), 'batch_size': 5, 'first_label': 1, **fields}
  return Config(ImageRecordInput, name='images', file_pattern=path, **fields)


def images(path, **fields):
  return config(path, **fields).instantiate().get_next()['image']


def to_bytes(image):
  return np.rint((image + 1) * 127.5).astype(np.uint8)


def test_evaluation_gives_the_middle_of_the_images_in_order(path):
  batch = config(path, resize_to=HEIGHT, batch_size=4).instantiate().get_next()
  assert batch['image'].dtype == np.float32 and batch['label'].tolist() == [0, 1, 2, 3]
  for i, image in enumerate(batch['image']):
    np.testing.assert_allclose(image, pixels(i) / 127.5 - 1, atol=1e-6)
  middle = images(path, image_size=(5, 6), resize_to=HEIGHT)
  np.testing.assert_array_equal(to_bytes(middle), [pixels(i)[:5, 1:7] for i in range(5)])
  scaled = images(path, resize_to=HEIGHT, mean=(0.1, 0.2, 0.3), std=(1, 2, 4))
  np.testing.assert_allclose(scaled[2], (pixels(2) / 255 - [0.1, 0.2, 0.3]) / [1, 2, 4], atol=1e-6)


def test_the_shorter_side_is_resized_and_small_images_are_enlarged(path):
  # Twice the size, linear between the middles of pixels: 0.75 of the nearest one and 0.25 of the next.
  large = to_bytes(images(path, image_size=(2 * HEIGHT, 2 * WIDTH), resize_to=2 * HEIGHT))[0].astype(float)
  padded = np.pad(pixels(0).astype(float), ((1, 1), (1, 1), (0, 0)), mode='edge')
  near, before = padded[1:-1], padded[:-2]
  rows = 0.75 * near + 0.25 * before
  expected = 0.75 * rows[:, 1:-1] + 0.25 * rows[:, :-2]
  np.testing.assert_allclose(large[::2, ::2], expected, atol=1)
  wide = images(path, image_size=(HEIGHT, 2 * WIDTH), resize_to=HEIGHT)  # 8 pixels are enlarged to 16.
  assert wide.shape == (5, HEIGHT, 2 * WIDTH, 3)


def test_gray_images_and_jpegs(tmp_path):
  import tensorflow as tf

  gray, smooth = pixels(0, channels=1), np.full((8, 8, 3), 90, np.uint8)
  write_tfrecords(str(tmp_path / 'a'), {'x': [png(gray), tf.io.encode_jpeg(smooth).numpy()]})
  fields = {'image_feature': 'x', 'label_feature': None, 'resize_to': HEIGHT, 'image_size': (HEIGHT, HEIGHT)}
  batch = config(str(tmp_path / 'a'), batch_size=2, **fields).instantiate().get_next()
  assert sorted(batch) == ['image', 'weights']
  found = to_bytes(batch['image'])
  np.testing.assert_array_equal(found[0], np.repeat(gray[:, 1:7], 3, axis=-1))
  np.testing.assert_allclose(found[1], 90, atol=1)
  single = images(str(tmp_path / 'a'), channels=1, batch_size=2, **fields)
  np.testing.assert_array_equal(to_bytes(single[0]), gray[:, 1:7])


@pytest.mark.slow
def test_crops_and_flips_are_drawn_by_seed_epoch_and_image(path):
  fields = {'is_training': True, 'shuffle': False, 'crop_area': (1.0, 1.0), 'crop_aspect': (WIDTH / HEIGHT,) * 2}
  stream = config(path, **fields).instantiate()
  whole = [pixels(i) for i in range(5)]
  flips = []
  for _ in range(4):
    for image, original in zip(to_bytes(stream.get_next()['image']), whole):
      is_flipped = np.array_equal(image, original[:, ::-1])
      assert is_flipped or np.array_equal(image, original)
      flips.append(is_flipped)
  assert 3 < sum(flips) < 17
  assert len({tuple(flips[i : i + 5]) for i in range(0, 20, 5)}) > 1  # Each epoch draws its own.
  np.testing.assert_array_equal(to_bytes(images(path, **fields, flip=False)), whole)
  random = {**fields, 'crop_area': (0.2, 0.5), 'rand_augment': (1, 10)}
  first = images(path, **random)
  np.testing.assert_array_equal(first, images(path, **random))
  np.testing.assert_array_equal(first[:2], images(path, **random, batch_size=2))
  assert not np.array_equal(first, images(path, **random, seed=1))


@pytest.mark.slow
def test_a_crop_is_a_part_of_the_image(tmp_path):
  """An image whose pixels say where they are: channel 0 grows with the row, channel 1 with the column."""
  rows, columns = np.mgrid[0:40, 0:60]
  place = np.stack([6 * rows, 4 * columns, 0 * rows], -1).astype(np.uint8)
  write_tfrecords(str(tmp_path / 'a'), {'image': [png(place)], 'label': [1]})
  fields = {'is_training': True, 'flip': False, 'batch_size': 1, 'image_size': (20, 20), 'crop_area': (0.1, 0.4)}
  stream = config(str(tmp_path / 'a'), **fields).instantiate()
  areas = []
  for _ in range(12):
    image = to_bytes(stream.get_next()['image'][0]).astype(float)
    height, width = np.ptp(image[..., 0]) / 6 + 1, np.ptp(image[..., 1]) / 4 + 1
    areas.append(height * width / 2400)
    assert 0.5 < width / height < 2
    assert np.ptp(image[..., 0], axis=1).max() <= 1 and np.ptp(image[..., 1], axis=0).max() <= 1  # Not turned.
  assert 0.05 < min(areas) < max(areas) < 0.45 and np.ptp(areas) > 0.05


def test_bad_images_are_named_or_left_out(tmp_path):
  good = png(pixels(0))
  write_tfrecords(str(tmp_path / 'a'), {'image': [good, good[:30], b'text', good], 'label': [1, 2, 3, 4]})
  with pytest.raises(DataError, match=r'images: a record cannot be parsed.*\(record 1 of .*a\)'):
    images(str(tmp_path / 'a'))
  skipping = config(str(tmp_path / 'a'), on_bad_record='skip', resize_to=HEIGHT).instantiate()
  assert skipping.get_next()['label'][:2].tolist() == [0, 3] and len(skipping.bad_records) == 2
  with pytest.raises(DataError, match='images: a record cannot be parsed'):
    images(str(tmp_path / 'a'), image_feature='picture')


@pytest.mark.parametrize(
  'fields, says',
  [
    ({'image_size': 8}, r'image_size: expected tuple\[int, int\], got 8'),
    ({'image_size': (8, 0)}, r'images\.image_size: expected \(height, width\) in pixels, got \(8, 0\)'),
    ({'channels': 4}, r'images\.channels: expected 3, or 1 for gray images, got 4'),
    ({'resize_to': 3}, r'images\.resize_to: expected an integer of at least 6, got 3'),
    ({'crop_area': (0.0, 1.0)}, r'images\.crop_area: expected a smallest and a largest value above 0 up to 1'),
    ({'crop_aspect': (2, 1)}, r'images\.crop_aspect: expected a smallest and a largest value above 0$'),
    ({'rand_augment': (0, 10)}, r'images\.rand_augment\[0\]: expected at least 1, got 0'),
    ({'mean': (0.5, 0.5)}, r'images\.mean: expected one value for all channels, or one for each of 3'),
    ({'std': (0,)}, r'images\.std: expected values above 0'),
    ({'features': {}}, r'images: leave out features and parse_fn'),
  ],
)
def test_mistakes_are_named(fields, says):
  with pytest.raises(ConfigError, match=says):
    config('none', **fields).instantiate()


# ------------------------------------------------------------------ RandAugment


def test_operations_of_rand_augment_are_those_of_numpy():
  import tensorflow as tf

  from praxis_lite.inputs import rand_augment as module

  image = pixels(7)
  place = tf.constant([0.5, 0.5])

  def run(name, strength=1.0, sign=1.0, image=image):
    return getattr(module, f'_{name}')(tf.constant(image), module.Draw(strength, tf.constant(sign), place)).numpy()

  x = image.astype(float)
  low, high = x.min((0, 1)), x.max((0, 1))
  np.testing.assert_allclose(run('auto_contrast'), (x - low) * 255 / (high - low), atol=1)
  np.testing.assert_array_equal(run('auto_contrast', image=np.full_like(image, 9)), np.full_like(image, 9))
  np.testing.assert_array_equal(run('invert'), 255 - image)
  np.testing.assert_array_equal(run('posterize'), image // 16 * 16)
  np.testing.assert_array_equal(run('solarize', 0.5), np.where(image < 128, image, 255 - image))
  np.testing.assert_array_equal(run('solarize', 0.0), image)
  np.testing.assert_array_equal(run('solarize_add', 0.5), np.where(image < 128, image + 55, image))
  np.testing.assert_allclose(run('brightness', 1.0, -1.0), 0.1 * x, atol=1)
  gray = x @ [0.2989, 0.587, 0.114]
  np.testing.assert_allclose(run('color', 1.0, -1.0), gray[..., None] + 0.1 * (x - gray[..., None]), atol=2)
  np.testing.assert_allclose(run('contrast', 1.0, -1.0), gray.mean() + 0.1 * (x - gray.mean()), atol=2)
  inner = sum(x[1 + i : HEIGHT - 1 + i, 1 + j : WIDTH - 1 + j] for i in (-1, 0, 1) for j in (-1, 0, 1))
  smooth = x.copy()
  smooth[1:-1, 1:-1] = (inner + 4 * x[1:-1, 1:-1]) / 13
  np.testing.assert_allclose(run('sharpness', 1.0, -1.0), smooth + 0.1 * (x - smooth), atol=1)
  # Without an amount, these change nothing; two values are equalized to the ends.
  for name in ('rotate', 'shear_x', 'shear_y', 'translate_x', 'translate_y', 'color', 'contrast', 'sharpness'):
    np.testing.assert_array_equal(run(name, 0.0), image)
  two = np.where(np.arange(8)[None, :, None] < 4, 10, 200) * np.ones((6, 1, 3))
  np.testing.assert_array_equal(run('equalize', image=two.astype(np.uint8)), np.where(two == 10, 0, 255))
  np.testing.assert_array_equal(run('equalize', image=np.full_like(image, 9)), np.full_like(image, 9))
  # A move by whole pixels, a turn of a square by a right angle, and a square of gray.
  columns = 3
  moved = run('translate_x', columns / 0.45 / (WIDTH - 1))
  np.testing.assert_array_equal(moved[:, :-columns], image[:, columns:])
  assert (moved[:, -columns:] == 128).all()
  square = pixels(8, height=5, width=5)
  np.testing.assert_array_equal(run('rotate', 3.0, image=square), np.rot90(square))
  cut = run('cutout', 0.5 / 0.36, image=np.zeros((8, 8, 3), np.uint8))
  np.testing.assert_array_equal(np.argwhere(cut[..., 0] == 128), [[i, j] for i in (3, 4, 5) for j in (3, 4, 5)])


@pytest.mark.parametrize('texts', [['a', 'bc', 'é\0'], np.array(['a', 'bc', 'é']), [b'a', 'bc', b'']])
def test_columns_of_texts_are_stored_as_utf8(texts):
  encoded = [x.encode() if isinstance(x, str) else x for x in texts]
  assert list(serialized_examples({'x': texts})) == list(serialized_examples({'x': encoded}))


@pytest.mark.parametrize('values', [[None, 'a'], [[1], [1, 2]], ['a', 1], [1j]])
def test_columns_of_other_values_are_named(values):
  with pytest.raises(DataError, match='x: expected numbers of one shape for all examples, bytes, or texts'):
    list(serialized_examples({'x': values}))
