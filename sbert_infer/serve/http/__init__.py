"""HTTP: connections, bodies, keys, routing and the request log."""
