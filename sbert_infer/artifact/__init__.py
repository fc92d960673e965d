"""Artifact files: the contract between export and runtime."""
