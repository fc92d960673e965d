"""Load tests of servers."""
