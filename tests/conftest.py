"""What every test relies on."""

import signal

# A shell that starts the suite in the background leaves SIGINT ignored, in pytest and in every process it starts:
# tests of Ctrl-C would then test nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)
