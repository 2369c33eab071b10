"""A small training job that says at every step, bit for bit, where it stands: `python training_job.py LOG STOP`.

A transformer with dropout under AdamW (and bfloat16 autocast on a GPU), with deterministic algorithms. Each step writes
one line to LOG: number, loss as hex, digest of all parameters and of the random state, CPU seconds of the main thread
and seconds of the step. It ends when STOP exists. It knows nothing of mxprobe.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 128, 4, 4, 64, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def digest(model: nn.Module, device: torch.device) -> str:
    """SHA-256 of parameters and random state."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    state = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    sha.update(state.numpy().tobytes())
    return sha.hexdigest()


def main(log: str, stop: str) -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # threads that wait for one another burn CPU time, and the more the busier the machine
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(512, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 512)).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with open(log, "w", buffering=1) as out:
        step = 0
        while not Path(stop).exists():
            cpu_s, wall_s = time.thread_time(), time.perf_counter()
            step += 1
            tokens = torch.randint(0, 512, (BATCH, CONTEXT), device=device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(tokens)
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = float(loss.item())
            times = time.thread_time() - cpu_s, time.perf_counter() - wall_s
            peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            line = {"step": step, "loss": value.hex(), "digest": digest(model, device), "times": times, "peak": peak}
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
