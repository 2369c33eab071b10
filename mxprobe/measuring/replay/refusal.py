"""The one error of a replay that is refused."""


class NotReplayableError(Exception):
    """The call, or its model, cannot be run again without a risk to the run. `str()` says why, for the trace."""
