"""Taps on the functions through which training frameworks and loggers report their metrics.

`table` lists them, `readers` says what a call means, `splice` wraps one of them. `mxprobe.agent.taps.signal_taps` turns
the calls into rows.
"""
