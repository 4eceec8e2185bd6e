"""Builds the step on torch IR, by tensor code that is written between the nodes of the target."""
