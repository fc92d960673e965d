"""`python -m sbert_infer.tune`."""

from sbert_infer.tune.cli import main

if __name__ == "__main__":
    main(prog_name="sbert-tune")
