"""`praxis-lite serve`: serves a language model over HTTP with OpenAI's routes, to try a run.

server.py         binds the address, runs uvicorn, and ends it cleanly
app.py            the routes
requests.py       parses the JSON of a request into the engine's input, or raises an error
replies.py        formats a continuation as JSON, whole or in pieces
served_text.py    the text of a continuation, without its stop text
engine.py         one thread that drives a `Batcher`

`app.py` and `server.py` import starlette and uvicorn, so only `praxis-lite serve` imports them.
"""
