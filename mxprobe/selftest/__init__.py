"""`mxprobe selftest`: is it right, and does it leave a run as it was, on this machine and on its GPU?"""
