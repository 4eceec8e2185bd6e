"""Prompts for the target to answer, made of text that any machine with the dependencies has."""
