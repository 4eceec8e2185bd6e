"""The server, measured and evaluated from outside: in a separate process, over HTTP."""
