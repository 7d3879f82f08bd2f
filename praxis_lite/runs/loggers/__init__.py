"""Loggers send the metrics of a run to Weights & Biases, MLflow, Aim, Comet, Prometheus, or a service of your own.

    config.task.train.loggers = ('wandb', Config(MlflowLogger, experiment='curves', checkpoints=True), Config(MyLogger))

They get the numbers of `metrics.jsonl` as they are written, and with `checkpoints` each checkpoint once it is complete.
A run that is resumed continues the same run in the service. A logger that fails is reported and no longer called; if it
fails to save a checkpoint, it gets no more checkpoints. Training goes on in both cases. Event files for TensorBoard are
always written.
"""
