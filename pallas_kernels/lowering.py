"""From a Pallas kernel to machine code on a machine without a GPU: Triton IR, registers, matrix instructions.

What this shows is what the compiler makes of a kernel: instructions and resources. It shows neither speed nor races nor
errors of the code generator.
"""

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pallas_kernels._internals import LoweredKernel, lowered_kernels

# name -> Triton's backend, architecture and threads of a warp
TARGETS: dict[str, tuple[str, int | str, int]] = {
    "sm_80": ("cuda", 80, 32),  # A100
    "sm_90": ("cuda", 90, 32),  # H100
    "sm_100": ("cuda", 100, 32),  # B200
    "gfx942": ("hip", "gfx942", 64),  # MI300X
    "gfx950": ("hip", "gfx950", 64),  # MI355X
}
PLATFORMS = ("cuda", "rocm")

_NVIDIA_MATRIX = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
_LOCAL_MEMORY = re.compile(r"\b(?:STL|LDL)\b")  # of SASS; a stack alone, which LLVM may ask for in vain, is no spill
_AMD_MATRIX = re.compile(r"\bv_(?:mfma|smfmac|wmma)_\w+")


@dataclass(frozen=True)
class Resources:
    """What one thread block (workgroup) of a compiled kernel takes.

    registers: 32-bit registers of a thread, on AMD vector and accumulation registers together; spills: on NVIDIA
    instructions that load from or store to a thread's local memory, on AMD spilled vector and scalar registers;
    shared_bytes: shared memory (LDS); matrix_instructions: distinct names in the assembly (PTX, AMDGCN), sorted.
    """

    target: str
    registers: int
    spills: int
    shared_bytes: int
    matrix_instructions: tuple[str, ...]


def platform_of(target: str) -> str:
    """The lowering platform, `cuda` or `rocm`, whose IR `target` compiles."""
    if target not in TARGETS:
        raise ValueError(f"target={target!r} is unknown; allowed: {', '.join(TARGETS)}")
    return "rocm" if TARGETS[target][0] == "hip" else "cuda"


def kernels(fn: Callable[..., Any], *args: Any, platform: str = "cuda") -> list[LoweredKernel]:
    """Every pallas_call of `fn(*args)` lowered for `platform`, in the order of the program's text, with its grid.

    args: arrays or `jax.ShapeDtypeStruct`. No device of the platform is needed. The IR is parsed and verified again,
    because the Triton lowering can write invalid IR without noticing.

    Raises RuntimeError with an unsupported jax, ValueError for another platform or where there is no kernel, and
    whatever the lowering raises for what Triton has not.
    """
    if platform not in PLATFORMS:
        raise ValueError(f"platform={platform!r} is unknown; allowed: {', '.join(PLATFORMS)}")
    found = lowered_kernels(fn, args, platform)
    if not found:
        raise ValueError(
            f"no Triton kernel in the program lowered for {platform}: it has no pallas_call but with interpret=True"
        )
    return found


def triton_ir(fn: Callable[..., Any], *args: Any, platform: str = "cuda") -> list[str]:
    """The texts of `kernels`."""
    return [kernel.text for kernel in kernels(fn, *args, platform=platform)]


def _triton() -> ModuleType:
    try:
        import triton
    except ImportError as error:
        raise ImportError(
            "compiling Triton IR needs the package triton, which is in the extra `dev`: pip install 'kvq-jax[dev]'"
        ) from error
    return triton


@functools.cache
def compile_ir(text: str, target: str, num_warps: int = 4, num_stages: int = 2) -> Resources:
    """Compile Triton IR for `target` (one of `TARGETS`) with the package triton; no GPU is needed.

    Nothing is kept on disk. Raises ValueError for another target, ImportError without triton, and RuntimeError where
    the target cannot do it (E4M3 on sm_80); triton's reasons then are on stderr.
    """
    platform_of(target)
    triton = _triton()
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    with tempfile.TemporaryDirectory() as folder, knobs.cache.scope():
        knobs.cache.home_dir = folder
        knobs.cache.dir = str(Path(folder) / "cache")
        source = Path(folder) / "kernel.ttir"
        source.write_text(text)
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        try:
            compiled = triton_compile(str(source), target=GPUTarget(*TARGETS[target]), options=options)
        except RuntimeError as error:
            hint = "; it has no E4M3: use a kernel in bfloat16" if target == "sm_80" and "f8E4M3FN" in text else ""
            raise RuntimeError(f"triton {triton.__version__} cannot compile this kernel for {target}{hint}") from error
        assembly, shared = dict(compiled.asm), int(compiled.metadata.shared)
        if platform_of(target) == "rocm":
            return _amd(target, assembly["amdgcn"], shared)
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(assembly["cubin"])
        report = _output([knobs.nvidia.cuobjdump.path, "-res-usage", str(binary)])
        machine_code = _output([knobs.nvidia.nvdisasm.path, "-c", str(binary)])
    names = tuple(sorted(set(_NVIDIA_MATRIX.findall(assembly["ptx"]))))
    spills = len(_LOCAL_MEMORY.findall(machine_code))
    return Resources(target, _number(r"\bREG:(\d+)", report), spills, shared, names)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"the compiler's report has no {pattern!r}; its form has changed:\n{text[-2000:]}")
    return int(found[1])


def _amd(target: str, assembly: str, shared: int) -> Resources:
    spills = _number(r"\.vgpr_spill_count:\s*(\d+)", assembly) + _number(r"\.sgpr_spill_count:\s*(\d+)", assembly)
    registers = _number(r"\.vgpr_count:\s*(\d+)", assembly)  # of gfx90a and later: accumulation registers included
    return Resources(target, registers, spills, shared, tuple(sorted(set(_AMD_MATRIX.findall(assembly)))))
