"""Stage "trace": turns the user's target into one graph."""
