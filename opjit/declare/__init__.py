"""An op as its author declares it, and its state in a process."""
