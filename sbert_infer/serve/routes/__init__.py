"""The routes, one module per contract."""
