"""Stage "capture": graphs by (phase, bucket, variant), and the dispatcher that picks one.

On the CPU the same recorder runs over an emulation: a replay executes the captured call again over
the same buffers, and poisons values that nothing may read.
"""
