"""What to expect of a GPU, computed: a roofline of the model, and a simulation of the pipeline."""
