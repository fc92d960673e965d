"""sbert-infer inside other systems, each of which must be installed by itself."""
