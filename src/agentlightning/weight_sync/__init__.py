"""How new weights reach model servers: through checkpoints on disk, NCCL between GPUs, or CUDA IPC on one GPU."""
