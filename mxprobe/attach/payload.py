"""The statement that is injected. All it does in the main thread is to start another one."""

_STATEMENT = """\
try:
 __import__('_thread').start_new_thread(exec, ({source!r}, {{'__name__': '_mxprobe_payload'}}))
except KeyboardInterrupt:
 __import__('_thread').start_new_thread(exec, ({interrupt!r}, {{}}))
except BaseException:
 pass
"""
_BOOT = """\
try:
 import zipimport
 scope = {{'__name__': 'mxprobe_loader'}}
 exec(zipimport.zipimporter({archive!r}).get_code('loader'), scope)
 scope['boot']({socket!r}, {archive!r}, {token!r}, {pid!r})
except BaseException:
 pass
"""
# The user's Ctrl-C, should it hit the statement: given back once the main thread is out of it.
_INTERRUPT = "import time, _thread\ntime.sleep(0.05)\n_thread.interrupt_main()"


def in_thread(source: str) -> str:
    """One guarded statement that runs the source in a new thread.

    It must not raise: the interpreter would turn that into a SystemError in the user's frame. It runs in
    `__main__`, so it binds no name. The thread is a bare one, because signal handlers run in the main thread only:
    a Ctrl-C that comes while the agent is loaded reaches the user's code, not ours.
    """
    return _STATEMENT.format(source=source, interrupt=_INTERRUPT)


def boot_statement(socket: str, archive: str, token: str, pid: int) -> str:
    """The statement that loads the agent from the archive; silent if archive or socket are gone by then.

    `pid` is what `os.getpid()` returns in the process: children forked with the call still pending do nothing.
    """
    return in_thread(_BOOT.format(socket=socket, archive=archive, token=token, pid=pid))
