"""Cross-encoders: one score for a pair of texts."""
