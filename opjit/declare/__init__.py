"""Ops before any binary exists: their declarations, their names, and what torch knows of them."""
