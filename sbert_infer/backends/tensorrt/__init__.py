"""TensorRT: building engines, keeping them, and running them on CUDA."""
