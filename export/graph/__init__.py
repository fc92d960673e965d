"""From a torch module to an ONNX graph."""
