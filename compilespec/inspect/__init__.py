"""Looking inside a program: what the passes did, whether it is right, what it costs."""
