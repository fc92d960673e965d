"""The kinds of model: how each is read, computed, traced and certified."""
