"""From the arguments of `Engine.encode` to its result."""
