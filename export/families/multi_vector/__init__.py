"""Multi-vector models: one vector for each token."""
