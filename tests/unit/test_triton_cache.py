"""What Triton compiles for us is kept on a local disk, for nobody but us, and nobody else's kernels go there."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.runtime import cache

from mxprobe.agent.parts import warm_up
from mxprobe_kernels import triton_cache
from mxprobe_kernels.triton_cache import CHOICES, file_system_of, is_chosen, local_cache, local_directory
from mxprobe_kernels.triton_policy import CHUNK, token_kernel
from tests.gpu_code import compile_for

KEY = "ab" * 32


@pytest.fixture
def unchosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process where nobody has said anything; the usual place is the directory `usual`."""
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    (tmp_path / "local").mkdir()
    return tmp_path


def in_another_thread(work: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(60)
    return found[0]


def test_a_kernel_compiled_for_a_gpu_goes_to_the_private_directory(
    unchosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, environ = unchosen / "usual", dict(os.environ)
    signature = {"logits_ptr": "*bf16", "tokens_ptr": "*i64", "log_prob_ptr": "*fp32", "entropy_ptr": "*fp32"}
    signature.update(width="i32", stride_row="i32", temperature="fp32")
    constants = {"CHUNK": CHUNK, "stride_column": 1}
    with local_cache() as directory:
        compile_for("sm_90", token_kernel, signature, constants, ("logits_ptr", "stride_row", "width"), num_warps=4)
        assert dict(os.environ) == environ
        monkeypatch.setenv("TRITON_CACHE_DIR", str(usual))  # and who else compiles meanwhile finds what is usual there
        other = in_another_thread(lambda: cache.get_cache_manager(KEY))
        assert type(other) is cache.FileCacheManager
        assert Path(other.cache_dir).parent == usual
        assert Path(cache.get_dump_manager(KEY).cache_dir).parent != Path(directory)
    assert Path(directory).parent == unchosen / "local"
    assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
    assert [path.name for path in Path(directory).rglob("*.cubin")] == ["token_kernel.cubin"]
    assert Path(cache.get_cache_manager(KEY).cache_dir).parent == usual
    assert "manager_class" not in vars(triton.knobs.cache)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_of_the_user_s_stands(unchosen: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert not is_chosen()
    monkeypatch.setenv(name, str(unchosen / "theirs"))
    with local_cache() as directory:
        assert directory == ""
        assert "manager_class" not in vars(triton.knobs.cache)
    assert not list((unchosen / "local").iterdir())


def test_a_knob_of_the_user_s_stands(unchosen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(triton.knobs.cache), "dir", str(unchosen / "theirs"))
    with local_cache() as directory:
        assert directory == ""


def test_what_the_run_sets_meanwhile_is_left(unchosen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(cache.FileCacheManager):
        pass

    with local_cache():
        monkeypatch.setattr(triton.knobs.cache, "manager_class", Theirs)
    assert triton.knobs.cache.manager_class is Theirs
    vars(triton.knobs.cache).pop("manager_class")


def test_before_triton_had_knobs(unchosen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable of triton 3.2's `runtime.cache`; `get_cache_manager` there calls it with the key."""
    monkeypatch.setattr(triton_cache, "_knobs", lambda: None)
    monkeypatch.setitem(vars(cache), "__cache_cls", cache.FileCacheManager)
    with local_cache() as directory:
        manager = vars(cache)["__cache_cls"](KEY)
        assert manager.cache_dir == os.path.join(directory, KEY)
    assert vars(cache)["__cache_cls"] is cache.FileCacheManager


def test_a_network_file_system_and_what_others_may_enter_are_passed_over(
    unchosen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = unchosen / "mounts"
    mounts.write_text("root / ext4 rw 0 0\nserver:/home /home\\040of nfs4 rw 0 0\nx /home\\040of/fast xfs rw 0 0\n")
    assert [file_system_of(path, str(mounts)) for path in ("/home of/me", "/home of/fast", "/home", "/home ofx")] == [
        *("nfs4", "xfs"),
        *("ext4", "ext4"),
    ]
    assert file_system_of("/", str(unchosen / "none")) == ""
    open_to_others = unchosen / "local" / f"mxprobe-triton-{os.getuid()}"
    open_to_others.mkdir(0o755)
    monkeypatch.setattr(triton_cache, "FALLBACKS", (str(unchosen),))
    assert local_directory() == str(unchosen / open_to_others.name)
    monkeypatch.setattr(triton_cache, "file_system_of", lambda path: "nfs4")
    assert local_directory() == ""


def test_the_warm_up_compiles_what_the_training_thread_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of both kinds of widths and in both dtypes, so that a probed step meets no compiler."""
    seen: list[tuple[int, torch.dtype]] = []
    monkeypatch.setattr(
        warm_up, "token_statistics", lambda logits, tokens: seen.append((logits.shape[1], logits.dtype))
    )
    warm_up.score_zeros(torch.device("cpu"), torch.bfloat16)
    assert {width % 16 == 0 for width, _ in seen} == {True, False}
    assert {dtype for _, dtype in seen} == {torch.bfloat16, torch.float32}
    assert all(width >= CHUNK for width, _ in seen)
