"""Why an attach is refused, in words: slug -> what failed, likely cause, what to do. The one table of them.

A refusal leaves the process as it was. Slugs are stable: they appear in `--json` and in tests.
"""

from dataclasses import dataclass

from mxprobe.errors import AttachError


@dataclass(frozen=True)
class Words:
    """Templates with `{pid}`, `{detail}` and what else the place that refuses knows."""

    what: str
    cause: str
    remedy: str


REFUSALS: dict[str, Words] = {
    "no_such_process": Words(
        "There is no process {pid}.",
        "it has ended, or the number belongs to another machine or container",
        "look it up again, e.g. `pgrep -af python`, in the container in which it runs",
    ),
    "not_a_process": Words(
        "{pid} is a thread of process {detail}.",
        "the number comes from a per-thread listing such as `top -H`",
        "attach to the process: `mxprobe attach {detail}`",
    ),
    "exited": Words(
        "Process {pid} has ended ({detail}).",
        "the job finished or was killed; a zombie waits for its parent to collect it",
        "attach to a process that is running",
    ),
    "stopped": Words(
        "Process {pid} is suspended.",
        "it received SIGSTOP or Ctrl-Z, so it cannot run anything of ours",
        "resume it with `kill -CONT {pid}` (or `fg`) and attach again",
    ),
    "being_traced": Words(
        "Process {pid} is already traced by process {detail}.",
        "a debugger (gdb, strace, py-spy) holds it; Linux allows one tracer",
        "end that debugger and attach again",
    ),
    "other_user": Words(
        "Process {pid} belongs to {detail}.",
        "mxprobe attaches only to processes of the user who runs it, root included",
        "run it as that user: `sudo -u {detail} mxprobe attach {pid}`",
    ),
    "pid_namespace": Words(
        "/proc shows another PID namespace than the one mxprobe runs in, so PID {pid} may mean another process.",
        "a container or `unshare` without its own /proc",
        "run mxprobe where the job runs: `docker exec`, `kubectl exec`, or `nsenter -t PID -m -p`",
    ),
    "other_mount_namespace": Words(
        "Process {pid} cannot see {detail}, where the agent would be handed over.",
        "it runs in a container or chroot with its own file system",
        "run mxprobe inside it (`docker exec`, `kubectl exec`), or point TMPDIR at a directory both can see",
    ),
    "no_job": Words(
        "Process {pid} belongs to no distributed job{after_detail}.",
        "neither it nor a process below it was started with RANK and MASTER_PORT in its environment, "
        "as torchrun and accelerate do",
        "attach to its processes by their PIDs: `mxprobe attach PID PID ...`",
    ),
    "not_python": Words(
        "Process {pid} ({detail}) is not a CPython interpreter.",
        "the PID is a launcher, a shell or a native program",
        "attach to the Python process below it: `pgrep -af -P {pid}`",
    ),
    "python_image_changed": Words(
        "The interpreter file of process {pid} is no longer what the process started from ({detail}).",
        "Python was upgraded or its environment deleted under the running job",
        "start the job again, best with `mxprobe run -- ...`",
    ),
    "unsupported_python": Words(
        "Process {pid} runs {detail}, which mxprobe does not support.",
        "Python older than 3.9, or a free-threaded build",
        "run the job on Python 3.9 or newer with the GIL",
    ),
    "unsupported_architecture": Words(
        "Attaching from outside is implemented for Linux on x86_64; this is {detail}.",
        "the injector writes machine registers, which differ by architecture",
        "install gdb, which is used instead, or start the job with `mxprobe run -- python train.py`",
    ),
    "no_listener": Words(
        "Process {pid} does not listen for an attach.",
        "it was not started by `mxprobe run`, nor with MXPROBE_LISTEN=1 and the start-up hook",
        "leave out `--via listener`, or start the job with `mxprobe run -- ...`",
    ),
    "no_remote_exec": Words(
        "`sys.remote_exec` cannot be used on process {pid} ({detail}).",
        "it takes Python 3.14 or newer, whose executable this command must be able to start",
        "leave out `--via remote_exec`, or run mxprobe in the container in which the job runs",
    ),
    "no_gdb": Words(
        "There is no gdb to attach to process {pid} with.",
        "the image this command runs in does not have it",
        "install gdb, or start the job with `mxprobe run -- ...`, which needs none",
    ),
    "remote_debugging_disabled": Words(
        "Process {pid} forbids remote debugging ({detail}).",
        "whoever started it asked that nothing be attached; mxprobe honours that for every mechanism",
        "start the job without PYTHON_DISABLE_REMOTE_DEBUG and without -X disable-remote-debug",
    ),
    "ptrace_scope": Words(
        "The kernel's Yama policy (ptrace_scope = {detail}) does not let mxprobe stop process {pid}.",
        "the default of several distributions: only a parent may trace its children",
        "start the job with `mxprobe run -- ...`, or as root `sysctl kernel.yama.ptrace_scope=0`, "
        "or give mxprobe CAP_SYS_PTRACE",
    ),
    "not_permitted": Words(
        "The kernel does not let mxprobe trace process {pid} ({detail}).",
        "a container without the SYS_PTRACE capability, a seccomp profile, or a process made non-dumpable",
        "add SYS_PTRACE (`docker run --cap-add=SYS_PTRACE`; in Kubernetes securityContext.capabilities.add), "
        "or start the job with `mxprobe run -- ...`",
    ),
    "not_stoppable": Words(
        "The main thread of process {pid} could not be stopped for an instant ({detail}).",
        "it is in uninterruptible sleep, usually on a hung file system or driver",
        "wait until it runs again (`ps -o stat,wchan -p {pid}`) and attach again",
    ),
    "not_ready": Words(
        "The interpreter of process {pid} is starting up or shutting down.",
        "attached too early, or just as the job ended",
        "attach again in a second",
    ),
    "injection_failed": Words(
        "The injection into process {pid} did not work ({detail}).",
        "an unusual interpreter build; the process was put back as it was",
        "`mxprobe doctor` tries the injection on a process of its own; start the job with `mxprobe run -- ...`",
    ),
    "already_attached": Words(
        "Process {pid} is already attached.",
        "another mxprobe is writing its trace",
        "`mxprobe status {pid}` shows it, `mxprobe detach {pid}` takes it off",
    ),
    "version_mismatch": Words(
        "Process {pid} has imported another version of mxprobe ({detail}).",
        "the job and this command come from two environments",
        "install the same version in both, or attach with the job's own `mxprobe`",
    ),
    "no_ack": Words(
        "Process {pid} did not run the agent within {seconds:g} s; the main thread is {detail}.",
        "a long native call (generation, a collective, I/O) keeps the interpreter from running anything else",
        "attach again when it is back in Python, or wait longer with --step-timeout; "
        "what is queued finds nothing to connect to and does nothing",
    ),
    "no_torch": Words(
        "Process {pid} has not imported torch.",
        "it is a launcher (torchrun, ray), a data worker, or has only just started",
        "attach to the training process itself, or pass --wait to attach as soon as torch is there",
    ),
    "old_torch": Words(
        "Process {pid} runs {detail}; the agent needs 2.6 or newer.",
        "hooks and graph edges that it relies on are younger than this torch",
        "run the job with a newer torch",
    ),
    "no_step": Words(
        "Process {pid} took no optimizer step and generated nothing within {seconds:g} s{after_detail}.",
        "it is evaluating, saving, loading, waiting for other ranks, does not train with torch.optim, or its model is "
        "compiled in place (module.compile()) and calls no hook",
        "attach while it trains, or wait longer with --step-timeout; a compiled model needs --eager-probe-steps",
    ),
    "no_model": Words(
        "No model was found in process {pid}{after_detail}.",
        "its forward passes go through no torch.nn.Module that was seen, or only through graphs of torch.compile",
        "attach to the process that holds the model; one compiled in place needs --eager-probe-steps",
    ),
    "load_failed": Words(
        "The agent could not be loaded in process {pid} ({detail}).",
        "a damaged installation, or a Python whose standard library is incomplete",
        "reinstall mxprobe; if that does not help, report it with the output of `mxprobe doctor`",
    ),
    "no_room": Words(
        "The agent for process {pid} could not be written to {detail}.",
        "the disk or the quota of the private directory is full, or it may not be written to",
        "free some space there, or name another place with XDG_RUNTIME_DIR or TMPDIR, for the job and for mxprobe",
    ),
    "interrupted": Words(
        "Stopped before process {pid} was attached.",
        "an interrupt, or `mxprobe detach`, came first",
        "nothing was changed in the process and no trace was written",
    ),
    "agent_lost": Words(
        "The agent in process {pid} went away before it was attached{after_detail}.",
        "the process ended, forked and replaced itself, or the agent gave up",
        "attach again; if it happens twice, report it with the output of `mxprobe doctor`",
    ),
}

_UNKNOWN = Words(
    "Process {pid} could not be attached: {reason}{after_detail}.",
    "a reason this version has no words for",
    "report it with the output of `mxprobe doctor`",
)


def refuse(reason: str, pid: int, detail: str = "", *, seconds: float = 0.0) -> AttachError:
    """The error of that slug, to be raised. An unknown slug (an agent's own) keeps its name and detail."""
    words = REFUSALS.get(reason, _UNKNOWN)
    values = {
        "pid": pid,
        "reason": reason,
        "detail": detail,
        "after_detail": f" ({detail})" if detail else "",
        "seconds": seconds,
    }
    return AttachError(
        reason, words.what.format(**values), cause=words.cause.format(**values), remedy=words.remedy.format(**values)
    )
