"""The CUDA build of PyTorch without a GPU: `make fake-cuda`, then `make test-fake-cuda`.

The unmodified build runs on a driver of ours (`driver/`): device memory is host memory, streams are
queues, and capture follows CUDA's rules with CUDA's errors.  Torch's allocator, its private pools,
`CUDAGraph`, Inductor's launchers and Triton's are the real ones.  `values/` gives every operator
the CPU's values, as commands of the stream and nodes of graphs; `interpreter.py` those of Triton
kernels.

It proves nothing of a GPU's rounding, of races inside a kernel, of NVIDIA's libraries or of speed.
"""
