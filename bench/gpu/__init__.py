"""The checks of `bench/gpu_check.sh`. They import PyTorch, NumPy, Triton and parts of Quire that
need nothing else."""
