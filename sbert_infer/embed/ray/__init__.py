"""`sbert-embed` on a Ray cluster."""
