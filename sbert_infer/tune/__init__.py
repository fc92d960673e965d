"""`sbert-tune`: the fastest way to run a model on this machine with vectors near enough."""
