"""Work on many rows: `praxis-lite predict --input=... --output=...`, and `praxis-lite tokenize`.

input_files.py    the files of rows: *.jsonl, *.txt, *.parquet, on disk or in an object store
output_folder.py  the folder of the results, where files appear complete or not at all
plan.py           the work, cut into shards, and written into the output folder with a checksum
ledger.py         which shards are finished: those whose file is there; results.py: the results in these files
kinds.py          what is computed for a row: predictions, scores, continuations
kept_values.py    the values of a row that are copied into its result
job.py            computes shards; tokenizing.py: tokenizes them
processes.py      several processes on this machine; on_ray.py: actors of Ray

    out/plan.json             inputs, settings and shards; written once
    out/part-00000.jsonl      the results of shard 0, one for each row, in order
    out/part-00001.jsonl      ...

Progress is recorded by these files only, so no record can contradict them.
"""
