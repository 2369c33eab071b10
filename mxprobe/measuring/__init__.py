"""The maths on what was copied from a run. No hooks, no threads, no session: torch and the standard library alone."""
