"""What `tools.gpu_check` is made of: random models at real sizes, times of their steps."""
