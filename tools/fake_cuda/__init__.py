"""The CUDA build of PyTorch without a GPU: `make fake-cuda`, then `make test-fake-cuda`.

The unmodified build runs on a driver of ours (`driver/`): device memory is host memory, streams are
queues, and capture follows CUDA's rules with CUDA's errors.  Torch's allocator, its private pools,
`CUDAGraph`, Inductor's launchers and Triton's are the real ones.  `values/` gives every operator
the CPU's values, as commands of the stream and nodes of graphs; `interpreter.py` those of Triton
kernels.

Read from the environment when the process starts: FAKE_CUDA_DEVICES (1), FAKE_CUDA_SM (90),
FAKE_CUDA_MIB of each device (80 GiB), FAKE_CUDA_LAZY (commands wait until somebody waits for them),
FAKE_CUDA_POISON (1: freed memory is overwritten), FAKE_CUDA_TRACE (launches and refusals are
printed).

It proves nothing of a GPU's rounding, of races inside a kernel, of NVIDIA's libraries or of speed.
"""
