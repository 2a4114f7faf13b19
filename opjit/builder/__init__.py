"""Builds: from a recipe to a published entry."""
