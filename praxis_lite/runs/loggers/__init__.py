"""Loggers send the metrics of a run to Weights & Biases, MLflow, Aim, Comet, Prometheus, or a service of your own.

    config.task.train.loggers = ('wandb', Config(MlflowLogger, experiment='curves', checkpoints=True), Config(MyLogger))

They get the numbers that are written to `metrics.jsonl`, when they are written, and with `checkpoints` each checkpoint
once it is complete. A run that is resumed goes on as the same run of the service. A logger that fails, at its start or
later, is reported once and then left out, and one that fails to take a checkpoint gets no more of these; training goes
on. Event files for TensorBoard are always written.
"""
