"""TensorRT-LLM's speculation modes.  Its small algorithms lie in tests, to test against."""
