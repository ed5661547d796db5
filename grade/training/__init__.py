"""Training a policy: settings, task, loop, checkpoints, evaluation."""
