"""Versions of the weights over steps: which one a call used, and how they change."""
