"""Files, threads and cores: helpers that know nothing of models."""
