"""Functions of other libraries, wrapped where they are defined until they are given back as they were.

The wrapper listens, then calls the original with the very same arguments. Of calls inside one another (a framework's
sink, the loggers below it) only the outermost is heard. Nesting is kept in a context variable: it is one per thread
and, in coroutines, one per task, so a task that waits inside one sink does not silence the others of its thread.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from mxprobe.agent.taps.tap_table import Tap
from mxprobe.events import Event, Tell

Listener = Callable[[Tap, "dict[str, Any]"], bool]
"""Gets a call's arguments by name; never raises. False: not understood, listen to the sinks below."""

_inside: ContextVar[bool] = ContextVar("mxprobe_inside_a_sink", default=False)


class TapNotApplicableError(Exception):
    """The function is not what the table expects; `str()` says what it is."""


class Splice:
    """A wrapped function. Wrap and remove from any thread: a class attribute changes hands in one store."""

    def __init__(self, tap: Tap, owner: Any, original: types.FunctionType, listen: Listener) -> None:
        self.tap = tap
        self.owner = owner
        self.original = original
        self.active = True
        self._listen = listen
        self._positional = _positional_names(tap, original)
        self._also: dict[str, tuple[Any, Any]] = {}
        """Name of a global -> (what we put there, what was there)."""
        self.wrapper = self._wrap_async() if inspect.iscoroutinefunction(original) else self._wrap()
        setattr(owner, tap.function, self.wrapper)
        for module_name, name in tap.also:
            self._rebind(sys.modules.get(module_name), name)

    def remove(self) -> bool:
        """Put the original back. False where somebody has wrapped ours since: ours then only passes calls on."""
        self.active = False
        is_ours = vars(self.owner).get(self.tap.function) is self.wrapper
        if is_ours:
            setattr(self.owner, self.tap.function, self.original)
        for module_name, name in self.tap.also:
            self._give_back(sys.modules.get(module_name), name)
        return is_ours

    def _rebind(self, module: Any, name: str) -> None:
        held = vars(module).get(name) if module is not None else None
        if _function_of(held) is not self.original:
            return
        ours = types.MethodType(self.wrapper, held.__self__) if isinstance(held, types.MethodType) else self.wrapper
        self._also[name] = (ours, held)
        setattr(module, name, ours)

    def _give_back(self, module: Any, name: str) -> None:
        held = vars(module).get(name) if module is not None else None
        ours, before = self._also.get(name, (None, None))
        if held is not None and held is ours:
            setattr(module, name, before)
        elif isinstance(held, types.MethodType) and held.__func__ is self.wrapper:  # bound anew in the meantime
            setattr(module, name, types.MethodType(self.original, held.__self__))

    def _wrap(self) -> Any:
        original = self.original

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            is_outermost = self._hear(args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                if is_outermost:
                    _inside.set(False)

        return wrapper

    def _wrap_async(self) -> Any:
        original = self.original

        @functools.wraps(original)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            is_outermost = self._hear(args, kwargs)
            try:
                return await original(*args, **kwargs)
            finally:
                if is_outermost:
                    _inside.set(False)

        return wrapper

    def _hear(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Listen to the outermost call that is understood; those inside it are then silent."""
        if not self.active or _inside.get():
            return False
        is_outermost = self._listen(self.tap, {**dict(zip(self._positional, args)), **kwargs})
        if is_outermost:
            _inside.set(True)
        return is_outermost


def splice(tap: Tap, module: types.ModuleType, listen: Listener) -> Splice:
    """Wrap the tap's function in its imported module. TapNotApplicableError where it is not as the table says."""
    owner = vars(module).get(tap.owner) if tap.owner else module
    if tap.owner and not isinstance(owner, type):
        raise TapNotApplicableError(f"tap not applicable: {tap.module} has no class {tap.owner}")
    original = vars(owner).get(tap.function)
    if not isinstance(original, types.FunctionType):
        found = "is missing" if original is None else f"is a {type(original).__name__}, not a function"
        raise TapNotApplicableError(f"tap not applicable: {tap.source} {found}")
    return Splice(tap, owner, original, listen)


class Splices:
    """`ensure_wrapped` and `give_back` from any thread; nothing raises.

    on_wrapped(tap): a function is listened to.
    on_refused(event): one is not what the table expects.
    on_error(where, error): anything else; may end the whole session, which gives all back.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        listen: Listener,
        *,
        on_wrapped: Callable[[Tap], None],
        on_refused: Tell,
        on_error: Callable[[str, BaseException], None],
    ) -> None:
        self.closed = False
        self._waiting = list(taps)
        self._held: list[Splice] = []
        self._listen = listen
        self._on_wrapped = on_wrapped
        self._on_refused = on_refused
        self._on_error = on_error
        self._lock = threading.RLock()

    def ensure_wrapped(self) -> None:
        """Tap what has been imported by now; cheap enough for every step, and never waits."""
        if self.closed or not self._lock.acquire(blocking=False):
            return
        try:
            for tap in [tap for tap in self._waiting if is_loaded(tap.module)]:
                if not self.closed:
                    self._waiting.remove(tap)
                    self._wrap(tap)
        finally:
            self._lock.release()

    def _wrap(self, tap: Tap) -> None:
        try:
            self._held.append(splice(tap, sys.modules[tap.module], self._listen))
            self._on_wrapped(tap)
        except TapNotApplicableError as reason:
            self._on_refused(Event("tap", tap.source, "refused", text=str(reason)))
        except Exception as error:
            self._on_error(f"tap {tap.source}", error)

    def _is_back(self, tapped: Splice) -> bool:
        try:
            return tapped.remove()
        except Exception as error:
            self._on_error(f"giving {tapped.tap.source} back", error)
            return False

    def give_back(self) -> list[Event]:
        """Give every function back. Return events of those left in place because somebody has wrapped ours since."""
        with self._lock:
            self.closed = True
            held, self._held = self._held, []
            left = [tapped.tap.source for tapped in reversed(held) if not self._is_back(tapped)]
        words = "left in place, passing calls on: {} was wrapped again"
        return [Event("tap", source, "left_in_place", text=words.format(source)) for source in left]


def is_loaded(name: str) -> bool:
    """Say whether a module's import has ended; nothing is imported for us."""
    module = sys.modules.get(name)
    return module is not None and not getattr(vars(module).get("__spec__"), "_initializing", False)


def _decorated(function: types.FunctionType) -> Any:
    """Return the one function that a decorator which hides its signature holds and passes its arguments on to."""
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    if kinds != [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]:
        return function
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    functions = [each for each in held if isinstance(each, types.FunctionType)]
    return functions[0] if len(functions) == 1 else function


def _positional_names(tap: Tap, original: types.FunctionType) -> list[str]:
    try:
        signature = inspect.signature(_decorated(original))
    except (TypeError, ValueError) as error:
        raise TapNotApplicableError(f"tap not applicable: {tap.source} has no readable signature ({error})") from None
    wanted = (*(("self",) if tap.owner else ()), *tap.parameters)
    # A module function with a `self` is a decorated method whose first argument is not what its signature says.
    if not set(wanted) <= set(signature.parameters) or (not tap.owner and "self" in signature.parameters):
        raise TapNotApplicableError(
            f"tap not applicable: {tap.source} has signature {signature}, expected parameters {', '.join(wanted)}"
        )
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in signature.parameters.items() if parameter.kind in positional]


def _function_of(held: Any) -> Any:
    return held.__func__ if isinstance(held, types.MethodType) else held


def wrapped(tap: Tap, what: str) -> Event:
    """Return the event that a function is listened to; `what` goes into brackets."""
    return Event("tap", tap.source, "wrapped", text=f"{tap.source} ({what})")
