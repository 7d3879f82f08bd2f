"""`praxis-lite serve`: serves a language model over HTTP with OpenAI's routes, to try a run.

`app.py` and `server.py` import starlette and uvicorn, so only `praxis-lite serve` imports them.
"""
