"""The models being served, and their reloading."""
