"""`praxis-lite serve`: a language model behind an HTTP endpoint with OpenAI's routes, for trying a run.

server.py         binds the address, runs uvicorn, and ends it cleanly
app.py            the routes
requests.py       from the JSON of a request to what the engine needs, or to an error
replies.py        from a continuation to JSON, whole or in pieces
served_text.py    the text of a continuation, without its stop text
engine.py         one thread that drives a `Batcher`

`app.py` and `server.py` import starlette and uvicorn, so only `praxis-lite serve` imports them.
"""
