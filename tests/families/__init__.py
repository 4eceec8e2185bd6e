"""A sweep over the families of transformers: equal to the module, or refused in one true line."""
