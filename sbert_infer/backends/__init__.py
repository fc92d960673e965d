"""Backends: what turns a batch into numbers, and how one is chosen."""
