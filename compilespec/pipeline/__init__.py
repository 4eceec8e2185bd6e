"""`compile()` and `trace()`: the stages, one call each."""
