"""Download a checkpoint once, completely and verified, by huggingface_hub."""
