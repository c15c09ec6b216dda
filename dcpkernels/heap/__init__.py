"""Symmetric memory: a region per rank, mapped by every rank, and the group verdicts that make setting up safe."""
