"""Work on many rows: `praxis-lite predict --input=... --output=...`, and `praxis-lite tokenize`.

    out/plan.json             inputs, settings and shards; written once
    out/part-00000.jsonl      the results of shard 0, one for each row, in order
    out/part-00001.jsonl      ...

Progress is recorded by these files only, so no record can contradict them.
"""
