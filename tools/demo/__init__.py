"""Training of the demo pair: corpus, lean modules, optimiser, generation and export."""
