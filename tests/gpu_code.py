"""Compile a Triton kernel for GPUs that are not here, and read what the hardware would run.

Needs the triton wheel only: it brings ptxas, cuobjdump and nvdisasm, and LLVM for AMD.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Code:
    """Resources of a compiled kernel, per lane unless said otherwise."""

    registers: int
    spills: int
    """Spill loads and stores, stack and scratch bytes."""
    shared_bytes: int
    loads: Mapping[str, int]
    """Global load instructions by name."""
    loop_instructions: int
    """In the largest loop; 0 where it was not looked for (AMD)."""
    flushes_subnormals: bool


def compile_for(
    target: str,
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: tuple[str, ...],
    **options: int,
) -> Code:
    """Compile `kernel` with the options of its launch. `signature` types its run-time arguments; `aligned` are
    divisible by 16.
    """
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: signature.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    launched = {"num_warps": 1, "num_stages": 2, "enable_fp_fusion": True, **options}
    compiled = triton_compile(source, target=TARGETS[target], options=launched)
    return _read_amd(compiled) if target.startswith("gfx") else _read_nvidia(compiled)


def _read_nvidia(compiled: Any) -> Code:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "--dump-resource-usage", file.name)
        sass = _run("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, _, local = map(int, found.groups())
    instructions = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.M)
    families = Counter(name.split(".")[0] for name in instructions)
    return Code(
        registers=registers,
        spills=stack + local + families["STL"] + families["LDL"],
        shared_bytes=compiled.metadata.shared,
        loads=Counter(name for name in instructions if name.startswith("LDG")),
        loop_instructions=_largest_loop(sass),
        flushes_subnormals=".ftz" in compiled.asm["ptx"],
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _largest_loop(sass: str) -> int:
    """Instructions between a label and the furthest branch back to it."""
    labels: dict[str, int] = {}
    largest = count = 0
    for line in sass.splitlines():
        if label := re.match(r"^\s*(\.L_[\w]+):", line):
            labels[label[1]] = count
        if instruction := re.match(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            count += 1
            branch = re.search(r"\bBRA(?:\.\w+)*\s+(?:!?U?P\d+,\s*)?`\((\.L_\w+)\)", instruction[1])
            if branch and branch[1] in labels:
                largest = max(largest, count - labels[branch[1]])
    return largest


def _read_amd(compiled: Any) -> Code:
    assembly = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", assembly))

    loads = re.findall(r"^\s+((?:global|buffer|flat)_load\w*)", assembly, re.M)
    return Code(
        registers=field("vgpr_count"),
        spills=field("vgpr_spill_count") + field("sgpr_spill_count") + field("private_segment_fixed_size"),
        shared_bytes=field("group_segment_fixed_size"),
        loads=Counter(loads),
        loop_instructions=0,
        flushes_subnormals=".amdhsa_float_denorm_mode_32 3" not in assembly,
    )
