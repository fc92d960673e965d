"""Writing vectors: output files and the journal that lets a job resume."""
