"""An op as torch's operator: its registration, autograd, transforms, variants, and torch.compile's caches."""
