"""HTTP: connections, bodies, keys, admission and the request log."""
