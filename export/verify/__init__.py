"""Proof that an artifact gives the reference's vectors."""
