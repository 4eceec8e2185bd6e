"""Stage "trace": from the target as the user gives it to one graph."""
