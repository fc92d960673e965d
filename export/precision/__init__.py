"""Graphs in 8 bits and in FP16."""
