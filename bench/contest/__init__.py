"""Who is measured, in which process, and in what order."""
