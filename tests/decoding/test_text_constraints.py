"""Constraints: whatever a model likes, each continuation matches the expression or the schema, in each row and beam."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

pytest.importorskip('llguidance', reason='needs llguidance: pip install praxis_lite[constrain]')
pytest.importorskip('jsonschema', reason='needs jsonschema, which is a package for developers')

import jsonschema

from praxis_lite.common.config import Config
from praxis_lite.common.errors import ConfigError, DataError, UserError
from praxis_lite.inputs import BaseTokenizer, ByteTokenizer, CharTokenizer
from praxis_lite.models.decoding import BeamSearch, Sampler
from praxis_lite.runs import constraints
from praxis_lite.runs.constraints import json_constraint, make_constraint, regex_constraint

BYTES = Config(ByteTokenizer, bos_id=256, eos_id=257, pad_id=258).instantiate()
CHARACTERS = Config(CharTokenizer, vocabulary='0123456789abcé-: ').instantiate()
SCHEMA = {
  'type': 'object',
  'properties': {
    'kind': {'enum': ['cat', 'dög']},
    'age': {'type': 'integer', 'minimum': 0, 'maximum': 30},
    'tags': {'type': 'array', 'items': {'type': 'boolean'}, 'maxItems': 2},
  },
  'required': ['kind', 'age', 'tags'],
  'additionalProperties': False,
}
PROMPTS, LENGTHS = np.array([[97, 98], [99, 0], [0, 0]], np.int32), np.array([2, 1, 0], np.int32)


class RandomModel:
  """Logits that depend on the last token and its position, as `seed` draws them."""

  max_positions = None

  def __init__(self, vocab_size, seed):
    self.table_VV = jax.random.normal(jax.random.key(seed), (vocab_size, vocab_size)) * 3

  def start(self, num_rows, num_slots):
    return jnp.zeros((num_rows, 1))

  def extend(self, ids_BT, pos_BT, last_B, state):
    last_B1, pos_B1 = (jnp.take_along_axis(x, last_B[:, None], axis=1) for x in (ids_BT, pos_BT))
    return self.table_VV[last_B1[:, 0]] * jnp.cos(1.0 + pos_B1), state


def continuations(constraint, tokenizer, seeds=(0,), decoder=Sampler, **fields):
  """The texts of the rows that are no filler, for each model; each also says whether it was complete."""
  settings = {'max_decode_steps': 60, 'logit_processors': (constraint,), **fields}
  config = Config(decoder, **settings).instantiate()
  ids = np.minimum(PROMPTS, tokenizer.vocab_size - 2)

  @jax.jit
  def run(seed):
    model = RandomModel(tokenizer.vocab_size + 3, seed)  # The model has tokens that the tokenizer lacks.
    return config.decode(model, ids, LENGTHS, jax.random.key(seed))

  found = []
  for seed in seeds:
    decoded = jax.tree.map(np.asarray, run(seed))
    assert decoded.lengths[2] == 0
    rows = decoded.ids[:2, None] if decoder is Sampler else decoded.beam_ids[:2]
    lengths = decoded.lengths[:2, None] if decoder is Sampler else decoded.beam_lengths[:2]
    tokens = [row[:n].tolist() for rows, ns in zip(rows, lengths) for row, n in zip(rows, ns) if n]
    found += [(tokenizer.decode(row), constraint.is_match(row)) for row in tokens]
  return found


REGEXES = [r'[0-9]{3}-[0-9]{2}', r'(a|bc)+: ?[0-9]{1,4}', r'é?a*', r'[^0-9]{0,5}7']


@pytest.mark.slow_cases
@pytest.mark.parametrize('regex', REGEXES)
@pytest.mark.parametrize('tokenizer', [BYTES, CHARACTERS], ids=['bytes', 'characters'])
def test_every_continuation_matches_the_expression(regex, tokenizer):
  found = continuations(regex_constraint(tokenizer, regex), tokenizer, range(12))
  complete = [text for text, is_complete in found if is_complete]
  assert len(complete) >= len(found) - 2 and len({*complete}) > (2 if '*' not in regex else 1)
  for text in complete:
    assert re.fullmatch(regex, text), text
  for text, is_complete in found:
    assert is_complete or len(text) > 20, 'only what has reached max_tokens'


def test_every_continuation_is_json_of_the_schema():
  found = continuations(json_constraint(BYTES, SCHEMA), BYTES, range(12))
  assert all(is_complete for _, is_complete in found)
  for text, _ in found:
    jsonschema.validate(json.loads(text), SCHEMA)
  assert len({text for text, _ in found}) > 12


@pytest.mark.parametrize('fields', [{}, {'early_stopping': True, 'length_penalty': 0.0}], ids=str)
def test_every_beam_matches(fields):
  constraint = regex_constraint(CHARACTERS, r'(a|bc){1,3}-\d{2}')
  found = continuations(constraint, CHARACTERS, range(3), BeamSearch, beam_size=3, num_best=3, **fields)
  assert len(found) == 18 and len({text for text, _ in found}) > 9
  for text, is_complete in found:
    assert is_complete and re.fullmatch(r'(a|bc){1,3}-\d{2}', text), text


def test_beams_find_the_most_probable_match():
  """All texts of a small language, scored by hand."""
  constraint = regex_constraint(CHARACTERS, r'[ab]{2}')
  model = RandomModel(CHARACTERS.vocab_size, 5)
  decoder = Config(BeamSearch, beam_size=4, max_decode_steps=5, length_penalty=0.0, stop_ids=(constraint.eos_id,))
  search = decoder.set(logit_processors=(constraint,)).instantiate()
  decoded = jax.jit(lambda ids, lengths: search.decode(model, ids, lengths))(np.array([[3]]), np.array([1]))

  table_VV = np.asarray(model.table_VV)

  def score(text):
    total, last, eos = 0.0, 3, constraint.eos_id
    for position, token in enumerate([*CHARACTERS.encode(text), eos]):
      logits_V = table_VV[last] * np.cos(1.0 + position)
      total += logits_V[token] - np.log(np.exp(logits_V).sum())
      last = token
    return total

  best = max(('aa', 'ab', 'ba', 'bb'), key=score)
  assert CHARACTERS.decode(np.asarray(decoded.ids[0])[: int(decoded.lengths[0])]) == best
  np.testing.assert_allclose(decoded.beam_scores[0, 0], score(best), rtol=1e-4)


def test_with_penalties_and_a_least_number_of_tokens_the_constraint_wins():
  constraint = regex_constraint(CHARACTERS, 'ab')
  fields = {'no_repeat_ngram_size': 1, 'min_decode_steps': 9, 'repetition_penalty': 3.0}
  assert continuations(constraint, CHARACTERS, range(2), **fields) == [('ab', True)] * 4


def test_max_tokens_cuts_a_text_which_is_told():
  constraint = regex_constraint(CHARACTERS, r'\d{9}')
  found = continuations(constraint, CHARACTERS, max_decode_steps=4)
  assert [(len(text), is_complete) for text, is_complete in found] == [(4, False)] * 2
  assert constraint.is_match(CHARACTERS.encode('123456789'))
  assert constraint.is_match([*CHARACTERS.encode('123456789'), constraint.eos_id])
  assert not constraint.is_match(CHARACTERS.encode('12345678a'))


def test_on_a_mesh_the_tokens_are_the_same():
  constraint = regex_constraint(CHARACTERS, r'(\d|[abc]){4}-\d*')
  sampler = Config(Sampler, max_decode_steps=8, stop_ids=(constraint.eos_id,), logit_processors=(constraint,))
  model, sampler = RandomModel(CHARACTERS.vocab_size, 1), sampler.instantiate()
  run = jax.jit(lambda ids, lengths: sampler.decode(model, ids, lengths, jax.random.key(0)).ids)
  ids, lengths = np.tile(np.arange(6, dtype=np.int32)[:, None], (1, 2)), np.full(6, 2, np.int32)
  mesh = jax.make_mesh((2, 3), ('data', 'unused'), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:6])
  split = [jax.device_put(x, NamedSharding(mesh, PartitionSpec('data'))) for x in (ids, lengths)]
  np.testing.assert_array_equal(run(*split), run(ids, lengths))


# ---------------------------------------------------------------- errors


class Opaque(BaseTokenizer):
  vocab_size = 4
  special_ids = (0, 1, 2)


WRONG = [
  (lambda: regex_constraint(BYTES, '[0-9'), ConfigError, r"^regex='\[0-9': unclosed character class$"),
  (lambda: regex_constraint(BYTES, ''), ConfigError, r'expected a regular expression, such as \[0-9\]\+'),
  (lambda: regex_constraint(None, 'a'), UserError, r'^regex: needs a dataset with a tokenizer'),
  (lambda: regex_constraint(Config(Opaque).instantiate(), 'a'), ConfigError, 'Opaque does not know which bytes'),
  (lambda: json_constraint(BYTES, [1]), ConfigError, r'json_schema: expected a JSON schema, which is an object'),
  (lambda: json_constraint(BYTES, {'type': 'strin'}), ConfigError, r'^json_schema: '),
  (lambda: json_constraint(BYTES, '{"type": "integer"}'), ConfigError, r'^json_schema: expected the path of a file'),
  (lambda: json_constraint(BYTES, 'none.json'), DataError, r'^json_schema=none\.json: No such file'),
  (lambda: make_constraint(BYTES, 'a', {}, '--'), ConfigError, r'^--regex and --json_schema cannot be combined'),
]  # fmt: skip


@pytest.mark.parametrize('make, kind, message', WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_told_in_a_line(make, kind, message):
  with pytest.raises(kind, match=message) as raised:
    make()
  assert '\n' not in str(raised.value)


def test_a_file_that_is_no_json(tmp_path):
  (tmp_path / 'a.json').write_text('{')
  with pytest.raises(DataError, match=r'a\.json: not JSON: '):
    json_constraint(BYTES, tmp_path / 'a.json')
  (tmp_path / 'a.json').write_text('')
  with pytest.raises(DataError, match=r'a\.json: is empty$'):
    json_constraint(BYTES, tmp_path / 'a.json')


def test_a_package_that_is_not_installed_is_told(monkeypatch):
  constraints._llguidance.cache_clear()
  monkeypatch.setitem(__import__('sys').modules, 'llguidance', None)
  with pytest.raises(ConfigError, match=r'llguidance is not installed; pip install praxis_lite\[constrain\]'):
    regex_constraint(BYTES, 'a')
  monkeypatch.undo()
  constraints._llguidance.cache_clear()
