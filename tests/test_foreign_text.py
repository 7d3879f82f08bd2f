"""Text of others is shown and not acted on; passwords are left out of what is printed and recorded."""

from __future__ import annotations

import io

import pytest

from praxis_lite.common.foreign_text import (
  PrintableStream,
  has_lost_secret,
  is_secret,
  printable,
  remove_secrets,
  remove_secrets_of_argument,
  unfiltered_stream,
)


@pytest.mark.parametrize(
  'text, shown',
  [
    ('a\x1b[2Jb', 'a\\x1b[2Jb'),
    ('\x9b31m', '\\x9b31m'),  # The same in one character.
    ('\x1b]52;c;ZXZpbA==\x07', '\\x1b]52;c;ZXZpbA==\\x07'),
    ('a\rb\x08\x7f\x00', 'a\\rb\\x08\\x7f\\x00'),
    ('abc\u202edcba', 'abc\\u202edcba'),
    ('a\u200bb', 'a\\u200bb'),
    ('\udc80', '\\udc80'),  # A byte of a file's name that is no UTF-8.
    ('naïve 層 д\u3000ж\u00a0ф 🙂', 'naïve 層 д\u3000ж\u00a0ф 🙂'),
    ('two\nlines\tand a tab', 'two\nlines\tand a tab'),
    ('', ''),
  ],
)
def test_what_a_terminal_would_act_on_is_shown(text, shown):
  assert printable(text) == shown
  stream = io.StringIO()
  print(text, file=PrintableStream(stream))
  assert stream.getvalue() == f'{shown}\n'


def test_a_line_stays_one():
  assert printable('a\nb\tc', one_line=True) == 'a\\nb\\tc'


def test_a_stream_is_what_it_was_but_for_its_text():
  stream = io.StringIO()
  filtered = PrintableStream(stream)
  assert not filtered.isatty() and unfiltered_stream(filtered) is stream and unfiltered_stream(stream) is stream
  filtered.writelines(['a\x1b', 'b'])
  assert filtered.write('\x1b\x1b') == 2
  assert stream.getvalue() == 'a\\x1bb\\x1b\\x1b'


@pytest.mark.parametrize(
  'text, shown',
  [
    ('s3://user:geheim@bucket/runs', 's3://user:***@bucket/runs'),
    ('https://u:p/a@s:s@host:8080/x', 'https://u:***@host:8080/x'),
    ('https://ghp_abc@host/x', 'https://***@host/x'),
    ("error in 'http://a:b@c/d' and 'ftp://e:f@g'", "error in 'http://a:***@c/d' and 'ftp://e:***@g'"),
    ('https://host/x?token=abc&step=3#t', 'https://host/x?token=***&step=3#t'),
    (
      'https://h/x?a=1&X-Amz-Signature=0f&X-Amz-Credential=k%2F1',
      'https://h/x?a=1&X-Amz-Signature=***&X-Amz-Credential=***',
    ),
    ('az://c/x?sv=2&sig=ab%3D', 'az://c/x?sv=2&sig=***'),
    ('simplecache::s3://k:s@b/x', 'simplecache::s3://k:***@b/x'),
    # These are no secrets.
    ('s3://bucket/runs', 's3://bucket/runs'),
    ('http://localhost:9000/a@b', 'http://localhost:9000/a@b'),
    ('abfs://container@account.dfs.core.windows.net/x', 'abfs://container@account.dfs.core.windows.net/x'),
    ('ssh://git@host/x', 'ssh://git@host/x'),
    ('https://host/x?tokenizer=a&step=1', 'https://host/x?tokenizer=a&step=1'),
    ('a@b: c=d', 'a@b: c=d'),
    ('', ''),
  ],
)
def test_passwords_of_urls_are_left_out(text, shown):
  assert remove_secrets(text) == shown and remove_secrets(shown) == shown
  assert has_lost_secret(remove_secrets(text)) == (text != shown)


@pytest.mark.parametrize(
  'argument, shown',
  [
    ('--set=task.train.mirror=s3://u:p@b/x', '--set=task.train.mirror=s3://u:***@b/x'),
    ('task.train.mirror=s3://u:p@b/x', 'task.train.mirror=s3://u:***@b/x'),
    ('--set=datasets[0].password=geheim', '--set=datasets[0].password=***'),
    ('--api_key=geheim', '--api_key=***'),
    ('--set=task.seq_len=3', '--set=task.seq_len=3'),
    ('--job_log_dir=runs/1', '--job_log_dir=runs/1'),
    ('--set', '--set'),
  ],
)
def test_arguments_are_recorded_without_secrets(argument, shown):
  assert remove_secrets_of_argument(argument) == shown


def test_names_of_passwords():
  assert all(map(is_secret, ('password', 'a.b.db_password', 'x.secret_key', 'access_token', 'x[0].api_key')))
  assert not any(map(is_secret, ('tokenizer', 'num_tokens', 'key', 'password.x', 'compass', 'eos_token')))
