"""Parts of `tools.gpu_check`: random models at real sizes, and the times of their steps."""
