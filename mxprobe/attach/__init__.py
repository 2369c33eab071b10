"""Getting into a running process, and out again: process facts, injector, run directory, controller."""
