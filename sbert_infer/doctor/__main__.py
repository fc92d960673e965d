"""`python -m sbert_infer.doctor`."""

from sbert_infer.doctor.cli import main

main(prog_name="sbert-doctor")
