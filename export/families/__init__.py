"""The kinds of model: how each is read, computed and certified."""
