"""Parts of drafters that several methods share: layers, weights, d2t, random values."""
