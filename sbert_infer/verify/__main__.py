"""`python -m sbert_infer.verify`."""

from sbert_infer.verify.cli import main

if __name__ == "__main__":
    main(prog_name="sbert-verify")
