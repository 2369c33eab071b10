"""Private interfaces of CPython and ray that the controller relies on, each with the versions it was tried on.

Nothing here imports torch. What the agent relies on in the user's process is not here.
"""

import sys
from typing import Any


def has_gil() -> bool:
    """Return False in a free-threaded interpreter (tried on CPython 3.11 to 3.13; before 3.13 all have the GIL)."""
    return getattr(sys, "_is_gil_enabled", lambda: True)()


def ray_actor_records() -> list[dict[str, Any]]:
    """Return the records of all actors of the cluster that this process is connected to (tried on ray 2.60).

    They come from the control store: the public `ray.util.state` needs a dashboard.
    """
    from ray._private import state  # pyright: ignore[reportMissingImports]

    return list(state.actors().values())
