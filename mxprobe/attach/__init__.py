"""Getting into a running process, and out again: process facts, injector, run directory, controller."""

MECHANISMS = ("listener", "remote_exec", "ptrace", "gdb")
"""The ways in, the first that is open is taken; see `mxprobe.attach.entry`."""
