"""The eager PyTorch model in FP32, which everything is compared with."""
