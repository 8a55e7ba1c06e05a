"""Budgets as text, and the meters."""

import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neuroflux.errors import NeuroFluxError
from neuroflux.planning.memory import CpuMeter, format_bytes, make_meter, parse_bytes, set_allocator


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512 * 10**6),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5g", 500_000_000),
        ("512m", 512_000_000),
        ("256KB", 256_000),
        ("256 kib", 256 * 1024),
        ("1048576", 1048576),
        (1048576, 1048576),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_as_people_write_them(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["abc", "", "-5MB", "0", "0MB", "MB", "5XB", "1e9", "512 M B", "5i", "nan", "1,5GB"])
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(NeuroFluxError, match="write it like 512MB") as error:
        parse_bytes(text)
    assert "\n" not in str(error.value)


@given(st.integers(1, 10**6), st.sampled_from(["k", "M", "G"]), st.booleans())
def test_decimal_and_binary_units(number, prefix, binary):
    power = " kMG".index(prefix)
    base = 1024 if binary else 1000
    assert parse_bytes(f"{number}{prefix}{'i' if binary else ''}B") == number * base**power


@given(st.integers(1, 10**12))
def test_formatted_sizes_are_read_back_to_rounding(size):
    back = parse_bytes(format_bytes(size).replace(" ", ""))
    assert abs(Fraction(back) - size) <= max(size * Fraction(6, 100), 1)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
class TestCpuMeter:
    def test_sees_a_peak_that_is_gone_when_it_is_read(self):
        set_allocator(compact=True)
        meter = CpuMeter()
        meter.reset()
        block = np.ones(30_000_000 // 8)
        del block
        meter.release()
        assert 29e6 < meter.peak() < 36e6
        assert meter.current() < 4e6

    def test_reset_forgets_the_peak_but_not_the_highest(self):
        set_allocator(compact=True)
        meter = CpuMeter()
        block = np.ones(20_000_000 // 8)
        del block
        meter.release()
        meter.reset()
        assert meter.peak() < 5e6
        assert meter.highest > 19e6

    def test_reading_a_file_does_not_count(self, tmp_path):
        (tmp_path / "file").write_bytes(b"\1" * 40_000_000)
        meter = CpuMeter()
        mapped = np.memmap(tmp_path / "file", dtype=np.uint8, mode="r")
        assert int(mapped.sum(dtype=np.int64)) == 40_000_000
        assert meter.current() < 3e6


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_allocator_refuses_to_pass_the_budget_on_cuda():
    device = torch.device("cuda")
    meter = make_meter(device, 200_000_000)
    kept = torch.ones(10_000_000, device=device)
    assert meter.current() >= kept.numel() * 4
    with pytest.raises(torch.OutOfMemoryError):
        torch.ones(60_000_000, device=device)
    assert meter.peak() <= 200_000_000
