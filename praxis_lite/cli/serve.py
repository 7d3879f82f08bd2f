"""`praxis-lite serve`: serves the text model of a run over HTTP, with OpenAI's routes, to try it."""

from __future__ import annotations

import os
import sys

from absl import flags

from praxis_lite.cli.adapter_flags import add_adapters_flag, folders_of_adapters, read_adapters
from praxis_lite.cli.command import Command, configured_run, say_how_config_differs
from praxis_lite.cli.command_flags import CommandFlags, add_on_damage, run_flags
from praxis_lite.common.errors import ConfigError, UserError


def _run(values: flags.FlagValues) -> int:
  try:
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
  except ImportError:
    raise ConfigError("serve needs praxis_lite[serve]: pip install 'praxis_lite[serve]'") from None
  config, job_log_dir = configured_run(values)
  name = values.name or os.path.basename(os.path.abspath(job_log_dir))
  folders = folders_of_adapters(values.adapters)
  if name in folders:
    raise UserError(
      f'--adapters={name}={folders[name]}: the served model is called {name}, too, so no request could name this '
      'adapter; give it another name, or set --name'
    )

  from praxis_lite.runs.prompts import check_decodes
  from praxis_lite.runs.records.run_inputs import use_kept_vocabulary
  from praxis_lite.runs.restoring import restore_model
  from praxis_lite.runs.serving.app import Served
  from praxis_lite.runs.serving.engine import Engine
  from praxis_lite.runs.serving.server import serve

  check_decodes(config.task)
  config = use_kept_vocabulary(config, job_log_dir)
  model = restore_model(
    config, job_log_dir, step=values.step, seed=values.seed, on_damage=values.on_damage, use_ema='decode'
  )
  say_how_config_differs(values, config)
  try:
    tokenizer = model.tokenizer
  except UserError as error:
    print(f'note: prompts and answers are tokens: {error}', file=sys.stderr)
    tokenizer = None
  if folders:
    model = model.attach_adapters(read_adapters(folders, model, values.trust))
  batcher = model.batcher(
    rows=values.rows,
    max_length=values.max_length,
    kept_prefixes=values.kept_prefixes,
    top_log_probs=values.top_logprobs,
  )
  engine = Engine(batcher, tokenizer, values.max_waiting, draws_seeds=not values['seed'].present)
  engine.warm_up()
  served = Served(name, tokenizer, values.top_logprobs, timeout_s=values.request_timeout)

  def say(url: str, is_local: bool) -> None:
    reached = 'only from this machine' if is_local else 'from other machines, by anyone: there is no password'
    print(f'serving {name} after step {model.step} at {url}/v1, {reached}; Ctrl-C ends it', flush=True)

  most_open = values.rows + values.max_waiting
  serve(engine, served, values.host, values.port, most_open=most_open, drain_s=values.drain, on_ready=say)
  print(f'served {engine.num_ended} requests, and {batcher.statistics.new_tokens:,} tokens', file=sys.stderr)
  return 0


def _flags() -> CommandFlags:
  values = run_flags(seed='Seed of requests without one; by default each draws its own.', restores=True)
  add_on_damage(values)
  values.add_text('host', 'Address to serve at; by default only for this machine.', '0.0.0.0', '127.0.0.1')
  values.add_integer('port', 'Port to serve at; 0 takes a free one.', 8080, 8000, least=0, most=65535)
  values.add_text('name', 'Name of the model; by default that of the directory.', 'my-model')
  add_adapters_flag(values, 'Requests name it as their model.')
  values.add_integer('rows', 'Number of requests that are decoded at the same time.', 16, 8, least=1)
  longest = (
    'Most tokens of a prompt and its continuation; with an encoder-decoder, of a source, and of its text. By default '
    '1024, or less if the model sees less.'
  )
  values.add_integer('max_length', longest, 4096, least=1)
  values.add_integer('max_waiting', 'Requests that may wait; others get status 429.', 100, 64, least=0)
  values.add_integer(
    'kept_prefixes', 'Beginnings of prompts to keep for later prompts, besides those in rows.', 4, 0, least=0
  )
  values.add_integer('top_logprobs', 'The largest top_logprobs that a request may set.', 20, 5, least=0, most=100)
  values.add_number('request_timeout', 'Seconds after which a request is ended.', '60', 600.0, least=1.0)
  values.add_number('drain', 'Seconds that requests may go on after Ctrl-C or SIGTERM.', '5', 30.0, least=1.0)
  return values


COMMAND = Command(
  'serve',
  'serve a model over HTTP',
  "serve a language model or an encoder-decoder of a run over HTTP, with OpenAI's routes for completions and chats, to "
  'try it from this machine. For many users, export it to an engine: praxis-lite export-hf.',
  'praxis-lite serve --job_log_dir=runs/1 --port=8080',
  _flags(),
  _run,
)
