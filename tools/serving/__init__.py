"""The server, measured and evaluated from outside: in a process of its own, over HTTP."""
