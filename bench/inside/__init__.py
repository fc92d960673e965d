"""What runs in a contestant's own process. Imports nothing of ours at module level."""
