"""Stage "trace": the target as a user gives it, until it is one graph."""
