"""sbert-infer inside other systems and libraries, each of which must be installed by itself."""
