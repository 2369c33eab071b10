"""Calibration inputs: what is read from text and from token ids, how it is cut into batches, what is refused."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mxprobe.errors import UsageError
from mxprobe.scan.calibration import Inputs, calibration_files, read_inputs


def letters(lines: Sequence[str]) -> list[list[int]]:
    return [[ord(letter) - ord("a") for letter in line] for line in lines]


def read(path: Path, n_batches: int = 2, **limits: int) -> Inputs:
    return read_inputs(calibration_files(path), letters, n_batches=n_batches, vocabulary=26, **limits)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_lines_become_padded_batches(tmp_path: Path) -> None:
    inputs = read(written(tmp_path / "x.txt", "abc\n\nde\n   \nfghi\nz\n"))
    assert [batch.input_ids.tolist() for batch in inputs.batches] == [[[0, 1, 2]], [[3, 4, 0, 0], [5, 6, 7, 8]]]
    assert inputs.batches[1].attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    # Blank lines hold nothing; a single token has no successor and no context.
    assert (inputs.n_sequences, inputs.n_available, inputs.n_tokens, inputs.n_cut) == (3, 3, 9, 0)


def test_of_many_sequences_those_taken_are_spread_evenly(tmp_path: Path) -> None:
    ids = np.stack([np.arange(80) % 26, np.arange(80) // 26], 1)
    np.save(tmp_path / "x.npy", ids)
    inputs = read(tmp_path / "x.npy", n_batches=5)
    taken = torch.cat([batch.input_ids for batch in inputs.batches])
    assert taken.tolist() == ids[2::4].tolist()
    assert {len(batch.input_ids) for batch in inputs.batches} == {4}
    assert (inputs.n_sequences, inputs.n_available) == (20, 80)


def test_long_sequences_are_cut_and_counted(tmp_path: Path) -> None:
    inputs = read(written(tmp_path / "x.txt", "abcdef\nab"), max_tokens=4)
    assert inputs.batches[0].input_ids.tolist() == [[0, 1, 2, 3]]
    assert inputs.n_cut == 1


def test_a_directory_is_all_its_files_and_masks_are_kept(tmp_path: Path) -> None:
    written(tmp_path / "a.txt", "abc")
    written(tmp_path / "README.md", "not an input")
    ids, mask = torch.tensor([[7, 8, 9], [5, 6, 7]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    save_file({"input_ids": ids, "attention_mask": mask}, tmp_path / "b.safetensors")
    batches = read(tmp_path, n_batches=3).batches
    assert [batch.input_ids.tolist() for batch in batches] == [[[0, 1, 2]], [[8, 9]], [[5, 6, 7]]]


def test_what_cannot_be_an_input_is_refused_in_words(tmp_path: Path) -> None:
    np.save(tmp_path / "float.npy", np.zeros((2, 3)))
    np.save(tmp_path / "deep.npy", np.zeros((2, 3, 4), dtype=int))
    np.save(tmp_path / "large.npy", np.full((2, 3), 26))
    np.save(tmp_path / "negative.npy", np.full((2, 3), -1))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY")
    written(tmp_path / "blank.txt", "\n \n")
    (tmp_path / "empty").mkdir()
    for name, why in {
        "float.npy": "holds float64, not token ids",
        "deep.npy": r"must be \[n, T\], not \[2, 3, 4\]",
        "large.npy": "token id 26 is outside of the model's vocabulary of 26",
        "negative.npy": "token id -1 is outside",
        "w.safetensors": r"no integers `input_ids` \[n, T\]\n.*weight \(torch.float32\)",
        "latin.txt": "cannot be read as UTF-8 text",
        "torn.npy": "is not a numpy array",
        "blank.txt": "no sequence of two tokens or more",
        "empty": "holds no calibration file",
        "gone.txt": "no calibration file at",
    }.items():
        with pytest.raises(UsageError, match=why):
            read(tmp_path / name)
