"""Inference engines: the weights they hold, under the trainer's names, and when they are given new ones."""
