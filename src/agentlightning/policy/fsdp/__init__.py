"""Training on several processes: they divide the weights (FSDP2) and the batch, and the trainer's process samples."""
