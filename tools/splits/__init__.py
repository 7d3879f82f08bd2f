"""Tests every way to split the arrays of one operation over a mesh, to find out for which ones XLA is right.

`tools/enumerate_splits.py` is the command. A kind of operation is a list of `Program`s (`batches.py`). Each of these
makes one operation of the kind and names its dimensions. `assign.py` lists the splits of its arrays. `batches.py` puts
hundreds of cases into one program, states their splits, runs the guards on it, and compares the results on every
device. `workers.py` does this in another process, and finds the case for which XLA ends the process.

A new kind is a file like `products.py`, and a line in `kinds.py`.
"""
