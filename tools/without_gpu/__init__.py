"""The CUDA path without a GPU: real steps lowered, compiled to machine code, read, and interpreted.

A part runs in a separate process: `python -m tools.without_gpu PART ...` prints one line of JSON.
`python -m tools.without_gpu` runs them all, and tests/cuda_without_gpu asserts on them.
"""
