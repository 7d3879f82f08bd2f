"""Every way to split the arrays of one operation over a mesh: which of them XLA computes rightly.

`tools/enumerate_splits.py` is the command. A kind of operation is a list of `Program`s (`batches.py`). Each
makes one operation of the kind and names its dimensions. `assign.py` lists the splits of its arrays. `batches.py` puts
hundreds of cases into one program, states their splits, runs the guards on it, and compares the results on every
device; `workers.py` does so in another process, and finds the case for which XLA ends it.

A new kind is a file like `products.py`, and a line in `kinds.py`.
"""
