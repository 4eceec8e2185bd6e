"""How weights are cut among ranks, and what follows for the values of a step's graph."""
