"""The statement that is injected. All it does in the main thread is to start another one."""

BEGINNING = "try:\n try:\n  __import__('_thread').start_new_thread("
"""How every statement begins: by this a page that we mapped is told from one that the process put there since."""

_STATEMENT = (
    BEGINNING
    + """\
exec, ({source!r}, {{'__name__': '_mxprobe_payload'}}))
 except BaseException:
  exec({give_back!r}, {{}})
except BaseException:
 pass
"""
)
_BOOT = """\
try:
 import zipimport
 scope = {{'__name__': 'mxprobe_loader'}}
 exec(zipimport.zipimporter({archive!r}).get_code('loader'), scope)
 scope['boot']({socket!r}, {archive!r}, {token!r}, {pid!r})
except BaseException:
 pass
"""
# What a signal handler of the user's raised while the statement ran (Ctrl-C, `sys.exit` on SIGTERM) belongs to the
# user's code. It is raised there, the very object, as soon as the main thread is out of the statement: by a handler
# of SIGINT that lives for that moment, since nothing else in pure Python raises in another thread. Our own failure,
# a thread that cannot be started, is a RuntimeError from no Python frame. No garbage collection while looking at
# frames: see `mxprobe.agent.stepping`.
_GIVE_BACK = """\
import _signal, _thread, gc, sys, time
error, statement, main = sys.exc_info()[1], sys._getframe(1), _thread.get_ident()
before, handlers = _signal.getsignal(_signal.SIGINT), error.__traceback__.tb_next
def raise_it(number, frame):
 _signal.signal(_signal.SIGINT, before)
 raise error.with_traceback(handlers)
def inside():
 collects = gc.isenabled()
 gc.disable()
 frame = sys._current_frames().get(main)
 if collects:
  gc.enable()
 while frame is not None and frame is not statement:
  frame = frame.f_back
 return frame is not None
def interrupt():
 while inside():
  time.sleep(0.001)
 _thread.interrupt_main()
if before is not None and (handlers is not None or not isinstance(error, RuntimeError)):
 _signal.signal(_signal.SIGINT, raise_it)
 _thread.start_new_thread(interrupt, ())
"""


def in_thread(source: str) -> str:
    """Return one guarded statement that runs the source in a new thread.

    It must not raise: the interpreter would turn that into a SystemError in the user's frame. It runs in
    `__main__`, so it binds no name. The thread is a bare one, because signal handlers run in the main thread only:
    a Ctrl-C that comes while the agent is loaded reaches the user's code, not ours. What handlers raise in the few
    bytecodes before that is given back to the user's code.
    """
    return _STATEMENT.format(source=source, give_back=_GIVE_BACK)


def boot_statement(socket: str, archive: str, token: str, pid: int) -> str:
    """Return the statement that loads the agent from the archive. It is silent if archive or socket are gone by then.

    `pid` is what `os.getpid()` returns in the process: children forked with the call still pending do nothing.
    """
    return in_thread(_BOOT.format(socket=socket, archive=archive, token=token, pid=pid))
