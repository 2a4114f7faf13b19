"""Entries from other machines: the remote, its transport, and trust in signatures."""
