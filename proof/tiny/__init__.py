"""Makes the built-in model: architecture in plain torch, training, quantization, evaluation (`make tiny`)."""
