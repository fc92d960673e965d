"""TensorRT: building TensorRT engines, caching them, and running them on CUDA."""
