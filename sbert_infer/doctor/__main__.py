"""`python -m sbert_infer.doctor`."""

from sbert_infer.doctor.cli import main

if __name__ == "__main__":
    main(prog_name="sbert-doctor")
