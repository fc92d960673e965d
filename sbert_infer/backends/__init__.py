"""Backends, which run batches of token ids through a model, and the choice among them."""
