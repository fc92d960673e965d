"""The command `sbert-doctor`: what a machine has, what is wrong with it, and what to do."""
