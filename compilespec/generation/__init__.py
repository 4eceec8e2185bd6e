"""transformers' own `model.generate(...)`, run by an engine.

transformers prepares a call: it reads the GenerationConfig, pads and expands the prompts, and makes
the lists of logits processors and stopping criteria.  Then it calls a decoding loop with them; that
loop is ours.  `attach` gives it to a model, `generate_with` to single calls.
"""
